//! What the judge keeps in order beside its judgements: the alarm that operators read, machines that are no more, batches and
//! pages that nobody needs, and how far the webhook got.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use crate::heartbeat::corner;
use crate::heartbeat::guard::Course;
use crate::heartbeat::name::Name;
use crate::heartbeat::notify::Post;
use crate::heartbeat::record::Hold;
use crate::heartbeat::tracker::Tracker;
use crate::heartbeat::webhook::MAX_WAITING;
use crate::store::Error;
use crate::store::paths;
use crate::store::tree::{self, Tree, Write};

/// How often it is looked which machines are no more, and which batches nobody needs.
pub(super) const TIDY: Duration = Duration::from_secs(5);

/// The numbers of an outage change with every beat of who comes back; people need not read that fast.
const ALARM_PACE: Duration = Duration::from_secs(3);

/// How long deaths have been held is written in such steps: a hold is longer by one at most with each judge that is lost.
const HELD_STEP_MS: u64 = 10_000;

/// Batches of trackers that are gone are kept this long, for people who look.
const ORPHANS_FOR: Duration = Duration::from_secs(30);

impl<T: Tree, P: Post> Tracker<T, P> {
    /// For operators, who read the store, and for whoever judges next.
    pub(super) async fn write_alarm(&mut self) -> Result<(), Error> {
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let hold = {
            let inner = self.setting.ears.lock();
            let now = self.setting.ears.now(&inner).watched;
            match inner.audit.course(now) {
                Course::Quiet => None,
                Course::Passing => Some(Hold::Passing),
                Course::Holding { for_ms } => {
                    let (silent, alive) = inner.condition.alarm.unwrap_or_default();
                    let for_ms = for_ms - for_ms % HELD_STEP_MS;
                    Some(Hold::Held { silent, alive, for_ms, release: office.release })
                }
            }
        };
        if office.alarm.0 == Some(hold) {
            return Ok(());
        }
        let is_held = |hold: Option<Hold>| matches!(hold, Some(Hold::Held { .. }));
        let other_numbers = is_held(hold) && office.alarm.0.is_some_and(is_held);
        if other_numbers && Instant::now() < office.alarm_at {
            return Ok(());
        }
        let (path, version) = (paths::heartbeat_alarm(), office.alarm.1);
        let data = serde_json::json!(hold).to_string().into_bytes();
        let writes = vec![office.lead.fence(), Write::SetIfVersion { path, data, version }];
        self.setting.tree.write(writes).await?;
        office.alarm = (Some(hold), version + 1);
        office.alarm_at = Instant::now() + ALARM_PACE;
        Ok(())
    }

    /// Drops machines that were terminated, batches and pages that nobody needs, and writes down how far the webhook got.
    pub(super) async fn tidy(&mut self) -> Result<(), Error> {
        self.check_records().await?;
        let orphans = self.orphans().await?;
        let machines: Vec<Name> = self.ears().lock().audit.machines();
        let there: Option<BTreeSet<String>> = if machines.is_empty() {
            None
        } else {
            Some(self.tree().children(&paths::machines()).await?.into_iter().collect())
        };
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        office.tidy_at = Instant::now() + TIDY;
        if let Some(there) = there {
            let gone =
                machines.iter().filter(|name| name.machine().is_some_and(|id| !there.contains(&id.key())));
            let mut inner = self.setting.ears.lock();
            for name in gone {
                info!(component = %name, "terminated; no longer watched");
                inner.audit.forget(name);
            }
        }
        let now = Instant::now();
        office.orphans.retain(|name, _| orphans.contains(name));
        for name in orphans {
            office.orphans.entry(name).or_insert(now + ORPHANS_FOR);
        }
        let mut writes = vec![office.lead.fence()];
        let old = office.orphans.iter().filter(|(_, at)| now >= **at).map(|(name, _)| name);
        for (replica, number) in old.filter_map(|name| paths::heartbeat_batch_of(name)).take(100) {
            // Whatever it is by now: nobody needs it.
            writes.push(Write::Delete { path: paths::heartbeat_batch(replica, number) });
        }
        if writes.len() > 1 {
            self.setting.tree.write(writes).await?;
        }
        if let Some(office) = self.office.as_mut() {
            office.note_hooked = true;
        }
        self.trim_journal().await
    }

    /// Fails if a bucket or the newest page that this judge wrote is no longer in the store. The
    /// tracker then reads everything again, and the tracker that becomes the judge writes the
    /// missing records.
    async fn check_records(&self) -> Result<(), Error> {
        let Some(office) = self.office.as_ref() else { return Ok(()) };
        let names = self.tree().children(&paths::heartbeat_buckets()).await?;
        let there: HashSet<u16> = names.iter().filter_map(|name| name.parse().ok()).collect();
        let page = corner::newest_page(self.tree()).await?;
        let missing_page =
            office.journal.newest().filter(|newest| page != Some(*newest)).map(paths::heartbeat_page);
        let missing_bucket = office.versions.keys().find(|number| !there.contains(number));
        let missing = missing_page.or(missing_bucket.map(|number| paths::heartbeat_bucket(*number)));
        missing.map_or(Ok(()), |path| Err(tree::Error::NoNode(path).into()))
    }

    /// How far the webhook got: after each call, and now and then where there is no webhook.
    pub(super) async fn note_hooked(&mut self) -> Result<(), Error> {
        let Some(office) = self.office.as_mut().filter(|office| office.note_hooked) else { return Ok(()) };
        let (note, version) = (office.hooks.note().clone(), office.noted.1);
        if note != office.noted.0 {
            let (path, data) = (paths::heartbeat_webhook(), note.to_bytes());
            let writes = vec![office.lead.fence(), Write::SetIfVersion { path, data, version }];
            self.setting.tree.write(writes).await?;
            office.noted = (note, version + 1);
        }
        office.note_hooked = false;
        Ok(())
    }

    /// Pages that nobody will ask for.
    async fn trim_journal(&mut self) -> Result<(), Error> {
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let spare = office.journal.spare(office.noted.0.done, MAX_WAITING);
        if !spare.is_empty() {
            let mut writes = vec![office.lead.fence()];
            writes.extend(spare.iter().map(|page| Write::Delete { path: paths::heartbeat_page(*page) }));
            self.setting.tree.write(writes).await?;
            office.journal.cleared(spare.len());
        }
        Ok(())
    }
}
