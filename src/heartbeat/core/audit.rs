//! The states of all components: beats and time are the input, changes of states the output. Every
//! replica keeps this memory, so that each can become the judge; only the judge asks for changes.
//! The cost of a pass depends on the components that are due, not on all of them. Pure.

mod judging;
mod persist;
mod unfreeze;
mod unreachable;

use std::collections::{BTreeSet, HashMap};

use crate::heartbeat::core::beat::{BeatDetails, IncomingBeat, Stamp};
use crate::heartbeat::core::flapping::Flaps;
use crate::heartbeat::core::mass_outage::{HoldPhase, MassHold};
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::params::Params;
use crate::heartbeat::core::record::{Beat, NotifyStatus};

use crate::heartbeat::core::state::{Notification, State, windows};
use crate::heartbeat::core::table::{Component, Full, HERE, Table, TrackerIndex};
use crate::heartbeat::core::timer_wheel::TimerWheel;

/// A moment on two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// On the clock of `awake_clock`, which measures silence.
    pub awake: u64,
    /// Milliseconds since 1970, for people. No decision depends on it except the end of a
    /// maintenance.
    pub wall: u64,
}

impl Now {
    /// Converts a wall-clock time.
    fn awake_at(self, wall: u64) -> u64 {
        (self.awake + wall.saturating_sub(self.wall)).saturating_sub(self.wall.saturating_sub(wall))
    }
}

/// The effect of a beat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BeatEffect {
    /// The component stays as it is.
    Unchanged,
    /// The component's state will change, so the beat should reach the store at once.
    Changes,
}

/// A change of a component's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub name: Name,
    pub state: State,
    /// `None` if the change causes no notification.
    pub notification: Option<Notification>,
    pub sequence: u64,
    pub at: u64,
    /// The number of restarts, if the component is flapping.
    pub flaps: u16,
    /// The `Timestamp` of the beat that caused the change; empty if no beat did, or if it is no
    /// longer known.
    pub stamp: Stamp,
}

/// The result of one pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decisions {
    pub changes: Vec<Change>,
    /// A mass outage begins with this pass: deaths are held.
    pub is_new_hold: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub ok: usize,
    pub warned: usize,
    pub dead: usize,
    pub stopped: usize,
    pub unnotified: usize,
    pub refused: usize,
    /// In unreadable buckets.
    pub unreadable: usize,
    /// Deaths held because of a mass outage.
    pub held: usize,
    /// Deaths held because the components may be beating to an unreachable tracker.
    pub held_for_tracker: usize,
}

#[derive(Debug)]
pub struct Audit {
    table: Table,
    wheel: TimerWheel,
    warn: u64,
    err: u64,
    /// Silence counts from this time at the earliest.
    floor: u64,
    /// This replica is the judge.
    judging: bool,
    changed_by_beat: Vec<u32>,
    /// Timestamps of beats that change a state.
    stamps: HashMap<u32, Stamp>,
    unflushed: Vec<u32>,
    unnotified: BTreeSet<u32>,
    /// Components whose deaths are held because of a mass outage.
    held: BTreeSet<u32>,
    /// The longest window of the components in `held`, since a component that beats seldom has a
    /// longer one.
    held_window: u64,
    hold: MassHold,
    /// While deaths are held: the number of silent components and of all.
    alarm: Option<(usize, usize)>,
    /// Unreachable trackers that may still accept beats, each with the time until which deaths are
    /// held for it.
    unreachable: HashMap<TrackerIndex, u64>,
    /// Components whose deaths are held because of a tracker in `unreachable`.
    held_for_tracker: BTreeSet<u32>,
    flaps: Flaps,
    maintenance: HashMap<Name, u64>,
    dirty: BTreeSet<u16>,
    /// Components with a change that is not in the store yet.
    unwritten: BTreeSet<u32>,
    /// Those of them whose first change it is.
    unstored: BTreeSet<u32>,
    counts: Counts,
}

impl Audit {
    pub fn new(now: u64, params: &Params, limit: usize) -> Self {
        let mut audit = Self {
            table: Table::new(limit),
            wheel: TimerWheel::new(now),
            warn: 0,
            err: 0,
            floor: now,
            judging: false,
            changed_by_beat: Vec::new(),
            stamps: HashMap::new(),
            unflushed: Vec::new(),
            unnotified: BTreeSet::new(),
            held: BTreeSet::new(),
            held_window: 0,
            hold: MassHold::default(),
            alarm: None,
            unreachable: HashMap::new(),
            held_for_tracker: BTreeSet::new(),
            flaps: Flaps::default(),
            maintenance: HashMap::new(),
            dirty: BTreeSet::new(),
            unwritten: BTreeSet::new(),
            unstored: BTreeSet::new(),
            counts: Counts::default(),
        };
        audit.configure(now, params);
        audit
    }

    pub fn configure(&mut self, now: u64, params: &Params) {
        self.hold.configure(params.mass_share, params.mass_hold_ms);
        if (self.warn, self.err) != (params.warn_ms, params.err_ms) {
            (self.warn, self.err) = (params.warn_ms, params.err_ms);
            self.rearm(now);
        }
    }

    pub fn maintenance(&self) -> &HashMap<Name, u64> {
        &self.maintenance
    }

    /// Sets the components that are in maintenance, each until a wall-clock time.
    pub fn set_maintenance(&mut self, now: Now, until: HashMap<Name, u64>) {
        let before = std::mem::replace(&mut self.maintenance, until);
        for (name, end) in before {
            let Some(entry) = self.table.find(&name).filter(|_| self.maintenance.get(&name) != Some(&end))
            else {
                continue;
            };
            let component = self.table.get_mut(entry);
            // Silence counts from the end of the maintenance.
            component.base = component.base.min(now.awake).max(now.awake_at(end).min(now.awake));
            let state = component.state;
            self.arm(entry, state);
        }
    }

    /// Applies a beat that this tracker received now.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat(&mut self, now: u64, name: &Name, going_away: bool) -> Result<BeatEffect, Full> {
        self.beat_with(now, &(*name, going_away).into())
    }

    /// Like [`Audit::beat`], with all fields of the beat.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat_with(&mut self, now: u64, beat: &IncomingBeat) -> Result<BeatEffect, Full> {
        let entry = self.table.ensure(&beat.name)?;
        Ok(self.apply_local_beat(entry, now, beat.details))
    }

    /// Applies a beat if it changes nothing. Returns whether it did.
    pub fn beat_if_unchanged(&mut self, now: u64, beat: &IncomingBeat) -> bool {
        let steady = self.table.find(&beat.name).filter(|entry| self.table.get(*entry).state == State::Ok);
        steady.is_some_and(|entry| self.apply_local_beat(entry, now, beat.details) == BeatEffect::Unchanged)
    }

    fn apply_local_beat(&mut self, entry: u32, now: u64, details: BeatDetails) -> BeatEffect {
        let component = self.table.get_mut(entry);
        if !component.unflushed {
            component.unflushed = true;
            self.unflushed.push(entry);
        }
        component.via = HERE;
        self.apply_beat(entry, now, details)
    }

    /// Applies a beat that the replica `via` received `beat.age_ms` ago.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat_from_replica(
        &mut self,
        now: u64,
        beat: &Beat,
        via: TrackerIndex,
    ) -> Result<BeatEffect, Full> {
        let at = now.saturating_sub(beat.age_ms).max(1);
        let entry = self.table.ensure(&beat.name)?;
        if self.table.get(entry).last < at {
            self.table.get_mut(entry).via = via;
        }
        let (_, err) = windows(self.warn, self.err, beat.interval);
        let too_old = beat.age_ms >= err && self.table.get(entry).state != State::New;
        if too_old || self.table.get(entry).last >= at {
            return Ok(BeatEffect::Unchanged);
        }
        let Beat { going_away, interval, stamp, .. } = *beat;
        Ok(self.apply_beat(entry, at, BeatDetails { going_away, interval, stamp }))
    }

    fn apply_beat(&mut self, entry: u32, at: u64, details: BeatDetails) -> BeatEffect {
        let BeatDetails { going_away, interval, stamp } = details;
        let component = self.table.get_mut(entry);
        component.last = component.last.max(at);
        component.going_away = going_away;
        // The next judge may not have received this beat, and then reads the interval from the
        // store.
        let other_interval = std::mem::replace(&mut component.interval, interval) != interval;
        if other_interval && self.judging && component.state != State::New {
            self.mark_dirty(entry);
        }
        let component = self.table.get_mut(entry);
        if component.state == State::Ok && !going_away {
            component.unjudged_beat = false;
            let deadline = component.last + windows(self.warn, self.err, interval).0;
            self.wheel.put(entry, deadline);
            return BeatEffect::Unchanged;
        }
        if component.state == State::Stopped && going_away {
            return BeatEffect::Unchanged;
        }
        if stamp.is_empty() {
            self.stamps.remove(&entry);
        } else {
            self.stamps.insert(entry, stamp);
        }
        if self.judging && !component.unjudged_beat {
            self.changed_by_beat.push(entry);
        }
        component.unjudged_beat = true;
        BeatEffect::Changes
    }

    /// Whether a component's state changed after this wall-clock time.
    pub fn changed_since(&self, name: &Name, wall: u64) -> bool {
        self.table.find(name).is_some_and(|entry| self.table.get(entry).changed_at > wall)
    }

    /// Starts every window again, because beats may have been missed until now.
    pub fn restart_windows(&mut self, now: u64) {
        self.floor = self.floor.max(now);
        self.hold.restart_windows(now, self.err);
    }

    /// Becomes the judge: all deadlines are set again.
    pub fn start_judging(&mut self, now: u64, phase: HoldPhase) {
        self.judging = true;
        self.hold.resume(phase, now, self.err);
        self.rearm(now);
        self.changed_by_beat =
            self.table.iter().filter(|(_, c)| c.unjudged_beat).map(|(entry, _)| entry).collect();
        self.held.clear();
        self.held_for_tracker.clear();
        self.count_held_for_tracker();
        self.dirty.clear();
        self.resume_flaps(now);
    }

    /// Stops being the judge. Decisions that were not written are replaced by the next
    /// [`Audit::adopt`].
    pub fn stop_judging(&mut self) {
        self.judging = false;
        for entry in std::mem::take(&mut self.unstored) {
            self.forget_decision(entry);
        }
        // A restart that was decided and not written is decided again by the next judge, which may
        // be this tracker.
        for entry in std::mem::take(&mut self.unwritten) {
            let component = self.table.get_mut(entry);
            component.unjudged_beat |=
                component.last > 0 && matches!(component.state, State::Ok | State::Stopped);
        }
        self.dirty.clear();
        self.changed_by_beat.clear();
    }

    /// Undoes a decision that was neither published nor stored: the component is new again.
    fn forget_decision(&mut self, entry: u32) {
        self.count(entry, false);
        let component = self.table.get_mut(entry);
        (component.state, component.notification, component.notified) =
            (State::New, None, NotifyStatus::Accepted);
        (component.sequence, component.notification_sequence, component.changed_at) = (0, 0, 0);
        component.unjudged_beat = true;
        self.count(entry, true);
        self.arm(entry, State::New);
    }

    fn rearm(&mut self, now: u64) {
        self.wheel = TimerWheel::new(now);
        let entries: Vec<(u32, State)> = self.table.iter().map(|(entry, c)| (entry, c.state)).collect();
        for (entry, state) in entries {
            self.arm(entry, state);
        }
    }

    fn arm(&mut self, entry: u32, state: State) {
        let component = self.table.get(entry);
        let (since, (warn, err)) = (self.silent_since(component), self.windows(component));
        match state {
            State::Ok => self.wheel.put(entry, since + warn),
            State::Warned => self.wheel.put(entry, since + err),
            State::New | State::Dead | State::Stopped => self.wheel.remove(entry),
        }
    }

    fn windows(&self, component: &Component) -> (u64, u64) {
        windows(self.warn, self.err, component.interval)
    }

    fn silent_since(&self, component: &Component) -> u64 {
        component.last.max(component.base).max(self.floor)
    }

    /// Whether a deadline has passed by `until`.
    pub fn has_due(&self, until: u64) -> bool {
        self.wheel.has_due(until)
    }

    /// Adds an entry to the counts, or removes it.
    fn count(&mut self, entry: u32, present: bool) {
        let component = self.table.get(entry);
        let counts = &mut self.counts;
        let add = |count: &mut usize| *count = if present { *count + 1 } else { count.saturating_sub(1) };
        match component.state {
            State::Ok => add(&mut counts.ok),
            State::Warned => add(&mut counts.warned),
            State::Dead => add(&mut counts.dead),
            State::Stopped => add(&mut counts.stopped),
            State::New => {}
        }
        match component.notified {
            NotifyStatus::Pending => add(&mut counts.unnotified),
            NotifyStatus::Refused => add(&mut counts.refused),
            NotifyStatus::Accepted => {}
        }
        if present && component.notified == NotifyStatus::Pending {
            self.unnotified.insert(entry);
        } else {
            self.unnotified.remove(&entry);
        }
    }

    /// Removes a component without a notification.
    pub fn forget(&mut self, name: &Name) -> bool {
        let Some(entry) = self.table.find(name) else { return false };
        self.mark_dirty(entry);
        self.remove(entry);
        true
    }

    fn remove(&mut self, entry: u32) {
        self.count(entry, false);
        self.wheel.remove(entry);
        self.flaps.forget(entry);
        self.stamps.remove(&entry);
        self.unwritten.remove(&entry);
        self.unstored.remove(&entry);
        self.held.remove(&entry);
        self.end_hold_for_tracker(entry);
        for list in [&mut self.changed_by_beat, &mut self.unflushed] {
            list.retain(|other| *other != entry);
        }
        self.table.remove(entry);
    }

    /// Whether a component is known, not dead, and not silent for too long. `slack` is the longest
    /// delay of beats that other replicas received.
    pub fn heartbeating(&self, now: u64, name: &Name, slack: u64) -> bool {
        self.table.find(name).is_some_and(|entry| {
            let component = self.table.get(entry);
            let age = now.saturating_sub(self.silent_since(component));
            age < self.windows(component).1 + slack
                && (component.state != State::Dead || component.unjudged_beat)
        })
    }

    /// Declares held deaths, because an operator has confirmed them.
    pub fn release(&mut self, now: u64) {
        self.hold.release(now, self.err);
        self.end_hold(now);
        self.end_holds_for_trackers();
    }

    /// The phase of the mass outage.
    pub fn hold_phase(&self, now: u64) -> HoldPhase {
        self.hold.phase(now)
    }

    /// While deaths are held: the number of silent components and of all.
    pub fn alarm(&self) -> Option<(usize, usize)> {
        self.alarm.filter(|_| self.hold.is_holding())
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The number of components in a bucket.
    pub fn count_in(&self, bucket: u16) -> usize {
        self.table.in_bucket(bucket).len()
    }

    pub fn known(&self) -> usize {
        self.table.len()
    }

    /// The names of machines among the components.
    pub fn machines(&self) -> Vec<Name> {
        self.table.machines().iter().copied().collect()
    }
}

#[cfg(test)]
mod tests;
