//! Portcullis opens exactly the ports that services ask for, on exactly the machines they run on.
//!
//! | module | what it does |
//! |---|---|
//! | [`model`] | names, ids and ports: values that are always valid |
//! | [`keeper`] | the embedded store: one durable server with ZooKeeper's protocol |
//! | [`store`] | typed access to the tree of the keeper or a ZooKeeper ensemble; only it writes znodes |
//! | [`net`] | listeners, TLS, the HTTP server and client |
//! | [`runtime`] | shared by all agents: role lifecycle, reconcile loop, retries, signals, logs, metrics |
//! | [`identity`] | certificates of machines, issued and renewed through the store |
//! | [`machine`] | the presence of a machine in the store, its machine file and its systemd unit |
//! | [`firewall`] | compares wanted with actual firewall rules of each machine and applies the difference |
//! | [`provision`] | launches and terminates the instances of machines through a provider |
//! | [`heartbeat`] | detects silent components and notifies the state manager and a webhook |
//! | [`unit`] | runs units: their charms, workflows, hooks and agents |
//! | `fleet` | systemd on every machine under one D-Bus API (feature `fleet`) |
//! | [`status`] | shows one snapshot of an environment as YAML, JSON, tables or a graph |
//! | [`cli`] | the commands of the programs `juju` and `portcullis` |
//!
//! Dependencies point one way: `cli -> {firewall, provision, heartbeat, unit, fleet, status} ->
//! machine -> store -> keeper -> net -> runtime -> model`. No part names another. `tests/layout.rs`
//! checks that. Start reading at [`store::Environment`] for the operations of an environment, or at
//! [`cli::juju`] for the commands.

pub mod cli;
pub mod firewall;
#[cfg(feature = "fleet")]
pub mod fleet;
pub mod heartbeat;
pub mod identity;
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
