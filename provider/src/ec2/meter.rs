//! Counts every request that goes out, and holds calls back to the budget.

use super::budget::Budget;
use crate::error::{Error, Subject};
use aws_sdk_ec2::config::interceptors::BeforeTransmitInterceptorContextRef;
use aws_sdk_ec2::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_ec2::error::BoxError;
use aws_smithy_runtime_api::client::orchestrator::Metadata;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Who waits longer than this for a token is told that calls are throttled.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(super) struct Meter {
    shared: Arc<Mutex<Shared>>,
    jitter: RandomState,
}

#[derive(Debug)]
struct Shared {
    budget: Budget,
    requests: BTreeMap<String, u64>,
}

impl Meter {
    pub(super) fn new() -> Self {
        let shared = Shared { budget: Budget::new(), requests: BTreeMap::new() };
        Self { shared: Arc::new(Mutex::new(shared)), jitter: RandomState::new() }
    }

    /// Waits for the budget, but never until `until`: what may not be begun then is not begun.
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
            let Err(wait) = self.lock().budget.take(action, now.into_std()) else { return Ok(()) };
            let ready = now + self.spread(wait);
            if ready > start + WAIT_MAX {
                return Err(Error::Throttled { what: what.clone() });
            }
            // Not before the end, though it is known to be too early: whoever is sent away comes back at once.
            tokio::time::sleep_until(until.map_or(ready, |until| ready.min(until))).await;
        }
    }

    pub(super) fn succeeded(&self, action: &str) {
        self.lock().budget.succeeded(action, Instant::now().into_std());
    }

    pub(super) fn throttled(&self, action: &str) {
        self.lock().budget.throttled(action, Instant::now().into_std());
    }

    pub(super) fn requests(&self) -> BTreeMap<String, u64> {
        self.lock().requests.clone()
    }

    pub(super) fn pace(&self) -> f64 {
        self.lock().budget.pace()
    }

    /// Up to a quarter more, so that those who wait together do not come back together.
    pub(super) fn spread(&self, wait: Duration) -> Duration {
        let draw = self.jitter.hash_one(Instant::now()) % 256;
        wait + wait.mul_f64(draw as f64 / 1024.0)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Intercept for Meter {
    fn name(&self) -> &'static str {
        "Meter"
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
    async fn waits_for_the_budget_and_no_longer_than_its_limit() {
        let meter = Meter::new();
        let start = Instant::now();
        for _ in 0..60 {
            meter.admit("RunInstances", &Subject::Provider, None).await.unwrap();
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(27_500) && took < Duration::from_secs(36), "{took:?}");
        for _ in 0..100 {
            meter.throttled("RunInstances");
        }
        let waiters = (0..10).map(|_| {
            let meter = meter.clone();
            tokio::spawn(async move { meter.admit("RunInstances", &Subject::Provider, None).await })
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
    async fn nothing_is_begun_when_the_time_is_up() {
        let meter = Meter::new();
        let what = Subject::Provider;
        let late = meter.admit("AuthorizeSecurityGroupIngress", &what, Some(Instant::now())).await;
        assert_eq!(late, Err(Error::NotBegun { what: what.clone() }), "though there are tokens");
        let start = Instant::now();
        let until = start + Duration::from_secs(3);
        let mut begun = 0;
        while meter.admit("AuthorizeSecurityGroupIngress", &what, Some(until)).await.is_ok() {
            begun += 1;
            assert!(Instant::now() < until);
        }
        assert!((50..=65).contains(&begun), "{begun}");
        assert_eq!(
            start.elapsed(),
            Duration::from_secs(3),
            "and nobody is sent away early, only to come back"
        );
        assert!(meter.admit("RevokeSecurityGroupIngress", &what, Some(until + WAIT_MAX)).await.is_ok());
    }
}
