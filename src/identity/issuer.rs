//! The issuer: answers the requests of machines with the authority's key, after a change and at
//! every resync. Several issuers of one environment may run: an answer is written only at the
//! version that was read, so they do not overwrite each other. `plan` decides.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};

use super::plan::{Action, Step, plan};
use crate::model::MachineId;
use crate::net::log_limit::LogLimit;
use crate::net::tls::authority::{Authority, MACHINE_LIFETIME, Validity};
use crate::runtime::clock::utc;
use crate::runtime::reconcile::STORE_PAUSE;
use crate::runtime::service::stopped;
use crate::store::certificates::{Answer, Answered, answer, read_applicants, read_authority};
use crate::store::changes::{Changes, Key, Watched};
use crate::store::tree::{self, Tree};
use crate::store::{Error, list_machines};

/// All machines are read again after this time, because events get lost and certificates age.
const RESYNC: Duration = Duration::from_secs(600);

/// Machines that are read at once.
const BATCH: usize = 256;

/// Answers requests with the key of an authority.
#[derive(Debug)]
pub struct Issuer<T> {
    tree: T,
    authority: Authority,
    /// Returns the time in milliseconds since 1970.
    clock: fn() -> u64,
    /// Machines for which a warning was logged. It is logged once, because a machine can deny
    /// access to its znodes for any length of time.
    failing: BTreeSet<MachineId>,
    /// Whether an error about another authority was logged.
    is_refused: bool,
    /// The log lines about refused requests: a machine can make any number of them.
    refusals: LogLimit,
    since: Instant,
}

impl<T: Tree> Issuer<T> {
    pub fn new(tree: T, authority: Authority, clock: fn() -> u64) -> Self {
        let (failing, refusals) = (BTreeSet::new(), LogLimit::default());
        Self { tree, authority, clock, failing, is_refused: false, refusals, since: Instant::now() }
    }

    /// Runs until `stop` is set.
    ///
    /// # Errors
    /// Failures of the store that do not pass: wrong credentials, or a missing environment.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        loop {
            let ended = tokio::select! {
                biased;
                () = stopped(&mut stop) => return Ok(()),
                ended = self.follow() => ended,
            };
            let Err(error) = ended;
            if !error.is_transient() {
                return Err(error.into());
            }
            warn!(%error, "store lost; certificates are not issued meanwhile");
            tokio::select! {
                () = stopped(&mut stop) => return Ok(()),
                () = sleep(STORE_PAUSE) => {}
            }
        }
    }

    async fn follow(&mut self) -> Result<Infallible, tree::Error> {
        let mut changes = Changes::new(Watched::Machines.feed(&self.tree).await?);
        loop {
            if let Ok(changed) = timeout(RESYNC, changes.gather()).await {
                changed?;
            } else {
                changes.all();
            }
            let dirty = changes.gathered();
            let machines: Vec<MachineId> = if dirty.everything() {
                list_machines(&self.tree).await?.into_iter().collect()
            } else {
                dirty
                    .keys()
                    .filter_map(|key| if let Key::Machine(id) = key { Some(id) } else { None })
                    .collect()
            };
            for machines in machines.chunks(BATCH) {
                self.pass(machines).await?;
            }
        }
    }

    /// Answers the requests of these machines. A machine that cannot be answered does not delay
    /// others.
    ///
    /// # Errors
    /// Failures of the store that concern all machines.
    pub async fn pass(&mut self, machines: &[MachineId]) -> Result<(), tree::Error> {
        let applicants = read_applicants(&self.tree, machines).await?;
        let now_ms = (self.clock)();
        let steps = plan(&applicants, self.authority.certificate(), now_ms);
        if steps.is_empty() || !self.is_published().await? {
            return Ok(());
        }
        for step in steps {
            let machine = step.machine;
            match self.apply(step, now_ms).await {
                Ok(()) => _ = self.failing.remove(&machine),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    if self.failing.insert(machine) {
                        warn!(%machine, %error, "request of a machine cannot be answered");
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns false if the environment has another authority, for example after it was destroyed
    /// and created again: two issuers would replace each other's certificates.
    async fn is_published(&mut self) -> Result<bool, tree::Error> {
        let published = read_authority(&self.tree).await?;
        let is_other = published.is_some_and(|published| published != self.authority.certificate());
        if is_other && !std::mem::replace(&mut self.is_refused, true) {
            error!("the environment has another authority; certificates are not issued");
        }
        Ok(!is_other)
    }

    async fn apply(&mut self, step: Step, now_ms: u64) -> Result<(), tree::Error> {
        let Step { machine, version, request, action } = step;
        let given = match action {
            Action::Refuse(reason) => Answer::Refused(reason),
            Action::Issue { request, names } => {
                let validity = Validity::starting(now_ms, MACHINE_LIFETIME);
                match self.authority.issue(&request, &names, validity) {
                    Ok(chain) => {
                        info!(%machine, %names, until = utc(validity.until_ms), "certificate issued");
                        Answer::Issued(chain)
                    }
                    Err(problem) => Answer::Refused(problem.to_string()),
                }
            }
        };
        if let Answer::Refused(reason) = &given {
            let since_ms = i64::try_from(self.since.elapsed().as_millis()).unwrap_or(i64::MAX);
            if let Some(unlogged) = self.refusals.note(since_ms) {
                warn!(%machine, %reason, unlogged, "request for a certificate refused");
            }
        }
        // If another issuer has answered first, its write causes an event, and the next pass checks
        // it.
        answer(&self.tree, machine, &Answered { request, answer: given }, version).await.map(drop)
    }
}

#[cfg(test)]
#[path = "issuer_tests.rs"]
pub(super) mod tests;
