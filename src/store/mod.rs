//! The typed tree: services, units, machines, ports and flags, kept in ZooKeeper or in the embedded keeper. The only
//! place that knows znodes; everything above speaks of services, units and machines.
//!
//! Start at [`Environment`] for what can be done, at [`paths`] for where it is kept, at [`acl`] for who may touch it.
//! Everything goes through [`Tree`], which has one implementation over the wire and one in process.

mod accept;
pub mod acl;
mod address;
pub mod changes;
mod charms;
mod credentials;
pub mod election;
mod environment;
mod error;
mod machines;
pub mod memory;
mod operation;
pub mod paths;
mod placement;
mod ports;
pub mod records;
pub mod requests;
mod retry;
pub mod rollback;
mod services;
pub mod stopping;
mod subtree;
pub mod tree;
mod units;
mod zk;

pub use accept::Acceptance;
pub use address::Address;
pub use charms::{MAX_CHARM_BYTES, charm};
pub use credentials::{Credential, Identity, InvalidCredential};
pub use environment::{Bootstrap, Environment};
pub use error::Error;
pub use memory::{MemoryStore, MemoryTree};
pub use operation::Operation;
pub use ports::UnitPorts;
pub use services::{Deploy, Deployed, Exposed, Flag};
pub use tree::Tree;
pub use units::{MAX_UNITS, Placed};
pub use zk::{ZkFeed, ZkTree};
