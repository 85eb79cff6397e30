//! The values that trackers store: components in buckets, written by the judge, and batches of
//! beats, written by every replica. Malformed data is an error with a reason, never an empty value.
//! Pure.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::heartbeat::core::beat::Stamp;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::sequence::MAX_NUMBER;
use crate::heartbeat::core::state::{Notification, State};

/// The number of znodes for components: few enough bytes in each for one change, enough room for a
/// million components.
pub const BUCKETS: u16 = 4096;

/// The most components in a bucket: as many as fit into a znode with the longest names.
pub const MAX_IN_BUCKET: usize = 350;

/// Beats in one znode,
pub const MAX_IN_BATCH: usize = 700;

/// and the most bytes of their rows.
const MAX_BATCH_BYTES: usize = 64_000;

/// Beats that are older than this are ignored.
const OLDEST_MS: u64 = 86_400_000;

/// Whether the state manager has accepted the component's newest notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotifyStatus {
    Pending,
    Accepted,
    /// Rejected. The next change is sent again.
    Refused,
}

impl NotifyStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "no",
            Self::Accepted => "yes",
            Self::Refused => "refused",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Pending, Self::Accepted, Self::Refused].into_iter().find(|notified| notified.as_str() == text)
    }
}

/// A component's record, written by the judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub name: Name,
    pub state: State,
    /// The newest notification, if there was one.
    pub notification: Option<Notification>,
    /// The number of the newest change; 0 before the first.
    pub sequence: u64,
    /// The number of the change that caused `notification`. It is older than `sequence` if the
    /// newest change is a planned stop, or the return from one, which causes no notification.
    pub notification_sequence: u64,
    pub notified: NotifyStatus,
    /// Wall-clock time of the newest change, for people.
    pub changed_at: u64,
    /// Wall-clock time of the newest beat when the record was written.
    pub beat_at: u64,
    /// The number of restarts, while the component is flapping.
    pub flaps: u16,
    /// Seconds between two beats of the component, from its `Interval`; 0 if it sends none.
    pub interval: u16,
}

/// A mass outage, as the next judge needs it. Without one, nothing is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    #[serde(rename_all = "kebab-case")]
    Held {
        /// The number of silent components, and of all.
        silent: usize,
        alive: usize,
        /// How long the deaths are held, on the clocks of the judges. The wall clock never ends a
        /// hold.
        for_ms: u64,
        /// The number of releases when this was written. A higher number releases this hold.
        release: i32,
    },
    /// The hold is over; its deaths are declared.
    #[serde(rename = "passing")]
    Released,
}

/// Beats of one replica. Its batches are numbered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The flush request of the judge that this batch answers, or an older one.
    pub answers: u64,
    /// The final batch of a replica that stopped as planned: no beat is missing.
    pub is_final: bool,
    /// Wall-clock time of writing.
    pub at: u64,
    pub beats: Vec<Beat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    pub name: Name,
    /// Age when the batch was written, on the replica's own clock.
    pub age_ms: u64,
    pub going_away: bool,
    /// As in [`Record`].
    pub interval: u16,
    /// The `Timestamp` of a beat that causes a change; empty for others.
    pub stamp: Stamp,
}

impl Beat {
    /// The most bytes of the row: JSON escapes a character of one byte with two, and longer
    /// characters not at all.
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
pub struct Malformed(String);

impl Malformed {
    pub fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// The bucket of a component. The function must never change, since records are found by it.
pub fn bucket_of(name: &str) -> u16 {
    (crc32c::crc32c(name.as_bytes()) % u32::from(BUCKETS)) as u16
}

/// Formats JSON by hand, because one pass may write all buckets; no text in it needs to be escaped.
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
    let Record {
        name,
        state,
        notification,
        sequence,
        notification_sequence,
        notified,
        changed_at,
        beat_at,
        flaps,
        interval,
    } = record;
    let (name, state, notified) = (name.as_str(), state.as_str(), notified.as_str());
    let (quote, notification) =
        notification.map_or(("", "null"), |notification| ("\"", notification.as_str()));
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "[\"{name}\",\"{state}\",{quote}{notification}{quote},{sequence},\"{notified}\",{changed_at},\
         {beat_at},{flaps}"
    );
    if notification_sequence != sequence || *interval != 0 {
        let _ = write!(text, ",{notification_sequence}");
    }
    if *interval != 0 {
        let _ = write!(text, ",{interval}");
    }
    text.push(']');
}

/// # Errors
/// If the data is malformed.
pub fn bucket_from_bytes(bytes: &[u8]) -> Result<Vec<Record>, Malformed> {
    rows(bytes, "components")?
        .1
        .iter()
        .map(|row| record(row).ok_or_else(|| Malformed::new("a bad component")))
        .collect()
}

/// The document and its rows.
fn rows(bytes: &[u8], key: &str) -> Result<(Value, Vec<Value>), Malformed> {
    let mut document: Value = serde_json::from_slice(bytes).map_err(|_| Malformed::new("no JSON"))?;
    if document.get("v").and_then(Value::as_u64) != Some(1) {
        return Err(Malformed::new("not of a version that is known"));
    }
    match document.get_mut(key).map(Value::take) {
        Some(Value::Array(rows)) => Ok((document, rows)),
        _ => Err(Malformed::new(format!("no {key}"))),
    }
}

fn record(row: &Value) -> Option<Record> {
    let row = row.as_array().filter(|row| row.len() >= 8)?;
    let notification = match &row[2] {
        Value::Null => None,
        notification => Some(Notification::parse(notification.as_str()?)?),
    };
    let number = |value: &Value| value.as_u64().filter(|number| *number <= MAX_NUMBER);
    let sequence = number(&row[3])?;
    Some(Record {
        name: Name::parse(row[0].as_str()?).ok()?,
        state: State::parse(row[1].as_str()?)?,
        notification,
        sequence,
        notification_sequence: row.get(8).map_or(Some(sequence), number)?,
        notified: NotifyStatus::parse(row[4].as_str()?)?,
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
        json!({"v": 1, "answers": self.answers, "farewell": self.is_final, "at": self.at, "beats": rows})
            .to_string()
            .into_bytes()
    }

    /// The same batch, written `ms` later.
    #[must_use]
    pub fn later(&self, ms: u64) -> Self {
        let older = |beat: &Beat| Beat { age_ms: beat.age_ms.saturating_add(ms).min(OLDEST_MS), ..*beat };
        Self { at: self.at.saturating_add(ms), beats: self.beats.iter().map(older).collect(), ..*self }
    }

    /// # Errors
    /// If anything in it is not as it was written.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let (document, rows) = rows(bytes, "beats")?;
        let number = |key: &str| {
            document.get(key).and_then(Value::as_u64).ok_or_else(|| Malformed::new(format!("no {key}")))
        };
        let beats = rows.iter().map(|row| beat(row).ok_or_else(|| Malformed::new("a bad beat")));
        Ok(Self {
            answers: number("answers")?,
            is_final: document
                .get("farewell")
                .and_then(Value::as_bool)
                .ok_or_else(|| Malformed::new("no farewell"))?,
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
    use crate::heartbeat::core::beat::{MAX_INTERVAL, MAX_STAMP};
    use crate::heartbeat::core::name::MAX_NAME;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn longest(number: usize) -> Record {
        Record {
            name: name(&format!("{number:0>MAX_NAME$}")),
            state: State::Stopped,
            // Only a start or restart can have the older of two numbers.
            notification: Some(Notification::Restarted),
            sequence: MAX_NUMBER,
            notification_sequence: MAX_NUMBER - 1,
            notified: NotifyStatus::Refused,
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
    fn records_and_batches_are_read_as_written() {
        let records = vec![
            longest(1),
            Record {
                notification: None,
                notified: NotifyStatus::Pending,
                state: State::Ok,
                notification_sequence: MAX_NUMBER,
                ..longest(2)
            },
            Record { interval: 0, ..longest(3) },
            Record { interval: 0, notification_sequence: MAX_NUMBER, ..longest(4) },
        ];
        assert_eq!(bucket_from_bytes(&bucket_to_bytes(records.iter().copied())), Ok(records));
        let beats = vec![
            Beat { going_away: false, interval: 0, stamp: Stamp::default(), ..longest_beat(1) },
            Beat { interval: 0, stamp: Stamp::default(), ..longest_beat(2) },
            Beat { going_away: false, stamp: Stamp::default(), ..longest_beat(3) },
            Beat { interval: 0, ..longest_beat(4) },
            longest_beat(5),
        ];
        let batch = Batch { answers: 3, is_final: true, at: 99, beats };
        assert_eq!(Batch::from_bytes(&batch.to_bytes()), Ok(batch));
    }

    #[test]
    fn full_znode_is_below_its_limit() {
        let bucket = bucket_to_bytes((0..MAX_IN_BUCKET).map(longest));
        assert!(bucket.len() <= 64 * 1024, "{}", bucket.len());
        let kinds: [fn(usize) -> Beat; 2] =
            [longest_beat, |number| Beat { stamp: Stamp::default(), ..longest_beat(number) }];
        for beat in kinds {
            let batches = in_batches((0..MAX_IN_BATCH).map(beat).collect());
            assert_eq!(batches.iter().map(Vec::len).sum::<usize>(), MAX_IN_BATCH);
            for beats in batches {
                let batch = Batch { answers: u64::MAX, is_final: true, at: u64::MAX, beats }.later(u64::MAX);
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
