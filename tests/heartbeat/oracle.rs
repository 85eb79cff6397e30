//! Facts of the simulation besides beats: planned stops, maintenances, and the events that
//! readers got. Numbers are checked at once, the rest in `invariants`.

use std::time::Duration;

use portcullis::heartbeat::core::audit::Change;
use portcullis::heartbeat::core::state::State;
use portcullis::heartbeat::store;
use portcullis::heartbeat::tracker::shared_state::SharedState;
use tokio::time::Instant;

use crate::invariants::WARN;
use crate::world::World;

/// A change by an operator reaches every tracker within this time.
const HEARD_WITHIN_MS: u64 = 2_000;

/// A planned stop that was announced this long before a fault is stored.
const SAFE_AFTER: Duration = Duration::from_secs(3);

/// A planned stop: a component announces it a few times, then sends nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Farewell {
    pub(crate) left: u32,
    /// When a tracker first accepted the announcement.
    pub(crate) at: Option<Instant>,
}

impl Farewell {
    pub(crate) fn sent(self, now: Instant) -> Self {
        Self { left: self.left.saturating_sub(1), at: self.at.or(Some(now)) }
    }
}

/// A reader of one tracker's events.
#[derive(Debug)]
pub(crate) struct Reader {
    since: u64,
}

impl Reader {
    /// From the beginning; no change has this number.
    pub(crate) fn new() -> Self {
        Self { since: 1 }
    }

    /// Reads the changes since the last call.
    pub(crate) async fn read(&mut self, shared: &SharedState) -> Vec<Change> {
        let (changes, until) = match shared.events(self.since, usize::MAX) {
            Some(changes) => (changes, 0),
            None => {
                let newest = shared.newest().await;
                (shared.numbered(newest.after(self.since)), newest.until)
            }
        };
        let numbers = std::iter::once(self.since).chain(changes.iter().map(|change| change.sequence));
        assert!(numbers.clone().is_sorted_by(|a, b| a < b), "{:?}", numbers.collect::<Vec<_>>());
        // Like a real reader: older changes do not come any more.
        self.since = changes.last().map_or(self.since, |change| change.sequence).max(until);
        changes
    }
}

impl World {
    /// Announces a planned stop as soon as a tracker accepts it.
    pub(crate) fn leave(&mut self, component: usize) {
        let component = &mut self.components[component];
        component.beats = false;
        component.next = Instant::now();
        component.farewell = Some(Farewell { left: 3, at: None });
    }

    pub(crate) async fn maintain(&mut self, component: usize, time: Duration) {
        let (tree, wall) = (self.tree(), self.wall());
        let until = wall + time.as_millis() as u64;
        let component = &mut self.components[component];
        store::set_maintenance(&tree, &component.name, Some(until), wall).await.expect("a write");
        component.maintained = true;
        component.maintenance = Some((wall + HEARD_WITHIN_MS, until));
    }

    pub(crate) async fn end_maintenance(&mut self) {
        let (tree, wall) = (self.tree(), self.wall());
        for component in self.components.iter_mut().filter(|component| component.maintained) {
            (component.maintained, component.maintenance) = (false, None);
            store::set_maintenance(&tree, &component.name, None, wall).await.expect("a write");
        }
    }

    /// Whether it stopped as planned, without a fault that may have lost the announcement.
    pub(crate) fn left_in_order(&self, component: usize) -> Option<bool> {
        let farewell = self.components[component].farewell?.at?;
        let near = |upset: &Instant| farewell <= *upset + SAFE_AFTER && *upset <= farewell + SAFE_AFTER;
        Some(!self.upsets.iter().any(near))
    }

    /// Reads every tracker's events.
    pub(crate) async fn listen(&mut self) {
        let mut changes = Vec::new();
        for replica in self.replicas.values_mut() {
            changes.extend(replica.reader.read(&replica.shared).await);
        }
        for change in changes {
            let known = *self.shown.entry(change.sequence).or_insert(change);
            assert_eq!(known, change, "the same number is the same change");
            let truth = self.components.iter().find(|component| component.name == change.name);
            let silence = matches!(change.state, State::Warned | State::Dead);
            if let Some((from, until)) = truth.and_then(|truth| truth.maintenance).filter(|_| silence) {
                // Silence counts from the end of the maintenance.
                let excused = from..until + WARN.as_millis() as u64 - 300;
                assert!(!excused.contains(&change.at), "{change:?} in a maintenance until {until}");
            }
        }
    }
}
