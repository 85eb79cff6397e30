//! The typed tree: services, units, machines, ports and flags, kept in ZooKeeper or in the embedded
//! keeper. No other part builds paths or writes znodes; the others use services, units and
//! machines.
//!
//! Start at [`Environment`] for the operations, at [`paths`] for the layout, at [`acl`] for the
//! rights. Everything goes through [`Tree`], which has one implementation over the wire and one in
//! memory.
//!
//! Every operation can fail because the store is unreachable, refuses the credentials or is full:
//! [`tree::Error`]. `# Errors` of a function names only what else can happen.

mod accept;
pub mod acl;
pub mod address;
mod cas_retry;
pub mod certificates;
pub mod changes;
mod charms;
mod credentials;
mod delete_tree;
pub mod dependencies;
mod environment;
mod error;
pub mod failed_stops;
pub mod firewall_reports;
pub mod fleet;
pub mod heartbeat;
mod idempotency;
pub mod joining;
pub mod lease;
mod machines;
pub mod memory;
pub mod operators;
pub mod paths;
mod placement;
mod ports;
pub mod presence;
pub mod records;
pub mod requests;
pub mod rollback;
mod services;
pub mod snapshot;
mod termination;
pub mod tombstones;
pub mod tree;
mod units;
pub mod update;
mod zk;

pub use accept::{Acceptance, Accepted};
pub use address::Address;
pub use charms::{MAX_CHARM_BYTES, charm};
pub use credentials::{Credential, Identity, InvalidCredential, unit_credentials_file};
pub use environment::{Bootstrap, Environment};
pub use error::{Error, is_transient, tree_error_in};
pub use idempotency::IdempotencyKey;
pub use machines::{
    NewMachine, Termination, list_machine_units, list_machines, record_machine, report_machine_problem,
};
pub use memory::{MemoryStore, MemoryTree};
pub use ports::UnitPorts;
pub use services::{Deploy, Deployed, Exposed, Flag, is_exposed, unexposed_by_command};
pub use snapshot::Snapshot;
pub use tree::Tree;
pub use units::{MAX_UNITS, Placed, UnitRead, read_unit, unit_exists, write_unit_state};
pub use update::update;
pub use zk::{ZkFeed, ZkTree};
