//! Counts every request that goes out, also those that the SDK repeats by itself, and holds calls back to the budget.

use super::budget::Budget;
use crate::error::{Error, Subject};
use aws_sdk_ec2::config::interceptors::{
    BeforeTransmitInterceptorContextRef, FinalizerInterceptorContextRef,
};
use aws_sdk_ec2::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_ec2::error::BoxError;
use aws_smithy_runtime_api::client::orchestrator::Metadata;
use aws_smithy_runtime_api::client::retries::RequestAttempts;
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

    /// Waits for the budget.
    pub(super) async fn admit(&self, action: &str, what: &Subject) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            let Err(wait) = self.lock().budget.take(action, now.into_std()) else { return Ok(()) };
            let wait = wait + self.jitter_of(wait);
            if now + wait > start + WAIT_MAX {
                return Err(Error::Throttled { what: what.clone() });
            }
            tokio::time::sleep(wait).await;
        }
    }

    pub(super) fn succeeded(&self) {
        self.lock().budget.succeeded();
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
    fn jitter_of(&self, wait: Duration) -> Duration {
        let draw = self.jitter.hash_one(Instant::now()) % 256;
        wait.mul_f64(draw as f64 / 1024.0)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether EC2 says with its status alone that it is asked too much.
pub(super) fn is_busy(status: u16) -> bool {
    matches!(status, 429 | 503)
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
        let again = config.load::<RequestAttempts>().is_some_and(|made| made.attempts() > 1);
        let mut shared = self.lock();
        *shared.requests.entry(action.to_owned()).or_default() += 1;
        if again {
            shared.budget.charge(action, Instant::now().into_std());
        }
        Ok(())
    }

    fn read_after_attempt(
        &self,
        context: &FinalizerInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let busy = context.response().is_some_and(|response| is_busy(response.status().as_u16()));
        if let Some(action) = config.load::<Metadata>().map(Metadata::name).filter(|_| busy) {
            self.throttled(action);
        }
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
            meter.admit("RunInstances", &Subject::Provider).await.unwrap();
        }
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(27_500) && took < Duration::from_secs(36), "{took:?}");
        for _ in 0..100 {
            meter.throttled("RunInstances");
        }
        let waiters = (0..10).map(|_| {
            let meter = meter.clone();
            tokio::spawn(async move { meter.admit("RunInstances", &Subject::Provider).await })
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
}
