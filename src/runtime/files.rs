//! How many files this process may have open.

use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::warn;

/// Raises the limit as far as the system lets it. Connections are open files, every client may keep one, and the usual
/// limit is for programs with a few.
pub fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "the limit of open files stays as it is");
    }
}
