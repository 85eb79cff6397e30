//! Unreadable buckets. The judge does not overwrite them and sends no notifications about their
//! components, because it could not record them for the next judge. Once such a bucket is readable
//! again or removed, its components are handled like all others.

use std::collections::{BTreeSet, HashMap};

use tracing::{error, info};

use super::Judge;
use crate::heartbeat::store;
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::store::Error;
use crate::store::tree::Tree;

impl Judge {
    /// Reads those of the changed buckets again that were unreadable.
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
}
