//! Writes output files and private directories. `runtime::atomic_file` writes files as a whole, and
//! `runtime::trusted_file` reads files. The meaning of their contents must not be in here.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

pub(super) use crate::runtime::atomic_file::{
    Privacy, build_aside, create_new, remove_unfinished, rename, replace,
};

/// Writes output to the path that an operator named: a file is replaced atomically, also behind a
/// link; a device or a pipe is written to.
pub(super) fn write_output(path: &Path, contents: &[u8]) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => OpenOptions::new().write(true).open(path)?.write_all(contents),
        Ok(_) => replace(&path.canonicalize()?, contents, Privacy::Plain),
        Err(error) if error.kind() == io::ErrorKind::NotFound => replace(path, contents, Privacy::Plain),
        Err(error) => Err(error),
    }
}

/// Creates a directory and its parents with mode 0700. Existing directories are not changed.
pub(super) fn ensure_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::runtime::trusted_file::read_secret;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn secrets_are_written_with_mode_0600_and_leave_no_temporary_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/local.json");
        ensure_private_dir(path.parent().unwrap()).unwrap();
        assert_eq!(mode(&dir.path().join("deep")), 0o700);
        replace(&path, b"one", Privacy::Secret).unwrap();
        replace(&path, b"two", Privacy::Secret).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(read_secret(&path, 10).unwrap().unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn output_follows_links_and_writes_to_devices() {
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
}
