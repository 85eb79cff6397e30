//! Unreachable trackers. A tracker that lost its session without a final batch may have crashed, or
//! it has only lost its connection to the store and still accepts beats. A component whose newest
//! beat went to such a tracker may still be beating to it: its death is held until the tracker is
//! back, the hold times out, or an operator releases it. Pure, like the rest of the audit.

use super::Audit;
use crate::heartbeat::name::Name;
use crate::heartbeat::state::State;
use crate::heartbeat::table::Via;
use crate::model::planted::{Bug, planted};

impl Audit {
    /// Marks a tracker as unreachable; deaths of components that last beat to it are held until
    /// `until`. Returns the number of these components.
    pub fn lose(&mut self, via: Via, until: u64) -> usize {
        self.lost.insert(via, until);
        self.table.iter().filter(|(_, component)| component.via == via).count()
    }

    /// Marks a tracker as reachable again, or as shut down cleanly.
    pub fn find(&mut self, via: Via) {
        if self.lost.remove(&via).is_some() {
            self.rearm_sheltered(|component| component == via);
        }
    }

    pub fn is_lost(&self, now: u64, via: Via) -> bool {
        self.lost.get(&via).is_some_and(|until| now < *until)
    }

    /// Notes that the newest beat of a component in the store, however old, was received by this
    /// tracker.
    pub fn last_beat_through(&mut self, name: &Name, via: Via) {
        if let Some(entry) = self.table.find(name).filter(|entry| self.table.get(*entry).last == 0) {
            self.table.get_mut(entry).via = via;
        }
    }

    /// Until when the death of a component must not be declared.
    pub(super) fn sheltered_until(&self, entry: u32, now: u64) -> Option<u64> {
        if self.lost.is_empty() || self.hold.is_passing(now) || planted(Bug::ForgetsLostTrackers) {
            return None;
        }
        self.lost.get(&self.table.get(entry).via).copied().filter(|until| now < *until)
    }

    pub(super) fn shelter(&mut self, entry: u32, until: u64) {
        self.sheltered.insert(entry);
        self.count_sheltered();
        self.wheel.put(entry, until);
    }

    pub(super) fn leave_shelter(&mut self, entry: u32) {
        if self.sheltered.remove(&entry) {
            self.count_sheltered();
        }
    }

    /// Treats every unreachable tracker as ended.
    pub(super) fn end_shelter(&mut self) {
        self.lost.clear();
        self.rearm_sheltered(|_| true);
    }

    fn rearm_sheltered(&mut self, through: impl Fn(Via) -> bool) {
        let entries: Vec<u32> =
            self.sheltered.iter().copied().filter(|entry| through(self.table.get(*entry).via)).collect();
        for entry in entries {
            self.leave_shelter(entry);
            let state = self.table.get(entry).state;
            if state == State::Warned {
                self.arm(entry, state);
            }
        }
    }

    pub(super) fn count_sheltered(&mut self) {
        self.counts.sheltered = self.sheltered.len();
    }
}
