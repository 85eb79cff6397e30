//! Mass outages: when too many components fall silent at once, their deaths are held for a while,
//! because a failure of the network is more likely than that of many components. `audit` passes the
//! numbers and applies the decision. Pure.

use std::collections::VecDeque;

use crate::mutant;

/// Fewer silent components than this are never a mass outage.
const MIN_SILENT: usize = 3;

/// For this many windows after a hold, deaths are declared without another hold: for a new judge,
/// the deadlines of held components can be a whole window later than the end of the hold.
const RELEASED_WINDOWS: u64 = 2;

/// Holds deaths while too many are due at once.
#[derive(Debug, Clone, Default)]
pub struct MassHold {
    /// In percent of the components; 0 disables the hold.
    share: u32,
    hold_ms: u64,
    since: Option<u64>,
    /// How long earlier judges held the same deaths.
    held_before_ms: u64,
    /// Since when the share of silent components is below the limit again, while the hold lasts.
    recovering: Option<u64>,
    /// Until this time deaths are declared without another hold.
    no_hold_until: u64,
    /// Recent deaths: time and number.
    recent: VecDeque<(u64, usize)>,
}

/// The phase of a hold, with which the next judge continues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HoldPhase {
    #[default]
    Quiet,
    Holding {
        for_ms: u64,
    },
    /// The hold is over, and its deaths are declared.
    Released,
}

/// The decision about deaths that are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldDecision {
    Declare,
    /// `is_new` if this decision begins the hold.
    Hold {
        is_new: bool,
    },
}

impl MassHold {
    pub fn configure(&mut self, share: u32, hold_ms: u64) {
        self.share = share;
        self.hold_ms = hold_ms;
    }

    pub fn is_holding(&self) -> bool {
        self.since.is_some()
    }

    /// Whether deaths are declared because a hold has ended.
    pub fn is_released(&self, now: u64) -> bool {
        now < self.no_hold_until
    }

    pub fn phase(&self, now: u64) -> HoldPhase {
        match self.since {
            Some(since) => HoldPhase::Holding { for_ms: self.held_ms(now, since) },
            None if self.is_released(now) => HoldPhase::Released,
            None => HoldPhase::Quiet,
        }
    }

    fn held_ms(&self, now: u64, since: u64) -> u64 {
        self.held_before_ms + now.saturating_sub(since)
    }

    /// Continues where the previous judge was.
    pub fn resume(&mut self, phase: HoldPhase, now: u64, window: u64) {
        (self.since, self.held_before_ms, self.no_hold_until) = match phase {
            HoldPhase::Quiet => (None, 0, 0),
            HoldPhase::Holding { for_ms } => (Some(now), for_ms, 0),
            HoldPhase::Released => (None, 0, now + RELEASED_WINDOWS * window),
        };
        self.recovering = None;
        self.recent.clear();
    }

    /// Starts every window again at `now`, also the one after a hold.
    pub fn restart_windows(&mut self, now: u64, window: u64) {
        if now < self.no_hold_until {
            self.no_hold_until = now + RELEASED_WINDOWS * window;
        }
    }

    /// Ends a hold, because an operator has confirmed the deaths.
    pub fn release(&mut self, now: u64, window: u64) {
        if self.end() {
            self.no_hold_until = now + RELEASED_WINDOWS * window;
        }
    }

    /// Returns whether there was a hold to end.
    fn end(&mut self) -> bool {
        (self.held_before_ms, self.recovering) = (0, None);
        self.since.take().is_some()
    }

    /// Decides about deaths at `now`, when `silent` of `alive` components are late. Deaths within
    /// `window` count as one event.
    pub fn decide(&mut self, now: u64, window: u64, silent: usize, alive: usize) -> HoldDecision {
        while self.recent.front().is_some_and(|(at, _)| at + window < now) {
            self.recent.pop_front();
        }
        let died: usize = self.recent.iter().map(|(_, count)| count).sum();
        let (silent, total) = (silent + died, alive + died);
        let mass = self.share > 0 && silent >= MIN_SILENT && silent * 100 > total * self.share as usize;
        match self.since {
            Some(since) if self.held_ms(now, since) < self.hold_ms => {
                self.decide_while_holding(now, window, mass)
            }
            Some(_) => {
                self.release(now, window);
                HoldDecision::Declare
            }
            None if mass && now >= self.no_hold_until && self.hold_ms > 0 => {
                self.since = Some(now);
                HoldDecision::Hold { is_new: true }
            }
            None => HoldDecision::Declare,
        }
    }

    /// Components return over a whole beat period or more. If the hold ended with the outage,
    /// components that have not yet had the time to beat again would be declared dead, so it lasts
    /// for one more window.
    fn decide_while_holding(&mut self, now: u64, window: u64, mass: bool) -> HoldDecision {
        if mass {
            self.recovering = None;
            return HoldDecision::Hold { is_new: false };
        }
        let since = *self.recovering.get_or_insert(now);
        if now < since + window && !mutant!(HoldEndsWithTheShare) {
            return HoldDecision::Hold { is_new: false };
        }
        // Later deaths are checked again: if the same components fall silent again, that is another
        // outage.
        self.end();
        HoldDecision::Declare
    }

    pub fn declared(&mut self, now: u64, count: usize) {
        if count > 0 {
            self.recent.push_back((now, count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 30_000;

    fn begun() -> MassHold {
        let mut hold = MassHold::default();
        hold.configure(30, 300_000);
        hold
    }

    #[test]
    fn few_deaths_are_declared() {
        for (silent, alive) in [(1, 1), (2, 2), (30, 100), (3, 10)] {
            assert_eq!(
                begun().decide(0, WINDOW, silent, alive),
                HoldDecision::Declare,
                "{silent} of {alive}"
            );
        }
        for (silent, alive) in [(3, 3), (31, 100), (3, 9)] {
            assert_eq!(begun().decide(0, WINDOW, silent, alive), HoldDecision::Hold { is_new: true });
        }
    }

    #[test]
    fn deaths_within_a_window_count_together() {
        let mut hold = begun();
        let mut alive = 100;
        for second in 0..40 {
            let now = second * 500;
            match hold.decide(now, WINDOW, 1, alive) {
                HoldDecision::Declare => {
                    hold.declared(now, 1);
                    alive -= 1;
                }
                HoldDecision::Hold { .. } => break,
            }
        }
        assert_eq!(alive, 70, "from then on it is an outage");
    }

    #[test]
    fn hold_ends_by_timeout_by_release_and_by_recovery() {
        let mut hold = begun();
        assert_eq!(hold.decide(0, WINDOW, 50, 100), HoldDecision::Hold { is_new: true });
        assert_eq!(hold.decide(299_999, WINDOW, 50, 100), HoldDecision::Hold { is_new: false });
        assert_eq!(hold.decide(300_000, WINDOW, 50, 100), HoldDecision::Declare);
        hold.declared(300_000, 50);
        assert_eq!(hold.decide(301_000, WINDOW, 20, 50), HoldDecision::Declare, "the same outage");

        hold = begun();
        hold.decide(0, WINDOW, 50, 100);
        hold.release(1000, WINDOW);
        assert_eq!(hold.decide(1000, WINDOW, 50, 100), HoldDecision::Declare);

        hold = begun();
        hold.decide(0, WINDOW, 50, 100);
        hold.decide(1000, WINDOW, 5, 100);
        assert_eq!(hold.decide(1000 + WINDOW, WINDOW, 5, 100), HoldDecision::Declare, "most came back");
        assert!(!hold.is_holding());
        assert_eq!(
            hold.decide(1001 + WINDOW, WINDOW, 50, 100),
            HoldDecision::Hold { is_new: true },
            "once more"
        );
    }

    #[test]
    fn hold_lasts_one_window_after_the_outage() {
        let held = HoldDecision::Hold { is_new: false };
        for (what, hold_ms, looks) in [
            (
                "a full window",
                300_000,
                &[(1_000, 30, held), (30_999, 30, held), (31_000, 30, HoldDecision::Declare)][..],
            ),
            (
                "a second outage during the recovery",
                300_000,
                &[
                    (1_000, 30, held),
                    (20_000, 31, held),
                    (40_000, 30, held),
                    (69_999, 1, held),
                    (70_000, 1, HoldDecision::Declare),
                ],
            ),
            (
                "the time of the hold is over",
                20_000,
                &[(1_000, 30, held), (19_999, 1, held), (20_000, 1, HoldDecision::Declare)],
            ),
        ] {
            let mut hold = MassHold::default();
            hold.configure(30, hold_ms);
            assert_eq!(hold.decide(0, WINDOW, 100, 100), HoldDecision::Hold { is_new: true });
            for (now, silent, expected) in looks {
                assert_eq!(hold.decide(*now, WINDOW, *silent, 100), *expected, "{what}: at {now}");
            }
        }
    }

    #[test]
    fn next_judge_continues_a_hold() {
        let mut hold = begun();
        assert_eq!(hold.phase(0), HoldPhase::Quiet);
        hold.decide(0, WINDOW, 50, 100);
        let phase = hold.phase(200_000);
        assert_eq!(phase, HoldPhase::Holding { for_ms: 200_000 });
        // The next judge has a new clock.
        let mut hold = begun();
        hold.resume(phase, 1_000, WINDOW);
        assert_eq!(hold.decide(100_999, WINDOW, 50, 100), HoldDecision::Hold { is_new: false });
        assert_eq!(hold.phase(100_999), HoldPhase::Holding { for_ms: 299_999 });
        assert_eq!(hold.decide(101_000, WINDOW, 50, 100), HoldDecision::Declare);
        // For the next judge, deadlines are a window later, and windows start again when a tracker
        // is lost.
        let phase = hold.phase(101_001);
        assert_eq!(phase, HoldPhase::Released);
        let mut hold = begun();
        hold.resume(phase, 1_000, WINDOW);
        hold.restart_windows(40_000, WINDOW);
        assert_eq!(hold.decide(40_000 + WINDOW + 500, WINDOW, 50, 100), HoldDecision::Declare);
        assert_eq!(hold.decide(40_000 + 2 * WINDOW, WINDOW, 50, 100), HoldDecision::Hold { is_new: true });
        hold.resume(HoldPhase::Quiet, 0, WINDOW);
        assert_eq!(hold.decide(1, WINDOW, 50, 100), HoldDecision::Hold { is_new: true }, "another outage");
    }

    #[test]
    fn share_of_zero_disables_the_hold() {
        let mut hold = MassHold::default();
        hold.configure(0, 300_000);
        assert_eq!(hold.decide(0, WINDOW, 100, 100), HoldDecision::Declare);
    }
}
