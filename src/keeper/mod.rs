//! The embedded store: one durable server that implements ZooKeeper's client protocol. Every
//! ZooKeeper client and tool works with it, and a ZooKeeper ensemble can replace it by address.
//!
//! Reading order: `tree` and `state` are the pure state machine, and `txn` is the record that it
//! logs; `watch` and `session` are the pure tables beside it. `log`, `snapshot` and `storage` make
//! the state durable. `jute`, `proto` and `four_letter` are the wire formats. `requests` and
//! `reply` execute requests. `socket` accepts clients. `server` owns sockets and time.
//! Code in this module must not depend on what the znodes mean.

pub mod acl;
pub mod admission;
pub mod events;
pub mod four_letter;
pub mod handle;
pub mod housekeeping;
pub mod identities;
pub mod jute;
pub mod log;
pub mod outbox;
pub mod path;
pub mod proto;
pub mod refusals;
pub mod reply;
pub mod requests;
mod reserve;
pub mod server;
pub mod session;
pub mod snapshot;
pub mod socket;
pub mod state;
pub mod storage;
pub mod tree;
pub mod txn;
pub mod watch;
pub mod watch_requests;

pub use handle::{Config, Keeper, KeeperError, Limits, StopHandle, TlsListen};
