//! The components in memory, one or two hundred bytes each: found by name, listed by bucket, with a
//! small number for the timer wheel. No rules; those are in `audit`. Pure.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};

use hashbrown::HashTable;
use slab::Slab;

use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::{BUCKETS, MAX_IN_BUCKET, NotifyStatus, Record, bucket_of};
use crate::heartbeat::core::state::{Notification, State};

/// A tracker, by the number that this process gave it.
pub type TrackerIndex = u32;

/// This tracker itself.
pub const HERE: TrackerIndex = 0;

#[derive(Debug)]
pub struct Component {
    name: Box<str>,
    /// Time of the newest beat on the clock of silence; 0 if no replica has received one.
    pub last: u64,
    /// Silence counts from this time at the earliest, for example from the end of a maintenance.
    pub base: u64,
    /// The tracker that received the newest beat.
    pub via: TrackerIndex,
    pub sequence: u64,
    /// As in [`Record`].
    pub notification_sequence: u64,
    /// Wall-clock time of the newest change.
    pub changed_at: u64,
    /// Wall-clock time of a beat from before this process started.
    pub beat_at: u64,
    pub state: State,
    pub notification: Option<Notification>,
    pub notified: NotifyStatus,
    /// A beat has arrived that changes the state, and the judge has not decided yet.
    pub unjudged_beat: bool,
    /// The newest beat announces a planned stop.
    pub going_away: bool,
    /// A beat has arrived since the last batch was written.
    pub unflushed: bool,
    /// As in the store; the judge counts with `Flaps`.
    pub flaps: u16,
    /// As in [`Record`].
    pub interval: u16,
}

impl Component {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name as a value.
    pub fn full_name(&self) -> Name {
        // Names in the table are valid.
        Name::parse(&self.name).unwrap_or_else(|_| unreachable!("kept names are normal"))
    }
}

/// No room for another component.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("Too many components")]
pub struct Full;

#[derive(Debug)]
pub struct Table {
    index: HashTable<u32>,
    hasher: RandomState,
    components: Slab<Component>,
    buckets: Vec<Vec<u32>>,
    /// Names of machines among the components: few, and needed often.
    machines: BTreeSet<Name>,
    limit: usize,
}

impl Table {
    pub fn new(limit: usize) -> Self {
        Self {
            index: HashTable::new(),
            hasher: RandomState::new(),
            components: Slab::new(),
            buckets: vec![Vec::new(); BUCKETS.into()],
            machines: BTreeSet::new(),
            limit,
        }
    }

    pub fn len(&self) -> usize {
        self.components.len()
    }

    pub fn is_empty(&self) -> bool {
        self.components.is_empty()
    }

    pub fn find(&self, name: &Name) -> Option<u32> {
        let (text, components) = (name.as_str(), &self.components);
        let hash = self.hasher.hash_one(text);
        self.index.find(hash, |entry| &*components[*entry as usize].name == text).copied()
    }

    pub fn get(&self, entry: u32) -> &Component {
        &self.components[entry as usize]
    }

    /// Like [`Table::get`], for an entry that may be gone.
    pub fn there(&self, entry: u32) -> Option<&Component> {
        self.components.get(entry as usize)
    }

    pub fn get_mut(&mut self, entry: u32) -> &mut Component {
        &mut self.components[entry as usize]
    }

    /// # Errors
    /// [`Full`] if the component is new and there is no room.
    pub fn ensure(&mut self, name: &Name) -> Result<u32, Full> {
        if let Some(entry) = self.find(name) {
            return Ok(entry);
        }
        let bucket = &mut self.buckets[usize::from(bucket_of(name.as_str()))];
        if self.components.len() >= self.limit || bucket.len() >= MAX_IN_BUCKET {
            return Err(Full);
        }
        let entry = u32::try_from(self.components.insert(Component {
            name: name.as_str().into(),
            last: 0,
            base: 0,
            via: HERE,
            sequence: 0,
            notification_sequence: 0,
            changed_at: 0,
            beat_at: 0,
            state: State::New,
            notification: None,
            notified: NotifyStatus::Accepted,
            unjudged_beat: false,
            going_away: false,
            unflushed: false,
            flaps: 0,
            interval: 0,
        }))
        .map_err(|_| Full)?;
        bucket.push(entry);
        if name.machine().is_some() {
            self.machines.insert(*name);
        }
        let (hasher, components) = (&self.hasher, &self.components);
        let hash = hasher.hash_one(name.as_str());
        self.index.insert_unique(hash, entry, |entry| hasher.hash_one(&*components[*entry as usize].name));
        Ok(entry)
    }

    pub fn remove(&mut self, entry: u32) -> Component {
        let component = self.components.remove(entry as usize);
        let hash = self.hasher.hash_one(&*component.name);
        if let Ok(found) = self.index.find_entry(hash, |other| *other == entry) {
            found.remove();
        }
        self.buckets[usize::from(bucket_of(&component.name))].retain(|other| *other != entry);
        self.machines.remove(&component.full_name());
        component
    }

    pub fn machines(&self) -> &BTreeSet<Name> {
        &self.machines
    }

    pub fn in_bucket(&self, bucket: u16) -> &[u32] {
        self.buckets.get(usize::from(bucket)).map_or(&[], Vec::as_slice)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Component)> {
        self.components.iter().filter_map(|(entry, component)| Some((u32::try_from(entry).ok()?, component)))
    }

    /// The record of a component; `now` and `wall` are the same moment on two clocks.
    pub fn record(&self, entry: u32, now: u64, wall: u64) -> Record {
        let component = self.get(entry);
        let beat_at = match component.last {
            0 => component.beat_at,
            last => wall.saturating_sub(now.saturating_sub(last)),
        };
        Record {
            name: component.full_name(),
            state: component.state,
            notification: component.notification,
            sequence: component.sequence,
            notification_sequence: component.notification_sequence,
            notified: component.notified,
            changed_at: component.changed_at,
            beat_at,
            flaps: component.flaps,
            interval: component.interval,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> Name {
        Name::parse(&format!("x{number}c0")).unwrap()
    }

    #[test]
    fn entries_of_removed_components_are_reused() {
        let mut table = Table::new(1000);
        let entries: Vec<u32> = (0..100).map(|number| table.ensure(&name(number)).unwrap()).collect();
        assert_eq!(table.ensure(&name(5)), Ok(entries[5]));
        assert_eq!(table.len(), 100);
        for number in (0..100).step_by(2) {
            assert_eq!(table.remove(entries[number]).name(), name(number).as_str());
        }
        for number in 0..100 {
            assert_eq!(table.find(&name(number)).is_some(), number % 2 == 1, "{number}");
        }
        let again = table.ensure(&name(1000)).unwrap();
        assert!(entries.contains(&again));
        let listed: usize = (0..BUCKETS).map(|bucket| table.in_bucket(bucket).len()).sum();
        assert_eq!(listed, table.len());
    }

    #[test]
    fn number_of_components_is_limited() {
        let mut table = Table::new(3);
        for number in 0..3 {
            table.ensure(&name(number)).unwrap();
        }
        assert_eq!(table.ensure(&name(3)), Err(Full));
        assert!(table.ensure(&name(2)).is_ok(), "who is known stays welcome");
    }
}
