//! What a firewall can be told: the rule vocabulary, and the drivers that carry it out.

pub mod rule;
