//! The server's work beside serving: housekeeping once a second, limits on connections and on the memory of
//! their buffers, and the figures for monitoring.

use std::net::SocketAddr;

use tracing::warn;

use super::acl::{self, Names};
use super::admission::{Admission, Full};
use super::path;
use super::refusals::Reason;
use super::serve::Now;
use super::server::{LISTENER, Server, TLS_LISTENER};
use super::start::KeeperError;
use super::words::Facts;

/// Containers and TTL nodes that are deleted at one time.
const REAPED_A_TURN: usize = 1_000;

/// A connection keeps its place for this long without a session, so that new connections do not close each
/// other.
const HANDSHAKE_MS: i64 = 1_000;

/// Time for a connection to complete its handshake, or to read its last answers.
const PATIENCE_MS: i64 = 10_000;

impl Server {
    pub(super) fn chores(&mut self, now: Now) -> Result<(), KeeperError> {
        if !self.service.storage.is_full() {
            self.service.reap(now, REAPED_A_TURN);
        }
        self.service.storage.poll_snapshot();
        self.service.storage.poll_space();
        if self.service.storage.snapshot_is_due(self.config.snapshot_every_bytes) {
            self.service.storage.snapshot(&self.service.state)?;
        }
        self.close_stale(now);
        self.close_strangers(now);
        // The listener reports no second event for a connection that could not be accepted because
        // the limit of open files was reached.
        self.accept(LISTENER, now);
        if self.secure.is_some() {
            self.accept(TLS_LISTENER, now);
        }
        Ok(())
    }

    /// Closes connections that did not complete their handshake, or do not read their last answers,
    /// in time.
    fn close_stale(&mut self, now: Now) {
        let patience_ms = PATIENCE_MS.min(i64::from(self.service.rules.max_timeout_ms));
        let stale: Vec<usize> = self
            .connections
            .iter()
            .filter(|(_, c)| {
                let silent_since_ms = c.peer.session.is_none().then_some(c.since_ms);
                c.closing_since_ms.or(silent_since_ms).is_some_and(|since| now.mono_ms - since > patience_ms)
            })
            .map(|(id, _)| id)
            .collect();
        stale.into_iter().for_each(|id| self.close(id));
    }

    /// Whether a connection has no rights in this tree: no access list names an identity that it
    /// has proved, and the root node grants it no right. While the root is open to the world, every
    /// connection has rights.
    fn is_stranger(&self, id: usize) -> bool {
        let Some(connection) = self.connections.get(id) else { return false };
        if connection.peer.session.is_none() {
            return true;
        }
        let (tree, proved) = (&self.service.state.tree, self.service.identities.of(id));
        let root = tree.get(path::ROOT);
        !root.is_some_and(|root| acl::allows(&root.acl, acl::ALL, proved))
            && !proved.iter().any(|who| tree.names(who))
    }

    /// Closes connections whose time to authenticate is up.
    fn close_strangers(&mut self, now: Now) {
        let limit_ms = self.config.limits.unauthenticated_ms;
        if limit_ms == 0 {
            return;
        }
        let late: Vec<usize> = self
            .connections
            .iter()
            .filter(|(id, c)| now.mono_ms - c.since_ms > limit_ms && self.is_stranger(*id))
            .map(|(id, _)| id)
            .collect();
        for id in late {
            self.close_stranger(id, "connection closed: not authenticated in time", now);
        }
    }

    fn close_stranger(&mut self, id: usize, text: &str, now: Now) {
        let Some(connection) = self.connections.get(id) else { return };
        if let Some(unlogged) = self.service.refusals.note(Reason::Stranger, now.mono_ms) {
            let identities = Names(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, unlogged, "{text}");
        }
        self.close(id);
    }

    /// Whether a connection from `addr` can be accepted. The oldest connection that has not authenticated
    /// makes room for it: otherwise a client without credentials could keep those with credentials out.
    pub(super) fn has_room_for(&mut self, addr: SocketAddr, now: Now) -> bool {
        let limits = self.config.limits.connections();
        let Err(full) = self.admission.check(addr.ip(), &limits) else { return true };
        let oldest = self
            .connections
            .iter()
            .filter(|(_, c)| c.peer.session.is_some() || now.mono_ms - c.since_ms > HANDSHAKE_MS)
            .filter(|(id, c)| Admission::makes_room(full, c.addr.ip(), addr.ip()) && self.is_stranger(*id))
            .min_by_key(|(_, c)| c.since_ms)
            .map(|(id, _)| id);
        if let Some(oldest) = oldest {
            self.close_stranger(oldest, "connection closed: not authenticated, and its place is needed", now);
            return true;
        }
        if let Some(unlogged) = self.service.refusals.note(Reason::Connection, now.mono_ms) {
            let limit = match full {
                Full::Total => limits.total,
                Full::Address => limits.per_address,
            };
            warn!(%addr, ?full, limit, unlogged, "connection refused: too many");
        }
        false
    }

    /// Memory of unfinished requests and unread answers.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.service.out.total() + self.unhandled_bytes
    }

    /// Closes the connections with the largest buffers until all buffers together are within their limit.
    pub(super) fn relieve(&mut self, now: Now) {
        while self.buffer_bytes() > self.config.limits.max_buffer_bytes {
            let held = |id: usize, unhandled: &[u8]| self.service.out.held(id) + unhandled.len();
            let largest =
                self.connections.iter().max_by_key(|(id, c)| held(*id, &c.unhandled)).map(|(id, _)| id);
            let Some(largest) = largest else { return };
            self.close_for_memory(largest, now);
        }
    }

    pub(super) fn close_for_memory(&mut self, id: usize, now: Now) {
        let Some(connection) = self.connections.get(id) else { return };
        if let Some(unlogged) = self.service.refusals.note(Reason::Buffers, now.mono_ms) {
            let limit = self.config.limits.max_buffer_bytes;
            let identities = Names(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, limit, unlogged,
                "connection closed: the buffers of all connections are full, and this connection has the largest");
        }
        self.close(id);
    }

    pub(super) fn note_bad_frame(&mut self, id: usize, length: i32, limit: usize, now: Now) {
        let Some(connection) = self.connections.get(id) else { return };
        if let Some(unlogged) = self.service.refusals.note(Reason::BadFrame, now.mono_ms) {
            let identities = Names(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, length, limit, unlogged,
                "connection closed: frame length out of bounds");
        }
    }

    pub(super) fn facts(&self) -> Facts {
        let (service, state) = (&self.service, &self.service.state);
        Facts {
            zxid: state.zxid(),
            node_count: state.tree.len(),
            data_bytes: state.tree.bytes(),
            ephemerals: state.tree.ephemeral_count(),
            watches: service.watches.len(),
            sessions: state.sessions.len(),
            connections: self.connections.len(),
            connections_refused: service.refusals.count(Reason::Connection),
            strangers_closed: service.refusals.count(Reason::Stranger),
            rights_refused: service.refusals.count(Reason::Rights),
            bad_frames: service.refusals.count(Reason::BadFrame),
            limits_refused: [Reason::Identity, Reason::Watch, Reason::Answer]
                .into_iter()
                .map(|reason| service.refusals.count(reason))
                .sum(),
            disk_full: service.storage.is_full(),
            buffer_bytes: self.buffer_bytes(),
            buffers_closed: service.refusals.count(Reason::Buffers),
            watch_path_bytes: service.watches.usage().path_bytes,
            identities: service.identities.usage().0,
            max_connections_per_address: self.config.limits.max_connections_per_address,
            outstanding_closed: self.outstanding_closed,
            received: service.requests,
            sent: service.out.frames,
            uptime_ms: self.now().mono_ms,
            port: self.plain.addr.port(),
            tls_port: self.secure.as_ref().map(|door| door.addr.port()),
            data_dir: self.config.data_dir.display().to_string(),
            tick_ms: self.config.tick_ms,
            max_connections: self.config.limits.max_connections,
            min_timeout_ms: service.rules.min_timeout_ms,
            max_timeout_ms: service.rules.max_timeout_ms,
            clients: self
                .connections
                .iter()
                .map(|(_, c)| format!("{}[{:#x}]", c.addr, c.peer.session.unwrap_or(0)))
                .collect(),
        }
    }
}
