//! Confirmation by a second read. A read that would remove much at once may be wrong, so the
//! removal waits until a second read asks for it, too. Each part decides itself which reads are
//! likely to be right. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

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
