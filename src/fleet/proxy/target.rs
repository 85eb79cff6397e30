//! The dep service of one target: when it is started and stopped. Pure.

use std::collections::BTreeSet;
use std::ops::Add;
use std::time::Duration;

use super::{Activity, ProxyKey};

/// A unit that is restarted is inactive for a moment, and a dep service that stops together with
/// its unit stops first. Only after this time, and second reports, is anything done about them.
const STOPPED_AFTER: Duration = Duration::from_millis(300);
/// The pause before a job that nobody waits for is repeated.
const RETRY: Duration = Duration::from_secs(5);

/// The proxies of a target.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wanted {
    /// Proxies whose source waits for the target.
    pub(super) waiting: usize,
    /// Proxies whose target became active on the present instance of systemd.
    pub(super) active: usize,
    /// Proxies whose target became active before its node was started again.
    pub(super) restarted: usize,
}

/// The next step of the caller for a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    None,
    Start,
    Stop,
    /// Ask for the state again.
    Refresh,
    /// End the active proxies.
    Stopped,
    Remove,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    Start,
    Stop,
}

/// The second look at a unit with active proxies, when it or its dep service was reported as
/// inactive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondLook<I> {
    At(I),
    /// The states were asked for again, and these were reported since.
    Asked {
        unit: bool,
        dep: bool,
    },
}

/// A unit that is the target of proxies, and its dep service. The states are `None` until they are
/// reported on the present connection.
#[derive(Debug)]
pub(super) struct Target<I> {
    pub(super) proxies: BTreeSet<ProxyKey>,
    unit: Option<Activity>,
    dep: Option<Activity>,
    job: Option<Job>,
    /// Whether the dep service was started since it was stopped last. A report that it is inactive
    /// may be older than the start, so only a stop proves that it is.
    was_started: bool,
    second_look: Option<SecondLook<I>>,
    /// Sources that are not connected yet may need the dep service until then.
    pub(super) keep_until: Option<I>,
    /// After a failure, or a start without an effect, the times of the next jobs.
    start_after: Option<I>,
    stop_after: Option<I>,
}

impl<I> Default for Target<I> {
    fn default() -> Self {
        Self {
            proxies: BTreeSet::new(),
            unit: None,
            dep: None,
            job: None,
            was_started: false,
            second_look: None,
            keep_until: None,
            start_after: None,
            stop_after: None,
        }
    }
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Target<I> {
    /// Handles the loss of the node. The result of the job is unknown.
    pub(super) fn node_lost(&mut self) {
        let proxies = std::mem::take(&mut self.proxies);
        *self = Self { proxies, keep_until: self.keep_until, ..Self::default() };
    }

    pub(super) fn unit_reported(&mut self, activity: Activity) {
        self.unit = Some(activity);
        if let Some(SecondLook::Asked { unit, .. }) = &mut self.second_look {
            *unit = true;
        }
    }

    pub(super) fn dep_reported(&mut self, activity: Activity) {
        self.dep = Some(activity);
        if let Some(SecondLook::Asked { dep, .. }) = &mut self.second_look {
            *dep = true;
        }
    }

    /// Returns whether the job was a start; `None` if there was no job.
    pub(super) fn job_ended(&mut self, is_done: bool, now: I) -> Option<bool> {
        let job = self.job.take()?;
        match job {
            Job::Start if is_done => {}
            Job::Start => self.start_after = Some(now + RETRY),
            Job::Stop if is_done => (self.dep, self.was_started) = (Some(Activity::Inactive), false),
            Job::Stop => self.stop_after = Some(now + RETRY),
        }
        Some(job == Job::Start)
    }

    pub(super) fn is_active(&self) -> bool {
        (self.unit, self.dep) == (Some(Activity::Active), Some(Activity::Active))
    }

    pub(super) fn is_inactive(&self) -> bool {
        self.unit == Some(Activity::Inactive)
    }

    /// Clears the times that have passed.
    pub(super) fn expire(&mut self, now: I) {
        self.keep_until = self.keep_until.filter(|until| now < *until);
        self.start_after = self.start_after.filter(|at| now < *at);
        self.stop_after = self.stop_after.filter(|at| now < *at);
    }

    /// Returns the next step. The node is online, and has announced its proxies.
    pub(super) fn step(&mut self, wanted: Wanted, now: I) -> Step {
        if self.job.is_some() {
            return Step::None;
        }
        if wanted.waiting > 0 {
            return self.start();
        }
        if wanted.active + wanted.restarted == 0 {
            self.second_look = None;
            return self.unneeded(now);
        }
        let may_start = self.start_after.is_none_or(|at| at <= now);
        match (self.unit, self.dep) {
            (Some(Activity::Inactive), _) if wanted.active > 0 => self.look_again(Step::Stopped, now),
            (Some(Activity::Inactive), _) if may_start => self.start(),
            (Some(Activity::Active), Some(Activity::Inactive)) if may_start => {
                let step = self.look_again(Step::Start, now);
                if step == Step::Start {
                    self.start();
                    // A dep service that does not stay active is not started without a pause.
                    self.start_after = Some(now + RETRY);
                }
                step
            }
            _ => {
                self.second_look = None;
                Step::None
            }
        }
    }

    fn start(&mut self) -> Step {
        (self.job, self.second_look, self.was_started) = (Some(Job::Start), None, true);
        Step::Start
    }

    fn unneeded(&mut self, now: I) -> Step {
        let must_wait = [self.keep_until, self.stop_after].into_iter().flatten().any(|until| now < until);
        match self.dep {
            Some(Activity::Inactive) if !self.was_started => Step::Remove,
            _ if must_wait => Step::None,
            _ => {
                (self.job, self.keep_until) = (Some(Job::Stop), None);
                Step::Stop
            }
        }
    }

    /// Returns `step` once a second look has confirmed the states.
    fn look_again(&mut self, step: Step, now: I) -> Step {
        match self.second_look {
            None => {
                self.second_look = Some(SecondLook::At(now + STOPPED_AFTER));
                Step::None
            }
            Some(SecondLook::At(at)) if at <= now => {
                self.second_look = Some(SecondLook::Asked { unit: false, dep: false });
                Step::Refresh
            }
            Some(SecondLook::Asked { unit: true, dep: true }) => {
                self.second_look = None;
                step
            }
            Some(_) => Step::None,
        }
    }

    /// Returns when the next step may differ without an event.
    pub(super) fn deadline(&self) -> Option<I> {
        let second_look = match self.second_look {
            Some(SecondLook::At(at)) => Some(at),
            _ => None,
        };
        [second_look, self.keep_until, self.start_after, self.stop_after].into_iter().flatten().min()
    }
}
