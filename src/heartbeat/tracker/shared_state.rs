//! The state that HTTP requests and the tracker's loop share. A beat only changes this memory;
//! nothing awaits while it is locked, and no store is needed. `tracker` writes it to the store.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::heartbeat::core::audit::{Audit, BeatEffect, Counts, Now};
use crate::heartbeat::core::awake_clock::AwakeClock;
use crate::heartbeat::core::beat::IncomingBeat;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::params::Params;
use crate::heartbeat::core::record::Beat;
use crate::heartbeat::core::table::Full;
use crate::heartbeat::tracker::event_feed::{EventFeed, FeedSignal};
use crate::mutant;

/// How often the process records that it runs.
pub const PULSE: Duration = Duration::from_millis(100);

/// How long a beat that changes a state waits to be stored. After that it is accepted all the same:
/// it is in memory, and the store is slow or unreachable.
pub const STORE_WAIT: Duration = Duration::from_secs(1);

/// A tracker that has not reached the store for this long is not ready: load balancers should send
/// beats to another one.
pub const READY_WITHIN: Duration = Duration::from_secs(5);

/// A tracker that has not reached the store for this long answers beats with an error, so that
/// senders move to another one. It is not longer than the session timeout: until then no component
/// is declared silent, so a sender that moves within this time has a whole window left.
pub const ACCEPT_WITHIN: Duration = Duration::from_secs(10);

/// Whether a tracker can pass on the beats that it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// The store has been unreachable for longer than [`READY_WITHIN`].
    NotReady,
    /// The store has been unreachable for longer than [`TAKEN_WITHIN`]: senders should use another
    /// tracker.
    Stranded,
}

impl Readiness {
    /// The standing of a tracker that has not reached the store for so many milliseconds.
    pub fn after(ms: u64) -> Self {
        let since = Duration::from_millis(ms);
        if since >= ACCEPT_WITHIN && !mutant!(TakesBeatsForEver) {
            Self::Stranded
        } else if since >= READY_WITHIN {
            Self::NotReady
        } else {
            Self::Ready
        }
    }
}

/// The wall clock, in milliseconds since 1970.
pub type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Counters and conditions of this tracker, for health and metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrackerStats {
    /// The store is reachable.
    pub store: bool,
    /// The store was read at least once.
    pub loaded: bool,
    pub judging: bool,
    /// Failed rounds of calls to the state manager, in a row.
    pub manager_failures: u32,
    pub webhook_failures: u32,
    /// While deaths are held: the number of silent components and of all.
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
    /// Unreadable buckets.
    pub unreadable: BTreeSet<u16>,
    /// Time in which the process was paused.
    pub lost_ms: u64,
}

pub struct SharedState {
    inner: Mutex<Inner>,
    start: Instant,
    wall_clock: WallClock,
    /// A beat should be stored at once.
    pub urgent: Notify,
    /// The newest generation of beats that is stored.
    safe: watch::Sender<u64>,
    pub(super) signal: FeedSignal,
    /// Held from a read or write of the parameters in the store until they are applied here, so
    /// that an older read never replaces a newer change.
    pub params_turn: tokio::sync::Mutex<()>,
    /// Until when the judge may make calls, on the monotonic clock: its lease.
    lease_until: AtomicU64,
}

#[derive(Debug)]
pub struct Inner {
    pub audit: Audit,
    pub params: Params,
    pub stats: TrackerStats,
    clock: AwakeClock,
    /// On the clock of silence: all beats received before this time are in the store, or the store
    /// was reachable for them.
    store_reached_at: u64,
    /// Counts how often beats were collected to be written.
    generation: u64,
    pub(super) feed: EventFeed,
}

impl Inner {
    fn readiness(&self, now: u64) -> Readiness {
        Readiness::after(now.saturating_sub(self.store_reached_at))
    }

    /// The number of components by state.
    pub fn counts(&self) -> Counts {
        let unreadable = self.stats.unreadable.iter().map(|bucket| self.audit.count_in(*bucket)).sum();
        Counts { unreadable, ..self.audit.counts() }
    }
}

impl std::fmt::Debug for SharedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedState").field("known", &self.lock().audit.known()).finish_non_exhaustive()
    }
}

impl SharedState {
    pub fn new(wall_clock: WallClock, max_components: usize) -> Self {
        let start = Instant::now();
        // Time begins after zero, which stands for never.
        let now = FIRST_MS;
        let params = Params::default();
        let inner = Inner {
            audit: Audit::new(now, &params, max_components),
            params,
            stats: TrackerStats::default(),
            clock: AwakeClock::new(now, PULSE.as_millis() as u64),
            store_reached_at: now,
            generation: 1,
            feed: EventFeed::default(),
        };
        Self {
            inner: Mutex::new(inner),
            start,
            wall_clock,
            urgent: Notify::new(),
            safe: watch::Sender::new(0),
            signal: FeedSignal::default(),
            params_turn: tokio::sync::Mutex::default(),
            lease_until: AtomicU64::new(0),
        }
    }

    /// Locks the memory. The lock is never held across an await.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies parameters.
    pub fn apply_params(&self, params: Params) {
        let mut inner = self.lock();
        let now = self.awake_time(&inner);
        inner.audit.configure(now, &params);
        inner.params = params;
    }

    /// Milliseconds on a clock that never goes back.
    pub(in crate::heartbeat) fn monotonic_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(FIRST_MS)
    }

    /// The present time on both clocks.
    pub fn now(&self, inner: &Inner) -> Now {
        Now { awake: inner.clock.at(self.monotonic_ms()), wall: (self.wall_clock)() }
    }

    /// Records regularly that the process runs, until it is dropped.
    pub async fn pulse(&self) {
        loop {
            tokio::time::sleep(PULSE).await;
            let clock = self.monotonic_ms();
            let mut inner = self.lock();
            if let Some(late) = inner.clock.pulse(clock) {
                inner.stats.lost_ms += late;
                drop(inner);
                tracing::warn!(late_ms = late, "process was paused; extending timeouts");
            }
        }
    }

    /// Applies beats. Returns when they are as durable as they need to be: a beat that changes
    /// nothing is kept in memory only, any other is in the store.
    ///
    /// # Errors
    /// [`Full`] for one component too many.
    pub async fn beat<B: Into<IncomingBeat> + Copy>(&self, beats: &[B]) -> Result<(), Full> {
        let Some(generation) = self.take(beats)? else { return Ok(()) };
        self.urgent.notify_one();
        let mut safe = self.safe.subscribe();
        // Neither a timeout nor the end of the tracker revokes the beat.
        let _ = tokio::time::timeout(STORE_WAIT, safe.wait_for(|safe| *safe >= generation)).await;
        Ok(())
    }

    /// Returns the generation to wait for, if a state changes and the store is reachable.
    fn take<B: Into<IncomingBeat> + Copy>(&self, beats: &[B]) -> Result<Option<u64>, Full> {
        let mut inner = self.lock();
        let now = self.awake_time(&inner);
        let (mut changes, mut refused) = (false, Ok(()));
        for beat in beats {
            match inner.audit.beat_with(now, &(*beat).into()) {
                Ok(heard) => {
                    changes |= heard == BeatEffect::Changes;
                    inner.stats.beats += 1;
                }
                // Known components are accepted, whatever else is in the same call.
                Err(full) => {
                    inner.stats.refused_beats += 1;
                    refused = Err(full);
                }
            }
        }
        refused?;
        Ok((changes && inner.stats.store).then_some(inner.generation))
    }

    /// Applies a beat if it changes nothing. Returns whether it did.
    pub fn take_unchanged(&self, beat: &IncomingBeat) -> bool {
        let mut inner = self.lock();
        let now = self.awake_time(&inner);
        let taken = inner.readiness(now) != Readiness::Stranded && inner.audit.beat_if_unchanged(now, beat);
        inner.stats.beats += u64::from(taken);
        taken
    }

    /// Notes that the store has all beats received before `began`, on the clock of silence.
    pub(in crate::heartbeat) fn store_reached_at(&self, began: u64) {
        let mut inner = self.lock();
        inner.store_reached_at = inner.store_reached_at.max(began);
    }

    /// Whether this tracker can pass on the beats that it receives.
    pub fn readiness(&self) -> Readiness {
        let inner = self.lock();
        inner.readiness(self.awake_time(&inner))
    }

    /// Starts every window again, because beats may have been missed.
    pub(super) fn restart_windows(&self) {
        let mut inner = self.lock();
        let now = self.awake_time(&inner);
        inner.audit.restart_windows(now);
    }

    /// Now, on the clock of silence.
    pub(in crate::heartbeat) fn awake_now(&self) -> u64 {
        self.awake_time(&self.lock())
    }

    fn awake_time(&self, inner: &Inner) -> u64 {
        inner.clock.at(self.monotonic_ms())
    }

    /// Collects the beats to write, and their generation.
    pub fn take_unflushed(&self) -> (Vec<Vec<Beat>>, u64) {
        let mut guard = self.lock();
        let (inner, clock) = (&mut *guard, self.monotonic_ms());
        let generation = inner.generation;
        inner.generation += 1;
        let (awake_clock, now) = (&inner.clock, inner.clock.at(clock));
        (inner.audit.take_unflushed(now, |heard| awake_clock.missed_since(heard, clock)), generation)
    }

    /// Records that all beats up to this generation are stored.
    pub fn mark_stored(&self, generation: u64) {
        self.safe.send_modify(|safe| *safe = (*safe).max(generation));
    }

    pub fn heartbeating<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<bool> {
        let inner = self.lock();
        let now = self.awake_time(&inner);
        let slack = if inner.stats.judging { 0 } else { inner.params.flush_ms() };
        let known = |name| Name::parse(name).is_ok_and(|name| inner.audit.heartbeating(now, &name, slack));
        names.map(known).collect()
    }

    /// Allows calls for this time from now on.
    pub fn extend_lease(&self, lease: Duration) {
        let until = self.monotonic_ms() + u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        self.lease_until.store(until, Ordering::Release);
    }

    pub fn revoke_lease(&self) {
        self.lease_until.store(0, Ordering::Release);
    }

    pub fn may_call(&self) -> bool {
        self.monotonic_ms() < self.lease_until.load(Ordering::Acquire)
    }
}

const FIRST_MS: u64 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracker_without_the_store_is_first_not_ready_then_stranded() {
        for (ms, readiness) in [
            (0, Readiness::Ready),
            (4_999, Readiness::Ready),
            (5_000, Readiness::NotReady),
            (9_999, Readiness::NotReady),
            (10_000, Readiness::Stranded),
            (u64::MAX, Readiness::Stranded),
        ] {
            assert_eq!(Readiness::after(ms), readiness, "{ms} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tracker_without_the_store_keeps_beats_in_memory() {
        let shared = SharedState::new(Arc::new(|| 0), 10);
        let name = Name::parse("a").unwrap();
        shared.beat(&[(name, false)]).await.unwrap();
        let pulse = tokio::time::timeout(ACCEPT_WITHIN, shared.pulse());
        assert!(pulse.await.is_err(), "it runs until it is dropped");
        assert_eq!(shared.readiness(), Readiness::Stranded);
        assert!(!shared.take_unchanged(&(name, false).into()), "left to the path that answers with an error");
        shared.beat(&[(name, false)]).await.unwrap();
        assert_eq!(shared.take_unflushed().0[0][0].age_ms, 0, "the newest beat");
        shared.store_reached_at(shared.awake_now());
        assert_eq!(shared.readiness(), Readiness::Ready);
    }
}
