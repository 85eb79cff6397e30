//! What readers of events are shown: the newest part of the journal, and for who has seen less, the newest change of each
//! component. A reader is given a little at a time, so that many of them, or a slow one, cost the memory that beats go to
//! next to nothing.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::{Mutex, watch};

use super::audit::Change;
use super::ears::Ears;
use super::record::BUCKETS;

/// Changes that are remembered: at least as many as the journal keeps in the store while nothing
/// holds it up. A reader that missed more gets each component's newest change.
const KEPT: usize = 10_000;

/// Buckets that are looked through at once, for who has seen less.
const BUCKETS_AT_ONCE: u16 = 32;

/// More numbers than this are not put into their order where others wait.
const SORTED_HERE: usize = 20_000;

/// The newest part of the journal.
#[derive(Debug, Default)]
pub(super) struct Shown {
    recent: VecDeque<Change>,
    /// Everything after this number is in `recent`.
    from: u64,
    last: u64,
}

impl Shown {
    pub(super) fn after(from: u64) -> Self {
        Self { recent: VecDeque::new(), from, last: from }
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// What was added before is not added again.
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

    /// The changes after `sequence`, at most so many; none if what came right after it is not here.
    fn after_number(&self, sequence: u64, most: usize) -> Option<Vec<Change>> {
        if sequence < self.from {
            return None;
        }
        let first = self.recent.partition_point(|change| change.sequence <= sequence);
        Some(self.recent.iter().skip(first).take(most).copied().collect())
    }
}

/// The number of each component's newest change, in their order, with where the component is. Shared by all who need it.
#[derive(Debug)]
pub struct Newest {
    /// Later changes are not in it.
    pub until: u64,
    numbers: Vec<(u64, u32)>,
}

impl Newest {
    /// Those after `sequence`.
    pub fn after(&self, sequence: u64) -> &[(u64, u32)] {
        &self.numbers[self.numbers.partition_point(|(number, _)| *number <= sequence)..]
    }
}

/// For readers: when to look, and what somebody else has looked up.
#[derive(Debug, Default)]
pub(super) struct Board {
    /// The number of the newest change that is shown.
    last: watch::Sender<u64>,
    newest: Mutex<Weak<Newest>>,
}

impl Ears {
    /// Tells whoever listens to events what is in the journal, in its order; what was told is not told again.
    pub fn publish(&self, changes: &[Change]) {
        let mut inner = self.lock();
        inner.shown.add(changes);
        let last = inner.shown.last();
        drop(inner);
        self.board.last.send_if_modified(|known| std::mem::replace(known, last) != last);
    }

    /// The same where nobody knows what the journal said before: whoever has not seen it all begins again.
    pub fn publish_anew(&self, changes: &[Change]) {
        let from = changes.first().map_or(0, |change| change.sequence.saturating_sub(1));
        let mut inner = self.lock();
        inner.shown = Shown::after(from.max(inner.shown.last()));
        drop(inner);
        self.publish(changes);
        // Who waits may be behind by now, though nothing is new.
        self.board.last.send_modify(|_| {});
    }

    /// Changes whenever there is something new to show.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.board.last.subscribe()
    }

    /// The changes after this number are remembered, those up to it are not.
    pub fn kept_from(&self) -> u64 {
        self.lock().shown.from
    }

    /// Returns the changes after `sequence`, at most this many, and an empty list if there are none
    /// yet. Returns `None` if some of them are no longer remembered: use [`Ears::newest`] then.
    pub fn events(&self, sequence: u64, most: usize) -> Option<Vec<Change>> {
        self.lock().shown.after_number(sequence, most)
    }

    /// Each component's newest change; but none that is not in the journal, which might yet be taken back. What changes
    /// while this is looked up comes after it.
    pub async fn newest(&self) -> Arc<Newest> {
        let mut known = self.board.newest.lock().await;
        let (from, until) = {
            let inner = self.lock();
            (inner.shown.from, inner.shown.last)
        };
        // What came after it is remembered one by one.
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

    /// The changes with these numbers. Who has changed since then is left out: it comes later.
    pub fn numbered(&self, numbers: &[(u64, u32)]) -> Vec<Change> {
        let inner = self.lock();
        let found = numbers.iter().filter_map(|(number, entry)| {
            let change = inner.audit.change_numbered(*number, *entry)?;
            // The same change with the fields that only the journal keeps.
            Some(inner.shown.numbered(*number).unwrap_or(change))
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
    // Only a panic has no answer, and sorting numbers does not panic.
    sorted.await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::name::Name;
    use crate::heartbeat::record::{Record, Told, bucket_of};
    use crate::heartbeat::sent::Stamp;
    use crate::heartbeat::state::{State, Word};

    fn change(sequence: u64) -> Change {
        let name = Name::parse(&format!("n{sequence}")).unwrap();
        Change {
            name,
            state: State::Ok,
            word: Some(Word::Started),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    fn numbers(changes: Option<Vec<Change>>) -> Option<Vec<u64>> {
        changes.map(|changes| changes.iter().map(|change| change.sequence).collect())
    }

    #[test]
    fn the_newest_part_is_given_a_little_at_a_time() {
        let mut shown = Shown::default();
        assert_eq!(shown.after_number(0, 9), Some(Vec::new()), "nothing was ever shown");
        shown.add(&(10..20).map(change).collect::<Vec<_>>());
        shown.add(&[change(15)]);
        assert_eq!(numbers(shown.after_number(12, 3)), Some(vec![13, 14, 15]));
        assert_eq!(numbers(shown.after_number(19, 3)), Some(Vec::new()));
        assert_eq!(numbers(shown.after_number(500, 3)), Some(Vec::new()), "one who knows more");
        assert_eq!(numbers(shown.after_number(0, 3)), Some(vec![10, 11, 12]), "from the beginning");
        shown.add(&(20..20 + KEPT as u64).map(change).collect::<Vec<_>>());
        assert_eq!((shown.recent.len(), shown.from), (KEPT, 19));
        assert_eq!(shown.after_number(18, 1), None);
        assert_eq!(numbers(shown.after_number(19, 1)), Some(vec![20]));
    }

    /// Components as the store has them, each with the number of its newest change.
    fn adopt(ears: &Ears, sequences: &[u64]) {
        for sequence in sequences {
            let Change { name, state, word, sequence, .. } = change(*sequence);
            let record = Record {
                name,
                state,
                word,
                sequence,
                word_sequence: sequence,
                told: Told::Yes,
                changed_at: 0,
                beat_at: 0,
                flaps: 0,
                interval: 0,
            };
            ears.lock().audit.adopt(bucket_of(name.as_str()), &[record], 1000);
        }
    }

    #[tokio::test]
    async fn one_look_at_all_components_is_shared() {
        let ears = Ears::new(Arc::new(|| 0), 100);
        adopt(&ears, &[5, 3, 9, 7]);
        ears.publish_anew(&[change(7)]);
        let newest = ears.newest().await;
        assert_eq!(newest.until, 7);
        let all = |newest: &Newest, since| numbers(Some(ears.numbered(newest.after(since)))).unwrap();
        assert_eq!(all(&newest, 0), [3, 5, 7], "9 is not in the journal yet");
        assert_eq!(all(&newest, 4), [5, 7]);
        ears.publish(&[change(9)]);
        assert!(Arc::ptr_eq(&newest, &ears.newest().await), "9 is remembered");
        // Too much has happened since.
        ears.publish_anew(&[change(20)]);
        let other = ears.newest().await;
        assert_eq!((other.until, all(&other, 0)), (20, vec![3, 5, 7, 9]));
        drop((newest, other));
        assert!(ears.board.newest.lock().await.upgrade().is_none(), "nobody needs it");
    }

    #[tokio::test]
    async fn who_changes_meanwhile_comes_later() {
        let ears = Ears::new(Arc::new(|| 0), 100);
        adopt(&ears, &[3, 5]);
        ears.publish_anew(&[change(5)]);
        let newest = ears.newest().await;
        let name = change(3).name;
        ears.lock().audit.forget(&name);
        adopt(&ears, &[6]);
        assert_eq!(numbers(Some(ears.numbered(newest.after(0)))).unwrap(), [5]);
    }
}
