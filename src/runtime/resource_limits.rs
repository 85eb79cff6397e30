//! Limits of open files and of processes, for this process and its children.

use std::io;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// The limit of open files before [`raise_open_files`].
static BEFORE: OnceLock<Option<u64>> = OnceLock::new();

/// Raises the limit of open files as far as the system allows it: every connection is an open file,
/// and the usual limit is for programs with a few.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    // Later calls see the raised limit.
    BEFORE.get_or_init(|| limit.current);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "cannot raise the limit of open files");
    }
}

/// Returns the limit of open files that this process was started with. Child processes get it back:
/// some programs close every possible file descriptor, and some fail with high ones.
pub fn open_files_at_start() -> Option<u64> {
    *BEFORE.get_or_init(|| getrlimit(Resource::Nofile).current)
}

/// Limits the number of processes that the user of this process's children may have. The limit does
/// not apply to root.
///
/// # Errors
/// If the limit is above the maximum of this process.
pub fn limit_processes(most: u64) -> io::Result<()> {
    let most = getrlimit(Resource::Nproc).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Lowers the limit of open files for this process and its children.
///
/// # Errors
/// If the limit is above the maximum of this process.
pub fn limit_open_files(most: u64) -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit })?)
}
