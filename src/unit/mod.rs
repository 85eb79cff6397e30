//! The life of a unit on a machine: its charm, its workflow, its hooks and its agent.
//!
//! Start at [`workflow`] for the order of hooks, and at [`supervisor`] for the agents that run
//! them.

mod agent;
mod cgroup;
pub mod charm;
mod dir_lock;
pub mod hook;
pub mod hook_log;
pub mod host;
pub mod leave;
pub mod limits;
pub mod machine_problem;
mod processes;
pub mod resolve;
mod roster;
pub mod supervisor;
mod tree_walk;
mod uid_allocator;
pub mod workflow;
