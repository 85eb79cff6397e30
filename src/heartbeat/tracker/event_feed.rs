//! The changes for readers of events: the newest part of the journal and, for readers that are
//! further behind, the newest change of each component. A reader gets few changes at a time, so
//! that many or slow readers do not delay beats.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::{Mutex, watch};

use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::record::BUCKETS;
use crate::heartbeat::tracker::shared_state::SharedState;

/// Changes that are remembered: at least as many as the journal keeps in the store while nothing
/// holds it up. A reader that missed more gets each component's newest change.
const KEPT: usize = 10_000;

/// Buckets that are searched under one lock.
const BUCKETS_AT_ONCE: u16 = 32;

/// Longer lists are sorted in a blocking task.
const SORTED_HERE: usize = 20_000;

/// The newest part of the journal.
#[derive(Debug, Default)]
pub(super) struct EventFeed {
    recent: VecDeque<Change>,
    /// All changes after this number are in `recent`.
    from: u64,
    last: u64,
}

impl EventFeed {
    pub(super) fn after(from: u64) -> Self {
        Self { recent: VecDeque::new(), from, last: from }
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Changes that were added before are ignored.
    pub(super) fn add(&mut self, changes: &[Change]) {
        for change in changes {
            if change.sequence <= self.last {
                continue;
            }
            self.last = change.sequence;
            self.recent.push_back(*change);
            if self.recent.len() > KEPT
                && let Some(oldest) = self.recent.pop_front()
            {
                self.from = oldest.sequence;
            }
        }
    }

    fn numbered(&self, sequence: u64) -> Option<Change> {
        let at = self.recent.binary_search_by_key(&sequence, |change| change.sequence).ok()?;
        self.recent.get(at).copied()
    }

    /// The changes after `sequence`, at most this many; `None` if some of them are no longer kept.
    fn after_number(&self, sequence: u64, most: usize) -> Option<Vec<Change>> {
        if sequence < self.from {
            return None;
        }
        let first = self.recent.partition_point(|change| change.sequence <= sequence);
        Some(self.recent.iter().skip(first).take(most).copied().collect())
    }
}

/// The number of each component's newest change, in order, with the component's entry. Shared by
/// all readers that need it.
#[derive(Debug)]
pub struct Newest {
    /// The newest change that is included.
    pub until: u64,
    numbers: Vec<(u64, u32)>,
}

impl Newest {
    /// The numbers after `sequence`.
    pub fn after(&self, sequence: u64) -> &[(u64, u32)] {
        &self.numbers[self.numbers.partition_point(|(number, _)| *number <= sequence)..]
    }
}

/// Wakes readers, and shares the list of newest changes.
#[derive(Debug, Default)]
pub(super) struct FeedSignal {
    /// The number of the newest published change.
    last: watch::Sender<u64>,
    newest: Mutex<Weak<Newest>>,
}

impl SharedState {
    /// Publishes changes of the journal, in order. Changes that were published before are ignored.
    pub fn publish(&self, changes: &[Change]) {
        let mut inner = self.lock();
        inner.feed.add(changes);
        let last = inner.feed.last();
        drop(inner);
        self.signal.last.send_if_modified(|known| std::mem::replace(known, last) != last);
    }

    /// Like [`SharedState::publish`], after a gap in the journal: readers that are behind it get
    /// the newest change of each component.
    pub fn publish_after_gap(&self, changes: &[Change]) {
        let from = changes.first().map_or(0, |change| change.sequence.saturating_sub(1));
        let mut inner = self.lock();
        inner.feed = EventFeed::after(from.max(inner.feed.last()));
        drop(inner);
        self.publish(changes);
        // Waiting readers may be behind now, though there is no new change.
        self.signal.last.send_modify(|_| {});
    }

    /// Returns a receiver that changes with every publication.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.signal.last.subscribe()
    }

    /// Changes up to this number are no longer kept.
    pub fn feed_start(&self) -> u64 {
        self.lock().feed.from
    }

    /// Returns the changes after `sequence`, at most this many, and an empty list if there are none
    /// yet. Returns `None` if some of them are no longer remembered: use [`SharedState::newest`]
    /// then.
    pub fn events(&self, sequence: u64, most: usize) -> Option<Vec<Change>> {
        self.lock().feed.after_number(sequence, most)
    }

    /// The newest change of each component, but none that is not in the journal, since it might be
    /// undone. Later changes come after it.
    pub async fn newest(&self) -> Arc<Newest> {
        let mut known = self.signal.newest.lock().await;
        let (from, until) = {
            let inner = self.lock();
            (inner.feed.from, inner.feed.last)
        };
        // The changes after it are kept one by one.
        if let Some(newest) = known.upgrade().filter(|newest| newest.until >= from) {
            return newest;
        }
        let mut numbers = Vec::new();
        for first in (0..BUCKETS).step_by(BUCKETS_AT_ONCE.into()) {
            self.lock().audit.add_numbers(first..first + BUCKETS_AT_ONCE, until, &mut numbers);
            tokio::task::yield_now().await;
        }
        let numbers = in_order(numbers).await;
        let newest = Arc::new(Newest { until, numbers });
        *known = Arc::downgrade(&newest);
        newest
    }

    /// The changes with these numbers, without components that have changed since: their change
    /// comes later.
    pub fn numbered(&self, numbers: &[(u64, u32)]) -> Vec<Change> {
        let inner = self.lock();
        let found = numbers.iter().filter_map(|(number, entry)| {
            let change = inner.audit.change_numbered(*number, *entry)?;
            // The same change with the fields that only the journal keeps.
            Some(inner.feed.numbered(*number).unwrap_or(change))
        });
        found.collect()
    }
}

async fn in_order(mut numbers: Vec<(u64, u32)>) -> Vec<(u64, u32)> {
    if numbers.len() <= SORTED_HERE {
        numbers.sort_unstable();
        return numbers;
    }
    let sorted = tokio::task::spawn_blocking(move || {
        numbers.sort_unstable();
        numbers
    });
    // Sorting numbers does not panic.
    sorted.await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::core::record::{NotifyStatus, bucket_of};

    fn change(sequence: u64) -> Change {
        Change::started(&format!("n{sequence}"), sequence)
    }

    fn numbers(changes: Option<Vec<Change>>) -> Option<Vec<u64>> {
        changes.map(|changes| changes.iter().map(|change| change.sequence).collect())
    }

    #[test]
    fn feed_returns_a_few_changes_at_a_time() {
        let mut feed = EventFeed::default();
        assert_eq!(feed.after_number(0, 9), Some(Vec::new()), "nothing was ever published");
        feed.add(&(10..20).map(change).collect::<Vec<_>>());
        feed.add(&[change(15)]);
        assert_eq!(numbers(feed.after_number(12, 3)), Some(vec![13, 14, 15]));
        assert_eq!(numbers(feed.after_number(19, 3)), Some(Vec::new()));
        assert_eq!(numbers(feed.after_number(500, 3)), Some(Vec::new()), "a reader that is ahead");
        assert_eq!(numbers(feed.after_number(0, 3)), Some(vec![10, 11, 12]), "from the beginning");
        feed.add(&(20..20 + KEPT as u64).map(change).collect::<Vec<_>>());
        assert_eq!((feed.recent.len(), feed.from), (KEPT, 19));
        assert_eq!(feed.after_number(18, 1), None);
        assert_eq!(numbers(feed.after_number(19, 1)), Some(vec![20]));
    }

    /// Adopts components from the store, each with the number of its newest change.
    fn adopt(shared: &SharedState, sequences: &[u64]) {
        for sequence in sequences {
            let record = change(*sequence).record(NotifyStatus::Accepted);
            shared.lock().audit.adopt(bucket_of(record.name.as_str()), &[record], 1000);
        }
    }

    #[tokio::test]
    async fn newest_changes_are_shared_by_readers() {
        let shared = SharedState::new(Arc::new(|| 0), 100);
        adopt(&shared, &[5, 3, 9, 7]);
        shared.publish_after_gap(&[change(7)]);
        let newest = shared.newest().await;
        assert_eq!(newest.until, 7);
        let all = |newest: &Newest, since| numbers(Some(shared.numbered(newest.after(since)))).unwrap();
        assert_eq!(all(&newest, 0), [3, 5, 7], "9 is not in the journal yet");
        assert_eq!(all(&newest, 4), [5, 7]);
        shared.publish(&[change(9)]);
        assert!(Arc::ptr_eq(&newest, &shared.newest().await), "9 is kept");
        // There is a gap in the journal.
        shared.publish_after_gap(&[change(20)]);
        let other = shared.newest().await;
        assert_eq!((other.until, all(&other, 0)), (20, vec![3, 5, 7, 9]));
        drop((newest, other));
        assert!(shared.signal.newest.lock().await.upgrade().is_none(), "no reader needs it");
    }

    #[tokio::test]
    async fn component_that_changes_meanwhile_comes_later() {
        let shared = SharedState::new(Arc::new(|| 0), 100);
        adopt(&shared, &[3, 5]);
        shared.publish_after_gap(&[change(5)]);
        let newest = shared.newest().await;
        let name = change(3).name;
        shared.lock().audit.forget(&name);
        adopt(&shared, &[6]);
        assert_eq!(numbers(Some(shared.numbered(newest.after(0)))).unwrap(), [5]);
    }
}
