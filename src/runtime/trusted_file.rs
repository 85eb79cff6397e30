//! Reads small files up to a size limit, and refuses files that other users could have read or
//! changed. The meaning of the contents belongs to the callers.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::trusted_path;

/// The reason why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
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

/// Returns the contents of a file of at most `most` bytes; `None` if there is no such file.
///
/// # Errors
/// If the file is too large, not a regular file, or cannot be read.
pub fn read_limited(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
    read(path, most, |_| Ok(()))
}

/// Does the same for a file that other users must not be able to change.
///
/// # Errors
/// As for [`read_limited`], and if another user could change or replace the file.
pub fn read_trusted(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
    trusted_path::check(path)?;
    read(path, most, |_| Ok(()))
}

/// Does the same for a file that holds a secret.
///
/// # Errors
/// As for [`read_trusted`], and if another user can read the file.
pub fn read_secret(path: &Path, most: usize) -> Result<Option<Vec<u8>>, ReadError> {
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
    // Opening a named pipe must not block.
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

    #[test]
    fn secrets_that_others_can_read_are_refused() {
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
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for (bits, refused) in [(0o777, true), (0o757, true), (0o755, false), (0o700, false)] {
            fs::set_permissions(&above, fs::Permissions::from_mode(bits)).unwrap();
            for read in [read_secret, read_trusted] {
                assert_eq!(matches!(read(&path, 10), Err(ReadError::Untrusted(_))), refused, "{bits:o}");
            }
            assert!(read_limited(&path, 10).is_ok());
        }
    }

    #[test]
    fn large_files_and_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert!(read_limited(&path, 3).unwrap().is_none());
        fs::write(&path, "abc").unwrap();
        assert_eq!(read_limited(&path, 3).unwrap().unwrap(), b"abc");
        assert!(matches!(read_limited(&path, 2), Err(ReadError::TooLarge { most: 2, .. })));
        assert!(matches!(read_limited(dir.path(), 2), Err(ReadError::NotFile { .. })));
    }
}
