//! When a verdict is not trusted: most of a fleet falling silent at once, and components that come and go. Pure; the
//! numbers come from `audit`, which holds back or damps what is said here.

use std::collections::{HashMap, VecDeque};

use crate::model::planted::{Bug, planted};

/// Fewer silent components than this are no mass outage.
const MASS_LEAST: usize = 3;

/// Deaths pass for so many windows after a hold: those of a judge that is new to it may be due a whole window later than
/// the hold ends, and to ask everybody takes a moment.
const PASSING_WINDOWS: u64 = 2;

/// Holds deaths back while too many are due at once.
#[derive(Debug, Clone, Default)]
pub struct MassHold {
    /// In percent; 0 never holds.
    share: u32,
    hold_ms: u64,
    since: Option<u64>,
    /// For so long judges before this one held the same deaths.
    before_ms: u64,
    /// Since when the silent share is below the limit again, while the hold lasts.
    recovering: Option<u64>,
    /// Until then deaths pass: the hold was lifted, and what is silent now was part of it.
    pass_until: u64,
    /// When and how many died lately.
    recent: VecDeque<(u64, usize)>,
}

/// How far a hold has come: what whoever judges next goes on with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Course {
    #[default]
    Quiet,
    Holding {
        for_ms: u64,
    },
    /// Lifted, and deaths that were part of it pass.
    Passing,
}

/// What becomes of the deaths that are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ruling {
    Declare,
    /// `raised` at the beginning of a hold: one alarm for the fleet.
    Hold {
        raised: bool,
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

    /// Whether deaths pass because a hold was lifted.
    pub fn is_passing(&self, now: u64) -> bool {
        now < self.pass_until
    }

    pub fn course(&self, now: u64) -> Course {
        match self.since {
            Some(since) => Course::Holding { for_ms: self.held_ms(now, since) },
            None if self.is_passing(now) => Course::Passing,
            None => Course::Quiet,
        }
    }

    fn held_ms(&self, now: u64, since: u64) -> u64 {
        self.before_ms + now.saturating_sub(since)
    }

    /// Goes on where another judge was.
    pub fn resume(&mut self, course: Course, now: u64, window: u64) {
        (self.since, self.before_ms, self.pass_until) = match course {
            Course::Quiet => (None, 0, 0),
            Course::Holding { for_ms } => (Some(now), for_ms, 0),
            Course::Passing => (None, 0, now + PASSING_WINDOWS * window),
        };
        self.recovering = None;
        self.recent.clear();
    }

    /// Every window starts again at `now`, also of those who may pass.
    pub fn restart_windows(&mut self, now: u64, window: u64) {
        if now < self.pass_until {
            self.pass_until = now + PASSING_WINDOWS * window;
        }
    }

    /// An operator says that the silence is real.
    pub fn release(&mut self, now: u64, window: u64) {
        if self.end() {
            self.pass_until = now + PASSING_WINDOWS * window;
        }
    }

    /// Returns whether there was a hold to end.
    fn end(&mut self) -> bool {
        (self.before_ms, self.recovering) = (0, None);
        self.since.take().is_some()
    }

    /// Rules on deaths at `now`, when `silent` of `alive` components are late already. `window` is the time in which
    /// deaths count as one event.
    pub fn rule(&mut self, now: u64, window: u64, silent: usize, alive: usize) -> Ruling {
        while self.recent.front().is_some_and(|(at, _)| at + window < now) {
            self.recent.pop_front();
        }
        let died: usize = self.recent.iter().map(|(_, count)| count).sum();
        let (silent, fleet) = (silent + died, alive + died);
        let mass = self.share > 0 && silent >= MASS_LEAST && silent * 100 > fleet * self.share as usize;
        match self.since {
            Some(since) if self.held_ms(now, since) < self.hold_ms => self.rule_on_hold(now, window, mass),
            Some(_) => {
                self.release(now, window);
                Ruling::Declare
            }
            None if mass && now >= self.pass_until && self.hold_ms > 0 => {
                self.since = Some(now);
                Ruling::Hold { raised: true }
            }
            None => Ruling::Declare,
        }
    }

    /// Components return over a whole beat period or more. If the hold ended with the outage,
    /// components that have not yet had the time to beat again would be declared dead, so it lasts
    /// for one more window.
    fn rule_on_hold(&mut self, now: u64, window: u64, mass: bool) -> Ruling {
        if mass {
            self.recovering = None;
            return Ruling::Hold { raised: false };
        }
        let since = *self.recovering.get_or_insert(now);
        if now < since + window && !planted(Bug::HoldEndsWithTheShare) {
            return Ruling::Hold { raised: false };
        }
        // Later deaths are checked again: if the same components fall silent again, that is another
        // outage.
        self.end();
        Ruling::Declare
    }

    pub fn declared(&mut self, now: u64, count: usize) {
        if count > 0 {
            self.recent.push_back((now, count));
        }
    }
}

/// So many restarts in a row make a component a flapping one.
const FLAPS: u16 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flap {
    count: u16,
    last: u64,
    /// When it changed last, in either direction.
    moved: u64,
}

/// Who comes and goes. Only components that restarted lately are in here.
#[derive(Debug, Clone, Default)]
pub struct Flaps {
    lately: HashMap<u32, Flap>,
}

impl Flaps {
    /// A component came back; `memory` is how long that is remembered.
    pub fn restarted(&mut self, entry: u32, now: u64, memory: u64) {
        let flap = self.lately.entry(entry).or_insert(Flap { count: 0, last: now, moved: now });
        if flap.last + memory < now {
            flap.count = 0;
        }
        flap.count = flap.count.saturating_add(1);
        flap.last = now;
    }

    /// As another judge left them.
    pub fn resumed(marked: impl IntoIterator<Item = (u32, u16)>, now: u64) -> Self {
        let flap = |(entry, count)| (entry, Flap { count, last: now, moved: now });
        Self { lately: marked.into_iter().map(flap).collect() }
    }

    pub fn moved(&mut self, entry: u32, now: u64) {
        if let Some(flap) = self.lately.get_mut(&entry) {
            flap.moved = now;
        }
    }

    /// Whether it flaps and has not been still for as long as `damping`.
    pub fn is_restless(&self, entry: u32, now: u64, damping: u64) -> bool {
        self.lately.get(&entry).is_some_and(|flap| flap.count >= FLAPS && now < flap.moved + damping)
    }

    /// How often it came back, if often enough to be called flapping.
    pub fn flapping(&self, entry: u32) -> Option<u16> {
        self.lately.get(&entry).map(|flap| flap.count).filter(|count| *count >= FLAPS)
    }

    pub fn forget(&mut self, entry: u32) {
        self.lately.remove(&entry);
    }

    /// Drops those that have been quiet, and says which of them were flapping until now.
    pub fn settle(&mut self, now: u64, memory: u64) -> Vec<u32> {
        let mut settled = Vec::new();
        self.lately.retain(|entry, flap| {
            let quiet = flap.last + memory < now;
            if quiet && flap.count >= FLAPS {
                settled.push(*entry);
            }
            !quiet
        });
        settled.sort_unstable();
        settled
    }

    pub fn is_empty(&self) -> bool {
        self.lately.is_empty()
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
    fn a_few_may_die() {
        for (silent, alive) in [(1, 1), (2, 2), (30, 100), (3, 10)] {
            assert_eq!(begun().rule(0, WINDOW, silent, alive), Ruling::Declare, "{silent} of {alive}");
        }
        for (silent, alive) in [(3, 3), (31, 100), (3, 9)] {
            assert_eq!(begun().rule(0, WINDOW, silent, alive), Ruling::Hold { raised: true });
        }
    }

    #[test]
    fn deaths_one_after_the_other_count_together() {
        let mut hold = begun();
        let mut alive = 100;
        for second in 0..40 {
            let now = second * 500;
            match hold.rule(now, WINDOW, 1, alive) {
                Ruling::Declare => {
                    hold.declared(now, 1);
                    alive -= 1;
                }
                Ruling::Hold { .. } => break,
            }
        }
        assert_eq!(alive, 70, "then it looked like an outage");
    }

    #[test]
    fn a_hold_ends_by_time_by_word_and_by_itself() {
        let mut hold = begun();
        assert_eq!(hold.rule(0, WINDOW, 50, 100), Ruling::Hold { raised: true });
        assert_eq!(hold.rule(299_999, WINDOW, 50, 100), Ruling::Hold { raised: false });
        assert_eq!(hold.rule(300_000, WINDOW, 50, 100), Ruling::Declare);
        hold.declared(300_000, 50);
        assert_eq!(hold.rule(301_000, WINDOW, 20, 50), Ruling::Declare, "the same outage");

        hold = begun();
        hold.rule(0, WINDOW, 50, 100);
        hold.release(1000, WINDOW);
        assert_eq!(hold.rule(1000, WINDOW, 50, 100), Ruling::Declare);

        hold = begun();
        hold.rule(0, WINDOW, 50, 100);
        hold.rule(1000, WINDOW, 5, 100);
        assert_eq!(hold.rule(1000 + WINDOW, WINDOW, 5, 100), Ruling::Declare, "most came back");
        assert!(!hold.is_holding());
        assert_eq!(hold.rule(1001 + WINDOW, WINDOW, 50, 100), Ruling::Hold { raised: true }, "once more");
    }

    #[test]
    fn hold_lasts_one_window_after_the_outage() {
        let held = Ruling::Hold { raised: false };
        for (what, hold_ms, looks) in [
            (
                "a full window",
                300_000,
                &[(1_000, 30, held), (30_999, 30, held), (31_000, 30, Ruling::Declare)][..],
            ),
            (
                "a second outage during the recovery",
                300_000,
                &[
                    (1_000, 30, held),
                    (20_000, 31, held),
                    (40_000, 30, held),
                    (69_999, 1, held),
                    (70_000, 1, Ruling::Declare),
                ],
            ),
            (
                "the time of the hold is over",
                20_000,
                &[(1_000, 30, held), (19_999, 1, held), (20_000, 1, Ruling::Declare)],
            ),
        ] {
            let mut hold = MassHold::default();
            hold.configure(30, hold_ms);
            assert_eq!(hold.rule(0, WINDOW, 100, 100), Ruling::Hold { raised: true });
            for (now, silent, expected) in looks {
                assert_eq!(hold.rule(*now, WINDOW, *silent, 100), *expected, "{what}: at {now}");
            }
        }
    }

    #[test]
    fn whoever_judges_next_goes_on_with_a_hold() {
        let mut hold = begun();
        assert_eq!(hold.course(0), Course::Quiet);
        hold.rule(0, WINDOW, 50, 100);
        let course = hold.course(200_000);
        assert_eq!(course, Course::Holding { for_ms: 200_000 });
        // Its clock has just begun.
        let mut hold = begun();
        hold.resume(course, 1_000, WINDOW);
        assert_eq!(hold.rule(100_999, WINDOW, 50, 100), Ruling::Hold { raised: false });
        assert_eq!(hold.course(100_999), Course::Holding { for_ms: 299_999 });
        assert_eq!(hold.rule(101_000, WINDOW, 50, 100), Ruling::Declare);
        // The next one hears of those who are silent a window later, and of a lost tracker in between.
        let course = hold.course(101_001);
        assert_eq!(course, Course::Passing);
        let mut hold = begun();
        hold.resume(course, 1_000, WINDOW);
        hold.restart_windows(40_000, WINDOW);
        assert_eq!(hold.rule(40_000 + WINDOW + 500, WINDOW, 50, 100), Ruling::Declare);
        assert_eq!(hold.rule(40_000 + 2 * WINDOW, WINDOW, 50, 100), Ruling::Hold { raised: true });
        hold.resume(Course::Quiet, 0, WINDOW);
        assert_eq!(hold.rule(1, WINDOW, 50, 100), Ruling::Hold { raised: true }, "another outage");
    }

    #[test]
    fn without_a_share_nothing_is_held() {
        let mut hold = MassHold::default();
        hold.configure(0, 300_000);
        assert_eq!(hold.rule(0, WINDOW, 100, 100), Ruling::Declare);
    }

    #[test]
    fn who_comes_and_goes_is_marked_until_it_is_quiet() {
        let mut flaps = Flaps::default();
        for time in 1..=2 {
            flaps.restarted(7, time * 1000, 60_000);
            assert_eq!(flaps.flapping(7), None);
        }
        flaps.restarted(7, 3000, 60_000);
        assert_eq!(flaps.flapping(7), Some(3));
        assert!(flaps.settle(63_000, 60_000).is_empty());
        assert_eq!(flaps.settle(63_001, 60_000), [7]);
        assert_eq!(flaps.flapping(7), None);
        flaps.restarted(7, 100_000, 60_000);
        assert_eq!(flaps.flapping(7), None, "it begins anew");
    }
}
