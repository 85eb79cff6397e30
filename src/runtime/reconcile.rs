//! The one loop. Whoever holds a lease looks, plans and applies after a change; what else there is to wake for is here: what
//! failed is due again, a doubtful look wants another, the lease has to be renewed, and everything is compared at the pace
//! of the resync, because events get lost. What there is to look at, and what to do about it, is its [`Rounds`].
//!
//! Provisioning is not in it: it goes on beside the firewall under the same lease, which is renewed here, and is woken by
//! what the firewall hears. With a lease, watches and a resync of its own it would ask the store everything twice.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::model::planted::{Bug, planted};

/// How long after a failure of the store the next attempt is made.
pub const STORE_PAUSE: Duration = Duration::from_secs(1);

/// How long a look that would close too much waits for the one that confirms it.
pub const DOUBT: Duration = Duration::from_secs(2);

/// What it is time for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// To look at what has changed.
    Changes,
    /// To look at everything.
    Everything,
    /// To try again what failed.
    Retries,
    /// To renew the lease, and nothing else.
    Lease,
}

/// What is done in the loop, round by round.
pub trait Rounds {
    type Error;

    /// Waits until something has changed that no pass has looked at, and gathers what follows at once. Cancel-safe.
    fn changed(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// When what failed is due again.
    fn retry_at(&self) -> Option<Instant>;

    /// Asks whether we may still act, and may for as long as a lease lasts.
    fn confirm(&mut self) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// Looks, plans and applies. Whatever is due, it takes what has changed with it: while there is something to do at
    /// once, nobody waits for changes.
    fn pass(&mut self, due: Due) -> impl Future<Output = Result<Passed, Self::Error>> + Send;
}

/// How a pass went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    Looked {
        /// At all there is.
        everything: bool,
        /// What was seen needs another look before it is acted on.
        in_doubt: bool,
    },
    /// Somebody came between: everything is looked at again soon.
    Disturbed,
    /// Somebody else acts.
    Replaced,
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Stopped,
    Replaced,
}

/// Round after round, until `stop` says so or somebody else acts. A sender of `stop` that is gone means the same as its
/// word.
///
/// # Errors
/// Those of `rounds`; none is waited out here.
pub async fn turn<R: Rounds>(
    rounds: &mut R,
    mut timetable: Timetable,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, R::Error> {
    loop {
        let retry_at = rounds.retry_at();
        let due = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop && !planted(Bug::DeafToStop)) => return Ok(Ended::Stopped),
            changed = rounds.changed() => {
                changed?;
                Due::Changes
            }
            due = timetable.due(retry_at) => due,
        };
        if !rounds.confirm().await? {
            return Ok(Ended::Replaced);
        }
        timetable.renewed();
        if due == Due::Lease {
            continue;
        }
        match rounds.pass(due).await? {
            Passed::Looked { everything, in_doubt } => {
                if everything {
                    timetable.resynced();
                }
                timetable.doubts(in_doubt && !planted(Bug::DoubtNeverRipens));
            }
            Passed::Disturbed => timetable.disturbed(),
            Passed::Replaced => return Ok(Ended::Replaced),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Timetable {
    resync: Duration,
    renewal: Duration,
    resync_at: Instant,
    renew_at: Instant,
    doubt_at: Option<Instant>,
    /// Until then nothing is tried again.
    quiet_until: Instant,
}

impl Timetable {
    /// Everything is due at `first_at`, and from then on every `resync`; the lease at once, and every `renewal`.
    pub fn new(first_at: Instant, resync: Duration, renewal: Duration) -> Self {
        let now = Instant::now();
        Self { resync, renewal, resync_at: first_at, renew_at: now, doubt_at: None, quiet_until: now }
    }

    /// Waits for what is due next, if the first retry is at `retry_at`. Cancel-safe.
    async fn due(&self, retry_at: Option<Instant>) -> Due {
        let everything_at = self.doubt_at.map_or(self.resync_at, |doubt_at| doubt_at.min(self.resync_at));
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

    /// Somebody came between: everything is looked at again soon, and not before.
    fn disturbed(&mut self) {
        self.doubt_at = None;
        self.resync_at = Instant::now() + STORE_PAUSE;
        self.quiet_until = self.resync_at;
    }

    /// Whether what was seen last needs another look before it is acted on.
    fn doubts(&mut self, in_doubt: bool) {
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
        assert_eq!(next(&table, Some(start)).await, (Due::Everything, 1));
        table.resynced();
        for _ in 0..6 {
            assert_eq!(table.due(None).await, Due::Lease);
            table.renewed();
        }
        assert_eq!(next(&table, None).await.0, Due::Everything);
    }

    /// Rounds that write down what they were asked for.
    #[derive(Default)]
    struct Told {
        log: Vec<(u64, Due)>,
        changes: u32,
        late: u32,
        answers: Vec<Passed>,
        since: Option<Instant>,
    }

    impl Rounds for Told {
        type Error = &'static str;

        async fn changed(&mut self) -> Result<(), Self::Error> {
            if self.changes == 0 {
                std::future::pending::<()>().await;
            }
            // It gathers.
            tokio::time::sleep(Duration::from_millis(5)).await;
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
    async fn the_loop_turns_when_there_is_something_to_do() {
        let looked = |everything, in_doubt| Passed::Looked { everything, in_doubt };
        let answers = [
            looked(false, false),
            looked(false, false),
            looked(true, true),
            Passed::Disturbed,
            looked(true, false),
            Passed::Replaced,
        ];
        let mut told = Told { changes: 1, late: 2, ..Told::default() };
        told.answers = answers.into_iter().rev().collect();
        let (stop, mut stopped) = watch::channel(false);
        let table = Timetable::new(Instant::now() + RESYNC, RESYNC, RENEWAL);
        assert_eq!(turn(&mut told, table, &mut stopped).await, Ok(Ended::Replaced));
        let due = [
            (0, Due::Retries),
            (0, Due::Retries),
            (60, Due::Everything),
            (62, Due::Everything),
            (63, Due::Everything),
            (123, Due::Everything),
        ];
        assert_eq!(told.log, due);
        let table = Timetable::new(Instant::now() + RESYNC, RESYNC, RENEWAL);
        told.changes = 1;
        assert_eq!(turn(&mut told, table.clone(), &mut stopped).await, Err("no more answers"));
        assert_eq!(told.log.last().map(|(_, due)| *due), Some(Due::Changes));
        drop(stop);
        assert_eq!(turn(&mut told, table, &mut stopped).await, Ok(Ended::Stopped));
    }
}
