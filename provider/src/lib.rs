//! What a firewall can be told: rules, and the drivers that carry them out.
