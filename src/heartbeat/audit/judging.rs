//! The judgement itself: what beats and silence make of each component, and what the guards make of that.

use super::{Audit, Change, Now, Sequence, Verdict};
use crate::heartbeat::guard::{Flaps, Ruling};
use crate::heartbeat::name::Name;
use crate::heartbeat::record::{Told, bucket_of};
use crate::heartbeat::state::{State, Word};

impl Audit {
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
            match self.look_at(entry, until, now) {
                Some((State::Dead, _)) => match self.sheltered_until(entry, now.watched) {
                    Some(until) => {
                        if self.table.get(entry).state == State::Ok {
                            let word = Some(Word::MightBeDead);
                            self.change(entry, State::Warned, word, now, sequence, &mut verdict);
                        }
                        self.shelter(entry, until);
                    }
                    None => {
                        self.leave_shelter(entry);
                        deaths.push(entry);
                    }
                },
                Some((state, word)) => {
                    self.change(entry, state, Some(word), now, sequence, &mut verdict);
                    self.arm(entry, state);
                }
                None => {}
            }
        }
        self.judge_deaths(deaths, now, sequence, &mut verdict);
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
    fn look_at(&mut self, entry: u32, until: u64, now: Now) -> Option<(State, Word)> {
        let component = self.table.get(entry);
        let (warn, err) = self.windows(component);
        let (state, since) = (component.state, self.silent_since(component));
        let mut step = state.on_silence(until.saturating_sub(since), warn, err);
        if step.is_some()
            && let Some(end) = self.maintenance_end(entry, now).filter(|end| *end > since)
        {
            // Silence counts from when it is over; whoever looks at it first may be another than in its course.
            self.table.get_mut(entry).base = end;
            step = state.on_silence(until.saturating_sub(end), warn, err);
        }
        if step.is_none() {
            self.arm(entry, state);
        }
        step
    }

    fn maintenance_end(&self, entry: u32, now: Now) -> Option<u64> {
        if self.maintenance.is_empty() {
            return None;
        }
        let end = self.maintenance.get(&self.table.get(entry).full_name())?;
        Some(now.watched_at(*end))
    }

    fn judge_deaths(&mut self, deaths: Vec<u32>, now: Now, sequence: &mut Sequence, verdict: &mut Verdict) {
        if deaths.is_empty() && !self.hold.is_holding() {
            return;
        }
        let unwarned = deaths.iter().filter(|entry| self.table.get(**entry).state == State::Ok).count();
        let (silent, alive) = (self.counts.warned + unwarned, self.counts.ok + self.counts.warned);
        let own = deaths.iter().map(|entry| self.windows(self.table.get(*entry)).1).max().unwrap_or(0);
        let window = self.err.max(self.held_window).max(own);
        match self.hold.rule(now.watched, window, silent, alive) {
            Ruling::Hold { raised } => {
                verdict.raised = raised;
                self.alarm = Some((silent, alive));
                self.held_window = window;
                for entry in deaths {
                    if self.table.get(entry).state == State::Ok {
                        self.change(entry, State::Warned, Some(Word::MightBeDead), now, sequence, verdict);
                    }
                    self.held.insert(entry);
                }
                self.counts.held = self.held.len();
            }
            Ruling::Declare => {
                self.let_go(now.watched);
                if self.hold.is_passing(now.watched) {
                    // The hold has timed out, or an operator has ended it: every death is released.
                    self.end_shelter();
                }
                self.hold.declared(now.watched, deaths.len());
                for entry in deaths {
                    self.change(entry, State::Dead, Some(Word::DeclaredDead), now, sequence, verdict);
                }
            }
        }
    }

    /// Deaths are held no more: those that were are looked at like any other, when everybody has said what they heard up to
    /// now. Meanwhile their windows may have started again, or a maintenance begun.
    pub(super) fn let_go(&mut self, now: u64) {
        self.held_window = 0;
        for entry in std::mem::take(&mut self.held) {
            let component = self.table.get(entry);
            let (state, since) = (component.state, self.silent_since(component));
            let (_, err) = self.windows(component);
            if state == State::Warned {
                self.wheel.put(entry, (since + err).max(now));
            }
        }
        self.counts.held = 0;
    }

    /// Whether a component comes and goes: what there is to tell about it waits until it has been still for a while.
    pub fn is_restless(&self, now: u64, name: &Name) -> bool {
        self.table.find(name).is_some_and(|entry| self.flaps.is_restless(entry, now, self.damping()))
    }

    /// Those that another judge called flapping are counted on from there; how long they have been still is not known.
    pub(super) fn resume_flaps(&mut self, now: u64) {
        let marked = self.table.iter().filter(|(_, c)| c.flaps > 0).map(|(entry, c)| (entry, c.flaps));
        self.flaps = Flaps::resumed(marked, now);
    }

    /// Restarts are remembered this long.
    fn flap_memory(&self) -> u64 {
        self.err * 10
    }

    /// Changes of a flapping component are told when it has been still for this long.
    pub(super) fn damping(&self) -> u64 {
        self.err * 2
    }

    fn settle_flaps(&mut self, now: u64) {
        for entry in self.flaps.settle(now, self.flap_memory()) {
            self.table.get_mut(entry).flaps = 0;
            self.soil(entry);
        }
    }

    pub(super) fn soil(&mut self, entry: u32) {
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
        self.unwritten.insert(entry);
        if component.state == State::New {
            self.unstored.insert(entry);
        }
        component.state = state;
        component.sequence = number;
        component.changed_at = now.wall;
        if word.is_some() {
            (component.word, component.told) = (word, Told::No);
            component.word_sequence = number;
        }
        let (name, flaps) = (component.full_name(), component.flaps);
        // Only a beat changes a component to `ok` or to a planned stop.
        let by_beat = matches!(state, State::Ok | State::Stopped);
        let stamp = self.stamps.remove(&entry).filter(|_| by_beat).unwrap_or_default();
        self.leave_shelter(entry);
        self.flaps.moved(entry, now.watched);
        self.count(entry, true);
        self.soil(entry);
        verdict.changes.push(Change { name, state, word, sequence: number, at: now.wall, flaps, stamp });
    }
}
