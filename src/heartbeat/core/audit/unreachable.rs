//! Unreachable trackers. A tracker that lost its session without a final batch may have crashed, or
//! it has only lost its connection to the store and still accepts beats. A component whose newest
//! beat went to such a tracker may still be beating to it: its death is held until the tracker is
//! back, the hold times out, or an operator releases it. Pure.

use super::Audit;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::state::State;
use crate::heartbeat::core::table::TrackerIndex;
use crate::mutant;

impl Audit {
    /// Marks a tracker as unreachable; deaths of components that last beat to it are held until
    /// `until`. Returns the number of these components.
    pub fn mark_unreachable(&mut self, via: TrackerIndex, until: u64) -> usize {
        self.unreachable.insert(via, until);
        self.table.iter().filter(|(_, component)| component.via == via).count()
    }

    /// Marks a tracker as reachable again, or as shut down cleanly.
    pub fn mark_reachable(&mut self, via: TrackerIndex) {
        if self.unreachable.remove(&via).is_some() {
            self.rearm_held_for_tracker(|component| component == via);
        }
    }

    pub fn is_unreachable(&self, now: u64, via: TrackerIndex) -> bool {
        self.unreachable.get(&via).is_some_and(|until| now < *until)
    }

    /// Notes that the newest beat of a component in the store, however old, was received by this
    /// tracker.
    pub fn set_last_tracker(&mut self, name: &Name, via: TrackerIndex) {
        if let Some(entry) = self.table.find(name).filter(|entry| self.table.get(*entry).last == 0) {
            self.table.get_mut(entry).via = via;
        }
    }

    /// Until when the death of a component must not be declared.
    pub(super) fn held_for_tracker_until(&self, entry: u32, now: u64) -> Option<u64> {
        if self.unreachable.is_empty() || self.hold.is_released(now) || mutant!(ForgetsLostTrackers) {
            return None;
        }
        self.unreachable.get(&self.table.get(entry).via).copied().filter(|until| now < *until)
    }

    pub(super) fn hold_for_tracker(&mut self, entry: u32, until: u64) {
        self.held_for_tracker.insert(entry);
        self.count_held_for_tracker();
        self.wheel.put(entry, until);
    }

    pub(super) fn end_hold_for_tracker(&mut self, entry: u32) {
        if self.held_for_tracker.remove(&entry) {
            self.count_held_for_tracker();
        }
    }

    /// Treats every unreachable tracker as ended.
    pub(super) fn end_holds_for_trackers(&mut self) {
        self.unreachable.clear();
        self.rearm_held_for_tracker(|_| true);
    }

    fn rearm_held_for_tracker(&mut self, through: impl Fn(TrackerIndex) -> bool) {
        let entries: Vec<u32> = self
            .held_for_tracker
            .iter()
            .copied()
            .filter(|entry| through(self.table.get(*entry).via))
            .collect();
        for entry in entries {
            self.end_hold_for_tracker(entry);
            let state = self.table.get(entry).state;
            if state == State::Warned {
                self.arm(entry, state);
            }
        }
    }

    pub(super) fn count_held_for_tracker(&mut self) {
        self.counts.held_for_tracker = self.held_for_tracker.len();
    }
}
