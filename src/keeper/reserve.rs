//! Disk space that is reserved in a file. When the disk is full, the file is truncated: accepted
//! changes can still be logged, a snapshot can be written, and sessions can be opened and closed,
//! while new changes are refused.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;

use super::log::FILE_MODE;

/// The reserve takes at most this share of a file system.
const SHARE: u64 = 16;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[derive(Debug)]
pub(super) struct Reserve {
    path: PathBuf,
    /// The configured size; on a small file system the reserve is smaller.
    wanted: u64,
    /// The space that is reserved now.
    held: u64,
}

/// Returns the size of the reserve on a file system of `total` bytes, for a tree whose snapshot has
/// `snapshot` bytes. 0 is none.
fn size(wanted: u64, total: u64, snapshot: u64) -> u64 {
    if wanted == 0 {
        return 0;
    }
    let base = wanted.min(total / SHARE);
    // The log can be shortened only after a snapshot, so the reserve includes one, unless the tree
    // is large and the disk small.
    if snapshot <= total / SHARE { base + snapshot } else { base }
}

impl Reserve {
    /// Reads the size of a reserve that an earlier process left in `dir`. Allocates no space.
    pub(super) fn in_dir(dir: &Path, wanted: u64) -> Self {
        let path = dir.join("reserve");
        let held = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        Reserve { path, wanted, held }
    }

    /// Reserves the space that a tree with a snapshot of this size needs. Does nothing if it is
    /// reserved already.
    pub(super) fn fill(&mut self, snapshot_bytes: u64) -> io::Result<()> {
        let dir = self.path.parent().unwrap_or(&self.path);
        let stat = statvfs(dir)?;
        let bytes = size(self.wanted, stat.f_blocks.saturating_mul(stat.f_frsize), snapshot_bytes);
        if bytes <= self.held {
            return Ok(());
        }
        let file =
            File::options().write(true).create(true).truncate(false).mode(FILE_MODE).open(&self.path)?;
        let allocated = match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            // On a file system without `fallocate`, zeros are written.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => write_zeros(&file, bytes),
            done => done.map_err(Into::into),
        };
        match allocated.and_then(|()| file.sync_all()) {
            Ok(()) => self.held = bytes,
            Err(err) => {
                // A partial reserve would take space from the log and be of little use.
                file.set_len(self.held)?;
                return Err(err);
            }
        }
        Ok(())
    }

    /// Returns the space that is reserved now.
    pub(super) fn bytes(&self) -> u64 {
        self.held
    }

    /// Releases the space to the file system. Returns false if none was reserved.
    pub(super) fn release(&mut self) -> bool {
        if std::mem::take(&mut self.held) == 0 {
            return false;
        }
        let emptied = File::options()
            .write(true)
            .open(&self.path)
            .and_then(|file| file.set_len(0).and_then(|()| file.sync_all()));
        emptied.is_ok()
    }
}

fn write_zeros(file: &File, bytes: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let mut at = 0;
    while at < bytes {
        let step = usize::try_from(bytes - at).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
        file.write_all_at(&ZEROS[..step], at)?;
        at += step as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserve_is_smaller_on_a_small_disk() {
        const MB: u64 = 1 << 20;
        for (wanted, total, snapshot, expected) in [
            (16 * MB, 1024 * MB, 0, 16 * MB),
            (16 * MB, 1024 * MB, 50 * MB, 66 * MB),
            (16 * MB, 1024 * MB, 100 * MB, 16 * MB),
            (16 * MB, 16 * MB, 0, MB),
            (0, 1024 * MB, 50 * MB, 0),
        ] {
            assert_eq!(size(wanted, total, snapshot), expected, "{wanted} of {total}, snapshot {snapshot}");
        }
    }

    #[test]
    fn space_is_reserved_until_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let held = || std::fs::metadata(dir.path().join("reserve")).map_or(0, |metadata| metadata.len());
        let mut reserve = Reserve::in_dir(dir.path(), 64 << 10);
        assert!(!reserve.release(), "no space was reserved");
        reserve.fill(0).unwrap();
        assert_eq!(held(), 64 << 10);
        // The next process finds the file.
        assert!(Reserve::in_dir(dir.path(), 64 << 10).release());
        assert_eq!(held(), 0);
    }
}
