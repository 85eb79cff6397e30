//! The job queue: for each systemd unit of a node one running job, and at most one that is queued
//! behind it. Each method is an event; it returns the effects, which the caller executes in order.
//! Every job ends in exactly one [`Effect::JobRemoved`]. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use super::dbus::values::{JobMode, JobResult, JobState, JobType};
use super::name::NodeName;
use crate::mutant;

/// The maximum number of jobs at the same time. Further ones are refused.
pub const MAX_JOBS: usize = 10_000;

/// A job. `P` is its payload for the node, which is passed to [`Effect::StartOnNode`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job<P, I> {
    pub node: NodeName,
    pub systemd_unit: String,
    pub kind: JobType,
    pub mode: JobMode,
    pub state: JobState,
    /// When the job was submitted.
    pub since: I,
    phase: Phase<P>,
    is_cancelled: bool,
}

/// The progress of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase<P> {
    /// It waits for the running job.
    Queued(P),
    /// It was sent to its node, which has not answered. The node may report the result first; the
    /// caller gets the answer before the job ends.
    Sent { result: Option<JobResult> },
    /// The node has accepted it.
    Accepted,
}

/// A request of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request<P> {
    pub node: NodeName,
    pub systemd_unit: String,
    pub kind: JobType,
    pub mode: JobMode,
    pub payload: P,
}

/// A job that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    pub id: u32,
    pub node: NodeName,
    pub systemd_unit: String,
    pub kind: JobType,
    pub result: JobResult,
}

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<P> {
    JobNew {
        id: u32,
        node: NodeName,
        systemd_unit: String,
    },
    StartOnNode {
        id: u32,
        request: Request<P>,
    },
    CancelOnNode {
        id: u32,
        node: NodeName,
    },
    StateChanged {
        id: u32,
        state: JobState,
    },
    /// The object of the job is gone. `took` is the time since it was submitted.
    JobRemoved {
        removed: Removed,
        took: Duration,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("another job of this systemd unit is queued already, and the mode is 'fail'")]
    Queued,
    #[error("{MAX_JOBS} jobs are queued already")]
    Full,
}

/// The jobs of one systemd unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    running: u32,
    queued: Option<u32>,
}

/// All jobs of a manager.
#[derive(Debug)]
pub struct Jobs<P, I> {
    last_id: u32,
    jobs: BTreeMap<u32, Job<P, I>>,
    slots: BTreeMap<NodeName, BTreeMap<String, Slot>>,
}

impl<P, I> Default for Jobs<P, I> {
    fn default() -> Self {
        Self { last_id: 0, jobs: BTreeMap::new(), slots: BTreeMap::new() }
    }
}

impl<P, I> Jobs<P, I>
where
    I: Copy + Ord + std::ops::Sub<I, Output = Duration>,
{
    pub fn get(&self, id: u32) -> Option<&Job<P, I>> {
        self.jobs.get(&id)
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.jobs.keys().copied()
    }

    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Submits a job. Returns its id.
    ///
    /// # Errors
    /// If the job is refused; nothing has changed then.
    pub fn submit(&mut self, request: Request<P>, now: I) -> Result<(u32, Vec<Effect<P>>), Refused> {
        let slot = self.slots.get(&request.node).and_then(|units| units.get(&request.systemd_unit)).copied();
        let queued = slot.and_then(|slot| slot.queued);
        if queued.is_some() && request.mode == JobMode::Fail {
            return Err(Refused::Queued);
        }
        if self.jobs.len() >= MAX_JOBS {
            return Err(Refused::Full);
        }
        let mut effects = Vec::new();
        if let Some(old) = queued {
            self.remove(old, JobResult::Cancelled, now, &mut effects);
        }
        let id = self.next_id();
        let Request { node, systemd_unit, kind, mode, payload } = request;
        effects.push(Effect::JobNew { id, node: node.clone(), systemd_unit: systemd_unit.clone() });
        let units = self.slots.entry(node.clone()).or_default();
        let slot = units.entry(systemd_unit.clone()).or_insert(Slot { running: id, queued: None });
        let runs = slot.running == id;
        if !runs {
            slot.queued = Some(id);
        }
        let state = JobState::Waiting;
        let phase = Phase::Queued(payload);
        let job = Job { node, systemd_unit, kind, mode, state, since: now, phase, is_cancelled: false };
        self.jobs.insert(id, job);
        if runs {
            self.run(id, &mut effects);
        }
        Ok((id, effects))
    }

    /// Cancels a job; `None` if there is no such job. A running job ends when its node reports its
    /// end. Each call sends a request to the node, because an earlier one may have failed there.
    pub fn cancel(&mut self, id: u32, now: I) -> Option<Vec<Effect<P>>> {
        let mut effects = Vec::new();
        let job = self.jobs.get_mut(&id)?;
        job.is_cancelled = true;
        match job.phase {
            Phase::Queued(_) => self.remove(id, JobResult::Cancelled, now, &mut effects),
            // `accepted` cancels it on the node.
            Phase::Sent { .. } => {}
            Phase::Accepted => effects.push(Effect::CancelOnNode { id, node: job.node.clone() }),
        }
        Some(effects)
    }

    /// Handles the acceptance of a job by its node. The reply to the caller of the job must be
    /// queued before, because the job may end here.
    pub fn accepted(&mut self, id: u32, now: I) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        if let Some(job) = self.jobs.get_mut(&id)
            && let Phase::Sent { result } = job.phase
        {
            job.phase = Phase::Accepted;
            match result {
                Some(result) => self.remove(id, result, now, &mut effects),
                None if job.is_cancelled => {
                    effects.push(Effect::CancelOnNode { id, node: job.node.clone() });
                }
                None => {}
            }
        }
        effects
    }

    /// Handles a job that its node refused, or that could not be sent. If the node has reported a
    /// result before, that is the result.
    pub fn refused(&mut self, id: u32, now: I) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        let result = match self.jobs.get(&id).map(|job| &job.phase) {
            Some(Phase::Sent { result: Some(result) }) => *result,
            _ => JobResult::Failed,
        };
        self.remove(id, result, now, &mut effects);
        effects
    }

    /// Handles a job whose node did not answer in time. The node may still execute it, so it is
    /// cancelled there.
    pub fn unanswered(&mut self, id: u32, now: I) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        if let Some(job) = self.jobs.get(&id)
            && matches!(job.phase, Phase::Sent { result: None })
        {
            effects.push(Effect::CancelOnNode { id, node: job.node.clone() });
        }
        effects.extend(self.refused(id, now));
        effects
    }

    /// Handles a node's report of the end of a job. Jobs of other nodes, and jobs that were not
    /// sent to the node, are ignored.
    pub fn done(&mut self, node: &NodeName, id: u32, result: JobResult, now: I) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        if let Some(job) = self.jobs.get_mut(&id).filter(|job| job.node == *node) {
            match &mut job.phase {
                Phase::Queued(_) => {}
                Phase::Sent { .. } if mutant!(EarlyResultsIgnored) => {}
                Phase::Sent { result: early } => *early = Some(early.unwrap_or(result)),
                Phase::Accepted => self.remove(id, result, now, &mut effects),
            }
        }
        effects
    }

    /// Handles a node's report of the state of systemd's job.
    pub fn state_changed(&mut self, node: &NodeName, id: u32, state: JobState) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        if self.runs_on(node, id) {
            self.set_state(id, state, &mut effects);
        }
        effects
    }

    /// Handles the loss or removal of a node. The result of its running jobs is unknown, and its
    /// queued jobs never ran.
    pub fn node_lost(&mut self, node: &NodeName, now: I) -> Vec<Effect<P>> {
        let mut effects = Vec::new();
        for slot in self.slots.remove(node).unwrap_or_default().into_values() {
            for (id, result) in [(slot.queued, JobResult::Cancelled), (Some(slot.running), JobResult::Failed)]
            {
                if let Some(id) = id {
                    self.remove(id, result, now, &mut effects);
                }
            }
        }
        effects
    }

    /// Ends all jobs, because the manager stops or is no longer the leader. systemd's jobs
    /// continue.
    pub fn stop(&mut self, now: I) -> Vec<Effect<P>> {
        self.slots.clear();
        let mut effects = Vec::new();
        while let Some((&id, _)) = self.jobs.first_key_value() {
            self.remove(id, JobResult::Cancelled, now, &mut effects);
        }
        effects
    }

    /// The next id that no job has. 0 is never an id.
    fn next_id(&mut self) -> u32 {
        loop {
            self.last_id = self.last_id.wrapping_add(1);
            if self.last_id != 0 && !self.jobs.contains_key(&self.last_id) {
                return self.last_id;
            }
        }
    }

    fn runs_on(&self, node: &NodeName, id: u32) -> bool {
        let job = self.jobs.get(&id).filter(|job| job.node == *node);
        job.is_some_and(|job| !matches!(job.phase, Phase::Queued(_)))
    }

    fn set_state(&mut self, id: u32, state: JobState, effects: &mut Vec<Effect<P>>) {
        if let Some(job) = self.jobs.get_mut(&id)
            && job.state != state
        {
            job.state = state;
            effects.push(Effect::StateChanged { id, state });
        }
    }

    /// Sends a job to its node.
    fn run(&mut self, id: u32, effects: &mut Vec<Effect<P>>) {
        self.set_state(id, JobState::Running, effects);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if let Phase::Queued(payload) = std::mem::replace(&mut job.phase, Phase::Sent { result: None }) {
            let (node, systemd_unit) = (job.node.clone(), job.systemd_unit.clone());
            let request = Request { node, systemd_unit, kind: job.kind, mode: job.mode, payload };
            effects.push(Effect::StartOnNode { id, request });
        }
    }

    /// Ends a job, if it still exists, and sends the job that is queued behind it to the node.
    fn remove(&mut self, id: u32, result: JobResult, now: I, effects: &mut Vec<Effect<P>>) {
        let Some(job) = self.jobs.remove(&id) else { return };
        let Job { node, systemd_unit, kind, since, .. } = job;
        let next = self.leave_slot(&node, &systemd_unit, id);
        let removed = Removed { id, node, systemd_unit, kind, result };
        effects.push(Effect::JobRemoved { removed, took: now - since });
        if let Some(next) = next
            && !mutant!(WaitingJobsNeverSent)
        {
            self.run(next, effects);
        }
    }

    /// Takes a job out of its slot. Returns the job that runs next.
    fn leave_slot(&mut self, node: &NodeName, systemd_unit: &str, id: u32) -> Option<u32> {
        let units = self.slots.get_mut(node)?;
        let slot = units.get_mut(systemd_unit)?;
        if slot.queued == Some(id) {
            slot.queued = None;
            return None;
        }
        if slot.running != id {
            return None;
        }
        let next = slot.queued.take();
        match next {
            Some(next) => slot.running = next,
            None => {
                units.remove(systemd_unit);
                if units.is_empty() {
                    self.slots.remove(node);
                }
            }
        }
        next
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
