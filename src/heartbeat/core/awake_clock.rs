//! The clock that measures silence. It stops while the process is paused, starved of CPU time or
//! suspended, because beats could not be received then; every window is longer by that time. The
//! monotonic time in milliseconds is an argument; the wall-clock time is not used. Pure.

use std::collections::VecDeque;

/// A pulse that is late by this much is normal on a busy machine.
pub const TOLERANCE_MS: u64 = 500;

/// Pauses that are kept one by one, until the beats that were received before them are written.
const LAGS: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwakeClock {
    /// The time of the last pulse.
    pulse: u64,
    /// The expected time between two pulses.
    every: u64,
    lost: u64,
    /// The last pauses: each with its time on this clock, and its length.
    lags: VecDeque<(u64, u64)>,
}

impl AwakeClock {
    pub fn new(now: u64, every: u64) -> Self {
        Self { pulse: now, every, lost: 0, lags: VecDeque::new() }
    }

    /// Records that the process runs. Returns by how much the pulse was late, if that was more than
    /// usual.
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

    /// How long this process was paused since `awake`. For other replicas, beats from before are
    /// older by this time. A beat right after a pause may count as received before it, and then
    /// only seems older.
    pub fn missed_since(&self, awake: u64, now: u64) -> u64 {
        let seen = self.lags.iter().filter(|(at, _)| awake <= at + TOLERANCE_MS);
        let unseen = now.saturating_sub(self.pulse).saturating_sub(self.every);
        seen.map(|(_, late)| late).sum::<u64>() + if unseen > TOLERANCE_MS { unseen } else { 0 }
    }

    /// The time on this clock at `now`. A pause that no pulse has recorded yet is left out already.
    pub fn at(&self, now: u64) -> u64 {
        let silent = now.saturating_sub(self.pulse);
        let late = silent.saturating_sub(self.every);
        let unseen = if late > TOLERANCE_MS { late } else { 0 };
        now.max(self.pulse).saturating_sub(self.lost + unseen)
    }

    /// All pauses so far.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn clock_stops_while_the_process_is_paused() {
        let mut clock = AwakeClock::new(1000, 100);
        assert_eq!(clock.pulse(1100), None);
        assert_eq!(clock.at(1150), 1150);
        assert_eq!(clock.pulse(1100 + 100 + TOLERANCE_MS), None, "a busy machine");
        // The process is paused for a minute.
        assert_eq!(clock.pulse(61_800), Some(60_000));
        assert_eq!((clock.at(61_800), clock.lost()), (1800, 60_000));
        assert_eq!(clock.pulse(61_900), None);
        assert_eq!(clock.at(61_900), 1900);
    }

    #[test]
    fn beats_before_a_pause_are_older_for_other_replicas() {
        let mut clock = AwakeClock::new(0, 100);
        clock.pulse(100);
        let before = clock.at(150);
        assert_eq!(clock.missed_since(before, 150), 0);
        assert_eq!(clock.missed_since(before, 60_200), 60_000, "before a pulse has recorded it");
        clock.pulse(60_200);
        for n in 1..20 {
            clock.pulse(60_200 + 100 * n);
        }
        let after = clock.at(62_000);
        assert_eq!(clock.missed_since(before, 62_100), 60_000);
        assert_eq!(clock.missed_since(after, 62_100), 0);
        clock.pulse(62_100 + 100 + 5_000);
        assert_eq!((clock.missed_since(before, 67_200), clock.missed_since(after, 67_200)), (65_000, 5_000));
    }

    #[test]
    fn late_pulse_does_not_change_the_time() {
        let mut clock = AwakeClock::new(0, 100);
        assert_eq!(clock.at(30_000), 100);
        clock.pulse(30_000);
        assert_eq!(clock.at(30_000), 100);
    }

    #[test]
    fn monotonic_time_that_goes_back_is_ignored() {
        let mut clock = AwakeClock::new(5000, 100);
        assert_eq!(clock.pulse(1000), None);
        assert_eq!(clock.at(1000), 5000);
    }

    proptest! {
        #[test]
        fn clock_never_goes_back_and_never_runs_ahead(
            gaps in proptest::collection::vec((0u64..5000, any::<bool>()), 0..50)
        ) {
            let (mut clock, mut now, mut last) = (AwakeClock::new(0, 100), 0, 0);
            for (gap, pulse) in gaps {
                now += gap;
                if pulse {
                    clock.pulse(now);
                }
                let at = clock.at(now);
                prop_assert!(at <= now);
                prop_assert!(at + TOLERANCE_MS + 200 >= last, "{} after {}", at, last);
                last = last.max(at);
            }
        }
    }
}
