//! A client's monitor: every change of systemd units and nodes, until the caller stops it.

use zbus::Message;

use super::error::ClientError;
use super::signals::Signals;
use super::{Client, UnitState};
use crate::fleet::dbus::names::{MANAGER_INTERFACE, MANAGER_PATH, MONITOR_INTERFACE};
use crate::fleet::dbus::values::Properties;

/// A change that a monitor reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The state of a unit, at the beginning and after each change.
    Unit { node: String, unit: String, state: UnitState },
    /// The unit is no longer loaded, or its node was lost.
    Removed { node: String, unit: String, is_node_lost: bool },
    /// A node was connected or lost.
    Node { node: String, status: String },
}

impl Client {
    /// Calls `report` with each change of the units that match `unit`, a glob, on `node`; an empty
    /// name stands for all nodes. Ends only with an error, or when the caller drops the future.
    ///
    /// # Errors
    /// If the manager refuses the subscription or is lost.
    pub async fn monitor(
        &self,
        node: &str,
        unit: &str,
        mut report: impl FnMut(Change),
    ) -> Result<(), ClientError> {
        let mut signals = Signals::read(&self.connection).await?;
        let path = signals.during(self.create_monitor(), |_| {}).await?;
        for (object, interface, member) in [
            (path.as_str(), MONITOR_INTERFACE, "UnitPropertiesChanged"),
            (path.as_str(), MONITOR_INTERFACE, "UnitRemoved"),
            (MANAGER_PATH, MANAGER_INTERFACE, "NodeConnectionStateChanged"),
        ] {
            signals.add_match(&self.connection, Some(object), interface, member).await?;
        }
        let mut handle = |signal: &Message| {
            if let Some(change) = change(signal, &path, node) {
                report(change);
            }
        };
        signals.during(self.subscribe(&path, node, unit), &mut handle).await?;
        loop {
            handle(&signals.next().await?);
        }
    }

    async fn create_monitor(&self) -> Result<String, ClientError> {
        let path = self.manager().await?.create_monitor().await;
        Ok(self.reply(path, None)?.as_str().to_owned())
    }

    async fn subscribe(&self, path: &str, node: &str, unit: &str) -> Result<(), ClientError> {
        let monitor = super::api::MonitorProxy::builder(&self.connection).path(path).build().await;
        let monitor = self.reply(monitor, None)?;
        self.reply(monitor.subscribe(node, unit).await, None).map(|_id| ())
    }
}

/// Returns the change that a signal reports; `None` for signals of other monitors and nodes.
fn change(signal: &Message, monitor: &str, wanted: &str) -> Option<Change> {
    let header = signal.header();
    let (interface, member) = (header.interface()?.as_str(), header.member()?.as_str());
    let body = signal.body();
    match (interface, member) {
        (MANAGER_INTERFACE, "NodeConnectionStateChanged") => {
            let (node, status) = body.deserialize::<(String, String)>().ok()?;
            (wanted.is_empty() || wanted == node).then_some(Change::Node { node, status })
        }
        _ if header.path()?.as_str() != monitor || interface != MONITOR_INTERFACE => None,
        (_, "UnitPropertiesChanged") => {
            let (node, unit, properties) = body.deserialize::<(String, String, Properties)>().ok()?;
            Some(Change::Unit { node, unit, state: UnitState::of(&properties) })
        }
        (_, "UnitRemoved") => {
            let (node, unit, reason) = body.deserialize::<(String, String, String)>().ok()?;
            Some(Change::Removed { node, unit, is_node_lost: reason == "virtual" })
        }
        _ => None,
    }
}
