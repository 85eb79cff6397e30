//! The znodes that heartbeat trackers write, as typed operations. Their contents are bytes here:
//! the records and their meaning belong to `heartbeat`.

use super::acl::{Acl, Roles};
use super::error::Error;
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::records::parse_credentials;
use super::tree::{self, Tree, Write};
use super::update::{Change, put, update};
use crate::model::MachineId;

/// Announces a tracker for as long as its session lasts, with its URL. An announcement that is left
/// of an earlier session, or of a request whose answer was lost, is replaced.
///
/// # Errors
/// The failures of the store.
pub async fn register<T: Tree>(tree: &T, tracker: &str, url: &str, acl: Acl) -> Result<(), tree::Error> {
    let path = paths::heartbeat_replica(tracker);
    let mut writes = Vec::new();
    if tree.exists(&path).await? {
        writes.push(Write::DeleteIfVersion { path: path.clone(), version: 0 });
    }
    writes.push(Write::Create { path, data: url.as_bytes().to_vec(), acl, ephemeral: true });
    tree.write(writes).await
}

/// Withdraws the announcement of a tracker.
///
/// # Errors
/// The failures of the store.
pub async fn unregister<T: Tree>(tree: &T, tracker: &str) -> Result<(), tree::Error> {
    let path = paths::heartbeat_replica(tracker);
    tree.write(vec![Write::DeleteIfVersion { path, version: 0 }]).await
}

/// The result of [`write_batches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    /// The batches are in the store, by this write or by an earlier one whose answer was lost.
    Written,
    /// Nothing was written: a judge has already deleted this old batch.
    AlreadyDeleted(u64),
}

/// Adds batches of a tracker and deletes its `old` ones, in one step, for as long as the tracker is
/// registered.
///
/// # Errors
/// The failures of the store.
pub async fn write_batches<T: Tree>(
    tree: &T,
    tracker: &str,
    batches: Vec<(u64, Vec<u8>)>,
    old: &[u64],
    acl: &Acl,
) -> Result<Flushed, tree::Error> {
    let path = |number| paths::heartbeat_batch(tracker, number);
    let first = batches.first().map(|(number, _)| path(*number));
    let mut writes = vec![Write::Check { path: paths::heartbeat_replica(tracker), version: 0 }];
    writes.extend(batches.into_iter().map(|(number, data)| Write::create(path(number), data, acl.clone())));
    writes.extend(old.iter().map(|number| Write::Delete { path: path(*number) }));
    match tree.write(writes).await {
        Ok(()) => Ok(Flushed::Written),
        Err(tree::Error::NodeExists(path)) if Some(&path) == first.as_ref() => Ok(Flushed::Written),
        Err(tree::Error::NoNode(gone)) => match old.iter().find(|number| path(**number) == gone) {
            Some(number) => Ok(Flushed::AlreadyDeleted(*number)),
            None => Err(tree::Error::NoNode(gone)),
        },
        Err(err) => Err(err),
    }
}

/// Writes of the judge: applied in one step, and only while it holds the lease.
#[derive(Debug)]
pub struct JudgeWrites(Vec<Write>);

impl JudgeWrites {
    pub fn new(lease: &Lease) -> Self {
        Self(vec![lease.fence()])
    }

    /// Whether nothing would be written.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 1
    }

    pub fn question(self, data: Vec<u8>, version: i32) -> Self {
        self.set(paths::heartbeat_question(), data, version)
    }

    pub fn alarm(self, data: Vec<u8>, version: i32) -> Self {
        self.set(paths::heartbeat_alarm(), data, version)
    }

    pub fn webhook(self, data: Vec<u8>, version: i32) -> Self {
        self.set(paths::heartbeat_webhook(), data, version)
    }

    /// Without a version, the bucket is created.
    pub fn bucket(&mut self, number: u16, data: Vec<u8>, version: Option<i32>, acl: &Acl) {
        self.put(paths::heartbeat_bucket(number), data, version, acl);
    }

    /// Without a version, the page is created.
    pub fn journal_page(&mut self, number: u64, data: Vec<u8>, version: Option<i32>, acl: &Acl) {
        self.put(paths::heartbeat_page(number), data, version, acl);
    }

    pub fn delete_journal_page(&mut self, number: u64) {
        self.0.push(Write::Delete { path: paths::heartbeat_page(number) });
    }

    pub fn delete_batch(&mut self, tracker: &str, number: u64) {
        self.0.push(Write::Delete { path: paths::heartbeat_batch(tracker, number) });
    }

    /// # Errors
    /// [`tree::Error::BadVersion`] of the epoch if the judge was replaced, and the failures of the
    /// store.
    pub async fn commit<T: Tree>(self, tree: &T) -> Result<(), tree::Error> {
        tree.write(self.0).await
    }

    fn set(mut self, path: NodePath, data: Vec<u8>, version: i32) -> Self {
        self.0.push(Write::SetIfVersion { path, data, version });
        self
    }

    fn put(&mut self, path: NodePath, data: Vec<u8>, version: Option<i32>, acl: &Acl) {
        self.0.push(match version {
            Some(version) => Write::SetIfVersion { path, data, version },
            None => Write::create(path, data, acl.clone()),
        });
    }
}

/// Replaces the list of trackers that the judge keeps for its successor.
///
/// # Errors
/// The failures of the store.
pub async fn set_trackers<T: Tree>(tree: &T, list: &[u8]) -> Result<(), Error> {
    update(tree, &paths::heartbeat_trackers(), |_| Ok(Change::Set(list.to_vec(), ()))).await
}

/// Replaces the list of trackers that a machine sends its beats to.
///
/// # Errors
/// [`Error::Corrupt`] if the machine's credential is unreadable, and the failures of the store.
pub async fn set_machine_trackers<T: Tree>(
    tree: &T,
    roles: &Roles,
    machine: MachineId,
    list: &[u8],
) -> Result<(), Error> {
    let credentials = paths::machine_credentials(machine);
    let node = tree.get(&credentials).await?;
    let identity = parse_credentials(&credentials, &node.data)?.identity();
    put(tree, &paths::machine_trackers(machine), list, &roles.machine_trackers(&identity)).await
}
