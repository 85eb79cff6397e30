//! Who is late, who is dead, who is back. Pure: beats and time go in, changes come out. Only the judge asks for changes; every
//! replica keeps the same memory, so that any of them can become the judge. A look costs what is due, not what there is.

mod judging;
mod kept;
mod lost;
mod thaw;

use std::collections::{BTreeSet, HashMap};

use super::guard::{Course, Flaps, MassHold};
use super::name::Name;
use super::params::Params;
use super::record::{Beat, Told};
use super::sent::{Details, Sent, Stamp};
use super::state::{State, Word, windows};
use super::table::{Component, Full, HERE, Table, Via};
use super::wheel::Wheel;

/// A moment, on the clock that silence is measured with and on the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// See `watched`.
    pub watched: u64,
    /// Milliseconds since 1970, for people; nothing is decided by it but the end of a maintenance.
    pub wall: u64,
}

impl Now {
    /// When a calendar time is or was, as far as the calendar can be believed.
    fn watched_at(self, wall: u64) -> u64 {
        (self.watched + wall.saturating_sub(self.wall)).saturating_sub(self.wall.saturating_sub(wall))
    }
}

/// What a beat meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// As expected.
    Steady,
    /// The component's state will change: worth keeping at once.
    News,
}

/// A component's newest change, as everybody is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pub name: Name,
    pub state: State,
    /// None if there is nothing to tell about it.
    pub word: Option<Word>,
    pub sequence: u64,
    pub at: u64,
    /// How often it came back, if that is too often.
    pub flaps: u16,
    /// The `Timestamp` of the beat that caused the change; empty if no beat did, or if it is no
    /// longer known.
    pub stamp: Stamp,
}

/// What a look came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    pub changes: Vec<Change>,
    /// Deaths are being held, since this look.
    pub raised: bool,
}

/// Numbers for changes: higher than every number that any judge before this one gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    last: u64,
}

impl Sequence {
    /// Of the judge with this epoch, which no other judge has.
    pub fn of_epoch(epoch: u32) -> Self {
        Self { last: u64::from(epoch) << 32 }
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub ok: usize,
    pub warned: usize,
    pub dead: usize,
    pub stopped: usize,
    pub untold: usize,
    pub refused: usize,
    /// In buckets that cannot be read.
    pub unreadable: usize,
    /// Due to die, and held because of a mass outage.
    pub held: usize,
    /// Due to die, and held because they may be beating to an unreachable tracker.
    pub sheltered: usize,
}

#[derive(Debug)]
pub struct Audit {
    table: Table,
    wheel: Wheel,
    warn: u64,
    err: u64,
    /// Silence is counted from here at the earliest: when watching was resumed.
    floor: u64,
    /// This replica judges.
    judging: bool,
    woken: Vec<u32>,
    /// Timestamps of beats that say something new.
    stamps: HashMap<u32, Stamp>,
    unflushed: Vec<u32>,
    untold: BTreeSet<u32>,
    /// Due to die, and held.
    held: BTreeSet<u32>,
    /// The longest window of any component in `held`: one that beats seldom has a longer window than others.
    held_window: u64,
    hold: MassHold,
    /// While deaths are held: how many are silent now, of how many.
    alarm: Option<(usize, usize)>,
    /// Unreachable trackers that may still accept beats, each with the time until which deaths are
    /// held for it.
    lost: HashMap<Via, u64>,
    /// Due to die, and held because of a tracker in `lost`.
    sheltered: BTreeSet<u32>,
    flaps: Flaps,
    maintenance: HashMap<Name, u64>,
    dirty: BTreeSet<u16>,
    /// Judged, and not in the store yet.
    unwritten: BTreeSet<u32>,
    /// Those of them that were judged for the first time.
    unstored: BTreeSet<u32>,
    counts: Counts,
}

impl Audit {
    pub fn new(now: u64, params: &Params, limit: usize) -> Self {
        let mut audit = Self {
            table: Table::new(limit),
            wheel: Wheel::new(now),
            warn: 0,
            err: 0,
            floor: now,
            judging: false,
            woken: Vec::new(),
            stamps: HashMap::new(),
            unflushed: Vec::new(),
            untold: BTreeSet::new(),
            held: BTreeSet::new(),
            held_window: 0,
            hold: MassHold::default(),
            alarm: None,
            lost: HashMap::new(),
            sheltered: BTreeSet::new(),
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

    /// Names that are not judged, each until a calendar time.
    pub fn set_maintenance(&mut self, now: Now, until: HashMap<Name, u64>) {
        let before = std::mem::replace(&mut self.maintenance, until);
        for (name, end) in before {
            let Some(entry) = self.table.find(&name).filter(|_| self.maintenance.get(&name) != Some(&end))
            else {
                continue;
            };
            let component = self.table.get_mut(entry);
            // Silence counts from when it was over, whether anybody looked at it or not.
            component.base = component.base.min(now.watched).max(now.watched_at(end).min(now.watched));
            let state = component.state;
            self.arm(entry, state);
        }
    }

    /// A beat, heard here and now.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat(&mut self, now: u64, name: &Name, going_away: bool) -> Result<Heard, Full> {
        self.beat_with(now, &(*name, going_away).into())
    }

    /// The same with all fields of the beat.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat_with(&mut self, now: u64, beat: &Sent) -> Result<Heard, Full> {
        let entry = self.table.ensure(&beat.name)?;
        Ok(self.heard_here(entry, now, beat.details))
    }

    /// A beat of a component that is well, and goes on to be. Any other is not taken.
    pub fn beat_if_steady(&mut self, now: u64, beat: &Sent) -> bool {
        let steady = self.table.find(&beat.name).filter(|entry| self.table.get(*entry).state == State::Ok);
        steady.is_some_and(|entry| self.heard_here(entry, now, beat.details) == Heard::Steady)
    }

    fn heard_here(&mut self, entry: u32, now: u64, details: Details) -> Heard {
        let component = self.table.get_mut(entry);
        if !component.unflushed {
            component.unflushed = true;
            self.unflushed.push(entry);
        }
        component.via = HERE;
        self.heard(entry, now, details)
    }

    /// Applies a beat that the replica `via` received `beat.age_ms` ago.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat_elsewhere(&mut self, now: u64, beat: &Beat, via: Via) -> Result<Heard, Full> {
        let at = now.saturating_sub(beat.age_ms).max(1);
        let entry = self.table.ensure(&beat.name)?;
        if self.table.get(entry).last < at {
            self.table.get_mut(entry).via = via;
        }
        let (_, err) = windows(self.warn, self.err, beat.interval);
        let too_old = beat.age_ms >= err && self.table.get(entry).state != State::New;
        if too_old || self.table.get(entry).last >= at {
            return Ok(Heard::Steady);
        }
        let Beat { going_away, interval, stamp, .. } = *beat;
        Ok(self.heard(entry, at, Details { going_away, interval, stamp }))
    }

    fn heard(&mut self, entry: u32, at: u64, details: Details) -> Heard {
        let Details { going_away, interval, stamp } = details;
        let component = self.table.get_mut(entry);
        component.last = component.last.max(at);
        component.going_away = going_away;
        // The next judge may not have received this beat, and then reads the interval from the
        // store.
        let other_interval = std::mem::replace(&mut component.interval, interval) != interval;
        if other_interval && self.judging && component.state != State::New {
            self.soil(entry);
        }
        let component = self.table.get_mut(entry);
        if component.state == State::Ok && !going_away {
            component.news = false;
            let deadline = component.last + windows(self.warn, self.err, interval).0;
            self.wheel.put(entry, deadline);
            return Heard::Steady;
        }
        if component.state == State::Stopped && going_away {
            return Heard::Steady;
        }
        if stamp.is_empty() {
            self.stamps.remove(&entry);
        } else {
            self.stamps.insert(entry, stamp);
        }
        if self.judging && !component.news {
            self.woken.push(entry);
        }
        component.news = true;
        Heard::News
    }

    /// Whether a component was judged after this calendar time.
    pub fn changed_since(&self, name: &Name, wall: u64) -> bool {
        self.table.find(name).is_some_and(|entry| self.table.get(entry).changed_at > wall)
    }

    /// Nobody was listening until now: every window starts again.
    pub fn restart_windows(&mut self, now: u64) {
        self.floor = self.floor.max(now);
        self.hold.restart_windows(now, self.err);
    }

    /// Begins to judge: everything is looked at again.
    pub fn take_office(&mut self, now: u64, course: Course) {
        self.judging = true;
        self.hold.resume(course, now, self.err);
        self.rearm(now);
        self.woken = self.table.iter().filter(|(_, c)| c.news).map(|(entry, _)| entry).collect();
        self.held.clear();
        self.sheltered.clear();
        self.count_sheltered();
        self.dirty.clear();
        self.resume_flaps(now);
    }

    /// Judges no more. What was decided and not written is forgotten with the next [`Audit::adopt`].
    pub fn leave_office(&mut self) {
        self.judging = false;
        for entry in std::mem::take(&mut self.unstored) {
            self.forget_verdict(entry);
        }
        // A return that was judged and not written is news for the next judge, who may be this one.
        for entry in std::mem::take(&mut self.unwritten) {
            let component = self.table.get_mut(entry);
            component.news |= component.last > 0 && matches!(component.state, State::Ok | State::Stopped);
        }
        self.dirty.clear();
        self.woken.clear();
    }

    /// Nobody was told of it, and no store will tell us: it was heard of, and that is all.
    fn forget_verdict(&mut self, entry: u32) {
        self.count(entry, false);
        let component = self.table.get_mut(entry);
        (component.state, component.word, component.told) = (State::New, None, Told::Yes);
        (component.sequence, component.word_sequence, component.changed_at) = (0, 0, 0);
        component.news = true;
        self.count(entry, true);
        self.arm(entry, State::New);
    }

    fn rearm(&mut self, now: u64) {
        self.wheel = Wheel::new(now);
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

    /// Whether a look up to `until` would find anybody late.
    pub fn has_due(&self, until: u64) -> bool {
        self.wheel.has_due(until)
    }

    pub fn has_news(&self) -> bool {
        !self.woken.is_empty()
    }

    /// Takes an entry out of the counts, or puts it in.
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
        match component.told {
            Told::No => add(&mut counts.untold),
            Told::Refused => add(&mut counts.refused),
            Told::Yes => {}
        }
        if present && component.told == Told::No {
            self.untold.insert(entry);
        } else {
            self.untold.remove(&entry);
        }
    }

    /// Nothing is known of it from here on, and nobody is told.
    pub fn forget(&mut self, name: &Name) -> bool {
        let Some(entry) = self.table.find(name) else { return false };
        self.soil(entry);
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
        self.leave_shelter(entry);
        for list in [&mut self.woken, &mut self.unflushed] {
            list.retain(|other| *other != entry);
        }
        self.table.remove(entry);
    }

    /// Whether somebody hears from it: known, not dead, and not silent for too long. `slack` is how late beats of other
    /// replicas may come to us.
    pub fn heartbeating(&self, now: u64, name: &Name, slack: u64) -> bool {
        self.table.find(name).is_some_and(|entry| {
            let component = self.table.get(entry);
            let age = now.saturating_sub(self.silent_since(component));
            age < self.windows(component).1 + slack && (component.state != State::Dead || component.news)
        })
    }

    /// An operator says that the silence is real.
    pub fn release(&mut self, now: u64) {
        self.hold.release(now, self.err);
        self.let_go(now);
        self.end_shelter();
    }

    /// How far the hold of deaths has come, if there is one.
    pub fn course(&self, now: u64) -> Course {
        self.hold.course(now)
    }

    /// Deaths are held: how many are silent, of how many.
    pub fn alarm(&self) -> Option<(usize, usize)> {
        self.alarm.filter(|_| self.hold.is_holding())
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Components of a bucket.
    pub fn count_in(&self, bucket: u16) -> usize {
        self.table.in_bucket(bucket).len()
    }

    pub fn known(&self) -> usize {
        self.table.len()
    }

    /// Names of machines among the components.
    pub fn machines(&self) -> Vec<Name> {
        self.table.machines().iter().copied().collect()
    }
}

#[cfg(test)]
mod tests;
