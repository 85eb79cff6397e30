//! The loop of a tracker beside its memory: writes received beats to the store in batches, follows
//! the other replicas, and tries to become the judge. When the store is lost it starts again by
//! reading everything; meanwhile beats are still accepted.

pub mod event_feed;
mod flush;
pub(super) mod follow;
pub(super) mod replicas;
pub mod shared_state;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use self::flush::BatchWriter;
use self::follow::{ChangedNodes, adopt_all_buckets};
use self::replicas::{BatchAge, Replicas};
use self::shared_state::SharedState;
use super::judge::{self, Judge, Renewal};
use super::store;
use crate::net::http::client::HttpClient;
use crate::runtime::service::stopped;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::{Watched, gather_burst};
use crate::store::heartbeat;
use crate::store::lease::{Lease, LeaseKey};
use crate::store::tree::{Feed as _, Tree};

/// The longest pause between two passes of the loop, for the judge and for other trackers.
const TICK: Duration = Duration::from_millis(50);
const IDLE_TICK: Duration = Duration::from_millis(500);

/// How often to try to become the judge without an event, because events get lost.
const CAMPAIGN_EVERY: Duration = Duration::from_secs(2);

/// Pause after a failure of the store.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// Events that arrive within this time are handled together.
const GATHER: Duration = Duration::from_millis(2);

/// Limit for the last writes of a tracker that stops.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(3);

/// The part of [`LEAVE_TIMEOUT`] that running calls may take.
const LAST_CALLS_TIMEOUT: Duration = Duration::from_millis(1_500);

/// The parts that a tracker uses.
#[derive(Debug)]
pub struct Deps<T, P> {
    pub tree: T,
    pub roles: Roles,
    pub shared: Arc<SharedState>,
    pub post: Arc<P>,
    /// The address under which machines reach this tracker; empty if it is not known.
    pub url: String,
    /// Signs what is sent to the webhook; without it nothing is sent.
    pub webhook_secret: Option<Arc<[u8]>>,
    /// Spreads retries.
    pub random: fn() -> u64,
}

#[derive(Debug)]
pub struct Tracker<T, P> {
    deps: Deps<T, P>,
    id: String,
    writer: BatchWriter,
    replicas: Replicas,
    /// The newest page of the journal that was read.
    page: Option<u64>,
    /// The highest number of a page that was ever read.
    last_page: Option<u64>,
    /// Set while this tracker is the judge.
    judge: Option<Judge>,
    campaign_at: Instant,
}

enum Ended {
    Stopped,
    /// The connection was lost for a while: everything has to be read again.
    Interrupted,
}

impl<T: Tree, P: HttpClient> Tracker<T, P> {
    /// # Errors
    /// If the system provides no random numbers for an id.
    pub fn new(deps: Deps<T, P>) -> Result<Self, Error> {
        let id = Lease::token()?;
        Ok(Self {
            deps,
            writer: BatchWriter::new(id.clone()),
            replicas: Replicas::new(id.clone()),
            id,
            page: None,
            last_page: None,
            judge: None,
            campaign_at: Instant::now(),
        })
    }

    /// Runs until `stop` is true, then writes a final batch and gives up the lease.
    ///
    /// # Errors
    /// Failures that do not pass, for example wrong credentials or a missing environment.
    pub async fn run(&mut self, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        loop {
            let ended = tokio::select! {
                ended = self.session() => ended,
                () = stopped(&mut stop) => Ok(Ended::Stopped),
            };
            match ended {
                Ok(Ended::Stopped) => {
                    if timeout(LEAVE_TIMEOUT, self.leave()).await.is_err() {
                        warn!("tracker exits; store did not accept its last beats in time");
                    }
                    return Ok(());
                }
                Ok(Ended::Interrupted) => {}
                Err(Error::Tree(err)) if err.is_transient() || err.is_conflict() => {
                    warn!(error = %err, "store lost");
                }
                Err(err) => return Err(err),
            }
            self.step_down();
            self.shared().lock().stats.store = false;
            tokio::select! {
                () = tokio::time::sleep(STORE_PAUSE) => {}
                () = stopped(&mut stop) => return Ok(()),
            }
        }
    }

    fn shared(&self) -> &SharedState {
        &self.deps.shared
    }

    fn tree(&self) -> &T {
        &self.deps.tree
    }

    /// Runs as long as the store is reachable. It can be dropped at any point: the next session
    /// begins by reading everything.
    async fn session(&mut self) -> Result<Ended, Error> {
        let (params, maintenance) = {
            let inner = self.shared().lock();
            (inner.params.clone(), inner.audit.maintenance().clone())
        };
        store::ensure_as(self.tree(), &self.deps.roles, &params, &maintenance).await?;
        let mut feed = Watched::Heartbeat.feed(self.tree()).await?;
        feed.next().await?;
        self.register().await?;
        self.read_everything().await?;
        {
            let mut inner = self.shared().lock();
            inner.stats.store = true;
            inner.stats.loaded = true;
        }
        self.shared().urgent.notify_one();
        let mut changed = ChangedNodes { leader: true, ..ChangedNodes::default() };
        loop {
            let tick = Instant::now() + if self.judge.is_some() { TICK } else { IDLE_TICK };
            let (mut flush, flush_at) = (false, self.writer.flush_at());
            let shared = Arc::clone(&self.deps.shared);
            tokio::select! {
                event = feed.next() => {
                    changed.add(&event?);
                    gather_burst(&mut feed, GATHER, |event| changed.add(event)).await?;
                }
                () = shared.urgent.notified() => flush = true,
                () = sleep_until(flush_at) => flush = true,
                () = sleep_until(tick) => {}
                () = self.calls_done() => {}
            }
            let changed = std::mem::take(&mut changed);
            if changed.everything {
                return Ok(Ended::Interrupted);
            }
            let (released, leader) = (changed.release, changed.leader);
            self.read_changed(changed).await?;
            if flush || self.writer.owes_answer() {
                self.writer.flush(&self.deps, false).await?;
            }
            if self.judge.is_some() {
                self.judge_tick(released).await?;
            } else if leader || Instant::now() >= self.campaign_at {
                self.campaign().await?;
            }
        }
    }

    async fn register(&self) -> Result<(), Error> {
        let acl = self.deps.roles.controllers();
        Ok(heartbeat::register(self.tree(), &self.id, &self.deps.url, acl).await?)
    }

    async fn read_everything(&mut self) -> Result<(), Error> {
        let was_alone = self.replicas.is_only_own();
        self.tree().sync().await?;
        let batches = store::batch_names(self.tree()).await?;
        let buckets = store::all_buckets(self.tree()).await?;
        let rolled_back = self.is_rolled_back(store::journal_end(self.tree()).await?);
        if rolled_back {
            warn!("store lost heartbeat records; writing them again from memory");
            // The journal is written again, and the judge may not have our newest answer.
            self.page = None;
            self.writer.forget_answers();
        }
        adopt_all_buckets(self.shared(), buckets, rolled_back);
        let changed = ChangedNodes {
            params: true,
            maintenance: true,
            flush_request: true,
            replicas: true,
            journal: true,
            ..ChangedNodes::default()
        };
        let (tree, shared) = (&self.deps.tree, &self.deps.shared);
        self.replicas.read_batches(tree, shared, batches, BatchAge::FromWallClock).await?;
        self.read_changed(changed).await?;
        if !was_alone {
            // Batches of other replicas may have been written and deleted in the meantime.
            self.shared().restart_windows();
        }
        Ok(())
    }

    /// Whether the store is older than before: the journal ends before a change that was read from
    /// it.
    fn is_rolled_back(&self, journal_end: Option<u64>) -> bool {
        journal_end.is_some_and(|end| end < self.shared().lock().feed.last())
    }

    async fn campaign(&mut self) -> Result<(), Error> {
        self.campaign_at = Instant::now() + CAMPAIGN_EVERY;
        let acl = self.deps.roles.controllers();
        let began = self.shared().awake_now();
        let key = LeaseKey::heartbeat();
        let Some(lease) = Lease::try_acquire(self.tree(), &key, &acl, &self.id).await? else {
            self.writer.store_answered(&self.deps.shared, began);
            return Ok(());
        };
        // Writes of the previous judge may have events that have not arrived.
        self.tree().sync().await?;
        let batches = store::batch_names(self.tree()).await?;
        let (tree, shared) = (&self.deps.tree, &self.deps.shared);
        self.replicas.read_batches(tree, shared, batches, BatchAge::JustWritten).await?;
        let present = store::replicas(tree).await?;
        self.replicas.update(shared, present);
        self.become_judge(lease).await
    }

    async fn become_judge(&mut self, lease: Lease) -> Result<(), Error> {
        let newest_request = self.replicas.newest_answered().max(self.writer.flush_request());
        let (mut inherited, buckets) = judge::read_inherited(self.tree(), newest_request).await?;
        inherited.rolled_back = self.is_rolled_back(Some(inherited.journal_end()));
        adopt_all_buckets(self.shared(), buckets, inherited.rolled_back);
        self.publish_pages(&inherited.pages);
        inherited.last_page = self.last_page;
        inherited.last_published = self.shared().lock().feed.last();
        self.judge = Some(Judge::new(lease, inherited, self.shared()));
        Ok(())
    }

    async fn judge_tick(&mut self, released: bool) -> Result<(), Error> {
        let Some(judge) = self.judge.as_mut() else { return Ok(()) };
        let began = self.deps.shared.awake_now();
        let renewal = judge.renew(&self.deps).await?;
        if renewal == Renewal::Renewed {
            self.writer.store_answered(&self.deps.shared, began);
        }
        if renewal == Renewal::Lost || !judge.tick(&self.deps, &self.replicas, released).await? {
            self.step_down();
            return Ok(());
        }
        self.page = judge.newest_page().or(self.page);
        self.last_page = self.last_page.max(self.page);
        Ok(())
    }

    /// Waits for the result of a call of the judge; forever if this tracker is not the judge.
    async fn calls_done(&mut self) {
        match &mut self.judge {
            Some(judge) => judge.calls_done(&self.deps).await,
            None => std::future::pending().await,
        }
    }

    /// Writes a final batch, which proves to the other replicas that no beat of this one is
    /// missing.
    async fn leave(&mut self) {
        if let Err(problem) = self.writer.flush(&self.deps, true).await {
            warn!(%problem, "tracker exits without writing its last beats");
            return;
        }
        if let Some(judge) = &mut self.judge {
            match timeout(LAST_CALLS_TIMEOUT, judge.finish_calls(&self.deps)).await {
                Ok(Ok(())) => {}
                // A write that was under way at the request to stop was applied without its answer.
                Ok(Err(Error::Tree(problem))) if problem.is_conflict() => {
                    debug!(%problem, "last changes are in the store already");
                }
                Ok(Err(problem)) => warn!(%problem, "tracker exits without writing its last changes"),
                Err(_) => warn!("tracker exits during a call; the next judge repeats it"),
            }
            judge.resign(&self.deps.tree).await;
        }
        // The znode ends with the session in any case.
        let _ = heartbeat::unregister(self.tree(), &self.id).await;
        self.step_down();
    }

    fn step_down(&mut self) {
        if self.judge.take().is_some() {
            info!("no longer judge");
        }
        self.shared().revoke_lease();
        let mut inner = self.shared().lock();
        inner.audit.stop_judging();
        inner.stats.judging = false;
        inner.stats.alarm = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::http::client::{Call, CallError};
    use crate::store::records::Placement;
    use crate::store::tree::Write;
    use crate::store::{MemoryStore, paths};

    struct NoCalls;

    impl HttpClient for NoCalls {
        async fn call(&self, _: Call) -> Result<u16, CallError> {
            Err(CallError::TooSlow)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bucket_that_was_deleted_before_the_election_is_not_unreadable() {
        let (memory, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let (tree, roles) = (memory.connect(Some(&controller)), environment.info().roles.clone());
        store::ensure(&tree, &roles).await.unwrap();
        let bucket = paths::heartbeat_bucket(1);
        tree.write(vec![Write::create(bucket.clone(), "garbage", roles.controllers())]).await.unwrap();
        let shared = Arc::new(SharedState::new(Arc::new(|| 0), 10));
        let deps = Deps {
            tree: tree.clone(),
            roles,
            shared: Arc::clone(&shared),
            post: Arc::new(NoCalls),
            url: String::new(),
            webhook_secret: None,
            random: || 4,
        };
        let mut tracker = Tracker::new(deps).unwrap();
        tracker.register().await.unwrap();
        tracker.read_everything().await.unwrap();
        assert_eq!(shared.lock().stats.unreadable, [1].into());
        tree.write(vec![Write::Delete { path: bucket }]).await.unwrap();
        tracker.campaign().await.unwrap();
        assert!(tracker.judge.is_some());
        assert_eq!(shared.lock().stats.unreadable, [].into());
    }
}
