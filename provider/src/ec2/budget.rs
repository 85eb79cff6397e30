//! How many calls EC2 will take, so that we ask no more of it. Pure: takes `now`, knows no clock and does not wait.
//!
//! EC2 has a bucket of tokens for each kind of call. We keep our own picture of them, shared by all who call. Kinds
//! have buckets of their own, so opening ports can never use up what closing them needs. When EC2 throttles all the
//! same (others share the account), the picture was too good: that bucket is taken for empty and refills more slowly,
//! until successes bring its pace back. The others go on as they were: closing is not slowed by what opening meets.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A bucket's size, and how many tokens a second come back.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rate {
    burst: f64,
    refill: f64,
}

/// The published sizes for an account and region. Reads here are always filtered or paged.
fn rate(action: &str) -> Rate {
    let (burst, refill) = match action {
        "RunInstances" => (5.0, 2.0),
        "CreateTags" | "DeleteTags" => (100.0, 10.0),
        "TerminateInstances" => (100.0, 5.0),
        read if read.starts_with("Describe") => (100.0, 20.0),
        _ => (50.0, 5.0),
    };
    Rate { burst, refill }
}

/// The pace never falls below this share of the published refill.
const SLOWEST: f64 = 1.0 / 16.0;
/// How much of the full pace one success gives back.
const RECOVERY: f64 = 1.0 / 20.0;

#[derive(Debug)]
pub(super) struct Budget {
    buckets: BTreeMap<String, Bucket>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    rate: Rate,
    tokens: f64,
    /// From [`SLOWEST`] to 1: the share of the refill that is counted on.
    pace: f64,
    at: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * self.rate.refill * self.pace).min(self.rate.burst);
        self.at = self.at.max(now);
    }
}

impl Budget {
    pub(super) fn new() -> Self {
        Self { buckets: BTreeMap::new() }
    }

    /// Takes a token, or says how long it takes until there is one.
    pub(super) fn take(&mut self, action: &str, now: Instant) -> Result<(), Duration> {
        let bucket = self.bucket(action, now);
        bucket.refill(now);
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - bucket.tokens) / (bucket.rate.refill * bucket.pace);
        Err(Duration::from_secs_f64(wait))
    }

    pub(super) fn throttled(&mut self, action: &str, now: Instant) {
        let bucket = self.bucket(action, now);
        bucket.refill(now);
        bucket.pace = (bucket.pace / 2.0).max(SLOWEST);
        bucket.tokens = 0.0;
    }

    pub(super) fn succeeded(&mut self, action: &str, now: Instant) {
        let bucket = self.bucket(action, now);
        bucket.refill(now);
        bucket.pace = (bucket.pace + RECOVERY).min(1.0);
    }

    /// The share of EC2's published pace that is used now, where it is lowest.
    pub(super) fn pace(&self) -> f64 {
        self.buckets.values().map(|bucket| bucket.pace).fold(1.0, f64::min)
    }

    fn bucket(&mut self, action: &str, now: Instant) -> &mut Bucket {
        let full = || {
            let rate = rate(action);
            Bucket { rate, tokens: rate.burst, pace: 1.0, at: now }
        };
        self.buckets.entry(action.to_owned()).or_insert_with(full)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OPEN: &str = "AuthorizeSecurityGroupIngress";
    const CLOSE: &str = "RevokeSecurityGroupIngress";

    fn drain(budget: &mut Budget, action: &str, now: Instant) -> usize {
        (0..1000).take_while(|_| budget.take(action, now).is_ok()).count()
    }

    #[test]
    fn the_published_sizes() {
        for (action, burst, a_second) in [
            (OPEN, 50, 5),
            (CLOSE, 50, 5),
            ("CreateSecurityGroup", 50, 5),
            ("DeleteSecurityGroup", 50, 5),
            ("DescribeSecurityGroups", 100, 20),
            ("CreateTags", 100, 10),
            ("RunInstances", 5, 2),
        ] {
            let (mut budget, start) = (Budget::new(), Instant::now());
            assert_eq!(drain(&mut budget, action, start), burst, "{action}");
            assert_eq!(drain(&mut budget, action, start + Duration::from_secs(1)), a_second, "{action}");
            assert_eq!(drain(&mut budget, action, start + Duration::from_secs(3600)), burst, "{action}");
        }
    }

    #[test]
    fn says_how_long_to_wait() {
        let (mut budget, start) = (Budget::new(), Instant::now());
        drain(&mut budget, OPEN, start);
        assert_eq!(budget.take(OPEN, start), Err(Duration::from_millis(200)));
        assert_eq!(budget.take(OPEN, start + Duration::from_millis(200)), Ok(()));
    }

    #[test]
    fn opening_never_uses_up_what_closing_needs() {
        let (mut budget, start) = (Budget::new(), Instant::now());
        drain(&mut budget, OPEN, start);
        for _ in 0..100 {
            budget.throttled(OPEN, start);
        }
        assert_eq!(drain(&mut budget, CLOSE, start), 50);
        assert_eq!(budget.take(CLOSE, start), Err(Duration::from_millis(200)), "nor slows it down");
    }

    #[test]
    fn throttling_slows_and_success_recovers() {
        let (mut budget, start) = (Budget::new(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..6 {
            budget.throttled(OPEN, start);
            waits.push(budget.take(OPEN, start).unwrap_err().as_millis());
        }
        assert_eq!(waits, [400, 800, 1600, 3200, 3200, 3200]);
        for _ in 0..19 {
            budget.succeeded(OPEN, start);
        }
        assert!((budget.pace() - 1.0).abs() < 0.1);
        assert!(budget.take(OPEN, start).unwrap_err().as_millis() <= 210);
    }

    proptest! {
        /// Whatever happens, in any span there are at most burst + refill * time calls, and a clock that goes back is
        /// no gift.
        #[test]
        fn never_more_than_was_published(steps in prop::collection::vec((0u64..2000, any::<bool>()), 1..200)) {
            let (mut budget, start) = (Budget::new(), Instant::now() + Duration::from_secs(10_000));
            let (mut now, mut taken) = (start, 0.0);
            for (ms, back) in steps {
                let step = Duration::from_millis(ms);
                let asked_at = if back { now.checked_sub(step).unwrap_or(now) } else { now += step; now };
                if budget.take(OPEN, asked_at).is_ok() {
                    taken += 1.0;
                }
                let limit = 50.0 + 5.0 * now.duration_since(start).as_secs_f64();
                prop_assert!(taken <= limit + 1e-6);
            }
        }

        #[test]
        fn waiting_as_told_is_enough(throttles in 0usize..10, takes in 0usize..60) {
            let (mut budget, start) = (Budget::new(), Instant::now());
            for _ in 0..takes {
                let _waits = budget.take(OPEN, start).is_err();
            }
            for _ in 0..throttles {
                budget.throttled(OPEN, start);
            }
            if let Err(wait) = budget.take(OPEN, start) {
                prop_assert!(budget.take(OPEN, start + wait + Duration::from_millis(1)).is_ok());
            }
        }
    }
}
