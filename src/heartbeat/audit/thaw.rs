//! Notifies again of the components in a bucket that was unreadable and is now readable or removed.
//! Pure.

use std::collections::HashMap;

use super::{Audit, Change, Now, Sequence};
use crate::heartbeat::record::{Record, Told};
use crate::heartbeat::sent::Stamp;
use crate::heartbeat::state::{State, Word};

impl Audit {
    /// Compares memory with `records`, the bucket as it is now; a removed bucket has none. Returns a
    /// change with a new number for each component whose state differs from its record, and adopts
    /// the other records.
    pub fn thaw(
        &mut self,
        bucket: u16,
        records: &[Record],
        now: Now,
        sequence: &mut Sequence,
    ) -> Vec<Change> {
        let mut stored: HashMap<&str, &Record> =
            records.iter().map(|record| (record.name.as_str(), record)).collect();
        let mut changes = Vec::new();
        for entry in self.table.in_bucket(bucket).to_vec() {
            let component = self.table.get(entry);
            let (state, number) = (component.state, component.sequence);
            if state == State::New {
                continue;
            }
            match stored.remove(component.name()) {
                Some(record) if record.state == state || record.sequence > number => {
                    self.unwritten.remove(&entry);
                    self.unstored.remove(&entry);
                    self.adopt_one(record, now.watched);
                }
                record => changes.push(self.tell_again(entry, record, sequence)),
            }
        }
        for record in stored.into_values() {
            self.adopt_one(record, now.watched);
        }
        changes.sort_unstable_by_key(|change| change.sequence);
        changes
    }

    fn tell_again(&mut self, entry: u32, record: Option<&Record>, sequence: &mut Sequence) -> Change {
        let number = sequence.next();
        self.count(entry, false);
        if record.is_some() {
            self.unstored.remove(&entry);
        }
        let component = self.table.get_mut(entry);
        let word = match component.state {
            State::Warned => Some(Word::MightBeDead),
            State::Dead => Some(Word::DeclaredDead),
            State::Stopped | State::New => None,
            // A component that is known was started before.
            State::Ok if record.is_some() => Some(Word::Restarted),
            State::Ok => {
                Some(component.word.filter(|word| *word == Word::Started).unwrap_or(Word::Restarted))
            }
        };
        component.sequence = number;
        if word.is_some() {
            (component.word, component.told, component.word_sequence) = (word, Told::No, number);
        }
        let (name, state) = (component.full_name(), component.state);
        let (at, flaps) = (component.changed_at, component.flaps);
        self.unwritten.insert(entry);
        self.count(entry, true);
        self.soil(entry);
        Change { name, state, word, sequence: number, at, flaps, stamp: Stamp::default() }
    }
}
