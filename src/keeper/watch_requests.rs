//! Decides which watches are accepted and which connections receive an event. Rights are checked
//! when a watch is set and again for every event: without READ on a znode a client receives no
//! information about it, not even its name (ZooKeeper's CVE-2024-23944).

use super::acl;
use super::events::{self, Readers};
use super::identities::Identities;
use super::outbox::Outboxes;
use super::path;
use super::proto::{Code, PreviousWatches, Read};
use super::reply::lookup;
use super::requests::{Now, Service};
use super::state::{Caller, DeletedNode};
use super::txn::{Change, Txn};
use super::watch::{EventKind, Watch, Watches};

/// Limits on the watches that clients may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchLimits {
    pub per_connection: usize,
    pub path_bytes_per_connection: usize,
    pub total: usize,
    pub total_path_bytes: usize,
}

impl Default for WatchLimits {
    /// Closing a connection removes its watches in one go: 100,000 take about 20 ms.
    fn default() -> Self {
        WatchLimits {
            per_connection: 100_000,
            path_bytes_per_connection: 16 << 20,
            total: 500_000,
            total_path_bytes: 64 << 20,
        }
    }
}

impl Service {
    /// Checks `paths` of new watches of connection `id`: their form and the limits, not the rights.
    fn may_watch<'a>(&self, id: usize, paths: impl Iterator<Item = &'a str>) -> Result<(), Code> {
        let (mut count, mut bytes) = (0, 0);
        for watched in paths {
            path::validate(watched)?;
            if !self.watches.is_watching(id, watched) {
                count += 1;
                bytes += watched.len();
            }
        }
        let limits = &self.rules.watches;
        let (own, all) = (self.watches.usage_of(id), self.watches.usage());
        let fits = own.count + count <= limits.per_connection
            && own.path_bytes + bytes <= limits.path_bytes_per_connection
            && all.count + count <= limits.total
            && all.path_bytes + bytes <= limits.total_path_bytes;
        if fits || count == 0 { Ok(()) } else { Err(Code::QuotaExceeded) }
    }

    /// Returns the watch that a read requests. A read whose watch is refused fails as a whole:
    /// otherwise its client would wait for an event that never comes.
    pub(super) fn wanted_watch<'a>(
        &self,
        id: usize,
        caller: Caller<'_>,
        read: Read<'a>,
    ) -> Result<Option<(&'a str, Watch)>, Code> {
        let (path, watch) = match read {
            // `exists` needs no right, and also watches a node that does not exist.
            Read::Exists { path, watch: true } => (path, Watch::Data),
            Read::Data { path, watch: true } => (path, Watch::Data),
            Read::Children { path, watch: true, .. } => (path, Watch::Child),
            _ => return Ok(None),
        };
        if !matches!(read, Read::Exists { .. }) && lookup(&self.state, caller, read).is_err() {
            return Ok(None);
        }
        self.may_watch(id, std::iter::once(path))?;
        Ok(Some((path, watch)))
    }

    /// Adds a persistent watch. If the node exists, the client needs the right to read it;
    /// otherwise the right is checked when the node is created.
    pub(super) fn add_watch(
        &mut self,
        id: usize,
        caller: Caller<'_>,
        path: &str,
        watch: Watch,
    ) -> Result<(), Code> {
        self.may_watch(id, std::iter::once(path))?;
        if self.state.tree.get(path).is_some_and(|node| !acl::allows(&node.acl, acl::READ, caller.proved)) {
            return Err(Code::NoAuth);
        }
        self.watches.add(id, path, watch);
        Ok(())
    }

    /// Restores the watches of a client that reconnected. It immediately receives the events that
    /// it missed; the other watches are set again.
    pub(super) fn set_watches(
        &mut self,
        id: usize,
        caller: Caller<'_>,
        previous: &PreviousWatches<'_>,
    ) -> Result<(), Code> {
        let all =
            [&previous.data, &previous.exist, &previous.child, &previous.persistent, &previous.recursive];
        self.may_watch(id, all.into_iter().flatten().copied())?;
        let Service { state, watches, out, .. } = self;
        let node = |path: &str| state.tree.get(path);
        let readable =
            |path: &str| node(path).is_none_or(|node| acl::allows(&node.acl, acl::READ, caller.proved));
        for path in &previous.data {
            match node(path) {
                None => out.event(id, EventKind::Deleted, path),
                Some(node) if node.mzxid > previous.seen_zxid && readable(path) => {
                    out.event(id, EventKind::DataChanged, path);
                }
                Some(_) => watches.add(id, path, Watch::Data),
            }
        }
        for path in &previous.exist {
            match node(path) {
                Some(_) if readable(path) => out.event(id, EventKind::Created, path),
                _ => watches.add(id, path, Watch::Data),
            }
        }
        for path in &previous.child {
            match node(path) {
                None => out.event(id, EventKind::Deleted, path),
                Some(_) if !readable(path) => {}
                Some(node) if node.pzxid > previous.seen_zxid => {
                    out.event(id, EventKind::ChildrenChanged, path);
                }
                Some(_) => watches.add(id, path, Watch::Child),
            }
        }
        for (paths, watch) in
            [(&previous.persistent, Watch::Persistent), (&previous.recursive, Watch::Recursive)]
        {
            paths.iter().filter(|path| readable(path)).for_each(|path| watches.add(id, path, watch));
        }
        Ok(())
    }

    /// Logs applied changes and queues their events. Both stay in memory until the server commits.
    /// `deleted` holds the nodes that the changes deleted, in the same order.
    pub(super) fn publish(&mut self, changes: Vec<Change<'_>>, deleted: &[DeletedNode], now: Now) {
        let Service { state, watches, out, identities, .. } = self;
        if !watches.is_empty() {
            events::of_changes(&state.tree, &changes, deleted, |kind, path, readers| {
                send(watches, out, identities, (kind, path, readers));
            });
        }
        if !changes.is_empty() {
            self.storage.append(self.state.zxid(), now.wall_ms, &Txn::Changes(changes));
        }
    }

    pub fn end_session(&mut self, session: i64, now: Now) {
        let (txn, deleted) = self.state.close_session(session);
        self.storage.append(self.state.zxid(), now.wall_ms, &txn);
        self.attached.remove(&session);
        let Service { state, watches, out, identities, .. } = self;
        if !watches.is_empty() {
            events::of_ended(&state.tree, &deleted, |kind, path, readers| {
                send(watches, out, identities, (kind, path, readers));
            });
        }
    }

    /// Deletes at most `most` empty containers and expired TTL nodes.
    pub fn reap(&mut self, now: Now, most: usize) {
        let (changes, deleted) = self.state.reap(now.wall_ms, most);
        self.publish(changes, &deleted, now);
    }
}

/// Queues an event for the connections that watch the node, or its parent's children, and may read
/// it.
fn send(
    watches: &mut Watches<usize>,
    out: &mut Outboxes,
    identities: &Identities,
    (kind, path, readers): (EventKind, &str, Readers<'_>),
) {
    watches.trigger(kind, path, &mut |id, kind, path| {
        if readers.include(kind, identities.of(id)) {
            out.event(id, kind, path);
        }
    });
}
