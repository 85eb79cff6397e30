//! Several machines: three network namespaces on one bridge, a real ZooKeeper ensemble of three,
//! the real programs and the kernel's firewalls. After any process is killed or any machine is
//! disconnected, the open ports become correct again, and a port of a service that is not exposed
//! is never reachable. Needs root, `ip`, `nft` and `nsenter`.

// Clippy does not recognize the scenarios as tests.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod capture;
mod connections;
mod ensemble;
mod faults;
#[path = "../harness/mod.rs"]
mod harness;
mod net;
#[path = "../../provider/tests/netns/mod.rs"]
#[allow(dead_code)]
mod netns;
// Shared with the CLI tests; only part of it is used here.
#[allow(dead_code)]
#[path = "../cli/operator.rs"]
mod operator;

mod world;
