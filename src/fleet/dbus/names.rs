//! The names of buses, interfaces and objects, and the limits of names. Pure.

/// The manager's name on a bus.
pub const BUS_NAME: &str = "org.containers.hirte";

pub const MANAGER_PATH: &str = "/org/containers/hirte";
pub const MANAGER_INTERFACE: &str = "org.containers.hirte.Manager";
pub const MONITOR_INTERFACE: &str = "org.containers.hirte.Monitor";
pub const NODE_INTERFACE: &str = "org.containers.hirte.Node";
/// The agent's name on the bus of its machine. Its object has the path of the manager's.
pub const AGENT_BUS_NAME: &str = "org.containers.hirte.Agent";
pub const AGENT_INTERFACE: &str = "org.containers.hirte.Agent";
pub const JOB_INTERFACE: &str = "org.containers.hirte.Job";

/// The manager's object on the connection of an agent.
pub const INTERNAL_MANAGER_PATH: &str = "/org/containers/hirte/internal";
pub const INTERNAL_MANAGER_INTERFACE: &str = "org.containers.hirte.internal.Manager";
/// The agent's object on its connection to the manager.
pub const INTERNAL_AGENT_PATH: &str = "/org/containers/hirte/internal/agent";
pub const INTERNAL_AGENT_INTERFACE: &str = "org.containers.hirte.internal.Agent";
/// The proxies of an agent are objects below this path.
pub const INTERNAL_PROXY_PATH: &str = "/org/containers/hirte/internal/proxy";
pub const INTERNAL_PROXY_INTERFACE: &str = "org.containers.hirte.internal.Proxy";

/// The name in the certificate of an environment's manager. No machine can have it.
pub const MANAGER_CERTIFICATE: &str = "manager";

/// The port on which a manager accepts agents.
pub const DEFAULT_PORT: u16 = 842;

/// systemd's limit of the length of a unit name.
pub const MAX_SYSTEMD_UNIT_NAME: usize = 255;
/// The largest message on a connection to a manager.
pub const MAX_MESSAGE_BYTES: usize = 8 << 20;
