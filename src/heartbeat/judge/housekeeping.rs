//! Maintenance by the judge besides its decisions: it writes the alarm that operators read and the
//! webhook's progress, removes components of removed machines and old batches and pages, and reads
//! buckets again that were unreadable.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{error, info};

use super::Judge;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::Hold;
use crate::heartbeat::core::webhook_queue::MAX_WAITING;
use crate::heartbeat::store;
use crate::heartbeat::tracker::Deps;
use crate::heartbeat::tracker::replicas::Replicas;
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::net::http::client::HttpClient;
use crate::store::Error;
use crate::store::heartbeat::{JudgeWrites, bucket_numbers};
use crate::store::list_machines;
use crate::store::paths;
use crate::store::tree::{self, Tree};

/// How often removed machines and unneeded batches are looked for.
pub(super) const CLEAN_UP_EVERY: Duration = Duration::from_secs(5);

/// The numbers of a hold change with every component that returns; they are written this often.
const ALARM_EVERY: Duration = Duration::from_secs(3);

/// Batches of trackers that are gone are kept this long, for troubleshooting.
const ORPHANS_FOR: Duration = Duration::from_secs(30);

/// Batches that are deleted in one write.
const ORPHANS_AT_ONCE: usize = 100;

impl Judge {
    /// Writes the mass outage to the store, for operators and for the next judge.
    pub(super) async fn write_alarm<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
    ) -> Result<(), Error> {
        let hold = {
            let inner = deps.shared.lock();
            self.state.hold_to_store(&inner.audit, deps.shared.now(&inner).awake)
        };
        let (stored, version) = self.state.hold;
        if stored == Some(hold) {
            return Ok(());
        }
        let is_held = |hold: Option<Hold>| matches!(hold, Some(Hold::Held { .. }));
        let other_numbers = is_held(hold) && stored.is_some_and(is_held);
        if other_numbers && Instant::now() < self.alarm_at {
            return Ok(());
        }
        let data = serde_json::json!(hold).to_string().into_bytes();
        JudgeWrites::new(&self.lease).alarm(data, version).commit(&deps.tree).await?;
        self.state.hold = (Some(hold), version + 1);
        self.alarm_at = Instant::now() + ALARM_EVERY;
        Ok(())
    }

    /// Removes components of removed machines, and batches and pages that are no longer needed.
    pub(super) async fn clean_up<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        replicas: &Replicas,
    ) -> Result<(), Error> {
        self.check_records(&deps.tree).await?;
        let orphans = replicas.orphans(&deps.tree, &deps.shared).await?;
        forget_machines(&deps.tree, &deps.shared).await?;
        let now = Instant::now();
        self.clean_up_at = now + CLEAN_UP_EVERY;
        self.orphans.retain(|name, _| orphans.contains(name));
        for name in orphans {
            self.orphans.entry(name).or_insert(now + ORPHANS_FOR);
        }
        let mut writes = JudgeWrites::new(&self.lease);
        let old = self.orphans.iter().filter(|(_, at)| now >= **at).map(|(name, _)| name);
        let old = old.filter_map(|name| paths::heartbeat_batch_of(name)).take(ORPHANS_AT_ONCE);
        old.for_each(|(replica, number)| writes.delete_batch(replica, number));
        if !writes.is_empty() {
            writes.commit(&deps.tree).await?;
        }
        self.webhook.progress_dirty = true;
        self.trim_journal(&deps.tree).await
    }

    /// Fails if a bucket or the newest page that this judge wrote is no longer in the store. The
    /// tracker then reads everything again, and the tracker that becomes the judge writes the
    /// missing records.
    async fn check_records<T: Tree>(&self, tree: &T) -> Result<(), Error> {
        let present: HashSet<u16> = bucket_numbers(tree).await?.into_iter().collect();
        let page = store::newest_page(tree).await?;
        let missing_page =
            self.state.journal.newest().filter(|newest| page != Some(*newest)).map(paths::heartbeat_page);
        let missing_bucket = self.state.versions.keys().find(|number| !present.contains(number));
        let missing = missing_page.or(missing_bucket.map(|number| paths::heartbeat_bucket(*number)));
        missing.map_or(Ok(()), |path| Err(tree::Error::NoNode(path).into()))
    }

    /// Writes the webhook's progress: after each call, and regularly where there is no webhook.
    pub(super) async fn write_progress<T: Tree>(&mut self, tree: &T) -> Result<(), Error> {
        if !self.webhook.progress_dirty {
            return Ok(());
        }
        let progress = self.state.webhook_queue.progress().clone();
        let (stored, version) = &mut self.state.progress;
        if progress != *stored {
            let writes = JudgeWrites::new(&self.lease).webhook(progress.to_bytes(), *version);
            writes.commit(tree).await?;
            (*stored, *version) = (progress, *version + 1);
        }
        self.webhook.progress_dirty = false;
        Ok(())
    }

    /// Reads those of the changed buckets again that were unreadable. The judge does not overwrite
    /// such buckets and sends no notifications about their components, because it could not record
    /// them for the next judge.
    pub(in crate::heartbeat) async fn reread_frozen<T: Tree>(
        &mut self,
        tree: &T,
        shared: &SharedState,
        changed: &BTreeSet<u16>,
    ) -> Result<(), Error> {
        let numbers: BTreeSet<u16> = changed.intersection(&self.state.frozen).copied().collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let read = store::buckets(tree, numbers.iter().copied()).await?;
        let mut read: HashMap<u16, _> =
            read.into_iter().map(|(number, records, version)| (number, (records, version))).collect();
        for number in numbers {
            let (records, version) = match read.remove(&number) {
                Some((Ok(records), version)) => (records, Some(version)),
                Some((Err(problem), version)) => {
                    error!(%problem, "bucket unreadable");
                    self.state.versions.insert(number, version);
                    continue;
                }
                None => (Vec::new(), None),
            };
            let mut inner = shared.lock();
            inner.stats.unreadable.remove(&number);
            let now = shared.now(&inner);
            let published_again = self.state.unfreeze(number, &records, version, &mut inner.audit, now);
            info!(bucket = number, published_again, "bucket readable again, or removed");
        }
        Ok(())
    }

    async fn trim_journal<T: Tree>(&mut self, tree: &T) -> Result<(), Error> {
        let spare = self.state.journal.spare(self.state.progress.0.done, MAX_WAITING);
        if !spare.is_empty() {
            let mut writes = JudgeWrites::new(&self.lease);
            spare.iter().for_each(|page| writes.delete_journal_page(*page));
            writes.commit(tree).await?;
            self.state.journal.cleared(spare.len());
        }
        Ok(())
    }
}

/// Removes the components of machines that are no longer in the environment.
async fn forget_machines<T: Tree>(tree: &T, shared: &SharedState) -> Result<(), Error> {
    let machines: Vec<Name> = shared.lock().audit.machines();
    if machines.is_empty() {
        return Ok(());
    }
    let present = list_machines(tree).await?;
    let mut inner = shared.lock();
    for name in machines {
        if name.machine().is_some_and(|id| !present.contains(&id)) {
            info!(component = %name, "machine removed; component forgotten");
            inner.audit.forget(&name);
        }
    }
    Ok(())
}
