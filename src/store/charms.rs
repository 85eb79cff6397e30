//! Charms in the tree: each once, below a name made from its hash, in chunks that fit into a request. Whoever knows a
//! charm's hash may read it. The chunks of a charm never change, so storing it again finishes what was begun and does
//! nothing to what is there.

use super::credentials::Credential;
use super::environment::Environment;
use super::error::Error;
use super::paths;
use super::records::{CHARM_HASH, Service, corrupt};
use super::retry::Attempts;
use super::subtree::{deletions, remove};
use super::tree::{self, Read, Tree, Write};
use super::units::Counter;
use crate::model::{CharmHash, ServiceId};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The most bytes of one charm.
pub const MAX_CHARM_BYTES: usize = 16 * 1024 * 1024;

/// Below what one znode may hold.
const CHUNK: usize = 60_000;

/// Chunks in one request: together below the megabyte that ZooKeeper takes at once.
const AT_ONCE: usize = 12;

/// Who reads a charm: somebody who knows its hash.
fn reader(hash: &CharmHash) -> Result<Credential, Error> {
    Credential::parse(&format!("charm:{}", hash.expose()))
        .map_err(|e| corrupt(&paths::charm(hash), e.to_string()))
}

impl<T: Tree> Environment<T> {
    /// Stores a charm and returns its hash. All of it is there when this returns.
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
        let attempts = Attempts::at(paths::charm(&hash));
        let work = async |attempts: &mut Attempts| {
            loop {
                let found = match self.tree.children(&paths::charm(&hash)).await {
                    Ok(names) => Some(names.into_iter().collect::<BTreeSet<String>>()),
                    Err(tree::Error::NoNode(_)) => None,
                    Err(e) => return Err(e.into()),
                };
                let mut writes = Vec::new();
                if found.is_none() {
                    // An environment of an older version has no place for charms yet.
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
                    attempts.after(e).await?;
                }
            }
        };
        attempts.carry_out(work).await?;
        Ok(hash)
    }

    /// Removes a charm that no service is made of any more. Of a deployment of it at the same time either this one sees
    /// the service, or that one finds the charm gone and says so.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn sweep_charm(&self, hash: &CharmHash) -> Result<(), Error> {
        let counter = Counter::read(&self.tree, paths::services()).await?;
        let names = self.tree.children(&paths::services()).await?;
        let ids: Vec<ServiceId> = names.iter().filter_map(|name| ServiceId::from_key(name).ok()).collect();
        let reads = ids.iter().map(|id| Read::Data(paths::service(*id))).collect();
        for (id, answer) in ids.iter().zip(self.tree.read_many(reads).await?) {
            let Some(node) = answer.into_data() else { continue };
            // What a record that cannot be read is made of is not known, so it may be this.
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
            // Somebody deployed or swept meanwhile: the next sweep finds what is left.
            Err(e) if e.is_conflict() => Ok(()),
            other => Ok(other?),
        }
    }

    /// Fails the write that it is part of if the charm is gone.
    pub(super) async fn charm_check(&self, hash: Option<&Value>) -> Result<Option<Write>, Error> {
        let Some(hash) = hash.and_then(Value::as_str).and_then(CharmHash::parse) else { return Ok(None) };
        let path = paths::charm(&hash);
        match self.tree.get(&path).await {
            Ok(node) => Ok(Some(Write::Check { path, version: node.version })),
            Err(tree::Error::NoNode(_)) => Err(Error::NoCharm(hash)),
            Err(e) => Err(e.into()),
        }
    }
}

/// The bytes of a charm, with no other right than to know its hash.
///
/// # Errors
/// [`Error::NoCharm`], [`Error::OtherCharm`] if the store holds something else under its name, and the failures of the
/// store.
pub async fn charm<T: Tree>(tree: &T, hash: &CharmHash) -> Result<Vec<u8>, Error> {
    tree.prove(&reader(hash)?).await?;
    let path = paths::charm(hash);
    let head = match tree.get(&path).await {
        Ok(node) => node.data,
        Err(tree::Error::NoNode(_)) => return Err(Error::NoCharm(hash.clone())),
        Err(e) => return Err(e.into()),
    };
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
