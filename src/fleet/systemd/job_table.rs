//! The jobs of systemd whose results are awaited. A result is assigned to its job also if systemd
//! reports it before the reply to the call, or never. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::fleet::dbus::values::{JobResult, JobType};

use super::UnitState;

/// The awaited jobs. `W` is the recipient of a result; several may await one systemd job, because
/// systemd merges equal requests.
#[derive(Debug)]
pub(super) struct JobTable<W> {
    awaited: BTreeMap<u32, Awaited<W>>,
    /// The calls that may return a job, and the last of all calls.
    calls: BTreeSet<u64>,
    last_call: u64,
    /// Results of jobs, each with the last call that began before. One of the calls that began
    /// until then may still return the job.
    early: BTreeMap<u32, (JobResult, u64)>,
}

#[derive(Debug)]
struct Awaited<W> {
    recipients: Vec<W>,
    /// Whether the last comparison did not find the job in systemd.
    missing: bool,
}

impl<W> Default for JobTable<W> {
    fn default() -> Self {
        Self { awaited: BTreeMap::new(), calls: BTreeSet::new(), last_call: 0, early: BTreeMap::new() }
    }
}

impl<W> JobTable<W> {
    /// Notes that a call begins that may return a job. Returns its number.
    pub(super) fn call_begins(&mut self) -> u64 {
        self.last_call += 1;
        self.calls.insert(self.last_call);
        self.last_call
    }

    /// Notes that such a call has ended.
    pub(super) fn call_ends(&mut self, call: u64) {
        self.calls.remove(&call);
        let oldest = self.calls.first();
        self.early.retain(|_, (_, last)| oldest.is_some_and(|oldest| oldest <= last));
    }

    /// Adds the job that a call returned, before that call ends. If the job has ended already,
    /// returns its recipient and its result.
    pub(super) fn queued(&mut self, id: u32, recipient: W) -> Option<(W, JobResult)> {
        if let Some((result, _)) = self.early.get(&id) {
            return Some((recipient, *result));
        }
        let awaited =
            self.awaited.entry(id).or_insert_with(|| Awaited { recipients: Vec::new(), missing: false });
        awaited.recipients.push(recipient);
        None
    }

    /// Handles the end of a job. Returns the recipients of its result.
    pub(super) fn removed(&mut self, id: u32, result: JobResult) -> Vec<W> {
        if !self.calls.is_empty() {
            self.early.insert(id, (result, self.last_call));
        }
        self.awaited.remove(&id).map(|awaited| awaited.recipients).unwrap_or_default()
    }

    /// systemd has started again, and numbers its jobs from the beginning: results that no call has
    /// asked for belong to no job of the new one.
    pub(super) fn restarted(&mut self) {
        self.early.clear();
    }

    pub(super) fn is_awaited(&self, id: u32) -> bool {
        self.awaited.contains_key(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Returns whether the last comparison did not find a job that is still awaited.
    pub(super) fn has_missing(&self) -> bool {
        self.awaited.values().any(|awaited| awaited.missing)
    }

    /// Compares with the jobs that systemd has. Returns the recipients of jobs that are missing for
    /// the second time; the signal about their end was lost. After the first time the signal may
    /// still be on its way.
    pub(super) fn compare(&mut self, present: &BTreeSet<u32>) -> Vec<W> {
        let mut lost = Vec::new();
        self.awaited.retain(|id, awaited| {
            let missing = !present.contains(id);
            if missing && awaited.missing {
                lost.append(&mut awaited.recipients);
                return false;
            }
            awaited.missing = missing;
            true
        });
        lost
    }
}

/// Returns the result of a job whose end was not reported, from the state of its unit.
pub(super) fn result_of_lost(kind: JobType, state: &UnitState) -> JobResult {
    let as_wanted = match kind {
        JobType::Start | JobType::Restart | JobType::Reload => {
            matches!(state.active.as_str(), "active" | "reloading" | "refreshing")
        }
        JobType::Stop => matches!(state.active.as_str(), "inactive" | "failed"),
    };
    if as_wanted { JobResult::Done } else { JobResult::Failed }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_result_that_precedes_the_reply_is_kept_until_the_calls_end() {
        let mut table = JobTable::default();
        let (first, second) = (table.call_begins(), table.call_begins());
        assert_eq!(table.removed(7, JobResult::Failed), Vec::<&str>::new());
        table.call_ends(first);
        assert_eq!(table.queued(7, "a"), Some(("a", JobResult::Failed)));
        table.call_ends(second);
        table.call_begins();
        assert_eq!(table.queued(7, "b"), None, "ids of a new systemd begin again");
    }

    #[test]
    fn results_of_an_earlier_systemd_belong_to_no_later_job() {
        let mut table = JobTable::default();
        let call = table.call_begins();
        table.removed(7, JobResult::Failed);
        table.restarted();
        assert_eq!(table.queued(7, "a"), None);
        table.call_ends(call);
    }

    #[test]
    fn results_are_kept_only_for_calls_that_began_before() {
        let mut table = JobTable::<&str>::default();
        let mut running = table.call_begins();
        for id in 0..1_000 {
            // There is always a call that has not ended.
            let next = table.call_begins();
            table.removed(id, JobResult::Done);
            table.call_ends(running);
            running = next;
            assert!(table.early.len() <= 2, "{}", table.early.len());
        }
        assert_eq!(table.queued(999, "a"), Some(("a", JobResult::Done)));
    }

    #[test]
    fn equal_requests_share_a_result() {
        let mut table = JobTable::default();
        let call = table.call_begins();
        assert_eq!((table.queued(1, "a"), table.queued(1, "b")), (None, None));
        table.call_ends(call);
        assert_eq!(table.removed(1, JobResult::Done), ["a", "b"]);
        assert_eq!(table.removed(1, JobResult::Done), Vec::<&str>::new());
        assert!(table.is_empty());
    }

    #[test]
    fn a_job_is_lost_if_it_is_missing_twice() {
        let mut table = JobTable::default();
        table.queued(1, "a");
        table.queued(2, "b");
        assert_eq!(table.compare(&[2].into()), Vec::<&str>::new());
        assert_eq!(table.compare(&[1].into()), Vec::<&str>::new(), "seen again");
        assert_eq!(table.compare(&[].into()), ["b"]);
        assert_eq!(table.compare(&[].into()), ["a"]);
    }

    #[test]
    fn the_state_of_the_unit_is_the_result_of_a_lost_job() {
        for (kind, active, result) in [
            (JobType::Start, "active", JobResult::Done),
            (JobType::Start, "inactive", JobResult::Failed),
            (JobType::Restart, "activating", JobResult::Failed),
            (JobType::Reload, "active", JobResult::Done),
            (JobType::Stop, "failed", JobResult::Done),
            (JobType::Stop, "inactive", JobResult::Done),
            (JobType::Stop, "active", JobResult::Failed),
        ] {
            let state = UnitState { active: active.to_owned(), ..UnitState::default() };
            assert_eq!(result_of_lost(kind, &state), result, "{kind} {active}");
        }
    }

    proptest! {
        /// In any order of replies and signals, every recipient gets exactly one result.
        #[test]
        fn every_recipient_gets_one_result(order in prop::collection::vec((0u32..6, any::<bool>()), 0..40)) {
            let mut table = JobTable::default();
            let (mut begun, mut ended, mut results) = ([false; 6], [false; 6], [0; 6]);
            let all = (0..6).flat_map(|id| [(id, true), (id, false)]);
            for (id, is_reply) in order.into_iter().chain(all) {
                let at = id as usize;
                if is_reply && !begun[at] {
                    begun[at] = true;
                    table.call_begins();
                    if let Some((recipient, _)) = table.queued(id, at) {
                        results[recipient] += 1;
                    }
                } else if !is_reply && !ended[at] {
                    ended[at] = true;
                    table.call_begins();
                    for recipient in table.removed(id, JobResult::Done) {
                        results[recipient] += 1;
                    }
                }
            }
            prop_assert_eq!(results, [1; 6]);
        }
    }
}
