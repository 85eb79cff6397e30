//! The life of a unit on a machine. So far only the part that `deploy` needs: what a charm must say about itself.

pub mod charm;
