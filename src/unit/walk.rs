//! Goes through directories that hooks have made, however deep they are: no recursion, two or three open files, and every
//! name taken relative to an open directory, so that no path gets too long. No link is followed and no mount is entered.
//! What goes while it is looked at is gone, which is as good.

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

/// The most bytes of names of directories that are still to be visited. Beyond that, what can be listed again is.
const MAX_HELD: usize = 16 * 1024 * 1024;

/// How often a directory is gone through again that somebody has put something into meanwhile.
const ATTEMPTS: usize = 3;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes all of it; nothing there is fine. As its owner, also what its modes keep from its owner.
///
/// # Errors
/// Those of the file system.
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

/// Gives a directory and all that is in it to a user and group; the directory itself last, so that whoever is killed meanwhile
/// is followed by one who finds it to be done.
///
/// # Errors
/// Those of the file system.
pub(super) fn give_tree(path: &Path, (user, group): (u32, u32)) -> io::Result<()> {
    walk(path, &Give(Uid::from_raw(user), Gid::from_raw(group)))
}

/// Removes an empty control group with those below it; nothing there is fine.
///
/// # Errors
/// If one of them is not empty.
pub(super) fn remove_groups(path: &Path) -> io::Result<()> {
    walk(path, &RemoveGroups)
}

/// What is done with what is found.
trait Visit {
    /// A directory is passed by its owner only if its modes let it: this may mend them.
    const OWNERS_WAY: bool = false;
    /// What was visited is gone: a directory that is listed again shows what is left.
    const CONSUMES: bool;

    fn file(&self, directory: &OwnedFd, name: &CStr) -> Result<(), Errno>;
    /// A directory of which everything was visited.
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

    /// The files in it are the kernel's, and no reason to stay.
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
    /// What it was in when it was entered.
    above: Place,
    /// Directories in it that are still to be visited.
    left: Vec<CString>,
    /// These are all that there are.
    whole: bool,
}

/// What tells a directory from all others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    device: (u32, u32),
    number: u64,
}

fn walk<V: Visit>(path: &Path, visit: &V) -> io::Result<()> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let name = CString::new(name.as_bytes())?;
    // The way to what hooks have made is nobody's but ours.
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
    /// The directory that is being visited, or what holds the first one.
    at: OwnedFd,
    way: Vec<Level>,
    /// How many bytes of names are to be visited.
    held: usize,
}

impl<V: Visit> Walker<'_, V> {
    fn enter(&mut self, name: CString) -> io::Result<()> {
        let directory = match self.open(&name) {
            Ok(directory) => directory,
            // A link, or what took the directory's place since.
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return self.visit.file(&self.at, &name).or_else(gone_is_fine);
            }
            Err(error) => return gone_is_fine(error),
        };
        let (above, _) = place(&self.at)?;
        let (here, is_mount) = place(&directory)?;
        if !self.way.is_empty() && (is_mount || here.device != above.device) {
            return Err(io::Error::other(format!("{} is a mount of its own", name.to_string_lossy())));
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
                // Its modes cannot be changed by its name without following a link that took its place.
                let held = openat(&self.at, name, DIRECTORY | OFlags::PATH, Mode::empty())?;
                let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held));
                chmod(own, Mode::RWXU)?;
                openat(&self.at, name, DIRECTORY, Mode::empty())
            }
            Ok(directory) => {
                let mode = Mode::from_raw_mode(rustix::fs::fstat(&directory)?.st_mode);
                if !mode.contains(Mode::RWXU) {
                    // Somebody else's may be open to us all the same; if it is not, that is said of what is in it.
                    let _ = fchmod(&directory, Mode::RWXU);
                }
                Ok(directory)
            }
            Err(error) => Err(error),
        }
    }

    /// Visits the files of the directory, and says which directories are in it, and whether these are all.
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

/// Where a directory is, and whether something else is mounted there.
fn place(directory: &OwnedFd) -> io::Result<(Place, bool)> {
    let found = statx(directory, c"", AtFlags::EMPTY_PATH, StatxFlags::INO)?;
    let device = (found.stx_dev_major, found.stx_dev_minor);
    let is_mount = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    Ok((Place { device, number: found.stx_ino }, is_mount))
}

/// Of a control group that goes while it is looked at there is no device any more.
fn gone_is_fine(error: Errno) -> io::Result<()> {
    if matches!(error, Errno::NOENT | Errno::NODEV) { Ok(()) } else { Err(error.into()) }
}

#[cfg(test)]
#[path = "walk_tests.rs"]
mod tests;
