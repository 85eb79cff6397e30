//! The znodes that heartbeat trackers write, as typed operations. Their contents are bytes here:
//! the records and their meaning belong to `heartbeat`.

use std::collections::BTreeSet;

use super::acl::{Acl, Roles};
use super::error::Error;
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::records::parse_credentials;
use super::tree::{self, Answer, Node, Read, Tree, Write};
use super::update::{Change, put, update};
use crate::model::MachineId;

/// The znodes that hold one value each. They exist once a tracker or an operator's command has
/// created them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Single {
    Params,
    Maintenance,
    Release,
    Alarm,
    Question,
    Webhook,
    Trackers,
}

impl Single {
    pub fn path(self) -> NodePath {
        match self {
            Self::Params => paths::heartbeat_params(),
            Self::Maintenance => paths::heartbeat_maintenance(),
            Self::Release => paths::heartbeat_release(),
            Self::Alarm => paths::heartbeat_alarm(),
            Self::Question => paths::heartbeat_question(),
            Self::Webhook => paths::heartbeat_webhook(),
            Self::Trackers => paths::heartbeat_trackers(),
        }
    }

    /// # Errors
    /// [`tree::Error::NoNode`] and the failures of the store.
    pub async fn read<T: Tree>(self, tree: &T) -> Result<Node, tree::Error> {
        tree.get(&self.path()).await
    }
}

/// The znodes of some keys that exist, in one read.
async fn existing<T: Tree, K>(
    tree: &T,
    keys: Vec<K>,
    path: impl Fn(&K) -> NodePath,
) -> Result<Vec<(K, Node)>, Error> {
    let answers = tree.read_many(keys.iter().map(|key| Read::Data(path(key))).collect()).await?;
    let nodes = keys.into_iter().zip(answers.into_iter().map(Answer::into_data));
    Ok(nodes.filter_map(|(key, node)| Some((key, node?))).collect())
}

/// The numbers of all pages of the journal, in order.
pub async fn page_numbers<T: Tree>(tree: &T) -> Result<Vec<u64>, Error> {
    let names = tree.children(&paths::heartbeat_journal()).await?;
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The pages of the journal from this one on, oldest first.
pub async fn pages<T: Tree>(tree: &T, from: u64) -> Result<Vec<(u64, Node)>, Error> {
    let mut numbers = page_numbers(tree).await?;
    numbers.retain(|number| *number >= from);
    existing(tree, numbers, |number| paths::heartbeat_page(*number)).await
}

/// The ids of the trackers with a session.
pub async fn replicas<T: Tree>(tree: &T) -> Result<BTreeSet<String>, Error> {
    Ok(tree.children(&paths::heartbeat_replicas()).await?.into_iter().collect())
}

/// The addresses of the trackers that have one.
pub async fn tracker_urls<T: Tree>(tree: &T) -> Result<BTreeSet<String>, Error> {
    let ids = replicas(tree).await?.into_iter().collect();
    let found = existing(tree, ids, |id: &String| paths::heartbeat_replica(id)).await?.into_iter();
    let urls = found.filter_map(|(_, node)| String::from_utf8(node.data).ok());
    Ok(urls.filter(|url| !url.is_empty()).collect())
}

/// Whether a tracker ever ran in this environment.
pub async fn has_buckets<T: Tree>(tree: &T) -> Result<bool, Error> {
    Ok(tree.exists(&paths::heartbeat_buckets()).await?)
}

/// The numbers of all buckets.
pub async fn bucket_numbers<T: Tree>(tree: &T) -> Result<Vec<u16>, Error> {
    let names = tree.children(&paths::heartbeat_buckets()).await?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// Missing buckets are left out.
pub async fn buckets<T: Tree>(tree: &T, numbers: Vec<u16>) -> Result<Vec<(u16, Node)>, Error> {
    existing(tree, numbers, |number| paths::heartbeat_bucket(*number)).await
}

/// The names of all batches, sorted.
pub async fn batch_names<T: Tree>(tree: &T) -> Result<Vec<String>, Error> {
    Ok(tree.children(&paths::heartbeat_batches()).await?)
}

/// The znode of a batch.
pub fn batch_path(name: &str) -> NodePath {
    let (replica, number) = paths::heartbeat_batch_of(name).unwrap_or((name, 0));
    paths::heartbeat_batch(replica, number)
}

/// Batches by name; `None` for a deleted one.
pub async fn batches<T: Tree>(tree: &T, names: &[String]) -> Result<Vec<Option<Node>>, Error> {
    let reads = names.iter().map(|name| Read::Data(batch_path(name))).collect();
    Ok(tree.read_many(reads).await?.into_iter().map(Answer::into_data).collect())
}

/// The list of trackers that a machine sends its beats to, if it has one.
pub async fn machine_trackers<T: Tree>(tree: &T, machine: MachineId) -> Result<Option<Node>, tree::Error> {
    tree.find(&paths::machine_trackers(machine)).await
}

/// The same for several machines; or why a list may not be read.
pub async fn trackers_of_each<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<Vec<Result<Option<Node>, String>>, tree::Error> {
    tree.data_of_each(machines.iter().map(|id| paths::machine_trackers(*id)).collect()).await
}

/// Announces a tracker for as long as its session lasts, with its URL. An announcement that is left
/// of an earlier session, or of a request whose answer was lost, is replaced.
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
