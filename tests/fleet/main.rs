//! The fleet on real nodes: user instances of systemd (see `node`), or machines that run systemd as
//! their first process and can lose their link (see `machine`). Needs root.

// Clippy does not recognize the scenarios as tests.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "../harness/mod.rs"]
mod harness;
// These tests read one page; tests/docs uses the rest.
#[allow(dead_code)]
#[path = "../docs/page.rs"]
mod page;

mod agent;
mod client;
mod contract;
mod environment;
mod foreign;
mod losses;
mod machine;
mod node;
mod proxies;
mod proxy_losses;
mod restarts;
mod security;
mod tutorial;
mod world;
