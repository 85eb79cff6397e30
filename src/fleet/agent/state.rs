//! The state of one connection to a manager: its jobs and subscriptions. Pure.

use std::collections::BTreeMap;

use crate::fleet::systemd::Subscriptions;

/// A manager may subscribe to this many units and globs on one node: more than it ever needs, also
/// while it replaces many of them.
pub(super) const MAX_SUBSCRIPTIONS: usize = 2 * crate::fleet::monitor::MAX_PATTERNS;

/// The jobs of one connection, by the manager's ids.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    jobs: BTreeMap<u32, Job>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    /// systemd has not replied to the call.
    Starting { cancel: bool },
    /// systemd's id of the job.
    Queued(u32),
}

impl Jobs {
    /// Begins a job, before systemd is called. Returns whether the id is new.
    pub(super) fn begin(&mut self, id: u32) -> bool {
        let is_new = !self.jobs.contains_key(&id);
        if is_new {
            self.jobs.insert(id, Job::Starting { cancel: false });
        }
        is_new
    }

    /// Notes the job that systemd has queued. Returns whether it is to be cancelled at once.
    pub(super) fn queued(&mut self, id: u32, systemd_job: u32) -> bool {
        let before = self.jobs.insert(id, Job::Queued(systemd_job));
        before == Some(Job::Starting { cancel: true })
    }

    /// Ends a job. Returns whether there was one.
    pub(super) fn end(&mut self, id: u32) -> bool {
        self.jobs.remove(&id).is_some()
    }

    /// Cancels a job. Returns systemd's id of it, if the caller has to cancel it now.
    pub(super) fn cancel(&mut self, id: u32) -> Option<u32> {
        match self.jobs.get_mut(&id)? {
            Job::Starting { cancel } => {
                *cancel = true;
                None
            }
            Job::Queued(systemd_job) => Some(*systemd_job),
        }
    }

    /// Returns the manager's ids of a systemd job. There may be several, because systemd merges
    /// equal jobs.
    pub(super) fn of_systemd(&self, systemd_job: u32) -> Vec<u32> {
        let jobs = self.jobs.iter().filter(|(_, job)| **job == Job::Queued(systemd_job));
        jobs.map(|(id, _)| *id).collect()
    }
}

/// Adds a subscription. Returns false if there are too many.
pub(super) fn subscribe(subscriptions: &mut Subscriptions, pattern: &str) -> bool {
    let fits = subscriptions.len() < MAX_SUBSCRIPTIONS || subscriptions.contains(pattern);
    if fits {
        subscriptions.insert(pattern);
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_cancelled_before_and_after_systemd_has_queued_it() {
        let mut jobs = Jobs::default();
        assert_eq!(jobs.cancel(1), None, "unknown");
        assert!(jobs.begin(1) && !jobs.begin(1));
        assert!(!jobs.queued(1, 71));
        assert_eq!(jobs.cancel(1), Some(71));
        assert!(jobs.begin(2));
        assert_eq!(jobs.cancel(2), None, "systemd has no job yet");
        assert!(jobs.queued(2, 72), "cancelled as soon as systemd has it");
        assert!(jobs.end(1) && !jobs.end(1));
        assert_eq!(jobs.cancel(1), None);
    }

    #[test]
    fn merged_jobs_of_systemd_have_several_ids() {
        let mut jobs = Jobs::default();
        for id in [1, 2, 3] {
            jobs.begin(id);
        }
        jobs.queued(1, 7);
        jobs.queued(3, 7);
        assert_eq!((jobs.of_systemd(7), jobs.of_systemd(8)), (vec![1, 3], vec![]));
    }

    #[test]
    fn subscriptions_are_limited_and_can_be_repeated() {
        let mut subscriptions = Subscriptions::default();
        for number in 0..MAX_SUBSCRIPTIONS {
            assert!(subscribe(&mut subscriptions, &format!("{number}.service")));
        }
        assert!(!subscribe(&mut subscriptions, "more.service"));
        assert!(subscribe(&mut subscriptions, "0.service"));
    }
}
