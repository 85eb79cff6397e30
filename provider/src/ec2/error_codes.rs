//! The meaning of EC2's error codes, as a table. Extracting a failure from the SDK's errors belongs
//! in `api`. Pure.
//!
//! The code decides; for unknown codes the HTTP status does. Messages are only printed.

use crate::error::{Error, Subject};

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// EC2 replied with an error.
    Answer {
        status: u16,
        code: Option<String>,
        message: String,
    },
    /// There was no reply within the time limit.
    TimedOut,
    /// The connection broke; the request may have been read.
    Broken {
        reason: String,
    },
    /// No connection could be made.
    NotReached {
        reason: String,
    },
    NoCredentials {
        reason: String,
    },
    /// The deadline passed before the request was sent.
    TooLate,
    /// The request could not be built.
    NotSent {
        reason: String,
    },
    /// The reply could not be read.
    Garbled {
        reason: String,
    },
}

/// Whether a call with an unknown outcome can have changed anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Reads,
    Writes,
}

/// The meaning of a failure for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CallError {
    /// At least one rule of the batch exists already, or one to be removed does not. The others
    /// were not changed.
    RulesAlreadySo,
    /// The name of the group is in use, by us or by others.
    NameTaken,
    Error(Error),
}

/// EC2's default limits, for error messages only.
const RULES_PER_GROUP: u32 = 60;
const GROUPS_PER_INTERFACE: u32 = 5;

const NO_CREDENTIALS: &str = "no credentials for EC2: set AWS_ACCESS_KEY_ID and \
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the instance a role";

const THROTTLED: &[&str] = &[
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottled",
    "RequestThrottledException",
    "TooManyRequestsException",
    "EC2ThrottledException",
    "BandwidthLimitExceeded",
    "SlowDown",
];

const DENIED: &[&str] = &[
    "UnauthorizedOperation",
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "AccessDenied",
    "AccessDeniedException",
    "Blocked",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "MissingAuthenticationToken",
    "NotAuthorized",
    "OperationNotPermitted",
    "OptInRequired",
    "PendingVerification",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
];

/// Size limit of quoted texts.
const SHOWN_CHARS: usize = 300;

pub(super) fn classify(failure: Failure, effect: Effect, what: Subject) -> CallError {
    match failure {
        Failure::Answer { status, code, message } => {
            answer(status, code.as_deref().unwrap_or_default(), &message, effect, what)
        }
        Failure::TimedOut => CallError::Error(lost(effect, what, "no answer in time".to_owned())),
        Failure::Broken { reason } => CallError::Error(lost(effect, what, shown(&reason))),
        Failure::NotReached { reason } => {
            CallError::Error(Error::Unavailable { what: Subject::Provider, reason: shown(&reason) })
        }
        Failure::NoCredentials { reason } => {
            let reason = format!("{NO_CREDENTIALS} ({})", shown(&reason));
            CallError::Error(Error::Unusable { what: Subject::Provider, reason })
        }
        Failure::TooLate => CallError::Error(Error::NotBegun { what }),
        Failure::NotSent { reason } => {
            CallError::Error(Error::Unusable { what: Subject::Provider, reason: shown(&reason) })
        }
        Failure::Garbled { reason } => CallError::Error(lost(effect, what, shown(&reason))),
    }
}

fn answer(status: u16, code: &str, message: &str, effect: Effect, what: Subject) -> CallError {
    let reason = || words(code, status, message);
    let error = match code.strip_prefix("Client.").unwrap_or(code) {
        "InvalidPermission.Duplicate" | "InvalidPermission.NotFound" => return CallError::RulesAlreadySo,
        "InvalidGroup.Duplicate" => return CallError::NameTaken,
        "InvalidGroup.NotFound"
        | "InvalidGroupId.Malformed"
        | "InvalidSecurityGroupID.NotFound"
        | "InvalidInstanceID.NotFound"
        | "InvalidInstanceID.Malformed"
        | "InvalidNetworkInterfaceID.NotFound" => Error::NotFound { what },
        "DependencyViolation" | "InvalidGroup.InUse" | "ResourceInUse" => Error::StillInUse { what },
        "RulesPerSecurityGroupLimitExceeded" => Error::QuotaExceeded { what, limit: Some(RULES_PER_GROUP) },
        "SecurityGroupsPerInterfaceLimitExceeded" | "SecurityGroupsPerInstanceLimitExceeded" => {
            Error::QuotaExceeded { what, limit: Some(GROUPS_PER_INTERFACE) }
        }
        "SecurityGroupLimitExceeded"
        | "InstanceLimitExceeded"
        | "VcpuLimitExceeded"
        | "TagLimitExceeded"
        | "NetworkInterfaceLimitExceeded" => Error::QuotaExceeded { what, limit: None },
        code if THROTTLED.contains(&code) => Error::Throttled { what },
        code if DENIED.contains(&code) => Error::Denied { what, reason: reason() },
        "InvalidParameter"
        | "InvalidParameterValue"
        | "InvalidParameterCombination"
        | "InvalidPermission.Malformed"
        | "InvalidRequest"
        | "MalformedQueryString"
        | "MissingParameter"
        | "UnknownParameter"
        | "ValidationError" => Error::Invalid { what, reason: reason() },
        "IncorrectState"
        | "IncorrectInstanceState"
        | "IdempotentParameterMismatch"
        | "ConcurrentTagAccess"
        | "ConcurrentModification" => Error::Conflict { what },
        "InsufficientInstanceCapacity"
        | "InsufficientHostCapacity"
        | "InsufficientCapacity"
        | "InsufficientAddressCapacity"
        | "InsufficientFreeAddressesInSubnet"
        | "ServiceUnavailable"
        | "Unavailable" => Error::Unavailable { what, reason: reason() },
        _ => return CallError::Error(by_status(status, effect, what, reason())),
    };
    CallError::Error(error)
}

/// Classifies unknown codes. Unexpected errors are reported to the operator instead of being
/// retried.
fn by_status(status: u16, effect: Effect, what: Subject, reason: String) -> Error {
    match status {
        // A success status with an unreadable body: the call may have been applied.
        _ if status < 400 => lost(effect, what, reason),
        429 => Error::Throttled { what },
        401 | 403 => Error::Denied { what, reason },
        503 => Error::Unavailable { what, reason },
        500.. => lost(effect, what, reason),
        _ => Error::Unusable { what, reason },
    }
}

/// Classifies a call without a clear reply: a write may have been applied.
fn lost(effect: Effect, what: Subject, reason: String) -> Error {
    match effect {
        Effect::Reads => Error::Unavailable { what, reason },
        Effect::Writes => Error::Ambiguous { what, reason },
    }
}

fn words(code: &str, status: u16, message: &str) -> String {
    // An encoded blob follows, which is not readable.
    let message = message.split("Encoded authorization failure message").next().unwrap_or(message).trim();
    match (code, message) {
        ("", "") => format!("status {status}"),
        ("", message) => format!("status {status}: {}", shown(message)),
        (code, "") => shown(code),
        (code, message) => shown(&format!("{code}: {message}")),
    }
}

/// Converts a text to one line of limited length.
fn shown(text: &str) -> String {
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Retry;
    use crate::provider::GroupId;

    fn what() -> Subject {
        Subject::Group(GroupId::new("sg-1"))
    }

    fn answered(status: u16, code: &str, effect: Effect) -> CallError {
        let failure = Failure::Answer {
            status,
            code: (!code.is_empty()).then(|| code.to_owned()),
            message: "words".to_owned(),
        };
        classify(failure, effect, what())
    }

    fn kind(error: &CallError) -> &'static str {
        match error {
            CallError::RulesAlreadySo => "already so",
            CallError::NameTaken => "name taken",
            CallError::Error(error) => error.kind(),
        }
    }

    #[test]
    fn known_codes_are_classified() {
        for (status, code, expected) in [
            (400, "InvalidPermission.Duplicate", "already so"),
            (400, "InvalidPermission.NotFound", "already so"),
            (400, "Client.InvalidPermission.NotFound", "already so"),
            (400, "InvalidGroup.Duplicate", "name taken"),
            (400, "InvalidParameterValue", "invalid"),
            (400, "InvalidParameterCombination", "invalid"),
            (400, "InvalidGroup.NotFound", "not-found"),
            (400, "InvalidSecurityGroupID.NotFound", "not-found"),
            (400, "InvalidInstanceID.NotFound", "not-found"),
            (400, "InvalidInstanceID.Malformed", "not-found"),
            (400, "DependencyViolation", "still-in-use"),
            (400, "RulesPerSecurityGroupLimitExceeded", "quota-exceeded"),
            (400, "SecurityGroupLimitExceeded", "quota-exceeded"),
            (400, "SecurityGroupsPerInterfaceLimitExceeded", "quota-exceeded"),
            (400, "VcpuLimitExceeded", "quota-exceeded"),
            (503, "RequestLimitExceeded", "throttled"),
            (400, "Throttling", "throttled"),
            (400, "ThrottlingException", "throttled"),
            (403, "UnauthorizedOperation", "denied"),
            (401, "AuthFailure", "denied"),
            (400, "ExpiredToken", "denied"),
            (400, "RequestExpired", "denied"),
            (401, "InvalidClientTokenId", "denied"),
            (401, "OptInRequired", "denied"),
            (400, "IncorrectInstanceState", "conflict"),
            (400, "IdempotentParameterMismatch", "conflict"),
            (500, "InsufficientInstanceCapacity", "unavailable"),
            (503, "Unavailable", "unavailable"),
            (400, "InvalidAMIID.NotFound", "unusable"),
            (400, "InvalidKeyPair.NotFound", "unusable"),
            (400, "InvalidSubnetID.NotFound", "unusable"),
        ] {
            for effect in [Effect::Reads, Effect::Writes] {
                assert_eq!(kind(&answered(status, code, effect)), expected, "{code}");
            }
        }
    }

    #[test]
    fn unknown_codes_are_classified_by_status_and_effect() {
        for (status, reads, writes) in [
            (200, "unavailable", "ambiguous"),
            (400, "unusable", "unusable"),
            (404, "unusable", "unusable"),
            (401, "denied", "denied"),
            (403, "denied", "denied"),
            (429, "throttled", "throttled"),
            (500, "unavailable", "ambiguous"),
            (502, "unavailable", "ambiguous"),
            (503, "unavailable", "unavailable"),
            (504, "unavailable", "ambiguous"),
        ] {
            for code in ["", "InternalError", "NeverHeardOf.It"] {
                assert_eq!(kind(&answered(status, code, Effect::Reads)), reads, "{status} {code}");
                assert_eq!(kind(&answered(status, code, Effect::Writes)), writes, "{status} {code}");
            }
        }
    }

    #[test]
    fn only_writes_without_a_reply_are_ambiguous() {
        let reason = || "because".to_owned();
        for (failure, reads, writes) in [
            (Failure::TimedOut, "unavailable", "ambiguous"),
            (Failure::Broken { reason: reason() }, "unavailable", "ambiguous"),
            (Failure::Garbled { reason: reason() }, "unavailable", "ambiguous"),
            (Failure::NotReached { reason: reason() }, "unavailable", "unavailable"),
            (Failure::NotSent { reason: reason() }, "unusable", "unusable"),
            (Failure::NoCredentials { reason: reason() }, "unusable", "unusable"),
            (Failure::TooLate, "not-begun", "not-begun"),
        ] {
            assert_eq!(kind(&classify(failure.clone(), Effect::Reads, what())), reads, "{failure:?}");
            assert_eq!(kind(&classify(failure.clone(), Effect::Writes, what())), writes, "{failure:?}");
        }
    }

    #[test]
    fn messages_are_short_and_name_the_code() {
        let message = "You are not authorized. Encoded authorization failure message: c2VjcmV0".to_owned();
        let code = Some("UnauthorizedOperation".to_owned());
        let denied =
            classify(Failure::Answer { status: 403, code, message }, Effect::Writes, Subject::Provider);
        let CallError::Error(denied) = denied else { panic!("{denied:?}") };
        assert_eq!(
            denied.to_string(),
            "not allowed for the provider: UnauthorizedOperation: You are not authorized."
        );
        assert_eq!(denied.retry(), Retry::OperatorMustAct);
        let flood = Failure::Broken { reason: "x\n".repeat(10_000) };
        let CallError::Error(flood) = classify(flood, Effect::Reads, what()) else { panic!("an error") };
        assert!(flood.to_string().len() < 400 && !flood.to_string().contains('\n'));
    }

    #[test]
    fn error_names_the_limit() {
        let CallError::Error(full) = answered(400, "RulesPerSecurityGroupLimitExceeded", Effect::Writes)
        else {
            panic!("an error")
        };
        assert_eq!(full.to_string(), "group sg-1 is full: its limit of 60 is reached");
    }
}
