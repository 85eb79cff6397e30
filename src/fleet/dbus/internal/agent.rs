//! The internal interface of an agent.

use zbus::{OwnedObjectPath, OwnedVariant, proxy};

use crate::fleet::dbus::values::{AuxiliaryUnit, Properties, Setting, UnitFileChange, UnitFileRow, UnitRow};

/// The agent of a node.
#[proxy(
    interface = "org.containers.hirte.internal.Agent",
    default_service = "org.containers.hirte",
    default_path = "/org/containers/hirte/internal/agent"
)]
pub trait Agent {
    fn start_unit(&self, name: &str, mode: &str, id: u32) -> zbus::Result<()>;

    fn stop_unit(&self, name: &str, mode: &str, id: u32) -> zbus::Result<()>;

    fn reload_unit(&self, name: &str, mode: &str, id: u32) -> zbus::Result<()>;

    fn restart_unit(&self, name: &str, mode: &str, id: u32) -> zbus::Result<()>;

    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[Setting],
        auxiliary: &[AuxiliaryUnit],
        id: u32,
    ) -> zbus::Result<()>;

    /// Cancels the systemd job that belongs to the manager's job `id`.
    fn job_cancel(&self, id: u32) -> zbus::Result<()>;

    fn kill_unit(&self, name: &str, who: &str, signal: i32) -> zbus::Result<()>;

    fn freeze_unit(&self, name: &str) -> zbus::Result<()>;

    fn thaw_unit(&self, name: &str) -> zbus::Result<()>;

    /// Returns all properties of an interface of the unit. An empty `interface` means
    /// `OBSERVED_PROPERTIES`.
    fn get_unit_properties(&self, name: &str, interface: &str) -> zbus::Result<Properties>;

    /// Returns one property. An empty `interface` means that of the unit's type, then
    /// `org.freedesktop.systemd1.Unit`.
    fn get_unit_property(&self, name: &str, interface: &str, property: &str) -> zbus::Result<OwnedVariant>;

    fn set_unit_properties(&self, name: &str, runtime: bool, properties: &[Setting]) -> zbus::Result<()>;

    fn list_units(&self) -> zbus::Result<Vec<UnitRow>>;

    /// Returns the last entries of a unit's journal as JSON, or those that follow `cursor`.
    fn read_journal(&self, name: &str, entries: u32, cursor: &str) -> zbus::Result<Vec<String>>;

    fn list_unit_files(&self) -> zbus::Result<Vec<UnitFileRow>>;

    fn get_unit_file_state(&self, file: &str) -> zbus::Result<String>;

    fn enable_unit_files(
        &self,
        files: &[&str],
        runtime: bool,
        force: bool,
    ) -> zbus::Result<(bool, Vec<UnitFileChange>)>;

    fn disable_unit_files(&self, files: &[&str], runtime: bool) -> zbus::Result<Vec<UnitFileChange>>;

    /// Reads all unit files again, as `systemctl daemon-reload` does.
    fn reload(&self) -> zbus::Result<()>;

    fn reset_failed(&self) -> zbus::Result<()>;

    fn reset_failed_unit(&self, name: &str) -> zbus::Result<()>;

    fn get_default_target(&self) -> zbus::Result<String>;

    fn set_default_target(&self, name: &str, force: bool) -> zbus::Result<Vec<UnitFileChange>>;

    fn subscribe(&self, unit: &str) -> zbus::Result<()>;

    fn unsubscribe(&self, unit: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    fn job_done(&self, id: u32, result: &str) -> zbus::Result<()>;

    /// Reports that systemd's job went from `waiting` to `running`.
    #[zbus(signal)]
    fn job_state_changed(&self, id: u32, state: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    fn unit_properties_changed(&self, unit: &str, properties: Properties) -> zbus::Result<()>;

    #[zbus(signal)]
    fn unit_new(&self, unit: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    fn unit_removed(&self, unit: &str) -> zbus::Result<()>;

    /// Announces the units that cannot start before the proxy, which `ProxyNew` announces next.
    #[zbus(signal)]
    fn proxy_dependents(&self, proxy: OwnedObjectPath, units: Vec<String>) -> zbus::Result<()>;

    /// Announces a proxy that waits for a unit of another node.
    #[zbus(signal)]
    fn proxy_new(&self, node: &str, unit: &str, proxy: OwnedObjectPath) -> zbus::Result<()>;

    /// Announces a proxy that became active before, on this instance of the target's systemd.
    #[zbus(signal)]
    fn proxy_established(
        &self,
        node: &str,
        unit: &str,
        proxy: OwnedObjectPath,
        instance: u64,
    ) -> zbus::Result<()>;

    /// Reports a proxy that failed before it could be announced.
    #[zbus(signal)]
    fn proxy_failed(&self, proxy: OwnedObjectPath, reason: &str) -> zbus::Result<()>;

    /// Ends the announcements on a new connection: the node's instance of systemd, and the dep
    /// services that run.
    #[zbus(signal)]
    fn proxies_announced(&self, instance: u64, deps: Vec<String>) -> zbus::Result<()>;

    #[zbus(signal)]
    fn proxy_removed(&self, node: &str, unit: &str, proxy: OwnedObjectPath) -> zbus::Result<()>;

    /// Reports that the agent is alive.
    #[zbus(signal)]
    fn heartbeat(&self) -> zbus::Result<()>;
}
