//! The lock on the directory that holds the files of a machine's units. One agent holds it at a
//! time, and a marker file names its machine and environment. Unit numbers alone are not enough: an
//! environment that was created again under the same name counts from zero, and would use, continue
//! or remove another one's units. If the directory belongs to another environment or machine, its
//! files stay untouched, and the units use a subdirectory of their own.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::host::{HookUser, UnitHost, check_directory};
use super::supervisor::Error;
use crate::model::digest_prefix;
use crate::runtime::service::stopped;
use crate::runtime::{atomic_file, trusted_path};

/// How long another process may take to release the directory, for example one that is just
/// shutting down.
const LOCK_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The marker file with the owner's identity. A machine's identity is random and never changes, so
/// it identifies both the machine and the environment. It is a hash, and not secret.
const OWNER: &str = "owner";
const MAX_OWNER_BYTES: u64 = 1024;

/// A directory that stays locked for the lifetime of this value.
#[derive(Debug)]
pub(super) struct LockedDir {
    /// The host with the directory that is really used.
    pub(super) host: UnitHost,
    /// A message for the operator about the directory.
    pub(super) problem: Option<String>,
    _lock: File,
}

/// Waits for the lock. Returns `None` if the agent is asked to stop first.
///
/// # Errors
/// [`Error::DirectoryInUse`], [`Error::Untrusted`] and [`Error::Directory`].
pub(super) async fn take(
    host: &UnitHost,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<LockedDir>, Error> {
    let failed = |source| Error::Directory { directory: host.directory.display().to_string(), source };
    let deadline = Instant::now() + LOCK_TIMEOUT;
    ensure_directory(host)?;
    loop {
        // Checked before the lock is taken: the agent of another environment may be using the
        // directory.
        let chosen = match owner(host).map_err(failed)? {
            Owner::Other => own_subdirectory(host)?,
            Owner::Us => (host.clone(), None),
        };
        let (host, problem) = chosen;
        let directory = |source| Error::Directory { directory: host.directory.display().to_string(), source };
        match lock(&host.directory).map_err(directory)? {
            Some(lock) => {
                // The owner may have changed in between.
                if matches!(owner(&host).map_err(directory)?, Owner::Us) {
                    write_owner(&host).map_err(directory)?;
                    if let Some(problem) = &problem {
                        warn!(ours = %host.directory.display(), "{problem}");
                    }
                    return Ok(Some(LockedDir { host, problem, _lock: lock }));
                }
            }
            None if Instant::now() >= deadline => {
                return Err(Error::DirectoryInUse(host.directory.display().to_string()));
            }
            None => {}
        }
        tokio::select! {
            () = sleep(POLL_INTERVAL) => {}
            () = stopped(stop) => return Ok(None),
        }
    }
}

/// Creates the directory of a host, unless other users could change what is in it.
fn ensure_directory(host: &UnitHost) -> Result<(), Error> {
    let ensured = trusted_path::ensure_directory(&host.directory, 0o755);
    ensured.and_then(|()| check_directory(&host.directory)).map_err(|refusal| {
        let directory = host.directory.display().to_string();
        match refusal {
            trusted_path::Error::Io { source, .. } => Error::Directory { directory, source },
            refusal @ trusted_path::Error::Untrusted(_) => Error::Untrusted { directory, refusal },
        }
    })
}

enum Owner {
    /// This machine, or no machine yet.
    Us,
    Other,
}

fn owner(host: &UnitHost) -> io::Result<Owner> {
    let mut found = String::new();
    match File::open(host.directory.join(OWNER)) {
        Ok(file) => file.take(MAX_OWNER_BYTES).read_to_string(&mut found)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Owner::Us),
        Err(error) => return Err(error),
    };
    let ours = found.trim_end() == host.identity.as_str();
    // If no files of the other owner are left, the directory is taken over; unless our subdirectory
    // exists already.
    let empty =
        || Ok::<_, io::Error>(host.units_with_files()?.is_empty() && !own_subdirectory_path(host).exists());
    Ok(if ours || empty()? { Owner::Us } else { Owner::Other })
}

fn write_owner(host: &UnitHost) -> io::Result<()> {
    let (path, text) = (host.directory.join(OWNER), format!("{}\n", host.identity.as_str()));
    if fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
        return Ok(());
    }
    atomic_file::replace_exclusively(&path, text.as_bytes())
}

fn own_subdirectory_path(host: &UnitHost) -> std::path::PathBuf {
    let hash = digest_prefix(host.identity.as_str().as_bytes(), 6);
    host.directory.join(format!("of-{hash}"))
}

/// Returns our subdirectory within another owner's directory, and a message about it.
fn own_subdirectory(host: &UnitHost) -> Result<(UnitHost, Option<String>), Error> {
    let failed = |source| Error::Directory { directory: host.directory.display().to_string(), source };
    let ours = UnitHost { directory: own_subdirectory_path(host), ..host.clone() };
    ensure_directory(&ours)?;
    if host.user != HookUser::Agents {
        let above = fs::metadata(&host.directory).map_err(failed)?.permissions().mode() & 0o7777;
        fs::set_permissions(&host.directory, Permissions::from_mode(above | 0o011)).map_err(failed)?;
    }
    let units = host.units_with_files().map_err(failed)?.len();
    let problem = (units > 0).then(|| {
        format!(
            "{} has files of units of another environment or machine ({units}); they are left as they are, \
             and so is what they run",
            host.directory.display()
        )
    });
    Ok((ours, problem))
}

/// Returns `None` if another process holds the lock.
fn lock(directory: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    // Not readable by others: a process that can open the file can lock it and block the next
    // agent.
    options.create(true).truncate(false).write(true).mode(0o600);
    let file = options.open(directory.join("lock"))?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
