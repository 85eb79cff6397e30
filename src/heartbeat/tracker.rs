//! A tracker's life beside its memory: writes what was heard to the store in batches, follows what the others heard, and
//! tries to become the judge (`judge`). It loses the store and finds it again; meanwhile beats are heard all the same.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{error, info, warn};

use super::corner;
use super::ears::Ears;
use super::judge::Office;
use super::notify::Post;
use super::record::{Batch, Beat};
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::election::{Attempt, Leadership, Seat};
use crate::store::paths::{self, HeartbeatNode};
use crate::store::tree::{self, Event, Feed as _, Tree, Write};

/// How often the judge looks; everybody else has less to look at.
const TICK: Duration = Duration::from_millis(50);
const IDLE_TICK: Duration = Duration::from_millis(500);

/// How often the seat is tried, in case an event is lost.
const SEEK: Duration = Duration::from_secs(2);

/// How long after a failure of the store the next attempt is made.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// Events are gathered this long, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(2);

/// Batches in one write; the largest still leave it below the store's limit.
const BATCHES_A_WRITE: usize = 12;

/// What the last words may take.
const FAREWELL: Duration = Duration::from_secs(3);

/// What a tracker is given.
#[derive(Debug)]
pub struct Setting<T, P> {
    pub tree: T,
    pub roles: Roles,
    pub ears: Arc<Ears>,
    pub post: Arc<P>,
    /// Signs what webhooks get; without one they get nothing.
    pub webhook_secret: Option<Arc<[u8]>>,
    /// Spreads retries.
    pub random: fn() -> u64,
}

#[derive(Debug)]
pub struct Tracker<T, P> {
    pub(super) setting: Setting<T, P>,
    pub(super) id: String,
    /// The number of our next batch.
    number: u64,
    /// Being written, or written without an answer: repeated word for word until there is one.
    unconfirmed: Vec<(u64, Vec<u8>)>,
    /// Generation of the newest beats in `unconfirmed`.
    unconfirmed_generation: u64,
    /// Our batches in the store, oldest first, with when they were written.
    written: VecDeque<(u64, u64)>,
    /// The judge's newest question, and the newest that we have answered.
    question: u64,
    answered: u64,
    followed: HashMap<String, Followed>,
    pub(super) replicas: BTreeSet<String>,
    pub(super) office: Option<Office>,
    flush_at: Instant,
    seek_at: Instant,
}

/// What is known of another tracker.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Followed {
    next: u64,
    pub(super) answers: u64,
    farewell: bool,
}

/// Where to look again.
#[derive(Debug, Default)]
struct Noted {
    everything: bool,
    leader: bool,
    params: bool,
    maintenance: bool,
    release: bool,
    question: bool,
    replicas: bool,
    batches: BTreeSet<String>,
    buckets: BTreeSet<u16>,
}

impl Noted {
    fn add(&mut self, event: &Event) {
        match event {
            Event::Everything => self.everything = true,
            Event::Changed(path) => match paths::heartbeat_node(path) {
                HeartbeatNode::Leader => self.leader = true,
                HeartbeatNode::Params => self.params = true,
                HeartbeatNode::Maintenance => self.maintenance = true,
                HeartbeatNode::Release => self.release = true,
                HeartbeatNode::Question => self.question = true,
                HeartbeatNode::Replica => self.replicas = true,
                HeartbeatNode::Batch(name) => drop(self.batches.insert(name)),
                HeartbeatNode::Bucket(number) => drop(self.buckets.insert(number)),
                HeartbeatNode::Other => {}
            },
        }
    }
}

/// How old the beats of a batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Age {
    /// It was written just now.
    AsWritten,
    /// It was there before us, for how long only the calendar knows. What was judged since then stands.
    ByCalendar,
}

enum Ended {
    Stopped,
    /// The connection was lost for a while: nothing that we know of the store is certain.
    Interrupted,
}

impl<T: Tree, P: Post> Tracker<T, P> {
    /// # Errors
    /// If the system has no randomness for a name.
    pub fn new(setting: Setting<T, P>) -> Result<Self, Error> {
        let id = Leadership::token()?;
        let now = Instant::now();
        Ok(Self {
            setting,
            id,
            number: 0,
            unconfirmed: Vec::new(),
            unconfirmed_generation: 0,
            written: VecDeque::new(),
            question: 0,
            answered: 0,
            followed: HashMap::new(),
            replicas: BTreeSet::new(),
            office: None,
            flush_at: now,
            seek_at: now,
        })
    }

    /// Runs until `stop` says so, and then leaves in order.
    ///
    /// # Errors
    /// What no waiting cures: wrong credentials, an environment that is not there.
    pub async fn run(&mut self, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        loop {
            let ended = tokio::select! {
                ended = self.session() => ended,
                _ = stop.wait_for(|stop| *stop) => Ok(Ended::Stopped),
            };
            match ended {
                Ok(Ended::Stopped) => {
                    if timeout(FAREWELL, self.leave()).await.is_err() {
                        warn!("the store does not take the last words");
                    }
                    return Ok(());
                }
                Ok(Ended::Interrupted) => {}
                Err(Error::Tree(err)) if err.is_retryable() || err.is_conflict() => {
                    warn!(error = %err, "store lost");
                }
                Err(err) => return Err(err),
            }
            self.step_down();
            self.ears().lock().condition.store = false;
            tokio::select! {
                () = tokio::time::sleep(STORE_PAUSE) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            }
        }
    }

    pub(super) fn ears(&self) -> &Ears {
        &self.setting.ears
    }

    pub(super) fn tree(&self) -> &T {
        &self.setting.tree
    }

    /// As long as the store is there. Dropped at any point, it leaves nothing half-known: the next one begins by reading
    /// everything.
    async fn session(&mut self) -> Result<Ended, Error> {
        corner::ensure(self.tree(), &self.setting.roles).await?;
        let mut feed = self.tree().watch(&paths::heartbeat()).await?;
        feed.next().await?;
        self.register().await?;
        self.read_everything().await?;
        {
            let mut inner = self.ears().lock();
            inner.condition.store = true;
            inner.condition.loaded = true;
        }
        self.ears().urgent.notify_one();
        let mut noted = Noted { leader: true, ..Noted::default() };
        loop {
            let tick = Instant::now() + if self.office.is_some() { TICK } else { IDLE_TICK };
            let mut flush = false;
            let ears = Arc::clone(&self.setting.ears);
            tokio::select! {
                event = feed.next() => {
                    noted.add(&event?);
                    let end = Instant::now() + GATHER;
                    while let Ok(event) = tokio::time::timeout_at(end, feed.next()).await {
                        noted.add(&event?);
                    }
                }
                () = ears.urgent.notified() => flush = true,
                () = sleep_until(self.flush_at) => flush = true,
                () = sleep_until(tick) => {}
                () = self.calls_done() => {}
            }
            let noted = std::mem::take(&mut noted);
            if noted.everything {
                return Ok(Ended::Interrupted);
            }
            let released = noted.release;
            let leader = noted.leader;
            self.look(noted).await?;
            if flush || self.question > self.answered {
                self.flush(false).await?;
            }
            if self.office.is_some() {
                self.preside(released).await?;
            } else if leader || Instant::now() >= self.seek_at {
                self.seek_office().await?;
            }
        }
    }

    async fn register(&self) -> Result<(), Error> {
        let path = paths::heartbeat_replica(&self.id);
        let mut writes = Vec::new();
        if self.tree().exists(&path).await? {
            // Of a session that has ended, or of this one before an answer was lost.
            writes.push(Write::DeleteIfVersion { path: path.clone(), version: 0 });
        }
        let acl = self.setting.roles.controllers();
        writes.push(Write::Create { path, data: Vec::new(), acl, ephemeral: true });
        self.tree().write(writes).await?;
        Ok(())
    }

    async fn read_everything(&mut self) -> Result<(), Error> {
        let was_alone = self.replicas.iter().eq([&self.id]);
        self.tree().sync().await?;
        let batches = corner::batch_names(self.tree()).await?;
        let buckets = corner::all_buckets(self.tree()).await?;
        self.adopt(buckets);
        let noted =
            Noted { params: true, maintenance: true, question: true, replicas: true, ..Noted::default() };
        self.follow(batches, Age::ByCalendar).await?;
        self.look(noted).await?;
        if !was_alone {
            // While nothing could be read, beats of others may have come and gone.
            self.restart_windows();
        }
        Ok(())
    }

    fn restart_windows(&self) {
        let mut inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        inner.audit.restart_windows(now);
    }

    /// Reads again what was noted. Batches come before replicas: a farewell is heard before its sender is missed.
    async fn look(&mut self, noted: Noted) -> Result<(), Error> {
        if noted.params {
            let (params, _) = corner::params(self.tree()).await?;
            let mut inner = self.ears().lock();
            let now = self.ears().now(&inner).watched;
            inner.audit.configure(now, &params);
            inner.params = params;
        }
        if noted.maintenance {
            let (until, _) = corner::maintenance(self.tree()).await?;
            let mut inner = self.ears().lock();
            let now = self.ears().now(&inner).watched;
            inner.audit.set_maintenance(now, until);
        }
        if noted.question {
            (self.question, _) = corner::number(self.tree(), &paths::heartbeat_question()).await?;
        }
        if !noted.batches.is_empty() {
            self.follow(noted.batches.into_iter().collect(), Age::AsWritten).await?;
        }
        if noted.replicas {
            let there = corner::replicas(self.tree()).await?;
            self.miss(there);
        }
        if self.office.is_none() && !noted.buckets.is_empty() {
            let buckets = corner::buckets(self.tree(), noted.buckets).await?;
            self.adopt(buckets);
        }
        Ok(())
    }

    /// Takes over what the judge wrote.
    pub(super) fn adopt(&self, buckets: Vec<corner::Bucket>) {
        for (number, records, _) in buckets {
            match records {
                Ok(records) => {
                    let mut inner = self.ears().lock();
                    let now = self.ears().now(&inner).watched;
                    let changes = inner.audit.adopt(number, &records, now);
                    drop(inner);
                    self.ears().publish(&changes);
                }
                Err(problem) => error!(%problem, "components cannot be read"),
            }
        }
    }

    async fn follow(&mut self, names: Vec<String>, age: Age) -> Result<(), Error> {
        let fresh: Vec<String> = names
            .into_iter()
            .filter(|name| match paths::heartbeat_batch_of(name) {
                Some((replica, number)) => {
                    replica != self.id
                        && self.followed.get(replica).is_none_or(|followed| number >= followed.next)
                }
                None => false,
            })
            .collect();
        let batches = corner::batches(self.tree(), &fresh).await?;
        for (name, batch) in fresh.iter().zip(batches) {
            if let Some((replica, number)) = paths::heartbeat_batch_of(name) {
                self.learn(replica, number, batch, age);
            }
        }
        Ok(())
    }

    fn learn(&mut self, replica: &str, number: u64, batch: Option<Batch>, age: Age) {
        let known = self.followed.contains_key(replica);
        let followed = self.followed.entry(replica.to_owned()).or_default();
        let missed = known && (number > followed.next || batch.is_none());
        followed.next = followed.next.max(number + 1);
        let mut inner = self.setting.ears.lock();
        let now = self.setting.ears.now(&inner);
        if missed {
            // It was gone before we had read it: whoever beat in it must not suffer.
            inner.audit.restart_windows(now.watched);
        }
        let Some(batch) = batch else { return };
        followed.answers = followed.answers.max(batch.answers);
        followed.farewell = batch.farewell;
        let since = match age {
            Age::AsWritten => 0,
            Age::ByCalendar => now.wall.saturating_sub(batch.at),
        };
        for beat in &batch.beats {
            let beat = Beat { age_ms: beat.age_ms + since, ..*beat };
            let outdated = age == Age::ByCalendar
                && inner.audit.changed_since(&beat.name, now.wall - beat.age_ms.min(now.wall));
            if !outdated && inner.audit.beat_elsewhere(now.watched, &beat).is_err() {
                inner.condition.refused_beats += 1;
            }
        }
    }

    /// Who is gone without a farewell may have heard what nobody else knows.
    fn miss(&mut self, there: BTreeSet<String>) {
        let gone: Vec<String> =
            self.replicas.iter().filter(|id| **id != self.id && !there.contains(*id)).cloned().collect();
        for id in gone {
            let in_order = self.followed.get(&id).is_some_and(|followed| followed.farewell);
            if !in_order {
                warn!(replica = %id, "a tracker was lost; windows start again");
                self.restart_windows();
            }
        }
        self.replicas = there;
    }

    pub(super) fn has_answered(&self, replica: &str, question: u64) -> bool {
        self.followed.get(replica).is_some_and(|followed| followed.answers >= question)
    }

    /// Batches of trackers that are no more, for the judge to clear away.
    pub(super) async fn orphans(&self) -> Result<Vec<String>, Error> {
        let mut names = corner::batch_names(self.tree()).await?;
        names.retain(|name| match paths::heartbeat_batch_of(name) {
            Some((replica, number)) => {
                !self.replicas.contains(replica)
                    && self.followed.get(replica).is_some_and(|followed| number < followed.next)
            }
            None => false,
        });
        Ok(names)
    }

    /// Writes what was heard since the last time: one write, whatever the number of components.
    async fn flush(&mut self, farewell: bool) -> Result<(), Error> {
        self.write_unconfirmed().await?;
        let (mut beats, generation) = self.ears().take_unflushed();
        let (now, flush_ms) = {
            let inner = self.ears().lock();
            (self.ears().now(&inner), inner.params.flush_ms())
        };
        self.flush_at = Instant::now() + Duration::from_millis(flush_ms);
        let answers = self.question;
        if beats.is_empty() && (farewell || answers > self.answered) {
            beats.push(Vec::new());
        }
        let last = beats.len().saturating_sub(1);
        for (at, beats) in beats.into_iter().enumerate() {
            // Only the last of several says that all was said.
            let answers = if at == last { answers } else { 0 };
            let batch = Batch { answers, farewell: farewell && at == last, at: now.wall, beats };
            self.unconfirmed.push((self.number, batch.to_bytes()));
            self.number += 1;
        }
        self.unconfirmed_generation = generation;
        self.write_unconfirmed().await?;
        self.answered = self.answered.max(answers);
        Ok(())
    }

    async fn write_unconfirmed(&mut self) -> Result<(), Error> {
        while !self.unconfirmed.is_empty() {
            let count = self.unconfirmed.len().min(BATCHES_A_WRITE);
            let (now, keep) = {
                let inner = self.ears().lock();
                let keep = (inner.params.warn_ms + 2 * inner.params.flush_ms()).max(20_000);
                (self.ears().now(&inner).watched, keep)
            };
            let old = self.written.iter().take(BATCHES_A_WRITE).filter(|(_, at)| at + keep < now).count();
            let mut writes = vec![Write::Check { path: paths::heartbeat_replica(&self.id), version: 0 }];
            for (number, bytes) in &self.unconfirmed[..count] {
                let path = paths::heartbeat_batch(&self.id, *number);
                writes.push(Write::create(path, bytes.clone(), self.setting.roles.controllers()));
            }
            for (number, _) in self.written.iter().take(old) {
                writes.push(Write::DeleteIfVersion {
                    path: paths::heartbeat_batch(&self.id, *number),
                    version: 0,
                });
            }
            self.ears().lock().condition.store_writes += 1;
            let first = paths::heartbeat_batch(&self.id, self.unconfirmed[0].0);
            match self.setting.tree.write(writes).await {
                Ok(()) => {
                    self.written.drain(..old);
                }
                // The write before this one was applied, all of it, and its answer lost.
                Err(tree::Error::NodeExists(path)) if path == first => {}
                // Ours, but no longer there: nothing that could be deleted.
                Err(tree::Error::NoNode(path)) if path != paths::heartbeat_replica(&self.id) => {
                    self.written.clear();
                    continue;
                }
                Err(err) => return Err(err.into()),
            }
            self.written.extend(self.unconfirmed.drain(..count).map(|(number, _)| (number, now)));
        }
        self.setting.ears.is_safe(self.unconfirmed_generation);
        Ok(())
    }

    async fn seek_office(&mut self) -> Result<(), Error> {
        self.seek_at = Instant::now() + SEEK;
        let roles = &self.setting.roles;
        match Leadership::attempt_at(Seat::heartbeat(), self.tree(), roles, &self.id).await? {
            Attempt::Taken => Ok(()),
            Attempt::Won(lead) => {
                info!("judging");
                // Events on the way may be about what the judge before us wrote.
                let known = self.replicas.clone();
                self.tree().sync().await?;
                let batches = corner::batch_names(self.tree()).await?;
                self.follow(batches, Age::AsWritten).await?;
                let there = corner::replicas(self.tree()).await?;
                self.miss(there);
                let alone = known.iter().all(|id| *id == self.id);
                self.take_office(lead, alone).await
            }
        }
    }

    /// Says good-bye, so that nobody need wait for us or doubt what we heard.
    async fn leave(&mut self) {
        let said = self.flush(true).await;
        if let Err(problem) = said {
            warn!(%problem, "left without a word");
            return;
        }
        if let Some(office) = &self.office {
            // The lock ends with the session in any case.
            office.resign(self.tree()).await;
        }
        let gone = Write::DeleteIfVersion { path: paths::heartbeat_replica(&self.id), version: 0 };
        // As above.
        let _ = self.tree().write(vec![gone]).await;
        self.step_down();
    }

    pub(super) fn step_down(&mut self) {
        if self.office.take().is_some() {
            info!("no longer judging");
        }
        self.ears().revoke();
        let mut inner = self.ears().lock();
        inner.audit.leave_office();
        inner.condition.judging = false;
        inner.condition.alarm = None;
    }
}
