//! Replaces and creates files atomically: after a crash a file has its old contents or its new
//! ones. The only place that writes a temporary file and renames it, except the keeper, which keeps
//! its file open across the rename. The meaning of the contents must not be in here.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The mode of a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privacy {
    /// The permissions 0666 without those that the umask removes.
    Plain,
    /// 0600: a secret is in it.
    Secret,
}

impl Privacy {
    fn mode(self) -> u32 {
        match self {
            Self::Plain => 0o666,
            Self::Secret => 0o600,
        }
    }
}

/// Replaces `path`. A reader sees the old contents or the new, also after a crash. Several
/// processes may do it at the same time.
///
/// # Errors
/// Those of the file system; `path` is as before then.
pub fn replace(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<()> {
    let aside = write_aside(path, contents, privacy)?;
    put_in_place(&aside, path, |aside, path| fs::rename(aside, path))
}

/// Gives a complete file its final name. A crash afterwards does not undo that.
///
/// # Errors
/// Those of the file system; the file may have its old name then.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    File::open(parent(to))?.sync_all()
}

/// Creates `path` and returns true, or returns false if it exists. If two processes do it at the
/// same time, exactly one succeeds.
pub fn create_new(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<bool> {
    let aside = write_aside(path, contents, privacy)?;
    let linked = put_in_place(&aside, path, |aside, path| {
        fs::hard_link(aside, path)?;
        fs::remove_file(aside)
    });
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        done => done.map(|()| true),
    }
}

/// Removes the unfinished files of [`replace`] and [`create_new`] that killed processes left beside
/// `path`, if they contain a secret. A process that finds `path` up to date, and so does not write
/// it, calls this.
pub fn remove_unfinished(path: &Path) {
    if let Some(start) = unfinished_name(path) {
        clear_away(parent(path), &start);
    }
}

/// Replaces `path` for a single writer at a time, readable by this user only. The unfinished file
/// is `path` with the extension `new`, and the next attempt overwrites it.
pub fn replace_exclusively(path: &Path, contents: &[u8]) -> io::Result<()> {
    build_aside(path, |aside| {
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(aside)?;
        file.write_all(contents)?;
        file.sync_all()
    })?;
    File::open(parent(path))?.sync_all()
}

/// Renames the file that `build` writes at the given path to `path`, for a single writer at a time.
/// The unfinished file is `path` with the extension `new`. Nothing is synced here.
///
/// # Errors
/// Those of `build` and of the file system; `path` is as before then.
pub fn build_aside(path: &Path, build: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let aside = path.with_extension("new");
    build(&aside).and_then(|()| fs::rename(&aside, path)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&aside);
    })
}

fn put_in_place(
    aside: &Path,
    path: &Path,
    step: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    if let Err(error) = step(aside, path) {
        // The first error is the one to report.
        let _ = fs::remove_file(aside);
        return Err(error);
    }
    File::open(parent(path))?.sync_all()
}

fn write_aside(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<PathBuf> {
    let start = unfinished_name(path).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let aside = parent(path).join(format!("{start}{}", std::process::id()));
    if privacy == Privacy::Secret {
        clear_away(parent(path), &start);
    }
    // Left by a process that crashed and had the same number.
    match fs::remove_file(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(privacy.mode()).open(&aside)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    if let Err(error) = written {
        // As above.
        let _ = fs::remove_file(&aside);
        return Err(error);
    }
    Ok(aside)
}

/// Returns the beginning of the names of unfinished files; the number of the process follows.
fn unfinished_name(path: &Path) -> Option<String> {
    Some(format!(".{}.", path.file_name()?.to_string_lossy()))
}

/// Removes the unfinished files of processes that were killed, since they contain a secret. Other
/// directories may contain a user's own file with such a name.
fn clear_away(directory: &Path, start: &str) {
    // Best effort: an unreadable directory is left alone.
    for entry in fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok) {
        let number =
            entry.file_name().to_str().and_then(|name| name.strip_prefix(start)?.parse::<u32>().ok());
        let is_there = |number| Path::new("/proc").join(format!("{number}")).exists();
        if number.is_some_and(|number| !is_there(number) && is_there(std::process::id())) {
            // Another process may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn temporary_files_of_killed_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("local.json");
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        // Init and this process always exist.
        let (dead, live) = (format!(".local.json.{}", gone.id()), ".local.json.1");
        let others = [".local.json.1a", ".local.json.", ".other.json.99999999"];
        for name in others.into_iter().chain([dead.as_str(), live]) {
            fs::write(dir.path().join(name), "secret").unwrap();
        }
        replace(&path, b"plain", Privacy::Plain).unwrap();
        assert!(names(dir.path()).contains(&dead), "not where people have their files");
        replace(&path, b"new", Privacy::Secret).unwrap();
        let mut wanted = [&others[..], &[live, "local.json"]].concat();
        wanted.sort_unstable();
        assert_eq!(names(dir.path()), wanted);
    }

    #[test]
    fn the_first_of_two_creators_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("local.json");
        assert!(create_new(&path, b"first", Privacy::Secret).unwrap());
        assert!(!create_new(&path, b"second", Privacy::Secret).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(names(dir.path()), ["local.json"]);
    }
}
