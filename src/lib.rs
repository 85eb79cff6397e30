//! Portcullis opens exactly the ports that services ask for, on exactly the machines they run on.
//!
//! | module | what it does |
//! |---|---|
//! | [`model`] | the vocabulary: names, ids, ports. Values that cannot hold nonsense |
//! | [`keeper`] | the embedded store: one durable node that speaks ZooKeeper's protocol |
//! | [`store`] | the typed tree over the keeper or a ZooKeeper ensemble; the only place that knows znodes |
//! | [`net`] | listeners, TLS, the HTTP server and client |
//! | [`runtime`] | what every long-running part needs: signals, logs |
//! | [`machine`] | the presence of a machine in the store, its machine file and its systemd unit |
//! | [`firewall`] | wanted rules against real rules, per machine, through a provider |
//! | [`provision`] | instances for machines, through a provider |
//! | [`heartbeat`] | who is alive: beats, two windows, and everybody told of each change |
//! | [`unit`] | the life of a unit: its charm, its workflow, its hooks, and the agents that tend them |
//! | [`status`] | one look at an environment, as YAML, JSON, tables or a picture |
//! | [`cli`] | the programs `juju` and `portcullis` as their users see them |
//!
//! Dependencies point one way: `cli -> {firewall, provision, heartbeat, unit, status} -> machine -> store
//! -> keeper -> net -> runtime -> model`. No part names another. `tests/layout.rs` checks that. Start
//! reading at [`store::Environment`] for the operations of an environment, or at
//! [`cli::juju`] for what can be typed.

pub mod cli;
pub mod firewall;
pub mod heartbeat;
pub mod keeper;
pub mod machine;
pub mod model;
pub mod net;
pub mod provision;
pub mod runtime;
pub mod status;
pub mod store;
pub mod unit;

pub use portcullis_provider::{mutant, mutants};
