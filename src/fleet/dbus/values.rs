//! The values that several interfaces share: the rows of systemd's lists, the observed properties
//! of a systemd unit, and the modes, types, states and results of jobs.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use zbus::{OwnedObjectPath, OwnedVariant};

/// A row of systemd's `ListUnits`, `(ssssssouso)`: name, description, load state, active state,
/// sub state, followed unit, object path, id of the queued job, its type and its object path.
pub type UnitRow =
    (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// A row of the manager's `ListUnits`, `(sssssssouso)`: the node, then the fields of [`UnitRow`].
pub type NodeUnitRow =
    (String, String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

/// A row of systemd's `ListUnitFiles`, `(ss)`: the path of the file and its state.
pub type UnitFileRow = (String, String);

/// A change of a unit file, `(sss)`: its kind, the link, and the target of the link.
pub type UnitFileChange = (String, String, String);

/// A property to set, `(sv)`.
pub type Setting = (String, OwnedVariant);

/// Auxiliary units of a transient unit, `(sa(sv))`.
pub type AuxiliaryUnit = (String, Vec<Setting>);

/// Properties by name, `a{sv}`.
pub type Properties = HashMap<String, OwnedVariant>;

/// The properties that `GetUnitProperties` returns and `UnitPropertiesChanged` reports. All of them
/// are in every signal, except for `Result`, which some types of units do not have.
pub const OBSERVED_PROPERTIES: [&str; 5] =
    ["LoadState", "ActiveState", "SubState", "UnitFileState", "Result"];

/// Defines an enumeration whose values are strings on D-Bus.
macro_rules! words {
    (
        $(#[$doc:meta])* $name:ident, $what:literal {
            $($(#[$of:meta])* $value:ident = $text:literal),+ $(,)?
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$of])* $value),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;

            fn from_str(text: &str) -> Result<Self, UnknownWord> {
                match text {
                    $($text => Ok(Self::$value),)+
                    _ => Err(UnknownWord { what: $what, expected: &[$($text),+] }),
                }
            }
        }
    };
}

/// The reason why a string is not a value of an enumeration. The string itself may be long and is
/// not repeated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what}; expected one of: {}", expected.join(", "))]
pub struct UnknownWord {
    what: &'static str,
    expected: &'static [&'static str],
}

words! {
    /// The treatment of another queued job of the same unit.
    JobMode, "job mode" {
        /// The queued job is cancelled.
        Replace = "replace",
        /// The call fails.
        Fail = "fail",
    }
}

words! {
    JobType, "job type" {
        Start = "Start",
        Stop = "Stop",
        Reload = "Reload",
        Restart = "Restart",
    }
}

words! {
    JobState, "job state" {
        Waiting = "waiting",
        Running = "running",
    }
}

words! {
    JobResult, "job result" {
        Done = "done",
        Failed = "failed",
        Cancelled = "cancelled",
        Timeout = "timeout",
        Dependency = "dependency",
        Skipped = "skipped",
    }
}

impl JobResult {
    /// Returns the result that systemd's `JobRemoved` signal contains. Results without an
    /// equivalent, such as `invalid` and `assert`, are failures.
    pub fn from_systemd(result: &str) -> Self {
        match result {
            "done" => Self::Done,
            "canceled" | "collected" => Self::Cancelled,
            "timeout" => Self::Timeout,
            "dependency" => Self::Dependency,
            "skipped" => Self::Skipped,
            _ => Self::Failed,
        }
    }
}

words! {
    /// Whether an agent is connected and answers.
    NodeStatus, "node status" {
        Online = "online",
        Offline = "offline",
    }
}

words! {
    /// Why a monitor sends a signal about a unit.
    Reason, "reason" {
        /// systemd changed the unit.
        Real = "real",
        /// A subscription began, or a node was lost or returned.
        Virtual = "virtual",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_parsed_as_they_are_written() {
        for result in JobResult::ALL {
            assert_eq!(result.as_str().parse(), Ok(*result));
        }
        let unknown = "isolate".parse::<JobMode>().unwrap_err();
        assert_eq!(unknown.to_string(), "unknown job mode; expected one of: replace, fail");
    }

    #[test]
    fn results_of_systemd_are_translated() {
        for (systemd, result) in [
            ("done", "done"),
            ("canceled", "cancelled"),
            ("timeout", "timeout"),
            ("failed", "failed"),
            ("dependency", "dependency"),
            ("skipped", "skipped"),
            ("invalid", "failed"),
            ("assert", "failed"),
            ("unsupported", "failed"),
            ("collected", "cancelled"),
            ("once", "failed"),
        ] {
            assert_eq!(JobResult::from_systemd(systemd).as_str(), result, "{systemd}");
        }
    }
}
