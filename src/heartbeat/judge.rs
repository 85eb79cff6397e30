//! The judge: the elected tracker that decides about states. Before it calls a component silent, it
//! waits until all replicas have written their beats; it stores each change before it publishes it,
//! and sends it to the state manager and the webhook. All its writes check the epoch of its lease.
//! Decisions are in `core::judge_state` and `core::rounds`.

mod housekeeping;

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;
use tracing::{error, info, warn};

use self::housekeeping::CLEAN_UP_EVERY;
use super::core::journal::PageWrite;
use super::core::judge_state::{Inherited, JudgeState};
use super::hsm::StateManager;
use super::store;
use super::tracker::Deps;
use super::tracker::follow::unless_corrupt;
use super::tracker::replicas::Replicas;
use super::tracker::shared_state::SharedState;
use super::webhook::Webhook;
use crate::net::http::client::HttpClient;
use crate::store::Error;
use crate::store::acl::Acl;
use crate::store::heartbeat::JudgeWrites;
use crate::store::lease::{LEASE, Lease};
use crate::store::paths;
use crate::store::tree::{self, Tree};

/// Bytes of buckets and pages in one write; the store's limit is higher.
const WRITE_BYTES: usize = 800_000;

#[derive(Debug)]
pub(super) struct Judge {
    lease: Lease,
    state: JudgeState,
    manager: StateManager,
    webhook: Webhook,
    renew_at: Instant,
    clean_up_at: Instant,
    /// Small differences of a hold are not written before this time.
    alarm_at: Instant,
    /// Batches of trackers that are gone, each with when it is deleted.
    orphans: HashMap<String, Instant>,
}

/// The outcome of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Renewal {
    NotDue,
    Renewed,
    Lost,
}

/// Reads everything that a new judge continues with, and the buckets.
pub(super) async fn read_inherited<T: Tree>(
    tree: &T,
    newest_request: u64,
) -> Result<(Inherited<Error>, Vec<store::Bucket>), Error> {
    let buckets = store::all_buckets(tree).await?;
    let (request, version) = store::flush_request(tree).await?;
    // The next request must have a higher number than all that were answered, or old answers would
    // count for it. A restored store has a lower number.
    let flush_request = (unless_corrupt(request)?.unwrap_or(0).max(newest_request), version);
    let (progress, version) = store::webhook_progress(tree).await?;
    // If the progress is unreadable, changes are sent a second time rather than not at all.
    let progress = (unless_corrupt(progress)?.unwrap_or_default(), version);
    let pages = store::journal(tree, 0).await?;
    let release = store::releases(tree).await?;
    let (hold, version) = store::alarm(tree).await?;
    let hold = (unless_corrupt(hold)?, version);
    let versions = buckets.iter().map(|(number, records, version)| (*number, *version, records.is_ok()));
    let versions = versions.collect();
    let (rolled_back, last_page, last_published) = (false, None, 0);
    let inherited = Inherited {
        buckets: versions,
        flush_request,
        progress,
        pages,
        hold,
        release,
        rolled_back,
        last_page,
        last_published,
    };
    Ok((inherited, buckets))
}

impl Judge {
    /// Takes over from the previous judge.
    pub(super) fn new(lease: Lease, inherited: Inherited<Error>, shared: &SharedState) -> Self {
        let mut inner = shared.lock();
        let now = shared.now(&inner);
        let (state, rewritten) = JudgeState::resume(inherited, &mut inner.audit, now);
        inner.stats.judging = true;
        drop(inner);
        if rewritten > 0 {
            warn!(components = rewritten, "records missing from the store; writing them again");
        }
        info!(epoch = lease.epoch(), unreadable = state.frozen.len(), "became judge");
        shared.extend_lease(LEASE);
        let now = Instant::now();
        Self {
            lease,
            state,
            manager: StateManager::new(shared.monotonic_ms()),
            webhook: Webhook::new(),
            renew_at: now + LEASE / 3,
            clean_up_at: now + CLEAN_UP_EVERY,
            alarm_at: now,
            orphans: HashMap::new(),
        }
    }

    /// Deletes the lock. Held deaths stay held: the next judge continues with them.
    pub(super) async fn resign<T: Tree>(&self, tree: &T) {
        self.lease.release(tree).await;
    }

    pub(super) fn newest_page(&self) -> Option<u64> {
        self.state.journal.newest()
    }

    pub(super) async fn renew<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
    ) -> Result<Renewal, Error> {
        let asked = Instant::now();
        if asked < self.renew_at {
            return Ok(Renewal::NotDue);
        }
        if !self.lease.confirm(&deps.tree).await? {
            return Ok(Renewal::Lost);
        }
        self.renew_at = Instant::now() + LEASE / 3;
        deps.shared.extend_lease(LEASE.saturating_sub(asked.elapsed()));
        Ok(Renewal::Renewed)
    }

    /// Decides, stores, publishes and sends, in this order. Returns whether this tracker is still
    /// the judge.
    pub(super) async fn tick<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        replicas: &Replicas,
        released: bool,
    ) -> Result<bool, Error> {
        if released {
            self.apply_release(deps).await?;
        }
        match self.tick_fenced(deps, replicas).await {
            Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::heartbeat_epoch() => {
                warn!("lease lost to another judge");
                Ok(false)
            }
            done => done.map(|()| true),
        }
    }

    async fn tick_fenced<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        replicas: &Replicas,
    ) -> Result<(), Error> {
        self.decide(&deps.shared, replicas);
        self.write_changes(deps).await?;
        self.write_alarm(deps).await?;
        self.request_flush(deps, replicas).await?;
        self.write_progress(&deps.tree).await?;
        self.manager.start(deps);
        self.webhook.start(deps, &mut self.state.webhook_queue, &self.state.progress.0);
        if Instant::now() >= self.clean_up_at { self.clean_up(deps, replicas).await } else { Ok(()) }
    }

    /// Waits until a call was accepted or a round is over, and applies the result. Cancel-safe.
    pub(super) async fn calls_done<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>) {
        tokio::select! {
            biased;
            () = self.manager.call_done(deps) => {}
            () = self.webhook.call_done(deps, &mut self.state.webhook_queue) => {}
        }
    }

    /// Starts no call, but applies and stores the results of running calls.
    pub(super) async fn finish_calls<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
    ) -> Result<(), Error> {
        loop {
            // Both are tried: an earlier write of either may have been applied without an answer.
            let progress = self.write_progress(&deps.tree).await;
            self.write_changes(deps).await?;
            progress?;
            if !self.manager.is_busy() && !self.webhook.is_busy() {
                return Ok(());
            }
            self.calls_done(deps).await;
            self.manager.make_no_further_call();
        }
    }

    /// Applies a release of held deaths by an operator, if there is a new one.
    async fn apply_release<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>) -> Result<(), Error> {
        let release = store::releases(&deps.tree).await?;
        if std::mem::replace(&mut self.state.release, release) != release {
            let mut inner = deps.shared.lock();
            let now = deps.shared.now(&inner).awake;
            inner.audit.release(now);
        }
        Ok(())
    }

    fn decide(&mut self, shared: &SharedState, replicas: &Replicas) {
        let request = self.state.flush_request.0;
        let answered = replicas.others().all(|id| replicas.has_answered(id, request));
        let mut inner = shared.lock();
        let now = shared.now(&inner);
        let is_new_hold = self.state.decide(&mut inner.audit, now, answered, replicas.is_alone());
        inner.stats.alarm = inner.audit.alarm();
        if let Some((silent, alive)) = inner.stats.alarm.filter(|_| is_new_hold) {
            error!(silent, alive, "mass outage; deaths are held");
        }
    }

    /// Asks the other replicas to write their beats, if a deadline has passed.
    async fn request_flush<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        replicas: &Replicas,
    ) -> Result<(), Error> {
        let now = {
            let inner = deps.shared.lock();
            let now = deps.shared.now(&inner).awake;
            if !self.state.needs_flush(&inner.audit, now, replicas.is_alone()) {
                return Ok(());
            }
            now
        };
        let (number, version) = self.state.flush_request;
        let data = (number + 1).to_string().into_bytes();
        deps.shared.lock().stats.store_writes += 1;
        JudgeWrites::new(&self.lease).question(data, version).commit(&deps.tree).await?;
        self.state.flush_requested(now);
        Ok(())
    }

    /// Writes every bucket with a change, then the journal, then publishes the changes.
    async fn write_changes<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>) -> Result<(), Error> {
        let mut rest: VecDeque<Piece> = {
            let inner = deps.shared.lock();
            let dirty = inner.audit.dirty().iter().filter(|number| !self.state.frozen.contains(number));
            dirty.map(|number| Piece::Bucket(*number, Vec::new())).collect()
        };
        rest.extend(self.state.journal.with(&self.state.unpublished).into_iter().map(Piece::Page));
        while !rest.is_empty() {
            let (pieces, writes) = self.next_write(&mut rest, deps);
            deps.shared.lock().stats.store_writes += 1;
            writes.commit(&deps.tree).await?;
            let mut inner = deps.shared.lock();
            for piece in pieces {
                match piece {
                    Piece::Bucket(number, _) => {
                        self.state.versions.entry(number).and_modify(|version| *version += 1).or_insert(0);
                        inner.audit.written(number);
                    }
                    Piece::Page(page) => self.state.journal.written(page),
                }
            }
        }
        let changes = std::mem::take(&mut self.state.unpublished);
        deps.shared.publish(&changes);
        self.state.webhook_queue.push(&changes);
        deps.shared.lock().stats.webhook_collapsed += self.state.webhook_queue.take_collapsed();
        self.manager.results_stored();
        Ok(())
    }

    /// As many pieces as fit into one write.
    fn next_write<T: Tree, P: HttpClient>(
        &self,
        rest: &mut VecDeque<Piece>,
        deps: &Deps<T, P>,
    ) -> (Vec<Piece>, JudgeWrites) {
        let acl = deps.roles.controllers();
        let (mut pieces, mut writes, mut bytes) = (Vec::new(), JudgeWrites::new(&self.lease), 0);
        while let Some(mut piece) = rest.pop_front() {
            piece.fill(&deps.shared);
            bytes += piece.bytes() + 300;
            if bytes > WRITE_BYTES && !pieces.is_empty() {
                rest.push_front(piece);
                break;
            }
            piece.add_to(&mut writes, &self.state.versions, &acl);
            pieces.push(piece);
        }
        (pieces, writes)
    }
}

/// A part of what one tick writes.
enum Piece {
    Bucket(u16, Vec<u8>),
    Page(PageWrite),
}

impl Piece {
    /// Locks the memory for one bucket at a time, so that beats do not wait for all of them. Only
    /// the judge changes the records.
    fn fill(&mut self, shared: &SharedState) {
        if let Self::Bucket(number, data) = self
            && data.is_empty()
        {
            let inner = shared.lock();
            *data = inner.audit.bucket_bytes(*number, shared.now(&inner));
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Bucket(_, data) => data.len(),
            Self::Page(page) => page.data.len(),
        }
    }

    fn add_to(&self, writes: &mut JudgeWrites, versions: &HashMap<u16, i32>, acl: &Acl) {
        match self {
            Self::Bucket(number, data) => {
                writes.bucket(*number, data.clone(), versions.get(number).copied(), acl);
            }
            Self::Page(page) => writes.journal_page(page.number, page.data.clone(), page.version, acl),
        }
    }
}
