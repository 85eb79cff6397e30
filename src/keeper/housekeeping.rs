//! Periodic work of the server, its limits on connections and buffer memory, and its statistics.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

use tracing::{debug, warn};

use super::acl::{self, Identity, RedactedIdentities};
use super::admission::{Admission, LimitReached};
use super::four_letter::Stats;
use super::handle::KeeperError;
use super::path;
use super::refusals::Reason;
use super::requests::Now;
use super::server::{Connection, LISTENER, Server, TLS_LISTENER};
use crate::net::tls::refused_client::{TLS_HANDSHAKE, UNEXPECTED_TLS, refused_client};

/// Limit of containers and TTL nodes that are deleted in one run.
const MAX_REAPED_PER_RUN: usize = 1_000;

/// A connection without a session is not evicted for this long, so that new connections do not
/// evict each other.
const HANDSHAKE_MS: i64 = 1_000;

/// The connections that one identity keeps when the total limit is reached: as many as one remote
/// address may have by default.
const MAX_PER_IDENTITY_WHEN_FULL: usize = 60;

/// Time for a connection to complete its handshake, or to read its last replies.
const STALE_AFTER_MS: i64 = 10_000;

impl Server {
    pub(super) fn housekeeping(&mut self, now: Now) -> Result<(), KeeperError> {
        if !self.service.storage.is_full() {
            self.service.reap(now, MAX_REAPED_PER_RUN);
        }
        self.service.storage.poll_snapshot();
        self.service.storage.poll_space();
        if self.service.storage.snapshot_is_due(self.config.snapshot_every_bytes) {
            self.service.storage.snapshot(&self.service.state)?;
        }
        self.close_stale(now);
        self.close_unauthenticated(now);
        // The listener reports no second event for a connection that could not be accepted because
        // the limit of open files was reached.
        self.accept(LISTENER, now);
        if self.tls_listener.is_some() {
            self.accept(TLS_LISTENER, now);
        }
        self.stats.set(self.collect_stats());
        Ok(())
    }

    /// Closes connections that did not complete their handshake, or did not read their last
    /// replies, in time.
    fn close_stale(&mut self, now: Now) {
        let stale_after_ms = STALE_AFTER_MS.min(i64::from(self.service.rules.max_timeout_ms));
        let stale: Vec<usize> = self
            .connections
            .iter()
            .filter(|(_, c)| {
                let silent_since_ms = c.peer.session.is_none().then_some(c.since_ms);
                c.closing_since_ms
                    .or(silent_since_ms)
                    .is_some_and(|since| now.mono_ms - since > stale_after_ms)
            })
            .map(|(id, _)| id)
            .collect();
        stale.into_iter().for_each(|id| self.close(id));
    }

    /// Returns whether a connection has no rights in this tree: no access list names one of its
    /// identities, and the root node grants it no right. While the root is open to the world, every
    /// connection has rights.
    fn is_unauthenticated(&self, id: usize) -> bool {
        let Some(connection) = self.connections.get(id) else { return false };
        if connection.peer.session.is_none() {
            return true;
        }
        let (tree, proved) = (&self.service.state.tree, self.service.identities.of(id));
        let root = tree.get(path::ROOT);
        !root.is_some_and(|root| acl::allows(&root.acl, acl::ALL, proved))
            && !proved.iter().any(|identity| tree.names(identity))
    }

    /// Closes connections that did not authenticate in time.
    fn close_unauthenticated(&mut self, now: Now) {
        let limit_ms = self.config.limits.unauthenticated_ms;
        if limit_ms == 0 {
            return;
        }
        let late: Vec<usize> = self
            .connections
            .iter()
            .filter(|(id, c)| now.mono_ms - c.since_ms > limit_ms && self.is_unauthenticated(*id))
            .map(|(id, _)| id)
            .collect();
        for id in late {
            self.close_unauthenticated_one(id, "connection closed: not authenticated in time", now);
        }
    }

    fn close_unauthenticated_one(&mut self, id: usize, text: &str, now: Now) {
        let Some(connection) = self.connections.get(id) else { return };
        if let Some(unlogged) = self.service.refusals.note(Reason::Unauthenticated, now.mono_ms) {
            let identities = RedactedIdentities(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, unlogged, "{text}");
        }
        self.close(id);
    }

    /// Returns whether a connection from `addr` can be accepted. If a limit is reached, the oldest
    /// unauthenticated connection is evicted: otherwise a client without credentials could lock out
    /// clients with credentials. If there is none, the identity with the most connections loses
    /// one.
    pub(super) fn ensure_slot_for(&mut self, addr: SocketAddr, now: Now) -> bool {
        let limits = self.config.limits.connections();
        let Err(full) = self.admission.check(addr.ip(), &limits) else { return true };
        if let Some(oldest) = self.oldest_evictable(full, addr, now, |id| self.is_unauthenticated(id)) {
            self.close_unauthenticated_one(
                oldest,
                "connection closed: not authenticated, and connection limit reached",
                now,
            );
            return true;
        }
        if full == LimitReached::Total && self.evict_from_largest_identity(addr, now) {
            return true;
        }
        if let Some(unlogged) = self.service.refusals.note(Reason::Connection, now.mono_ms) {
            let limit = match full {
                LimitReached::Total => limits.total,
                LimitReached::Address => limits.per_address,
            };
            warn!(%addr, ?full, limit, unlogged, "connection refused: limit reached");
        }
        false
    }

    /// Returns the oldest connection among `chosen` whose end allows one from `addr`.
    fn oldest_evictable(
        &self,
        full: LimitReached,
        addr: SocketAddr,
        now: Now,
        chosen: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        self.connections
            .iter()
            .filter(|(_, c)| c.peer.session.is_some() || now.mono_ms - c.since_ms > HANDSHAKE_MS)
            .filter(|(id, c)| Admission::frees_slot(full, c.addr.ip(), addr.ip()) && chosen(*id))
            .min_by_key(|(_, c)| c.since_ms)
            .map(|(id, _)| id)
    }

    /// The identity by which a connection is counted: the first one that an access list names.
    fn counted_identity(&self, id: usize) -> Option<&Identity> {
        let tree = &self.service.state.tree;
        self.service.identities.of(id).iter().find(|identity| tree.names(identity))
    }

    /// Closes the oldest connection of the identity with the most connections, if those are more
    /// than one identity may have when the total limit is reached. Without this, one unit could
    /// lock out all clients with its own credentials, because loopback has no limit for each
    /// address.
    fn evict_from_largest_identity(&mut self, addr: SocketAddr, now: Now) -> bool {
        let mut counts: HashMap<&Identity, usize> = HashMap::new();
        let identities = self.connections.iter().filter_map(|(id, _)| self.counted_identity(id));
        identities.for_each(|identity| *counts.entry(identity).or_default() += 1);
        let largest = counts.into_iter().max_by_key(|(_, count)| *count);
        let Some((largest, count)) = largest.filter(|(_, count)| *count > MAX_PER_IDENTITY_WHEN_FULL) else {
            return false;
        };
        let is_of_largest = |id| self.counted_identity(id) == Some(largest);
        let Some(oldest) = self.oldest_evictable(LimitReached::Total, addr, now, is_of_largest) else {
            return false;
        };
        if let Some(unlogged) = self.service.refusals.note(Reason::Connection, now.mono_ms) {
            let identities = RedactedIdentities(self.service.identities.of(oldest));
            warn!(%identities, count, unlogged,
                "connection closed: its identity has the most connections, and connection limit reached");
        }
        self.close(oldest);
        true
    }

    /// Memory of incomplete requests and unsent replies.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.service.out.memory_bytes() + self.unhandled_bytes
    }

    /// Closes the connections with the largest buffers until all buffers together are within their
    /// limit.
    pub(super) fn enforce_buffer_limit(&mut self, now: Now) {
        while self.buffer_bytes() > self.config.limits.max_buffer_bytes {
            let held = |id: usize, unhandled: &[u8]| self.service.out.capacity_of(id) + unhandled.len();
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
            let identities = RedactedIdentities(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, limit, unlogged,
                "connection closed: buffer memory limit reached");
        }
        self.close(id);
    }

    /// Logs why reading from a connection failed.
    pub(super) fn note_lost(&mut self, id: usize, error: &io::Error, now: Now) {
        let Some(Connection { addr, .. }) = self.connections.get(id) else { return };
        match refused_client(error) {
            None => debug!(%addr, %error, "connection lost"),
            Some(reason) => {
                if let Some(unlogged) = self.service.refusals.note(Reason::Tls, now.mono_ms) {
                    warn!(%addr, reason, unlogged, "connection refused");
                }
            }
        }
    }

    pub(super) fn note_bad_frame(&mut self, id: usize, length: i32, limit: usize, now: Now) {
        let Some(connection) = self.connections.get(id) else { return };
        if let Some(unlogged) = self.service.refusals.note(Reason::BadFrame, now.mono_ms) {
            if length.to_be_bytes()[0] == TLS_HANDSHAKE {
                let addr = connection.addr;
                return warn!(%addr, reason = UNEXPECTED_TLS, unlogged, "connection refused");
            }
            let identities = RedactedIdentities(self.service.identities.of(id));
            warn!(addr = %connection.addr, %identities, length, limit, unlogged,
                "connection closed: frame length out of bounds");
        }
    }

    pub(super) fn collect_stats(&self) -> Stats {
        let (service, state) = (&self.service, &self.service.state);
        Stats {
            zxid: state.zxid(),
            node_count: state.tree.len(),
            data_bytes: state.tree.bytes(),
            ephemerals: state.tree.ephemeral_count(),
            watches: service.watches.len(),
            sessions: state.sessions.len(),
            connections: self.connections.len(),
            connections_refused: service.refusals.count(Reason::Connection),
            unauthenticated_closed: service.refusals.count(Reason::Unauthenticated),
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
            syncs: service.storage.syncs(),
            uptime_ms: self.now().mono_ms,
            port: self.main_listener.addr.port(),
            tls_port: self.tls_listener.as_ref().map(|listener| listener.addr.port()),
            data_dir: self.config.data_dir.display().to_string(),
            tick_ms: self.config.tick_ms,
            max_connections: self.config.limits.max_connections,
            min_timeout_ms: service.rules.min_timeout_ms,
            max_timeout_ms: service.rules.max_timeout_ms,
            clients: Vec::new(),
        }
    }

    pub(super) fn collect_stats_with_clients(&self) -> Stats {
        let client = |(_, c): (_, &Connection)| format!("{}[{:#x}]", c.addr, c.peer.session.unwrap_or(0));
        Stats { clients: self.connections.iter().map(client).collect(), ..self.collect_stats() }
    }
}
