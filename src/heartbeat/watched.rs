//! The clock that silence is measured with. It counts the time in which somebody was listening: while the process was
//! stopped, starved or suspended, it stands still, and everybody's window is longer by that much. Pure: it is shown a
//! monotonic clock in milliseconds; the calendar never enters.

use std::collections::VecDeque;

/// A pulse this late is an ordinary busy machine, and no reason to doubt that beats were heard.
pub const TOLERANCE_MS: u64 = 500;

/// Lags that are remembered one by one, long enough for the beats that were heard before them to be written.
const LAGS: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// When the last pulse was.
    pulse: u64,
    /// How often a pulse is expected.
    every: u64,
    lost: u64,
    /// The last lags: when each was on this clock, which stood still, and how long it was.
    lags: VecDeque<(u64, u64)>,
}

impl Watched {
    pub fn new(now: u64, every: u64) -> Self {
        Self { pulse: now, every, lost: 0, lags: VecDeque::new() }
    }

    /// A sign that the process runs. Returns by how much it was late, if that was more than usual.
    pub fn pulse(&mut self, now: u64) -> Option<u64> {
        let late = now.saturating_sub(self.pulse).saturating_sub(self.every);
        self.pulse = self.pulse.max(now);
        if late <= TOLERANCE_MS {
            return None;
        }
        self.lost += late;
        if self.lags.len() == LAGS {
            self.lags.pop_front();
        }
        self.lags.push_back((self.at(now), late));
        Some(late)
    }

    /// How long nobody listened here since `watched`, on this clock: others did, and for them what was heard before is older
    /// by that much. What was heard right after a lag may count as heard before it, and is only taken for older.
    pub fn missed_since(&self, watched: u64, now: u64) -> u64 {
        let seen = self.lags.iter().filter(|(at, _)| watched <= at + TOLERANCE_MS);
        let unseen = now.saturating_sub(self.pulse).saturating_sub(self.every);
        seen.map(|(_, late)| late).sum::<u64>() + if unseen > TOLERANCE_MS { unseen } else { 0 }
    }

    /// The watched time at `now`. A lag that no pulse has shown yet is left out already.
    pub fn at(&self, now: u64) -> u64 {
        let silent = now.saturating_sub(self.pulse);
        let late = silent.saturating_sub(self.every);
        let unseen = if late > TOLERANCE_MS { late } else { 0 };
        now.max(self.pulse).saturating_sub(self.lost + unseen)
    }

    /// Everything that was not watched so far.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_stands_still_while_nobody_listens() {
        let mut watched = Watched::new(1000, 100);
        assert_eq!(watched.pulse(1100), None);
        assert_eq!(watched.at(1150), 1150);
        assert_eq!(watched.pulse(1100 + 100 + TOLERANCE_MS), None, "a busy machine");
        // A minute in which the process was stopped.
        assert_eq!(watched.pulse(61_800), Some(60_000));
        assert_eq!((watched.at(61_800), watched.lost()), (1800, 60_000));
        assert_eq!(watched.pulse(61_900), None);
        assert_eq!(watched.at(61_900), 1900);
    }

    #[test]
    fn what_was_heard_before_a_lag_is_older_for_others() {
        let mut watched = Watched::new(0, 100);
        watched.pulse(100);
        let before = watched.at(150);
        assert_eq!(watched.missed_since(before, 150), 0);
        assert_eq!(watched.missed_since(before, 60_200), 60_000, "though no pulse has shown it yet");
        watched.pulse(60_200);
        for n in 1..20 {
            watched.pulse(60_200 + 100 * n);
        }
        let after = watched.at(62_000);
        assert_eq!(watched.missed_since(before, 62_100), 60_000);
        assert_eq!(watched.missed_since(after, 62_100), 0);
        watched.pulse(62_100 + 100 + 5_000);
        assert_eq!(
            (watched.missed_since(before, 67_200), watched.missed_since(after, 67_200)),
            (65_000, 5_000)
        );
    }

    #[test]
    fn whoever_asks_before_the_late_pulse_sees_the_same() {
        let mut watched = Watched::new(0, 100);
        assert_eq!(watched.at(30_000), 100);
        watched.pulse(30_000);
        assert_eq!(watched.at(30_000), 100);
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let mut watched = Watched::new(5000, 100);
        assert_eq!(watched.pulse(1000), None);
        assert_eq!(watched.at(1000), 5000);
    }

    proptest! {
        #[test]
        fn it_never_goes_back_and_never_runs_ahead(gaps in proptest::collection::vec((0u64..5000, any::<bool>()), 0..50)) {
            let (mut watched, mut now, mut last) = (Watched::new(0, 100), 0, 0);
            for (gap, pulse) in gaps {
                now += gap;
                if pulse {
                    watched.pulse(now);
                }
                let at = watched.at(now);
                prop_assert!(at <= now);
                prop_assert!(at + TOLERANCE_MS + 200 >= last, "{} after {}", at, last);
                last = last.max(at);
            }
        }
    }
}
