//! Unreadable buckets. The judge does not overwrite them and sends no notifications about their
//! components, because it could not record them for the next judge. Once such a bucket is readable
//! again or removed, its components are handled like all others.

use std::collections::{BTreeSet, HashMap};

use tracing::{error, info};

use crate::heartbeat::corner;
use crate::heartbeat::notify::Post;
use crate::heartbeat::tracker::Tracker;
use crate::store::Error;
use crate::store::tree::Tree;

impl<T: Tree, P: Post> Tracker<T, P> {
    /// Reads those of the changed buckets again that could not be read before.
    pub(in crate::heartbeat) async fn look_at_unreadable(
        &mut self,
        changed: &BTreeSet<u16>,
    ) -> Result<(), Error> {
        let Some(office) = self.office.as_ref() else { return Ok(()) };
        let numbers: BTreeSet<u16> = changed.intersection(&office.frozen).copied().collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let read = corner::buckets(self.tree(), numbers.iter().copied()).await?;
        let mut read: HashMap<u16, _> =
            read.into_iter().map(|(number, records, version)| (number, (records, version))).collect();
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        for number in numbers {
            let records = match read.remove(&number) {
                Some((Ok(records), version)) => {
                    office.versions.insert(number, version);
                    records
                }
                Some((Err(problem), version)) => {
                    error!(%problem, "components cannot be read");
                    office.versions.insert(number, version);
                    continue;
                }
                None => {
                    office.versions.remove(&number);
                    Vec::new()
                }
            };
            office.frozen.remove(&number);
            let mut inner = self.setting.ears.lock();
            inner.condition.unreadable.remove(&number);
            let now = self.setting.ears.now(&inner);
            let changes = inner.audit.thaw(number, &records, now, &mut office.sequence);
            info!(bucket = number, told_again = changes.len(), "bucket is readable again, or removed");
            office.unpublished.extend(changes);
        }
        Ok(())
    }
}
