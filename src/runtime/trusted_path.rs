//! Reads the owners and modes of all directories on the way to a path; `ownership` decides whether
//! they are safe.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Component as Part, Path, PathBuf};

use rustix::fs::lgetxattr;
use rustix::process::geteuid;

use super::ownership::{Component, Kind, Untrusted, verify};

/// As many symbolic links as the kernel follows.
const MAX_LINKS: usize = 40;

/// Why a path cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl Error {
    /// The command that makes the path safe, if there is one.
    pub fn repair(&self) -> Option<String> {
        match self {
            Self::Untrusted(refused) => Some(refused.repair()),
            Self::Io { .. } => None,
        }
    }

    /// The reason in one line, with the command that makes the path safe.
    pub fn with_repair(&self) -> String {
        match self {
            Self::Untrusted(refused) => format!("{refused}; to repair it: {}", refused.repair()),
            Self::Io { source, .. } => format!("{self}: {source}"),
        }
    }
}

/// Refuses a path that users other than root and the user of this process could change or replace.
/// A path that does not exist, or not in full, is checked as far as it exists.
///
/// # Errors
/// [`Error::Untrusted`] for the first step that another user could change, and [`Error::Io`].
pub fn check(path: &Path) -> Result<(), Error> {
    let (steps, is_complete) = steps(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
    Ok(verify(&steps, geteuid().as_raw(), is_complete)?)
}

/// The same for a directory and all its entries: other users may have created files in it before
/// its permissions were repaired.
///
/// # Errors
/// As for [`check`].
pub fn check_with_entries(directory: &Path) -> Result<(), Error> {
    check(directory)?;
    let failed = |source| Error::Io { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        check(&entry.map_err(failed)?.path())?;
    }
    Ok(())
}

/// Creates a directory and those above it, with `mode` and never writable by others, whatever the
/// umask is. The path is checked before, so that no entry is created in a directory of another
/// user, and after, in case another user created it first.
///
/// # Errors
/// As for [`check`].
pub fn ensure_directory(path: &Path, mode: u32) -> Result<(), Error> {
    check(path)?;
    let made = DirBuilder::new().recursive(true).mode(mode & !0o022).create(path);
    made.map_err(|source| Error::Io { path: path.to_owned(), source })?;
    check(path)
}

/// Every step from `/` to the path, through symbolic links, and whether the path exists.
fn steps(path: &Path) -> io::Result<(Vec<Component>, bool)> {
    let mut rest = parts(&std::path::absolute(path)?);
    let mut at = PathBuf::from("/");
    let mut found = vec![component(&at, &fs::symlink_metadata(&at)?)];
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(name);
        let metadata = match fs::symlink_metadata(&next) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok((found, false));
            }
            Err(error) => return Err(error),
        };
        found.push(component(&next, &metadata));
        if !metadata.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(rustix::io::Errno::LOOP.into());
        }
        let target = fs::read_link(&next)?;
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        let mut target = parts(&target);
        target.append(&mut rest);
        rest = target;
    }
    Ok((found, true))
}

/// The names on the way, `..` included.
fn parts(path: &Path) -> VecDeque<OsString> {
    let name = |part: Part<'_>| match part {
        Part::Normal(name) => Some(name.to_owned()),
        Part::ParentDir => Some(OsStr::new("..").to_owned()),
        Part::RootDir | Part::CurDir | Part::Prefix(_) => None,
    };
    path.components().filter_map(name).collect()
}

fn component(path: &Path, metadata: &Metadata) -> Component {
    let kind = match metadata.file_type() {
        kind if kind.is_symlink() => Kind::Link,
        kind if kind.is_dir() => Kind::Directory,
        _ => Kind::Other,
    };
    let mode = metadata.mode();
    // Read only where the decision depends on it.
    let has_acl = kind != Kind::Link && mode & 0o020 != 0 && has_acl(path);
    Component { path: path.to_owned(), kind, owner: metadata.uid(), group: metadata.gid(), mode, has_acl }
}

fn has_acl(path: &Path) -> bool {
    let mut list = [0u8; 8192];
    match lgetxattr(path, "system.posix_acl_access", &mut list[..]) {
        Ok(length) => length > 0,
        // The list is longer than the buffer.
        Err(rustix::io::Errno::RANGE) => true,
        // There is none, or the file system has no such lists.
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_is_trusted_until_others_can_write_on_the_way_to_it() {
        let home = tempfile::tempdir().unwrap();
        let (above, directory) = (home.path().join("above"), home.path().join("above/units"));
        ensure_directory(&directory, 0o777).unwrap();
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o022, 0, "whatever the umask is");
        check(&directory.join("not/yet/there")).unwrap();
        for writable in [&above, &directory] {
            mode(writable, 0o777);
            for path in [&directory, &directory.join("not/yet/there")] {
                let refused = check(path).unwrap_err();
                let expected = format!("chmod go-w {}", writable.display());
                assert_eq!(refused.repair().as_deref(), Some(expected.as_str()), "{refused}");
            }
            assert!(ensure_directory(&directory.join("new"), 0o700).is_err());
            assert!(!directory.join("new").exists());
            mode(writable, 0o755);
            check(&directory).unwrap();
        }
    }

    #[test]
    fn both_a_link_and_its_target_are_checked() {
        let home = tempfile::tempdir().unwrap();
        let (own, open) = (home.path().join("own"), home.path().join("open"));
        for directory in [&own, &open] {
            fs::create_dir(directory).unwrap();
        }
        let (into, out) = (own.join("into-open"), open.join("into-own"));
        symlink("../open/units", &into).unwrap();
        symlink(&own, &out).unwrap();
        fs::create_dir(open.join("units")).unwrap();
        for path in [&into, &out, &out.join("into-open/..")] {
            check(path).unwrap();
        }
        mode(&open, 0o777);
        for path in [&into, &out, &out.join("into-open/..")] {
            assert!(check(path).is_err(), "{}", path.display());
        }
        check(&own).unwrap();
        symlink("loop", own.join("loop")).unwrap();
        assert!(matches!(check(&own.join("loop")), Err(Error::Io { .. })));
    }

    #[test]
    fn entries_that_others_can_write_are_found() {
        let home = tempfile::tempdir().unwrap();
        check_with_entries(&home.path().join("none")).unwrap();
        let file = home.path().join("log");
        fs::write(&file, "").unwrap();
        check_with_entries(home.path()).unwrap();
        mode(&file, 0o666);
        check(home.path()).unwrap();
        assert!(check_with_entries(home.path()).unwrap_err().with_repair().contains("chmod go-w "));
    }
}
