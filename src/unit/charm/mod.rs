//! Charms: their metadata, their directory on disk, and the archive in which the store keeps them.

pub mod archive;
pub mod directory;
pub mod metadata;
