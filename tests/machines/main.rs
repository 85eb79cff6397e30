//! More than one machine: three network namespaces on one bridge, a real ZooKeeper ensemble of three beside them, the real
//! programs and the kernel's own firewalls. Whatever dies or is cut off, the ports end up as they should be, and one
//! that nobody exposed is never reached. Needs root, `ip`, `nft` and `nsenter`.

// Scenarios are tests, though the lint cannot see it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod ensemble;
#[path = "../harness/mod.rs"]
mod harness;
mod net;
#[path = "../../provider/tests/netns/mod.rs"]
#[allow(dead_code)]
mod netns;
// Shared with the tests of the programs; not all of it is needed here.
#[allow(dead_code)]
#[path = "../cli/operator.rs"]
mod operator;
mod story;
mod world;
