//! Trying again after someone else was faster: a bounded number of times, with pauses that grow and differ.

use super::error::Error;
use super::paths::NodePath;
use super::tree;
use std::time::Duration;

/// With the pauses below about four seconds, which is long past any contention that ends by itself.
const MAX_ATTEMPTS: u32 = 60;
const MAX_PAUSE_MS: u64 = 100;

/// The attempts of one operation at one compare-and-swap.
#[derive(Debug)]
pub(super) struct Attempts {
    path: NodePath,
    made: u32,
    /// An attempt ended without an answer. What is found from here on may be our own doing.
    pub(super) unsure: bool,
}

impl Attempts {
    pub(super) fn at(path: NodePath) -> Self {
        Self { path, made: 0, unsure: false }
    }

    /// Takes the failure of a write: pauses and returns if it is worth reading again, else gives it back.
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

    /// Does the work of all attempts. Once an answer was lost, not to reach the store any more is not to know what was
    /// done, and whoever would do it again has to be told.
    pub(super) async fn carry_out<R>(
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

/// Somewhere between nothing and a ceiling that doubles.
fn pause(attempt: u32, random: u64) -> Duration {
    let ceiling_ms = (1u64 << attempt.min(20)).min(MAX_PAUSE_MS);
    Duration::from_micros(random % (ceiling_ms * 1000))
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
                assert!(pause(attempt, random) < Duration::from_millis(MAX_PAUSE_MS));
            }
        }
        assert!(pause(1, u64::MAX) < Duration::from_millis(2));
    }

    #[tokio::test(start_paused = true)]
    async fn conflicts_are_tried_again_but_not_for_ever() {
        let mut attempts = Attempts::at(paths::units());
        let mut tries = 0;
        let end = loop {
            if let Err(e) = attempts.after(tree::Error::BadVersion(paths::units())).await {
                break e;
            }
            tries += 1;
        };
        assert_eq!(end.to_string(), "/units: still contended after 60 attempts");
        assert_eq!(tries, MAX_ATTEMPTS - 1);
        assert!(!attempts.unsure);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_is_remembered_and_a_refusal_is_final() {
        let mut attempts = Attempts::at(paths::units());
        attempts.after(tree::Error::Ambiguous { hosts: "a:1".to_owned() }).await.unwrap();
        assert!(attempts.unsure);
        let refusal = attempts.after(tree::Error::NoAuth(paths::units())).await.unwrap_err();
        assert!(matches!(refusal, Error::Tree(tree::Error::NoAuth(_))), "{refusal}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_stays_away_after_a_lost_answer_leaves_doubt() {
        let ended = async |lost: bool, failure: tree::Error| {
            let work = async |attempts: &mut Attempts| {
                if lost {
                    attempts.after(tree::Error::Ambiguous { hosts: "a:1".to_owned() }).await?;
                }
                Err::<(), _>(failure.into())
            };
            Attempts::at(paths::units()).carry_out(work).await.unwrap_err()
        };
        let unreachable = || tree::Error::Unreachable { hosts: "a:1".to_owned() };
        assert_eq!(ended(false, unreachable()).await.to_string(), unreachable().to_string());
        for failure in [unreachable(), tree::Error::Timeout { hosts: "a:1".to_owned(), seconds: 3 }] {
            let doubt = ended(true, failure).await;
            assert!(matches!(doubt, Error::Tree(tree::Error::Ambiguous { .. })), "{doubt}");
        }
        let refusal = ended(true, tree::Error::NoAuth(paths::units())).await;
        assert!(matches!(refusal, Error::Tree(tree::Error::NoAuth(_))), "{refusal}");
    }
}
