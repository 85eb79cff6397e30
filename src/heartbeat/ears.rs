//! What a tracker has heard: the one memory that requests and the tracker's loop share. Beats end here; nothing waits while
//! the memory is locked, and no store is needed. What is made of it is for `tracker`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, broadcast, watch};
use tokio::time::Instant;

use super::audit::{Audit, Change, Heard, Now};
use super::name::Name;
use super::params::Params;
use super::record::Beat;
use super::table::Full;
use super::watched::Watched;

/// How often the process shows itself that it runs.
pub const PULSE: Duration = Duration::from_millis(100);

/// Changes that are remembered for readers of events. Who has seen less hears of each component's newest change.
const EVENTS_KEPT: usize = 4096;

/// How long a beat that says something new waits to be safe in the store. One that is not safe by then is taken all the
/// same: it is in memory, and the store has a trouble of its own.
pub const SAFE_WITHIN: Duration = Duration::from_secs(1);

/// The calendar, in milliseconds since 1970.
pub type Calendar = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What the tracker knows about itself, for health and metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Condition {
    /// The store answers.
    pub store: bool,
    /// The store was read at least once.
    pub loaded: bool,
    pub judging: bool,
    /// Rounds of calls to the state manager that failed, in a row.
    pub manager_failures: u32,
    pub webhook_failures: u32,
    /// Deaths are held: how many are silent, of how many.
    pub alarm: Option<(usize, usize)>,
    pub beats: u64,
    pub refused_beats: u64,
    pub store_writes: u64,
    pub calls: u64,
    /// Time in which nobody listened.
    pub lost_ms: u64,
}

pub struct Ears {
    inner: Mutex<Inner>,
    start: Instant,
    calendar: Calendar,
    /// Something that was heard should reach the store at once.
    pub urgent: Notify,
    /// The newest generation of beats that is safe in the store.
    safe: watch::Sender<u64>,
    /// Until when calls to others may be made, on our clock: the judge's lease.
    lease_until: AtomicU64,
}

#[derive(Debug)]
pub struct Inner {
    pub audit: Audit,
    pub params: Params,
    pub condition: Condition,
    watched: Watched,
    /// Counts how often beats were taken to be written.
    generation: u64,
    shown: Shown,
}

/// The newest part of the journal, for readers of events.
#[derive(Debug)]
struct Shown {
    recent: VecDeque<Change>,
    /// Everything after this number is in `recent`.
    from: u64,
    last: u64,
    readers: broadcast::Sender<Change>,
}

impl Shown {
    fn after(from: u64) -> Self {
        Self { recent: VecDeque::new(), from, last: from, readers: broadcast::Sender::new(EVENTS_KEPT) }
    }

    fn add(&mut self, change: Change) {
        self.last = change.sequence;
        self.recent.push_back(change);
        if self.recent.len() > EVENTS_KEPT
            && let Some(oldest) = self.recent.pop_front()
        {
            self.from = oldest.sequence;
        }
        // Nobody listens: nobody needs to know.
        let _ = self.readers.send(change);
    }
}

/// What a reader of events gets: what it missed, how far that goes, and what comes.
#[derive(Debug)]
pub struct Events {
    pub missed: Vec<Change>,
    pub until: u64,
    /// Closed when it is not known what comes next: ask again.
    pub later: broadcast::Receiver<Change>,
}

impl std::fmt::Debug for Ears {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ears").field("known", &self.lock().audit.known()).finish_non_exhaustive()
    }
}

impl Ears {
    pub fn new(calendar: Calendar, max_components: usize) -> Self {
        let start = Instant::now();
        // Time begins late enough that no moment is zero, which stands for never.
        let now = FIRST_MS;
        let params = Params::default();
        let inner = Inner {
            audit: Audit::new(now, &params, max_components),
            params,
            condition: Condition::default(),
            watched: Watched::new(now, PULSE.as_millis() as u64),
            generation: 1,
            shown: Shown::after(0),
        };
        Self {
            inner: Mutex::new(inner),
            start,
            calendar,
            urgent: Notify::new(),
            safe: watch::Sender::new(0),
            lease_until: AtomicU64::new(0),
        }
    }

    /// The memory. Never held across a wait.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clock(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(FIRST_MS)
    }

    /// The moment, for whoever holds the lock.
    pub fn now(&self, inner: &Inner) -> Now {
        Now { watched: inner.watched.at(self.clock()), wall: (self.calendar)() }
    }

    /// Shows that the process runs, until it is dropped.
    pub async fn pulse(&self) {
        loop {
            tokio::time::sleep(PULSE).await;
            let clock = self.clock();
            let mut inner = self.lock();
            if let Some(late) = inner.watched.pulse(clock) {
                inner.condition.lost_ms += late;
                drop(inner);
                tracing::warn!(late_ms = late, "nobody listened; windows are longer by that");
            }
        }
    }

    /// Takes a beat. Returns once it is as safe as it can be: what was expected needs no more than memory, what changes
    /// something is in the store.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub async fn beat(&self, beats: &[(Name, bool)]) -> Result<(), Full> {
        let Some(generation) = self.take(beats)? else { return Ok(()) };
        self.urgent.notify_one();
        let mut safe = self.safe.subscribe();
        // Neither running out of patience nor the tracker's end takes the beat back.
        let _ = tokio::time::timeout(SAFE_WITHIN, safe.wait_for(|safe| *safe >= generation)).await;
        Ok(())
    }

    /// The generation to wait for, if there is anything new and a store to keep it.
    fn take(&self, beats: &[(Name, bool)]) -> Result<Option<u64>, Full> {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        let (mut news, mut refused) = (false, Ok(()));
        for (name, going_away) in beats {
            match inner.audit.beat(now, name, *going_away) {
                Ok(heard) => {
                    news |= heard == Heard::News;
                    inner.condition.beats += 1;
                }
                // Who is known is taken, whoever else is in the same call.
                Err(full) => {
                    inner.condition.refused_beats += 1;
                    refused = Err(full);
                }
            }
        }
        refused?;
        Ok((news && inner.condition.store).then_some(inner.generation))
    }

    /// Takes a beat that is as expected; any other is left as if it had not come.
    pub fn take_steady(&self, name: &Name) -> bool {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        let taken = inner.audit.beat_if_steady(now, name);
        inner.condition.beats += u64::from(taken);
        taken
    }

    fn now_watched(&self, inner: &Inner) -> u64 {
        inner.watched.at(self.clock())
    }

    /// The beats to write now, and their generation.
    pub fn take_unflushed(&self) -> (Vec<Vec<Beat>>, u64) {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        let generation = inner.generation;
        inner.generation += 1;
        (inner.audit.take_unflushed(now), generation)
    }

    /// Everything up to this generation is in the store.
    pub fn is_safe(&self, generation: u64) {
        self.safe.send_modify(|safe| *safe = (*safe).max(generation));
    }

    pub fn heartbeating<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<bool> {
        let inner = self.lock();
        let now = self.now_watched(&inner);
        let slack = if inner.condition.judging { 0 } else { inner.params.flush_ms() };
        let known = |name| Name::parse(name).is_ok_and(|name| inner.audit.heartbeating(now, &name, slack));
        names.map(known).collect()
    }

    /// Tells whoever listens to events what is in the journal, in its order; what was told is not told again.
    pub fn publish(&self, changes: &[Change]) {
        let mut inner = self.lock();
        for change in changes {
            if change.sequence > inner.shown.last {
                inner.shown.add(*change);
            }
        }
    }

    /// The same where nobody knows what the journal said before: whoever listens begins again.
    pub fn publish_anew(&self, changes: &[Change]) {
        let from = changes.first().map_or(0, |change| change.sequence.saturating_sub(1));
        let mut inner = self.lock();
        inner.shown = Shown::after(from.max(inner.shown.last));
        drop(inner);
        self.publish(changes);
    }

    /// What changed after `sequence`, and everything that will. Without a number, or with one of long ago, each
    /// component's newest change; but none that is not in the journal, which might yet be taken back.
    pub fn events(&self, sequence: u64) -> Events {
        let inner = self.lock();
        let Shown { recent, from, last, readers } = &inner.shown;
        let missed = if sequence > 0 && sequence >= *from {
            recent.iter().filter(|change| change.sequence > sequence).copied().collect()
        } else {
            let mut missed = inner.audit.changes_since(sequence);
            missed.retain(|change| change.sequence <= *last);
            missed
        };
        Events { missed, until: *last, later: readers.subscribe() }
    }

    /// From now on calls may be made for so long.
    pub fn lend(&self, lease: Duration) {
        let until = self.clock() + u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        self.lease_until.store(until, Ordering::Release);
    }

    pub fn revoke(&self) {
        self.lease_until.store(0, Ordering::Release);
    }

    pub fn may_call(&self) -> bool {
        self.clock() < self.lease_until.load(Ordering::Acquire)
    }
}

const FIRST_MS: u64 = 1_000;
