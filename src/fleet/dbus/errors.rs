//! The names of D-Bus errors, and [`CallError`], the error of every call to a manager, an agent or
//! systemd. The names of systemd's errors pass through unchanged.

use std::fmt;

use zbus::DBusError as _;

/// The node has no connected agent, or its agent was lost during the call.
pub const OFFLINE: &str = "org.containers.hirte.Offline";
/// There is no node with this name.
pub const NO_SUCH_NODE: &str = "org.containers.hirte.NoSuchNode";
pub const NO_SUCH_SUBSCRIPTION: &str = "org.containers.hirte.NoSuchSubscription";
/// Another manager holds the lease. The message names its address.
pub const NOT_LEADER: &str = "org.containers.hirte.NotLeader";
/// An agent is not allowed to register with this name.
pub const REGISTRATION_REFUSED: &str = "org.containers.hirte.RegistrationRefused";
/// Another agent with the same name is connected.
pub const NAME_IN_USE: &str = "org.containers.hirte.NameInUse";
/// A job is queued already, and the mode is `fail`: systemd's own error for this mode.
pub const JOB_QUEUED: &str = "org.freedesktop.systemd1.TransactionIsDestructive";
pub const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
pub const UNIT_MASKED: &str = "org.freedesktop.systemd1.UnitMasked";

pub const ACCESS_DENIED: &str = "org.freedesktop.DBus.Error.AccessDenied";
pub const FAILED: &str = "org.freedesktop.DBus.Error.Failed";
pub const INVALID_ARGS: &str = "org.freedesktop.DBus.Error.InvalidArgs";
pub const LIMITS_EXCEEDED: &str = "org.freedesktop.DBus.Error.LimitsExceeded";
pub const PROPERTY_READ_ONLY: &str = "org.freedesktop.DBus.Error.PropertyReadOnly";
pub const TIMEOUT: &str = "org.freedesktop.DBus.Error.Timeout";
pub const UNKNOWN_INTERFACE: &str = "org.freedesktop.DBus.Error.UnknownInterface";
pub const UNKNOWN_METHOD: &str = "org.freedesktop.DBus.Error.UnknownMethod";
pub const UNKNOWN_OBJECT: &str = "org.freedesktop.DBus.Error.UnknownObject";
pub const UNKNOWN_PROPERTY: &str = "org.freedesktop.DBus.Error.UnknownProperty";

/// The error of a call: a D-Bus error name and one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    pub name: String,
    pub message: String,
}

impl CallError {
    pub fn new(name: &str, message: impl Into<String>) -> Self {
        Self { name: name.to_owned(), message: message.into() }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.name)
    }
}

impl std::error::Error for CallError {}

impl From<zbus::Error> for CallError {
    /// Keeps the name and the message of an error that a peer sent. All other errors are failures
    /// of the connection.
    fn from(error: zbus::Error) -> Self {
        match error {
            zbus::Error::MethodError(name, message, _) => {
                let message = message.unwrap_or_else(|| format!("{name} without a message"));
                Self { name: name.to_string(), message }
            }
            // The errors that D-Bus itself defines. systemd uses some of them.
            zbus::Error::FDO(error) => {
                let message = error.description().unwrap_or("no message").to_owned();
                Self { name: error.name().to_string(), message }
            }
            zbus::Error::InputOutput(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                Self::new(TIMEOUT, "the call was not answered in time")
            }
            other => Self::new(FAILED, other.to_string()),
        }
    }
}
