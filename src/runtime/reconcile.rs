//! The reconcile loop. The holder of a lease observes, plans and applies after a change, when a
//! failed step is due again, when a read needs confirmation, and at every resync, because events
//! get lost. Between passes it renews the lease. A [`Reconciler`] implements the reads and the
//! actions.
//!
//! Provisioning is not in the loop. It runs beside the firewall under the same lease, which is
//! renewed here, and wakes on the same events: with a lease, watches and a resync of its own it
//! would read everything twice.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;

use super::confirm::CONFIRM_AFTER;
use super::service::stopped;
use crate::mutant;

/// The pause after a failure of the store.
pub const STORE_PAUSE: Duration = Duration::from_secs(1);

/// The kind of pass that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// A read of what has changed.
    Changes,
    /// A read of everything.
    Everything,
    /// Steps that failed.
    Retries,
    /// The renewal of the lease, and nothing else.
    Lease,
}

/// The work of the loop.
pub trait Reconciler {
    type Error;

    /// Waits for a change that no pass has read yet, and for the rest of its burst. Cancel-safe.
    fn changed(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// When the first failed step is due again.
    fn retry_at(&self) -> Option<Instant>;

    /// Renews the lease. Returns false if it is lost.
    fn confirm(&mut self) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// Observes, plans and applies. It includes all changes so far, whatever is due: while retries
    /// are due at once, the loop does not wait for changes.
    fn pass(&mut self, due: Due) -> impl Future<Output = Result<Passed, Self::Error>> + Send;
}

/// The result of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    Looked {
        /// Whether the pass read everything.
        everything: bool,
        /// Whether a part of the plan waits for a second read.
        unconfirmed: bool,
    },
    /// Another process wrote at the same time: everything is read again soon.
    Conflict,
    /// Another process holds the lease.
    Replaced,
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Stopped,
    Replaced,
}

/// Work that only the holder of a lease does.
pub trait Leased {
    type Lease;
    type Error: std::fmt::Display;

    /// Waits for the lease. Returns `None` if `stop` is set first.
    fn acquire(
        &mut self,
        stop: &mut watch::Receiver<bool>,
    ) -> impl Future<Output = Result<Option<Self::Lease>, Self::Error>> + Send;

    /// Works until the lease is lost or `stop` is set.
    fn hold(
        &mut self,
        lease: Self::Lease,
        stop: &mut watch::Receiver<bool>,
    ) -> impl Future<Output = Result<Ended, Self::Error>> + Send;

    /// Called when the lease has ended, or was not acquired.
    fn released(&mut self);

    /// Called after an error that is transient.
    fn store_lost(&mut self);

    fn is_transient(error: &Self::Error) -> bool;
}

/// Acquires the lease and works, again and again, until `stop` is set. Waits after a transient
/// error.
///
/// # Errors
/// The first one that is not transient.
pub async fn run_leased<L: Leased>(work: &mut L, stop: &mut watch::Receiver<bool>) -> Result<(), L::Error> {
    loop {
        let ended = match work.acquire(stop).await {
            Ok(Some(lease)) => work.hold(lease, stop).await,
            Ok(None) => Ok(Ended::Stopped),
            Err(err) => Err(err),
        };
        work.released();
        match ended {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::Replaced) => warn!("lease lost"),
            Err(err) if L::is_transient(&err) => {
                warn!(error = %err, "store lost");
                work.store_lost();
                if stopped_within(STORE_PAUSE, stop).await {
                    return Ok(());
                }
            }
            Err(err) => return Err(err),
        }
    }
}

/// Waits for `pause`. Returns whether `stop` was set meanwhile.
pub async fn stopped_within(pause: Duration, stop: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = sleep(pause) => false,
        () = stopped(stop) => true,
    }
}

/// Runs passes until `stop` is set or loses its sender, or the lease is lost.
///
/// # Errors
/// The first one of `reconciler`.
pub async fn run_passes<R: Reconciler>(
    reconciler: &mut R,
    mut schedule: Schedule,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, R::Error> {
    loop {
        let retry_at = reconciler.retry_at();
        let due = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop && !mutant!(StopRequestIgnored)) => return Ok(Ended::Stopped),
            changed = reconciler.changed() => {
                changed?;
                Due::Changes
            }
            due = schedule.due(retry_at) => due,
        };
        if !reconciler.confirm().await? {
            return Ok(Ended::Replaced);
        }
        schedule.renewed();
        if due == Due::Lease {
            continue;
        }
        match reconciler.pass(due).await? {
            Passed::Looked { everything, unconfirmed } => {
                if everything {
                    schedule.resynced();
                }
                schedule.confirm_later(unconfirmed && !mutant!(NoConfirmingRead));
            }
            Passed::Conflict => schedule.conflict(),
            Passed::Replaced => return Ok(Ended::Replaced),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Schedule {
    resync: Duration,
    renewal: Duration,
    resync_at: Instant,
    renew_at: Instant,
    confirm_at: Option<Instant>,
    /// No retry is due before.
    quiet_until: Instant,
}

impl Schedule {
    /// The first full pass is due at `first_at`, the first renewal of the lease at once.
    pub fn new(first_at: Instant, resync: Duration, renewal: Duration) -> Self {
        let now = Instant::now();
        Self { resync, renewal, resync_at: first_at, renew_at: now, confirm_at: None, quiet_until: now }
    }

    /// Waits for the next event of the schedule. Cancel-safe.
    async fn due(&self, retry_at: Option<Instant>) -> Due {
        let everything_at =
            self.confirm_at.map_or(self.resync_at, |confirm_at| confirm_at.min(self.resync_at));
        tokio::select! {
            biased;
            () = sleep_until(everything_at) => Due::Everything,
            () = sleep_until(retry_at.map_or(self.resync_at, |at| at.max(self.quiet_until))) => Due::Retries,
            () = sleep_until(self.renew_at) => Due::Lease,
        }
    }

    fn renewed(&mut self) {
        self.renew_at = Instant::now() + self.renewal;
    }

    /// A full pass has ended. The next one is due one resync after the end of the pass: otherwise a
    /// pass that takes longer than the resync would be followed by another at once, and its
    /// postponed work would never be done.
    fn resynced(&mut self) {
        self.resync_at = Instant::now() + self.resync;
    }

    /// Schedules a full pass after a pause, and no retry before it.
    fn conflict(&mut self) {
        self.confirm_at = None;
        self.resync_at = Instant::now() + STORE_PAUSE;
        self.quiet_until = self.resync_at;
    }

    /// Schedules a second read, if the last one needs confirmation.
    fn confirm_later(&mut self, unconfirmed: bool) {
        self.confirm_at = unconfirmed.then(|| Instant::now() + CONFIRM_AFTER);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESYNC: Duration = Duration::from_secs(60);
    const RENEWAL: Duration = Duration::from_secs(10);

    /// Returns what is due next, and after how many seconds.
    async fn next(table: &Schedule, retry_at: Option<Instant>) -> (Due, u64) {
        let before = Instant::now();
        (table.due(retry_at).await, before.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_due_in_order() {
        let start = Instant::now();
        let mut table = Schedule::new(start + RESYNC, RESYNC, RENEWAL);
        assert_eq!(next(&table, None).await, (Due::Lease, 0));
        table.renewed();
        assert_eq!(next(&table, Some(start + Duration::from_secs(3))).await, (Due::Retries, 3));
        table.confirm_later(true);
        assert_eq!(next(&table, None).await, (Due::Everything, 2));
        table.confirm_later(false);
        assert_eq!(next(&table, None).await, (Due::Lease, 5));
        table.renewed();
        table.confirm_later(true);
        tokio::time::advance(CONFIRM_AFTER).await;
        // Retries that were due already wait, too.
        table.conflict();
        assert_eq!(next(&table, Some(start)).await, (Due::Everything, 1));
        table.resynced();
        for _ in 0..6 {
            assert_eq!(table.due(None).await, Due::Lease);
            table.renewed();
        }
        assert_eq!(next(&table, None).await.0, Due::Everything);
    }

    /// A reconciler that logs its passes.
    #[derive(Default)]
    struct Recorder {
        log: Vec<(u64, Due)>,
        changes: u32,
        late: u32,
        answers: Vec<Passed>,
        since: Option<Instant>,
    }

    impl Reconciler for Recorder {
        type Error = &'static str;

        async fn changed(&mut self) -> Result<(), Self::Error> {
            if self.changes == 0 {
                std::future::pending::<()>().await;
            }
            // The rest of the burst.
            sleep(Duration::from_millis(5)).await;
            Ok(())
        }

        fn retry_at(&self) -> Option<Instant> {
            (self.late > 0).then(Instant::now)
        }

        async fn confirm(&mut self) -> Result<bool, Self::Error> {
            Ok(true)
        }

        async fn pass(&mut self, due: Due) -> Result<Passed, Self::Error> {
            let since = *self.since.get_or_insert_with(Instant::now);
            self.log.push((since.elapsed().as_secs(), due));
            self.late = self.late.saturating_sub(1);
            self.changes = 0;
            self.answers.pop().ok_or("no more answers")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn passes_follow_changes_retries_and_resyncs() {
        let looked = |everything, unconfirmed| Passed::Looked { everything, unconfirmed };
        let answers = [
            looked(false, false),
            looked(false, false),
            looked(true, true),
            Passed::Conflict,
            looked(true, false),
            Passed::Replaced,
        ];
        let mut recorder = Recorder { changes: 1, late: 2, ..Recorder::default() };
        recorder.answers = answers.into_iter().rev().collect();
        let (stop, mut stopped) = watch::channel(false);
        let table = Schedule::new(Instant::now() + RESYNC, RESYNC, RENEWAL);
        assert_eq!(run_passes(&mut recorder, table, &mut stopped).await, Ok(Ended::Replaced));
        let due = [
            (0, Due::Retries),
            (0, Due::Retries),
            (60, Due::Everything),
            (62, Due::Everything),
            (63, Due::Everything),
            (123, Due::Everything),
        ];
        assert_eq!(recorder.log, due);
        let table = Schedule::new(Instant::now() + RESYNC, RESYNC, RENEWAL);
        recorder.changes = 1;
        assert_eq!(run_passes(&mut recorder, table.clone(), &mut stopped).await, Err("no more answers"));
        assert_eq!(recorder.log.last().map(|(_, due)| *due), Some(Due::Changes));
        drop(stop);
        assert_eq!(run_passes(&mut recorder, table, &mut stopped).await, Ok(Ended::Stopped));
    }
}
