//! Reads from the store what has changed: parameters, maintenances, the judge's records and
//! journal, and the batches of other trackers.

use std::collections::BTreeSet;

use tracing::error;

use super::Tracker;
use super::replicas::BatchAge;
use super::shared_state::SharedState;
use crate::heartbeat::core::record::bucket_of;
use crate::heartbeat::store;
use crate::net::http::client::HttpClient;
use crate::store::Error;
use crate::store::paths::{self, HeartbeatNode};
use crate::store::tree::{Event, Tree};

/// The znodes to read again.
#[derive(Debug, Default)]
pub(super) struct ChangedNodes {
    pub(super) everything: bool,
    pub(super) leader: bool,
    pub(super) params: bool,
    pub(super) maintenance: bool,
    pub(super) release: bool,
    pub(super) flush_request: bool,
    pub(super) replicas: bool,
    pub(super) batches: BTreeSet<String>,
    pub(super) buckets: BTreeSet<u16>,
    pub(super) journal: bool,
}

impl ChangedNodes {
    pub(super) fn add(&mut self, event: &Event) {
        match event {
            Event::Everything => self.everything = true,
            Event::Changed(path) => match paths::heartbeat_node(path) {
                HeartbeatNode::Leader => self.leader = true,
                HeartbeatNode::Params => self.params = true,
                HeartbeatNode::Maintenance => self.maintenance = true,
                HeartbeatNode::Release => self.release = true,
                HeartbeatNode::Question => self.flush_request = true,
                HeartbeatNode::Replica => self.replicas = true,
                HeartbeatNode::Batch(name) => drop(self.batches.insert(name)),
                HeartbeatNode::Bucket(number) => drop(self.buckets.insert(number)),
                HeartbeatNode::Page => self.journal = true,
                HeartbeatNode::Other => {}
            },
        }
    }
}

/// Logs corrupt data and returns `None` for it, so that the tracker continues with what it has.
pub(in crate::heartbeat) fn unless_corrupt<V>(read: Result<V, Error>) -> Result<Option<V>, Error> {
    match read {
        Err(problem @ Error::Corrupt { .. }) => {
            error!(%problem, "znode unreadable; keeping the previous value");
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// Adopts the result of a read of all buckets. Deleted buckets are not in `buckets`.
pub(super) fn adopt_all_buckets(shared: &SharedState, buckets: Vec<store::Bucket>, rolled_back: bool) {
    shared.lock().stats.unreadable.clear();
    adopt_buckets(shared, buckets, rolled_back);
}

/// Adopts the judge's records; from a restored store, only those that are newer than memory.
fn adopt_buckets(shared: &SharedState, buckets: Vec<store::Bucket>, rolled_back: bool) {
    for (number, records, _) in buckets {
        match records {
            Ok(records) => {
                let mut inner = shared.lock();
                let now = shared.now(&inner).awake;
                inner.stats.unreadable.remove(&number);
                if rolled_back {
                    inner.audit.adopt_after_rollback(number, &records, now);
                } else {
                    inner.audit.adopt(number, &records, now);
                }
            }
            Err(problem) => {
                error!(%problem, "bucket unreadable");
                shared.lock().stats.unreadable.insert(number);
            }
        }
    }
}

impl<T: Tree, P: HttpClient> Tracker<T, P> {
    /// Batches are read before replicas, so that a final batch is known before its tracker is
    /// missed.
    pub(super) async fn read_changed(&mut self, changed: ChangedNodes) -> Result<(), Error> {
        // One corrupt znode must not stop the tracker: the previous value stays in use.
        if changed.params {
            let _turn = self.shared().params_turn.lock().await;
            if let Some((params, _)) = unless_corrupt(store::params(self.tree()).await)? {
                self.shared().apply_params(params);
            }
        }
        if changed.maintenance
            && let Some((until, _)) = unless_corrupt(store::maintenance(self.tree()).await)?
        {
            let mut inner = self.shared().lock();
            let now = self.shared().now(&inner);
            inner.audit.set_maintenance(now, until);
        }
        if changed.flush_request {
            let (request, _) = store::flush_request(self.tree()).await?;
            let request = unless_corrupt(request)?.unwrap_or(self.writer.flush_request());
            self.writer.set_flush_request(request);
        }
        if !changed.batches.is_empty() {
            let (tree, shared) = (&self.deps.tree, &self.deps.shared);
            let names = changed.batches.into_iter().collect();
            self.replicas.read_batches(tree, shared, names, BatchAge::JustWritten).await?;
        }
        if changed.replicas {
            let present = store::replicas(self.tree()).await?;
            self.replicas.update(&self.deps.shared, present);
        }
        if let Some(judge) = &mut self.judge {
            return judge.reread_frozen(&self.deps.tree, &self.deps.shared, &changed.buckets).await;
        }
        if !changed.buckets.is_empty() {
            let buckets = store::buckets(self.tree(), changed.buckets.iter().copied()).await?;
            // Removed buckets are not in `buckets`.
            self.shared().lock().stats.unreadable.retain(|bucket| !changed.buckets.contains(bucket));
            adopt_buckets(self.shared(), buckets, false);
        }
        if changed.journal {
            self.read_journal().await?;
        }
        Ok(())
    }

    /// Publishes what is new in the journal. Readers of events resume by number, so the changes are
    /// published in the order of the journal, not in the order in which buckets are read.
    async fn read_journal(&mut self) -> Result<(), Error> {
        let pages = store::journal(self.tree(), self.page.unwrap_or(0)).await?;
        // A reader that is behind gets each component's newest change from memory, up to the newest
        // change that is published: memory must not be older than that.
        let stale = self.stale_buckets(&pages);
        if !stale.is_empty() {
            let buckets = store::buckets(self.tree(), stale).await?;
            adopt_buckets(self.shared(), buckets, false);
        }
        self.publish_pages(&pages);
        Ok(())
    }

    /// Buckets that are older in memory than the journal's changes of their components.
    fn stale_buckets(&self, pages: &[store::Page]) -> BTreeSet<u16> {
        let inner = self.shared().lock();
        let changes = pages.iter().filter_map(|page| page.changes.as_deref().ok()).flatten();
        let newer = changes.filter(|change| {
            let known = inner.audit.newest_change(&change.name);
            change.sequence > inner.feed.last() && known.is_none_or(|known| known.sequence < change.sequence)
        });
        newer.map(|change| bucket_of(change.name.as_str())).collect()
    }

    /// `pages` are all pages, at least from the one that was read last.
    pub(super) fn publish_pages(&mut self, pages: &[store::Page]) {
        let known = self.page.unwrap_or(0);
        let pages = &pages[pages.partition_point(|page| page.number < known)..];
        let (Some(first), Some(newest)) = (pages.first(), pages.last()) else { return };
        let mut whole = first.number == known;
        let mut changes = Vec::new();
        for page in pages {
            match &page.changes {
                Ok(page) => changes.extend_from_slice(page),
                Err(problem) => {
                    error!(%problem, "journal page unreadable");
                    whole = false;
                    changes.clear();
                }
            }
        }
        self.page = Some(newest.number);
        self.last_page = self.last_page.max(self.page);
        if whole {
            self.shared().publish(&changes);
        } else {
            self.shared().publish_after_gap(&changes);
        }
    }
}
