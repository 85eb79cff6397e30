//! The state of an environment for people. `sections` turn a [`Snapshot`](crate::store::Snapshot)
//! and the results of other parts into a [`View`], `render` turns that into text. Nothing here
//! reads the store.

pub mod render;
pub mod sections;
#[cfg(test)]
mod tests;
pub mod view;

pub use sections::Section;
pub use view::{Scope, View};
