//! Retries of a compare-and-swap after a conflict: a limited number, with growing random pauses.

use super::error::Error;
use super::paths::NodePath;
use super::tree;
use crate::runtime::backoff::doubling;
use std::time::Duration;

/// About four seconds with the pauses below, far longer than contention that ends by itself.
const MAX_ATTEMPTS: u32 = 60;
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// The attempts of one operation at one compare-and-swap.
#[derive(Debug)]
pub(super) struct CasRetry {
    path: NodePath,
    made: u32,
    /// An attempt ended without an answer, so a change found later may be this operation's own.
    pub(super) unsure: bool,
}

impl CasRetry {
    pub(super) fn at(path: NodePath) -> Self {
        Self { path, made: 0, unsure: false }
    }

    /// Pauses after a failed write that is worth another attempt; returns any other failure.
    pub(super) async fn after(&mut self, failure: tree::Error) -> Result<(), Error> {
        if !failure.is_conflict() && !failure.is_ambiguous() {
            return Err(failure.into());
        }
        self.unsure |= failure.is_ambiguous();
        self.made += 1;
        if self.made >= MAX_ATTEMPTS && failure.is_ambiguous() {
            return Err(failure.into());
        }
        if self.made >= MAX_ATTEMPTS {
            return Err(Error::Contended { path: self.path.clone(), attempts: self.made });
        }
        tokio::time::sleep(pause(self.made, random_u64()?)).await;
        Ok(())
    }

    /// Runs all attempts of `work`. After a lost answer, an unreachable store is reported as an
    /// ambiguous result, since the operation may have been applied.
    pub(super) async fn run<R>(
        mut self,
        work: impl AsyncFnOnce(&mut Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        match work(&mut self).await {
            Err(Error::Tree(tree::Error::Unreachable { hosts } | tree::Error::Timeout { hosts, .. }))
                if self.unsure =>
            {
                Err(tree::Error::Ambiguous { hosts }.into())
            }
            done => done,
        }
    }
}

/// A random duration below a ceiling that doubles with each attempt.
fn pause(attempt: u32, random: u64) -> Duration {
    let ceiling = doubling(Duration::from_millis(1), attempt, MAX_PAUSE);
    Duration::from_micros(random % ceiling.as_micros() as u64)
}

fn random_u64() -> Result<u64, Error> {
    getrandom::u64().map_err(Error::Random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::paths;

    #[test]
    fn pauses_stay_below_their_ceiling() {
        for attempt in 0..MAX_ATTEMPTS {
            for random in [0, 1, u64::MAX / 2, u64::MAX] {
                assert!(pause(attempt, random) < MAX_PAUSE);
            }
        }
        assert!(pause(1, u64::MAX) < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn conflicts_are_retried_a_limited_number_of_times() {
        let mut retry = CasRetry::at(paths::units());
        let mut tries = 0;
        let end = loop {
            if let Err(e) = retry.after(tree::Error::BadVersion(paths::units())).await {
                break e;
            }
            tries += 1;
        };
        assert_eq!(end.to_string(), "/units: still contended after 60 attempts");
        assert_eq!(tries, MAX_ATTEMPTS - 1);
        assert!(!retry.unsure);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_is_remembered_and_a_refusal_is_returned() {
        let mut retry = CasRetry::at(paths::units());
        retry.after(tree::Error::Ambiguous { hosts: "a:1".to_owned() }).await.unwrap();
        assert!(retry.unsure);
        let refusal = retry.after(tree::Error::NoAuth(paths::units())).await.unwrap_err();
        assert!(matches!(refusal, Error::Tree(tree::Error::NoAuth(_))), "{refusal}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_store_after_a_lost_answer_is_ambiguous() {
        let ended = async |lost: bool, failure: tree::Error| {
            let work = async |retry: &mut CasRetry| {
                if lost {
                    retry.after(tree::Error::Ambiguous { hosts: "a:1".to_owned() }).await?;
                }
                Err::<(), _>(failure.into())
            };
            CasRetry::at(paths::units()).run(work).await.unwrap_err()
        };
        let unreachable = || tree::Error::Unreachable { hosts: "a:1".to_owned() };
        assert_eq!(ended(false, unreachable()).await.to_string(), unreachable().to_string());
        for failure in [unreachable(), tree::Error::Timeout { hosts: "a:1".to_owned(), seconds: 3 }] {
            let error = ended(true, failure).await;
            assert!(matches!(error, Error::Tree(tree::Error::Ambiguous { .. })), "{error}");
        }
        let refusal = ended(true, tree::Error::NoAuth(paths::units())).await;
        assert!(matches!(refusal, Error::Tree(tree::Error::NoAuth(_))), "{refusal}");
    }
}
