//! A model of EC2's token buckets. The time is an argument; waiting belongs in `rate_limit`.
//!
//! EC2 has a token bucket for each action, and this model mirrors them for all callers. Each action
//! has its own bucket, so that opening ports never delays closing them. If EC2 throttles a call
//! although the model has tokens (other programs share the account), the bucket is emptied and
//! refills more slowly, until successful calls restore its rate. Other buckets are not affected.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Size of a bucket, and its refill in tokens per second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rate {
    burst: f64,
    refill: f64,
}

/// Returns the published limits for an account and region. Reads are always filtered or paged.
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

/// The lower bound of a bucket's rate fraction.
const SLOWEST: f64 = 1.0 / 16.0;
/// The increase of the rate fraction after a successful call.
const RECOVERY: f64 = 1.0 / 20.0;

/// The resolution of timers. A bucket that lacks the last fraction of a token because of rounding
/// would otherwise be asked again without a pause.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct TokenBuckets {
    buckets: BTreeMap<String, Bucket>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    rate: Rate,
    tokens: f64,
    /// Fraction of the published refill that is used, from [`SLOWEST`] to 1.
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

impl TokenBuckets {
    pub(super) fn new() -> Self {
        Self { buckets: BTreeMap::new() }
    }

    /// Takes a token, or returns the time until there is one, at least [`SHORTEST_WAIT`].
    pub(super) fn take(&mut self, action: &str, now: Instant) -> Result<(), Duration> {
        let bucket = self.bucket(action, now);
        bucket.refill(now);
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let wait = (1.0 - bucket.tokens) / (bucket.rate.refill * bucket.pace);
        Err(Duration::from_secs_f64(wait).max(SHORTEST_WAIT))
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

    /// Returns the lowest rate fraction of all buckets.
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

    fn drain(buckets: &mut TokenBuckets, action: &str, now: Instant) -> usize {
        (0..1000).take_while(|_| buckets.take(action, now).is_ok()).count()
    }

    #[test]
    fn a_wait_is_never_zero() {
        let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
        drain(&mut buckets, "RunInstances", start);
        buckets.bucket("RunInstances", start).tokens = 1.0 - f64::EPSILON;
        let wait = buckets.take("RunInstances", start).unwrap_err();
        assert_eq!(wait, SHORTEST_WAIT);
        assert_eq!(buckets.take("RunInstances", start + wait), Ok(()));
    }

    #[test]
    fn published_limits_are_used() {
        for (action, burst, a_second) in [
            (OPEN, 50, 5),
            (CLOSE, 50, 5),
            ("CreateSecurityGroup", 50, 5),
            ("DeleteSecurityGroup", 50, 5),
            ("DescribeSecurityGroups", 100, 20),
            ("CreateTags", 100, 10),
            ("RunInstances", 5, 2),
        ] {
            let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
            assert_eq!(drain(&mut buckets, action, start), burst, "{action}");
            assert_eq!(drain(&mut buckets, action, start + Duration::from_secs(1)), a_second, "{action}");
            assert_eq!(drain(&mut buckets, action, start + Duration::from_secs(3600)), burst, "{action}");
        }
    }

    #[test]
    fn empty_bucket_returns_the_waiting_time() {
        let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
        drain(&mut buckets, OPEN, start);
        assert_eq!(buckets.take(OPEN, start), Err(Duration::from_millis(200)));
        assert_eq!(buckets.take(OPEN, start + Duration::from_millis(200)), Ok(()));
    }

    #[test]
    fn throttled_opens_do_not_affect_closes() {
        let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
        drain(&mut buckets, OPEN, start);
        for _ in 0..100 {
            buckets.throttled(OPEN, start);
        }
        assert_eq!(drain(&mut buckets, CLOSE, start), 50);
        assert_eq!(buckets.take(CLOSE, start), Err(Duration::from_millis(200)), "closes are slower");
    }

    #[test]
    fn throttling_slows_and_success_recovers() {
        let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..6 {
            buckets.throttled(OPEN, start);
            waits.push(buckets.take(OPEN, start).unwrap_err().as_millis());
        }
        assert_eq!(waits, [400, 800, 1600, 3200, 3200, 3200]);
        for _ in 0..19 {
            buckets.succeeded(OPEN, start);
        }
        assert!((buckets.pace() - 1.0).abs() < 0.1);
        assert!(buckets.take(OPEN, start).unwrap_err().as_millis() <= 210);
    }

    proptest! {
        /// In any period there are at most burst + refill * time calls, even if the clock goes
        /// back.
        #[test]
        fn calls_never_exceed_the_published_rate(
            steps in prop::collection::vec((0u64..2000, any::<bool>()), 1..200)
        ) {
            let (mut buckets, start) = (TokenBuckets::new(), Instant::now() + Duration::from_secs(10_000));
            let (mut now, mut taken) = (start, 0.0);
            for (ms, back) in steps {
                let step = Duration::from_millis(ms);
                let asked_at = if back { now.checked_sub(step).unwrap_or(now) } else { now += step; now };
                if buckets.take(OPEN, asked_at).is_ok() {
                    taken += 1.0;
                }
                let limit = 50.0 + 5.0 * now.duration_since(start).as_secs_f64();
                prop_assert!(taken <= limit + 1e-6);
            }
        }

        #[test]
        fn token_is_available_after_the_returned_time(throttles in 0usize..10, takes in 0usize..60) {
            let (mut buckets, start) = (TokenBuckets::new(), Instant::now());
            for _ in 0..takes {
                let _waits = buckets.take(OPEN, start).is_err();
            }
            for _ in 0..throttles {
                buckets.throttled(OPEN, start);
            }
            if let Err(wait) = buckets.take(OPEN, start) {
                prop_assert!(buckets.take(OPEN, start + wait + Duration::from_millis(1)).is_ok());
            }
        }
    }
}
