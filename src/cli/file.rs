//! Files that are there whole or not at all, and secrets that nobody else can read. No meaning of contents here.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::runtime::trusted_path;

/// Who may read a file that is written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Privacy {
    /// What the umask leaves of 0666.
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

/// Replaces `path`: a reader sees the old contents or the new, also after a crash.
pub(super) fn replace(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<()> {
    let aside = write_aside(path, contents, privacy)?;
    put_in_place(&aside, path, |aside, path| fs::rename(aside, path))
}

/// Puts output where a person pointed: a file is replaced, behind a link too; a device or a pipe is written to.
pub(super) fn write_output(path: &Path, contents: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => OpenOptions::new().write(true).open(path)?.write_all(contents),
        Ok(_) => replace(&path.canonicalize()?, contents, Privacy::Plain),
        Err(error) if error.kind() == io::ErrorKind::NotFound => replace(path, contents, Privacy::Plain),
        Err(error) => Err(error),
    }
}

/// Writes `path` only if nothing is there, and says whether it did. Of two at once exactly one succeeds.
pub(super) fn create_new(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<bool> {
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

fn put_in_place(
    aside: &Path,
    path: &Path,
    step: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    if let Err(error) = step(aside, path) {
        // The first error is the one worth telling; what is left behind is a file with a name of its own.
        let _ = fs::remove_file(aside);
        return Err(error);
    }
    File::open(parent(path))?.sync_all()
}

fn write_aside(path: &Path, contents: &[u8], privacy: Privacy) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let start = format!(".{}.", name.to_string_lossy());
    let aside = parent(path).join(format!("{start}{}", std::process::id()));
    if privacy == Privacy::Secret {
        clear_away(parent(path), &start);
    }
    // A file of that name is what a crashed process with the same number left behind.
    match fs::remove_file(&aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(privacy.mode()).open(&aside)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    if let Err(error) = written {
        // As above: the write error is the one to tell.
        let _ = fs::remove_file(&aside);
        return Err(error);
    }
    Ok(aside)
}

/// Removes what processes that were killed meanwhile have left of the same: there is a secret in it. Only in our own
/// directories; where people have their files, one may be called like that.
fn clear_away(directory: &Path, start: &str) {
    // What cannot be looked at is left as it is.
    for entry in fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok) {
        let number =
            entry.file_name().to_str().and_then(|name| name.strip_prefix(start)?.parse::<u32>().ok());
        let is_there = |number| Path::new("/proc").join(format!("{number}")).exists();
        if number.is_some_and(|number| !is_there(number) && is_there(std::process::id())) {
            // Another may do the same at the same time.
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

/// Makes a directory, 0700, and those above it. One that is there already is left as it is.
pub(super) fn ensure_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("{} can be read by others (mode {mode:03o})", path.display())]
    NotPrivate { path: PathBuf, mode: u32 },
    #[error("{} has more than {most} bytes", path.display())]
    TooLarge { path: PathBuf, most: usize },
    #[error("{} is not a file", path.display())]
    NotFile { path: PathBuf },
    #[error(transparent)]
    Untrusted(#[from] trusted_path::Error),
    #[error("cannot read {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// The contents of a file of at most `most` bytes; `None` if there is no such file.
pub(super) fn read_limited(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
    read(path, most, |_| Ok(()))
}

/// The same for a file that other users must not be able to change.
pub(super) fn read_trusted(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
    trusted_path::check(path)?;
    read(path, most, |_| Ok(()))
}

/// The same for a file with a secret in it, which is refused if anyone else could have read or
/// changed it.
pub(super) fn read_secret(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
    trusted_path::check(path)?;
    read(path, most, |metadata| {
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 == 0 { Ok(()) } else { Err(ReadError::NotPrivate { path: path.to_owned(), mode }) }
    })
}

fn read(
    path: &Path,
    most: usize,
    check: impl FnOnce(&fs::Metadata) -> Result<(), ReadError>,
) -> Result<Option<Vec<u8>>, ReadError> {
    let io_error = |source| ReadError::Io { path: path.to_owned(), source };
    // Not to be held up by a pipe that someone put in the file's place.
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(io_error)?,
    };
    let metadata = file.metadata().map_err(io_error)?;
    if !metadata.is_file() {
        return Err(ReadError::NotFile { path: path.to_owned() });
    }
    check(&metadata)?;
    let mut contents = Vec::new();
    let limit = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_end(&mut contents).map_err(io_error)?;
    if contents.len() > most {
        return Err(ReadError::TooLarge { path: path.to_owned(), most });
    }
    Ok(Some(contents))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_secret_is_private_from_the_first_byte_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/local.json");
        ensure_private_dir(path.parent().unwrap()).unwrap();
        assert_eq!(mode(&dir.path().join("deep")), 0o700);
        replace(&path, b"one", Privacy::Secret).unwrap();
        replace(&path, b"two", Privacy::Secret).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(read_secret(&path, 10).unwrap().unwrap(), b"two");
        assert_eq!(names(path.parent().unwrap()), ["local.json"]);
    }

    #[test]
    fn what_a_killed_process_left_of_a_secret_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("local.json");
        let mut gone = std::process::Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        // Init is always there, and so is whoever runs this.
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
        assert_eq!(read_secret(&path, 10).unwrap().unwrap(), b"first");
        assert_eq!(names(dir.path()), ["local.json"]);
    }

    #[test]
    fn output_goes_through_links_and_into_devices() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link, null) = (dir.path().join("f"), dir.path().join("l"), dir.path().join("null"));
        write_output(&file, b"one").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_output(&link, b"two").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"two");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        write_output(&null, b"gone").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(write_output(dir.path(), b"no").is_err());
    }

    #[test]
    fn what_others_can_read_is_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("local.json");
        fs::write(&path, "x").unwrap();
        for (bits, refused) in [(0o600, false), (0o400, false), (0o640, true), (0o604, true), (0o620, true)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
            assert_eq!(read_secret(&path, 10).is_err(), refused, "{bits:o}");
        }
    }

    #[test]
    fn files_that_others_can_replace_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("config");
        let path = above.join("local.json");
        fs::create_dir(&above).unwrap();
        replace(&path, b"x", Privacy::Secret).unwrap();
        for (bits, refused) in [(0o777, true), (0o757, true), (0o755, false), (0o700, false)] {
            fs::set_permissions(&above, fs::Permissions::from_mode(bits)).unwrap();
            for read in [read_secret, read_trusted] {
                assert_eq!(matches!(read(&path, 10), Err(ReadError::Untrusted(_))), refused, "{bits:o}");
            }
            assert!(read_limited(&path, 10).is_ok());
        }
    }

    #[test]
    fn reads_have_limits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert!(read_limited(&path, 3).unwrap().is_none());
        fs::write(&path, "abc").unwrap();
        assert_eq!(read_limited(&path, 3).unwrap().unwrap(), b"abc");
        assert!(matches!(read_limited(&path, 2), Err(ReadError::TooLarge { most: 2, .. })));
        assert!(matches!(read_limited(dir.path(), 2), Err(ReadError::NotFile { .. })));
    }
}
