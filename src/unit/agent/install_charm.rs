//! Prepares a unit for its hooks: the directory, the credentials and the charm.

use std::path::Path;

use tracing::debug;

use super::{Agent, Error, Seen};
use crate::model::{CharmHash, error_chain};
use crate::runtime::atomic_file::build_aside;
use crate::store;
use crate::store::records::CHARM_HASH;
use crate::store::tree::Tree;
use crate::unit::charm::{archive, directory};
use crate::unit::host::UnitDir;

impl<T: Tree> Agent<'_, T> {
    /// Installs the charm and the unit's credentials. The inner error is shown to the operator.
    pub(super) async fn prepare(&self, seen: &Seen) -> Result<Result<(), String>, Error> {
        let (name, credential) = (seen.record.name.clone(), seen.credential.clone());
        let prepare = move |unit_dir: UnitDir<'_>| {
            unit_dir.create_dirs(&name).and_then(|()| unit_dir.write_credentials(&name, &credential))
        };
        if let Err(error) = self.with_unit_dir(prepare).await {
            return Ok(Err(format!("cannot be given its credentials: {error}")));
        }
        if self.unit_dir().charm().is_dir() {
            // A charm may be large.
            let owned = self.with_unit_dir(|unit_dir| unit_dir.chown_charm()).await;
            return Ok(owned.map_err(|error| format!("cannot be given its charm: {error}")));
        }
        let hash = seen.record.rest.get(CHARM_HASH).and_then(|hash| CharmHash::parse(hash.as_str()?));
        let Some(hash) = hash else {
            return Ok(Err("its charm is not in the store: deploy the service again".to_owned()));
        };
        // One unit at a time: a charm is held in memory, and many units may need theirs at once.
        let _turn = self.host.charm_slot.lock().await;
        let bytes = match self.fetch(&hash).await {
            Ok(bytes) => bytes,
            Err(Error::Store(error)) if error.is_transient() => return Err(error.into()),
            Err(error) => return Ok(Err(format!("its charm cannot be fetched: {}", error_chain(&error)))),
        };
        let entries = match archive::unpack(&bytes) {
            Ok(entries) => entries,
            Err(error) => return Ok(Err(format!("its charm cannot be used: {error}"))),
        };
        drop(bytes);
        let write =
            move |unit_dir: UnitDir<'_>| directory::write(&unit_dir.charm(), &entries, unit_dir.user()?);
        let written = self.with_unit_dir(write).await;
        Ok(written.map_err(|error| format!("its charm cannot be written: {error}")))
    }

    /// Returns the charm's bytes from this machine's cache or from the store.
    async fn fetch(&self, hash: &CharmHash) -> Result<Vec<u8>, Error> {
        let kept = self.host.charms().join(hash.key());
        if let Ok(bytes) = std::fs::read(&kept)
            && CharmHash::of(&bytes) == *hash
        {
            return Ok(bytes);
        }
        let bytes = store::charm(self.tree, hash).await?;
        let write = |aside: &Path| std::fs::write(aside, &bytes);
        // A failed write only means that the next unit fetches the charm again.
        if let Err(error) = self.host.ensure_charms().and_then(|()| build_aside(&kept, write)) {
            debug!(%error, "cannot cache the charm");
        }
        Ok(bytes)
    }
}
