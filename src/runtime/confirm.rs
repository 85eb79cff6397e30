//! Confirmation by a second read. A read that would remove much at once may be wrong, so the
//! removal waits until a second read asks for it, too. Each part decides itself which reads are
//! likely to be right. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::clock::Moment;

/// How long after the first read the second one may begin. Two reads at nearly the same time may
/// both show the same error.
pub const CONFIRM_AFTER: Duration = Duration::from_secs(2);

/// Removals that wait for a second read, each with the time of the first. `I` is a point in time.
#[derive(Debug)]
pub struct Unconfirmed<K, I> {
    since: BTreeMap<K, I>,
}

impl<K, I> Default for Unconfirmed<K, I> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<K: Copy + Ord, I: Copy + Ord + Add<Duration, Output = I>> Unconfirmed<K, I> {
    /// Returns the confirmed removals after a read at `now` in which `missing` were missing: all of
    /// them if the read is likely to be right, otherwise those that an earlier read missed, too.
    pub fn confirm(&mut self, missing: &BTreeSet<K>, is_likely: bool, now: I) -> BTreeSet<K> {
        self.since.retain(|key, _| missing.contains(key));
        for key in missing {
            self.since.entry(*key).or_insert(now);
        }
        let confirmed = |since: I| is_likely || since + CONFIRM_AFTER <= now;
        self.since.extract_if(.., |_, since| confirmed(*since)).map(|(key, _)| key).collect()
    }

    /// Returns how many removals are unconfirmed, and when to read again.
    pub fn pending(&self) -> Option<(usize, I)> {
        self.since.values().min().map(|since| (self.since.len(), *since + CONFIRM_AFTER))
    }
}

/// The result of a read that a later read has to confirm. `I` is a point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstRead<V, I> {
    value: V,
    ended: I,
}

impl<V, I: Moment> FirstRead<V, I> {
    /// Creates the result of a read that ended at `ended`.
    pub fn new(value: V, ended: I) -> Self {
        Self { value, ended }
    }

    pub fn value(&self) -> &V {
        &self.value
    }

    /// Returns when a read that confirms this one may begin.
    pub fn confirm_at(&self) -> I {
        self.ended + CONFIRM_AFTER
    }

    /// Returns the result if a read that began at `begun` can confirm it. The duration of the pass
    /// after the first read does not matter.
    pub fn before(&self, begun: I) -> Option<&V> {
        (begun >= self.confirm_at()).then_some(&self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_at_nearly_the_same_time_confirms_nothing() {
        let seconds = Duration::from_secs;
        let first = FirstRead::new("removed", seconds(10));
        assert_eq!((first.value(), first.confirm_at()), (&"removed", seconds(12)));
        let confirmed = [10, 11, 12, 60].map(|begun| first.before(seconds(begun)).is_some());
        assert_eq!(confirmed, [false, false, true, true]);
    }
}
