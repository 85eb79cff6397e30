//! Why a provider did not do what it was asked, sorted by what to do about it. Errors name the machine, group or
//! instance and carry the provider's own words, never credentials or user data; drivers see to that.

use crate::provider::{GroupId, InstanceId, MachineNumber};
use std::fmt;

/// What an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    Machine(MachineNumber),
    Group(GroupId),
    /// A group whose name is known, too: that is what people look for.
    NamedGroup {
        id: GroupId,
        name: String,
    },
    Instance(InstanceId),
    /// Not one of them, but the service or program that looks after them all.
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
    /// Too many calls. Nothing was done.
    #[error("calls for {what} are throttled")]
    Throttled { what: Subject },
    /// Not reachable, or in trouble of its own. Nothing was done.
    #[error("{what} is unavailable: {reason}")]
    Unavailable { what: Subject, reason: String },
    /// Credentials or rights do not suffice. Nothing was done.
    #[error("not allowed for {what}: {reason}")]
    Denied { what: Subject, reason: String },
    /// The rules, groups or instances would be too many. Nothing was added.
    #[error("{what} is full: {}", limit_words(*limit))]
    QuotaExceeded { what: Subject, limit: Option<u32> },
    /// What was to be changed is not there: just made and not yet seen, or gone.
    #[error("{what} is not there")]
    NotFound { what: Subject },
    /// A group that an instance still holds on to.
    #[error("{what} is still in use")]
    StillInUse { what: Subject },
    /// It is not as it was when last looked at. Nothing was done.
    #[error("{what} has changed meanwhile")]
    Conflict { what: Subject },
    /// There was no time left to begin it. Nothing was done.
    #[error("the change of {what} was not begun in time")]
    NotBegun { what: Subject },
    /// No answer: it may have been done, or not, or be done still.
    #[error("no answer for {what} in time: {reason}")]
    Ambiguous { what: Subject, reason: String },
    /// It bears our name but not our mark. It was left alone.
    #[error("{what} was not made by us: {reason}")]
    Foreign { what: Subject, reason: String },
    /// The provider cannot work as it is set up: a missing program, no credentials, an unknown region.
    #[error("{what} cannot be used: {reason}")]
    Unusable { what: Subject, reason: String },
    /// Nothing was done, because nothing may be.
    #[error("dry run: {what} is left as it is; would {would}")]
    DryRun { what: Subject, would: String },
    /// The provider does not accept what it was sent, and never will: a mistake in a driver or its caller.
    #[error("{what} refused as invalid: {reason}")]
    Invalid { what: Subject, reason: String },
}

fn limit_words(limit: Option<u32>) -> String {
    limit
        .map_or_else(|| "its limit is reached".to_owned(), |limit| format!("its limit of {limit} is reached"))
}

/// What to do about an error. Whatever it is, looking again at the next resync is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same call again, after a growing pause.
    AfterBackOff,
    /// Observe again, and plan from what is seen; the same call might be wrong now.
    ReadAgain,
    /// Only somebody outside can help: say so, and look again at the slow pace of a resync.
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

    /// Whether the call may have had its effect all the same.
    pub fn may_have_been_applied(&self) -> bool {
        matches!(self, Self::Ambiguous { .. })
    }

    /// Whether a part of the request may be the reason, so that the rest may be accepted by itself. Of a request that was
    /// refused for an unknown reason that may be so, too, unless the provider as a whole cannot be used.
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

    /// The same error, with the name of the group that it is about.
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

    /// One constant word per variant, to count failures by.
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
    fn a_group_is_named_beside_its_id() {
        let what = Subject::from(&GroupId::new("sg-1"));
        let full = Error::QuotaExceeded { what, limit: Some(60) }.with_group_name("juju-prod-2");
        assert_eq!(full.to_string(), "group juju-prod-2 (sg-1) is full: its limit of 60 is reached");
        let throttled = Error::Throttled { what: Subject::Provider };
        assert_eq!(throttled.clone().with_group_name("juju-prod-2"), throttled);
    }

    #[test]
    fn only_refusals_of_a_request_may_concern_a_part_of_it() {
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

    #[test]
    fn each_says_what_and_what_to_do() {
        let machine = Subject::Machine(MachineNumber::new(2));
        let group = Subject::from(&GroupId::new("sg-1"));
        let why = || "because".to_owned();
        let cases = [
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
        ];
        for (error, text, retry) in cases {
            assert_eq!(error.to_string(), text);
            assert_eq!(error.retry(), retry, "{error}");
            assert_eq!(error.may_have_been_applied(), error.kind() == "ambiguous");
            assert!(text.contains(&error.subject().to_string()));
        }
    }
}
