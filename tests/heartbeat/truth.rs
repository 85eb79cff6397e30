//! What the simulated world knows beyond beats: who went away in order, who is in maintenance, and what readers of events were
//! shown. Numbers are checked as they come; the rest is for `verdict`.

use std::time::Duration;

use portcullis::heartbeat::audit::Change;
use portcullis::heartbeat::corner;
use portcullis::heartbeat::ears::Ears;
use portcullis::heartbeat::state::State;
use tokio::time::Instant;

use crate::verdict::WARN;
use crate::world::World;

/// What an operator says reaches every tracker within this.
const HEARD_WITHIN_MS: u64 = 2_000;

/// A farewell that was said so long before a crash is safe.
const SAFE_AFTER: Duration = Duration::from_secs(3);

/// A component says good-bye a few times, and then nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Farewell {
    pub(crate) left: u32,
    /// When a tracker first heard it.
    pub(crate) at: Option<Instant>,
}

impl Farewell {
    pub(crate) fn said(self, now: Instant) -> Self {
        Self { left: self.left.saturating_sub(1), at: self.at.or(Some(now)) }
    }
}

/// Somebody who reads one tracker's events.
#[derive(Debug)]
pub(crate) struct Reader {
    since: u64,
}

impl Reader {
    /// From the beginning: there is no change with this number.
    pub(crate) fn new() -> Self {
        Self { since: 1 }
    }

    /// What came since the last time.
    pub(crate) async fn read(&mut self, ears: &Ears) -> Vec<Change> {
        let (changes, until) = match ears.events(self.since, usize::MAX) {
            Some(changes) => (changes, 0),
            None => {
                let newest = ears.newest().await;
                (ears.numbered(newest.after(self.since)), newest.until)
            }
        };
        let numbers = std::iter::once(self.since).chain(changes.iter().map(|change| change.sequence));
        assert!(numbers.clone().is_sorted_by(|a, b| a < b), "{:?}", numbers.collect::<Vec<_>>());
        // As those who are told: whatever was not there by then does not come any more.
        self.since = changes.last().map_or(self.since, |change| change.sequence).max(until);
        changes
    }
}

impl World {
    /// It says good-bye as soon as anybody hears it.
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
        corner::set_maintenance(&tree, &component.name, Some(until), wall).await.expect("a write");
        component.maintained = true;
        component.maintenance = Some((wall + HEARD_WITHIN_MS, until));
    }

    pub(crate) async fn end_maintenance(&mut self) {
        let (tree, wall) = (self.tree(), self.wall());
        for component in self.components.iter_mut().filter(|component| component.maintained) {
            (component.maintained, component.maintenance) = (false, None);
            corner::set_maintenance(&tree, &component.name, None, wall).await.expect("a write");
        }
    }

    /// Whether it went away in order, and nothing happened by which its farewell may be lost.
    pub(crate) fn left_in_order(&self, component: usize) -> Option<bool> {
        let farewell = self.components[component].farewell?.at?;
        let near = |upset: &Instant| farewell <= *upset + SAFE_AFTER && *upset <= farewell + SAFE_AFTER;
        Some(!self.upsets.iter().any(near))
    }

    /// Reads every tracker's events.
    pub(crate) async fn listen(&mut self) {
        let mut changes = Vec::new();
        for replica in self.replicas.values_mut() {
            changes.extend(replica.reader.read(&replica.ears).await);
        }
        for change in changes {
            let known = *self.shown.entry(change.sequence).or_insert(change);
            assert_eq!(known, change, "the same number is the same change");
            let truth = self.components.iter().find(|component| component.name == change.name);
            let silence = matches!(change.state, State::Warned | State::Dead);
            if let Some((from, until)) = truth.and_then(|truth| truth.maintenance).filter(|_| silence) {
                // Silence counts from when it is over.
                let excused = from..until + WARN.as_millis() as u64 - 300;
                assert!(!excused.contains(&change.at), "{change:?} in a maintenance until {until}");
            }
        }
    }
}
