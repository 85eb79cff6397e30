//! The internal interface of the manager.

use zbus::proxy;

/// The manager's object on the connection of an agent.
#[proxy(
    interface = "org.containers.hirte.internal.Manager",
    default_service = "org.containers.hirte",
    default_path = "/org/containers/hirte/internal"
)]
pub trait Manager {
    /// Registers the agent of a node.
    fn register(&self, name: &str) -> zbus::Result<()>;

    /// Reports that the manager is alive.
    #[zbus(signal)]
    fn heartbeat(&self) -> zbus::Result<()>;
}
