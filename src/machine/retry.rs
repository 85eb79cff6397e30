//! The schedule of retries. Pure. The time and the random number for the jitter are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use portcullis_provider::{Error, Retry as RetryClass};

use crate::mutant;
use crate::runtime::backoff::doubling;
use crate::runtime::clock::Moment;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);
/// The largest jitter that is added to the longest pause.
const SPREAD_MS: u64 = 15_000;

/// How soon a failure is retried, from the fastest to the slowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pace {
    /// Once immediately, after reading again; then as [`Self::BackOff`].
    ReadAgain,
    BackOff,
    /// Retries alone cannot help, so each waits for the longest pause.
    Slow,
}

impl Pace {
    pub fn after(error: &Error) -> Self {
        match error.retry() {
            // A missing reply usually means that the provider is overloaded.
            RetryClass::ReadAgain if error.may_have_been_applied() => Self::BackOff,
            RetryClass::ReadAgain => Self::ReadAgain,
            RetryClass::AfterBackOff => Self::BackOff,
            RetryClass::OperatorMustAct | RetryClass::Never => Self::Slow,
        }
    }
}

/// The next attempt of a failed task. `I` is a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry<I> {
    at: I,
    failures: u32,
}

impl<I: Moment> Retry<I> {
    /// Returns the retry after another failure; `previous` is the retry that failed. `random`
    /// spreads concurrent retries over the pause.
    pub fn after(previous: Option<Self>, pace: Pace, now: I, random: u64) -> Option<Self> {
        let failures = previous.map_or(0, |previous| previous.failures);
        let pause = match pace {
            Pace::ReadAgain if failures == 0 => Duration::ZERO,
            _ if mutant!(RetriesWithoutPause) => Duration::ZERO,
            Pace::Slow if mutant!(RetryPauseOfAnHour) => 60 * LONGEST,
            Pace::Slow => LONGEST + Duration::from_millis(random % SPREAD_MS),
            _ => doubling(FIRST, failures, LONGEST),
        };
        // Jitter: between half of the pause and all of it.
        let spread = pause.as_millis() as u64 / 2;
        let pause = match pace {
            Pace::Slow => pause,
            _ => Duration::from_millis(spread + if spread == 0 { 0 } else { random % (spread + 1) }),
        };
        if mutant!(FailuresNotRetried) {
            return previous;
        }
        Some(Self { at: now + pause, failures: failures.saturating_add(1) })
    }

    /// Returns the time of the attempt.
    pub fn at(&self) -> I {
        self.at
    }
}

/// Failed tasks, each with its own pause. `I` is a point in time.
#[derive(Debug)]
pub struct Retries<I, K> {
    tries: BTreeMap<K, Retry<I>>,
}

impl<I, K> Default for Retries<I, K> {
    fn default() -> Self {
        Retries { tries: BTreeMap::new() }
    }
}

impl<I: Moment, K: Copy + Ord> Retries<I, K> {
    pub fn succeeded(&mut self, key: K) {
        self.tries.remove(&key);
    }

    pub fn forget_all_but(&mut self, keep: impl Fn(K) -> bool) {
        self.tries.retain(|key, _| keep(*key));
    }

    /// Schedules a retry. `random` spreads concurrent retries over the pause.
    pub fn failed(&mut self, key: K, pace: Pace, now: I, random: u64) {
        if let Some(retry) = Retry::after(self.tries.get(&key).copied(), pace, now, random) {
            self.tries.insert(key, retry);
        }
    }

    /// Moves the retry of a failed task to `until` if it is earlier. This counts as no failure.
    pub fn postpone(&mut self, key: K, until: I) {
        if let Some(retry) = self.tries.get_mut(&key) {
            retry.at = retry.at.max(until);
        }
    }

    pub fn next(&self) -> Option<I> {
        self.tries.values().map(|retry| retry.at).min()
    }

    /// Returns the time of the task's retry; `None` if it has not failed.
    pub fn at(&self, key: K) -> Option<I> {
        self.tries.get(&key).map(|retry| retry.at)
    }

    pub fn waiting(&self, key: K, now: I) -> bool {
        self.tries.get(&key).is_some_and(|retry| retry.at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const TASK: u32 = 1;

    #[test]
    fn pauses_grow_to_a_limit_and_a_success_ends_them() {
        let (mut retries, start) = (Retries::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..10 {
            retries.failed(TASK, Pace::BackOff, start, u64::MAX);
            pauses.push(retries.next().unwrap() - start);
        }
        assert!(pauses[0] <= FIRST && pauses[0] >= FIRST / 2);
        assert!(pauses.windows(2).all(|two| two[0] <= LONGEST && two[1] >= two[0] / 2));
        assert!(pauses[9] >= LONGEST / 2);
        assert!(retries.waiting(TASK, start));
        retries.succeeded(TASK);
        assert_eq!(retries.next(), None);
    }

    #[test]
    fn a_postponed_retry_keeps_its_failures() {
        let (mut retries, start) = (Retries::default(), Instant::now());
        retries.postpone(TASK, start + LONGEST);
        assert_eq!(retries.at(TASK), None, "the task has not failed");
        retries.failed(TASK, Pace::BackOff, start, 0);
        let at = retries.at(TASK).unwrap();
        retries.postpone(TASK, start);
        assert_eq!(retries.at(TASK), Some(at), "a later retry keeps its time");
        let until = start + LONGEST;
        retries.postpone(TASK, until);
        assert_eq!(retries.at(TASK), Some(until));
        retries.failed(TASK, Pace::BackOff, until, 0);
        assert_eq!(retries.at(TASK), Some(until + FIRST), "half of the second pause");
    }

    #[test]
    fn retries_that_need_an_operator_are_a_minute_apart() {
        let (mut retry, start) = (None, Instant::now());
        for random in [0, 7, u64::MAX] {
            retry = Retry::after(retry, Pace::Slow, start, random);
            let pause = retry.unwrap().at() - start;
            assert!((60..=75).contains(&pause.as_secs()), "{pause:?}");
        }
    }

    #[test]
    fn a_provider_that_does_not_reply_is_retried_after_a_pause() {
        let what = portcullis_provider::Subject::Provider;
        let silent = Error::Ambiguous { what: what.clone(), reason: "504".into() };
        assert_eq!(Pace::after(&silent), Pace::BackOff);
        assert_eq!(Pace::after(&Error::Conflict { what: what.clone() }), Pace::ReadAgain);
        assert_eq!(Pace::after(&Error::Denied { what, reason: "no".into() }), Pace::Slow);
        assert_eq!(Pace::ReadAgain.max(Pace::Slow).max(Pace::BackOff), Pace::Slow);
    }

    #[test]
    fn an_outdated_read_is_repeated_at_once_but_only_once() {
        let start = Instant::now();
        let first = Retry::after(None, Pace::ReadAgain, start, 0);
        assert_eq!(first.unwrap().at(), start);
        let second = Retry::after(first, Pace::ReadAgain, start, 0);
        assert!(second.unwrap().at() > start);
    }
}
