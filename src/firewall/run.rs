//! The agent's life: wait for the lock, then pass after pass until it is lost or we are asked to stop. A pass comes after a
//! change, when a machine that failed is due again, and at the pace of the resync, because events get lost. An event
//! never says what to do, only where to look.

use std::time::Duration;

use portcullis_provider::{Firewall, Machines, Memory};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::agent::{Agent, Pass};
use super::provisioner::{News, Provisioner, Wake};
use crate::model::planted::{Bug, planted};
use crate::runtime::reconcile::{Due, STORE_PAUSE, Timetable};
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
    pub passes: u64,
    pub last: Pass,
    pub store_failures: u64,
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
    let token = Leadership::token()?;
    loop {
        let campaign = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            won = Leadership::campaign(tree, roles, &token) => won,
        };
        let ended = match campaign {
            Ok(lead) => {
                info!("leading");
                progress.send_modify(|progress| progress.leading = true);
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
                progress.send_modify(|progress| progress.store_failures += 1);
                tokio::time::sleep(STORE_PAUSE).await;
            }
            Err(err) => return Err(err),
        }
    }
}

enum Ended {
    Stopped,
    Replaced,
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
    let firewall = Passes { agent, tree, lead, resync, progress, wakes: &wakes, news };
    // Boxed: with a real cloud inside they are large, and nested deeper than the compiler likes.
    tokio::select! {
        biased;
        ended = Box::pin(firewall.go_on(stop)) => ended,
        ended = Box::pin(provisioning) => ended.map(|()| Ended::Replaced),
    }
}

/// What pass after pass needs.
struct Passes<'a, T, F> {
    agent: &'a mut Agent<T, F>,
    tree: &'a T,
    lead: Leadership,
    resync: Duration,
    progress: &'a watch::Sender<Progress>,
    /// What provisioning is told of changes.
    wakes: &'a watch::Sender<Wake>,
    /// What it tells.
    news: mpsc::Receiver<News>,
}

impl<T: Tree, F: Firewall> Passes<'_, T, F> {
    async fn go_on(mut self, stop: &mut watch::Receiver<bool>) -> Result<Ended, Error> {
        self.agent.forget();
        self.agent.prepare().await?;
        let mut changes = Changes::new(self.tree.watch(&paths::root()).await?);
        let resync = if planted(Bug::NoResync) { 1000 * self.resync } else { self.resync };
        let mut timetable = Timetable::new(Instant::now() + resync, resync, LEASE / 3);
        let mut everything = Dirty::default();
        everything.add(&Event::Everything);
        loop {
            let dirty = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop && !planted(Bug::DeafToStop)) => return Ok(Ended::Stopped),
                dirty = changes.next() => Some(dirty?).filter(|dirty| {
                    !(planted(Bug::IgnoresReconnects) && dirty.everything() && self.agent.view().is_some())
                }),
                due = timetable.due(self.agent.next_retry()) => match due {
                    Due::Everything => Some(everything.clone()),
                    Due::Retries if planted(Bug::DeafWhileLate) => Some(Dirty::default()),
                    Due::Retries => Some(changes.gathered()),
                    Due::Lease => None,
                },
                Some(news) = self.news.recv() => Some(self.hear(news)),
            };
            if !self.lead.confirm(self.tree).await? {
                return Ok(Ended::Replaced);
            }
            timetable.renewed();
            let Some(dirty) = dirty else { continue };
            if dirty.everything() {
                timetable.resynced();
            }
            self.wake(&dirty);
            let pass = match self.agent.pass(&dirty, &self.lead).await {
                Ok(pass) => pass,
                Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::epoch() => {
                    return Ok(Ended::Replaced);
                }
                // Somebody else wrote what we wrote about: everything is read again.
                Err(Error::Tree(err)) if err.is_conflict() => {
                    warn!(error = %err, "reports changed meanwhile");
                    timetable.disturbed();
                    // If it was the place for the reports that went, there would never be any again.
                    self.agent.prepare().await?;
                    continue;
                }
                Err(Error::Tree(err)) if err.is_retryable() && planted(Bug::KeepsItsView) => continue,
                Err(err) => return Err(err),
            };
            timetable.doubts(self.agent.in_doubt() && !planted(Bug::DoubtNeverRipens));
            self.progress.send_modify(|progress| {
                progress.passes += 1;
                progress.last = pass;
            });
        }
    }

    fn wake(&self, dirty: &Dirty) {
        self.wakes.send_if_modified(|wake| {
            wake.add(dirty);
            !wake.is_empty()
        });
    }

    /// What to look at after news from provisioning.
    fn hear(&mut self, news: News) -> Dirty {
        let mut dirty = Dirty::default();
        for machine in self.agent.note(news.problems, news.whole).into_iter().chain(news.changed) {
            dirty.add(&Event::Changed(paths::machine(machine)));
        }
        dirty
    }
}
