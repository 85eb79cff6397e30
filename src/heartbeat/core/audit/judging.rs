//! The decisions: how beats and silence change the state of each component, and when a death is
//! held. Pure.

use super::{Audit, Change, Decisions, Now};
use crate::heartbeat::core::flapping::Flaps;
use crate::heartbeat::core::mass_outage::HoldDecision;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::{NotifyStatus, bucket_of};
use crate::heartbeat::core::sequence::Sequence;
use crate::heartbeat::core::state::{Notification, State};

impl Audit {
    /// Decides about new beats, and about silence up to `beats_known_until`, the time up to which
    /// the beats of all replicas are known.
    pub fn judge(&mut self, now: Now, beats_known_until: u64, sequence: &mut Sequence) -> Decisions {
        let mut decisions = Decisions::default();
        for entry in std::mem::take(&mut self.changed_by_beat) {
            self.judge_beat(entry, now, sequence, &mut decisions);
        }
        let until = beats_known_until.min(now.awake);
        let mut due = Vec::new();
        self.wheel.take_due(until, &mut due);
        // The order within a slot of the timer wheel is arbitrary.
        due.sort_unstable();
        let mut deaths = Vec::new();
        for entry in due {
            match self.check_silence(entry, until, now) {
                Some((State::Dead, _)) => match self.held_for_tracker_until(entry, now.awake) {
                    Some(until) => {
                        if self.table.get(entry).state == State::Ok {
                            let notification = Some(Notification::MightBeDead);
                            self.change(entry, State::Warned, notification, now, sequence, &mut decisions);
                        }
                        self.hold_for_tracker(entry, until);
                    }
                    None => {
                        self.end_hold_for_tracker(entry);
                        deaths.push(entry);
                    }
                },
                Some((state, notification)) => {
                    self.change(entry, state, Some(notification), now, sequence, &mut decisions);
                    self.arm(entry, state);
                }
                None => {}
            }
        }
        self.judge_deaths(deaths, now, sequence, &mut decisions);
        if !self.flaps.is_empty() {
            self.settle_flaps(now.awake);
        }
        decisions
    }

    fn judge_beat(&mut self, entry: u32, now: Now, sequence: &mut Sequence, decisions: &mut Decisions) {
        let component = self.table.get_mut(entry);
        if !std::mem::take(&mut component.unjudged_beat) {
            return;
        }
        let (state, mut notification) = component.state.on_beat(component.going_away);
        if state == State::Ok && component.notification.is_none() {
            notification = Some(Notification::Started);
        }
        if notification == Some(Notification::Restarted) {
            self.flaps.restarted(entry, now.awake, self.flap_memory());
            self.table.get_mut(entry).flaps = self.flaps.flapping(entry).unwrap_or(0);
        }
        if state != self.table.get(entry).state {
            self.change(entry, state, notification, now, sequence, decisions);
        }
        self.arm(entry, state);
    }

    /// The step that silence causes for an entry from the timer wheel. An entry that is not due
    /// goes back to the wheel.
    fn check_silence(&mut self, entry: u32, until: u64, now: Now) -> Option<(State, Notification)> {
        let component = self.table.get(entry);
        let (warn, err) = self.windows(component);
        let (state, since) = (component.state, self.silent_since(component));
        let mut step = state.on_silence(until.saturating_sub(since), warn, err);
        if step.is_some()
            && let Some(end) = self.maintenance_end(entry, now).filter(|end| *end > since)
        {
            // Silence counts from the end of the maintenance; another judge may have seen its
            // beginning.
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
        Some(now.awake_at(*end))
    }

    fn judge_deaths(
        &mut self,
        deaths: Vec<u32>,
        now: Now,
        sequence: &mut Sequence,
        decisions: &mut Decisions,
    ) {
        if deaths.is_empty() && !self.hold.is_holding() {
            return;
        }
        let unwarned = deaths.iter().filter(|entry| self.table.get(**entry).state == State::Ok).count();
        let (silent, alive) = (self.counts.warned + unwarned, self.counts.ok + self.counts.warned);
        let own = deaths.iter().map(|entry| self.windows(self.table.get(*entry)).1).max().unwrap_or(0);
        let window = self.err.max(self.held_window).max(own);
        match self.hold.decide(now.awake, window, silent, alive) {
            HoldDecision::Hold { is_new } => {
                decisions.is_new_hold = is_new;
                self.alarm = Some((silent, alive));
                self.held_window = window;
                for entry in deaths {
                    if self.table.get(entry).state == State::Ok {
                        self.change(
                            entry,
                            State::Warned,
                            Some(Notification::MightBeDead),
                            now,
                            sequence,
                            decisions,
                        );
                    }
                    self.held.insert(entry);
                }
                self.counts.held = self.held.len();
            }
            HoldDecision::Declare => {
                self.end_hold(now.awake);
                if self.hold.is_released(now.awake) {
                    // The hold has timed out, or an operator has ended it: every death is declared.
                    self.end_holds_for_trackers();
                }
                self.hold.declared(now.awake, deaths.len());
                for entry in deaths {
                    self.change(
                        entry,
                        State::Dead,
                        Some(Notification::DeclaredDead),
                        now,
                        sequence,
                        decisions,
                    );
                }
            }
        }
    }

    /// Ends the hold: the deadlines of the held components are checked again, once the beats of all
    /// replicas up to now are known. Their windows may have started again, or a maintenance begun.
    pub(super) fn end_hold(&mut self, now: u64) {
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

    /// Whether a component is flapping: its notifications wait until it has been stable for a
    /// while.
    pub fn is_damped(&self, now: u64, name: &Name) -> bool {
        self.table.find(name).is_some_and(|entry| self.flaps.is_damped(entry, now, self.damping()))
    }

    /// Continues the counts of flapping components; when they last changed is not known.
    pub(super) fn resume_flaps(&mut self, now: u64) {
        let marked = self.table.iter().filter(|(_, c)| c.flaps > 0).map(|(entry, c)| (entry, c.flaps));
        self.flaps = Flaps::resumed(marked, now);
    }

    /// How long restarts count.
    fn flap_memory(&self) -> u64 {
        self.err * 10
    }

    /// How long a flapping component must be stable before it causes a notification.
    pub(super) fn damping(&self) -> u64 {
        self.err * 2
    }

    fn settle_flaps(&mut self, now: u64) {
        for entry in self.flaps.settle(now, self.flap_memory()) {
            self.table.get_mut(entry).flaps = 0;
            self.mark_dirty(entry);
        }
    }

    pub(super) fn mark_dirty(&mut self, entry: u32) {
        self.dirty.insert(bucket_of(self.table.get(entry).name()));
    }

    fn change(
        &mut self,
        entry: u32,
        state: State,
        notification: Option<Notification>,
        now: Now,
        sequence: &mut Sequence,
        decisions: &mut Decisions,
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
        if notification.is_some() {
            (component.notification, component.notified) = (notification, NotifyStatus::Pending);
            component.notification_sequence = number;
        }
        let (name, flaps) = (component.full_name(), component.flaps);
        // Only a beat changes a component to `ok` or to a planned stop.
        let by_beat = matches!(state, State::Ok | State::Stopped);
        let stamp = self.stamps.remove(&entry).filter(|_| by_beat).unwrap_or_default();
        self.end_hold_for_tracker(entry);
        self.flaps.record_change(entry, now.awake);
        self.count(entry, true);
        self.mark_dirty(entry);
        decisions.changes.push(Change {
            name,
            state,
            notification,
            sequence: number,
            at: now.wall,
            flaps,
            stamp,
        });
    }
}
