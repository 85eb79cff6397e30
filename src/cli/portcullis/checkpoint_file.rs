//! The checkpoint file of an agent, mode 0600. It is outside of the keeper's data directory, so
//! that restoring that directory does not restore the checkpoint. `store::rollback` explains
//! checkpoints.

use std::env;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use tracing::warn;

use crate::cli::file::{self, Privacy};
use crate::cli::portcullis::up::data_base;
use crate::model::{EnvironmentName, digest_prefix};
use crate::runtime::trusted_file;
use crate::store::rollback::Memory;

const MAX_BYTES: usize = 4096;

struct CheckpointFile(PathBuf);

impl Memory for CheckpointFile {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        trusted_file::read_secret(&self.0, MAX_BYTES).map_err(io::Error::other)
    }

    fn save(&self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        let path = self.0.clone();
        // In another thread, since it waits for the disk.
        let saving = tokio::task::spawn_blocking(move || {
            if let Some(directory) = path.parent() {
                file::ensure_private_dir(directory)?;
            }
            file::replace(&path, &bytes, Privacy::Secret)
        });
        Box::pin(async { saving.await.map_err(io::Error::other)? })
    }
}

/// For an agent without a data directory.
struct Nowhere;

impl Memory for Nowhere {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn save(&self, _: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Returns the checkpoint storage of the agent `role` in the tree with the id `tree`. Another tree
/// with the same environment name has another file.
pub(super) fn open(environment: &EnvironmentName, role: &str, tree: &str) -> Arc<dyn Memory> {
    let Some(base) = data_base(env::var_os("XDG_DATA_HOME"), env::var_os("HOME")) else {
        warn!("neither XDG_DATA_HOME nor HOME is set: a restored store is not recognised after a restart");
        return Arc::new(Nowhere);
    };
    open_in(&base.join("portcullis-agents").join(environment.as_str()), role, tree)
}

/// The same in another directory.
pub(super) fn open_in(directory: &Path, role: &str, tree: &str) -> Arc<dyn Memory> {
    let hash = digest_prefix(tree.as_bytes(), 6);
    Arc::new(CheckpointFile(directory.join(format!("{role}-{hash}.json"))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[tokio::test]
    async fn a_saved_checkpoint_is_loaded_again() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("agents/local/machine.json");
        let file = CheckpointFile(path.clone());
        assert_eq!(file.load().unwrap(), None);
        file.save(b"one".to_vec()).await.unwrap();
        file.save(b"two".to_vec()).await.unwrap();
        assert_eq!(file.load().unwrap(), Some(b"two".to_vec()));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, vec![b' '; MAX_BYTES + 1]).unwrap();
        assert!(file.load().is_err());
    }
}
