//! Limits of open files for this process, and of processes for its user.

use std::io;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// What it was before it was raised.
static BEFORE: OnceLock<Option<u64>> = OnceLock::new();

/// Raises the limit as far as the system lets it. Connections are open files, every client may keep one, and the usual
/// limit is for programs with a few.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    // Only the first to raise it knows.
    BEFORE.get_or_init(|| limit.current);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "the limit of open files stays as it is");
    }
}

/// The limit that this process was started with. Programs that we run get it back: some go through all numbers that a file
/// could have, and some cannot deal with high ones at all.
pub fn open_files_at_start() -> Option<u64> {
    *BEFORE.get_or_init(|| getrlimit(Resource::Nofile).current)
}

/// Limits the number of processes that the user of this process's children may have. The limit does
/// not apply to root.
///
/// # Errors
/// If it is above what this process may have.
pub fn limit_processes(most: u64) -> io::Result<()> {
    let most = getrlimit(Resource::Nproc).maximum.map_or(most, |maximum| maximum.min(most));
    Ok(setrlimit(Resource::Nproc, Rlimit { current: Some(most), maximum: Some(most) })?)
}

/// Lowers the limit to that for this process and what it starts.
///
/// # Errors
/// If it is above what this process may have.
pub fn limit_open_files(most: u64) -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit })?)
}
