//! How much work the simulator may be: the seeds of a full run in a minute on two cores, and every call of every story cut
//! off in ten seconds on them. Work is this process's CPU time, over both cores: what else the machine does meanwhile
//! makes a run longer, but not more. A full run is one with all its seeds, which only an optimised build has the time for.

use std::time::{Duration, Instant};

use crate::number;
use crate::planning::{Case, measure, work};

const FULL_RUN: u64 = 10_000;
const CORES: u32 = 2;

pub(crate) const SEEDS: Limit = Limit { what: "10,000 seeds", on_two_cores: Duration::from_secs(60) };
pub(crate) const STORIES: Limit = Limit { what: "every call cut off", on_two_cores: Duration::from_secs(10) };

/// For all machines from a full snapshot, which an optimised build keeps to even with its checks.
const PLANNING: Duration = Duration::from_millis(20);

pub(crate) struct Limit {
    what: &'static str,
    on_two_cores: Duration,
}

impl Limit {
    /// Why this much work is too much, if it is.
    fn exceeded_by(&self, work: Duration) -> Option<String> {
        let most = CORES * self.on_two_cores;
        (work > most).then(|| format!("{} took {work:?} of CPU time, and may take {most:?}", self.what))
    }
}

/// The beginning of what is measured.
pub(crate) struct Stopwatch {
    start: Instant,
    work: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Stopwatch { start: Instant::now(), work: work() }
    }

    pub(crate) fn words(&self) -> String {
        format!("{:.1?}, with {:.1?} of CPU time", self.start.elapsed(), work() - self.work)
    }

    /// Fails if a full run was too much work.
    pub(crate) fn expect_within(&self, limit: &Limit) {
        if is_full_run() {
            assert_eq!(limit.exceeded_by(work() - self.work), None);
        }
    }
}

fn is_full_run() -> bool {
    number("PORTCULLIS_SEEDS").is_some_and(|seeds| seeds >= FULL_RUN)
}

#[test]
fn more_work_than_two_cores_do_in_time_is_too_much() {
    assert_eq!(SEEDS.exceeded_by(Duration::from_secs(120)), None);
    assert!(SEEDS.exceeded_by(Duration::from_millis(120_001)).is_some_and(|why| why.contains("120s")));
    assert!(STORIES.exceeded_by(Duration::from_millis(20_001)).is_some());
    let watch = Stopwatch::start();
    let counted = || work() - watch.work >= Duration::from_millis(5);
    while !counted() && watch.start.elapsed() < Duration::from_secs(10) {}
    assert!(counted(), "what this process does is counted");
}

/// Whatever else the machine does, one of many times is hardly disturbed.
#[test]
fn alone_planning_keeps_to_its_goal() {
    for case in [Case::NothingOpen, Case::Converged] {
        let times = if is_full_run() { 25 } else { 1 };
        let best = (0..times).map(|_| measure(case).all).min().expect("a time");
        println!("{case:?}: {best:?}");
        assert!(best < PLANNING || !is_full_run(), "{case:?}: {best:?}");
    }
}
