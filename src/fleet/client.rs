//! A client of a manager's public API, on a bus or on a connection to the manager itself. Every
//! call and every wait is bounded. Output for people does not belong here.

mod api;
mod error;
mod job;
mod monitor;
mod signals;

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{Instant, sleep, timeout};
use zbus::Connection;
use zbus::proxy::CacheProperties;

use self::api::{ManagerProxy, NodeProxy};
pub use self::error::ClientError;
pub use self::job::{Job, JobRequest};
pub use self::monitor::Change;
use super::address::ManagerAddress;
use super::dbus::bus::Bus;
use super::dbus::connect::{Security, connect};
use super::dbus::errors::CallError;
use super::dbus::names::MANAGER_PATH;
use super::dbus::values::{Properties, UnitFileChange};
use super::name::escape;

/// The longest time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before the addresses of a manager are tried again.
const CONNECT_PAUSE: Duration = Duration::from_millis(500);
/// Calls that are sent before the reply of the first one.
const CALLS_AT_ONCE: usize = 64;

/// A connection to a manager.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    reply_timeout: Duration,
}

/// A node of the manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    pub status: String,
    pub address: Option<String>,
    /// Milliseconds since 1970.
    pub last_seen_ms: Option<u64>,
}

/// A loaded systemd unit of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    pub node: String,
    pub name: String,
    pub description: String,
    pub load: String,
    pub active: String,
    pub sub: String,
}

/// A proxy service, or one that failed or ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proxy {
    pub source: String,
    pub name: String,
    pub target: String,
    pub unit: String,
    pub state: String,
    /// Milliseconds since 1970.
    pub since_ms: u64,
    /// Why it failed or ended.
    pub reason: String,
}

/// The observed properties of a systemd unit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitState {
    pub load: String,
    pub active: String,
    pub sub: String,
    /// Empty if the unit has no file.
    pub file: String,
    /// `None` for types of units that have no result.
    pub result: Option<String>,
}

impl UnitState {
    fn of(properties: &Properties) -> Self {
        let text = |name: &str| {
            let value = properties.get(name)?;
            <&str>::try_from(&**value).ok().map(str::to_owned)
        };
        let present = |name| text(name).unwrap_or_default();
        Self {
            load: present("LoadState"),
            active: present("ActiveState"),
            sub: present("SubState"),
            file: present("UnitFileState"),
            result: text("Result"),
        }
    }
}

/// A method of a node that takes one unit and returns nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnitCall {
    Freeze,
    Thaw,
    ResetFailed,
}

impl Client {
    /// Connects to the manager on a bus.
    ///
    /// # Errors
    /// If the bus is not reachable. If no manager is on the bus, the first call fails.
    pub async fn on_bus(bus: &Bus, reply_timeout: Duration) -> Result<Self, ClientError> {
        let failed = |problem| ClientError::Bus { bus: bus.to_string(), problem };
        match timeout(CONNECT_TIMEOUT.min(reply_timeout), bus.connect(reply_timeout)).await {
            Ok(Ok(connection)) => Ok(Self { connection, reply_timeout }),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed("no answer".to_owned())),
        }
    }

    /// Connects to the first of these addresses at which a manager answers. Tries them again for a
    /// while: another manager may be about to lead.
    ///
    /// # Errors
    /// The error at the last address.
    pub async fn to_manager(
        addresses: &[ManagerAddress],
        security: &Security,
        reply_timeout: Duration,
    ) -> Result<Self, ClientError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT.min(reply_timeout);
        let mut failed = ClientError::NoManager;
        loop {
            for address in addresses {
                match connect(address, security).await {
                    Ok(peer) => return Ok(Self::peer_to_peer(peer.connection, reply_timeout)),
                    Err(error) => failed = ClientError::Connect(error),
                }
            }
            // An attempt at one address is short, so that the next address is tried soon.
            if addresses.is_empty() || Instant::now() + CONNECT_PAUSE >= deadline {
                return Err(failed);
            }
            sleep(CONNECT_PAUSE).await;
        }
    }

    /// A client on a connection to the manager itself.
    pub fn peer_to_peer(connection: Connection, reply_timeout: Duration) -> Self {
        Self { connection, reply_timeout }
    }

    /// # Errors
    /// If a call fails.
    pub async fn nodes(&self) -> Result<Vec<Node>, ClientError> {
        let nodes = self.reply(self.manager().await?.list_nodes().await, None)?;
        let details = nodes.into_iter().map(|(name, _, status)| self.node_details(name, status));
        let details: Vec<_> = stream::iter(details).buffered(CALLS_AT_ONCE).collect().await;
        // A node that was removed meanwhile is not an error.
        details.into_iter().filter(|node| !matches!(node, Err(ClientError::NoSuchNode(_)))).collect()
    }

    async fn node_details(&self, name: String, status: String) -> Result<Node, ClientError> {
        let node = self.node(&name).await?;
        let address = self.reply(node.peer_ip().await, Some(&name))?;
        let last_seen_us = self.reply(node.last_seen_timestamp().await, Some(&name))?;
        let address = (!address.is_empty()).then_some(address);
        let last_seen_ms = (last_seen_us > 0).then_some(last_seen_us / 1000);
        Ok(Node { name, status, address, last_seen_ms })
    }

    /// # Errors
    /// If the call fails.
    pub async fn proxies(&self) -> Result<Vec<Proxy>, ClientError> {
        let rows = self.reply(self.manager().await?.list_proxies().await, None)?;
        let proxy = |(source, name, target, unit, state, since_us, reason): api::ProxyRow| Proxy {
            source,
            name,
            target,
            unit,
            state,
            since_ms: since_us / 1000,
            reason,
        };
        Ok(rows.into_iter().map(proxy).collect())
    }

    /// Returns the loaded units of one node, or of all connected nodes.
    ///
    /// # Errors
    /// If the node is unknown or offline, or if a call fails.
    pub async fn units(&self, node: Option<&str>) -> Result<Vec<Unit>, ClientError> {
        let Some(name) = node else {
            let rows = self.reply(self.manager().await?.list_units().await, None)?;
            let unit = |row: super::dbus::values::NodeUnitRow| {
                let (node, name, description, load, active, sub, ..) = row;
                Unit { node, name, description, load, active, sub }
            };
            return Ok(rows.into_iter().map(unit).collect());
        };
        let rows = self.reply(self.node(name).await?.list_units().await, node)?;
        let unit = |row: super::dbus::values::UnitRow| {
            let (unit, description, load, active, sub, ..) = row;
            Unit { node: name.to_owned(), name: unit, description, load, active, sub }
        };
        Ok(rows.into_iter().map(unit).collect())
    }

    /// Returns the state of a unit. The load state of an unknown unit is `not-found`.
    ///
    /// # Errors
    /// If the node is unknown or offline, or if the call fails.
    pub async fn unit_state(&self, node: &str, unit: &str) -> Result<UnitState, ClientError> {
        let properties = self.node(node).await?.get_unit_properties(unit).await;
        Ok(UnitState::of(&self.reply(properties, Some(node))?))
    }

    /// Returns the last entries of a unit's journal as JSON, or those that follow `cursor`.
    ///
    /// # Errors
    /// If the node is unknown or offline, or refuses the call.
    pub async fn journal(
        &self,
        node: &str,
        unit: &str,
        entries: u32,
        cursor: &str,
    ) -> Result<Vec<String>, ClientError> {
        self.reply(self.node(node).await?.read_journal(unit, entries, cursor).await, Some(node))
    }

    /// Sends a signal to processes of a unit: `who` is `main`, `control` or `all`.
    ///
    /// # Errors
    /// If the node or systemd refuses the call.
    pub async fn kill(&self, node: &str, unit: &str, who: &str, signal: i32) -> Result<(), ClientError> {
        self.reply(self.node(node).await?.kill_unit(unit, who, signal).await, Some(node))
    }

    /// # Errors
    /// If the node or systemd refuses the call.
    pub async fn call_unit(&self, node: &str, unit: &str, call: UnitCall) -> Result<(), ClientError> {
        let object = self.node(node).await?;
        let reply = match call {
            UnitCall::Freeze => object.freeze_unit(unit).await,
            UnitCall::Thaw => object.thaw_unit(unit).await,
            UnitCall::ResetFailed => object.reset_failed_unit(unit).await,
        };
        self.reply(reply, Some(node))
    }

    /// Enables unit files, and makes systemd reload its unit files if any has changed.
    ///
    /// # Errors
    /// If the node or systemd refuses the call.
    pub async fn enable(&self, node: &str, units: &[&str]) -> Result<Vec<UnitFileChange>, ClientError> {
        let (_, changes) =
            self.reply(self.node(node).await?.enable_unit_files(units, false, false).await, Some(node))?;
        self.reload_after(node, changes).await
    }

    /// Disables unit files, like [`Self::enable`].
    ///
    /// # Errors
    /// If the node or systemd refuses the call.
    pub async fn disable(&self, node: &str, units: &[&str]) -> Result<Vec<UnitFileChange>, ClientError> {
        let changes = self.node(node).await?.disable_unit_files(units, false).await;
        let changes = self.reply(changes, Some(node))?;
        self.reload_after(node, changes).await
    }

    async fn reload_after(
        &self,
        node: &str,
        changes: Vec<UnitFileChange>,
    ) -> Result<Vec<UnitFileChange>, ClientError> {
        if !changes.is_empty() {
            self.reply(self.node(node).await?.reload().await, Some(node))?;
        }
        Ok(changes)
    }

    async fn manager(&self) -> Result<ManagerProxy<'static>, ClientError> {
        let proxy = ManagerProxy::builder(&self.connection).cache_properties(CacheProperties::No);
        self.reply(proxy.build().await, None)
    }

    async fn node(&self, name: &str) -> Result<NodeProxy<'static>, ClientError> {
        let path = format!("{MANAGER_PATH}/node/{}", escape(name));
        let proxy = NodeProxy::builder(&self.connection).path(path).cache_properties(CacheProperties::No);
        self.reply(proxy.build().await, Some(name))
    }

    /// Translates the error of a call to the manager, or to the object of a node.
    fn reply<T>(&self, reply: zbus::Result<T>, node: Option<&str>) -> Result<T, ClientError> {
        reply.map_err(|error| {
            if self.connection.is_closed() {
                return ClientError::ManagerLost;
            }
            ClientError::from_call(CallError::from(error), node, self.reply_timeout.as_secs())
        })
    }
}

#[cfg(test)]
mod tests;
