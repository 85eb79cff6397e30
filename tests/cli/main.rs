//! The real programs, run against Apache ZooKeeper and against the embedded keeper with one list of
//! scenarios. The store itself is tested elsewhere.

// Scenarios are tests, which the lint does not recognise.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod controller;
mod credentials;
mod daemon;
mod demo;
mod faults;
mod golden;
mod happy_path;
#[path = "../harness/mod.rs"]
mod harness;
mod heartbeat;
mod hook_users;
mod join;
mod machine;
#[path = "../../provider/tests/netns/mod.rs"]
#[allow(dead_code)]
mod netns;
mod operator;
mod operators;
mod plain_machine;
mod proxy;
mod refusals;
mod status_watch;
mod tls_store;
mod trust;
mod up_nftables;
