//! Limits log lines about one kind of event: the first event is logged at once, then at most one
//! line in ten seconds with the number of events in between. A client that is refused in a loop
//! cannot fill the log. Pure.

/// Minimum time between two log lines.
const LINE_EVERY_MS: i64 = 10_000;

#[derive(Debug, Clone, Copy, Default)]
pub struct LogLimit {
    total: u64,
    unlogged: u64,
    /// Earliest time of the next log line.
    next_ms: Option<i64>,
}

impl LogLimit {
    /// Counts an event. Returns the number of unlogged events before it if this one is to be
    /// logged.
    pub fn note(&mut self, now_ms: i64) -> Option<u64> {
        self.total += 1;
        if self.next_ms.is_some_and(|next_ms| now_ms < next_ms) {
            self.unlogged += 1;
            return None;
        }
        self.next_ms = Some(now_ms + LINE_EVERY_MS);
        Some(std::mem::take(&mut self.unlogged))
    }

    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_logged_at_most_every_ten_seconds_with_a_count() {
        let mut limit = LogLimit::default();
        for (now_ms, line) in [
            (0, Some(0)),
            (1, None),
            (9_999, None),
            (10_000, Some(2)),
            (10_001, None),
            (60_000, Some(1)),
            (70_000, Some(0)),
        ] {
            assert_eq!(limit.note(now_ms), line, "at {now_ms} ms");
        }
        assert_eq!(limit.total(), 7);
    }
}
