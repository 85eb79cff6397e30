//! The sections of a view. Each adds its part, in the order in which the caller lists them:
//! machines and services come first, since the others add to them. Pure. A part of the crate that
//! contributes to status fills one of these types; status does not name that part.

mod firewall;
mod heartbeat;
mod machines;
mod nodes;
mod services;

use super::view::View;

pub use firewall::Firewall;
pub use heartbeat::{Health, Heartbeat};
pub use machines::Machines;
pub use nodes::Nodes;
pub use services::Services;

/// One part's contribution to a view.
pub trait Section {
    fn add_to(&self, view: &mut View);
}
