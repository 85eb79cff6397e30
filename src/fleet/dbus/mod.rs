//! The D-Bus interfaces between manager, agents and clients: names, values, errors, and the
//! internal interfaces of the connection between a manager and an agent.

pub mod accept;
pub mod api;
pub mod bus;
pub mod connect;
pub mod errors;
pub mod internal;
pub mod names;
pub mod socket;
pub mod values;
