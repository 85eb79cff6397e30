//! The part of the memory that is stored: beats in batches, components in buckets, and
//! notifications that the state manager has not accepted. Pure.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Audit, Change, Now};
use crate::heartbeat::core::beat::Stamp;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::{Beat, NotifyStatus, Record, bucket_of, bucket_to_bytes, in_batches};
use crate::heartbeat::core::state::State;
use crate::heartbeat::core::table::Component;
use crate::mutant;

impl Audit {
    /// Adopts the records of a bucket from a restored store. A component whose change in memory is
    /// at least as new as its record stays as it is, and so does a component without a record.
    pub fn adopt_after_rollback(&mut self, bucket: u16, records: &[Record], now: u64) {
        let mut merged: Vec<Record> = records.to_vec();
        for entry in self.table.in_bucket(bucket) {
            let component = self.table.get(*entry);
            if component.state == State::New {
                continue;
            }
            let known = Record { beat_at: component.beat_at, ..self.table.record(*entry, now, 0) };
            match merged.iter_mut().find(|record| record.name == known.name) {
                Some(record) if record.sequence <= known.sequence => *record = known,
                Some(_) => {}
                None => merged.push(known),
            }
        }
        self.adopt(bucket, &merged, now);
    }

    /// Marks the components that the store has lost to be written again: those of buckets that are
    /// `missing` there.
    pub fn write_again(&mut self, missing: impl Fn(u16) -> bool) -> usize {
        let unreachable = |(_, component): &(u32, &Component)| {
            component.state != State::New && missing(bucket_of(component.name()))
        };
        let entries: Vec<u32> = self.table.iter().filter(unreachable).map(|(entry, _)| entry).collect();
        if mutant!(TrustsAnEmptyStore) {
            return 0;
        }
        for entry in &entries {
            self.mark_dirty(*entry);
        }
        entries.len()
    }

    /// The highest number of a known change.
    pub fn highest_number(&self) -> u64 {
        self.table.iter().map(|(_, component)| component.sequence).max().unwrap_or(0)
    }

    /// Adopts the records of a bucket.
    pub fn adopt(&mut self, bucket: u16, records: &[Record], now: u64) {
        let gone = |audit: &Self, entry: u32| {
            let component = audit.table.get(entry);
            component.state != State::New && !records.iter().any(|r| r.name.as_str() == component.name())
        };
        for entry in self.table.in_bucket(bucket).to_vec() {
            if gone(self, entry) {
                self.remove(entry);
            }
        }
        for record in records {
            self.adopt_one(record, now);
        }
    }

    pub(super) fn adopt_one(&mut self, record: &Record, now: u64) {
        let Ok(entry) = self.table.ensure(&record.name) else { return };
        self.count(entry, false);
        let component = self.table.get_mut(entry);
        if component.state != record.state {
            component.base = now;
        }
        // The judge that wrote this record knew the newest beat.
        component.unjudged_beat &= match record.state {
            State::Ok => component.going_away,
            State::Stopped => !component.going_away,
            State::New | State::Warned | State::Dead => true,
        };
        if !component.unjudged_beat {
            self.stamps.remove(&entry);
        }
        let component = self.table.get_mut(entry);
        if component.last == 0 {
            // Otherwise the newest beat is known here, and with it the interval.
            component.interval = record.interval;
        }
        component.state = record.state;
        component.notification = record.notification;
        component.sequence = record.sequence;
        component.notification_sequence = record.notification_sequence;
        component.notified = record.notified;
        component.changed_at = record.changed_at;
        component.beat_at = record.beat_at;
        component.flaps = record.flaps;
        self.count(entry, true);
        self.arm(entry, record.state);
    }

    /// The beats since the last call, in batches that each fit into a znode.
    pub fn take_unflushed(&mut self, now: u64, missed_since: impl Fn(u64) -> u64) -> Vec<Vec<Beat>> {
        let entries = std::mem::take(&mut self.unflushed);
        let beats: Vec<Beat> = entries
            .into_iter()
            .map(|entry| {
                let component = self.table.get_mut(entry);
                component.unflushed = false;
                let age_ms = now.saturating_sub(component.last) + missed_since(component.last);
                let (unjudged_beat, going_away, interval) =
                    (component.unjudged_beat, component.going_away, component.interval);
                let name = component.full_name();
                let stamp = self.stamps.get(&entry).filter(|_| unjudged_beat).copied().unwrap_or_default();
                Beat { name, age_ms, going_away, interval, stamp }
            })
            .collect();
        in_batches(beats)
    }

    /// Buckets that differ from the store.
    pub fn dirty(&self) -> &BTreeSet<u16> {
        &self.dirty
    }

    pub fn bucket_bytes(&self, bucket: u16, now: Now) -> Vec<u8> {
        let entries = self.table.in_bucket(bucket).iter();
        let known = entries.filter(|entry| self.table.get(**entry).state != State::New);
        bucket_to_bytes(known.map(|entry| self.table.record(*entry, now.awake, now.wall)))
    }

    pub fn written(&mut self, bucket: u16) {
        self.dirty.remove(&bucket);
        if !self.unwritten.is_empty() {
            for entry in self.table.in_bucket(bucket) {
                self.unwritten.remove(entry);
                self.unstored.remove(entry);
            }
        }
    }

    /// Stored changes that the state manager has not accepted, oldest first.
    pub fn pending(&self, now: Now, most: usize) -> Vec<Change> {
        let mut found: Vec<Change> = self
            .unnotified
            .iter()
            .filter(|entry| !self.flaps.is_damped(**entry, now.awake, self.damping()))
            .map(|entry| self.table.get(*entry))
            .filter(|c| !self.dirty.contains(&bucket_of(c.name())))
            .map(to_notify)
            .collect();
        found.sort_unstable_by_key(|change| change.sequence);
        found.truncate(most);
        found
    }

    /// Some components that the state manager rejected, from this entry on; and the entry to
    /// continue with, if there are more.
    pub fn refused(&self, from: u32, most: usize) -> (Vec<Change>, Option<u32>) {
        if self.counts.refused == 0 {
            return (Vec::new(), None);
        }
        let refused = |(entry, c): &(u32, &Component)| *entry >= from && c.notified == NotifyStatus::Refused;
        let mut found = self.table.iter().filter(refused);
        let some = found.by_ref().take(most).map(|(_, c)| to_notify(c)).collect();
        (some, found.next().map(|(entry, _)| entry))
    }

    /// Makes all rejected components pending again.
    pub fn retry_refused(&mut self) {
        for change in self.refused(0, usize::MAX).0 {
            self.set_notified(&change.name, change.sequence, NotifyStatus::Pending);
        }
    }

    /// Records the state manager's answer about a change. If the component has a newer change, that
    /// stays pending.
    pub fn set_notified(&mut self, name: &Name, sequence: u64, notified: NotifyStatus) {
        let Some(entry) = self.table.find(name) else { return };
        let component = self.table.get(entry);
        if component.notification_sequence != sequence || component.notified == notified {
            return;
        }
        self.count(entry, false);
        self.table.get_mut(entry).notified = notified;
        self.count(entry, true);
        self.mark_dirty(entry);
    }

    pub fn newest_change(&self, name: &Name) -> Option<Change> {
        self.table.find(name).map(|entry| newest(self.table.get(entry)))
    }

    /// Adds the number of each component's newest change up to `until`, with the component's entry.
    pub fn add_numbers(&self, buckets: Range<u16>, until: u64, numbers: &mut Vec<(u64, u32)>) {
        for entry in buckets.flat_map(|bucket| self.table.in_bucket(bucket)) {
            let number = self.table.get(*entry).sequence;
            if (1..=until).contains(&number) {
                numbers.push((number, *entry));
            }
        }
    }

    /// The change with this number, if it is still the component's newest.
    pub fn change_numbered(&self, number: u64, entry: u32) -> Option<Change> {
        self.table.there(entry).filter(|component| component.sequence == number).map(newest)
    }

    /// Each component's newest change after `sequence`, oldest first.
    pub fn changes_since(&self, sequence: u64) -> Vec<Change> {
        let newer = self.table.iter().filter(|(_, c)| c.sequence > sequence);
        let mut found: Vec<Change> = newer.map(|(_, c)| newest(c)).collect();
        found.sort_unstable_by_key(|change| change.sequence);
        found
    }
}

impl Change {
    /// The newest change of a component.
    pub fn newest(record: &Record) -> Self {
        let Record { name, state, sequence, notification_sequence, changed_at: at, flaps, .. } = *record;
        let notification = record.notification.filter(|_| notification_sequence == sequence);
        Self { name, state, notification, sequence, at, flaps, stamp: Stamp::default() }
    }
}

/// The change that the state manager should get.
fn to_notify(component: &Component) -> Change {
    Change {
        notification: component.notification,
        sequence: component.notification_sequence,
        ..newest(component)
    }
}

fn newest(component: &Component) -> Change {
    Change {
        name: component.full_name(),
        state: component.state,
        notification: component
            .notification
            .filter(|_| component.notification_sequence == component.sequence),
        sequence: component.sequence,
        at: component.changed_at,
        flaps: component.flaps,
        stamp: Stamp::default(),
    }
}
