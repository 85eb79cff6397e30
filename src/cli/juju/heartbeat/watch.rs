//! `juju heartbeat watch`: prints every change in the order of the journal, from now on or from a
//! sequence number on.

use std::time::Duration;

use anyhow::Context as _;
use tokio::time::timeout;

use super::Format;
use crate::cli::args::environment::Globals;
use crate::cli::output;
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::state::State;
use crate::heartbeat::store::{self as heartbeat_store, Page};
use crate::heartbeat::webhook::change_body;
use crate::runtime::clock::utc;
use crate::store::changes::Watched;
use crate::store::tree::Feed as _;

/// Interval at which the command checks that its stdout is still read.
const LOOK_FOR_READER: Duration = Duration::from_secs(1);

/// Position in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bookmark {
    page: u64,
    sequence: u64,
}

/// Changes after a position.
#[derive(Debug, Default, PartialEq, Eq)]
struct News {
    changes: Vec<Change>,
    /// Changes before this number may be missing: they are no longer in the journal, or cannot be
    /// read.
    missing_until: Option<u64>,
    problems: Vec<String>,
}

impl Bookmark {
    /// Advances over `pages`, which start with the current page if it still exists.
    fn read(&mut self, pages: &[Page]) -> News {
        let mut news = News::default();
        let first_sequence = |page: &Page| page.changes.as_ref().ok()?.first().map(|change| change.sequence);
        let mut missing = pages.first().is_some_and(|page| page.number > self.page);
        for page in pages {
            match &page.changes {
                Ok(changes) => {
                    if let Some(first) =
                        first_sequence(page).filter(|first| missing && *first > self.sequence)
                    {
                        news.missing_until = Some(first);
                    }
                    missing &= changes.is_empty();
                    news.changes.extend(changes.iter().filter(|change| change.sequence > self.sequence));
                    self.sequence =
                        changes.last().map_or(self.sequence, |last| last.sequence.max(self.sequence));
                }
                Err(problem) => {
                    news.problems.push(problem.to_string());
                    missing = true;
                }
            }
            self.page = page.number;
        }
        news
    }
}

/// Prints a line for each change until interrupted.
pub(super) async fn watch(globals: &Globals, since: Option<u64>, format: Format) -> anyhow::Result<()> {
    let target = globals.target()?;
    let environment = target.open().await?;
    heartbeat_store::ensure(environment.tree(), &environment.info().roles).await?;
    let tree = environment.into_tree();
    let mut feed = Watched::HeartbeatJournal.feed(&tree).await?;
    let mut bookmark = Bookmark { page: 0, sequence: since.unwrap_or(0) };
    if since.is_none() {
        bookmark.page = heartbeat_store::newest_page(&tree).await?.unwrap_or(0);
        bookmark.read(&heartbeat_store::journal(&tree, bookmark.page).await?);
    }
    loop {
        match timeout(LOOK_FOR_READER, feed.next()).await {
            // The event only means that the journal has to be read again.
            Ok(event) => drop(event?),
            Err(_) if output::reader_is_gone() => return Ok(()),
            Err(_) => continue,
        }
        let before = bookmark.sequence;
        let news = bookmark.read(&heartbeat_store::journal(&tree, bookmark.page).await?);
        for problem in &news.problems {
            output::message(&format!("warning: {problem}: some changes are not shown"));
        }
        let mut changes = Vec::new();
        if let Some(until) = news.missing_until {
            output::message(
                "warning: the journal no longer has all changes; showing only the newest of each component",
            );
            let records = heartbeat_store::overview(&tree).await?.records;
            changes.extend(records.iter().map(Change::newest));
            changes.retain(|change| change.sequence > before && change.sequence < until);
            changes.sort_unstable_by_key(|change| change.sequence);
        }
        changes.extend(news.changes);
        let text: String = changes.iter().map(|change| line(change, format)).collect();
        output::data(&text).context("cannot write to stdout")?;
    }
}

fn line(change: &Change, format: Format) -> String {
    if format == Format::Json {
        return format!("{}\n", String::from_utf8_lossy(&change_body(change)));
    }
    let message = match (change.notification, change.state) {
        (Some(notification), _) => notification.message(),
        (None, State::Stopped) => "planned stop",
        (None, _) => "back from a planned stop",
    };
    format!("{}  {}  {}  {message}\n", utc(change.at), change.name, change.state.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::core::beat::Stamp;
    use crate::heartbeat::core::name::Name;
    use crate::heartbeat::core::state::Notification;
    use crate::store::{Error, paths};

    fn change(sequence: u64) -> Change {
        Change::started("a", sequence)
    }

    fn page(number: u64, sequences: &[u64]) -> Page {
        let changes = Ok(sequences.iter().copied().map(change).collect());
        Page { number, version: 0, data: Vec::new(), changes }
    }

    fn numbers(news: &News) -> Vec<u64> {
        news.changes.iter().map(|change| change.sequence).collect()
    }

    #[test]
    fn each_change_is_shown_once() {
        let mut bookmark = Bookmark { page: 3, sequence: 7 };
        let news = bookmark.read(&[page(3, &[6, 7, 8]), page(4, &[9, 10])]);
        assert_eq!((numbers(&news), news.missing_until), (vec![8, 9, 10], None));
        assert_eq!(bookmark, Bookmark { page: 4, sequence: 10 });
        assert_eq!(bookmark.read(&[page(4, &[9, 10])]), News::default());
        let news = bookmark.read(&[page(4, &[9, 10, 11]), page(5, &[12])]);
        assert_eq!((numbers(&news), news.missing_until), (vec![11, 12], None));
    }

    #[test]
    fn missing_changes_are_reported() {
        let mut bookmark = Bookmark { page: 3, sequence: 7 };
        let news = bookmark.read(&[page(5, &[20, 21])]);
        assert_eq!((numbers(&news), news.missing_until), (vec![20, 21], Some(20)));
        // With a sequence number whose page is not known.
        let mut bookmark = Bookmark { page: 0, sequence: 20 };
        let news = bookmark.read(&[page(5, &[20, 21]), page(6, &[22])]);
        assert_eq!((numbers(&news), news.missing_until), (vec![21, 22], None));
        let problem = Error::Corrupt { path: paths::heartbeat_page(6), problem: "bad".to_owned() };
        let garbled = Page { changes: Err(problem), ..page(6, &[]) };
        let news = bookmark.read(&[garbled, page(7, &[40])]);
        assert_eq!((numbers(&news), news.missing_until, news.problems.len()), (vec![40], Some(40), 1));
    }

    #[test]
    fn planned_stops_have_their_own_message() {
        let name = Name::parse("a").unwrap();
        for (state, notification, message) in [
            (State::Ok, Some(Notification::Started), "Heartbeat started"),
            (State::Stopped, None, "planned stop"),
            (State::Ok, None, "back from a planned stop"),
        ] {
            let text = line(
                &Change { name, state, notification, sequence: 1, at: 0, flaps: 0, stamp: Stamp::default() },
                Format::Text,
            );
            assert_eq!(text, format!("1970-01-01T00:00:00Z  a  {}  {message}\n", state.as_str()));
        }
    }
}
