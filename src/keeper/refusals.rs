//! Counts refusals by reason and limits their log lines: the first refusal of a reason is logged at
//! once, then at most one line in ten seconds with the number of refusals in between. A client that
//! is refused in a loop cannot fill the log. Pure.

/// Minimum time between two log lines about the same reason.
const LINE_EVERY_MS: i64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The access list of a znode does not grant the right.
    Rights,
    /// A frame that is too long, negative, or cannot be decoded.
    BadFrame,
    /// Too many connections, in total or from one address.
    Connection,
    /// No identity of the connection has a right in the tree, and its time to authenticate is up.
    Unauthenticated,
    /// Too many identities, or one that is too long.
    Identity,
    /// Too many watches, or paths that are too long together.
    Watch,
    /// A reply that does not fit into a frame.
    Answer,
    /// The buffers of all connections together are full.
    Buffers,
}

const REASONS: usize = Reason::Buffers as usize + 1;

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    total: u64,
    unlogged: u64,
    /// Earliest time of the next log line.
    next_ms: Option<i64>,
}

#[derive(Debug, Default)]
pub struct Refusals([Tally; REASONS]);

impl Refusals {
    /// Counts a refusal. Returns the number of unlogged refusals before it if this one is to be
    /// logged.
    pub fn note(&mut self, reason: Reason, now_ms: i64) -> Option<u64> {
        let tally = &mut self.0[reason as usize];
        tally.total += 1;
        if tally.next_ms.is_some_and(|next_ms| now_ms < next_ms) {
            tally.unlogged += 1;
            return None;
        }
        tally.next_ms = Some(now_ms + LINE_EVERY_MS);
        Some(std::mem::take(&mut tally.unlogged))
    }

    pub fn count(&self, reason: Reason) -> u64 {
        self.0[reason as usize].total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_logged_at_most_every_ten_seconds_with_a_count() {
        let mut refusals = Refusals::default();
        for (now_ms, line) in [
            (0, Some(0)),
            (1, None),
            (9_999, None),
            (10_000, Some(2)),
            (10_001, None),
            (60_000, Some(1)),
            (70_000, Some(0)),
        ] {
            assert_eq!(refusals.note(Reason::Rights, now_ms), line, "at {now_ms} ms");
        }
        assert_eq!(refusals.count(Reason::Rights), 7);
    }

    #[test]
    fn reasons_are_rate_limited_independently() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.note(Reason::Rights, 0), Some(0));
        assert_eq!(refusals.note(Reason::BadFrame, 0), Some(0));
        assert_eq!((refusals.count(Reason::BadFrame), refusals.count(Reason::Watch)), (1, 0));
    }
}
