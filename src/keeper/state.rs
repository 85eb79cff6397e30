//! The store as a state machine: tree, sessions and the transaction counter. Every write is checked
//! here (paths, rights, versions, limits), becomes a `Txn`, and is applied; replaying the same
//! `Txn` gives the same state. The time and the caller's identities are arguments. I/O and watches
//! do not belong here. Pure.

use std::borrow::Cow;
use std::sync::Arc;

use super::acl::{self, Acl, IdentitySet};
use super::path;
use super::proto::{Code, CreateMode, Op, Stat};
use super::session::Sessions;
use super::tree::{DataTree, InvalidChange, MAX_TTL_MS, Node, Undo, acl_cost, owner_of};
use super::txn::{Change, Password, Txn};

/// Limits of the tree. Writes beyond them are refused with `QuotaExceeded`; reads are not affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeLimits {
    pub max_nodes: usize,
    pub max_bytes: usize,
}

impl Default for TreeLimits {
    fn default() -> Self {
        TreeLimits { max_nodes: 1_000_000, max_bytes: 1 << 30 }
    }
}

/// The session and the authenticated identities of a request.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    pub session: i64,
    pub proved: &'a IdentitySet,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpResult {
    Created { path: String, stat: Stat, wants_stat: bool },
    Deleted,
    Set(Stat),
    Checked,
}

/// The operation of a multi that failed, and the reason. None of its operations was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    pub index: usize,
    pub code: Code,
}

/// A node that was deleted, with the access list that it had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedNode {
    pub path: Box<str>,
    pub acl: Arc<Vec<Acl>>,
}

impl DeletedNode {
    fn from_undo(undo: Undo) -> Option<DeletedNode> {
        match undo {
            Undo::Delete { path, node, .. } => Some(DeletedNode { path, acl: node.acl }),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub struct Written<'a> {
    pub changes: Vec<Change<'a>>,
    pub results: Vec<OpResult>,
    /// One for each change that is a delete, in the same order.
    pub deleted: Vec<DeletedNode>,
}

#[derive(Debug, Clone, Default)]
pub struct State {
    pub tree: DataTree,
    pub sessions: Sessions,
    zxid: i64,
    limits: TreeLimits,
}

impl State {
    pub fn new(limits: TreeLimits) -> Self {
        State { limits, ..State::default() }
    }

    pub(super) fn restored(tree: DataTree, sessions: Sessions, zxid: i64, limits: TreeLimits) -> Self {
        State { tree, sessions, zxid, limits }
    }

    /// Returns the newest zxid.
    pub fn zxid(&self) -> i64 {
        self.zxid
    }

    /// Allocates a zxid. Failed writes get one too, as in ZooKeeper. They are not logged: a restart
    /// begins a new epoch, above every zxid that a client can have seen.
    fn next_zxid(&mut self) -> i64 {
        self.zxid += 1;
        self.zxid
    }

    /// Begins a new epoch, which is the first transaction after a start.
    pub fn begin_epoch(&mut self) -> Txn<'static> {
        self.zxid = ((self.zxid >> 32) + 1) << 32;
        Txn::Epoch
    }

    /// Applies all of `ops` or none of them.
    pub fn write<'a>(
        &mut self,
        caller: Caller<'_>,
        ops: &[Op<'a>],
        now_ms: i64,
    ) -> Result<Written<'a>, Refusal> {
        let zxid = self.next_zxid();
        let mut written = Written {
            changes: Vec::with_capacity(ops.len()),
            results: Vec::with_capacity(ops.len()),
            deleted: Vec::new(),
        };
        let mut undo_log = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            match self.write_one(caller, op, zxid, now_ms, &mut undo_log) {
                Ok((change, result)) => {
                    written.changes.extend(change);
                    written.results.push(result);
                }
                Err(code) => {
                    undo_log.into_iter().rev().for_each(|undo| self.tree.undo(undo));
                    return Err(Refusal { index, code });
                }
            }
        }
        written.deleted.extend(undo_log.into_iter().filter_map(DeletedNode::from_undo));
        Ok(written)
    }

    fn write_one<'a>(
        &mut self,
        caller: Caller<'_>,
        op: &Op<'a>,
        zxid: i64,
        now_ms: i64,
        undo_log: &mut Vec<Undo>,
    ) -> Result<(Option<Change<'a>>, OpResult), Code> {
        let Some(change) = self.prepare(caller, op)? else {
            return Ok((None, OpResult::Checked));
        };
        let undo = self.tree.apply(zxid, now_ms, &change).map_err(|_| Code::RuntimeInconsistency)?;
        undo_log.push(undo);
        let stat_of = |path: &str| self.tree.get(path).map(Node::stat).unwrap_or_default();
        let result = match (&change, op) {
            (Change::Create { path, .. }, Op::Create { wants_stat, .. }) => {
                OpResult::Created { path: path.to_string(), stat: stat_of(path), wants_stat: *wants_stat }
            }
            (Change::SetData { path, .. } | Change::SetAcl { path, .. }, _) => OpResult::Set(stat_of(path)),
            _ => OpResult::Deleted,
        };
        Ok((Some(change), result))
    }

    /// Checks one operation against the current tree. Returns `None` for a successful `Check`.
    fn prepare<'a>(&self, caller: Caller<'_>, op: &Op<'a>) -> Result<Option<Change<'a>>, Code> {
        let allowed = |node: &Node, perm| {
            if acl::allows(&node.acl, perm, caller.proved) { Ok(()) } else { Err(Code::NoAuth) }
        };
        Ok(Some(match op {
            Op::Create { .. } => self.prepare_create(caller, op)?,
            Op::Delete { path, version } => {
                if path::is_reserved(path) {
                    return Err(Code::BadArguments);
                }
                let (parent, _) = path::split(path).ok_or(Code::BadArguments)?;
                allowed(self.tree.get(parent).ok_or(Code::NoNode)?, acl::DELETE)?;
                let node = self.tree.get(path).ok_or(Code::NoNode)?;
                check_version(*version, node.version)?;
                if node.child_count() > 0 {
                    return Err(Code::NotEmpty);
                }
                Change::Delete { path: Cow::Borrowed(path) }
            }
            Op::SetData { path, data, version } => {
                path::validate(path)?;
                let node = self.tree.get(path).ok_or(Code::NoNode)?;
                allowed(node, acl::WRITE)?;
                check_version(*version, node.version)?;
                let held = node.data.as_ref().map_or(0, |data| data.len());
                self.check_growth(held, data.map_or(0, <[u8]>::len))?;
                Change::SetData { path: Cow::Borrowed(path), data: data.map(Cow::Borrowed) }
            }
            Op::SetAcl { path, acl: wanted, version } => {
                path::validate(path)?;
                let node = self.tree.get(path).ok_or(Code::NoNode)?;
                allowed(node, acl::ADMIN)?;
                check_version(*version, node.aversion)?;
                let list = acl::resolve(wanted, caller.proved)?;
                self.check_growth(acl_cost(&node.acl), acl_cost(&list))?;
                Change::SetAcl { path: Cow::Borrowed(path), acl: Arc::new(list) }
            }
            Op::Check { path, version } => {
                path::validate(path)?;
                let node = self.tree.get(path).ok_or(Code::NoNode)?;
                allowed(node, acl::READ)?;
                check_version(*version, node.version)?;
                return Ok(None);
            }
        }))
    }

    fn prepare_create<'a>(&self, caller: Caller<'_>, op: &Op<'a>) -> Result<Change<'a>, Code> {
        let Op::Create { path, data, acl: wanted, mode, sequential, .. } = op else {
            return Err(Code::BadArguments);
        };
        if let CreateMode::Ttl(ttl_ms) = mode
            && !(1..=MAX_TTL_MS).contains(ttl_ms)
        {
            return Err(Code::BadArguments);
        }
        // The prefix of a sequential node may end in a slash; the number is then the whole name.
        let (parent, _) = path.rsplit_once('/').ok_or(Code::BadArguments)?;
        let parent = if parent.is_empty() { path::ROOT } else { parent };
        if !sequential {
            path::validate(path)?;
        }
        let parent = self.tree.get(parent).ok_or(Code::NoNode)?;
        if !acl::allows(&parent.acl, acl::CREATE, caller.proved) {
            return Err(Code::NoAuth);
        }
        let list = acl::resolve(wanted, caller.proved)?;
        let path = if *sequential {
            let numbered = format!("{path}{:010}", parent.creates);
            path::validate(&numbered)?;
            Cow::Owned(numbered)
        } else {
            Cow::Borrowed(*path)
        };
        if self.tree.get(&path).is_some() {
            return Err(Code::NodeExists);
        }
        if parent.kind() == CreateMode::Ephemeral {
            return Err(Code::NoChildrenForEphemerals);
        }
        if self.tree.len() >= self.limits.max_nodes {
            return Err(Code::QuotaExceeded);
        }
        self.check_tree_limit(data.map_or(0, <[u8]>::len) + acl_cost(&list))?;
        let owner = owner_of(*mode, caller.session);
        Ok(Change::Create { path, data: data.map(Cow::Borrowed), acl: Arc::new(list), owner })
    }

    /// Checks the limit for replacing `held` bytes by `wanted` bytes. Shrinking is always allowed.
    fn check_growth(&self, held: usize, wanted: usize) -> Result<(), Code> {
        if wanted <= held { Ok(()) } else { self.check_tree_limit(wanted - held) }
    }

    fn check_tree_limit(&self, bytes: usize) -> Result<(), Code> {
        let fits = self.tree.bytes().saturating_add(bytes) <= self.limits.max_bytes;
        if fits { Ok(()) } else { Err(Code::QuotaExceeded) }
    }

    pub fn open_session(
        &mut self,
        id: i64,
        timeout_ms: i32,
        password: Password,
        mono_ms: i64,
    ) -> Txn<'static> {
        self.next_zxid();
        self.sessions.open(id, timeout_ms, password, mono_ms);
        Txn::OpenSession { id, timeout_ms, password }
    }

    /// Ends a session and deletes its ephemerals.
    pub fn close_session(&mut self, id: i64) -> (Txn<'static>, Vec<DeletedNode>) {
        let zxid = self.next_zxid();
        let deleted = self.drop_session(id, zxid);
        (Txn::CloseSession { id }, deleted)
    }

    fn drop_session(&mut self, id: i64, zxid: i64) -> Vec<DeletedNode> {
        self.sessions.close(id);
        let paths: Vec<String> = self.tree.ephemerals_of(id).map(str::to_owned).collect();
        let mut deleted = Vec::with_capacity(paths.len());
        for path in &paths {
            let delete = Change::Delete { path: Cow::Borrowed(path) };
            // An indexed ephemeral exists and has no children, so its deletion succeeds.
            match self.tree.apply(zxid, 0, &delete) {
                Ok(undo) => deleted.extend(DeletedNode::from_undo(undo)),
                Err(_) => debug_assert!(false, "{path} is indexed as ephemeral and cannot be deleted"),
            }
        }
        deleted
    }

    /// Deletes containers that are empty again after use, and childless TTL nodes that have
    /// expired; at most `most`, so that a large number of them does not delay requests.
    pub fn reap(&mut self, now_ms: i64, most: usize) -> (Vec<Change<'static>>, Vec<DeletedNode>) {
        let due = |path: &&str| {
            self.tree.get(path).is_some_and(|node| match node.kind() {
                CreateMode::Container => node.creates > 0 && node.child_count() == 0,
                CreateMode::Ttl(ttl_ms) => node.child_count() == 0 && now_ms - node.mtime > ttl_ms,
                _ => false,
            })
        };
        let paths: Vec<String> = self.tree.transients().filter(due).take(most).map(str::to_owned).collect();
        if paths.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let zxid = self.next_zxid();
        let delete = |path| {
            let change = Change::Delete { path: Cow::Owned(path) };
            let deleted = DeletedNode::from_undo(self.tree.apply(zxid, now_ms, &change).ok()?)?;
            Some((change, deleted))
        };
        paths.into_iter().filter_map(delete).unzip()
    }

    /// Applies a transaction from the log. Sessions get a full timeout from `mono_ms` on, because
    /// no client could connect while the server was down.
    pub fn replay(
        &mut self,
        zxid: i64,
        now_ms: i64,
        txn: &Txn<'_>,
        mono_ms: i64,
    ) -> Result<(), InvalidChange> {
        self.zxid = zxid;
        match txn {
            Txn::Changes(changes) => {
                for change in changes {
                    self.tree.apply(zxid, now_ms, change)?;
                }
            }
            Txn::OpenSession { id, timeout_ms, password } => {
                self.sessions.open(*id, *timeout_ms, *password, mono_ms);
            }
            Txn::CloseSession { id } => {
                self.drop_session(*id, zxid);
            }
            Txn::Epoch => {}
        }
        Ok(())
    }
}

fn check_version(wanted: i32, actual: i32) -> Result<(), Code> {
    if wanted == -1 || wanted == actual { Ok(()) } else { Err(Code::BadVersion) }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
