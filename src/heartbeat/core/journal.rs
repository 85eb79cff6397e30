//! The journal: every change in order, in pages of lines, one line for each change. A change is
//! published to readers and to the webhook only when it is in the journal. `judge` writes the pages
//! and `tracker` reads them. Pure.

use std::collections::VecDeque;

use serde_json::{Value, json};

use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::beat::Stamp;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::Malformed;
use crate::heartbeat::core::sequence::MAX_NUMBER;
use crate::heartbeat::core::state::{Notification, State};

/// A page is extended with every change until it has this size.
const PAGE_BYTES: usize = 32 * 1024;

/// Pages that are kept for readers that were disconnected for a moment.
const KEPT_PAGES: usize = 12;

/// Pages that are deleted in one write.
const CLEARED_AT_ONCE: usize = 100;

/// The pages, as the judge that writes them knows them.
#[derive(Debug, Default)]
pub struct Journal {
    pages: VecDeque<Page>,
    /// The content of the newest page; `None` if it is unreadable or missing.
    tail: Option<Vec<u8>>,
    /// The lowest number of a new page.
    least: u64,
}

#[derive(Debug, Clone, Copy)]
struct Page {
    number: u64,
    version: i32,
    /// The number of its last change; 0 if it is unreadable.
    last: u64,
    changes: usize,
}

/// A page as it was read.
#[derive(Debug)]
pub struct Read<E> {
    pub number: u64,
    pub version: i32,
    pub data: Vec<u8>,
    pub changes: Result<Vec<Change>, E>,
}

/// A page to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageWrite {
    pub number: u64,
    /// `None` for a new page.
    pub version: Option<i32>,
    pub data: Vec<u8>,
    last: u64,
    changes: usize,
}

impl Journal {
    /// Takes all pages, oldest first.
    pub fn of<E>(pages: &[Read<E>]) -> Self {
        let tail = pages.last().filter(|page| page.changes.is_ok()).map(|page| page.data.clone());
        let page = |read: &Read<E>| {
            let changes = read.changes.as_deref().unwrap_or_default();
            let last = changes.last().map_or(0, |change| change.sequence);
            Page { number: read.number, version: read.version, last, changes: changes.len() }
        };
        Self { pages: pages.iter().map(page).collect(), tail, least: 0 }
    }

    /// For a store that has lost pages: continues with a new page number above all that were ever
    /// read, since readers do not look for pages before the one that they read last.
    #[must_use]
    pub fn after_loss(self, last_page: Option<u64>) -> Self {
        Self { tail: None, least: last_page.map_or(0, |page| page + 1), ..self }
    }

    /// The number of the newest page.
    pub fn newest(&self) -> Option<u64> {
        self.pages.back().map(|page| page.number)
    }

    /// The pages to write for these changes, in order.
    pub fn with(&self, changes: &[Change]) -> Vec<PageWrite> {
        let mut drafts: Vec<PageWrite> = Vec::new();
        let mut number = self.pages.back().map_or(0, |page| page.number + 1).max(self.least);
        for change in changes {
            let line = line_of(change);
            if drafts.is_empty()
                && let (Some(page), Some(tail)) = (self.pages.back(), &self.tail)
            {
                let Page { number, version, last, changes } = *page;
                drafts.push(PageWrite { number, version: Some(version), data: tail.clone(), last, changes });
            }
            if drafts.last().is_none_or(|page| page.data.len() + line.len() > PAGE_BYTES) {
                drafts.push(PageWrite { number, version: None, data: Vec::new(), last: 0, changes: 0 });
                number += 1;
            }
            if let Some(page) = drafts.last_mut() {
                page.data.extend_from_slice(&line);
                page.last = change.sequence;
                page.changes += 1;
            }
        }
        // The newest page may have been full.
        drafts.retain(|page| page.version.is_none() || self.tail.as_ref() != Some(&page.data));
        drafts
    }

    /// Records that a page is in the store.
    pub fn written(&mut self, draft: PageWrite) {
        let PageWrite { number, version, data, last, changes } = draft;
        if version.is_some() {
            self.pages.pop_back();
        }
        let version = version.map_or(0, |version| version + 1);
        self.pages.push_back(Page { number, version, last, changes });
        self.tail = Some(data);
    }

    /// The oldest pages that are no longer needed: the webhook has got the changes up to `heard`,
    /// and of more than `most` changes it gets only each component's newest.
    pub fn spare(&self, heard: u64, most: usize) -> Vec<u64> {
        let mut left: usize = self.pages.iter().map(|page| page.changes).sum();
        let old = self.pages.iter().take(self.pages.len().saturating_sub(KEPT_PAGES));
        let spare = old.take(CLEARED_AT_ONCE).take_while(|page| {
            let spare = page.last <= heard || left > most;
            left -= page.changes;
            spare
        });
        spare.map(|page| page.number).collect()
    }

    /// Records that the oldest pages are deleted.
    pub fn cleared(&mut self, count: usize) {
        self.pages.drain(..count.min(self.pages.len()));
    }
}

fn line_of(change: &Change) -> Vec<u8> {
    let Change { name, state, notification, sequence, at, flaps, stamp } = change;
    let mut row =
        json!([name.as_str(), state.as_str(), notification.map(Notification::as_str), sequence, at, flaps]);
    if let (Some(stamp), Some(row)) = (stamp.text(), row.as_array_mut()) {
        row.push(stamp.into());
    }
    format!("{row}\n").into_bytes()
}

/// # Errors
/// If a line is malformed.
pub fn page_from_bytes(bytes: &[u8]) -> Result<Vec<Change>, Malformed> {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    lines.map(|line| change_of(line).ok_or_else(|| Malformed::new("a bad change"))).collect()
}

fn change_of(line: &[u8]) -> Option<Change> {
    let row: Vec<Value> = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
    let [name, state, notification, sequence, at, flaps, rest @ ..] = row.as_slice() else { return None };
    let stamp = match rest {
        [] => Stamp::default(),
        [stamp] => Stamp::of(stamp.as_str()?),
        _ => return None,
    };
    let notification = match notification {
        Value::Null => None,
        notification => Some(Notification::parse(notification.as_str()?)?),
    };
    Some(Change {
        name: Name::parse(name.as_str()?).ok()?,
        state: State::parse(state.as_str()?)?,
        notification,
        sequence: sequence.as_u64().filter(|number| *number <= MAX_NUMBER)?,
        at: at.as_u64()?,
        flaps: u16::try_from(flaps.as_u64()?).ok()?,
        stamp,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(numbers: std::ops::Range<u64>) -> Vec<Change> {
        let change = |sequence| Change {
            name: Name::parse(&format!("x{}c0s0b0n0", sequence % 1000)).unwrap(),
            state: State::Dead,
            notification: (sequence % 2 == 0).then_some(Notification::DeclaredDead),
            sequence,
            at: 1_700_000_000_000,
            flaps: 3,
            stamp: Stamp::of(if sequence % 3 == 0 { "noon \"sharp\"" } else { "" }),
        };
        numbers.map(change).collect()
    }

    /// A store for pages.
    #[derive(Default)]
    struct Store(Vec<(u64, i32, Vec<u8>)>);

    impl Store {
        fn write(&mut self, journal: &mut Journal, changes: &[Change]) {
            for draft in journal.with(changes) {
                match draft.version {
                    None => self.0.push((draft.number, 0, draft.data.clone())),
                    Some(version) => {
                        let page = self.0.last_mut().unwrap();
                        assert_eq!((page.0, page.1), (draft.number, version));
                        *page = (draft.number, version + 1, draft.data.clone());
                    }
                }
                journal.written(draft);
            }
        }

        fn read(&self) -> Vec<Read<Malformed>> {
            let page = |(number, version, data): &(u64, i32, Vec<u8>)| Read {
                number: *number,
                version: *version,
                data: data.clone(),
                changes: page_from_bytes(data),
            };
            self.0.iter().map(page).collect()
        }

        fn all(&self) -> Vec<Change> {
            self.read().into_iter().flat_map(|page| page.changes.unwrap()).collect()
        }
    }

    #[test]
    fn changes_of_all_judges_are_read_in_order() {
        let (mut store, mut journal) = (Store::default(), Journal::default());
        let mut from = 1;
        for many in [1, 1, 700, 3, 0, 5000, 2] {
            store.write(&mut journal, &changes(from..from + many));
            from += many;
            // The next judge continues the journal.
            journal = Journal::of(&store.read());
        }
        assert_eq!(store.all(), changes(1..from));
        assert!(store.0.iter().all(|(_, _, data)| data.len() <= PAGE_BYTES));
        let numbers: Vec<u64> = store.0.iter().map(|(number, ..)| *number).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    }

    #[test]
    fn unreadable_page_is_not_overwritten() {
        let (mut store, mut journal) = (Store::default(), Journal::default());
        store.write(&mut journal, &changes(1..3));
        store.0[0].2.extend(b"garbage");
        assert_eq!(store.read()[0].changes, Err(Malformed::new("a bad change")));
        journal = Journal::of(&store.read());
        store.write(&mut journal, &changes(3..5));
        assert!(store.0[0].2.ends_with(b"garbage"));
        assert_eq!(store.read()[1].changes, Ok(changes(3..5)));
    }

    #[test]
    fn old_pages_that_the_webhook_has_got_are_spare() {
        let (mut store, mut journal) = (Store::default(), Journal::default());
        store.write(&mut journal, &changes(1..20_000));
        let pages = store.read();
        assert!(pages.len() > 2 * KEPT_PAGES);
        let last = |page: usize| pages[page].changes.as_ref().unwrap().last().unwrap().sequence;
        assert!(journal.spare(0, 20_000).is_empty());
        assert_eq!(journal.spare(last(1) - 1, 20_000), [0]);
        assert_eq!(journal.spare(last(1), 20_000), [0, 1]);
        let old = pages.len() - KEPT_PAGES;
        assert_eq!(journal.spare(u64::MAX, 20_000).len(), old);
        // A webhook that is unreachable for ever does not fill the store.
        assert_eq!(journal.spare(0, 19_998), [0]);
        assert_eq!(journal.spare(0, 0).len(), old);
        journal.cleared(2);
        assert_eq!(journal.spare(last(2), 20_000), [2]);
    }
}
