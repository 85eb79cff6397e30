//! The states of watched units. Signals of systemd contain only some of the observed properties;
//! the others are read, and reads overlap with signals. The cache decides when to read and which
//! state to report, so that each change is reported once and the last state is never lost. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{Event, UnitState};

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Emit(Event),
    /// Read the state of a unit, then call [`UnitCache::read`]. With `if_loaded` the read must not
    /// make systemd load the unit: it would report that as a new unit, which leads to another read.
    Read {
        unit: String,
        if_loaded: bool,
    },
}

/// The properties of a unit that a signal contains.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) active: Option<String>,
    pub(super) sub: Option<String>,
    pub(super) result: Option<String>,
}

/// The states of watched units. `S` is the position of a message among those that were received.
#[derive(Debug)]
pub(super) struct UnitCache<S> {
    units: BTreeMap<String, Entry<S>>,
    /// Units whose last read has failed, and is to be repeated.
    failed: BTreeSet<String>,
}

#[derive(Debug)]
struct Entry<S> {
    /// The last reported state and the position of the message that it came from.
    known: Option<(UnitState, S)>,
    /// Whether the unit was reported, with its state or as a new unit.
    reported: bool,
    reading: bool,
    /// Whether another read follows the current one.
    again: bool,
    /// The position of the last signal during the current read.
    signal: Option<S>,
    /// Whether the next read is reported even if nothing has changed.
    forced: bool,
    /// The result from the signal of the unit's type, which precedes that of the unit.
    result: Option<String>,
}

impl<S> Default for Entry<S> {
    fn default() -> Self {
        Self {
            known: None,
            reported: false,
            reading: false,
            again: false,
            signal: None,
            forced: false,
            result: None,
        }
    }
}

impl<S> Default for UnitCache<S> {
    fn default() -> Self {
        Self { units: BTreeMap::new(), failed: BTreeSet::new() }
    }
}

impl<S: Ord + Copy> UnitCache<S> {
    /// Keeps only units that are still watched.
    pub(super) fn retain(&mut self, watched: impl Fn(&str) -> bool) {
        self.units.retain(|unit, _| watched(unit));
    }

    /// Handles a request to report the state of a unit.
    pub(super) fn refresh(&mut self, unit: &str) -> Vec<Step> {
        let entry = self.units.entry(unit.to_owned()).or_default();
        entry.forced = true;
        begin_read(unit, entry, false)
    }

    /// Reads all units again: their files may have changed, or signals were lost.
    pub(super) fn read_all(&mut self) -> Vec<Step> {
        let again = self.units.iter_mut().flat_map(|(unit, entry)| {
            entry.again = entry.reading;
            begin_read(unit, entry, true)
        });
        again.collect()
    }

    /// Handles the end of a connection: reads that are under way never end.
    pub(super) fn connection_lost(&mut self) {
        for entry in self.units.values_mut() {
            (entry.reading, entry.again, entry.signal) = (false, false, None);
        }
        self.failed.clear();
    }

    /// Handles the list of watched units that systemd has loaded: signals about them may have been
    /// lost.
    pub(super) fn listed(&mut self, units: &[String], at: S) -> Vec<Step> {
        let new: Vec<&String> = units.iter().filter(|unit| !self.units.contains_key(*unit)).collect();
        new.into_iter().flat_map(|unit| self.loaded(unit, at)).collect()
    }

    /// Handles systemd's signal about a loaded unit.
    pub(super) fn loaded(&mut self, unit: &str, at: S) -> Vec<Step> {
        let entry = self.units.entry(unit.to_owned()).or_default();
        entry.reported = true;
        let mut steps = vec![Step::Emit(Event::UnitNew(unit.to_owned()))];
        if entry.reading {
            entry.signal = Some(at);
        }
        steps.extend(begin_read(unit, entry, true));
        steps
    }

    /// Handles systemd's signal about a unit that is no longer loaded.
    pub(super) fn unloaded(&mut self, unit: &str) -> Vec<Step> {
        match self.units.get_mut(unit) {
            Some(entry) if entry.forced => (entry.known, entry.reported) = (None, false),
            _ => drop(self.units.remove(unit)),
        }
        vec![Step::Emit(Event::UnitRemoved(unit.to_owned()))]
    }

    /// Handles the signal about the properties of a unit's type. That of the unit follows.
    pub(super) fn type_changed(&mut self, unit: &str, change: Change) {
        if let (Some(entry), Some(result)) = (self.units.get_mut(unit), change.result) {
            entry.result = Some(result);
        }
    }

    /// Handles the signal about the properties of a unit.
    pub(super) fn changed(&mut self, unit: &str, at: S, change: Change) -> Vec<Step> {
        let entry = self.units.entry(unit.to_owned()).or_default();
        let result = entry.result.take();
        if entry.reading {
            entry.signal = Some(at);
            return Vec::new();
        }
        let Some((known, known_at)) = &mut entry.known else { return begin_read(unit, entry, true) };
        if at <= *known_at {
            return Vec::new();
        }
        let next = UnitState {
            active: change.active.unwrap_or_else(|| known.active.clone()),
            sub: change.sub.unwrap_or_else(|| known.sub.clone()),
            result: result.or_else(|| known.result.clone()),
            ..known.clone()
        };
        *known_at = at;
        if next == *known {
            return Vec::new();
        }
        known.clone_from(&next);
        entry.reported = true;
        vec![Step::Emit(Event::Unit(unit.to_owned(), next))]
    }

    /// Handles the end of a read. `state` is `None` if the unit is not loaded.
    pub(super) fn read(&mut self, unit: &str, at: S, state: Option<UnitState>) -> Vec<Step> {
        let Some(entry) = self.units.get_mut(unit) else { return Vec::new() };
        entry.reading = false;
        let newer_signal = entry.signal.take().is_some_and(|signal| signal > at);
        if std::mem::take(&mut entry.again) || newer_signal || (state.is_none() && entry.forced) {
            // A forced read that did not find the unit was begun by a signal; the next one loads
            // the unit.
            let if_loaded = !entry.forced;
            return begin_read(unit, entry, if_loaded);
        }
        let Some(state) = state else { return self.gone(unit) };
        let is_new = entry.known.as_ref().is_none_or(|(known, _)| *known != state);
        let report = std::mem::take(&mut entry.forced) || is_new;
        entry.known = Some((state.clone(), at));
        entry.result = None;
        entry.reported |= report;
        if report { vec![Step::Emit(Event::Unit(unit.to_owned(), state))] } else { Vec::new() }
    }

    /// Handles a unit that does not exist. If the signal about its end was lost, it is reported
    /// here.
    pub(super) fn gone(&mut self, unit: &str) -> Vec<Step> {
        let was_reported = self.units.remove(unit).is_some_and(|entry| entry.reported);
        if was_reported { vec![Step::Emit(Event::UnitRemoved(unit.to_owned()))] } else { Vec::new() }
    }

    /// Handles a failed read. It is repeated by [`UnitCache::retry`].
    pub(super) fn read_failed(&mut self, unit: &str) {
        if let Some(entry) = self.units.get_mut(unit) {
            (entry.reading, entry.again, entry.signal) = (false, false, None);
            self.failed.insert(unit.to_owned());
        }
    }

    /// Returns whether a read has failed that was not repeated yet.
    pub(super) fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Repeats the reads that have failed.
    pub(super) fn retry(&mut self) -> Vec<Step> {
        let mut reads = Vec::new();
        for unit in std::mem::take(&mut self.failed) {
            if let Some(entry) = self.units.get_mut(&unit) {
                let if_loaded = !entry.forced;
                reads.extend(begin_read(&unit, entry, if_loaded));
            }
        }
        reads
    }
}

/// Begins a read, unless one is under way: that one is repeated if a signal follows it.
fn begin_read<S>(unit: &str, entry: &mut Entry<S>, if_loaded: bool) -> Vec<Step> {
    if std::mem::replace(&mut entry.reading, true) {
        return Vec::new();
    }
    vec![Step::Read { unit: unit.to_owned(), if_loaded }]
}

#[cfg(test)]
#[path = "unit_cache_tests.rs"]
mod tests;
