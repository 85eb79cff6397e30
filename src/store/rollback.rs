//! Detects a store whose data is older than before, for example because an old backup was restored.
//! Pure.
//!
//! Each agent has a checkpoint: a number and a random id, kept in a znode of its own and in a local
//! file. Before the agent acts on something new in the tree (starts a unit, opens a port, launches
//! an instance), it writes the next checkpoint to the tree and then to the file. A tree with the
//! saved checkpoint therefore contains everything that the agent acted on, and its removals can be
//! trusted. A tree with an older checkpoint, or with another id under the same number, was
//! restored, whatever was written to it since: zxids alone would not show that, because a restored
//! store assigns the same zxids again. The agent then removes nothing until an operator accepts the
//! store.
//!
//! A crash between the two writes leaves the tree ahead of the file, which is harmless: the agent
//! has not acted yet. A tree that is ahead is also normal for a controller that was not the leader
//! for a while. Without changes, no checkpoint is written.

use serde::{Deserialize, Serialize};

mod guard;

pub use guard::{Basis, Memory, RollbackGuard, Standing};

/// A record beyond this size was not written by an agent.
const MAX_BYTES: usize = 4096;

/// A position in the history of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Rises with every checkpoint. The upper half counts accepted restores, as in a zxid the upper
    /// half counts leaders.
    pub number: u64,
    /// Random: distinguishes two checkpoints that were given the same number before and after a
    /// restore.
    pub id: String,
}

/// The znode of an agent's checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `None` if a held agent found no checkpoint in the tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
    /// The agent's saved checkpoint, which is not in the tree. An operator's acceptance names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<Checkpoint>,
}

/// The content of an agent's checkpoint file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remembered {
    Nothing,
    Checkpoint(Checkpoint),
    /// The file cannot be read. The checkpoint is a random one, for an acceptance to name.
    Unreadable(Checkpoint, String),
}

/// How the tree relates to an agent's saved checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Neither the agent nor the tree has a checkpoint.
    First,
    /// The tree holds the saved checkpoint.
    Continues,
    /// The tree holds a later checkpoint than the saved one.
    Ahead,
    /// The tree was restored, and an operator accepted that.
    Accepted,
    /// The tree was restored from an older backup, or that cannot be ruled out. The text gives the
    /// reason.
    Behind(String),
}

/// Compares the tree's record and acceptance with the agent's saved checkpoint. `Err` is a record
/// that cannot be parsed.
pub fn judge(
    remembered: &Remembered,
    record: &Result<Option<Record>, String>,
    accepted: Option<&Checkpoint>,
) -> Verdict {
    let (ours, unreadable) = match remembered {
        Remembered::Nothing => {
            let found = record.as_ref().ok().and_then(|record| record.as_ref()?.checkpoint.as_ref());
            return if found.is_some() { Verdict::Ahead } else { Verdict::First };
        }
        Remembered::Checkpoint(ours) => (ours, None),
        Remembered::Unreadable(ours, problem) => (ours, Some(problem)),
    };
    if accepted == Some(ours) {
        return Verdict::Accepted;
    }
    if let Some(problem) = unreadable {
        return Verdict::Behind(format!("whether the store was restored is unknown: {problem}"));
    }
    let number = ours.number;
    match record {
        Err(problem) => {
            Verdict::Behind(format!("the store's record of this agent's checkpoint is corrupt: {problem}"))
        }
        Ok(Some(Record { checkpoint: Some(found), .. })) => match found.number.cmp(&number) {
            std::cmp::Ordering::Greater => Verdict::Ahead,
            std::cmp::Ordering::Equal if found.id == ours.id => Verdict::Continues,
            std::cmp::Ordering::Equal => Verdict::Behind(format!(
                "the store went back: it holds another checkpoint {number} than the one that this agent wrote"
            )),
            std::cmp::Ordering::Less => Verdict::Behind(format!(
                "the store went back: it is at checkpoint {}, and this agent acted on checkpoint {number}",
                found.number
            )),
        },
        Ok(_) => Verdict::Behind(format!(
            "the store went back: it holds no checkpoint, and this agent acted on checkpoint {number}"
        )),
    }
}

impl Checkpoint {
    /// The number after all of these.
    fn following(numbers: impl IntoIterator<Item = u64>) -> u64 {
        numbers.into_iter().max().map_or(1, |number| number.saturating_add(1))
    }

    /// Above all numbers that any replica can have written before the operator accepted the store.
    fn after_acceptance(numbers: impl IntoIterator<Item = u64>) -> u64 {
        let highest = numbers.into_iter().max().unwrap_or(0);
        ((highest >> 32).saturating_add(1) << 32) | 1
    }
}

/// Parses a checkpoint's file or an acceptance.
pub(super) fn parse_checkpoint(data: &[u8]) -> Result<Checkpoint, String> {
    parse(data)
}

pub(super) fn parse_record(data: &[u8]) -> Result<Record, String> {
    parse(data)
}

pub(super) fn parse<V: for<'de> Deserialize<'de>>(data: &[u8]) -> Result<V, String> {
    if data.len() > MAX_BYTES {
        return Err(format!("{} bytes are more than the {MAX_BYTES} allowed", data.len()));
    }
    serde_json::from_slice(data).map_err(|error| error.to_string())
}

pub(super) fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    // Numbers and strings are always JSON.
    serde_json::to_vec(value).expect("numbers and strings")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: u64, id: &str) -> Checkpoint {
        Checkpoint { number, id: id.to_owned() }
    }

    fn record(number: u64, id: &str) -> Result<Option<Record>, String> {
        Ok(Some(Record { checkpoint: Some(at(number, id)), missing: None }))
    }

    #[test]
    fn a_tree_without_the_remembered_checkpoint_is_behind() {
        let known = || Remembered::Checkpoint(at(7, "a"));
        let garbled = || Remembered::Unreadable(at(0, "r"), "not JSON".to_owned());
        let held = || Ok(Some(Record { checkpoint: None, missing: Some(at(7, "a")) }));
        let corrupt = || Err("not JSON".to_owned());
        type Case =
            (&'static str, Remembered, Result<Option<Record>, String>, Option<Checkpoint>, &'static str);
        let cases: [Case; 16] = [
            ("new agent, new tree", Remembered::Nothing, Ok(None), None, "first"),
            ("new host, old tree", Remembered::Nothing, record(7, "a"), None, "ahead"),
            ("new host, corrupt record", Remembered::Nothing, corrupt(), None, "first"),
            ("the same", known(), record(7, "a"), None, "continues"),
            ("crash before the file was written", known(), record(8, "b"), None, "ahead"),
            ("restored", known(), record(6, "x"), None, "behind"),
            ("restored, then as many checkpoints as before", known(), record(7, "b"), None, "behind"),
            ("restored to before the first checkpoint", known(), Ok(None), None, "behind"),
            ("held before, no checkpoint", known(), held(), None, "behind"),
            ("corrupt record", known(), corrupt(), None, "behind"),
            ("accepted", known(), record(6, "x"), Some(at(7, "a")), "accepted"),
            ("accepted without a checkpoint", known(), held(), Some(at(7, "a")), "accepted"),
            ("acceptance of an earlier restore", known(), record(6, "x"), Some(at(5, "y")), "behind"),
            ("acceptance of another checkpoint 7", known(), record(6, "x"), Some(at(7, "b")), "behind"),
            ("unreadable file", garbled(), record(7, "a"), None, "behind"),
            ("unreadable file, accepted", garbled(), record(7, "a"), Some(at(0, "r")), "accepted"),
        ];
        for (name, remembered, record, accepted, expected) in cases {
            let verdict = match judge(&remembered, &record, accepted.as_ref()) {
                Verdict::First => "first",
                Verdict::Continues => "continues",
                Verdict::Ahead => "ahead",
                Verdict::Accepted => "accepted",
                Verdict::Behind(_) => "behind",
            };
            assert_eq!(verdict, expected, "{name}");
        }
    }

    #[test]
    fn an_acceptance_is_above_all_numbers_before_it() {
        assert_eq!(Checkpoint::following([]), 1);
        assert_eq!(Checkpoint::following([3, 9]), 10);
        let accepted = Checkpoint::after_acceptance([3, 9]);
        assert!(accepted > u64::from(u32::MAX));
        assert!(Checkpoint::after_acceptance([accepted + 5]) > accepted + 5);
    }

    #[test]
    fn records_parse_as_written() {
        let record = Record { checkpoint: Some(at(7, "a")), missing: Some(at(8, "b")) };
        assert_eq!(parse_record(&to_bytes(&record)), Ok(record));
        assert!(parse_record(&vec![b' '; MAX_BYTES + 1]).unwrap_err().contains("more than"));
        assert!(parse_checkpoint(b"{").is_err());
    }
}
