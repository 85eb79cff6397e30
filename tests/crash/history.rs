//! Checks whether the history of a compare-and-swap register is linearizable. Pure.
//!
//! A write that succeeds at version v makes version v + 1, so the versions order all successful
//! writes and a search over orders is not needed. The remaining checks: each version was made by at
//! most one write, reads saw the value of their version, and the order agrees with real time.

use std::collections::BTreeMap;

/// The outcome of one call, as its client saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A read: value and version.
    Read { value: Vec<u8>, version: i32 },
    /// An acknowledged write, with the version that it made.
    Written { value: Vec<u8>, version: i32 },
    /// A write that was refused because of a newer version.
    Refused { expected: i32 },
    /// A write without a reply: it may have been applied at any time after its call, or never.
    Unknown { value: Vec<u8>, expected: i32 },
}

/// One call, with the times of its invocation and its reply on one clock.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    pub(crate) invoked: u64,
    pub(crate) answered: u64,
    pub(crate) outcome: Outcome,
}

/// One version of the register, as observed by clients.
#[derive(Debug)]
struct Version<'a> {
    value: &'a [u8],
    /// The earliest time at which a client had seen it.
    seen_by: u64,
    /// The start of its write, before which it did not exist. Unknown if no client reports the
    /// write.
    not_before: Option<u64>,
    written: bool,
}

/// Checks all operations on a register that began at version 0 with an empty value, and its state
/// at the end. Returns the number of acknowledged writes, or the reason why no order of the
/// operations explains the observations.
pub(crate) fn check_register(operations: &[Operation], end: (&[u8], i32)) -> Result<usize, String> {
    let mut versions = BTreeMap::new();
    versions.insert(0, Version { value: b"", seen_by: 0, not_before: Some(0), written: true });
    let mut acknowledged = 0;
    for operation in operations {
        match &operation.outcome {
            Outcome::Written { value, version } => {
                acknowledged += 1;
                see(&mut versions, *version, value, operation.answered)?;
                claim(&mut versions, *version, operation.invoked)?;
            }
            Outcome::Read { value, version } => see(&mut versions, *version, value, operation.answered)?,
            Outcome::Refused { .. } | Outcome::Unknown { .. } => {}
        }
    }
    see(&mut versions, end.1, end.0, u64::MAX)?;
    assign_unknown(&mut versions, operations)?;
    if let Some((version, _)) = versions.iter().find(|(_, known)| !known.written) {
        return Err(format!("version {version} was seen but never written"));
    }
    if versions.keys().next_back() != Some(&end.1) {
        return Err(format!("ends at version {} after {:?} was seen", end.1, versions.keys().next_back()));
    }
    let count = i32::try_from(versions.len()).map_err(|_| "too many versions".to_owned())?;
    let guessed = end.1 + 1 - count;
    let unknown = operations.iter().filter(|op| matches!(op.outcome, Outcome::Unknown { .. })).count();
    if usize::try_from(guessed).map_or(true, |guessed| guessed > unknown) {
        return Err(format!("{guessed} versions were never seen, but only {unknown} writes had no reply"));
    }
    check_time(&versions, operations)?;
    Ok(acknowledged)
}

fn see<'a>(
    versions: &mut BTreeMap<i32, Version<'a>>,
    version: i32,
    value: &'a [u8],
    at: u64,
) -> Result<(), String> {
    let known =
        versions.entry(version).or_insert(Version { value, seen_by: at, not_before: None, written: false });
    if known.value != value {
        return Err(format!("version {version} has two values: {:?} and {value:?}", known.value));
    }
    known.seen_by = known.seen_by.min(at);
    Ok(())
}

fn claim(versions: &mut BTreeMap<i32, Version<'_>>, version: i32, invoked: u64) -> Result<(), String> {
    let known = versions.get_mut(&version).ok_or("a write of a version that was never seen")?;
    if known.written {
        return Err(format!("version {version} was written twice"));
    }
    known.written = true;
    known.not_before = Some(invoked);
    Ok(())
}

/// Assigns each version that was seen, but not made by an acknowledged write, to a write without a
/// reply. Values are unique and identify the write.
fn assign_unknown(versions: &mut BTreeMap<i32, Version<'_>>, operations: &[Operation]) -> Result<(), String> {
    for operation in operations {
        let Outcome::Unknown { value, expected } = &operation.outcome else { continue };
        let made = expected + 1;
        if let Some((version, _)) =
            versions.iter().find(|(version, known)| known.value == value && **version != made)
        {
            return Err(format!("a write that expected version {expected} made version {version}"));
        }
        if versions.get(&made).is_some_and(|known| known.value == value) {
            claim(versions, made, operation.invoked)?;
        }
    }
    Ok(())
}

/// Checks real time: observed versions never go back.
fn check_time(versions: &BTreeMap<i32, Version<'_>>, operations: &[Operation]) -> Result<(), String> {
    // For each version, the earliest reply that showed it or a later one.
    let mut there_since = u64::MAX;
    let mut since = BTreeMap::new();
    for (version, known) in versions.iter().rev() {
        there_since = there_since.min(known.seen_by);
        since.insert(*version, there_since);
        if known.not_before.is_some_and(|not_before| there_since < not_before) {
            return Err(format!("version {version} was seen before its write began"));
        }
    }
    let newest_at =
        |time: u64| since.iter().rev().find(|(_, since)| **since < time).map_or(0, |(version, _)| *version);
    for operation in operations {
        let newest = newest_at(operation.invoked);
        match &operation.outcome {
            Outcome::Read { version, .. } if *version < newest => {
                return Err(format!(
                    "read version {version} although {newest} was known before: {operation:?}"
                ));
            }
            Outcome::Written { version, .. } if *version <= newest => {
                return Err(format!(
                    "wrote version {version} although {newest} was known before: {operation:?}"
                ));
            }
            Outcome::Refused { expected } if !refusal_possible(&since, versions, *expected, operation) => {
                return Err(format!("refused at the version that the register had: {operation:?}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether a version later than the expected one may have existed before the reply.
fn refusal_possible(
    since: &BTreeMap<i32, u64>,
    versions: &BTreeMap<i32, Version<'_>>,
    expected: i32,
    operation: &Operation,
) -> bool {
    since.range(expected + 1..).any(|(version, _)| {
        versions[version].not_before.is_none_or(|not_before| not_before <= operation.answered)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(invoked: u64, answered: u64, outcome: Outcome) -> Operation {
        Operation { invoked, answered, outcome }
    }

    fn read(value: &str, version: i32) -> Outcome {
        Outcome::Read { value: value.into(), version }
    }

    fn written(value: &str, version: i32) -> Outcome {
        Outcome::Written { value: value.into(), version }
    }

    fn unknown(value: &str, expected: i32) -> Outcome {
        Outcome::Unknown { value: value.into(), expected }
    }

    fn check(operations: &[Operation], end: (&str, i32)) -> Result<usize, String> {
        check_register(operations, (end.0.as_bytes(), end.1))
    }

    #[test]
    fn linearizable_histories_pass() {
        let plain = [op(1, 2, written("a", 1)), op(3, 4, read("a", 1)), op(5, 6, written("b", 2))];
        assert_eq!(check(&plain, ("b", 2)), Ok(2));
        let overlapping = [op(1, 9, written("a", 1)), op(2, 3, read("", 0)), op(4, 5, read("a", 1))];
        assert_eq!(check(&overlapping, ("a", 1)), Ok(1));
        let refused = [op(1, 2, written("a", 1)), op(3, 4, Outcome::Refused { expected: 0 })];
        assert_eq!(check(&refused, ("a", 1)), Ok(1));
        assert_eq!(check(&[], ("", 0)), Ok(0));
    }

    #[test]
    fn write_without_a_reply_may_be_applied_or_not() {
        let history = [op(1, 2, unknown("a", 0))];
        assert_eq!(check(&history, ("", 0)), Ok(0));
        assert_eq!(check(&history, ("a", 1)), Ok(0));
        let overwritten = [op(1, 2, unknown("a", 0)), op(5, 6, written("b", 2))];
        assert_eq!(check(&overwritten, ("b", 2)), Ok(1));
        let late = [op(1, 2, unknown("a", 0)), op(3, 4, read("", 0)), op(5, 6, read("a", 1))];
        assert_eq!(check(&late, ("a", 1)), Ok(0));
    }

    #[test]
    fn lost_write_is_detected() {
        let lost = [op(1, 2, written("a", 1))];
        assert!(check(&lost, ("", 0)).unwrap_err().contains("ends at version 0"));
        let replaced = [op(1, 2, written("a", 1)), op(3, 4, written("b", 1))];
        assert!(check(&replaced, ("b", 1)).unwrap_err().contains("two values"));
        let gap = [op(1, 2, written("a", 1)), op(3, 4, written("c", 3))];
        assert!(check(&gap, ("c", 3)).unwrap_err().contains("never seen"));
    }

    #[test]
    fn write_applied_twice_is_detected() {
        let twice = [op(1, 2, unknown("a", 0)), op(3, 4, read("a", 1)), op(5, 6, read("a", 2))];
        assert!(check(&twice, ("a", 2)).unwrap_err().contains("made version 2"));
        let same = [op(1, 2, written("a", 1)), op(3, 4, written("a", 1))];
        assert!(check(&same, ("a", 1)).unwrap_err().contains("twice"));
    }

    #[test]
    fn value_without_a_write_is_detected() {
        assert!(check(&[op(1, 2, read("x", 1))], ("x", 1)).unwrap_err().contains("never written"));
    }

    #[test]
    fn order_against_real_time_is_detected() {
        let stale = [op(1, 2, written("a", 1)), op(3, 4, read("", 0))];
        assert!(check(&stale, ("a", 1)).unwrap_err().contains("read version 0"));
        let between_clients = [op(1, 9, unknown("a", 0)), op(2, 3, read("a", 1)), op(4, 5, read("", 0))];
        assert!(check(&between_clients, ("a", 1)).unwrap_err().contains("read version 0"));
        let future = [op(5, 6, written("a", 1)), op(1, 2, read("a", 1))];
        assert!(check(&future, ("a", 1)).unwrap_err().contains("before its write began"));
        let backwards = [op(5, 6, written("a", 1)), op(1, 2, written("b", 2))];
        assert!(check(&backwards, ("b", 2)).is_err());
    }

    #[test]
    fn refusal_without_a_newer_version_is_detected() {
        let early = [op(1, 2, Outcome::Refused { expected: 0 }), op(3, 4, written("a", 1))];
        assert!(check(&early, ("a", 1)).unwrap_err().contains("refused"));
    }
}
