//! When to try a machine again. Pure: takes the time, and its jitter from a number that the caller draws.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::MachineId;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);

/// How soon a failure is worth another try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// At once, with fresh eyes; after that with pauses that grow.
    ReadAgain,
    BackOff,
    /// Nothing that we do helps: at the pace of the longest pause.
    Slow,
}

#[derive(Debug, Clone, Copy)]
struct Try<I> {
    at: I,
    failures: u32,
}

/// The machines that failed, each with its own pause. `I` is a point in time.
#[derive(Debug)]
pub struct Retries<I> {
    machines: BTreeMap<MachineId, Try<I>>,
}

impl<I> Default for Retries<I> {
    fn default() -> Self {
        Retries { machines: BTreeMap::new() }
    }
}

impl<I: Copy + Ord + std::ops::Add<Duration, Output = I>> Retries<I> {
    pub fn succeeded(&mut self, machine: MachineId) {
        self.machines.remove(&machine);
    }

    pub fn forget_all_but(&mut self, keep: impl Fn(MachineId) -> bool) {
        self.machines.retain(|machine, _| keep(*machine));
    }

    /// `random` spreads the tries of many machines over the pause.
    pub fn failed(&mut self, machine: MachineId, pace: Pace, now: I, random: u64) {
        let failures = self.machines.get(&machine).map_or(0, |last| last.failures);
        let pause = match pace {
            Pace::ReadAgain if failures == 0 => Duration::ZERO,
            Pace::Slow => LONGEST,
            _ => FIRST.saturating_mul(1 << failures.min(16)).min(LONGEST),
        };
        // Between half of the pause and all of it.
        let spread = pause.as_millis() as u64 / 2;
        let pause = Duration::from_millis(spread + if spread == 0 { 0 } else { random % (spread + 1) });
        self.machines.insert(machine, Try { at: now + pause, failures: failures.saturating_add(1) });
    }

    pub fn next(&self) -> Option<I> {
        self.machines.values().map(|retry| retry.at).min()
    }

    /// The machines whose time has come.
    pub fn due(&self, now: I) -> impl Iterator<Item = MachineId> {
        self.machines.iter().filter(move |(_, retry)| retry.at <= now).map(|(machine, _)| *machine)
    }

    pub fn waiting(&self, machine: MachineId, now: I) -> bool {
        self.machines.get(&machine).is_some_and(|retry| retry.at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn pauses_grow_to_a_limit_and_a_success_ends_them() {
        let (mut retries, start, machine) = (Retries::default(), Instant::now(), MachineId::new(1));
        let mut pauses = Vec::new();
        for _ in 0..10 {
            retries.failed(machine, Pace::BackOff, start, u64::MAX);
            pauses.push(retries.next().unwrap() - start);
        }
        assert!(pauses[0] <= FIRST && pauses[0] >= FIRST / 2);
        assert!(pauses.windows(2).all(|two| two[0] <= LONGEST && two[1] >= two[0] / 2));
        assert!(pauses[9] >= LONGEST / 2);
        assert!(retries.waiting(machine, start));
        retries.succeeded(machine);
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn a_stale_view_is_looked_at_again_at_once_but_only_once() {
        let (mut retries, start, machine) = (Retries::default(), Instant::now(), MachineId::new(1));
        retries.failed(machine, Pace::ReadAgain, start, 0);
        assert_eq!(retries.due(start).collect::<Vec<_>>(), [machine]);
        retries.failed(machine, Pace::ReadAgain, start, 0);
        assert_eq!(retries.due(start).count(), 0);
    }
}
