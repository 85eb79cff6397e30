//! Control of systemd on every machine through one D-Bus API: the manager, the agents on the nodes,
//! and the connections between them. A node is a machine as the manager sees it. The decisions are
//! in pure files; no other part uses D-Bus.

pub mod address;
pub mod agent;
pub mod client;
pub mod config;
pub mod dbus;
pub mod discovery;
pub mod environment;
pub mod helper;
pub mod ini;
pub mod job;
pub mod liveness;
pub mod manager;
pub mod monitor;
pub mod name;
pub mod policy;
pub mod proxy;
pub mod systemd;
