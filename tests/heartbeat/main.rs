//! The heartbeat trackers as a whole: simulated on paused time with every fault at once, and as real processes on real
//! stores.

// Much of this is tests in other words, which the lint cannot see.
#![allow(clippy::unwrap_used)]

mod aside;
mod clients;
mod cut_off;
mod door;
#[path = "../harness/mod.rs"]
mod harness;
mod hold;
mod late;
mod losses;
mod manager;
mod operator;
mod outage;
#[cfg(feature = "planted")]
mod planted;
mod process;
mod recovery;
mod replicas;
mod restored;
mod roles;
mod secure;
mod simulate;
mod trusted;
mod truth;
mod verdict;
mod words;
mod world;
