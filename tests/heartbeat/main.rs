//! The heartbeat trackers as a whole: simulated on paused time with every fault at once, and as real processes on real
//! stores.

// Much of this is tests in other words, which the lint cannot see.
#![allow(clippy::unwrap_used)]

mod aside;
mod clients;
mod door;
#[path = "../harness/mod.rs"]
mod harness;
mod hold;
mod losses;
mod manager;
mod operator;
mod outage;
mod process;
mod replicas;
mod roles;
mod secure;
mod simulate;
mod trusted;
mod truth;
mod verdict;
mod words;
mod world;
