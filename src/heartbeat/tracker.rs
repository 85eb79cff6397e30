//! A tracker's life beside its memory: writes what was heard to the store in batches, follows what the others heard, and
//! tries to become the judge (`judge`). It loses the store and finds it again; meanwhile beats are heard all the same.

mod flush;
pub(super) mod look;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use self::flush::Unconfirmed;
use self::look::{Age, Noted};
use super::corner;
use super::ears::Ears;
use super::judge::Office;
use super::notify::Post;
use super::table::{HERE, Via};
use crate::model::planted::{Bug, planted};
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::election::{Attempt, Leadership, Seat};
use crate::store::paths;
use crate::store::tree::{Feed as _, Tree, Write};

/// How often the judge looks; everybody else has less to look at.
const TICK: Duration = Duration::from_millis(50);
const IDLE_TICK: Duration = Duration::from_millis(500);

/// How often the seat is tried, in case an event is lost.
const SEEK: Duration = Duration::from_secs(2);

/// How long after a failure of the store the next attempt is made.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// Events are gathered this long, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(2);

/// What the last words may take.
const FAREWELL: Duration = Duration::from_secs(3);

/// How much of that calls may take that are on their way.
const LAST_CALLS: Duration = Duration::from_millis(1_500);

/// What a tracker is given.
#[derive(Debug)]
pub struct Setting<T, P> {
    pub tree: T,
    pub roles: Roles,
    pub ears: Arc<Ears>,
    pub post: Arc<P>,
    /// Where machines reach this tracker; empty if that is not known.
    pub url: String,
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
    /// Being written, or written without an answer: repeated until there is one.
    unconfirmed: Vec<Unconfirmed>,
    /// Generation of the newest beats in `unconfirmed`.
    unconfirmed_generation: u64,
    /// Our batches in the store, oldest first, with when they were written.
    written: VecDeque<(u64, u64)>,
    /// How many of those are cleared away with the batches that are unconfirmed: the same with every repetition, since it is
    /// not known which of them was applied.
    clearing: Option<usize>,
    /// The judge's newest question, and the newest that we have answered.
    question: u64,
    answered: u64,
    followed: HashMap<String, Followed>,
    /// The number of the tracker that was followed last.
    last_via: Via,
    /// The newest page of the journal that was read.
    pub(super) page: Option<u64>,
    /// The highest number of a page that was ever read.
    pub(super) last_page: Option<u64>,
    pub(super) replicas: BTreeSet<String>,
    pub(super) office: Option<Office>,
    flush_at: Instant,
    seek_at: Instant,
}

/// What is known of another tracker.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Followed {
    /// How components refer to it.
    via: Via,
    /// It lost its session without a final batch, and the deaths of its components are held.
    lost: bool,
    next: u64,
    pub(super) answers: u64,
    farewell: bool,
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
            clearing: None,
            question: 0,
            answered: 0,
            followed: HashMap::new(),
            last_via: HERE,
            page: None,
            last_page: None,
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
        let (params, maintenance) = {
            let inner = self.ears().lock();
            (inner.params.clone(), inner.audit.maintenance().clone())
        };
        corner::ensure_as(self.tree(), &self.setting.roles, &params, &maintenance).await?;
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
        let data = self.setting.url.clone().into_bytes();
        writes.push(Write::Create { path, data, acl, ephemeral: true });
        self.tree().write(writes).await?;
        Ok(())
    }

    async fn read_everything(&mut self) -> Result<(), Error> {
        let was_alone = self.replicas.iter().eq([&self.id]);
        self.tree().sync().await?;
        let batches = corner::batch_names(self.tree()).await?;
        let buckets = corner::all_buckets(self.tree()).await?;
        let went_back = self.went_back(corner::journal_end(self.tree()).await?);
        if went_back {
            warn!("the store has lost heartbeat records; they are written again from memory");
            // The journal is written again, and the judge may not have our newest answer.
            (self.page, self.answered) = (None, 0);
        }
        self.ears().lock().condition.unreadable.clear();
        self.adopt(buckets, went_back);
        let noted = Noted {
            params: true,
            maintenance: true,
            question: true,
            replicas: true,
            journal: true,
            ..Noted::default()
        };
        self.follow(batches, Age::ByCalendar).await?;
        self.look(noted).await?;
        if !was_alone {
            // While nothing could be read, beats of others may have come and gone.
            self.restart_windows();
        }
        Ok(())
    }

    /// Whether the store is older than before: the journal ends before a change that was read from
    /// it.
    pub(super) fn went_back(&self, journal_end: Option<u64>) -> bool {
        journal_end.is_some_and(|end| end < self.ears().lock().shown.last())
    }

    fn restart_windows(&self) {
        let mut inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        inner.audit.restart_windows(now);
    }

    /// The store has answered a request that began at `began`. That counts as long as no batch waits for its confirmation.
    pub(super) fn store_answered(&self, began: u64) {
        if self.unconfirmed.is_empty() {
            self.ears().passed_on(began);
        }
    }

    async fn seek_office(&mut self) -> Result<(), Error> {
        self.seek_at = Instant::now() + SEEK;
        let roles = &self.setting.roles;
        let began = self.ears().watched_now();
        match Leadership::attempt_at(Seat::heartbeat(), self.tree(), roles, &self.id).await? {
            Attempt::Taken => {
                self.store_answered(began);
                Ok(())
            }
            Attempt::Won(mut lead) => {
                info!("judging");
                let known = {
                    let inner = self.ears().lock();
                    inner.audit.highest_number().max(inner.shown.last())
                };
                if !planted(Bug::RepeatsNumbers) {
                    // No number has more than 32 bits of epoch.
                    lead.raise_above(self.tree(), u32::try_from(known >> 32).unwrap_or(u32::MAX - 1)).await?;
                }
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
        if !matches!(timeout(LAST_CALLS, self.finish_calls()).await, Ok(Ok(()))) {
            warn!("left amid a call; whoever judges next makes it again");
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
