//! The tree of znodes. Applying a checked change returns its undo record, so that a failed multi
//! can be rolled back. Checks of rights, versions and limits belong in `state.rs`. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::acl::{ALL, Acl, Identity, READ};
use super::path;
use super::proto::{CreateMode, Stat};
use super::txn::Change;

/// `ephemeral_owner` of containers and TTL nodes, as ZooKeeper encodes them.
const CONTAINER_OWNER: i64 = i64::MIN;
const TTL_MASK: i64 = 0xff << 56;
pub const MAX_TTL_MS: i64 = 0xff_ffff_ffff;

/// Estimated memory of a node without its path and data: the map's slot, the name in its parent,
/// allocator headers.
const NODE_OVERHEAD_BYTES: usize = 224;

/// A longer access list counts for each node that has it: otherwise long lists would bypass the
/// limit of the tree. Shorter lists are mostly shared, so their cost is neglected.
const SMALL_ACL_BYTES: usize = 1024;

/// A change that cannot be applied to the tree. Only a damaged log contains one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the change of {path} cannot be applied to the tree")]
pub struct InvalidChange {
    pub path: String,
}

#[derive(Debug, Clone)]
pub struct Node {
    pub data: Option<Box<[u8]>>,
    pub acl: Arc<Vec<Acl>>,
    pub czxid: i64,
    pub mzxid: i64,
    pub pzxid: i64,
    pub ctime: i64,
    pub mtime: i64,
    pub version: i32,
    pub aversion: i32,
    /// Number of children ever created: the next sequence number, and a part of the public
    /// `cversion`.
    pub creates: i32,
    /// Session id of an ephemeral, the mark of a container or TTL node, or 0.
    pub owner: i64,
    children: BTreeSet<Box<str>>,
}

impl Node {
    fn new(data: Option<Box<[u8]>>, acl: Arc<Vec<Acl>>, zxid: i64, now_ms: i64, owner: i64) -> Node {
        Node {
            data,
            acl,
            czxid: zxid,
            mzxid: zxid,
            pzxid: zxid,
            ctime: now_ms,
            mtime: now_ms,
            version: 0,
            aversion: 0,
            creates: 0,
            owner,
            children: BTreeSet::new(),
        }
    }

    /// Restores a node from a snapshot, without its children; `insert` adds each child.
    pub(super) fn restored(stat: &Stat, creates: i32, data: Option<Box<[u8]>>, acl: Arc<Vec<Acl>>) -> Node {
        Node {
            mzxid: stat.mzxid,
            pzxid: stat.pzxid,
            mtime: stat.mtime,
            version: stat.version,
            aversion: stat.aversion,
            creates,
            ..Node::new(data, acl, stat.czxid, stat.ctime, stat.ephemeral_owner)
        }
    }

    pub fn stat(&self) -> Stat {
        let num_children = self.child_count() as i32;
        Stat {
            czxid: self.czxid,
            mzxid: self.mzxid,
            ctime: self.ctime,
            mtime: self.mtime,
            version: self.version,
            // The public version counts creations and deletions; the latter are creations minus
            // children.
            cversion: self.creates.wrapping_mul(2).wrapping_sub(num_children),
            aversion: self.aversion,
            // As in ZooKeeper, the marks of containers and TTL nodes are not shown.
            ephemeral_owner: if self.kind() == CreateMode::Ephemeral { self.owner } else { 0 },
            data_length: self.data.as_ref().map_or(0, |data| data.len()) as i32,
            num_children,
            pzxid: self.pzxid,
        }
    }

    pub fn children(&self) -> impl ExactSizeIterator<Item = &str> {
        self.children.iter().map(AsRef::as_ref)
    }

    pub fn child_count(&self) -> usize {
        self.children.len()
    }

    pub fn kind(&self) -> CreateMode {
        match self.owner {
            0 => CreateMode::Persistent,
            CONTAINER_OWNER => CreateMode::Container,
            owner if owner & TTL_MASK == TTL_MASK => CreateMode::Ttl(owner & !TTL_MASK),
            _ => CreateMode::Ephemeral,
        }
    }

    fn cost(&self, path: &str) -> usize {
        NODE_OVERHEAD_BYTES
            + 2 * path.len()
            + self.data.as_ref().map_or(0, |data| data.len())
            + acl_cost(&self.acl)
    }
}

/// Returns the owner field of a node that `session` creates with `mode`.
pub fn owner_of(mode: CreateMode, session: i64) -> i64 {
    match mode {
        CreateMode::Persistent => 0,
        CreateMode::Ephemeral => session,
        CreateMode::Container => CONTAINER_OWNER,
        CreateMode::Ttl(ttl_ms) => TTL_MASK | ttl_ms,
    }
}

/// Reverts one change.
#[derive(Debug)]
pub enum Undo {
    Create { path: Box<str>, parent_pzxid: i64 },
    Delete { path: Box<str>, node: Box<Node>, parent_pzxid: i64 },
    SetData { path: Box<str>, data: Option<Box<[u8]>>, mzxid: i64, mtime: i64 },
    SetAcl { path: Box<str>, acl: Arc<Vec<Acl>> },
}

#[derive(Debug, Clone)]
pub struct DataTree {
    nodes: HashMap<Box<str>, Node>,
    ephemerals: HashMap<i64, BTreeSet<Box<str>>>,
    /// Containers and TTL nodes, which the server deletes by itself.
    transients: BTreeSet<Box<str>>,
    /// Deduplicated access lists: every node has one, and there are few different ones.
    acls: HashSet<Arc<Vec<Acl>>>,
    /// The identities in the lists of `acls`.
    named: HashSet<Identity>,
    bytes: usize,
}

impl Default for DataTree {
    fn default() -> Self {
        let open = Arc::new(vec![Acl { perms: ALL, identity: Identity::new("world", "anyone") }]);
        let read_only = Arc::new(vec![Acl { perms: READ, identity: Identity::new("world", "anyone") }]);
        let mut tree = DataTree::empty();
        // ZooKeeper lets every client write below /zookeeper. Here it is read-only: this server has
        // no settings there, and a client with few rights could fill the store.
        for (path, acl) in [
            (path::ROOT, &open),
            (path::ZOOKEEPER, &read_only),
            (path::QUOTA, &read_only),
            (path::CONFIG, &read_only),
        ] {
            tree.insert(path, Node::new(Some(Box::default()), acl.clone(), 0, 0, 0));
        }
        tree
    }
}

impl DataTree {
    /// Returns a tree without a root, to be filled from a snapshot.
    pub(super) fn empty() -> Self {
        DataTree {
            nodes: HashMap::new(),
            ephemerals: HashMap::new(),
            transients: BTreeSet::new(),
            acls: HashSet::new(),
            named: HashSet::new(),
            bytes: 0,
        }
    }

    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// Returns whether an access list names this identity, or did so recently.
    pub fn names(&self, identity: &Identity) -> bool {
        self.named.contains(identity)
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns an estimate of the memory of the nodes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Iterates over all nodes, parents before children.
    pub fn walk(&self) -> impl Iterator<Item = (String, &Node)> {
        self.walk_from(path::ROOT)
    }

    fn walk_from(&self, top: &str) -> impl Iterator<Item = (String, &Node)> {
        let mut todo = vec![top.to_owned()];
        std::iter::from_fn(move || {
            let path = todo.pop()?;
            let node = self.nodes.get(&*path)?;
            let base = if path == path::ROOT { "" } else { &*path };
            todo.extend(node.children().map(|child| format!("{base}/{child}")));
            Some((path, node))
        })
    }

    pub fn ephemerals_of(&self, session: i64) -> impl Iterator<Item = &str> {
        self.ephemerals.get(&session).into_iter().flatten().map(AsRef::as_ref)
    }

    /// Returns the sessions that have ephemerals.
    pub fn ephemeral_owners(&self) -> BTreeSet<i64> {
        self.ephemerals.keys().copied().collect()
    }

    pub fn ephemeral_count(&self) -> usize {
        self.ephemerals.values().map(BTreeSet::len).sum()
    }

    pub fn transients(&self) -> impl Iterator<Item = &str> {
        self.transients.iter().map(AsRef::as_ref)
    }

    /// Counts the nodes below `path`, without `path` itself.
    pub fn count_below(&self, path: &str) -> usize {
        self.walk_from(path).count().saturating_sub(1)
    }

    pub fn apply(&mut self, zxid: i64, now_ms: i64, change: &Change<'_>) -> Result<Undo, InvalidChange> {
        match change {
            Change::Create { path, data, acl, owner } => {
                let acl = self.intern(acl);
                let data = data.as_deref().map(Box::from);
                self.create(path, Node::new(data, acl, zxid, now_ms, *owner))
            }
            Change::Delete { path } => self.delete(path, zxid),
            Change::SetData { path, data } => {
                let node = self.nodes.get_mut(&**path).ok_or_else(|| invalid_change(path))?;
                let old = std::mem::replace(&mut node.data, data.as_deref().map(Box::from));
                let undo =
                    Undo::SetData { path: (&**path).into(), data: old, mzxid: node.mzxid, mtime: node.mtime };
                (node.mzxid, node.mtime, node.version) = (zxid, now_ms, node.version.wrapping_add(1));
                if let Undo::SetData { data: old, .. } = &undo {
                    self.bytes = self.bytes + len(&node.data) - len(old);
                }
                Ok(undo)
            }
            Change::SetAcl { path, acl } => {
                let acl = self.intern(acl);
                let node = self.nodes.get_mut(&**path).ok_or_else(|| invalid_change(path))?;
                node.aversion = node.aversion.wrapping_add(1);
                let old = std::mem::replace(&mut node.acl, acl);
                self.bytes = self.bytes + acl_cost(&node.acl) - acl_cost(&old);
                Ok(Undo::SetAcl { path: (&**path).into(), acl: old })
            }
        }
    }

    fn create(&mut self, path: &str, node: Node) -> Result<Undo, InvalidChange> {
        let (parent, _) = path::split(path).ok_or_else(|| invalid_change(path))?;
        if self.nodes.contains_key(path) {
            return Err(invalid_change(path));
        }
        let zxid = node.czxid;
        let parent = self.nodes.get_mut(parent).ok_or_else(|| invalid_change(path))?;
        let parent_pzxid = std::mem::replace(&mut parent.pzxid, zxid);
        parent.creates = parent.creates.wrapping_add(1);
        self.insert(path, node);
        Ok(Undo::Create { path: path.into(), parent_pzxid })
    }

    fn delete(&mut self, path: &str, zxid: i64) -> Result<Undo, InvalidChange> {
        if self.nodes.get(path).is_none_or(|node| node.child_count() > 0) {
            return Err(invalid_change(path));
        }
        let (parent, _) = path::split(path).ok_or_else(|| invalid_change(path))?;
        let node = self.remove(path).ok_or_else(|| invalid_change(path))?;
        let parent = self.nodes.get_mut(parent).ok_or_else(|| invalid_change(path))?;
        let parent_pzxid = std::mem::replace(&mut parent.pzxid, zxid);
        Ok(Undo::Delete { path: path.into(), node: Box::new(node), parent_pzxid })
    }

    /// Reverts the newest change. Must be called in the reverse order of the changes.
    pub fn undo(&mut self, undo: Undo) {
        match undo {
            Undo::Create { path, parent_pzxid } => {
                self.remove(&path);
                if let Some(parent) = path::split(&path).and_then(|(parent, _)| self.nodes.get_mut(parent)) {
                    parent.pzxid = parent_pzxid;
                    parent.creates = parent.creates.wrapping_sub(1);
                }
            }
            Undo::Delete { path, node, parent_pzxid } => {
                self.insert(&path, *node);
                if let Some(parent) = path::split(&path).and_then(|(parent, _)| self.nodes.get_mut(parent)) {
                    parent.pzxid = parent_pzxid;
                }
            }
            Undo::SetData { path, data, mzxid, mtime } => {
                if let Some(node) = self.nodes.get_mut(&path) {
                    self.bytes = self.bytes + len(&data) - len(&node.data);
                    (node.data, node.mzxid, node.mtime) = (data, mzxid, mtime);
                    node.version = node.version.wrapping_sub(1);
                }
            }
            Undo::SetAcl { path, acl } => {
                if let Some(node) = self.nodes.get_mut(&path) {
                    self.bytes = self.bytes + acl_cost(&acl) - acl_cost(&node.acl);
                    node.acl = acl;
                    node.aversion = node.aversion.wrapping_sub(1);
                }
            }
        }
    }

    /// Adds a node and its index entries. The caller updates the counters of the parent.
    pub(super) fn insert(&mut self, path: &str, mut node: Node) {
        node.acl = self.intern(&node.acl);
        match node.kind() {
            CreateMode::Persistent => {}
            CreateMode::Ephemeral => {
                self.ephemerals.entry(node.owner).or_default().insert(path.into());
            }
            CreateMode::Container | CreateMode::Ttl(_) => {
                self.transients.insert(path.into());
            }
        }
        self.bytes += node.cost(path);
        self.nodes.insert(path.into(), node);
        if let Some((parent, name)) = path::split(path)
            && let Some(parent) = self.nodes.get_mut(parent)
        {
            parent.children.insert(name.into());
        }
    }

    /// The reverse of `insert`.
    fn remove(&mut self, path: &str) -> Option<Node> {
        let node = self.nodes.remove(path)?;
        self.bytes -= node.cost(path);
        match node.kind() {
            CreateMode::Persistent => {}
            CreateMode::Ephemeral => {
                if let Some(paths) = self.ephemerals.get_mut(&node.owner) {
                    paths.remove(path);
                    if paths.is_empty() {
                        self.ephemerals.remove(&node.owner);
                    }
                }
            }
            CreateMode::Container | CreateMode::Ttl(_) => {
                self.transients.remove(path);
            }
        }
        if let Some((parent, name)) = path::split(path)
            && let Some(parent) = self.nodes.get_mut(parent)
        {
            parent.children.remove(name);
        }
        Some(node)
    }

    fn intern(&mut self, acl: &Arc<Vec<Acl>>) -> Arc<Vec<Acl>> {
        if let Some(known) = self.acls.get(acl) {
            return known.clone();
        }
        // Unused lists are removed before the set doubles, so that it cannot outgrow the tree.
        if self.acls.len() >= 64 && self.acls.len().is_power_of_two() {
            self.acls.retain(|acl| Arc::strong_count(acl) > 1);
            self.named =
                self.acls.iter().flat_map(|acl| acl.iter()).map(|acl| acl.identity.clone()).collect();
        }
        for entry in acl.iter() {
            if !self.named.contains(&entry.identity) {
                self.named.insert(entry.identity.clone());
            }
        }
        self.acls.insert(acl.clone());
        acl.clone()
    }
}

fn len(data: &Option<Box<[u8]>>) -> usize {
    data.as_ref().map_or(0, |data| data.len())
}

/// Returns the bytes that an access list adds to the cost of a node.
pub fn acl_cost(list: &[Acl]) -> usize {
    let bytes = list.iter().map(|acl| acl.identity.scheme.len() + acl.identity.id.len()).sum();
    if bytes > SMALL_ACL_BYTES { bytes } else { 0 }
}

fn invalid_change(path: &str) -> InvalidChange {
    InvalidChange { path: path.to_owned() }
}
