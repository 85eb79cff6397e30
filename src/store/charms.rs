//! Charms in the tree: each once, under a name derived from its hash, in chunks that fit into a
//! request. The hash is also the credential to read a charm. Chunks never change, so storing a
//! charm again adds only the missing ones.

use super::cas_retry::CasRetry;
use super::credentials::Credential;
use super::delete_tree::{deletions, remove};
use super::environment::Environment;
use super::error::Error;
use super::paths;
use super::records::{CHARM_HASH, Service, corrupt};
use super::tree::{self, Read, Tree, Write};
use super::units::Counter;
use crate::model::{CharmHash, ServiceId};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The maximum size of a charm.
pub const MAX_CHARM_BYTES: usize = 16 * 1024 * 1024;

/// Smaller than the limit of a znode.
const CHUNK: usize = 60_000;

/// Chunks in one request: together smaller than ZooKeeper's limit of a megabyte.
const AT_ONCE: usize = 12;

/// The identity that may read a charm, derived from its hash.
fn reader(hash: &CharmHash) -> Result<Credential, Error> {
    Credential::parse(&format!("charm:{}", hash.expose()))
        .map_err(|e| corrupt(&paths::charm(hash), e.to_string()))
}

impl<T: Tree> Environment<T> {
    /// Stores a charm completely and returns its hash.
    ///
    /// # Errors
    /// [`Error::CharmTooLarge`] and the failures of the store.
    pub async fn store_charm(&self, bytes: &[u8]) -> Result<CharmHash, Error> {
        if bytes.len() > MAX_CHARM_BYTES {
            return Err(Error::CharmTooLarge { bytes: bytes.len(), limit: MAX_CHARM_BYTES });
        }
        let hash = CharmHash::of(bytes);
        let acl = self.info.roles.charm(&reader(&hash)?.identity());
        let chunks: Vec<&[u8]> = bytes.chunks(CHUNK).collect();
        let head = json!({"bytes": bytes.len(), "chunks": chunks.len()}).to_string();
        let retry = CasRetry::at(paths::charm(&hash));
        let work = async |retry: &mut CasRetry| {
            loop {
                let found = match self.tree.children(&paths::charm(&hash)).await {
                    Ok(names) => Some(names.into_iter().collect::<BTreeSet<String>>()),
                    Err(tree::Error::NoNode(_)) => None,
                    Err(e) => return Err(e.into()),
                };
                let mut writes = Vec::new();
                if found.is_none() {
                    // Older versions created environments without this container.
                    if !self.tree.exists(&paths::charms()).await? {
                        writes.push(Write::create(paths::charms(), Vec::new(), self.info.roles.operators()));
                    }
                    writes.push(Write::create(paths::charm(&hash), head.as_bytes(), acl.clone()));
                }
                let found = found.unwrap_or_default();
                let missing = chunks.iter().enumerate().filter(|(n, _)| !found.contains(&format!("{n:04}")));
                writes.extend(missing.take(AT_ONCE).map(|(number, chunk)| {
                    Write::create(paths::charm_chunk(&hash, number), *chunk, acl.clone())
                }));
                if writes.is_empty() {
                    return Ok(());
                }
                if let Err(e) = self.tree.write(writes).await {
                    retry.after(e).await?;
                }
            }
        };
        retry.run(work).await?;
        Ok(hash)
    }

    /// Removes a charm that no service uses any more. With a concurrent deployment of it, either
    /// this call sees the service, or the deployment fails because the charm is gone.
    pub async fn sweep_charm(&self, hash: &CharmHash) -> Result<(), Error> {
        let counter = Counter::read(&self.tree, paths::services()).await?;
        let names = self.tree.children(&paths::services()).await?;
        let ids: Vec<ServiceId> = names.iter().filter_map(|name| ServiceId::from_key(name).ok()).collect();
        let reads = ids.iter().map(|id| Read::Data(paths::service(*id))).collect();
        for (id, answer) in ids.iter().zip(self.tree.read_many(reads).await?) {
            let Some(node) = answer.into_data() else { continue };
            // A service with an unreadable record may use this charm.
            let other = Service::parse(&paths::service(*id), &node.data).is_ok_and(|service| {
                service.rest.get(CHARM_HASH).and_then(Value::as_str) != Some(hash.expose())
            });
            if !other {
                return Ok(());
            }
        }
        let mut writes = vec![counter.check()];
        writes.extend(deletions(&self.tree, vec![paths::charm(hash)]).await?);
        match remove(&self.tree, writes).await {
            // Another client deployed or swept meanwhile: the next sweep removes the rest.
            Err(e) if e.is_conflict() => Ok(()),
            other => Ok(other?),
        }
    }

    /// A step that fails its write if the charm is gone.
    pub(super) async fn charm_check(&self, hash: Option<&Value>) -> Result<Option<Write>, Error> {
        let Some(hash) = hash.and_then(Value::as_str).and_then(CharmHash::parse) else { return Ok(None) };
        let path = paths::charm(&hash);
        let node = self.tree.find(&path).await?.ok_or(Error::NoCharm(hash))?;
        Ok(Some(Write::Check { path, version: node.version }))
    }
}

/// The bytes of a charm. Needs no right but its hash.
///
/// # Errors
/// [`Error::NoCharm`], [`Error::OtherCharm`] if the store holds something else under its name, and
/// the failures of the store.
pub async fn charm<T: Tree>(tree: &T, hash: &CharmHash) -> Result<Vec<u8>, Error> {
    tree.prove(&reader(hash)?).await?;
    let path = paths::charm(hash);
    let head = tree.find(&path).await?.ok_or_else(|| Error::NoCharm(hash.clone()))?.data;
    let count = serde_json::from_slice::<Value>(&head)
        .ok()
        .and_then(|head| usize::try_from(head.get("chunks")?.as_u64()?).ok())
        .filter(|count| *count <= MAX_CHARM_BYTES.div_ceil(CHUNK))
        .ok_or_else(|| corrupt(&path, "no number of chunks".to_owned()))?;
    let mut bytes = Vec::new();
    for first in (0..count).step_by(AT_ONCE) {
        let numbers = first..(first + AT_ONCE).min(count);
        let reads = numbers.map(|number| Read::Data(paths::charm_chunk(hash, number))).collect();
        for answer in tree.read_many(reads).await? {
            let node = answer.into_data().ok_or_else(|| Error::NoCharm(hash.clone()))?;
            bytes.extend(node.data);
            if bytes.len() > MAX_CHARM_BYTES {
                return Err(Error::CharmTooLarge { bytes: bytes.len(), limit: MAX_CHARM_BYTES });
            }
        }
    }
    if CharmHash::of(&bytes) == *hash { Ok(bytes) } else { Err(Error::OtherCharm(hash.clone())) }
}
