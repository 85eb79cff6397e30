//! Flapping: components that restart again and again, whose notifications are delayed until they
//! are stable. `audit` reports restarts and applies the delay. Pure.

use std::collections::HashMap;

/// A component with this many restarts is flapping.
const FLAPS: u16 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flap {
    count: u16,
    last: u64,
    /// The time of the last change, in either direction.
    changed_at: u64,
}

/// Recent restarts. Only components that restarted lately are in it.
#[derive(Debug, Clone, Default)]
pub struct Flaps {
    lately: HashMap<u32, Flap>,
}

impl Flaps {
    /// Records a restart, which counts for as long as `memory`.
    pub fn restarted(&mut self, entry: u32, now: u64, memory: u64) {
        let flap = self.lately.entry(entry).or_insert(Flap { count: 0, last: now, changed_at: now });
        if flap.last + memory < now {
            flap.count = 0;
        }
        flap.count = flap.count.saturating_add(1);
        flap.last = now;
    }

    /// Continues the counts of the previous judge.
    pub fn resumed(marked: impl IntoIterator<Item = (u32, u16)>, now: u64) -> Self {
        let flap = |(entry, count)| (entry, Flap { count, last: now, changed_at: now });
        Self { lately: marked.into_iter().map(flap).collect() }
    }

    pub fn record_change(&mut self, entry: u32, now: u64) {
        if let Some(flap) = self.lately.get_mut(&entry) {
            flap.changed_at = now;
        }
    }

    /// Whether a component is flapping and has not been stable for as long as `damping`.
    pub fn is_damped(&self, entry: u32, now: u64, damping: u64) -> bool {
        self.lately.get(&entry).is_some_and(|flap| flap.count >= FLAPS && now < flap.changed_at + damping)
    }

    /// The number of restarts, if the component is flapping.
    pub fn flapping(&self, entry: u32) -> Option<u16> {
        self.lately.get(&entry).map(|flap| flap.count).filter(|count| *count >= FLAPS)
    }

    pub fn forget(&mut self, entry: u32) {
        self.lately.remove(&entry);
    }

    /// Removes stable components. Returns those of them that were flapping until now.
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

    #[test]
    fn flapping_component_is_marked_until_it_is_stable() {
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
        assert_eq!(flaps.flapping(7), None, "the count starts again");
    }
}
