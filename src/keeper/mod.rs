//! The embedded store: one durable node that speaks ZooKeeper's client protocol.

pub mod acl;
pub mod jute;
pub mod path;
pub mod proto;
pub mod session;
pub mod state;
pub mod tree;
pub mod txn;
pub mod watch;
