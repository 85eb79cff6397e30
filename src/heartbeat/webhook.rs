//! What the webhook has yet to hear: every change, in its order, but those of components that come and go, of which it
//! hears when they have settled. Pure; calls are made in `notify`, one at a time.

use std::collections::{BTreeSet, HashMap, VecDeque};

use serde_json::{Value, json};

use super::audit::Change;
use super::name::Name;

/// Changes that wait, at most, of which each is told. Who is away for longer hears of the newest of each component.
pub const MAX_WAITING: usize = 100_000;

/// Components that it hears of later, at most: they are written down with every call.
const MAX_OWED: usize = 300;

/// How far it got, as the store has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Note {
    /// Everything up to this number was told, or is owed.
    pub done: u64,
    /// Components whose newest change is told when they have settled.
    owed: BTreeSet<Name>,
}

impl Note {
    pub fn to_bytes(&self) -> Vec<u8> {
        let owed: Vec<&str> = self.owed.iter().map(Name::as_str).collect();
        json!({"done": self.done, "owed": owed}).to_string().into_bytes()
    }

    /// A number alone, where nothing was ever owed, or this.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let note: Value = serde_json::from_slice(bytes).ok()?;
        if let Some(done) = note.as_u64() {
            return Some(Self { done, owed: BTreeSet::new() });
        }
        let name = |name: &Value| Name::parse(name.as_str()?).ok();
        let owed = note.get("owed")?.as_array()?.iter().map(name).collect::<Option<_>>()?;
        Some(Self { done: note.get("done")?.as_u64()?, owed })
    }
}

#[derive(Debug, Default)]
pub struct Queue {
    /// Oldest first.
    waiting: VecDeque<Change>,
    /// How many must wait before it is worth while to look again for more than one of a component.
    crowded_at: usize,
    note: Note,
    /// Changes that were dropped since the last [`Queue::take_collapsed`], because a newer one of
    /// their component replaced them.
    collapsed: u64,
}

impl Queue {
    /// `changes` are in order; those that were told are left out.
    pub fn new(note: Note, changes: impl IntoIterator<Item = Change>) -> Self {
        let waiting = changes.into_iter().filter(|change| change.sequence > note.done).collect();
        Self { waiting, crowded_at: MAX_WAITING, note, collapsed: 0 }
    }

    pub fn note(&self) -> &Note {
        &self.note
    }

    pub fn push(&mut self, changes: &[Change]) {
        self.waiting.extend(changes.iter().filter(|change| change.sequence > self.note.done));
        if self.waiting.len() > self.crowded_at.max(MAX_WAITING) {
            let newest: HashMap<Name, u64> =
                self.waiting.iter().map(|change| (change.name, change.sequence)).collect();
            let before = self.waiting.len();
            self.waiting.retain(|change| newest.get(&change.name) == Some(&change.sequence));
            self.collapsed += (before - self.waiting.len()) as u64;
            // Where each has one, there are as many as components, and to look for more each time would cost all of them.
            self.crowded_at = 2 * self.waiting.len();
        }
    }

    /// Returns how many changes were dropped since the last call because a newer one replaced them.
    pub fn take_collapsed(&mut self) -> u64 {
        std::mem::take(&mut self.collapsed)
    }

    /// There is no webhook: who comes later hears of what happens then.
    pub fn clear(&mut self) {
        if let Some(last) = self.waiting.drain(..).next_back() {
            self.note.done = last.sequence;
        }
        self.note.owed.clear();
    }

    /// The change to tell now. `restless` are those who come and go, `newest` is a component's newest change.
    pub fn next(
        &mut self,
        restless: impl Fn(&Name) -> bool,
        newest: impl Fn(&Name) -> Option<Change>,
    ) -> Option<Change> {
        while let Some(change) = self.waiting.front() {
            let room = self.note.owed.len() < MAX_OWED || self.note.owed.contains(&change.name);
            if !room || !restless(&change.name) {
                return Some(*change);
            }
            // The newest pending change of each component is always sent.
            self.collapsed += u64::from(!self.note.owed.insert(change.name));
            self.note.done = change.sequence;
            self.waiting.pop_front();
        }
        let settled: Vec<Name> = self.note.owed.iter().filter(|name| !restless(name)).copied().collect();
        for name in settled {
            match newest(&name) {
                Some(change) => return Some(change),
                // Nobody knows it any more.
                None => drop(self.note.owed.remove(&name)),
            }
        }
        None
    }

    /// It was told of what [`Queue::next`] gave, or wants none of it.
    pub fn told(&mut self, change: &Change) {
        if self.waiting.pop_front_if(|first| first.sequence == change.sequence).is_some() {
            self.note.done = change.sequence;
        }
        self.note.owed.remove(&change.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::sent::Stamp;
    use crate::heartbeat::state::{State, Word};

    fn change(name: &str, sequence: u64) -> Change {
        let name = Name::parse(name).unwrap();
        Change {
            name,
            state: State::Ok,
            word: Some(Word::Restarted),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    /// Everything that it tells now, by number.
    fn tell_all(queue: &mut Queue, restless: &[&str], newest: &[Change]) -> Vec<u64> {
        let next = |queue: &mut Queue| {
            let newest = |name: &Name| newest.iter().find(|change| change.name == *name).copied();
            queue.next(|name| restless.contains(&name.as_str()), newest)
        };
        let mut told = Vec::new();
        while let Some(change) = next(queue) {
            told.push(change.sequence);
            queue.told(&change);
        }
        told
    }

    #[test]
    fn each_is_told_once_in_its_order() {
        let mut queue = Queue::new(Note::default(), [change("a", 1), change("b", 2)]);
        queue.push(&[change("a", 3)]);
        let first = queue.next(|_| false, |_| None).unwrap();
        assert_eq!(queue.next(|_| false, |_| None), Some(first), "until it was told");
        assert_eq!(tell_all(&mut queue, &[], &[]), [1, 2, 3]);
        // Whoever goes on with the note knows what was told.
        let note = Note::from_bytes(&queue.note().to_bytes()).unwrap();
        let mut queue = Queue::new(note, [change("b", 2), change("a", 3), change("a", 4)]);
        assert_eq!(tell_all(&mut queue, &[], &[]), [4]);
    }

    #[test]
    fn who_comes_and_goes_is_told_of_when_it_has_settled() {
        let mut queue = Queue::new(Note::default(), (1..10).map(|n| change(["a", "b"][n as usize % 2], n)));
        assert_eq!(tell_all(&mut queue, &["a"], &[]), [1, 3, 5, 7, 9]);
        // A successor owes the same.
        let note = Note::from_bytes(&queue.note().to_bytes()).unwrap();
        assert_eq!(note, *queue.note());
        let mut queue = Queue::new(note, []);
        let newest = [change("a", 8), change("b", 9)];
        assert!(tell_all(&mut queue, &["a"], &newest).is_empty());
        assert_eq!(tell_all(&mut queue, &[], &newest), [8], "the newest alone");
        assert!(tell_all(&mut queue, &[], &newest).is_empty());
        // Who is gone is owed nothing.
        queue.push(&[change("a", 10)]);
        assert!(tell_all(&mut queue, &["a"], &[]).is_empty());
        assert!(tell_all(&mut queue, &[], &[]).is_empty());
        assert_eq!(queue.note(), &Note { done: 10, owed: BTreeSet::new() });
    }

    #[test]
    fn changes_replaced_by_a_newer_one_are_counted() {
        let mut queue = Queue::new(Note::default(), (1..=9).map(|n| change(["a", "b"][n as usize % 2], n)));
        assert_eq!(tell_all(&mut queue, &["a"], &[]), [1, 3, 5, 7, 9]);
        assert_eq!((queue.take_collapsed(), queue.take_collapsed()), (3, 0), "2, 4 and 6: 8 is sent later");
        assert_eq!(tell_all(&mut queue, &[], &[change("a", 8)]), [8]);
        assert_eq!(queue.take_collapsed(), 0);
        let many = MAX_WAITING as u64;
        queue.push(
            &(10..=many + 10).map(|n| change(if n % 2 == 0 { "a" } else { "b" }, n)).collect::<Vec<_>>(),
        );
        assert_eq!(queue.take_collapsed(), many - 1);
    }

    #[test]
    fn not_everybody_can_be_owed() {
        let many = MAX_OWED as u64;
        let changes: Vec<Change> = (1..=many + 2).map(|n| change(&format!("x{n}"), n)).collect();
        let restless: Vec<&str> = changes.iter().map(|change| change.name.as_str()).collect();
        let mut queue = Queue::new(Note::default(), changes.clone());
        assert_eq!(tell_all(&mut queue, &restless, &[]), [many + 1, many + 2]);
        assert!(queue.note().to_bytes().len() < 64 * 1024);
    }

    #[test]
    fn who_is_away_for_long_hears_of_the_newest() {
        let many = MAX_WAITING as u64;
        let named = |n: u64| change(if n.is_multiple_of(2) { "a" } else { "b" }, n);
        let mut queue = Queue::default();
        queue.push(&(1..=many).map(named).collect::<Vec<_>>());
        assert_eq!(queue.waiting.len(), MAX_WAITING, "each is told, up to here");
        queue.push(&[named(many + 1)]);
        assert_eq!(tell_all(&mut queue, &[], &[]), [many, many + 1]);
    }

    #[test]
    fn notes_are_numbers_or_documents() {
        assert_eq!(Note::from_bytes(b"17"), Some(Note { done: 17, owed: BTreeSet::new() }));
        for garbage in ["", "x", "{}", "-1", r#"{"done":1}"#, r#"{"done":1,"owed":["a/b"]}"#] {
            assert_eq!(Note::from_bytes(garbage.as_bytes()), None, "{garbage}");
        }
    }

    #[test]
    fn where_there_is_no_webhook_nothing_waits() {
        let mut queue = Queue::new(Note::default(), [change("a", 1), change("a", 2)]);
        assert!(tell_all(&mut queue, &["a"], &[]).is_empty());
        queue.push(&[change("b", 3)]);
        queue.clear();
        assert_eq!(queue.note(), &Note { done: 3, owed: BTreeSet::new() });
        assert!(tell_all(&mut queue, &[], &[change("a", 2)]).is_empty());
    }

    /// Very many components with one change each wait together, and what comes next does not cost all of them.
    #[test]
    fn a_crowd_is_looked_through_when_it_has_doubled() {
        let names: Vec<Name> = (0..=MAX_WAITING).map(|n| Name::parse(&format!("x{n}")).unwrap()).collect();
        let of = |name: &Name, sequence: usize| Change { name: *name, ..change("x", sequence as u64 + 1) };
        let all: Vec<Change> = names.iter().enumerate().map(|(n, name)| of(name, n)).collect();
        let mut queue = Queue::new(Note::default(), []);
        queue.push(&all);
        assert_eq!((queue.waiting.len(), queue.crowded_at), (all.len(), 2 * all.len()));
        let again: Vec<Change> = (0..all.len()).map(|n| of(&names[n % 2], all.len() + n)).collect();
        queue.push(&again);
        assert_eq!(queue.waiting.len(), 2 * all.len(), "not yet");
        queue.push(&[of(&names[0], 2 * all.len())]);
        assert_eq!(queue.waiting.len(), all.len(), "the newest of each");
    }

    #[test]
    fn what_was_told_is_not_told_again() {
        let told = Note { done: 7, ..Note::default() };
        let mut queue = Queue::new(told, [change("a", 6)]);
        queue.push(&[change("a", 7), change("b", 8)]);
        assert_eq!(tell_all(&mut queue, &[], &[]), [8]);
        assert_eq!(queue.note().done, 8);
    }
}
