//! Counts refusals by their reason, and decides which of them are logged: the first of each reason at once,
//! then one line in ten seconds with the number of those in between. A client that is refused in a loop
//! cannot fill the log. Pure: the time comes in as an argument.

/// Time between two lines about the same reason.
const LINE_EVERY_MS: i64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The access list of a znode does not grant the right.
    Rights,
    /// A frame that is too long, negative, or cannot be decoded.
    BadFrame,
    /// Too many connections, in total or from one address.
    Connection,
    /// No identity of the connection has a right in the tree, and its time to authenticate is over.
    Stranger,
    /// Too many identities, or one that is too long.
    Identity,
    /// Too many watches, or paths that are too long together.
    Watch,
    /// An answer that does not fit into a frame.
    Answer,
    /// The buffers of all connections together are full.
    Buffers,
}

const REASONS: usize = Reason::Buffers as usize + 1;

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    total: u64,
    unlogged: u64,
    /// When the next line may be written.
    next_ms: Option<i64>,
}

#[derive(Debug, Default)]
pub struct Refusals([Tally; REASONS]);

impl Refusals {
    /// Counts a refusal. Returns the number of unlogged refusals before it if this one is to be logged.
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
    fn one_line_in_ten_seconds_counts_the_others() {
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
    fn each_reason_has_its_own_line() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.note(Reason::Rights, 0), Some(0));
        assert_eq!(refusals.note(Reason::BadFrame, 0), Some(0));
        assert_eq!((refusals.count(Reason::BadFrame), refusals.count(Reason::Watch)), (1, 0));
    }
}
