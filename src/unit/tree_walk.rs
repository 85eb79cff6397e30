//! Walks directories that hooks created, however deep: without recursion, with two or three open
//! files, and with names relative to an open directory, so that no path becomes too long. Links are
//! not followed and mounts are not entered. Entries that vanish during the walk are ignored.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, StatxAttributes, StatxFlags, Uid, chmod, chownat, fchmod,
    open, openat, statx, unlinkat,
};
use rustix::io::Errno;

/// The most bytes of names of directories that wait for their visit. Beyond that, directories are
/// listed again later.
const MAX_HELD: usize = 16 * 1024 * 1024;

/// How often a directory is walked again because new entries appeared meanwhile.
const ATTEMPTS: usize = 3;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes a directory with its contents. Succeeds if it does not exist. The owner also removes
/// entries whose modes forbid it.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    let not_empty = |error: &io::Error| error.kind() == io::ErrorKind::DirectoryNotEmpty;
    for _ in 1..ATTEMPTS {
        match walk(path, &Remove) {
            Err(error) if not_empty(&error) => {}
            done => return done,
        }
    }
    walk(path, &Remove)
}

/// Gives a directory and its contents to a user and group. The directory itself is last, so that
/// after a kill the next agent repeats the walk.
pub(super) fn give_tree(path: &Path, (user, group): (u32, u32)) -> io::Result<()> {
    walk(path, &Give(Uid::from_raw(user), Gid::from_raw(group)))
}

/// Removes an empty control group with the groups below it. Succeeds if it does not exist.
///
/// # Errors
/// If one of them is not empty.
pub(super) fn remove_groups(path: &Path) -> io::Result<()> {
    walk(path, &RemoveGroups)
}

/// The actions of a walk on the entries.
trait Visit {
    /// Whether the walk may change modes so that the owner can enter a directory.
    const OWNERS_WAY: bool = false;
    /// Whether visited entries are removed, so that listing a directory again shows the rest.
    const CONSUMES: bool;

    fn file(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno>;
    /// Called for a directory whose contents were all visited.
    fn leave(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno>;
}

struct Remove;

impl Visit for Remove {
    const OWNERS_WAY: bool = true;
    const CONSUMES: bool = true;

    fn file(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        unlinkat(directory, name, AtFlags::empty())
    }

    fn leave(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        unlinkat(directory, name, AtFlags::REMOVEDIR)
    }
}

struct RemoveGroups;

impl Visit for RemoveGroups {
    const CONSUMES: bool = true;

    /// Files of a control group belong to the kernel and do not prevent its removal.
    fn file(&self, _: &OwnedFd, _: &CStr) -> Result<(), Errno> {
        Ok(())
    }

    fn leave(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        unlinkat(directory, name, AtFlags::REMOVEDIR)
    }
}

struct Give(Uid, Gid);

impl Visit for Give {
    const CONSUMES: bool = false;

    fn file(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        chownat(directory, name, Some(self.0), Some(self.1), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn leave(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno> {
        self.file(directory, name)
    }
}

/// A directory that is being visited.
struct Level {
    name: CString,
    /// The parent directory when it was entered.
    above: DirId,
    /// Subdirectories that wait for their visit.
    left: Vec<CString>,
    /// The list of subdirectories is complete.
    whole: bool,
}

/// Identifies a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DirId {
    device: (u32, u32),
    number: u64,
}

fn walk<V: Visit>(path: &Path, visit: &V) -> io::Result<()> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let name = CString::new(name.as_bytes())?;
    // Only the agent can write to the directories above.
    let above = match open(above, DIRECTORY - OFlags::NOFOLLOW, Mode::empty()) {
        Ok(above) => above,
        Err(error) => return gone_is_fine(error),
    };
    let mut walker = Walker { visit, at: above, way: Vec::new(), held: 0 };
    walker.enter(name)?;
    while let Some(level) = walker.way.last_mut() {
        if let Some(next) = level.left.pop() {
            walker.held -= next.as_bytes().len();
            walker.enter(next)?;
        } else if level.whole {
            walker.leave()?;
        } else {
            let (left, whole) = walker.list()?;
            if let Some(level) = walker.way.last_mut() {
                (level.left, level.whole) = (left, whole);
            }
        }
    }
    Ok(())
}

struct Walker<'a, V> {
    visit: &'a V,
    /// The directory that is being visited, or the parent of the first one.
    at: OwnedFd,
    way: Vec<Level>,
    /// The bytes of names that wait for their visit.
    held: usize,
}

impl<V: Visit> Walker<'_, V> {
    fn enter(&mut self, name: CString) -> io::Result<()> {
        let directory = match self.open(&name) {
            Ok(directory) => directory,
            // A link, or another entry that replaced the directory.
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return self.visit.file(&self.at, &name).or_else(gone_is_fine);
            }
            Err(error) => return gone_is_fine(error),
        };
        let (above, _) = place(&self.at)?;
        let (here, is_mount) = place(&directory)?;
        if !self.way.is_empty() && (is_mount || here.device != above.device) {
            return Err(io::Error::other(format!("{} is a mount point", name.to_string_lossy())));
        }
        self.at = directory;
        let (left, whole) = self.list()?;
        self.way.push(Level { name, above, left, whole });
        Ok(())
    }

    fn open(&self, name: &CStr) -> Result<OwnedFd, Errno> {
        let opened = openat(&self.at, name, DIRECTORY, Mode::empty());
        if !V::OWNERS_WAY {
            return opened;
        }
        match opened {
            Err(Errno::ACCESS) => {
                // Changing modes by name could follow a link that replaced the directory.
                let held = openat(&self.at, name, DIRECTORY | OFlags::PATH, Mode::empty())?;
                let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held));
                chmod(own, Mode::RWXU)?;
                openat(&self.at, name, DIRECTORY, Mode::empty())
            }
            Ok(directory) => {
                let mode = Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode);
                if !mode.contains(Mode::RWXU) {
                    // A directory of another user may still be accessible; if not, its entries
                    // report the error.
                    let _ = fchmod(&directory, Mode::RWXU);
                }
                Ok(directory)
            }
            Err(error) => Err(error),
        }
    }

    /// Visits the files of the directory. Returns its subdirectories, and whether these are all.
    fn list(&mut self) -> io::Result<(Vec<CString>, bool)> {
        let mut left = Vec::new();
        for entry in Dir::read_from(&self.at)? {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => return gone_is_fine(error).map(|()| (left, true)),
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if !matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                self.visit.file(&self.at, name).or_else(gone_is_fine)?;
                continue;
            }
            if self.held >= MAX_HELD && !left.is_empty() {
                return if V::CONSUMES {
                    Ok((left, false))
                } else {
                    Err(io::Error::other("there are too many directories"))
                };
            }
            self.held += name.to_bytes().len();
            left.push(name.to_owned());
        }
        Ok((left, true))
    }

    fn leave(&mut self) -> io::Result<()> {
        let Some(level) = self.way.pop() else { return Ok(()) };
        let above = openat(&self.at, c"..", DIRECTORY, Mode::empty())?;
        if place(&above)?.0 != level.above {
            return Err(io::Error::other(format!("{} was moved meanwhile", level.name.to_string_lossy())));
        }
        self.visit.leave(&above, &level.name).or_else(gone_is_fine)?;
        self.at = above;
        Ok(())
    }
}

/// The device and inode of a directory, and whether it is a mount point.
fn place(directory: &OwnedFd) -> io::Result<(DirId, bool)> {
    let found = statx(directory, c"", AtFlags::EMPTY_PATH, StatxFlags::INO)?;
    let device = (found.stx_dev_major, found.stx_dev_minor);
    let is_mount = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    Ok((DirId { device, number: found.stx_ino }, is_mount))
}

/// Whether the error means that a control group was removed meanwhile.
fn gone_is_fine(error: Errno) -> io::Result<()> {
    if matches!(error, Errno::NOENT | Errno::NODEV) { Ok(()) } else { Err(error.into()) }
}

#[cfg(test)]
#[path = "tree_walk_tests.rs"]
mod tests;
