//! What is going on in an environment, in one read: `collect` looks, `view` decides what that means and what is
//! shown, `render` says how it looks. Only `collect` knows the store.

pub mod collect;
pub mod glob;
pub mod render;
#[cfg(test)]
mod tests;
pub mod view;

pub use collect::collect;
pub use view::{Notes, Scope, Snapshot, View};
