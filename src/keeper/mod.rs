//! The embedded store: one durable node that speaks ZooKeeper's client protocol, so that every ZooKeeper client and tool
//! works on it, and an ensemble can take its place by address.
//!
//! Read it from the inside out: `tree` and `state` are the pure state machine, `txn` what it logs, `watch` and `session`
//! the pure tables beside it; `log`, `snapshot` and `storage` make it durable; `jute`, `proto` and `words` are the wire;
//! `serve` and `reply` give requests their meaning; `door` and `tls` are how clients come in; `server` owns sockets and time. Nothing here knows what the znodes mean.

pub mod acl;
pub mod admission;
pub mod door;
pub mod events;
pub mod identities;
pub mod jute;
pub mod log;
pub mod outbox;
pub mod path;
pub mod proto;
pub mod refusals;
pub mod reply;
mod reserve;
pub mod serve;
pub mod server;
pub mod session;
pub mod snapshot;
pub mod start;
pub mod state;
pub mod storage;
pub mod tls;
pub mod tree;
pub mod txn;
pub mod upkeep;
pub mod watch;
pub mod watching;
pub mod words;

pub use start::{Config, Keeper, KeeperError, Limits, StopHandle};
