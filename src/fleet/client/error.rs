//! The errors of a client, with messages for operators. Messages of the manager and of systemd are
//! kept; errors of D-Bus itself, which name internals of the bus, are replaced.

use crate::fleet::dbus::connect::ConnectError;
use crate::fleet::dbus::errors::{
    ACCESS_DENIED, CallError, LIMITS_EXCEEDED, TIMEOUT, UNKNOWN_INTERFACE, UNKNOWN_METHOD, UNKNOWN_OBJECT,
};

const NO_REPLY: &str = "org.freedesktop.DBus.Error.NoReply";
const NO_OWNER: &str = "org.freedesktop.DBus.Error.NameHasNoOwner";
const SERVICE_UNKNOWN: &str = "org.freedesktop.DBus.Error.ServiceUnknown";

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot connect to {bus}: {problem}")]
    Bus { bus: String, problem: String },
    #[error(transparent)]
    Connect(ConnectError),
    #[error("no manager is running on the bus")]
    NoManager,
    #[error("the manager was lost")]
    ManagerLost,
    #[error("there is no node '{0}'")]
    NoSuchNode(String),
    #[error("permission denied")]
    Denied,
    #[error("no reply within {seconds} s")]
    NoReply { seconds: u64 },
    #[error("job {id} did not end within {seconds} s and goes on")]
    JobGoesOn { id: u32, seconds: u64 },
    #[error("the manager does not support this command: {0}")]
    Unsupported(String),
    #[error("too many requests at once: {0}")]
    Limit(String),
    #[error("unexpected reply of the manager: {0}")]
    Protocol(String),
    /// An error of the manager or of systemd on the node, with its D-Bus name.
    #[error(transparent)]
    Call(CallError),
}

impl ClientError {
    /// Translates the error of a call. `node` is set if the call was to the object of a node.
    pub(super) fn from_call(error: CallError, node: Option<&str>, seconds: u64) -> Self {
        match (error.name.as_str(), node) {
            (UNKNOWN_OBJECT, Some(node)) => Self::NoSuchNode(node.to_owned()),
            (SERVICE_UNKNOWN | NO_OWNER, _) => Self::NoManager,
            (ACCESS_DENIED, _) => Self::Denied,
            (NO_REPLY | TIMEOUT, _) => Self::NoReply { seconds },
            (UNKNOWN_METHOD | UNKNOWN_INTERFACE, _) => Self::Unsupported(error.message),
            (LIMITS_EXCEEDED, _) => Self::Limit(error.message),
            _ => Self::Call(error),
        }
    }

    /// Returns the D-Bus name of an error of the manager or of systemd.
    pub fn dbus_name(&self) -> Option<&str> {
        match self {
            Self::Call(error) => Some(&error.name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::dbus::errors::{NO_SUCH_UNIT, OFFLINE};

    #[test]
    fn errors_of_the_bus_are_replaced_and_others_are_kept() {
        let rejected = "Rejected send message, 2 matched rules; type=\"method_call\", sender=\":1.5\"";
        for (name, message, node, sentence) in [
            (UNKNOWN_OBJECT, "Unknown object '/x'", Some("n1"), "there is no node 'n1'"),
            (SERVICE_UNKNOWN, "The name is not activatable", None, "no manager is running on the bus"),
            (ACCESS_DENIED, rejected, Some("n1"), "permission denied"),
            (NO_REPLY, "Message recipient disconnected", None, "no reply within 60 s"),
            (TIMEOUT, "the call was not answered in time", None, "no reply within 60 s"),
            (
                NO_SUCH_UNIT,
                "Unit a.service not found.",
                Some("n1"),
                "Unit a.service not found. (org.freedesktop.systemd1.NoSuchUnit)",
            ),
            (OFFLINE, "node n1 is offline", Some("n1"), "node n1 is offline (org.containers.hirte.Offline)"),
        ] {
            let error = ClientError::from_call(CallError::new(name, message), node, 60);
            assert_eq!(error.to_string(), sentence);
        }
    }

    #[test]
    fn only_errors_of_peers_have_a_name() {
        let call = ClientError::Call(CallError::new(OFFLINE, "x"));
        assert_eq!((call.dbus_name(), ClientError::Denied.dbus_name()), (Some(OFFLINE), None));
    }
}
