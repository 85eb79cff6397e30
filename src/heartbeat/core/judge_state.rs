//! The judge's decisions between the store and the memory of components: where a new judge
//! continues, which changes it publishes, when it needs the beats of other replicas. `judge` reads
//! and writes the store and makes the calls. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::audit::{Audit, Change, Now};
use super::journal::{self, Journal};
use super::mass_outage::HoldPhase;
use super::record::{Hold, Record, bucket_of};
use super::sequence::Sequence;
use super::webhook_queue::{WebhookProgress, WebhookQueue};

/// The duration of a hold is stored in steps of this length. A hold lasts at most one step longer
/// for each judge that crashes.
const HELD_STEP_MS: u64 = 10_000;

/// The store as a new judge has read it.
#[derive(Debug)]
pub struct Inherited<E> {
    /// The version of each bucket, and whether the bucket can be read.
    pub buckets: Vec<(u16, i32, bool)>,
    /// The newest flush request that any replica has read, and the version of its znode.
    pub flush_request: (u64, i32),
    pub progress: (WebhookProgress, i32),
    /// All pages of the journal, oldest first.
    pub pages: Vec<journal::Read<E>>,
    /// The mass outage, `None` if it cannot be read, and the version of its znode.
    pub hold: (Option<Option<Hold>>, i32),
    /// How often an operator has released held deaths.
    pub release: i32,
    /// The store is older than the memory of this tracker.
    pub rolled_back: bool,
    /// The highest number of a page that this tracker has ever read.
    pub last_page: Option<u64>,
    /// The highest number of a change that this tracker has ever published.
    pub last_published: u64,
}

impl<E> Inherited<E> {
    fn journalled(&self) -> BTreeMap<u64, Change> {
        let changes = self.pages.iter().flat_map(|page| page.changes.as_deref().unwrap_or_default());
        changes.map(|change| (change.sequence, *change)).collect()
    }

    /// The number of the last change in the journal. An empty journal has no changes; an unreadable
    /// one may have all of them.
    pub fn journal_end(&self) -> u64 {
        let unknown = if self.pages.is_empty() { 0 } else { u64::MAX };
        self.journalled().last_key_value().map_or(unknown, |(last, _)| *last)
    }
}

#[derive(Debug)]
pub struct JudgeState {
    sequence: Sequence,
    /// The number of the newest flush request and the version of its znode.
    pub flush_request: (u64, i32),
    /// When that request was made, until all replicas have answered it.
    requested_at: Option<u64>,
    /// All beats that any replica received before this time are known.
    synced_until: u64,
    /// Versions of the buckets in the store.
    pub versions: HashMap<u16, i32>,
    /// Buckets that cannot be read. They are never overwritten.
    pub frozen: BTreeSet<u16>,
    /// Changes that are not in the journal yet, in order.
    pub unpublished: Vec<Change>,
    pub journal: Journal,
    pub webhook_queue: WebhookQueue,
    /// The webhook's progress as it is in the store, and the version of its znode.
    pub progress: (WebhookProgress, i32),
    /// The mass outage as it is in the store, if it can be read, and the version of its znode.
    pub hold: (Option<Option<Hold>>, i32),
    /// The newest release by an operator that was applied.
    pub release: i32,
}

impl JudgeState {
    /// Continues where the previous judge stopped. Returns also how many components the store has
    /// lost: their buckets are marked to be written again.
    pub fn resume<E>(inherited: Inherited<E>, audit: &mut Audit, now: Now) -> (Self, usize) {
        let (journalled, last) = (inherited.journalled(), inherited.journal_end());
        let newest_journalled = journalled.last_key_value().map_or(0, |(number, _)| *number);
        let known = newest_journalled.max(inherited.last_published).max(audit.highest_number());
        let sequence = Sequence::above(known, now.wall);
        let now = now.awake;
        let Inherited {
            buckets, flush_request, progress, pages, hold, release, rolled_back, last_page, ..
        } = inherited;
        let versions: HashMap<u16, i32> =
            buckets.iter().map(|(number, version, _)| (*number, *version)).collect();
        let frozen = buckets.iter().filter(|(.., readable)| !readable).map(|(number, ..)| *number).collect();
        audit.start_judging(now, phase_of(hold.0.flatten()));
        if matches!(hold.0, Some(Some(Hold::Held { release: applied, .. })) if applied != release) {
            // The operator released the deaths after the previous judge last wrote the hold.
            audit.release(now);
        }
        // Judges never delete a bucket, so the store has lost a bucket that is missing.
        let rewritten = audit.write_again(|bucket| rolled_back || !versions.contains_key(&bucket));
        // The previous judge may have crashed before it wrote its last changes to the journal.
        let unpublished = audit.changes_since(last);
        // Changes whose pages are gone are replaced by the newest change of each component.
        let mut missed: BTreeMap<u64, Change> = audit
            .changes_since(progress.0.done)
            .into_iter()
            .map(|change| (change.sequence, change))
            .collect();
        if !rolled_back {
            // A restored store may contain changes here that newer ones have replaced.
            missed.extend(journalled);
        }
        let missed = missed.into_values().filter(|change| change.sequence <= last);
        let webhook_queue = WebhookQueue::new(progress.0.clone(), missed);
        let journal = Journal::of(&pages);
        let journal = if rolled_back { journal.after_loss(last_page) } else { journal };
        let state = Self {
            sequence,
            flush_request,
            requested_at: None,
            synced_until: 0,
            versions,
            frozen,
            unpublished,
            journal,
            webhook_queue,
            progress,
            hold,
            release,
        };
        (state, rewritten)
    }

    /// Applies beats and silence. `answered`: all other replicas have answered the newest flush
    /// request; `alone`: there are no other replicas. Returns whether a mass outage begins.
    pub fn decide(&mut self, audit: &mut Audit, now: Now, answered: bool, alone: bool) -> bool {
        if let Some(at) = self.requested_at.take_if(|_| answered) {
            self.synced_until = self.synced_until.max(at);
        }
        if alone {
            self.synced_until = now.awake;
        }
        let decisions = audit.judge(now, self.synced_until, &mut self.sequence);
        // A change that cannot be stored must not be published: the next judge could not read it.
        let writable = |change: &Change| !self.frozen.contains(&bucket_of(change.name.as_str()));
        self.unpublished.extend(decisions.changes.into_iter().filter(writable));
        decisions.is_new_hold
    }

    /// Whether deadlines have passed up to which the beats of other replicas are not known.
    pub fn needs_flush(&self, audit: &Audit, now: u64, alone: bool) -> bool {
        self.requested_at.is_none() && !alone && self.synced_until < now && audit.has_due(now)
    }

    /// The store has the next flush request, made at `now`.
    pub fn flush_requested(&mut self, now: u64) {
        self.flush_request = (self.flush_request.0 + 1, self.flush_request.1 + 1);
        self.requested_at = Some(now);
    }

    /// Ends the freeze of a bucket that is readable again, or removed: then it has no records and
    /// no version. Returns how many of its changes are published again.
    pub fn unfreeze(
        &mut self,
        bucket: u16,
        records: &[Record],
        version: Option<i32>,
        audit: &mut Audit,
        now: Now,
    ) -> usize {
        match version {
            Some(version) => drop(self.versions.insert(bucket, version)),
            None => drop(self.versions.remove(&bucket)),
        }
        self.frozen.remove(&bucket);
        let changes = audit.unfreeze(bucket, records, now, &mut self.sequence);
        self.unpublished.extend(&changes);
        changes.len()
    }

    /// The mass outage as it should be in the store; `None` without one.
    pub fn hold_to_store(&self, audit: &Audit, now: u64) -> Option<Hold> {
        match audit.hold_phase(now) {
            HoldPhase::Quiet => None,
            HoldPhase::Released => Some(Hold::Released),
            HoldPhase::Holding { for_ms } => {
                let (silent, alive) = audit.alarm().unwrap_or_default();
                let for_ms = for_ms - for_ms % HELD_STEP_MS;
                Some(Hold::Held { silent, alive, for_ms, release: self.release })
            }
        }
    }
}

fn phase_of(hold: Option<Hold>) -> HoldPhase {
    match hold {
        None => HoldPhase::Quiet,
        Some(Hold::Held { for_ms, .. }) => HoldPhase::Holding { for_ms },
        Some(Hold::Released) => HoldPhase::Released,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::core::name::Name;
    use crate::heartbeat::core::params::Params;
    use crate::heartbeat::core::record::NotifyStatus;
    use crate::heartbeat::core::state::State;

    const NOW: u64 = 100_000;

    fn at(awake: u64) -> Now {
        Now { awake, wall: 0 }
    }

    fn change(sequence: u64) -> Change {
        Change::started(&format!("n{sequence}"), sequence)
    }

    /// A memory with one component for each of these changes.
    fn memory(sequences: &[u64]) -> Audit {
        let mut audit = Audit::new(NOW, &Params::default(), 100);
        for sequence in sequences {
            let record = change(*sequence).record(NotifyStatus::Pending);
            audit.adopt(bucket_of(record.name.as_str()), &[record], NOW);
        }
        audit
    }

    fn buckets(sequences: &[u64]) -> Vec<(u16, i32, bool)> {
        sequences.iter().map(|sequence| (bucket_of(change(*sequence).name.as_str()), 0, true)).collect()
    }

    fn page(number: u64, sequences: &[u64]) -> journal::Read<()> {
        let changes: Vec<Change> = sequences.iter().map(|sequence| change(*sequence)).collect();
        let data = Journal::default().with(&changes).remove(0).data;
        journal::Read { number, version: 0, data, changes: Ok(changes) }
    }

    fn garbled(number: u64) -> journal::Read<()> {
        journal::Read { number, version: 0, data: b"x".to_vec(), changes: Err(()) }
    }

    fn inherited(stored: &[u64], pages: Vec<journal::Read<()>>, done: u64) -> Inherited<()> {
        Inherited {
            buckets: buckets(stored),
            flush_request: (7, 3),
            progress: (WebhookProgress::from_bytes(done.to_string().as_bytes()).unwrap(), 0),
            pages,
            hold: (Some(None), 0),
            release: 0,
            rolled_back: false,
            last_page: Some(4),
            last_published: 0,
        }
    }

    fn drain(queue: &mut WebhookQueue) -> Vec<u64> {
        let mut sent = Vec::new();
        while let Some(change) = queue.next(|_| false, |_| None) {
            sent.push(change.sequence);
            queue.mark_sent(&change);
        }
        sent
    }

    #[test]
    fn resume_continues_where_the_previous_judge_stopped() {
        let rolled_back = |inherited: Inherited<()>| Inherited { rolled_back: true, ..inherited };
        // Columns: the case, known in memory, read from the store; then the expected values:
        // unpublished, for the webhook, written again.
        for (what, known, read, unpublished, queued, rewritten) in [
            ("an empty store", &[][..], inherited(&[], vec![], 0), &[][..], &[][..], 0),
            ("all published and sent", &[1, 2], inherited(&[1, 2], vec![page(0, &[1, 2])], 2), &[], &[], 0),
            ("stored, not in the journal", &[1, 2], inherited(&[1, 2], vec![page(0, &[1])], 1), &[2], &[], 0),
            ("not sent to the webhook", &[2], inherited(&[2], vec![page(0, &[1, 2])], 0), &[], &[1, 2], 0),
            ("a trimmed journal", &[1, 3], inherited(&[1, 3], vec![page(2, &[3])], 0), &[], &[1, 3], 0),
            ("an unreadable journal", &[1, 2], inherited(&[1, 2], vec![garbled(0)], 1), &[], &[2], 0),
            ("a bucket is missing", &[1, 2], inherited(&[1], vec![page(0, &[1, 2])], 2), &[], &[], 1),
            ("rolled back", &[2, 5], rolled_back(inherited(&[2, 5], vec![page(0, &[2])], 1)), &[5], &[2], 2),
        ] {
            let mut audit = memory(known);
            let (mut state, again) = JudgeState::resume(read, &mut audit, at(NOW));
            let changes: Vec<u64> = state.unpublished.iter().map(|change| change.sequence).collect();
            assert_eq!(changes, unpublished, "{what}: unpublished");
            assert_eq!(drain(&mut state.webhook_queue), queued, "{what}: for the webhook");
            assert_eq!((again, state.flush_request), (rewritten, (7, 3)), "{what}");
        }
    }

    #[test]
    fn resume_numbers_pages_above_all_that_were_read_after_a_rollback() {
        for (rolled_back, next) in [(false, 0), (true, 5)] {
            let read = Inherited { rolled_back, ..inherited(&[1], vec![page(0, &[1])], 1) };
            let (state, _) = JudgeState::resume(read, &mut memory(&[1]), at(NOW));
            assert_eq!(state.journal.with(&[change(9)])[0].number, next, "{rolled_back}");
        }
    }

    #[test]
    fn resume_continues_a_hold_unless_it_was_released_since() {
        let held = Hold::Held { silent: 5, alive: 9, for_ms: 20_000, release: 1 };
        for (hold, release, phase) in [
            (Some(None), 1, HoldPhase::Quiet),
            (Some(Some(held)), 1, HoldPhase::Holding { for_ms: 20_000 }),
            (Some(Some(held)), 2, HoldPhase::Released),
            (Some(Some(Hold::Released)), 1, HoldPhase::Released),
            (None, 1, HoldPhase::Quiet),
        ] {
            let read = Inherited { hold: (hold, 0), release, ..inherited(&[], vec![], 0) };
            let mut audit = memory(&[]);
            let (state, _) = JudgeState::resume(read, &mut audit, at(NOW));
            assert_eq!(audit.hold_phase(NOW), phase, "{hold:?}, {release}");
            let stored = state.hold_to_store(&audit, NOW);
            assert_eq!(stored.is_some(), phase != HoldPhase::Quiet);
        }
    }

    #[test]
    fn changes_of_frozen_buckets_are_not_published() {
        let name = change(1).name;
        let read =
            Inherited { buckets: vec![(bucket_of(name.as_str()), 0, false)], ..inherited(&[], vec![], 0) };
        let mut audit = memory(&[]);
        let (mut state, _) = JudgeState::resume(read, &mut audit, at(NOW));
        audit.beat(NOW, &name, false).unwrap();
        audit.beat(NOW, &change(2).name, false).unwrap();
        let now = Now { awake: NOW, wall: 0 };
        assert!(!state.decide(&mut audit, now, true, true));
        let names: Vec<Name> = state.unpublished.iter().map(|change| change.name).collect();
        assert_eq!(names, [change(2).name]);
        assert_eq!(state.unfreeze(bucket_of(name.as_str()), &[], None, &mut audit, now), 1);
        assert_eq!(state.unpublished.len(), 2);
    }

    #[test]
    fn deadlines_wait_for_a_flush_of_the_other_replicas() {
        let mut audit = memory(&[]);
        let (mut state, _) = JudgeState::resume(inherited(&[], vec![], 0), &mut audit, at(NOW));
        audit.beat(NOW, &change(1).name, false).unwrap();
        state.decide(&mut audit, at(NOW), false, false);
        assert!(!state.needs_flush(&audit, NOW + 1_000, false), "no deadline has passed");
        let late = NOW + 11_000;
        assert!(state.needs_flush(&audit, late, false) && !state.needs_flush(&audit, late, true));
        state.flush_requested(late);
        assert_eq!(state.flush_request, (8, 4));
        assert!(!state.needs_flush(&audit, late, false), "a request is under way");
        state.unpublished.clear();
        state.decide(&mut audit, at(late), false, false);
        assert!(state.unpublished.is_empty(), "another replica may have a beat");
        state.decide(&mut audit, at(late + 10), true, false);
        assert_eq!(state.unpublished[0].state, State::Warned);
    }
}
