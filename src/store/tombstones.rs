//! Tombstones: the record of a terminated machine that had an agent. An agent that finds one has
//! the operator's word that its machine was removed; without one, an agent that does not find its
//! machine in the store removes nothing.
//!
//! A tombstone contains the identity of the machine's credentials, which is random and never
//! reused, and the checkpoint of its agent. A tombstone with an older checkpoint than the agent's
//! own belongs to a store that was restored from a backup, and does not count.

use serde::{Deserialize, Serialize};

use super::credentials::Identity;
use super::paths;
use super::rollback::{self, Checkpoint, Record};
use super::tree::{Error, Tree};
use crate::model::MachineId;

/// The znode of a terminated machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The identity of the machine's credentials. A hash, not a secret.
    identity: String,
    /// The agent's checkpoint when the machine was terminated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checkpoint: Option<Checkpoint>,
}

impl Tombstone {
    /// `record` is the content of the checkpoint's znode, if it exists. A corrupt one counts as
    /// none.
    pub(super) fn new(identity: &Identity, record: Option<&[u8]>) -> Self {
        let record: Option<Record> = record.and_then(|data| rollback::parse_record(data).ok());
        let checkpoint = record.and_then(|record| record.checkpoint);
        Self { identity: identity.as_str().to_owned(), checkpoint }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        rollback::to_bytes(self)
    }

    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }
}

/// Reads the tombstone of the machine that these credentials belonged to. A tombstone that cannot
/// be read or parsed, or that is for other credentials, is none.
///
/// # Errors
/// The failures of the store.
pub async fn find_tombstone<T: Tree>(
    tree: &T,
    machine: MachineId,
    identity: &Identity,
) -> Result<Option<Tombstone>, Error> {
    tree.sync().await?;
    let node = match tree.find(&paths::tombstone(machine)).await {
        Ok(node) => node,
        // Only the machine that it belongs to may read it.
        Err(Error::NoAuth(_)) => None,
        Err(error) => return Err(error),
    };
    let tombstone: Option<Tombstone> = node.and_then(|node| rollback::parse(&node.data).ok());
    Ok(tombstone.filter(|tombstone| tombstone.identity == identity.as_str()))
}
