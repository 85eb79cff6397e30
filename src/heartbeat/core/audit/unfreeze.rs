//! Notifies again of the components in a bucket that was unreadable and is now readable or removed.
//! Pure.

use std::collections::HashMap;

use super::{Audit, Change, Now};
use crate::heartbeat::core::beat::Stamp;
use crate::heartbeat::core::record::{NotifyStatus, Record};
use crate::heartbeat::core::sequence::Sequence;
use crate::heartbeat::core::state::{Notification, State};

impl Audit {
    /// Compares memory with `records`, the bucket as it is now; a removed bucket has none. Returns
    /// a change with a new number for each component whose state differs from its record, and
    /// adopts the other records.
    pub fn unfreeze(
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
                    self.adopt_one(record, now.awake);
                }
                record => changes.push(self.notify_again(entry, record, sequence)),
            }
        }
        for record in stored.into_values() {
            self.adopt_one(record, now.awake);
        }
        changes.sort_unstable_by_key(|change| change.sequence);
        changes
    }

    fn notify_again(&mut self, entry: u32, record: Option<&Record>, sequence: &mut Sequence) -> Change {
        let number = sequence.next();
        self.count(entry, false);
        if record.is_some() {
            self.unstored.remove(&entry);
        }
        let component = self.table.get_mut(entry);
        let notification = match component.state {
            State::Warned => Some(Notification::MightBeDead),
            State::Dead => Some(Notification::DeclaredDead),
            State::Stopped | State::New => None,
            // A component with a record was started before.
            State::Ok if record.is_some() => Some(Notification::Restarted),
            State::Ok => Some(
                component
                    .notification
                    .filter(|notification| *notification == Notification::Started)
                    .unwrap_or(Notification::Restarted),
            ),
        };
        component.sequence = number;
        if notification.is_some() {
            (component.notification, component.notified, component.notification_sequence) =
                (notification, NotifyStatus::Pending, number);
        }
        let (name, state) = (component.full_name(), component.state);
        let (at, flaps) = (component.changed_at, component.flaps);
        self.unwritten.insert(entry);
        self.count(entry, true);
        self.mark_dirty(entry);
        Change { name, state, notification, sequence: number, at, flaps, stamp: Stamp::default() }
    }
}
