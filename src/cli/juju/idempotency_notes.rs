//! Notes of commands whose response was lost, saved beside the credentials. If the same command
//! line is run again soon, it continues the noted operation instead of repeating it. Unreadable
//! notes are ignored.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha1::{Digest as _, Sha1};

use crate::cli::file::{self, Privacy};
use crate::model::hex;
use crate::runtime::trusted_file;
use crate::store::IdempotencyKey;

/// Age at which a note expires: the same command line is a new operation then.
const KEPT: Duration = Duration::from_secs(600);
const MAX_BYTES: usize = 1024 * 1024;

/// Contents of a note. Each command line has its own file, so that concurrent commands do not
/// conflict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    words: Vec<String>,
    mark: String,
    /// Seconds since 1970.
    at: u64,
}

/// One run of a command, with the note of its previous run.
#[derive(Debug)]
pub(super) struct IdempotencyNote {
    directory: PathBuf,
    words: Vec<String>,
    noted: bool,
    operation: IdempotencyKey,
}

impl IdempotencyNote {
    pub(super) fn look(directory: PathBuf, words: Vec<String>) -> anyhow::Result<Self> {
        let bytes = trusted_file::read_limited(&directory.join(name(&words)), MAX_BYTES).ok().flatten();
        let note = bytes.and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
        let ours = note.filter(|note| note.words == words && is_fresh(note.at, seconds_now()));
        let repeated = ours.and_then(|note| IdempotencyKey::again(&note.mark));
        let noted = repeated.is_some();
        Ok(Self { directory, words, noted, operation: repeated.map_or_else(IdempotencyKey::new, Ok)? })
    }

    pub(super) fn operation(&self) -> IdempotencyKey {
        self.operation.clone()
    }

    /// Removes the note after a response.
    pub(super) fn forget(self) -> io::Result<()> {
        if !self.noted {
            return Ok(());
        }
        fs::remove_file(self.directory.join(name(&self.words)))
    }

    /// Saves a note after a failure whose outcome is unknown.
    pub(super) fn remember(self) -> io::Result<()> {
        file::ensure_private_dir(&self.directory)?;
        self.sweep()?;
        let path = self.directory.join(name(&self.words));
        let mark = self.operation.as_str().to_owned();
        let note = Note { words: self.words, mark, at: seconds_now() };
        file::replace(&path, &serde_json::to_vec(&note)?, Privacy::Secret)
    }

    /// Removes expired notes.
    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let old = entry.metadata()?.modified()?.elapsed().is_ok_and(|age| age > KEPT);
            if old {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

fn name(words: &[String]) -> String {
    hex(&Sha1::digest(words.join("\0")))
}

/// Whether a note is neither expired nor from the future, for example after a clock change.
fn is_fresh(at: u64, now: u64) -> bool {
    now.checked_sub(at).is_some_and(|age| age <= KEPT.as_secs())
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn notes_expire() {
        assert!(is_fresh(1000, 1000) && is_fresh(1000, 1600));
        assert!(!is_fresh(1000, 1601), "too late");
        assert!(!is_fresh(1000, 999), "a clock that went back");
    }

    #[test]
    fn a_note_stays_until_the_command_gets_a_response() {
        let home = tempfile::tempdir().unwrap();
        let look = |text| IdempotencyNote::look(home.path().join("notes"), words(text)).unwrap();
        let first = look("add-unit a");
        let mark = first.operation().as_str().to_owned();
        assert!(!first.noted);
        first.remember().unwrap();
        let second = look("add-unit a");
        assert_eq!((second.noted, second.operation().as_str()), (true, mark.as_str()));
        let other = look("add-unit b");
        assert!(!other.noted && other.operation().as_str() != mark);
        other.forget().unwrap();
        assert!(look("add-unit a").noted);
        second.forget().unwrap();
        assert!(!look("add-unit a").noted);
    }

    #[test]
    fn invalid_notes_are_ignored() {
        let home = tempfile::tempdir().unwrap();
        let look = || IdempotencyNote::look(home.path().to_owned(), words("x")).unwrap();
        let stranger = serde_json::json!({"words": ["y"], "mark": "a".repeat(32), "at": seconds_now()});
        let unmarked = serde_json::json!({"words": ["x"], "mark": "no mark", "at": seconds_now()});
        for garbage in ["{".to_owned(), "[]".to_owned(), stranger.to_string(), unmarked.to_string()] {
            fs::write(home.path().join(name(&words("x"))), garbage).unwrap();
            assert!(!look().noted);
            look().remember().unwrap();
            assert!(look().noted);
        }
    }
}
