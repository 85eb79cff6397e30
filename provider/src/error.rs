//! Errors of providers, classified by how the caller should react. An error names the machine,
//! group or instance and quotes the provider's message. Drivers ensure that it contains no
//! credentials or user data.

use crate::provider::{GroupId, InstanceId, MachineNumber};
use std::fmt;

/// The object that an error concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    Machine(MachineNumber),
    Group(GroupId),
    /// A group with its name, which is easier to find than its id.
    NamedGroup {
        id: GroupId,
        name: String,
    },
    Instance(InstanceId),
    /// The service or program as a whole.
    Provider,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(machine) => write!(f, "machine {machine}"),
            Self::Group(group) => write!(f, "group {group}"),
            Self::NamedGroup { id, name } => write!(f, "group {name} ({id})"),
            Self::Instance(instance) => write!(f, "instance {instance}"),
            Self::Provider => f.write_str("the provider"),
        }
    }
}

impl From<MachineNumber> for Subject {
    fn from(machine: MachineNumber) -> Self {
        Self::Machine(machine)
    }
}

impl From<&GroupId> for Subject {
    fn from(group: &GroupId) -> Self {
        Self::Group(group.clone())
    }
}

impl From<&InstanceId> for Subject {
    fn from(instance: &InstanceId) -> Self {
        Self::Instance(instance.clone())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Too many calls. The call had no effect.
    #[error("calls for {what} are throttled")]
    Throttled { what: Subject },
    /// The provider is unreachable or has an internal error. The call had no effect.
    #[error("{what} is unavailable: {reason}")]
    Unavailable { what: Subject, reason: String },
    /// The credentials lack a right. The call had no effect.
    #[error("not allowed for {what}: {reason}")]
    Denied { what: Subject, reason: String },
    /// A limit on rules, groups or instances. No object was added.
    #[error("{what} is full: {}", limit_words(*limit))]
    QuotaExceeded { what: Subject, limit: Option<u32> },
    /// The object does not exist: it was deleted, or was just created and is not visible yet.
    #[error("{what} is not there")]
    NotFound { what: Subject },
    /// The group is still used by an instance.
    #[error("{what} is still in use")]
    StillInUse { what: Subject },
    /// The object has changed since the last read. The call had no effect.
    #[error("{what} has changed meanwhile")]
    Conflict { what: Subject },
    /// The deadline passed before the request was sent. The call had no effect.
    #[error("the change of {what} was not begun in time")]
    NotBegun { what: Subject },
    /// No reply: the request may have been applied, may be applied later, or never.
    #[error("no answer for {what} in time: {reason}")]
    Ambiguous { what: Subject, reason: String },
    /// The object has our name but not our mark. It was not changed.
    #[error("{what} was not made by us: {reason}")]
    Foreign { what: Subject, reason: String },
    /// The configuration is unusable: a missing program, no credentials, an unknown region.
    #[error("{what} cannot be used: {reason}")]
    Unusable { what: Subject, reason: String },
    /// A dry run changes nothing.
    #[error("dry run: {what} is left as it is; would {would}")]
    DryRun { what: Subject, would: String },
    /// The provider refuses the request as malformed: a mistake in a driver or its caller.
    #[error("{what} refused as invalid: {reason}")]
    Invalid { what: Subject, reason: String },
}

fn limit_words(limit: Option<u32>) -> String {
    limit
        .map_or_else(|| "its limit is reached".to_owned(), |limit| format!("its limit of {limit} is reached"))
}

/// How to react to an error. Reading again at the next resync is always right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Repeat the call with back-off.
    AfterBackOff,
    /// Observe and plan again; the same call might be wrong now.
    ReadAgain,
    /// Report the error to the operator and try again at the next resync.
    OperatorMustAct,
    /// The same call can never succeed.
    Never,
}

impl Error {
    pub fn retry(&self) -> Retry {
        match self {
            Self::Throttled { .. }
            | Self::Unavailable { .. }
            | Self::StillInUse { .. }
            | Self::NotBegun { .. } => Retry::AfterBackOff,
            Self::NotFound { .. } | Self::Conflict { .. } | Self::Ambiguous { .. } => Retry::ReadAgain,
            Self::Denied { .. }
            | Self::QuotaExceeded { .. }
            | Self::Foreign { .. }
            | Self::Unusable { .. }
            | Self::DryRun { .. } => Retry::OperatorMustAct,
            Self::Invalid { .. } => Retry::Never,
        }
    }

    /// Returns whether the call may have had its effect despite the error.
    pub fn may_have_been_applied(&self) -> bool {
        matches!(self, Self::Ambiguous { .. })
    }

    /// Returns whether a part of the request may be the cause, so that the rest may be accepted.
    /// That includes requests refused for an unknown reason, unless the whole provider is unusable.
    pub fn may_concern_a_part(&self) -> bool {
        match self {
            Self::Invalid { .. } => true,
            Self::Unusable { what, .. } => *what != Subject::Provider,
            _ => false,
        }
    }

    pub fn subject(&self) -> &Subject {
        match self {
            Self::Throttled { what }
            | Self::Unavailable { what, .. }
            | Self::Denied { what, .. }
            | Self::QuotaExceeded { what, .. }
            | Self::NotFound { what }
            | Self::StillInUse { what }
            | Self::Conflict { what }
            | Self::NotBegun { what }
            | Self::Ambiguous { what, .. }
            | Self::Foreign { what, .. }
            | Self::Unusable { what, .. }
            | Self::DryRun { what, .. }
            | Self::Invalid { what, .. } => what,
        }
    }

    /// Adds the name of the group that the error concerns.
    #[must_use]
    pub fn with_group_name(mut self, name: &str) -> Self {
        let (Self::Throttled { what }
        | Self::Unavailable { what, .. }
        | Self::Denied { what, .. }
        | Self::QuotaExceeded { what, .. }
        | Self::NotFound { what }
        | Self::StillInUse { what }
        | Self::Conflict { what }
        | Self::NotBegun { what }
        | Self::Ambiguous { what, .. }
        | Self::Foreign { what, .. }
        | Self::Unusable { what, .. }
        | Self::DryRun { what, .. }
        | Self::Invalid { what, .. }) = &mut self;
        if let Subject::Group(id) = what {
            *what = Subject::NamedGroup { id: id.clone(), name: name.to_owned() };
        }
        self
    }

    /// Returns a constant name of the variant, for counting failures.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Throttled { .. } => "throttled",
            Self::Unavailable { .. } => "unavailable",
            Self::Denied { .. } => "denied",
            Self::QuotaExceeded { .. } => "quota-exceeded",
            Self::NotFound { .. } => "not-found",
            Self::StillInUse { .. } => "still-in-use",
            Self::Conflict { .. } => "conflict",
            Self::NotBegun { .. } => "not-begun",
            Self::Ambiguous { .. } => "ambiguous",
            Self::Foreign { .. } => "foreign",
            Self::Unusable { .. } => "unusable",
            Self::DryRun { .. } => "dry-run",
            Self::Invalid { .. } => "invalid",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_a_group_with_its_id() {
        let what = Subject::from(&GroupId::new("sg-1"));
        let full = Error::QuotaExceeded { what, limit: Some(60) }.with_group_name("juju-prod-2");
        assert_eq!(full.to_string(), "group juju-prod-2 (sg-1) is full: its limit of 60 is reached");
        let throttled = Error::Throttled { what: Subject::Provider };
        assert_eq!(throttled.clone().with_group_name("juju-prod-2"), throttled);
    }

    #[test]
    fn only_invalid_or_unknown_refusals_may_concern_a_part() {
        let (group, reason) = (Subject::from(&GroupId::new("sg-1")), || "no".to_owned());
        for (error, expected) in [
            (Error::Invalid { what: group.clone(), reason: reason() }, true),
            (Error::Unusable { what: group.clone(), reason: reason() }, true),
            (Error::Unusable { what: Subject::Provider, reason: reason() }, false),
            (Error::Denied { what: group.clone(), reason: reason() }, false),
            (Error::Throttled { what: group }, false),
        ] {
            assert_eq!(error.may_concern_a_part(), expected, "{error}");
        }
    }

    /// One error of each variant, its text, and when to retry.
    fn all_errors() -> Vec<(Error, &'static str, Retry)> {
        let machine = Subject::Machine(MachineNumber::new(2));
        let group = Subject::from(&GroupId::new("sg-1"));
        let why = || "because".to_owned();
        vec![
            (
                Error::Throttled { what: machine.clone() },
                "calls for machine 2 are throttled",
                Retry::AfterBackOff,
            ),
            (
                Error::Unavailable { what: Subject::Provider, reason: why() },
                "the provider is unavailable: because",
                Retry::AfterBackOff,
            ),
            (Error::StillInUse { what: group.clone() }, "group sg-1 is still in use", Retry::AfterBackOff),
            (
                Error::NotBegun { what: group.clone() },
                "the change of group sg-1 was not begun in time",
                Retry::AfterBackOff,
            ),
            (Error::NotFound { what: group.clone() }, "group sg-1 is not there", Retry::ReadAgain),
            (Error::Conflict { what: group.clone() }, "group sg-1 has changed meanwhile", Retry::ReadAgain),
            (
                Error::Ambiguous { what: machine.clone(), reason: why() },
                "no answer for machine 2 in time: because",
                Retry::ReadAgain,
            ),
            (
                Error::Denied { what: machine, reason: why() },
                "not allowed for machine 2: because",
                Retry::OperatorMustAct,
            ),
            (
                Error::QuotaExceeded { what: group.clone(), limit: Some(60) },
                "group sg-1 is full: its limit of 60 is reached",
                Retry::OperatorMustAct,
            ),
            (
                Error::QuotaExceeded { what: group.clone(), limit: None },
                "group sg-1 is full: its limit is reached",
                Retry::OperatorMustAct,
            ),
            (
                Error::Foreign { what: group, reason: why() },
                "group sg-1 was not made by us: because",
                Retry::OperatorMustAct,
            ),
            (
                Error::Unusable { what: Subject::Provider, reason: why() },
                "the provider cannot be used: because",
                Retry::OperatorMustAct,
            ),
            (
                Error::DryRun { what: Subject::Provider, would: "open 80/tcp".to_owned() },
                "dry run: the provider is left as it is; would open 80/tcp",
                Retry::OperatorMustAct,
            ),
            (
                Error::Invalid { what: Subject::from(&InstanceId::new("i-1")), reason: why() },
                "instance i-1 refused as invalid: because",
                Retry::Never,
            ),
        ]
    }

    #[test]
    fn every_variant_names_its_subject_and_has_a_retry_class() {
        for (error, text, retry) in all_errors() {
            assert_eq!(error.to_string(), text);
            assert_eq!(error.retry(), retry, "{error}");
            assert_eq!(error.may_have_been_applied(), error.kind() == "ambiguous");
            assert!(text.contains(&error.subject().to_string()));
        }
    }
}
