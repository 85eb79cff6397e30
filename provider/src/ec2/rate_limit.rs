//! Delays calls to the rate that the token buckets allow, and counts all requests.

mod token_buckets;

use crate::error::{Error, Subject};
use aws_sdk_ec2::config::interceptors::BeforeTransmitInterceptorContextRef;
use aws_sdk_ec2::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_ec2::error::BoxError;
use aws_smithy_runtime_api::client::orchestrator::Metadata;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use token_buckets::TokenBuckets;
use tokio::time::Instant;

/// A call that would wait longer than this for a token fails as throttled.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(super) struct RateLimiter {
    shared: Arc<Mutex<Shared>>,
    jitter: RandomState,
}

#[derive(Debug)]
struct Shared {
    buckets: TokenBuckets,
    requests: BTreeMap<String, u64>,
}

impl RateLimiter {
    pub(super) fn new() -> Self {
        let shared = Shared { buckets: TokenBuckets::new(), requests: BTreeMap::new() };
        Self { shared: Arc::new(Mutex::new(shared)), jitter: RandomState::new() }
    }

    /// Waits for a token. Fails with [`Error::NotBegun`] if there is none before `until`.
    pub(super) async fn admit(
        &self,
        action: &str,
        what: &Subject,
        until: Option<Instant>,
    ) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return Err(Error::NotBegun { what: what.clone() });
            }
            let Err(wait) = self.lock().buckets.take(action, now.into_std()) else { return Ok(()) };
            let ready = now + self.spread(wait);
            if ready > start + WAIT_MAX {
                return Err(Error::Throttled { what: what.clone() });
            }
            // Waits until `until` even if it is known to be too early, because the caller would
            // retry at once.
            tokio::time::sleep_until(until.map_or(ready, |until| ready.min(until))).await;
        }
    }

    pub(super) fn succeeded(&self, action: &str) {
        self.lock().buckets.succeeded(action, Instant::now().into_std());
    }

    pub(super) fn throttled(&self, action: &str) {
        self.lock().buckets.throttled(action, Instant::now().into_std());
    }

    pub(super) fn requests(&self) -> BTreeMap<String, u64> {
        self.lock().requests.clone()
    }

    pub(super) fn pace(&self) -> f64 {
        self.lock().buckets.pace()
    }

    /// Adds up to a quarter of jitter, so that concurrent waiters do not retry together.
    pub(super) fn spread(&self, wait: Duration) -> Duration {
        let draw = self.jitter.hash_one(Instant::now()) % 256;
        wait + wait.mul_f64(draw as f64 / 1024.0)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Intercept for RateLimiter {
    fn name(&self) -> &'static str {
        "RateLimiter"
    }

    fn read_before_transmit(
        &self,
        _context: &BeforeTransmitInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let Some(action) = config.load::<Metadata>().map(Metadata::name) else { return Ok(()) };
        *self.lock().requests.entry(action.to_owned()).or_default() += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_wait_for_tokens_up_to_the_limit() {
        let rate_limiter = RateLimiter::new();
        let start = Instant::now();
        for _ in 0..60 {
            rate_limiter.admit("RunInstances", &Subject::Provider, None).await.unwrap();
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(27_500) && took < Duration::from_secs(36), "{took:?}");
        for _ in 0..100 {
            rate_limiter.throttled("RunInstances");
        }
        let waiters = (0..10).map(|_| {
            let rate_limiter = rate_limiter.clone();
            tokio::spawn(async move { rate_limiter.admit("RunInstances", &Subject::Provider, None).await })
        });
        let mut refused = 0;
        for waiter in waiters.collect::<Vec<_>>() {
            if let Err(error) = waiter.await.unwrap() {
                assert_eq!(error.kind(), "throttled");
                refused += 1;
            }
        }
        assert!(refused > 0, "one token each 8 s is not enough for ten in 30 s");
    }

    #[tokio::test(start_paused = true)]
    async fn no_call_begins_after_its_deadline() {
        let rate_limiter = RateLimiter::new();
        let what = Subject::Provider;
        let late = rate_limiter.admit("AuthorizeSecurityGroupIngress", &what, Some(Instant::now())).await;
        assert_eq!(late, Err(Error::NotBegun { what: what.clone() }), "although there are tokens");
        let start = Instant::now();
        let until = start + Duration::from_secs(3);
        let mut begun = 0;
        while rate_limiter.admit("AuthorizeSecurityGroupIngress", &what, Some(until)).await.is_ok() {
            begun += 1;
            assert!(Instant::now() < until);
        }
        assert!((50..=65).contains(&begun), "{begun}");
        assert_eq!(start.elapsed(), Duration::from_secs(3), "callers wait until the deadline");
        assert!(
            rate_limiter.admit("RevokeSecurityGroupIngress", &what, Some(until + WAIT_MAX)).await.is_ok()
        );
    }
}
