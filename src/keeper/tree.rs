//! The znodes. A pure state machine: a decided change goes in, and what undoes it comes out, so that a multi that
//! fails half way leaves nothing behind. No rights, no versions to compare, no clock: those are `state.rs`.

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

/// What a node costs beside its path and data: the map's slot, the name in its parent, allocator headers.
const NODE_OVERHEAD_BYTES: usize = 224;

/// A longer access list counts for each node that has it, or it would be a way around the limit on the tree. Shorter
/// ones are mostly shared, and cost next to nothing.
const SMALL_ACL_BYTES: usize = 1024;

/// A change that does not fit the tree: only a damaged log can hold one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a change of {path} does not fit the tree")]
pub struct Misfit {
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
    /// Children ever made: the next sequence number, and half of the public `cversion`.
    pub creates: i32,
    /// Session id, or the marks of a container or TTL node, or 0.
    pub owner: i64,
    children: BTreeSet<Box<str>>,
}

impl Node {
    fn born(data: Option<Box<[u8]>>, acl: Arc<Vec<Acl>>, zxid: i64, now_ms: i64, owner: i64) -> Node {
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

    /// From a snapshot, without its children: each of them adds itself.
    pub(super) fn restored(stat: &Stat, creates: i32, data: Option<Box<[u8]>>, acl: Arc<Vec<Acl>>) -> Node {
        Node {
            mzxid: stat.mzxid,
            pzxid: stat.pzxid,
            mtime: stat.mtime,
            version: stat.version,
            aversion: stat.aversion,
            creates,
            ..Node::born(data, acl, stat.czxid, stat.ctime, stat.ephemeral_owner)
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
            // Creates and deletes both count in public: every child was made, and those missing were deleted.
            cversion: self.creates.wrapping_mul(2).wrapping_sub(num_children),
            aversion: self.aversion,
            // Containers and TTL nodes keep their nature to themselves: only a session is shown as an owner.
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

/// The owner field of a node made with `mode` by `session`.
pub fn owner_of(mode: CreateMode, session: i64) -> i64 {
    match mode {
        CreateMode::Persistent => 0,
        CreateMode::Ephemeral => session,
        CreateMode::Container => CONTAINER_OWNER,
        CreateMode::Ttl(ttl_ms) => TTL_MASK | ttl_ms,
    }
}

/// Takes one change back.
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
    /// Containers and TTL nodes: what may go by itself.
    transients: BTreeSet<Box<str>>,
    /// Equal access lists are one list: there are few, and each node has one.
    acls: HashSet<Arc<Vec<Acl>>>,
    /// The identities in those lists.
    named: HashSet<Identity>,
    bytes: usize,
}

impl Default for DataTree {
    fn default() -> Self {
        let open = Arc::new(vec![Acl { perms: ALL, who: Identity::new("world", "anyone") }]);
        let read_only = Arc::new(vec![Acl { perms: READ, who: Identity::new("world", "anyone") }]);
        let mut tree = DataTree::empty();
        // ZooKeeper lets everybody write below /zookeeper. Nothing here is set there, so nobody has to, and no
        // identity with few rights can fill the store from there.
        for (path, acl) in [
            (path::ROOT, &open),
            (path::ZOOKEEPER, &read_only),
            (path::QUOTA, &read_only),
            (path::CONFIG, &read_only),
        ] {
            tree.insert(path, Node::born(Some(Box::default()), acl.clone(), 0, 0, 0));
        }
        tree
    }
}

impl DataTree {
    /// Not even a root: for a snapshot to fill.
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

    /// Whether an access list names this identity, or did so recently.
    pub fn names(&self, who: &Identity) -> bool {
        self.named.contains(who)
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// An estimate of the memory that the nodes take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Every node, each after its parent.
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

    /// The sessions that have ephemerals, lowest first.
    pub fn ephemeral_owners(&self) -> BTreeSet<i64> {
        self.ephemerals.keys().copied().collect()
    }

    pub fn ephemeral_count(&self) -> usize {
        self.ephemerals.values().map(BTreeSet::len).sum()
    }

    pub fn transients(&self) -> impl Iterator<Item = &str> {
        self.transients.iter().map(AsRef::as_ref)
    }

    /// Nodes below `path`, without itself.
    pub fn count_below(&self, path: &str) -> usize {
        self.walk_from(path).count().saturating_sub(1)
    }

    pub fn apply(&mut self, zxid: i64, now_ms: i64, change: &Change<'_>) -> Result<Undo, Misfit> {
        match change {
            Change::Create { path, data, acl, owner } => {
                let acl = self.intern(acl);
                let data = data.as_deref().map(Box::from);
                self.create(path, Node::born(data, acl, zxid, now_ms, *owner))
            }
            Change::Delete { path } => self.delete(path, zxid),
            Change::SetData { path, data } => {
                let node = self.nodes.get_mut(&**path).ok_or_else(|| misfit(path))?;
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
                let node = self.nodes.get_mut(&**path).ok_or_else(|| misfit(path))?;
                node.aversion = node.aversion.wrapping_add(1);
                let old = std::mem::replace(&mut node.acl, acl);
                self.bytes = self.bytes + acl_cost(&node.acl) - acl_cost(&old);
                Ok(Undo::SetAcl { path: (&**path).into(), acl: old })
            }
        }
    }

    fn create(&mut self, path: &str, node: Node) -> Result<Undo, Misfit> {
        let (parent, _) = path::split(path).ok_or_else(|| misfit(path))?;
        if self.nodes.contains_key(path) {
            return Err(misfit(path));
        }
        let zxid = node.czxid;
        let parent = self.nodes.get_mut(parent).ok_or_else(|| misfit(path))?;
        let parent_pzxid = std::mem::replace(&mut parent.pzxid, zxid);
        parent.creates = parent.creates.wrapping_add(1);
        self.insert(path, node);
        Ok(Undo::Create { path: path.into(), parent_pzxid })
    }

    fn delete(&mut self, path: &str, zxid: i64) -> Result<Undo, Misfit> {
        if self.nodes.get(path).is_none_or(|node| node.child_count() > 0) {
            return Err(misfit(path));
        }
        let (parent, _) = path::split(path).ok_or_else(|| misfit(path))?;
        let node = self.remove(path).ok_or_else(|| misfit(path))?;
        let parent = self.nodes.get_mut(parent).ok_or_else(|| misfit(path))?;
        let parent_pzxid = std::mem::replace(&mut parent.pzxid, zxid);
        Ok(Undo::Delete { path: path.into(), node: Box::new(node), parent_pzxid })
    }

    /// Takes back the newest change. Must be called in the reverse order of the changes.
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

    /// Adds a node and every index entry that goes with it; the parent's counters are the caller's.
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
        // Lists that no node has any more go when new ones come, so the set cannot outgrow the tree.
        if self.acls.len() >= 64 && self.acls.len().is_power_of_two() {
            self.acls.retain(|acl| Arc::strong_count(acl) > 1);
            self.named = self.acls.iter().flat_map(|acl| acl.iter()).map(|acl| acl.who.clone()).collect();
        }
        for entry in acl.iter() {
            if !self.named.contains(&entry.who) {
                self.named.insert(entry.who.clone());
            }
        }
        self.acls.insert(acl.clone());
        acl.clone()
    }
}

fn len(data: &Option<Box<[u8]>>) -> usize {
    data.as_ref().map_or(0, |data| data.len())
}

/// What an access list costs a node that has it.
pub fn acl_cost(list: &[Acl]) -> usize {
    let bytes = list.iter().map(|acl| acl.who.scheme.len() + acl.who.id.len()).sum();
    if bytes > SMALL_ACL_BYTES { bytes } else { 0 }
}

fn misfit(path: &str) -> Misfit {
    Misfit { path: path.to_owned() }
}
