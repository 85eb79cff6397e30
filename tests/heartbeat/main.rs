//! The heartbeat trackers as a whole: simulated on paused time with every fault at once, and as real processes.

#[path = "../harness/mod.rs"]
mod harness;
mod manager;
mod simulate;
mod world;
