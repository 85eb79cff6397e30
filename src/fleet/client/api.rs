//! The public interfaces of a manager as zbus proxies. The table in the specification of the fleet
//! is the contract; signals are decoded in `signals`.

use zbus::{OwnedObjectPath, proxy};

use crate::fleet::dbus::values::{NodeUnitRow, Properties, UnitFileChange, UnitRow};

/// Source node, name, target node, unit, state, microseconds since 1970, reason.
pub(super) type ProxyRow = (String, String, String, String, String, u64, String);

#[proxy(
    interface = "org.containers.hirte.Manager",
    default_service = "org.containers.hirte",
    default_path = "/org/containers/hirte"
)]
pub(super) trait Manager {
    /// Returns name, object path and status of every node.
    fn list_nodes(&self) -> zbus::Result<Vec<(String, OwnedObjectPath, String)>>;

    /// Returns the systemd units of all connected nodes.
    fn list_units(&self) -> zbus::Result<Vec<NodeUnitRow>>;

    /// Returns all proxy services.
    fn list_proxies(&self) -> zbus::Result<Vec<ProxyRow>>;

    fn create_monitor(&self) -> zbus::Result<OwnedObjectPath>;
}

#[proxy(interface = "org.containers.hirte.Monitor", default_service = "org.containers.hirte")]
pub(super) trait Monitor {
    fn subscribe(&self, node: &str, unit: &str) -> zbus::Result<u32>;
}

#[proxy(interface = "org.containers.hirte.Node", default_service = "org.containers.hirte")]
pub(super) trait Node {
    fn start_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn reload_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn restart_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;

    fn kill_unit(&self, name: &str, who: &str, signal: i32) -> zbus::Result<()>;

    fn freeze_unit(&self, name: &str) -> zbus::Result<()>;

    fn thaw_unit(&self, name: &str) -> zbus::Result<()>;

    fn reset_failed_unit(&self, name: &str) -> zbus::Result<()>;

    fn get_unit_properties(&self, name: &str) -> zbus::Result<Properties>;

    fn list_units(&self) -> zbus::Result<Vec<UnitRow>>;

    fn read_journal(&self, name: &str, entries: u32, cursor: &str) -> zbus::Result<Vec<String>>;

    fn enable_unit_files(
        &self,
        files: &[&str],
        runtime: bool,
        force: bool,
    ) -> zbus::Result<(bool, Vec<UnitFileChange>)>;

    fn disable_unit_files(&self, files: &[&str], runtime: bool) -> zbus::Result<Vec<UnitFileChange>>;

    /// Reads all unit files again.
    fn reload(&self) -> zbus::Result<()>;

    #[zbus(property)]
    fn peer_ip(&self) -> zbus::Result<String>;

    /// Microseconds since 1970; 0 if the node was never connected.
    #[zbus(property)]
    fn last_seen_timestamp(&self) -> zbus::Result<u64>;
}
