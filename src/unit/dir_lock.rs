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

use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::host::{HookUser, Site, check_directory};
use super::supervisor::Error;
use crate::runtime::{atomic_file, trusted_path};

/// How long another process may take to release the directory, for example one that is just
/// shutting down.
const PREDECESSOR: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The marker file with the owner's identity. A machine's identity is random and never changes, so
/// it identifies both the machine and the environment. It is a hash, and not secret.
const OWNER: &str = "owner";
const MAX_OWNER_BYTES: u64 = 1024;

/// A directory that stays locked for the lifetime of this value.
#[derive(Debug)]
pub(super) struct Ground {
    /// The site with the directory that is really used.
    pub(super) site: Site,
    /// A message for the operator about the directory.
    pub(super) problem: Option<String>,
    _lock: File,
}

/// Waits for the lock. Returns `None` if the agent is asked to stop first.
///
/// # Errors
/// [`Error::Held`], [`Error::Untrusted`] and [`Error::Directory`].
pub(super) async fn take(site: &Site, stop: &mut watch::Receiver<bool>) -> Result<Option<Ground>, Error> {
    let failed = |source| Error::Directory { directory: site.directory.display().to_string(), source };
    let patience = Instant::now() + PREDECESSOR;
    ensure_directory(site)?;
    loop {
        // Checked before the lock is taken: the agent of another environment may be using the
        // directory.
        let found = match whose(site).map_err(failed)? {
            Whose::Anothers => beside(site)?,
            Whose::Ours => (site.clone(), None),
        };
        let (site, problem) = found;
        let directory = |source| Error::Directory { directory: site.directory.display().to_string(), source };
        match lock(&site.directory).map_err(directory)? {
            Some(lock) => {
                // The owner may have changed in between.
                if matches!(whose(&site).map_err(directory)?, Whose::Ours) {
                    mark(&site).map_err(directory)?;
                    if let Some(problem) = &problem {
                        warn!(ours = %site.directory.display(), "{problem}");
                    }
                    return Ok(Some(Ground { site, problem, _lock: lock }));
                }
            }
            None if Instant::now() >= patience => {
                return Err(Error::Held(site.directory.display().to_string()));
            }
            None => {}
        }
        tokio::select! {
            () = sleep(LOOK_AGAIN) => {}
            _ = stop.wait_for(|stop| *stop) => return Ok(None),
        }
    }
}

/// Creates the directory of a site, unless other users could change what is in it.
fn ensure_directory(site: &Site) -> Result<(), Error> {
    let ensured = trusted_path::ensure_directory(&site.directory, 0o755);
    ensured.and_then(|()| check_directory(&site.directory)).map_err(|refusal| {
        let directory = site.directory.display().to_string();
        match refusal {
            trusted_path::Error::Io { source, .. } => Error::Directory { directory, source },
            refusal @ trusted_path::Error::Untrusted(_) => Error::Untrusted { directory, refusal },
        }
    })
}

enum Whose {
    /// Whether the directory belongs to this machine, or is not marked yet.
    Ours,
    Anothers,
}

fn whose(site: &Site) -> io::Result<Whose> {
    let mut found = String::new();
    match File::open(site.directory.join(OWNER)) {
        Ok(file) => file.take(MAX_OWNER_BYTES).read_to_string(&mut found)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Whose::Ours),
        Err(error) => return Err(error),
    };
    let ours = found.trim_end() == site.identity.as_str();
    // If no files of the other owner are left, the directory is taken over; unless our subdirectory
    // exists already.
    let empty = || Ok::<_, io::Error>(site.residents()?.is_empty() && !own_directory(site).exists());
    Ok(if ours || empty()? { Whose::Ours } else { Whose::Anothers })
}

fn mark(site: &Site) -> io::Result<()> {
    let (path, text) = (site.directory.join(OWNER), format!("{}\n", site.identity.as_str()));
    if fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
        return Ok(());
    }
    atomic_file::replace_exclusively(&path, text.as_bytes())
}

fn own_directory(site: &Site) -> std::path::PathBuf {
    let digest = Sha256::digest(site.identity.as_str());
    let hash = digest.iter().take(6).fold(0, |hash: u64, byte| hash << 8 | u64::from(*byte));
    site.directory.join(format!("of-{hash:012x}"))
}

/// Returns our subdirectory within another owner's directory, and a message about it.
fn beside(site: &Site) -> Result<(Site, Option<String>), Error> {
    let failed = |source| Error::Directory { directory: site.directory.display().to_string(), source };
    let ours = Site { directory: own_directory(site), ..site.clone() };
    ensure_directory(&ours)?;
    if site.user != HookUser::Agents {
        let above = fs::metadata(&site.directory).map_err(failed)?.permissions().mode() & 0o7777;
        fs::set_permissions(&site.directory, Permissions::from_mode(above | 0o011)).map_err(failed)?;
    }
    let units = site.residents().map_err(failed)?.len();
    let problem = (units > 0).then(|| {
        format!(
            "{} has files of units of another environment or machine ({units}); they are left as \
             they are, and so is \
             what they run",
            site.directory.display()
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
