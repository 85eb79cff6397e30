//! The heartbeat trackers as a whole: simulated on paused time with many faults, and as real
//! processes on real stores.

// Helpers of tests unwrap, and the lint cannot see that they belong to tests.
#![allow(clippy::unwrap_used)]

mod api;
#[path = "../harness/authority.rs"]
mod authority;
mod clients;
mod cut_off;
#[path = "../harness/mod.rs"]
mod harness;
mod hold;
mod invariants;
mod late;
mod losses;
mod manager;
#[cfg(feature = "mutants")]
mod mutants;
mod operator;
mod oracle;
mod outage;
mod problem_bodies;
mod process;
mod recovery;
mod rejected;
mod replicas;
mod restored;
mod roles;
mod secure;
mod simulate;
mod trusted;
mod world;
