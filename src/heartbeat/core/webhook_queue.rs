//! The changes that the webhook has not got: all of them in order, except that a flapping component
//! is sent once it is stable. `judge::delivery` makes the calls, one at a time. Pure.

use std::collections::{BTreeSet, HashMap, VecDeque};

use serde_json::{Value, json};

use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::name::Name;

/// The most changes that wait one by one. Beyond that, only each component's newest is kept.
pub const MAX_WAITING: usize = 100_000;

/// The most components that are sent later; they are stored with every call.
const MAX_DEFERRED: usize = 300;

/// The progress of the webhook, as it is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WebhookProgress {
    /// All changes up to this number were sent or deferred.
    pub done: u64,
    /// Components whose newest change is sent when they are stable.
    deferred: BTreeSet<Name>,
}

impl WebhookProgress {
    pub fn to_bytes(&self) -> Vec<u8> {
        let deferred: Vec<&str> = self.deferred.iter().map(Name::as_str).collect();
        json!({"done": self.done, "owed": deferred}).to_string().into_bytes()
    }

    /// Parses a document, or a plain number from before anything was deferred.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let progress: Value = serde_json::from_slice(bytes).ok()?;
        if let Some(done) = progress.as_u64() {
            return Some(Self { done, deferred: BTreeSet::new() });
        }
        let name = |name: &Value| Name::parse(name.as_str()?).ok();
        let deferred = progress.get("owed")?.as_array()?.iter().map(name).collect::<Option<_>>()?;
        Some(Self { done: progress.get("done")?.as_u64()?, deferred })
    }
}

#[derive(Debug, Default)]
pub struct WebhookQueue {
    /// Oldest first.
    waiting: VecDeque<Change>,
    /// The length at which the queue is compacted next.
    compact_at: usize,
    progress: WebhookProgress,
    /// Changes that were dropped since the last [`WebhookQueue::take_collapsed`], because a newer
    /// one of their component replaced them.
    collapsed: u64,
}

impl WebhookQueue {
    /// `changes` are in order; those that were sent are left out.
    pub fn new(progress: WebhookProgress, changes: impl IntoIterator<Item = Change>) -> Self {
        let waiting = changes.into_iter().filter(|change| change.sequence > progress.done).collect();
        Self { waiting, compact_at: MAX_WAITING, progress, collapsed: 0 }
    }

    pub fn progress(&self) -> &WebhookProgress {
        &self.progress
    }

    pub fn push(&mut self, changes: &[Change]) {
        self.waiting.extend(changes.iter().filter(|change| change.sequence > self.progress.done));
        if self.waiting.len() > self.compact_at.max(MAX_WAITING) {
            let newest: HashMap<Name, u64> =
                self.waiting.iter().map(|change| (change.name, change.sequence)).collect();
            let before = self.waiting.len();
            self.waiting.retain(|change| newest.get(&change.name) == Some(&change.sequence));
            self.collapsed += (before - self.waiting.len()) as u64;
            // Otherwise each push would look through the whole queue when every component has one
            // change.
            self.compact_at = 2 * self.waiting.len();
        }
    }

    /// Returns how many changes were dropped since the last call because a newer one replaced them.
    pub fn take_collapsed(&mut self) -> u64 {
        std::mem::take(&mut self.collapsed)
    }

    /// Drops all changes, because there is no webhook.
    pub fn clear(&mut self) {
        if let Some(last) = self.waiting.drain(..).next_back() {
            self.progress.done = last.sequence;
        }
        self.progress.deferred.clear();
    }

    /// The change to send now. `damped` tells flapping components, `newest` returns a component's
    /// newest change.
    pub fn next(
        &mut self,
        damped: impl Fn(&Name) -> bool,
        newest: impl Fn(&Name) -> Option<Change>,
    ) -> Option<Change> {
        while let Some(change) = self.waiting.front() {
            let room =
                self.progress.deferred.len() < MAX_DEFERRED || self.progress.deferred.contains(&change.name);
            if !room || !damped(&change.name) {
                return Some(*change);
            }
            // The newest pending change of each component is always sent.
            self.collapsed += u64::from(!self.progress.deferred.insert(change.name));
            self.progress.done = change.sequence;
            self.waiting.pop_front();
        }
        let settled: Vec<Name> =
            self.progress.deferred.iter().filter(|name| !damped(name)).copied().collect();
        for name in settled {
            match newest(&name) {
                Some(change) => return Some(change),
                // The component was removed.
                None => drop(self.progress.deferred.remove(&name)),
            }
        }
        None
    }

    /// Records that the webhook accepted the change of [`WebhookQueue::next`].
    pub fn mark_sent(&mut self, change: &Change) {
        if self.waiting.pop_front_if(|first| first.sequence == change.sequence).is_some() {
            self.progress.done = change.sequence;
        }
        self.progress.deferred.remove(&change.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::core::beat::Stamp;
    use crate::heartbeat::core::state::{Notification, State};

    fn change(name: &str, sequence: u64) -> Change {
        let name = Name::parse(name).unwrap();
        Change {
            name,
            state: State::Ok,
            notification: Some(Notification::Restarted),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    /// Sends all that can be sent now; returns the numbers.
    fn send_all(queue: &mut WebhookQueue, damped: &[&str], newest: &[Change]) -> Vec<u64> {
        let next = |queue: &mut WebhookQueue| {
            let newest = |name: &Name| newest.iter().find(|change| change.name == *name).copied();
            queue.next(|name| damped.contains(&name.as_str()), newest)
        };
        let mut mark_sent = Vec::new();
        while let Some(change) = next(queue) {
            mark_sent.push(change.sequence);
            queue.mark_sent(&change);
        }
        mark_sent
    }

    #[test]
    fn each_change_is_sent_once_in_order() {
        let mut queue = WebhookQueue::new(WebhookProgress::default(), [change("a", 1), change("b", 2)]);
        queue.push(&[change("a", 3)]);
        let first = queue.next(|_| false, |_| None).unwrap();
        assert_eq!(queue.next(|_| false, |_| None), Some(first), "until it was sent");
        assert_eq!(send_all(&mut queue, &[], &[]), [1, 2, 3]);
        // The next judge continues with the stored progress.
        let progress = WebhookProgress::from_bytes(&queue.progress().to_bytes()).unwrap();
        let mut queue = WebhookQueue::new(progress, [change("b", 2), change("a", 3), change("a", 4)]);
        assert_eq!(send_all(&mut queue, &[], &[]), [4]);
    }

    #[test]
    fn flapping_component_is_sent_when_it_is_stable() {
        let mut queue = WebhookQueue::new(
            WebhookProgress::default(),
            (1..10).map(|n| change(["a", "b"][n as usize % 2], n)),
        );
        assert_eq!(send_all(&mut queue, &["a"], &[]), [1, 3, 5, 7, 9]);
        // The next judge has the same deferred components.
        let progress = WebhookProgress::from_bytes(&queue.progress().to_bytes()).unwrap();
        assert_eq!(progress, *queue.progress());
        let mut queue = WebhookQueue::new(progress, []);
        let newest = [change("a", 8), change("b", 9)];
        assert!(send_all(&mut queue, &["a"], &newest).is_empty());
        assert_eq!(send_all(&mut queue, &[], &newest), [8], "the newest alone");
        assert!(send_all(&mut queue, &[], &newest).is_empty());
        // A removed component is no longer deferred.
        queue.push(&[change("a", 10)]);
        assert!(send_all(&mut queue, &["a"], &[]).is_empty());
        assert!(send_all(&mut queue, &[], &[]).is_empty());
        assert_eq!(queue.progress(), &WebhookProgress { done: 10, deferred: BTreeSet::new() });
    }

    #[test]
    fn changes_replaced_by_a_newer_one_are_counted() {
        let mut queue = WebhookQueue::new(
            WebhookProgress::default(),
            (1..=9).map(|n| change(["a", "b"][n as usize % 2], n)),
        );
        assert_eq!(send_all(&mut queue, &["a"], &[]), [1, 3, 5, 7, 9]);
        assert_eq!((queue.take_collapsed(), queue.take_collapsed()), (3, 0), "2, 4 and 6: 8 is sent later");
        assert_eq!(send_all(&mut queue, &[], &[change("a", 8)]), [8]);
        assert_eq!(queue.take_collapsed(), 0);
        let many = MAX_WAITING as u64;
        queue.push(
            &(10..=many + 10).map(|n| change(if n % 2 == 0 { "a" } else { "b" }, n)).collect::<Vec<_>>(),
        );
        assert_eq!(queue.take_collapsed(), many - 1);
    }

    #[test]
    fn number_of_deferred_components_is_limited() {
        let many = MAX_DEFERRED as u64;
        let changes: Vec<Change> = (1..=many + 2).map(|n| change(&format!("x{n}"), n)).collect();
        let damped: Vec<&str> = changes.iter().map(|change| change.name.as_str()).collect();
        let mut queue = WebhookQueue::new(WebhookProgress::default(), changes.clone());
        assert_eq!(send_all(&mut queue, &damped, &[]), [many + 1, many + 2]);
        assert!(queue.progress().to_bytes().len() < 64 * 1024);
    }

    #[test]
    fn long_queue_keeps_the_newest_of_each_component() {
        let many = MAX_WAITING as u64;
        let named = |n: u64| change(if n.is_multiple_of(2) { "a" } else { "b" }, n);
        let mut queue = WebhookQueue::default();
        queue.push(&(1..=many).map(named).collect::<Vec<_>>());
        assert_eq!(queue.waiting.len(), MAX_WAITING, "each is sent, up to here");
        queue.push(&[named(many + 1)]);
        assert_eq!(send_all(&mut queue, &[], &[]), [many, many + 1]);
    }

    #[test]
    fn progress_is_a_number_or_a_document() {
        assert_eq!(
            WebhookProgress::from_bytes(b"17"),
            Some(WebhookProgress { done: 17, deferred: BTreeSet::new() })
        );
        for garbage in ["", "x", "{}", "-1", r#"{"done":1}"#, r#"{"done":1,"owed":["a/b"]}"#] {
            assert_eq!(WebhookProgress::from_bytes(garbage.as_bytes()), None, "{garbage}");
        }
    }

    #[test]
    fn without_a_webhook_nothing_waits() {
        let mut queue = WebhookQueue::new(WebhookProgress::default(), [change("a", 1), change("a", 2)]);
        assert!(send_all(&mut queue, &["a"], &[]).is_empty());
        queue.push(&[change("b", 3)]);
        queue.clear();
        assert_eq!(queue.progress(), &WebhookProgress { done: 3, deferred: BTreeSet::new() });
        assert!(send_all(&mut queue, &[], &[change("a", 2)]).is_empty());
    }

    /// Many components with one change each: a push does not look through all of them.
    #[test]
    fn queue_is_compacted_when_it_has_doubled() {
        let names: Vec<Name> = (0..=MAX_WAITING).map(|n| Name::parse(&format!("x{n}")).unwrap()).collect();
        let of = |name: &Name, sequence: usize| Change { name: *name, ..change("x", sequence as u64 + 1) };
        let all: Vec<Change> = names.iter().enumerate().map(|(n, name)| of(name, n)).collect();
        let mut queue = WebhookQueue::new(WebhookProgress::default(), []);
        queue.push(&all);
        assert_eq!((queue.waiting.len(), queue.compact_at), (all.len(), 2 * all.len()));
        let again: Vec<Change> = (0..all.len()).map(|n| of(&names[n % 2], all.len() + n)).collect();
        queue.push(&again);
        assert_eq!(queue.waiting.len(), 2 * all.len(), "not yet");
        queue.push(&[of(&names[0], 2 * all.len())]);
        assert_eq!(queue.waiting.len(), all.len(), "the newest of each");
    }

    #[test]
    fn sent_changes_are_not_sent_again() {
        let mark_sent = WebhookProgress { done: 7, ..WebhookProgress::default() };
        let mut queue = WebhookQueue::new(mark_sent, [change("a", 6)]);
        queue.push(&[change("a", 7), change("b", 8)]);
        assert_eq!(send_all(&mut queue, &[], &[]), [8]);
        assert_eq!(queue.progress().done, 8);
    }
}
