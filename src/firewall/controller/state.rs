//! The state that the controller keeps for each machine between passes. Pure. It is a cache and a
//! schedule: after a restart the controller rebuilds it from the store and the provider. Results of
//! requests change it in `outcome`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis_provider::provider::MachineRules;
use portcullis_provider::rule::Rule;

use crate::firewall::refusals::{Refusals, Request};
use crate::machine::retry::{Pace, Retry};
use crate::model::MachineId;
use crate::runtime::clock::Moment;

/// How long a firewall counts as full. The next full read after that sends the whole request again.
const FULL_FOR: Duration = Duration::from_secs(30);

/// The state of one machine. `I` is a point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MachineState<I> {
    /// The rules as last read, updated by own changes; `None` if they must be read.
    pub(crate) rules: Option<MachineRules>,
    /// The present view was made and the rules were not read since, so the total number of closes
    /// that the view leads to is unknown.
    pub(crate) is_unread: bool,
    /// Closes that two reads of the tree asked for. A confirmation does not expire: it ends when a
    /// plan for the machine no longer closes the rule. With a slow provider the close may be sent
    /// only several passes later.
    pub(crate) confirmed_closes: BTreeSet<Rule>,
    pub(crate) retry: Option<Retry<I>>,
    /// Recent refusals of the provider. A full read or the loss of the lease does not clear them.
    pub(crate) refusals: Refusals<I>,
    /// Since when a part of the change waits: it needs a second step, or was not sent because the
    /// lease would have expired. The next pass begins with these machines, the oldest first.
    pub(crate) postponed_since: Option<I>,
    /// When an open last exceeded the provider's limit of rules.
    pub(crate) full_since: Option<I>,
    /// A problem of the machine itself, from provisioning; part of the report.
    pub(crate) note: Option<String>,
    /// The note changed since the last report.
    pub(crate) note_changed: bool,
    /// When a change was noticed that was not planned since.
    pub(crate) noticed_at: Option<I>,
    /// Since when a change is unfinished.
    pub(crate) changing_since: Option<I>,
}

impl<I> Default for MachineState<I> {
    fn default() -> Self {
        Self {
            rules: None,
            is_unread: false,
            confirmed_closes: BTreeSet::new(),
            retry: None,
            refusals: Refusals::default(),
            postponed_since: None,
            full_since: None,
            note: None,
            note_changed: false,
            noticed_at: None,
            changing_since: None,
        }
    }
}

impl<I: Moment> MachineState<I> {
    /// Schedules a retry after a failure. `random` spreads concurrent retries.
    pub(crate) fn retry_after(&mut self, pace: Pace, now: I, random: u64) {
        self.retry = Retry::after(self.retry, pace, now, random);
    }

    /// Records a denied request. Returns false for other errors. The machine is due again when the
    /// hold ends, and not before.
    pub(crate) fn deny(
        &mut self,
        request: Request,
        error: &portcullis_provider::Error,
        now: I,
        random: u64,
    ) -> bool {
        let denied = self.refusals.denied(request, error, now, random);
        if denied {
            self.retry = None;
        }
        denied
    }

    /// Records when a change was noticed, unless an earlier one was not planned yet.
    pub(crate) fn notice(&mut self, at: I) {
        self.noticed_at = Some(self.noticed_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Drops everything that is about a machine that the view does not have, except the note and
    /// refusals that have not expired: the machine may be missing only temporarily.
    fn left_view(&mut self) {
        self.retry = None;
        self.refusals.drop_limits();
        self.confirmed_closes.clear();
        (self.noticed_at, self.changing_since) = (None, None);
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The states of all machines.
#[derive(Debug)]
pub(crate) struct MachineStates<I>(BTreeMap<MachineId, MachineState<I>>);

impl<I> Default for MachineStates<I> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<I: Moment> MachineStates<I> {
    pub(crate) fn get(&self, machine: MachineId) -> Option<&MachineState<I>> {
        self.0.get(&machine)
    }

    pub(crate) fn entry(&mut self, machine: MachineId) -> &mut MachineState<I> {
        self.0.entry(machine).or_default()
    }

    pub(crate) fn rules(&self, machine: MachineId) -> Option<&MachineRules> {
        self.get(machine)?.rules.as_ref()
    }

    pub(crate) fn note(&self, machine: MachineId) -> Option<&String> {
        self.get(machine)?.note.as_ref()
    }

    /// The number of own rules on all machines whose rules are cached.
    pub(crate) fn owned_rules(&self) -> usize {
        self.0.values().filter_map(|state| state.rules.as_ref()).map(|rules| rules.owned.len()).sum()
    }

    /// Whether the rules of some machine were not read since the view was made.
    pub(crate) fn any_unread(&self) -> bool {
        self.0.values().any(|state| state.is_unread)
    }

    /// Records that the rules of these machines are known, or cannot be changed.
    pub(crate) fn mark_read<'a>(&mut self, machines: impl Iterator<Item = &'a MachineId>) {
        for machine in machines {
            if let Some(state) = self.0.get_mut(machine) {
                state.is_unread = false;
            }
        }
    }

    /// Starts a new view of these machines: all rules must be read again.
    pub(crate) fn start_view(&mut self, machines: &BTreeSet<MachineId>, now: I) {
        for (id, state) in &mut self.0 {
            state.rules = None;
            state.full_since = state.full_since.filter(|since| now < *since + FULL_FOR);
            state.is_unread = false;
            if !machines.contains(id) {
                state.left_view();
            }
        }
        machines.iter().for_each(|id| self.entry(*id).is_unread = true);
        self.0.retain(|_, state| !state.is_empty());
    }

    /// Drops all state that another leader may have changed.
    pub(crate) fn end_lease(&mut self) {
        for state in self.0.values_mut() {
            (state.rules, state.postponed_since, state.is_unread) = (None, None, false);
            state.confirmed_closes.clear();
        }
    }

    /// Returns the machines whose retry is due or whose refusals have expired, and removes the
    /// expired refusals.
    pub(crate) fn take_due(&mut self, now: I) -> BTreeSet<MachineId> {
        let is_due = |(id, state): (&MachineId, &mut MachineState<I>)| {
            let retry = state.retry.is_some_and(|retry| retry.at() <= now);
            (state.refusals.expire(now) || retry).then_some(*id)
        };
        self.0.iter_mut().filter_map(is_due).collect()
    }

    /// Returns the postponed machines, and since when they wait. They no longer count as postponed.
    pub(crate) fn take_postponed(&mut self) -> BTreeMap<MachineId, I> {
        let take =
            |(id, state): (&MachineId, &mut MachineState<I>)| Some((*id, state.postponed_since.take()?));
        self.0.iter_mut().filter_map(take).collect()
    }

    /// When the next failed or postponed machine is due.
    pub(crate) fn next_due(&self, now: I) -> Option<I> {
        if self.0.values().any(|state| state.postponed_since.is_some()) {
            return Some(now);
        }
        let retries = self.0.values().filter_map(|state| state.retry.map(|retry| retry.at()));
        retries.chain(self.0.values().filter_map(|state| state.refusals.next())).min()
    }

    pub(crate) fn clear_notes(&mut self) {
        self.0.values_mut().for_each(|state| state.note = None);
    }

    /// Adds notes to machines that have none.
    pub(crate) fn add_missing_notes(&mut self, notes: BTreeMap<MachineId, String>) {
        for (id, note) in notes {
            self.entry(id).note.get_or_insert(note);
        }
    }

    /// Sets these notes and, if `is_complete`, removes all others. Returns the machines whose note
    /// changed.
    pub(crate) fn set_notes(
        &mut self,
        notes: &BTreeMap<MachineId, String>,
        is_complete: bool,
    ) -> BTreeSet<MachineId> {
        let noted = self.noted();
        let mut changed = BTreeSet::new();
        for id in noted.iter().filter(|_| is_complete).chain(notes.keys()) {
            let state = self.entry(*id);
            if state.note.as_ref() != notes.get(id) {
                state.note = notes.get(id).cloned();
                state.note_changed = true;
                changed.insert(*id);
            }
        }
        changed
    }

    /// The machines that have a note.
    pub(crate) fn noted(&self) -> BTreeSet<MachineId> {
        self.0.iter().filter(|(_, state)| state.note.is_some()).map(|(id, _)| *id).collect()
    }

    /// Returns the machines whose note changed since the last call.
    pub(crate) fn take_changed_notes(&mut self) -> BTreeSet<MachineId> {
        let take = |(id, state): (&MachineId, &mut MachineState<I>)| {
            std::mem::take(&mut state.note_changed).then_some(*id)
        };
        self.0.iter_mut().filter_map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::{Error, Subject};

    const HERE: MachineId = MachineId::new(0);
    const GONE: MachineId = MachineId::new(1);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_machine_that_left_the_view_keeps_only_its_note_and_its_refusals() {
        let mut states = MachineStates::default();
        let denied = Error::Denied { what: Subject::Provider, reason: "no".into() };
        for id in [HERE, GONE] {
            let state = states.entry(id);
            state.retry_after(Pace::BackOff, at(0), 0);
            state.changing_since = Some(at(0));
            state.notice(at(0));
        }
        states.start_view(&[HERE].into(), at(1));
        assert!(states.get(GONE).is_none() && states.get(HERE).is_some_and(|state| state.is_unread));
        assert!(states.entry(GONE).deny(Request::Open, &denied, at(1), 0));
        states.entry(GONE).note = Some("its instance is gone".into());
        states.start_view(&[HERE].into(), at(2));
        assert!(states.note(GONE).is_some() && states.get(GONE).unwrap().refusals.next().is_some());
        assert_eq!(states.take_due(at(100)), [HERE, GONE].into());
    }

    #[test]
    fn a_firewall_counts_as_full_for_a_while() {
        let mut states = MachineStates::default();
        states.entry(HERE).full_since = Some(at(0));
        for (now, full) in [(29, true), (30, false)] {
            states.start_view(&[HERE].into(), at(now));
            assert_eq!(states.get(HERE).unwrap().full_since.is_some(), full, "{now}");
        }
    }

    #[test]
    fn postponed_machines_are_due_at_once_and_taken_once() {
        let mut states = MachineStates::default();
        states.entry(HERE).retry_after(Pace::Slow, at(0), 0);
        assert_eq!(states.next_due(at(5)), Some(at(60)));
        states.entry(GONE).postponed_since = Some(at(1));
        assert_eq!(states.next_due(at(5)), Some(at(5)));
        assert_eq!(states.take_postponed(), [(GONE, at(1))].into());
        assert_eq!((states.take_postponed().len(), states.next_due(at(5))), (0, Some(at(60))));
    }

    #[test]
    fn notes_change_once_and_only_a_whole_list_removes_any() {
        let mut states = MachineStates::<Duration>::default();
        let note = |id: MachineId| BTreeMap::from([(id, "gone".to_owned())]);
        assert_eq!(states.set_notes(&note(HERE), true), [HERE].into());
        assert_eq!(states.set_notes(&note(GONE), false), [GONE].into());
        assert_eq!((states.noted(), states.take_changed_notes()), ([HERE, GONE].into(), [HERE, GONE].into()));
        assert_eq!(states.set_notes(&note(GONE), true), [HERE].into());
        assert_eq!((states.take_changed_notes(), states.take_changed_notes()), ([HERE].into(), [].into()));
        states.add_missing_notes([(HERE, "new".to_owned()), (GONE, "new".to_owned())].into());
        assert_eq!(
            (states.note(HERE).unwrap().as_str(), states.note(GONE).unwrap().as_str()),
            ("new", "gone")
        );
    }
}
