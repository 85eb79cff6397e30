//! Prepares a unit for its hooks: the directory, the credentials and the charm.

use std::path::Path;

use tracing::debug;

use super::{Agent, Error, Seen, chain};
use crate::model::CharmHash;
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
        let give = move |home: UnitDir<'_>| home.make(&name).and_then(|()| home.give(&name, &credential));
        if let Err(error) = self.at_home(give).await {
            return Ok(Err(format!("cannot be given its credentials: {error}")));
        }
        if self.home().charm().is_dir() {
            // A charm may be large.
            let given = self.at_home(|home| home.hand_over()).await;
            return Ok(given.map_err(|error| format!("cannot be given its charm: {error}")));
        }
        let hash = seen.record.rest.get(CHARM_HASH).and_then(|hash| CharmHash::parse(hash.as_str()?));
        let Some(hash) = hash else {
            return Ok(Err("its charm is not in the store: deploy the service again".to_owned()));
        };
        // One unit at a time: a charm is held in memory, and many units may need theirs at once.
        let _turn = self.site.equipping.lock().await;
        let bytes = match self.fetch(&hash).await {
            Ok(bytes) => bytes,
            Err(Error::Store(error)) if error.is_transient() => return Err(error.into()),
            Err(error) => return Ok(Err(format!("its charm cannot be fetched: {}", chain(&error)))),
        };
        let entries = match archive::unpack(&bytes) {
            Ok(entries) => entries,
            Err(error) => return Ok(Err(format!("its charm cannot be used: {error}"))),
        };
        drop(bytes);
        let write = move |home: UnitDir<'_>| directory::write(&home.charm(), &entries, home.user()?);
        let written = self.at_home(write).await;
        Ok(written.map_err(|error| format!("its charm cannot be written: {error}")))
    }

    /// Returns the charm's bytes from this machine's cache or from the store.
    async fn fetch(&self, hash: &CharmHash) -> Result<Vec<u8>, Error> {
        let kept = self.site.charms().join(hash.key());
        if let Ok(bytes) = std::fs::read(&kept)
            && CharmHash::of(&bytes) == *hash
        {
            return Ok(bytes);
        }
        let bytes = store::charm(self.tree, hash).await?;
        let write = |aside: &Path| std::fs::write(aside, &bytes);
        // A failed write only means that the next unit fetches the charm again.
        if let Err(error) = self.site.ensure_charms().and_then(|()| build_aside(&kept, write)) {
            debug!(%error, "cannot cache the charm");
        }
        Ok(bytes)
    }
}
