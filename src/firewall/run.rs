//! The agent's life: wait for the lock, then pass after pass until it is lost or we are asked to stop. A pass comes after a
//! change, when a machine that failed is due again, and at the pace of the resync, because events get lost. An event
//! never says what to do, only where to look.

use std::time::Duration;

use portcullis_provider::{Firewall, Machines, Memory};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::agent::{Agent, Pass};
use super::provisioner::{News, Provisioner, Wake};
use crate::model::planted::{Bug, planted};
use crate::runtime::reconcile::{Due, Ended, Passed, Rounds, STORE_PAUSE, Timetable, turn};
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::{Changes, Dirty};
use crate::store::election::{LEASE, Leadership};
use crate::store::paths;
use crate::store::tree::{self, Event, Tree};

/// What the agent is doing, for whoever watches it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Holds the lock.
    pub leading: bool,
    /// Since it does.
    pub passes: u64,
    pub last: Pass,
    pub store_failures: u64,
    /// It is lost now, as far as is known.
    pub store_lost: bool,
}

impl Progress {
    pub(super) fn leads(&mut self) {
        (self.leading, self.passes, self.store_lost) = (true, 0, false);
    }

    pub(super) fn loses_the_store(&mut self) {
        self.store_failures += 1;
        self.store_lost = true;
    }
}

/// Runs until `stop` says so, with machines that somebody else provides.
///
/// # Errors
/// What no waiting cures: wrong credentials, an environment that is not there.
pub async fn run<T: Tree, F: Firewall>(
    agent: &mut Agent<T, F>,
    tree: &T,
    roles: &Roles,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let nobody: Option<&mut Provisioner<T, Memory>> = None;
    run_provisioning(agent, nobody, tree, roles, resync, progress, stop).await
}

/// The same, with instances for the machines that need one.
///
/// # Errors
/// As for [`run`].
pub async fn run_provisioning<T: Tree, F: Firewall, M: Machines>(
    agent: &mut Agent<T, F>,
    mut provisioner: Option<&mut Provisioner<T, M>>,
    tree: &T,
    roles: &Roles,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    if let Some(provisioner) = provisioner.as_deref_mut() {
        provisioner.count_in(agent.metrics());
    }
    let token = Leadership::token()?;
    loop {
        let campaign = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            won = async {
                tree.sync().await?;
                progress.send_modify(|progress| progress.store_lost = false);
                Leadership::campaign(tree, roles, &token).await
            } => won,
            // Failures of the store are ignored here: the campaign handles them.
            never = async {
                loop {
                    let error = agent.stand_by(tree).await;
                    debug!(%error, "cannot follow the checkpoints of the leader");
                    tokio::time::sleep(STORE_PAUSE).await;
                }
            } => never,
        };
        let ended = match campaign {
            Ok(lead) => {
                info!("leading");
                progress.send_modify(Progress::leads);
                let provisioner = provisioner.as_deref_mut();
                lead_on(agent, provisioner, tree, lead, resync, progress, &mut stop).await
            }
            Err(err) => Err(err),
        };
        progress.send_modify(|progress| progress.leading = false);
        match ended {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::Replaced) => warn!("no longer leading"),
            Err(Error::Tree(err)) if err.is_retryable() && !planted(Bug::DiesWithTheStore) => {
                warn!(error = %err, "store lost");
                progress.send_modify(Progress::loses_the_store);
                tokio::time::sleep(STORE_PAUSE).await;
            }
            Err(err) => return Err(err),
        }
    }
}

/// Firewall and provisioning go on side by side: neither waits for the other's calls, and both end with the lock.
async fn lead_on<T: Tree, F: Firewall, M: Machines>(
    agent: &mut Agent<T, F>,
    provisioner: Option<&mut Provisioner<T, M>>,
    tree: &T,
    lead: Leadership,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    if provisioner.is_some() {
        agent.recall_notes();
    }
    let wakes = watch::Sender::new(Wake::default());
    let (tell, news) = mpsc::channel(1);
    let provisioning = {
        let (lead, wakes) = (lead.clone(), &wakes);
        async move {
            match provisioner {
                Some(provisioner) => provisioner.work(lead, wakes, &tell).await,
                None => std::future::pending().await,
            }
        }
    };
    let firewall = firewall_rounds(agent, tree, lead, resync, progress, (&wakes, news), stop);
    // Boxed: with a real cloud inside they are large, and nested deeper than the compiler likes.
    tokio::select! {
        biased;
        ended = Box::pin(firewall) => ended,
        ended = Box::pin(provisioning) => ended.map(|()| Ended::Replaced),
    }
}

async fn firewall_rounds<T: Tree, F: Firewall>(
    agent: &mut Agent<T, F>,
    tree: &T,
    lead: Leadership,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    (wakes, news): (&watch::Sender<Wake>, mpsc::Receiver<News>),
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    agent.forget();
    agent.prepare().await?;
    let changes = Changes::new(tree.watch(&paths::root()).await?);
    let resync = if planted(Bug::NoResync) { 1000 * resync } else { resync };
    let timetable = Timetable::new(Instant::now() + resync, resync, LEASE / 3);
    let mut passes = Passes { agent, tree, lead, progress, changes, wakes, news };
    turn(&mut passes, timetable, stop).await
}

/// What pass after pass needs.
struct Passes<'a, T: Tree, F> {
    agent: &'a mut Agent<T, F>,
    tree: &'a T,
    lead: Leadership,
    progress: &'a watch::Sender<Progress>,
    changes: Changes<T::Feed>,
    /// What provisioning is told of changes.
    wakes: &'a watch::Sender<Wake>,
    /// What it tells.
    news: mpsc::Receiver<News>,
}

impl<T: Tree, F: Firewall> Rounds for Passes<'_, T, F> {
    type Error = Error;

    async fn changed(&mut self) -> Result<(), Error> {
        let news = tokio::select! {
            biased;
            gathered = self.changes.gather() => return Ok(gathered?),
            Some(news) = self.news.recv() => news,
        };
        for machine in self.agent.note(news.problems, news.whole).into_iter().chain(news.changed) {
            self.changes.add(&Event::Changed(paths::machine(machine)));
        }
        Ok(())
    }

    fn retry_at(&self) -> Option<Instant> {
        self.agent.next_retry()
    }

    async fn confirm(&mut self) -> Result<bool, Error> {
        self.changes.during(self.lead.confirm(self.tree)).await
    }

    async fn pass(&mut self, due: Due) -> Result<Passed, Error> {
        let late = due == Due::Retries && planted(Bug::DeafWhileLate);
        let mut dirty = if late { Dirty::default() } else { self.changes.gathered() };
        if planted(Bug::IgnoresReconnects) && dirty.everything() && self.agent.view().is_some() {
            dirty = Dirty::default();
        }
        if due == Due::Everything {
            dirty.add(&Event::Everything, Instant::now());
        }
        self.wakes.send_if_modified(|wake| {
            wake.add(&dirty);
            !wake.is_empty()
        });
        let pass = match self.changes.during(self.agent.pass(&dirty, &self.lead)).await {
            Ok(pass) => pass,
            Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::epoch() => {
                return Ok(Passed::Replaced);
            }
            // Somebody else wrote what we wrote about: everything is read again.
            Err(Error::Tree(err)) if err.is_conflict() => {
                warn!(error = %err, "reports changed meanwhile");
                // If it was the place for the reports that went, there would never be any again.
                self.agent.prepare().await?;
                return Ok(Passed::Disturbed);
            }
            Err(Error::Tree(err)) if err.is_retryable() && planted(Bug::KeepsItsView) => {
                return Ok(Passed::Looked { everything: dirty.everything(), in_doubt: false });
            }
            Err(err) => return Err(err),
        };
        self.progress.send_modify(|progress| {
            progress.passes += 1;
            progress.last = pass;
        });
        Ok(Passed::Looked { everything: dirty.everything(), in_doubt: self.agent.in_doubt() })
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
pub(super) mod tests;
