//! Numbers of changes. Receivers recognise a repeated change by its number, so no number may be
//! given to two changes, also if the store was restored from a backup while no tracker ran. Pure.

use crate::mutant;

/// The year 2020, where the numbers of changes begin.
const NUMBERS_SINCE_MS: u64 = 1_577_836_800_000;

/// Numbers for each millisecond: more than all judges together use on average.
const NUMBERS_PER_MS: u64 = 1 << 11;

/// The wall clock gives no number above this one, which stands for the year 2089. JSON readers that
/// have only floating-point numbers are exact up to twice as much.
const MAX_CLOCK_NUMBER: u64 = 1 << 52;

/// The highest number that a stored change may have.
pub const MAX_NUMBER: u64 = 1 << 62;

/// Numbers for changes, higher than every number of an earlier judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    pub(super) last: u64,
}

impl Sequence {
    /// The numbers of a judge that starts at this wall-clock time. They are higher than `known`,
    /// the highest number that it has read, and higher than all that earlier judges gave: a
    /// restored store has lost some of those, and with them every record that they were given. If
    /// the wall clock is slow, `known` alone decides.
    pub fn above(known: u64, wall_ms: u64) -> Self {
        let known = if mutant!(RepeatsNumbers) { 0 } else { known };
        let wall_ms = if mutant!(NumbersFromStoreOnly) { 0 } else { wall_ms };
        Self { last: known.max(Self::lowest_at(wall_ms)) }
    }

    /// The lowest number of a judge that starts at this wall-clock time.
    pub fn lowest_at(wall_ms: u64) -> u64 {
        wall_ms.saturating_sub(NUMBERS_SINCE_MS).saturating_mul(NUMBERS_PER_MS).min(MAX_CLOCK_NUMBER)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_above_known_ones_and_above_those_of_earlier_times() {
        const NOON: u64 = 1_800_000_000_000;
        let lowest = Sequence::lowest_at(NOON);
        for (what, known, wall_ms, first) in [
            ("an empty store", 0, NOON, lowest + 1),
            ("numbers of a version that counted judges", 7 << 32, NOON, lowest + 1),
            ("a slow clock", lowest + 5, NOON - 3_600_000, lowest + 6),
            ("a clock before 2020", 9, 0, 10),
            ("a clock far in the future", 9, u64::MAX, MAX_CLOCK_NUMBER + 1),
        ] {
            assert_eq!(Sequence::above(known, wall_ms).next(), first, "{what}");
        }
        let mut earlier = Sequence::above(0, NOON);
        let last = std::iter::repeat_with(|| earlier.next()).take(1_000).last().unwrap();
        assert!(last < Sequence::above(0, NOON + 1).next(), "the next judge repeats no number");
    }
}
