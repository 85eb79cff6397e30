//! What a hook needs before it can run: the unit's directory, its credentials and its charm.

use tracing::debug;

use super::{Agent, Error, Seen, chain};
use crate::model::CharmHash;
use crate::store;
use crate::store::records::CHARM_HASH;
use crate::store::tree::Tree;
use crate::unit::site::Home;
use crate::unit::{directory, pack};

impl<T: Tree> Agent<'_, T> {
    /// Everything that a hook needs: the charm, and the unit's credentials. The inner error is for the operator.
    pub(super) async fn prepare(&self, seen: &Seen) -> Result<Result<(), String>, Error> {
        let (name, credential) = (seen.record.name.clone(), seen.credential.clone());
        let give = move |home: Home<'_>| home.make(&name).and_then(|()| home.give(&name, &credential));
        if let Err(error) = self.at_home(give).await {
            return Ok(Err(format!("cannot be given its credentials: {error}")));
        }
        if self.home().charm().is_dir() {
            // There may be much of it.
            let given = self.at_home(|home| home.hand_over()).await;
            return Ok(given.map_err(|error| format!("cannot be given its charm: {error}")));
        }
        let hash = seen.record.rest.get(CHARM_HASH).and_then(|hash| CharmHash::parse(hash.as_str()?));
        let Some(hash) = hash else {
            return Ok(Err("its charm is not in the store: deploy the service again".to_owned()));
        };
        // One at a time on a machine, since a charm is large, and many units may be given theirs at once.
        let _turn = self.site.equipping.lock().await;
        let bytes = match self.fetch(&hash).await {
            Ok(bytes) => bytes,
            Err(Error::Store(store::Error::Tree(error))) if error.is_retryable() => return Err(error.into()),
            Err(error) => return Ok(Err(format!("its charm cannot be had: {}", chain(&error)))),
        };
        let entries = match pack::unpack(&bytes) {
            Ok(entries) => entries,
            Err(error) => return Ok(Err(format!("its charm cannot be used: {error}"))),
        };
        drop(bytes);
        let write = move |home: Home<'_>| directory::write(&home.charm(), &entries, home.user()?);
        let written = self.at_home(write).await;
        Ok(written.map_err(|error| format!("its charm cannot be written: {error}")))
    }

    /// The charm's bytes, from the last unit that had the same one or from the store.
    async fn fetch(&self, hash: &CharmHash) -> Result<Vec<u8>, Error> {
        let kept = self.site.charms().join(hash.key());
        if let Ok(bytes) = std::fs::read(&kept)
            && CharmHash::of(&bytes) == *hash
        {
            return Ok(bytes);
        }
        let bytes = store::charm(self.tree, hash).await?;
        let aside = kept.with_extension(self.id.key());
        let keep = || {
            self.site.ensure_charms()?;
            std::fs::write(&aside, &bytes)?;
            std::fs::rename(&aside, &kept)
        };
        // Only the next unit misses it.
        if let Err(error) = keep() {
            debug!(%error, "charm not kept");
            // Half of it is of no use, and takes room that may be short.
            let _ = std::fs::remove_file(&aside);
        }
        Ok(bytes)
    }
}
