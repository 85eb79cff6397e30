//! When the one loop turns. Every controller looks, plans and applies after a change; what else it has to wake for is here:
//! what failed is due again, a doubtful look wants another, a lease has to be renewed, and everything is compared at the
//! pace of the resync, because events get lost. What there is to look at, and what to do about it, belongs to the caller.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// How long after a failure of the store the next attempt is made.
pub const STORE_PAUSE: Duration = Duration::from_secs(1);

/// How long a look that would close too much waits for the one that confirms it.
pub const DOUBT: Duration = Duration::from_secs(2);

/// What it is time for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// To look at everything.
    Everything,
    /// To try again what failed.
    Retries,
    /// To renew the lease, and nothing else.
    Lease,
}

#[derive(Debug, Clone)]
pub struct Timetable {
    resync: Duration,
    renewal: Duration,
    resync_at: Instant,
    renew_at: Instant,
    doubt_at: Option<Instant>,
}

impl Timetable {
    /// Everything is due at `first_at`, and from then on every `resync`; the lease at once, and every `renewal`.
    pub fn new(first_at: Instant, resync: Duration, renewal: Duration) -> Self {
        Self { resync, renewal, resync_at: first_at, renew_at: Instant::now(), doubt_at: None }
    }

    /// Waits for what is due next, if the first retry is at `retry_at`. Cancel-safe.
    pub async fn due(&self, retry_at: Option<Instant>) -> Due {
        let everything_at = self.doubt_at.map_or(self.resync_at, |doubt_at| doubt_at.min(self.resync_at));
        tokio::select! {
            biased;
            () = sleep_until(everything_at) => Due::Everything,
            () = sleep_until(retry_at.unwrap_or(self.resync_at)) => Due::Retries,
            () = sleep_until(self.renew_at) => Due::Lease,
        }
    }

    pub fn renewed(&mut self) {
        self.renew_at = Instant::now() + self.renewal;
    }

    /// Everything is about to be looked at.
    pub fn resynced(&mut self) {
        self.resync_at = Instant::now() + self.resync;
    }

    /// Somebody came between: everything is looked at again soon, and not before.
    pub fn disturbed(&mut self) {
        self.doubt_at = None;
        self.resync_at = Instant::now() + STORE_PAUSE;
    }

    /// Whether what was seen last needs another look before it is acted on.
    pub fn doubts(&mut self, in_doubt: bool) {
        self.doubt_at = in_doubt.then(|| Instant::now() + DOUBT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESYNC: Duration = Duration::from_secs(60);
    const RENEWAL: Duration = Duration::from_secs(10);

    /// What is due next, and after how many seconds.
    async fn next(table: &Timetable, retry_at: Option<Instant>) -> (Due, u64) {
        let before = Instant::now();
        (table.due(retry_at).await, before.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn everything_has_its_time() {
        let start = Instant::now();
        let mut table = Timetable::new(start + RESYNC, RESYNC, RENEWAL);
        assert_eq!(next(&table, None).await, (Due::Lease, 0));
        table.renewed();
        assert_eq!(next(&table, Some(start + Duration::from_secs(3))).await, (Due::Retries, 3));
        table.doubts(true);
        assert_eq!(next(&table, None).await, (Due::Everything, 2));
        table.doubts(false);
        assert_eq!(next(&table, None).await, (Due::Lease, 5));
        table.renewed();
        table.doubts(true);
        tokio::time::advance(DOUBT).await;
        // What was due already waits, too: nothing turns without a pause.
        table.disturbed();
        assert_eq!(next(&table, None).await, (Due::Everything, 1));
        table.resynced();
        for _ in 0..6 {
            assert_eq!(table.due(None).await, Due::Lease);
            table.renewed();
        }
        assert_eq!(next(&table, None).await.0, Due::Everything);
    }
}
