//! Who is late, who is dead, who is back. Pure: beats and time go in, changes come out. Only the judge asks for changes; every
//! replica keeps the same memory, so that any of them can become the judge. A look costs what is due, not what there is.

use std::collections::{BTreeSet, HashMap};

use super::guard::{Flaps, MassHold, Ruling};
use super::name::Name;
use super::params::Params;
use super::record::{Beat, MAX_IN_BATCH, Record, Told, bucket_of, bucket_to_bytes};
use super::state::{State, Word};
use super::table::{Component, Full, Table};
use super::wheel::Wheel;

/// A moment, on the clock that silence is measured with and on the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// See `watched`.
    pub watched: u64,
    /// Milliseconds since 1970, for people; nothing is decided by it but the end of a maintenance.
    pub wall: u64,
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
    pub word: Option<Word>,
    pub sequence: u64,
    pub at: u64,
}

/// What a look came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    pub changes: Vec<Change>,
    /// Deaths are being held, since this look: how many are silent, of how many.
    pub alarm: Option<(usize, usize)>,
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
    pub held: usize,
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
    unflushed: Vec<u32>,
    untold: BTreeSet<u32>,
    /// Due to die, and held.
    held: Vec<u32>,
    hold: MassHold,
    flaps: Flaps,
    maintenance: HashMap<Name, u64>,
    dirty: BTreeSet<u16>,
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
            unflushed: Vec::new(),
            untold: BTreeSet::new(),
            held: Vec::new(),
            hold: MassHold::default(),
            flaps: Flaps::default(),
            maintenance: HashMap::new(),
            dirty: BTreeSet::new(),
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

    /// Names that are not judged, each until a calendar time.
    pub fn set_maintenance(&mut self, now: u64, until: HashMap<Name, u64>) {
        let before = std::mem::replace(&mut self.maintenance, until);
        for (name, end) in before {
            let Some(entry) = self.table.find(&name).filter(|_| self.maintenance.get(&name) != Some(&end))
            else {
                continue;
            };
            let component = self.table.get_mut(entry);
            component.base = component.base.min(now);
            let state = component.state;
            self.arm(entry, state);
        }
    }

    /// A beat, heard here and now.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat(&mut self, now: u64, name: &Name, going_away: bool) -> Result<Heard, Full> {
        let entry = self.table.ensure(name)?;
        let component = self.table.get_mut(entry);
        if !component.unflushed {
            component.unflushed = true;
            self.unflushed.push(entry);
        }
        Ok(self.heard(entry, now, going_away))
    }

    /// A beat that another replica heard, `beat.age_ms` ago.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub fn beat_elsewhere(&mut self, now: u64, beat: &Beat) -> Result<Heard, Full> {
        let at = now.saturating_sub(beat.age_ms).max(1);
        let entry = self.table.ensure(&beat.name)?;
        let too_old = beat.age_ms >= self.err && self.table.get(entry).state != State::New;
        if too_old || self.table.get(entry).last >= at {
            return Ok(Heard::Steady);
        }
        Ok(self.heard(entry, at, beat.going_away))
    }

    fn heard(&mut self, entry: u32, at: u64, going_away: bool) -> Heard {
        let component = self.table.get_mut(entry);
        component.last = component.last.max(at);
        component.going_away = going_away;
        if component.state == State::Ok && !going_away {
            component.news = false;
            let deadline = component.last + self.warn;
            self.wheel.put(entry, deadline);
            return Heard::Steady;
        }
        if component.state == State::Stopped && going_away {
            return Heard::Steady;
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
    }

    /// Begins to judge: everything is looked at again.
    pub fn take_office(&mut self, now: u64) {
        self.judging = true;
        self.rearm(now);
        self.woken = self.table.iter().filter(|(_, c)| c.news).map(|(entry, _)| entry).collect();
        self.held.clear();
        self.dirty.clear();
    }

    /// Judges no more. What was decided and not written is forgotten with the next [`Audit::adopt`].
    pub fn leave_office(&mut self) {
        self.judging = false;
        // A return that was judged and not written is news for the next judge, who may be this one.
        for bucket in std::mem::take(&mut self.dirty) {
            for entry in self.table.in_bucket(bucket).to_vec() {
                let component = self.table.get_mut(entry);
                component.news |= component.last > 0 && matches!(component.state, State::Ok | State::Stopped);
            }
        }
        self.woken.clear();
    }

    fn rearm(&mut self, now: u64) {
        self.wheel = Wheel::new(now);
        let entries: Vec<(u32, State)> = self.table.iter().map(|(entry, c)| (entry, c.state)).collect();
        for (entry, state) in entries {
            self.arm(entry, state);
        }
    }

    fn arm(&mut self, entry: u32, state: State) {
        let since = self.silent_since(self.table.get(entry));
        match state {
            State::Ok => self.wheel.put(entry, since + self.warn),
            State::Warned => self.wheel.put(entry, since + self.err),
            State::New | State::Dead | State::Stopped => self.wheel.remove(entry),
        }
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

    /// Judges: beats that say something new, and silence as far as `heard_until`, the time up to which every replica's
    /// beats are known.
    pub fn judge(&mut self, now: Now, heard_until: u64, sequence: &mut Sequence) -> Verdict {
        let mut verdict = Verdict::default();
        for entry in std::mem::take(&mut self.woken) {
            self.judge_beat(entry, now, sequence, &mut verdict);
        }
        let until = heard_until.min(now.watched);
        let mut due = Vec::new();
        self.wheel.take_due(until, &mut due);
        // The order of a slot is an accident.
        due.sort_unstable();
        let mut deaths = Vec::new();
        for entry in due {
            match self.look_at(entry, until, now.wall) {
                Some((State::Dead, _)) => deaths.push(entry),
                Some((state, word)) => {
                    self.change(entry, state, Some(word), now, sequence, &mut verdict);
                    self.arm(entry, state);
                }
                None => {}
            }
        }
        self.judge_deaths(deaths, now, until, sequence, &mut verdict);
        if !self.flaps.is_empty() {
            self.settle_flaps(now.watched);
        }
        verdict
    }

    fn judge_beat(&mut self, entry: u32, now: Now, sequence: &mut Sequence, verdict: &mut Verdict) {
        let component = self.table.get_mut(entry);
        if !std::mem::take(&mut component.news) {
            return;
        }
        let (state, mut word) = component.state.on_beat(component.going_away);
        if state == State::Ok && component.word.is_none() {
            word = Some(Word::Started);
        }
        if word == Some(Word::Restarted) {
            self.flaps.restarted(entry, now.watched, self.flap_memory());
            self.table.get_mut(entry).flaps = self.flaps.flapping(entry).unwrap_or(0);
        }
        if state != self.table.get(entry).state {
            self.change(entry, state, word, now, sequence, verdict);
        }
        self.arm(entry, state);
    }

    /// What silence makes of an entry that came out of the wheel; back it goes if it is not due.
    fn look_at(&mut self, entry: u32, until: u64, wall: u64) -> Option<(State, Word)> {
        let component = self.table.get(entry);
        let state = component.state;
        let age = until.saturating_sub(self.silent_since(component));
        let step = state.on_silence(age, self.warn, self.err);
        if let Some(left) = step.and_then(|_| self.maintenance_left(entry, wall)) {
            // Silence counts from when it is over.
            self.table.get_mut(entry).base = until + left;
            self.arm(entry, state);
            return None;
        }
        if step.is_none() {
            self.arm(entry, state);
        }
        step
    }

    fn maintenance_left(&self, entry: u32, wall: u64) -> Option<u64> {
        if self.maintenance.is_empty() {
            return None;
        }
        let until = self.maintenance.get(&self.table.get(entry).full_name())?;
        until.checked_sub(wall).filter(|left| *left > 0)
    }

    fn judge_deaths(
        &mut self,
        mut deaths: Vec<u32>,
        now: Now,
        until: u64,
        sequence: &mut Sequence,
        verdict: &mut Verdict,
    ) {
        if deaths.is_empty() && self.held.is_empty() && !self.hold.is_holding() {
            return;
        }
        let unwarned = deaths.iter().filter(|entry| self.table.get(**entry).state == State::Ok).count();
        let (silent, alive) = (self.counts.warned + unwarned, self.counts.ok + self.counts.warned);
        match self.hold.rule(now.watched, self.err, silent, alive) {
            Ruling::Hold { raised } => {
                if raised {
                    verdict.alarm = Some((silent, alive));
                }
                for entry in deaths {
                    if self.table.get(entry).state == State::Ok {
                        self.change(entry, State::Warned, Some(Word::MightBeDead), now, sequence, verdict);
                    }
                    self.held.push(entry);
                }
            }
            Ruling::Declare => {
                let held: Vec<u32> = std::mem::take(&mut self.held);
                deaths.extend(held.into_iter().filter(|entry| self.is_overdue(*entry, until)));
                deaths.sort_unstable();
                deaths.dedup();
                self.hold.declared(now.watched, deaths.len());
                for entry in deaths {
                    self.change(entry, State::Dead, Some(Word::DeclaredDead), now, sequence, verdict);
                }
            }
        }
        self.counts.held = self.held.len();
    }

    fn is_overdue(&self, entry: u32, until: u64) -> bool {
        let component = self.table.get(entry);
        let age = until.saturating_sub(self.silent_since(component));
        component.state == State::Warned && !component.news && age >= self.err
    }

    /// Restarts are remembered this long.
    fn flap_memory(&self) -> u64 {
        self.err * 10
    }

    /// Changes of a flapping component are told when it has been still for this long.
    fn damping(&self) -> u64 {
        self.err * 2
    }

    fn settle_flaps(&mut self, now: u64) {
        for entry in self.flaps.settle(now, self.flap_memory()) {
            self.table.get_mut(entry).flaps = 0;
            self.soil(entry);
        }
    }

    fn soil(&mut self, entry: u32) {
        self.dirty.insert(bucket_of(self.table.get(entry).name()));
    }

    fn change(
        &mut self,
        entry: u32,
        state: State,
        word: Option<Word>,
        now: Now,
        sequence: &mut Sequence,
        verdict: &mut Verdict,
    ) {
        let number = sequence.next();
        self.count(entry, false);
        let component = self.table.get_mut(entry);
        component.state = state;
        component.sequence = number;
        component.changed_at = now.wall;
        if word.is_some() {
            (component.word, component.told) = (word, Told::No);
        } else if matches!(component.word, Some(Word::MightBeDead | Word::DeclaredDead)) {
            // A planned stop overtook a warning that nobody has heard.
            component.told = Told::Yes;
        }
        let name = component.full_name();
        self.count(entry, true);
        self.soil(entry);
        verdict.changes.push(Change { name, state, word, sequence: number, at: now.wall });
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

    /// Takes over what the store has of a bucket, and says what is new in it.
    pub fn adopt(&mut self, bucket: u16, records: &[Record], now: u64) -> Vec<Change> {
        let mut changes = Vec::new();
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
            let Ok(entry) = self.table.ensure(&record.name) else { continue };
            self.count(entry, false);
            let component = self.table.get_mut(entry);
            let newer = record.sequence > component.sequence;
            if component.state != record.state {
                component.news &= record.state != State::Ok || component.going_away;
                component.base = now;
            }
            component.state = record.state;
            component.word = record.word;
            component.sequence = record.sequence;
            component.told = record.told;
            component.changed_at = record.changed_at;
            component.beat_at = record.beat_at;
            component.flaps = record.flaps;
            self.count(entry, true);
            self.arm(entry, record.state);
            if newer {
                let Record { name, state, word, sequence, changed_at: at, .. } = *record;
                changes.push(Change { name, state, word, sequence, at });
            }
        }
        changes
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
        for list in [&mut self.woken, &mut self.unflushed, &mut self.held] {
            list.retain(|other| *other != entry);
        }
        self.table.remove(entry);
    }

    /// The names heard since the last call, in batches that fit into a znode each.
    pub fn take_unflushed(&mut self, now: u64) -> Vec<Vec<Beat>> {
        let entries = std::mem::take(&mut self.unflushed);
        let beats: Vec<Beat> = entries
            .into_iter()
            .map(|entry| {
                let component = self.table.get_mut(entry);
                component.unflushed = false;
                let age_ms = now.saturating_sub(component.last);
                Beat { name: component.full_name(), age_ms, going_away: component.going_away }
            })
            .collect();
        beats.chunks(MAX_IN_BATCH).map(<[Beat]>::to_vec).collect()
    }

    pub fn has_unflushed(&self) -> bool {
        !self.unflushed.is_empty()
    }

    /// Buckets that the store does not have as they are here.
    pub fn dirty(&self) -> &BTreeSet<u16> {
        &self.dirty
    }

    pub fn bucket_bytes(&self, bucket: u16, now: Now) -> Vec<u8> {
        let entries = self.table.in_bucket(bucket).iter();
        let known = entries.filter(|entry| self.table.get(**entry).state != State::New);
        bucket_to_bytes(known.map(|entry| self.table.record(*entry, now.watched, now.wall)))
    }

    pub fn written(&mut self, bucket: u16) {
        self.dirty.remove(&bucket);
    }

    /// Changes that the state manager has yet to hear of and that are safe in the store, oldest first.
    pub fn pending(&self, now: Now, most: usize) -> Vec<Change> {
        let mut found: Vec<Change> = self
            .untold
            .iter()
            .map(|entry| self.table.get(*entry))
            .filter(|c| c.flaps == 0 || now.wall.saturating_sub(c.changed_at) >= self.damping())
            .filter(|c| !self.dirty.contains(&bucket_of(c.name())))
            .map(change_of)
            .collect();
        found.sort_unstable_by_key(|change| change.sequence);
        found.truncate(most);
        found
    }

    /// What became of telling the state manager; a newer change stays pending.
    pub fn tell(&mut self, name: &Name, sequence: u64, told: Told) {
        let Some(entry) = self.table.find(name).filter(|entry| self.table.get(*entry).sequence == sequence)
        else {
            return;
        };
        self.count(entry, false);
        self.table.get_mut(entry).told = told;
        self.count(entry, true);
        self.soil(entry);
    }

    /// Each component's newest change after `sequence`, oldest first.
    pub fn changes_since(&self, sequence: u64) -> Vec<Change> {
        let newer = self.table.iter().filter(|(_, c)| c.sequence > sequence);
        let mut found: Vec<Change> = newer.map(|(_, c)| change_of(c)).collect();
        found.sort_unstable_by_key(|change| change.sequence);
        found
    }

    /// Whether somebody hears from it: known, not dead, and not silent for too long. `slack` is how late beats of other
    /// replicas may come to us.
    pub fn heartbeating(&self, now: u64, name: &Name, slack: u64) -> bool {
        self.table.find(name).is_some_and(|entry| {
            let component = self.table.get(entry);
            let age = now.saturating_sub(self.silent_since(component));
            age < self.err + slack && (component.state != State::Dead || component.news)
        })
    }

    /// An operator says that the silence is real.
    pub fn release(&mut self, now: u64) {
        self.hold.release(now, self.err);
    }

    pub fn is_holding(&self) -> bool {
        self.hold.is_holding()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn known(&self) -> usize {
        self.table.len()
    }

    /// Names of machines among the components.
    pub fn machines(&self) -> Vec<Name> {
        self.table.machines().iter().copied().collect()
    }
}

fn change_of(component: &Component) -> Change {
    Change {
        name: component.full_name(),
        state: component.state,
        word: component.word,
        sequence: component.sequence,
        at: component.changed_at,
    }
}

#[cfg(test)]
#[path = "audit_tests.rs"]
mod tests;
