//! The judge's part of a tracker: asks everybody what they have heard before it calls anybody silent, writes each change to
//! the store before anybody is told of it, and sees to it that everybody is told. Every write names the judge's epoch.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::{error, info, warn};

use super::audit::{Change, Sequence};
use super::corner;
use super::name::Name;
use super::notify::{self, Hooked, Post};
use super::pending::{Delivery, Outcome, pause_ms};
use super::record::Told;
use super::tracker::Tracker;
use super::tracker::look::readable;
use crate::store::Error;
use crate::store::election::{LEASE, Leadership, Seat};
use crate::store::paths;
use crate::store::tree::{self, Tree, Write};

/// Changes that one round of calls is about, at most.
const MAX_ROUND: usize = 50_000;

/// Changes that a webhook gets before it is written down how far it got.
const HOOK_ROUND: usize = 100;

/// Bytes of buckets in one write, with room for the rest of it.
const WRITE_BYTES: usize = 800_000;

/// How often it is looked which machines are no more, and which batches nobody needs.
const TIDY: Duration = Duration::from_secs(5);

/// Batches of trackers that are gone are kept this long, for people who look.
const ORPHANS_FOR: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Office {
    lead: Leadership,
    sequence: Sequence,
    /// The number of the newest question and the version of its znode.
    question: (u64, i32),
    /// A question that not all have answered: since when it is asked.
    asked_at: Option<u64>,
    /// Up to here, everything that anybody heard is known.
    covered: u64,
    renew_at: Instant,
    tidy_at: Instant,
    /// Versions of the buckets in the store.
    versions: HashMap<u16, i32>,
    /// Buckets that cannot be read: not overwritten, whatever happens to their components.
    frozen: BTreeSet<u16>,
    /// Judged, and not in the store yet.
    unpublished: Vec<Change>,
    manager: Calls<Outcome>,
    webhook: Calls<Hooked>,
    /// What the webhook has yet to hear, oldest first.
    hooks: VecDeque<Change>,
    hooked: (u64, i32),
    /// What the store has of a mass outage, if that can be read, and the version of its znode.
    alarm: (Option<Option<(usize, usize)>>, i32),
    orphans: HashMap<String, Instant>,
}

/// Rounds of calls to one server, one at a time.
#[derive(Debug)]
struct Calls<R> {
    running: Option<JoinHandle<R>>,
    failures: u32,
    not_before: Instant,
}

impl<R> Calls<R> {
    fn new() -> Self {
        Self { running: None, failures: 0, not_before: Instant::now() }
    }

    fn is_free(&self) -> bool {
        self.running.is_none() && Instant::now() >= self.not_before
    }

    /// Waits for the round that runs; for ever if none does. Cancel-safe.
    async fn done(&mut self) -> Option<R> {
        match &mut self.running {
            Some(running) => {
                let ended = running.await.ok();
                self.running = None;
                ended
            }
            None => std::future::pending().await,
        }
    }

    fn rate(&mut self, failed: bool, random: u64) {
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        if failed {
            self.not_before = Instant::now() + Duration::from_millis(pause_ms(self.failures, random));
        }
    }
}

impl<R> Drop for Calls<R> {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

impl Office {
    /// Gives the lock back. It ends with the session in any case. Nobody holds deaths back who does not judge, so the alarm
    /// goes with it.
    pub(super) async fn resign<T: Tree>(&self, tree: &T) {
        let mut writes = vec![self.lead.fence()];
        if self.alarm.0.flatten().is_some() {
            let (path, version) = (paths::heartbeat_alarm(), self.alarm.1);
            writes.push(Write::SetIfVersion { path, data: b"null".to_vec(), version });
        }
        writes.push(Write::DeleteIfVersion { path: Seat::heartbeat().leader, version: 0 });
        // Whoever comes next waits a little longer if this fails.
        let _ = tree.write(writes).await;
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    /// Becomes the judge: everything is read again, as the judge before left it.
    pub(super) async fn take_office(&mut self, lead: Leadership, alone: bool) -> Result<(), Error> {
        let buckets = corner::all_buckets(self.tree()).await?;
        let (question, version) = corner::number(self.tree(), &paths::heartbeat_question()).await?;
        // The next one must be newer than all that were answered, or old answers would count for it.
        let question = (readable(question)?.unwrap_or_else(|| self.newest_answered()), version);
        let (hooked, version) = corner::number(self.tree(), &paths::heartbeat_webhook()).await?;
        // Rather told twice than not at all.
        let hooked = (readable(hooked)?.unwrap_or(0), version);
        let (alarm, version) = corner::alarm(self.tree()).await?;
        let alarm = (readable(alarm)?, version);
        let versions = buckets.iter().map(|(number, _, version)| (*number, *version)).collect();
        let frozen: BTreeSet<u16> =
            buckets.iter().filter(|(_, records, _)| records.is_err()).map(|(number, ..)| *number).collect();
        self.adopt(buckets);
        let mut inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        inner.audit.take_office(now);
        inner.condition.judging = true;
        let hooks = inner.audit.changes_since(hooked.0).into();
        drop(inner);
        info!(epoch = lead.epoch(), alone, unreadable = frozen.len(), "took office");
        self.ears().lend(LEASE);
        self.office = Some(Office {
            sequence: Sequence::of_epoch(lead.epoch()),
            lead,
            question,
            asked_at: None,
            covered: 0,
            renew_at: Instant::now() + LEASE / 3,
            tidy_at: Instant::now() + TIDY,
            versions,
            frozen,
            unpublished: Vec::new(),
            manager: Calls::new(),
            webhook: Calls::new(),
            hooks,
            hooked,
            alarm,
            orphans: HashMap::new(),
        });
        Ok(())
    }

    /// One look of the judge.
    pub(super) async fn preside(&mut self, released: bool) -> Result<(), Error> {
        if !self.renew().await? {
            self.step_down();
            return Ok(());
        }
        if released {
            let mut inner = self.ears().lock();
            let now = self.ears().now(&inner).watched;
            inner.audit.release(now);
        }
        match self.rule().await {
            Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::heartbeat_epoch() => {
                warn!("another judges");
                self.step_down();
                Ok(())
            }
            done => done,
        }
    }

    async fn renew(&mut self) -> Result<bool, Error> {
        let Some(office) = self.office.as_mut() else { return Ok(false) };
        if Instant::now() < office.renew_at {
            return Ok(true);
        }
        let asked = Instant::now();
        if !office.lead.confirm(&self.setting.tree).await? {
            return Ok(false);
        }
        office.renew_at = Instant::now() + LEASE / 3;
        self.setting.ears.lend(LEASE.saturating_sub(asked.elapsed()));
        Ok(true)
    }

    async fn rule(&mut self) -> Result<(), Error> {
        self.judge();
        self.write_buckets().await?;
        self.write_alarm().await?;
        if self.question_is_needed() {
            self.ask().await?;
        }
        self.start_calls();
        let tidy = self.office.as_ref().is_some_and(|office| Instant::now() >= office.tidy_at);
        if tidy { self.tidy().await } else { Ok(()) }
    }

    /// Others that may have heard what we have not.
    fn others(&self) -> impl Iterator<Item = &String> {
        self.replicas.iter().filter(|id| **id != self.id)
    }

    fn judge(&mut self) {
        let alone = self.others().next().is_none();
        let answered = |question: u64| self.others().all(|id| self.has_answered(id, question));
        let all_answered = self.office.as_ref().is_some_and(|office| answered(office.question.0));
        let Some(office) = self.office.as_mut() else { return };
        if let Some(at) = office.asked_at.take_if(|_| all_answered) {
            office.covered = office.covered.max(at);
        }
        let mut inner = self.setting.ears.lock();
        let now = self.setting.ears.now(&inner);
        if alone {
            office.covered = now.watched;
        }
        let verdict = inner.audit.judge(now, office.covered, &mut office.sequence);
        if let Some((silent, alive)) = verdict.alarm {
            inner.condition.alarm = verdict.alarm;
            error!(silent, alive, "mass outage: deaths are held");
        } else if !inner.audit.is_holding() {
            inner.condition.alarm = None;
        }
        office.unpublished.extend(verdict.changes);
    }

    fn question_is_needed(&self) -> bool {
        let Some(office) = self.office.as_ref().filter(|office| office.asked_at.is_none()) else {
            return false;
        };
        let inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        office.covered < now && inner.audit.has_due(now) && self.others().next().is_some()
    }

    /// Nobody is called silent before everybody has said what they heard up to now.
    async fn ask(&mut self) -> Result<(), Error> {
        let now = {
            let inner = self.ears().lock();
            self.ears().now(&inner).watched
        };
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let (number, version) = office.question;
        let data = (number + 1).to_string().into_bytes();
        let path = paths::heartbeat_question();
        self.setting.ears.lock().condition.store_writes += 1;
        let writes = vec![office.lead.fence(), Write::SetIfVersion { path, data, version }];
        self.setting.tree.write(writes).await?;
        office.question = (number + 1, version + 1);
        office.asked_at = Some(now);
        Ok(())
    }

    /// Writes every bucket with a change in it, then tells who listens.
    async fn write_buckets(&mut self) -> Result<(), Error> {
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let mut rest: VecDeque<(u16, Vec<u8>)> = {
            let inner = self.setting.ears.lock();
            let now = self.setting.ears.now(&inner);
            let dirty = inner.audit.dirty().iter().filter(|number| !office.frozen.contains(number));
            dirty.map(|number| (*number, inner.audit.bucket_bytes(*number, now))).collect()
        };
        while !rest.is_empty() {
            let mut writes = vec![office.lead.fence()];
            let mut written = Vec::new();
            let mut bytes = 0;
            while let Some((number, data)) = rest.front() {
                bytes += data.len() + 300;
                if bytes > WRITE_BYTES && !written.is_empty() {
                    break;
                }
                written.push(*number);
                let path = paths::heartbeat_bucket(*number);
                writes.push(match office.versions.get(number) {
                    Some(version) => Write::SetIfVersion { path, data: data.clone(), version: *version },
                    None => Write::create(path, data.clone(), self.setting.roles.controllers()),
                });
                rest.pop_front();
            }
            self.setting.ears.lock().condition.store_writes += 1;
            self.setting.tree.write(writes).await?;
            let mut inner = self.setting.ears.lock();
            for number in written {
                office.versions.entry(number).and_modify(|version| *version += 1).or_insert(0);
                inner.audit.written(number);
            }
        }
        let changes = std::mem::take(&mut office.unpublished);
        self.setting.ears.publish(&changes);
        office.hooks.extend(changes);
        Ok(())
    }

    /// For operators, who read the store.
    async fn write_alarm(&mut self) -> Result<(), Error> {
        let alarm = self.ears().lock().condition.alarm;
        let Some(office) = self.office.as_mut().filter(|office| office.alarm.0 != Some(alarm)) else {
            return Ok(());
        };
        let (path, version) = (paths::heartbeat_alarm(), office.alarm.1);
        let data = serde_json::json!(alarm).to_string().into_bytes();
        let writes = vec![office.lead.fence(), Write::SetIfVersion { path, data, version }];
        self.setting.tree.write(writes).await?;
        office.alarm = (Some(alarm), version + 1);
        Ok(())
    }

    fn start_calls(&mut self) {
        let Some(office) = self.office.as_mut() else { return };
        let ears = &self.setting.ears;
        let (params, pending) = {
            let inner = ears.lock();
            let params = inner.params.clone();
            let wanted = !params.no_state_manager && !params.sm_url.is_empty() && office.manager.is_free();
            let now = ears.now(&inner);
            let pending = if wanted { inner.audit.pending(now, MAX_ROUND) } else { Vec::new() };
            (params, pending)
        };
        let limit = Duration::from_millis(params.sm_timeout_ms);
        if !pending.is_empty() {
            let (post, ears) = (Arc::clone(&self.setting.post), Arc::clone(ears));
            let round = notify::deliver(post, ears, Delivery::of(&pending), params.sm_url, limit);
            office.manager.running = Some(tokio::spawn(round));
        }
        if params.webhook_url.is_empty() {
            // Who comes later hears of what happens then.
            if let Some(last) = office.hooks.drain(..).next_back() {
                office.hooked.0 = last.sequence;
            }
        } else if let Some(secret) = self.setting.webhook_secret.clone().filter(|_| office.webhook.is_free())
        {
            let changes: Vec<Change> = office.hooks.iter().take(HOOK_ROUND).copied().collect();
            if !changes.is_empty() {
                let (post, ears) = (Arc::clone(&self.setting.post), Arc::clone(&self.setting.ears));
                let round = notify::hook(post, ears, changes, params.webhook_url, secret, limit);
                office.webhook.running = Some(tokio::spawn(round));
            }
        }
    }

    /// Waits until a round of calls is over and takes in what came of it. Cancel-safe.
    pub(super) async fn calls_done(&mut self) {
        let Some(office) = self.office.as_mut() else { return std::future::pending().await };
        tokio::select! {
            outcome = office.manager.done() => self.told(outcome),
            hooked = office.webhook.done() => self.was_hooked(hooked),
        }
    }

    /// A round that came to no end is one that failed.
    fn told(&mut self, outcome: Option<Outcome>) {
        let Some(office) = self.office.as_mut() else { return };
        let outcome = outcome.unwrap_or(Outcome { failed: true, ..Outcome::default() });
        office.manager.rate(outcome.failed, (self.setting.random)());
        let mut inner = self.setting.ears.lock();
        inner.condition.manager_failures = office.manager.failures;
        for (name, sequence) in &outcome.told {
            inner.audit.tell(name, *sequence, Told::Yes);
        }
        for (name, sequence) in &outcome.refused {
            warn!(component = %name, "the state manager refuses this component; set aside");
            inner.audit.tell(name, *sequence, Told::Refused);
        }
    }

    fn was_hooked(&mut self, hooked: Option<Hooked>) {
        let Some(office) = self.office.as_mut() else { return };
        let hooked = hooked.unwrap_or(Hooked { failed: true, ..Hooked::default() });
        office.webhook.rate(hooked.failed, (self.setting.random)());
        self.setting.ears.lock().condition.webhook_failures = office.webhook.failures;
        let last = office.hooks.drain(..hooked.done.min(office.hooks.len())).next_back();
        if let Some(last) = last {
            office.hooked.0 = last.sequence;
            // Written down with the next tidying, or at once if there is no more to tell.
            if office.hooks.is_empty() {
                office.tidy_at = Instant::now();
            }
        }
    }

    /// Drops machines that were terminated, batches that nobody needs, and writes down how far the webhook got.
    async fn tidy(&mut self) -> Result<(), Error> {
        let orphans = self.orphans().await?;
        let machines: Vec<Name> = self.ears().lock().audit.machines();
        let there: Option<BTreeSet<String>> = if machines.is_empty() {
            None
        } else {
            Some(self.tree().children(&paths::machines()).await?.into_iter().collect())
        };
        let (stored, version) = corner::number(self.tree(), &paths::heartbeat_webhook()).await?;
        let stored = (stored.unwrap_or(0), version);
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
        if stored.0 < office.hooked.0 {
            let data = office.hooked.0.to_string().into_bytes();
            writes.push(Write::SetIfVersion { path: paths::heartbeat_webhook(), data, version: stored.1 });
        }
        if writes.len() > 1 {
            self.setting.tree.write(writes).await?;
        }
        Ok(())
    }
}
