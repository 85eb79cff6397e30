//! Portcullis opens exactly the ports that services ask for, on exactly the machines they run on.
//!
//! | module | what it does |
//! |---|---|
//! | [`model`] | the vocabulary: names, ids, ports. Values that cannot hold nonsense |
//! | [`keeper`] | the embedded store: one durable node that speaks ZooKeeper's protocol |
//! | [`store`] | the typed tree over the keeper or a ZooKeeper ensemble; the only place that knows znodes |
//! | [`runtime`] | what every long-running part needs: signals, logs |
//! | [`heartbeat`] | who is alive: beats, two windows, and everybody told of each change |
//! | [`unit`] | the life of a unit: its charm, its workflow, its hooks, and the agents that tend them |
//! | [`status`] | one look at an environment, as YAML, JSON, tables or a picture |
//! | [`cli`] | the programs `juju` and `portcullis` as their users see them |
//!
//! Dependencies point one way: `cli -> {firewall, heartbeat, unit, status} -> {store, runtime} -> model`, and `keeper` stands by itself
//! below `store`. `tests/layout.rs` holds that. Start reading at [`store::Environment`] for what can be done, or at
//! [`cli::juju`] for what can be typed.

pub mod cli;
pub mod firewall;
pub mod heartbeat;
pub mod keeper;
pub mod model;
pub mod runtime;
pub mod status;
pub mod store;
pub mod unit;
