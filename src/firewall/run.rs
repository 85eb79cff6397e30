//! The agent's life: wait for the lock, then pass after pass until it is lost or we are asked to stop. A pass comes after a
//! change, when a machine that failed is due again, and at the pace of the resync, because events get lost. An event
//! never says what to do, only where to look.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::agent::{Agent, Pass};
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::{Changes, Dirty};
use crate::store::election::{LEASE, Leadership};
use crate::store::paths;
use crate::store::tree::{self, Event, Tree};
use portcullis_provider::Firewall;

/// How long after a failure of the store the next attempt is made.
const STORE_PAUSE: Duration = Duration::from_secs(1);

/// How long a mass close waits for the look that confirms it.
const DOUBT: Duration = Duration::from_secs(2);

/// What the agent is doing, for whoever watches it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Holds the lock.
    pub leading: bool,
    pub passes: u64,
    pub last: Pass,
    pub store_failures: u64,
}

/// Runs until `stop` says so.
///
/// # Errors
/// What no waiting cures: wrong credentials, an environment that is not there.
pub async fn run<T: Tree, F: Firewall>(
    agent: &mut Agent<T, F>,
    tree: &T,
    roles: &Roles,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let token = Leadership::token()?;
    loop {
        let campaign = tokio::select! {
            won = Leadership::campaign(tree, roles, &token) => won,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        let ended = match campaign {
            Ok(lead) => {
                info!("leading");
                progress.send_modify(|progress| progress.leading = true);
                lead_on(agent, tree, lead, resync, progress, &mut stop).await
            }
            Err(err) => Err(err),
        };
        progress.send_modify(|progress| progress.leading = false);
        match ended {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::Replaced) => warn!("no longer leading"),
            Err(Error::Tree(err)) if err.is_retryable() => {
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

async fn lead_on<T: Tree, F: Firewall>(
    agent: &mut Agent<T, F>,
    tree: &T,
    mut lead: Leadership,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    agent.prepare().await?;
    let mut changes = Changes::new(tree.watch(&paths::root()).await?);
    let mut resync_at = Instant::now() + resync;
    let mut renew_at = Instant::now();
    let mut everything = Dirty::default();
    everything.add(&Event::Everything);
    loop {
        let retry_at = agent.next_retry().unwrap_or(resync_at);
        let doubt_at = if agent.in_doubt() { Instant::now() + DOUBT } else { resync_at };
        let dirty = tokio::select! {
            dirty = changes.next() => Some(dirty?),
            () = sleep_until(resync_at.min(doubt_at)) => Some(everything.clone()),
            () = sleep_until(retry_at) => Some(Dirty::default()),
            () = sleep_until(renew_at) => None,
            _ = stop.wait_for(|stop| *stop) => return Ok(Ended::Stopped),
        };
        if !lead.confirm(tree).await? {
            return Ok(Ended::Replaced);
        }
        renew_at = Instant::now() + LEASE / 3;
        let Some(dirty) = dirty else { continue };
        if dirty.everything() {
            resync_at = Instant::now() + resync;
        }
        let pass = match agent.pass(&dirty, &lead).await {
            Ok(pass) => pass,
            Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::epoch() => {
                return Ok(Ended::Replaced);
            }
            // Somebody else wrote what we wrote about: everything is read again.
            Err(Error::Tree(err)) if err.is_conflict() => {
                warn!(error = %err, "reports changed meanwhile");
                resync_at = Instant::now() + STORE_PAUSE;
                continue;
            }
            Err(err) => return Err(err),
        };
        progress.send_modify(|progress| {
            progress.passes += 1;
            progress.last = pass;
        });
    }
}
