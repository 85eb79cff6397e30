//! What the tracker keeps in the store, as values: components in buckets, written by the judge, and batches of beats,
//! written by every replica. Pure. What cannot be understood is an error that says why, never an empty value.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::name::Name;
use super::sent::Stamp;
use super::state::{State, Word};

/// Components are spread over so many znodes, so that one change rewrites little and a million still fit.
pub const BUCKETS: u16 = 4096;

/// As many as fit into a znode whatever their names are.
pub const MAX_IN_BUCKET: usize = 350;

/// Beats in one znode,
pub const MAX_IN_BATCH: usize = 700;

/// and the bytes of their rows at most.
const MAX_BATCH_BYTES: usize = 64_000;

/// A beat that is older is as good as none, whoever reads of it.
const OLDEST_MS: u64 = 86_400_000;

/// Whether the state manager knows about the newest change that it is to know of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    No,
    Yes,
    /// It refused this component by itself; another change is another chance.
    Refused,
}

impl Told {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Yes => "yes",
            Self::Refused => "refused",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::No, Self::Yes, Self::Refused].into_iter().find(|told| told.as_str() == text)
    }
}

/// One component, as the judge has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub name: Name,
    pub state: State,
    /// What there was to tell about it last, if anything.
    pub word: Option<Word>,
    /// The number of the newest change; 0 before the first.
    pub sequence: u64,
    /// The number of the change that `word` is about: an older one if the newest is a planned stop, or the return from it, of
    /// which nobody is told. What is told keeps this number.
    pub word_sequence: u64,
    pub told: Told,
    /// Calendar time of the newest change, for people.
    pub changed_at: u64,
    /// Calendar time of the newest beat when this was written.
    pub beat_at: u64,
    /// How often it came back, while that is too often.
    pub flaps: u16,
    /// Seconds between two beats of the component, from its `Interval`; 0 if it sends none.
    pub interval: u16,
}

/// Deaths that are held back, as far as whoever judges next must know. Nothing is kept of it where all is quiet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    #[serde(rename_all = "kebab-case")]
    Held {
        /// How many are silent, of how many.
        silent: usize,
        alive: usize,
        /// For how long, on the clocks of those who judged; no calendar ends a hold.
        for_ms: u64,
        /// The operator's newest word when this was written. Another one is for this hold.
        release: i32,
    },
    /// Lifted: what was silent by then may die.
    Passing,
}

/// Beats of one replica, in the order of its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The judge's question that this answers, or an older one.
    pub answers: u64,
    /// The replica has ended in order: nothing that it heard is missing.
    pub farewell: bool,
    /// Calendar time of writing, for people.
    pub at: u64,
    pub beats: Vec<Beat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    pub name: Name,
    /// How long before the writing, by the replica's own clock.
    pub age_ms: u64,
    pub going_away: bool,
    /// As in [`Record`].
    pub interval: u16,
    /// The `Timestamp` of a beat that causes a change; empty for others.
    pub stamp: Stamp,
}

impl Beat {
    /// The bytes of its row at most: JSON escapes a character of one byte with two, and one of several with none.
    fn max_bytes(&self) -> usize {
        self.name.as_str().len() + 2 * self.stamp.as_str().len() + 40
    }
}

/// Splits beats into parts that each fit into a znode.
pub fn in_batches(beats: Vec<Beat>) -> Vec<Vec<Beat>> {
    let mut batches: Vec<Vec<Beat>> = Vec::new();
    let mut bytes = 0;
    for beat in beats {
        bytes += beat.max_bytes();
        match batches.last_mut() {
            Some(batch) if batch.len() < MAX_IN_BATCH && bytes <= MAX_BATCH_BYTES => batch.push(beat),
            _ => {
                bytes = beat.max_bytes();
                batches.push(vec![beat]);
            }
        }
    }
    batches
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Garbled(String);

impl Garbled {
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// The bucket that a component is kept in. Stays the same for ever: what is written is found by it.
pub fn bucket_of(name: &str) -> u16 {
    (crc32c::crc32c(name.as_bytes()) % u32::from(BUCKETS)) as u16
}

/// Written by hand: with very many components one judgement may write all buckets, and none of the words in it needs to be
/// escaped.
pub fn bucket_to_bytes(records: impl IntoIterator<Item = Record>) -> Vec<u8> {
    let mut text = String::from(r#"{"v":1,"components":["#);
    for (at, record) in records.into_iter().enumerate() {
        text.push_str(if at == 0 { "" } else { "," });
        push_row(&mut text, &record);
    }
    text.push_str("]}");
    text.into_bytes()
}

fn push_row(text: &mut String, record: &Record) {
    let Record { name, state, word, sequence, word_sequence, told, changed_at, beat_at, flaps, interval } =
        record;
    let (name, state, told) = (name.as_str(), state.as_str(), told.as_str());
    let (quote, word) = word.map_or(("", "null"), |word| ("\"", word.as_str()));
    // A text takes whatever is written to it.
    let _ = write!(
        text,
        r#"["{name}","{state}",{quote}{word}{quote},{sequence},"{told}",{changed_at},{beat_at},{flaps}"#
    );
    if word_sequence != sequence || *interval != 0 {
        let _ = write!(text, ",{word_sequence}");
    }
    if *interval != 0 {
        let _ = write!(text, ",{interval}");
    }
    text.push(']');
}

/// # Errors
/// If anything in it is not as it was written.
pub fn bucket_from_bytes(bytes: &[u8]) -> Result<Vec<Record>, Garbled> {
    rows(bytes, "components")?
        .1
        .iter()
        .map(|row| record(row).ok_or_else(|| Garbled::new("a bad component")))
        .collect()
}

/// The document and its rows.
fn rows(bytes: &[u8], key: &str) -> Result<(Value, Vec<Value>), Garbled> {
    let mut document: Value = serde_json::from_slice(bytes).map_err(|_| Garbled::new("no JSON"))?;
    if document.get("v").and_then(Value::as_u64) != Some(1) {
        return Err(Garbled::new("not of a version that is known"));
    }
    match document.get_mut(key).map(Value::take) {
        Some(Value::Array(rows)) => Ok((document, rows)),
        _ => Err(Garbled::new(format!("no {key}"))),
    }
}

fn record(row: &Value) -> Option<Record> {
    let row = row.as_array().filter(|row| row.len() >= 8)?;
    let word = match &row[2] {
        Value::Null => None,
        word => Some(Word::parse(word.as_str()?)?),
    };
    let sequence = row[3].as_u64()?;
    Some(Record {
        name: Name::parse(row[0].as_str()?).ok()?,
        state: State::parse(row[1].as_str()?)?,
        word,
        sequence,
        word_sequence: row.get(8).map_or(Some(sequence), Value::as_u64)?,
        told: Told::parse(row[4].as_str()?)?,
        changed_at: row[5].as_u64()?,
        beat_at: row[6].as_u64()?,
        flaps: u16::try_from(row[7].as_u64()?).ok()?,
        interval: row.get(9).map_or(Some(0), |interval| interval.as_u64()?.try_into().ok())?,
    })
}

impl Batch {
    pub fn to_bytes(&self) -> Vec<u8> {
        let rows: Vec<Value> = self
            .beats
            .iter()
            .map(|beat| {
                let Beat { name, age_ms, going_away, interval, stamp } = beat;
                match (going_away, interval, stamp.text()) {
                    (false, 0, None) => json!([name.as_str(), age_ms]),
                    (true, 0, None) => json!([name.as_str(), age_ms, true]),
                    (_, _, None) => json!([name.as_str(), age_ms, going_away, interval]),
                    (_, _, Some(stamp)) => json!([name.as_str(), age_ms, going_away, interval, stamp]),
                }
            })
            .collect();
        json!({"v": 1, "answers": self.answers, "farewell": self.farewell, "at": self.at, "beats": rows})
            .to_string()
            .into_bytes()
    }

    /// The same, written `ms` later.
    #[must_use]
    pub fn later(&self, ms: u64) -> Self {
        let older = |beat: &Beat| Beat { age_ms: beat.age_ms.saturating_add(ms).min(OLDEST_MS), ..*beat };
        Self { at: self.at.saturating_add(ms), beats: self.beats.iter().map(older).collect(), ..*self }
    }

    /// # Errors
    /// If anything in it is not as it was written.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Garbled> {
        let (document, rows) = rows(bytes, "beats")?;
        let number = |key: &str| {
            document.get(key).and_then(Value::as_u64).ok_or_else(|| Garbled::new(format!("no {key}")))
        };
        let beats = rows.iter().map(|row| beat(row).ok_or_else(|| Garbled::new("a bad beat")));
        Ok(Self {
            answers: number("answers")?,
            farewell: document
                .get("farewell")
                .and_then(Value::as_bool)
                .ok_or_else(|| Garbled::new("no farewell"))?,
            at: number("at")?,
            beats: beats.collect::<Result<_, _>>()?,
        })
    }
}

fn beat(row: &Value) -> Option<Beat> {
    let row = row.as_array()?;
    Some(Beat {
        name: Name::parse(row.first()?.as_str()?).ok()?,
        age_ms: row.get(1)?.as_u64()?,
        going_away: row.get(2).is_some_and(|flag| flag.as_bool() == Some(true)),
        interval: row.get(3).map_or(Some(0), |interval| interval.as_u64()?.try_into().ok())?,
        stamp: row.get(4).map_or(Some(""), Value::as_str).map(Stamp::of)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::name::MAX_NAME;
    use crate::heartbeat::sent::{MAX_INTERVAL, MAX_STAMP};

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn longest(number: usize) -> Record {
        Record {
            name: name(&format!("{number:0>MAX_NAME$}")),
            state: State::Stopped,
            // Of two numbers, only a start or a return can have the older one.
            word: Some(Word::Restarted),
            sequence: u64::MAX,
            word_sequence: u64::MAX - 1,
            told: Told::Refused,
            // In the year 5138.
            changed_at: 99_999_999_999_999,
            beat_at: 99_999_999_999_999,
            flaps: u16::MAX,
            interval: MAX_INTERVAL,
        }
    }

    fn longest_beat(number: usize) -> Beat {
        let stamp = Stamp::of(&"\"".repeat(MAX_STAMP));
        Beat { name: longest(number).name, age_ms: 5, going_away: true, interval: MAX_INTERVAL, stamp }
    }

    #[test]
    fn what_was_written_is_read() {
        let records = vec![
            longest(1),
            Record { word: None, told: Told::No, state: State::Ok, word_sequence: u64::MAX, ..longest(2) },
            Record { interval: 0, ..longest(3) },
            Record { interval: 0, word_sequence: u64::MAX, ..longest(4) },
        ];
        assert_eq!(bucket_from_bytes(&bucket_to_bytes(records.iter().copied())), Ok(records));
        let beats = vec![
            Beat { going_away: false, interval: 0, stamp: Stamp::default(), ..longest_beat(1) },
            Beat { interval: 0, stamp: Stamp::default(), ..longest_beat(2) },
            Beat { going_away: false, stamp: Stamp::default(), ..longest_beat(3) },
            Beat { interval: 0, ..longest_beat(4) },
            longest_beat(5),
        ];
        let batch = Batch { answers: 3, farewell: true, at: 99, beats };
        assert_eq!(Batch::from_bytes(&batch.to_bytes()), Ok(batch));
    }

    #[test]
    fn a_full_znode_is_below_its_limit() {
        let bucket = bucket_to_bytes((0..MAX_IN_BUCKET).map(longest));
        assert!(bucket.len() <= 64 * 1024, "{}", bucket.len());
        let kinds: [fn(usize) -> Beat; 2] =
            [longest_beat, |number| Beat { stamp: Stamp::default(), ..longest_beat(number) }];
        for beat in kinds {
            let batches = in_batches((0..MAX_IN_BATCH).map(beat).collect());
            assert_eq!(batches.iter().map(Vec::len).sum::<usize>(), MAX_IN_BATCH);
            for beats in batches {
                let batch = Batch { answers: u64::MAX, farewell: true, at: u64::MAX, beats }.later(u64::MAX);
                let bytes = batch.to_bytes();
                assert!(bytes.len() <= 64 * 1024, "{}", bytes.len());
            }
        }
        let short = |number: usize| Beat { name: name(&format!("x{number}")), ..longest_beat(0) };
        let short = |number| Beat { stamp: Stamp::default(), ..short(number) };
        assert_eq!(in_batches((0..=MAX_IN_BATCH).map(short).collect()).len(), 2);
    }

    #[test]
    fn garbage_is_refused_with_a_reason() {
        for (bytes, reason) in [
            ("", "no JSON"),
            ("{}", "not of a version that is known"),
            (r#"{"v":2,"components":[],"beats":[]}"#, "not of a version that is known"),
            (r#"{"v":1}"#, "no "),
            (r#"{"v":1,"components":[["a"]],"beats":[["a"]],"answers":1,"farewell":false,"at":1}"#, "a bad "),
            (r#"{"v":1,"components":[3],"beats":[["a/b",1]],"answers":1,"farewell":false,"at":1}"#, "a bad "),
        ] {
            let bucket = bucket_from_bytes(bytes.as_bytes()).unwrap_err().to_string();
            let batch = Batch::from_bytes(bytes.as_bytes()).unwrap_err().to_string();
            assert!(bucket.starts_with(reason) && batch.starts_with(reason), "{bytes}: {bucket}, {batch}");
        }
    }

    #[test]
    fn buckets_are_even() {
        let mut counts = vec![0usize; BUCKETS.into()];
        for number in 0..100_000 {
            counts[usize::from(bucket_of(&format!(
                "x{}c{}s{}b0n0",
                number / 64,
                number % 8,
                number % 64 / 8
            )))] += 1;
        }
        assert!(counts.iter().all(|count| *count < 100), "{:?}", counts.iter().max());
    }
}
