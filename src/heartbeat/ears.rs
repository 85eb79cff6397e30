//! What a tracker has heard: the one memory that requests and the tracker's loop share. Beats end here; nothing waits while
//! the memory is locked, and no store is needed. What is made of it is for `tracker`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::audit::{Audit, Heard, Now};
use super::name::Name;
use super::params::Params;
use super::record::Beat;
use super::shown::{Board, Shown};
use super::table::Full;
use super::watched::Watched;

/// How often the process shows itself that it runs.
pub const PULSE: Duration = Duration::from_millis(100);

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
    pub(super) board: Board,
    /// Held from a read or write of the parameters in the store until they are applied here, so that an older read never
    /// replaces a newer change.
    pub params_turn: tokio::sync::Mutex<()>,
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
    pub(super) shown: Shown,
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
            shown: Shown::default(),
        };
        Self {
            inner: Mutex::new(inner),
            start,
            calendar,
            urgent: Notify::new(),
            safe: watch::Sender::new(0),
            board: Board::default(),
            params_turn: tokio::sync::Mutex::default(),
            lease_until: AtomicU64::new(0),
        }
    }

    /// The memory. Never held across a wait.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses these parameters from now on.
    pub fn apply_params(&self, params: Params) {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        inner.audit.configure(now, &params);
        inner.params = params;
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
        let mut guard = self.lock();
        let (inner, clock) = (&mut *guard, self.clock());
        let generation = inner.generation;
        inner.generation += 1;
        let (watched, now) = (&inner.watched, inner.watched.at(clock));
        (inner.audit.take_unflushed(now, |heard| watched.missed_since(heard, clock)), generation)
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
