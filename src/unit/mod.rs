//! The life of a unit on a machine: its charm, its workflow, its hooks, and the agents that tend them.
//!
//! Start at [`workflow`] for what happens when, and at [`units`] for who makes it happen.

mod agent;
mod cgroup;
pub mod charm;
pub mod directory;
mod ground;
pub mod hook;
mod leftover;
pub mod limits;
pub mod output;
pub mod pack;
pub mod problem;
pub mod resolve;
mod roll;
pub mod site;
pub mod units;
mod users;
mod walk;
pub mod workflow;
