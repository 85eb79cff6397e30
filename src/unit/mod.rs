//! The life of a unit on a machine: its charm.

pub mod charm;
pub mod directory;
pub mod pack;
