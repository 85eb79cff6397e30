//! Units on a machine: real programs, hooks and processes, with one list of scenarios for Apache
//! ZooKeeper and the embedded keeper. The unit tests of the workflow cover its single steps.

// Clippy does not recognize the scenarios as tests.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod full_disk;
#[path = "../harness/mod.rs"]
mod harness;
mod isolation;
mod killed;
mod killed_join;
mod killed_up;
mod life;
mod many_units;
mod misbehaving;
// Shared with the disk tests; only part of it is used here.
#[allow(dead_code)]
#[path = "../disk/mounts.rs"]
mod mounts;
// Shared with the CLI tests; only part of it is used here.
#[allow(dead_code)]
#[path = "../cli/operator.rs"]
mod operator;
mod restored;
mod strace;
mod world;
