//! What a tracker has heard: the one memory that requests and the tracker's loop share. Beats end here; nothing waits while
//! the memory is locked, and no store is needed. What is made of it is for `tracker`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::audit::{Audit, Counts, Heard, Now};
use super::name::Name;
use super::params::Params;
use super::record::Beat;
use super::sent::Sent;
use super::shown::{Board, Shown};
use super::table::Full;
use super::watched::Watched;
use crate::model::planted::{Bug, planted};

/// How often the process shows itself that it runs.
pub const PULSE: Duration = Duration::from_millis(100);

/// How long a beat that says something new waits to be safe in the store. One that is not safe by then is taken all the
/// same: it is in memory, and the store has a trouble of its own.
pub const SAFE_WITHIN: Duration = Duration::from_secs(1);

/// A tracker that has not reached the store for this long is not ready: load balancers should send beats to another one.
pub const READY_WITHIN: Duration = Duration::from_secs(5);

/// A tracker that has not reached the store for this long answers beats with an error, so that
/// senders move to another one. It is not longer than the session timeout: until then no component
/// is declared silent, so a sender that moves within this time has a whole window left.
pub const TAKEN_WITHIN: Duration = Duration::from_secs(10);

/// Whether a tracker can pass on the beats that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Ready,
    /// The store has been unreachable for longer than [`READY_WITHIN`].
    NotReady,
    /// The store has been unreachable for longer than [`TAKEN_WITHIN`]: senders should use another
    /// tracker.
    Stranded,
}

impl Standing {
    /// The standing of a tracker that has not reached the store for so many milliseconds.
    pub fn after(ms: u64) -> Self {
        let since = Duration::from_millis(ms);
        if since >= TAKEN_WITHIN && !planted(Bug::TakesBeatsForEver) {
            Self::Stranded
        } else if since >= READY_WITHIN {
            Self::NotReady
        } else {
            Self::Ready
        }
    }
}

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
    /// Beats that were answered with an error because they cannot be passed on.
    pub stranded_beats: u64,
    pub store_writes: u64,
    pub calls: u64,
    /// Events that were not sent to the webhook because a newer one of the same component replaced
    /// them.
    pub webhook_collapsed: u64,
    /// Buckets that cannot be read.
    pub unreadable: BTreeSet<u16>,
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
    /// On the clock of silence: all beats received before this time are in the store, or the store
    /// was reachable for them.
    passed_on: u64,
    /// Counts how often beats were taken to be written.
    generation: u64,
    pub(super) shown: Shown,
}

impl Inner {
    fn standing(&self, now: u64) -> Standing {
        Standing::after(now.saturating_sub(self.passed_on))
    }

    /// How many components there are of each kind.
    pub fn counts(&self) -> Counts {
        let unreadable = self.condition.unreadable.iter().map(|bucket| self.audit.count_in(*bucket)).sum();
        Counts { unreadable, ..self.audit.counts() }
    }
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
            passed_on: now,
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
    pub async fn beat<B: Into<Sent> + Copy>(&self, beats: &[B]) -> Result<(), Full> {
        let Some(generation) = self.take(beats)? else { return Ok(()) };
        self.urgent.notify_one();
        let mut safe = self.safe.subscribe();
        // Neither running out of patience nor the tracker's end takes the beat back.
        let _ = tokio::time::timeout(SAFE_WITHIN, safe.wait_for(|safe| *safe >= generation)).await;
        Ok(())
    }

    /// The generation to wait for, if there is anything new and a store to keep it.
    fn take<B: Into<Sent> + Copy>(&self, beats: &[B]) -> Result<Option<u64>, Full> {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        let (mut news, mut refused) = (false, Ok(()));
        for beat in beats {
            match inner.audit.beat_with(now, &(*beat).into()) {
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
    pub fn take_steady(&self, beat: &Sent) -> bool {
        let mut inner = self.lock();
        let now = self.now_watched(&inner);
        let taken = inner.standing(now) != Standing::Stranded && inner.audit.beat_if_steady(now, beat);
        inner.condition.beats += u64::from(taken);
        taken
    }

    /// Notes that the store has all beats received before `began`, on the clock of silence.
    pub(super) fn passed_on(&self, began: u64) {
        let mut inner = self.lock();
        inner.passed_on = inner.passed_on.max(began);
    }

    /// Whether this tracker can pass on the beats that it receives.
    pub fn standing(&self) -> Standing {
        let inner = self.lock();
        inner.standing(self.now_watched(&inner))
    }

    /// Now, on the clock of silence.
    pub(super) fn watched_now(&self) -> u64 {
        self.now_watched(&self.lock())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracker_without_the_store_is_first_not_ready_then_stranded() {
        for (ms, standing) in [
            (0, Standing::Ready),
            (4_999, Standing::Ready),
            (5_000, Standing::NotReady),
            (9_999, Standing::NotReady),
            (10_000, Standing::Stranded),
            (u64::MAX, Standing::Stranded),
        ] {
            assert_eq!(Standing::after(ms), standing, "{ms} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tracker_without_the_store_keeps_beats_in_memory() {
        let ears = Ears::new(Arc::new(|| 0), 10);
        let name = Name::parse("a").unwrap();
        ears.beat(&[(name, false)]).await.unwrap();
        let pulse = tokio::time::timeout(TAKEN_WITHIN, ears.pulse());
        assert!(pulse.await.is_err(), "it runs until it is dropped");
        assert_eq!(ears.standing(), Standing::Stranded);
        assert!(!ears.take_steady(&(name, false).into()), "left to the path that answers with an error");
        ears.beat(&[(name, false)]).await.unwrap();
        assert_eq!(ears.take_unflushed().0[0][0].age_ms, 0, "the newest beat");
        ears.passed_on(ears.watched_now());
        assert_eq!(ears.standing(), Standing::Ready);
    }
}
