//! Commands whose answer was lost: noted beside the credentials, so that the same command soon after finds out what
//! became of it and finishes it, and does nothing twice. A note is a help and never an obstacle: one that cannot be read
//! is no note.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha1::{Digest as _, Sha1};

use super::file::{self, Privacy};
use crate::store::Operation;

/// Who types the same words later than this means them anew.
const KEPT: Duration = Duration::from_secs(600);
const MAX_BYTES: usize = 1024 * 1024;

/// A file of its own for each command, so that several that fail at once do not get in each other's way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    words: Vec<String>,
    mark: String,
    /// Seconds since 1970.
    at: u64,
}

/// One run of a command, and what is noted of a run before it.
#[derive(Debug)]
pub(super) struct Unanswered {
    directory: PathBuf,
    words: Vec<String>,
    noted: bool,
    operation: Operation,
}

impl Unanswered {
    pub(super) fn look(directory: PathBuf, words: Vec<String>) -> anyhow::Result<Self> {
        let bytes = file::read_limited(&directory.join(name(&words)), MAX_BYTES).ok().flatten();
        let note = bytes.and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok());
        let ours = note.filter(|note| note.words == words && is_fresh(note.at, seconds_now()));
        let repeated = ours.and_then(|note| Operation::again(&note.mark));
        let noted = repeated.is_some();
        Ok(Self { directory, words, noted, operation: repeated.map_or_else(Operation::new, Ok)? })
    }

    pub(super) fn operation(&self) -> Operation {
        self.operation.clone()
    }

    /// The command was answered.
    pub(super) fn forget(self) -> io::Result<()> {
        if !self.noted {
            return Ok(());
        }
        fs::remove_file(self.directory.join(name(&self.words)))
    }

    /// Nobody knows what became of the command.
    pub(super) fn remember(self) -> io::Result<()> {
        file::ensure_private_dir(&self.directory)?;
        self.sweep()?;
        let path = self.directory.join(name(&self.words));
        let mark = self.operation.mark().to_owned();
        let note = Note { words: self.words, mark, at: seconds_now() };
        file::replace(&path, &serde_json::to_vec(&note)?, Privacy::Secret)
    }

    /// Removes what nobody came back for.
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
    let digest = Sha1::digest(words.join("\0"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Neither too old nor from a clock that has gone back since.
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
    fn a_note_is_for_soon_after() {
        assert!(is_fresh(1000, 1000) && is_fresh(1000, 1600));
        assert!(!is_fresh(1000, 1601), "too late");
        assert!(!is_fresh(1000, 999), "a clock that went back");
    }

    #[test]
    fn a_note_lives_until_the_command_is_answered() {
        let home = tempfile::tempdir().unwrap();
        let look = |text| Unanswered::look(home.path().join("notes"), words(text)).unwrap();
        let first = look("add-unit a");
        let mark = first.operation().mark().to_owned();
        assert!(!first.noted);
        first.remember().unwrap();
        let second = look("add-unit a");
        assert_eq!((second.noted, second.operation().mark()), (true, mark.as_str()));
        let other = look("add-unit b");
        assert!(!other.noted && other.operation().mark() != mark);
        other.forget().unwrap();
        assert!(look("add-unit a").noted);
        second.forget().unwrap();
        assert!(!look("add-unit a").noted);
    }

    #[test]
    fn garbage_is_no_note_and_no_obstacle() {
        let home = tempfile::tempdir().unwrap();
        let look = || Unanswered::look(home.path().to_owned(), words("x")).unwrap();
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
