//! The server: one thread with one event loop. Each iteration reads from the sockets, executes the
//! requests, makes the log durable with one sync, and then sends the replies. Therefore no client
//! sees a write before it is on disk, writes that arrive during a sync share the next one, and no
//! lock or queue is needed.
//!
//! This file owns sockets, limits and time; `requests.rs` executes the requests.

use std::io::{self, ErrorKind, Read as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::event::Event;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::process::{Resource, getrlimit};
use slab::Slab;
use tracing::{debug, info, warn};

use super::admission::Admission;
use super::four_letter;
use super::handle::{Config, KeeperError, SharedStats, StopHandle};
use super::outbox::Flushed;
use super::requests::{FrameOutcome, Now, Peer, Service, SessionRules};
use super::socket::{Listener, Stream};
use super::storage::Storage;
use crate::net::tls::ServerTls;

pub(super) const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
pub(super) const TLS_LISTENER: Token = Token(usize::MAX - 2);
const EVENTS_PER_POLL: usize = 1024;
const READ_BYTES: usize = 256 << 10;
/// The longest first frame of a connection.
const MAX_CONNECT_BYTES: usize = 4 << 10;
/// With more bytes of replies than this, replies are sent before more requests are read.
const FLUSH_BYTES: usize = 16 << 20;
/// With more unsynced log bytes than this, the log is synced before more requests are read.
const COMMIT_BYTES: usize = 4 << 20;
/// Interval of `housekeeping`.
const HOUSEKEEPING_EVERY_MS: i64 = 1_000;
/// A poll that returns this much too late means that the process was paused. Session timeouts are
/// extended by that time.
const LATE_MS: i64 = 500;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) peer: Peer,
    pub(super) addr: SocketAddr,
    /// An incomplete frame, or requests that are postponed until the client reads its replies.
    pub(super) unhandled: Vec<u8>,
    pub(super) since_ms: i64,
    /// When closing began; the connection remains until its last replies are sent.
    pub(super) closing_since_ms: Option<i64>,
    /// The client does not read its replies. Reading from it resumes after it does.
    blocked: bool,
}

#[derive(Debug)]
pub struct Server {
    pub(super) config: Config,
    poll: Poll,
    pub(super) main_listener: Listener,
    pub(super) tls_listener: Option<Listener>,
    pub(super) service: Service,
    pub(super) connections: Slab<Connection>,
    pub(super) admission: Admission,
    /// Total memory of `Connection::unhandled`.
    pub(super) unhandled_bytes: usize,
    /// Connections that may have more bytes to read, although `poll` does not report them again.
    unread: Vec<usize>,
    scratch: Box<[u8]>,
    started: Instant,
    stopping: Arc<AtomicBool>,
    pub(super) outstanding_closed: u64,
    /// Read by other threads; written once a second.
    pub(super) stats: SharedStats,
}

impl Server {
    pub fn new(mut config: Config) -> Result<(Server, StopHandle), KeeperError> {
        let started = Instant::now();
        config.limits = config.limits.within(getrlimit(Resource::Nofile).current);
        let poll = Poll::new().map_err(KeeperError::Poll)?;
        let main_listener = Listener::open(&poll, LISTENER, config.listen, config.listen_tls.clone())?;
        let tls_listener = match &config.tls {
            Some(tls) => Some(Listener::open(&poll, TLS_LISTENER, tls.listen, Some(tls.config.clone()))?),
            None => None,
        };
        let (dir, tree, reserve) = (&config.data_dir, config.limits.tree, config.reserve_bytes);
        let (storage, state) = Storage::open_with_reserve(dir, tree, reserve, (wall_ms(), 0))?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(KeeperError::Poll)?);
        let stopping = Arc::new(AtomicBool::new(false));
        let rules = SessionRules {
            min_timeout_ms: config.tick_ms.saturating_mul(2),
            max_timeout_ms: config.tick_ms.saturating_mul(20),
            super_digest: config.super_digest.clone(),
            max_answer_bytes: config.limits.max_answer_bytes(),
            identities: config.limits.identities,
            watches: config.limits.watches,
        };
        let (local_addr, zxid, nodes) = (main_listener.addr, state.zxid(), state.tree.len());
        info!(%local_addr, zxid, nodes, "keeper recovered");
        let mut service = Service::new(state, storage, rules);
        service.out.set_memory_limit(config.limits.max_buffer_bytes);
        let server = Server {
            poll,
            main_listener,
            tls_listener,
            service,
            connections: Slab::new(),
            admission: Admission::default(),
            unhandled_bytes: 0,
            unread: Vec::new(),
            scratch: vec![0; READ_BYTES].into_boxed_slice(),
            started,
            stopping: stopping.clone(),
            outstanding_closed: 0,
            stats: SharedStats::default(),
            config,
        };
        Ok((server, StopHandle::new(stopping, waker)))
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.main_listener.addr
    }

    pub fn stats(&self) -> SharedStats {
        self.stats.clone()
    }

    /// Returns the address of the TLS listener, if there is one.
    pub fn tls_addr(&self) -> Option<SocketAddr> {
        self.tls_listener.as_ref().map(|listener| listener.addr)
    }

    pub(super) fn now(&self) -> Now {
        Now { wall_ms: wall_ms(), mono_ms: self.started.elapsed().as_millis() as i64 }
    }

    pub fn run(mut self) -> Result<(), KeeperError> {
        let mut events = Events::with_capacity(EVENTS_PER_POLL);
        let mut housekeeping_at_ms = HOUSEKEEPING_EVERY_MS;
        // Clients of recovered sessions could not connect during recovery.
        self.service.state.sessions.extend_deadlines(self.now().mono_ms);
        while !self.stopping.load(Ordering::Acquire) {
            let before_ms = self.now().mono_ms;
            let wait_ms = self.wait_ms(before_ms, housekeeping_at_ms);
            match self.poll.poll(&mut events, Some(Duration::from_millis(wait_ms as u64))) {
                Err(err) if err.kind() == ErrorKind::Interrupted => continue,
                result => result.map_err(KeeperError::Poll)?,
            }
            let now = self.now();
            let late_ms = now.mono_ms - before_ms - wait_ms;
            if late_ms > LATE_MS {
                warn!(late_ms, "process was paused; extending session timeouts");
                self.service.state.sessions.extend_deadlines(late_ms);
            }
            self.handle_events(&events, now)?;
            // After a full batch, requests of live sessions may still be unread: expire later.
            if events.iter().count() < EVENTS_PER_POLL {
                self.service.expire_sessions(now);
            }
            if now.mono_ms >= housekeeping_at_ms {
                housekeeping_at_ms = now.mono_ms + HOUSEKEEPING_EVERY_MS;
                self.housekeeping(now)?;
            }
            self.commit_and_flush(now)?;
        }
        self.shut_down()
    }

    fn wait_ms(&self, now_ms: i64, housekeeping_at_ms: i64) -> i64 {
        if !self.unread.is_empty() {
            return 0;
        }
        let expiry_ms = self.service.state.sessions.next_deadline_ms().unwrap_or(i64::MAX);
        (expiry_ms.min(housekeeping_at_ms) - now_ms).clamp(0, HOUSEKEEPING_EVERY_MS)
    }

    fn handle_events(&mut self, events: &Events, now: Now) -> Result<(), KeeperError> {
        for id in std::mem::take(&mut self.unread) {
            self.read(id, now)?;
        }
        for event in events {
            match event.token() {
                LISTENER => self.accept(LISTENER, now),
                TLS_LISTENER => self.accept(TLS_LISTENER, now),
                WAKER => {}
                Token(id) => self.ready(id, event, now)?,
            }
        }
        Ok(())
    }

    fn ready(&mut self, id: usize, event: &Event, now: Now) -> Result<(), KeeperError> {
        let Some(connection) = self.connections.get(id) else { return Ok(()) };
        if event.is_writable() && (connection.blocked || connection.stream.has_unsent_records()) {
            // Sent after the sync: the buffer may hold replies of this iteration.
            self.service.out.unframed(id, &[]);
        }
        if event.is_read_closed() || event.is_error() {
            // The end may follow the bytes of this read, and `poll` does not report it again.
            self.unread.push(id);
        }
        if event.is_readable() {
            self.read(id, now)?;
        }
        Ok(())
    }

    pub(super) fn accept(&mut self, token: Token, now: Now) {
        loop {
            let listener =
                self.tls_listener.as_ref().filter(|_| token == TLS_LISTENER).unwrap_or(&self.main_listener);
            let tls = listener.tls.clone();
            let (socket, addr) = match listener.socket.accept() {
                Ok(accepted) => accepted,
                Err(err) if err.kind() == ErrorKind::WouldBlock => return,
                Err(err) if err.kind() == ErrorKind::Interrupted => continue,
                Err(err) => {
                    warn!(%err, "accept failed");
                    return;
                }
            };
            if !self.ensure_slot_for(addr, now) {
                continue;
            }
            if let Err(err) = self.admit(socket, addr, tls.as_ref(), now) {
                warn!(%addr, %err, "connection setup failed");
            }
        }
    }

    fn admit(
        &mut self,
        socket: TcpStream,
        addr: SocketAddr,
        tls: Option<&ServerTls>,
        now: Now,
    ) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let mut stream = match tls {
            Some(tls) => Stream::tls(socket, tls.config())?,
            None => Stream::Plain(socket),
        };
        let slot = self.connections.vacant_entry();
        let id = slot.key();
        self.poll.registry().register(&mut stream, Token(id), Interest::READABLE | Interest::WRITABLE)?;
        self.service.out.open(id);
        self.admission.opened(addr.ip());
        slot.insert(Connection {
            stream,
            peer: Peer::new(id, addr.ip()),
            addr,
            unhandled: Vec::new(),
            since_ms: now.mono_ms,
            closing_since_ms: None,
            blocked: false,
        });
        Ok(())
    }

    /// Reads once from the socket and handles the complete frames.
    fn read(&mut self, id: usize, now: Now) -> Result<(), KeeperError> {
        let Some(connection) = self.connections.get_mut(id) else { return Ok(()) };
        if connection.closing_since_ms.is_some() || connection.blocked {
            return Ok(());
        }
        let received = match connection.stream.read(&mut self.scratch) {
            Ok(0) => {
                self.close(id);
                return Ok(());
            }
            Ok(n) => n,
            Err(err) if matches!(err.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
            Err(err) => {
                self.note_lost(id, &err, now);
                self.close(id);
                return Ok(());
            }
        };
        if received == self.scratch.len() || connection.stream.has_ended() {
            self.unread.push(id);
        }
        self.unhandled_bytes -= connection.unhandled.capacity();
        if connection.unhandled.is_empty() {
            let scratch = std::mem::take(&mut self.scratch);
            let handled = self.handle(id, &scratch[..received], now);
            if let Some(connection) = self.connections.get_mut(id) {
                connection.unhandled.extend_from_slice(&scratch[handled..received]);
            }
            self.scratch = scratch;
        } else {
            connection.unhandled.extend_from_slice(&self.scratch[..received]);
            self.handle_waiting(id, now);
        }
        self.unhandled_bytes +=
            self.connections.get(id).map_or(0, |connection| connection.unhandled.capacity());
        if self.service.storage.pending_bytes() > COMMIT_BYTES
            || self.service.out.unflushed_bytes() > FLUSH_BYTES
            || self.buffer_bytes() > self.config.limits.max_buffer_bytes
        {
            self.commit_and_flush(now)?;
        }
        Ok(())
    }

    fn handle_waiting(&mut self, id: usize, now: Now) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let mut bytes = std::mem::take(&mut connection.unhandled);
        let handled = self.handle(id, &bytes, now);
        if let Some(connection) = self.connections.get_mut(id)
            && handled < bytes.len()
        {
            bytes.drain(..handled);
            connection.unhandled = bytes;
        }
    }

    /// Handles the complete frames in `bytes` and returns their total length.
    fn handle(&mut self, id: usize, bytes: &[u8], now: Now) -> usize {
        let mut at = 0;
        while let Some(head) = bytes[at..].first_chunk::<4>() {
            let Some(connection) = self.connections.get_mut(id) else { break };
            if connection.peer.session.is_none() && four_letter::is_command(*head) {
                let text = four_letter::answer(*head, &self.collect_stats_with_clients());
                self.service.out.unframed(id, text.as_bytes());
                self.connections[id].closing_since_ms = Some(now.mono_ms);
                return bytes.len();
            }
            let limit = match connection.peer.session {
                Some(_) => self.config.limits.max_frame_bytes,
                None => MAX_CONNECT_BYTES.min(self.config.limits.max_frame_bytes),
            };
            let announced = i32::from_be_bytes(*head);
            let len = match usize::try_from(announced) {
                Ok(len) if len <= limit => len,
                _ => {
                    self.note_bad_frame(id, announced, limit, now);
                    self.close(id);
                    return bytes.len();
                }
            };
            let Some(frame) = bytes[at + 4..].get(..len) else { break };
            at += 4 + len;
            if self.service.frame(&mut connection.peer, frame, now) == FrameOutcome::Close {
                connection.closing_since_ms = Some(now.mono_ms);
                // Schedules a flush even without pending bytes, because `flush` closes the
                // connection.
                self.service.out.unframed(id, &[]);
                return bytes.len();
            }
            if self.service.out.unsent_bytes(id) > self.config.limits.max_outstanding_bytes {
                connection.blocked = true;
                break;
            }
        }
        at
    }

    /// Syncs the log, then sends the pending replies and events.
    pub(super) fn commit_and_flush(&mut self, now: Now) -> Result<(), KeeperError> {
        self.service.storage.commit()?;
        for id in std::mem::take(&mut self.service.evicted) {
            self.close(id);
        }
        for id in self.service.out.take_overflowed() {
            self.close_for_memory(id, now);
        }
        let dirty = self.service.out.take_dirty();
        for id in &dirty {
            self.flush(*id);
        }
        self.service.out.recycle(dirty);
        self.enforce_buffer_limit(now);
        Ok(())
    }

    fn flush(&mut self, id: usize) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        match self.service.out.flush(id, &mut connection.stream) {
            Flushed::All if connection.closing_since_ms.is_some() => self.close(id),
            Flushed::All => {
                if std::mem::take(&mut connection.blocked) {
                    self.unread.push(id);
                }
            }
            Flushed::Blocked => {
                connection.blocked = true;
                if self.service.out.unsent_bytes(id) > 4 * self.config.limits.max_outstanding_bytes {
                    self.outstanding_closed += 1;
                    warn!(addr = %connection.addr, "connection closed: client does not read its replies");
                    self.close(id);
                }
            }
            Flushed::Broken => self.close(id),
        }
    }

    pub(super) fn close(&mut self, id: usize) {
        let Some(mut connection) = self.connections.try_remove(id) else { return };
        self.admission.closed(connection.addr.ip());
        self.unhandled_bytes -= connection.unhandled.capacity();
        self.service.disconnected(&connection.peer);
        self.service.out.clear(id);
        // A new connection can get this id from now on and must not be evicted by mistake.
        self.service.evicted.retain(|evicted| *evicted != id);
        if let Err(err) = self.poll.registry().deregister(&mut connection.stream) {
            debug!(%err, "deregister failed");
        }
        connection.stream.end();
    }

    /// Handles the requests that have arrived, then writes a snapshot so that the next start is
    /// fast.
    fn shut_down(mut self) -> Result<(), KeeperError> {
        let now = self.now();
        let ids: Vec<usize> = self.connections.iter().map(|(id, _)| id).collect();
        for id in ids {
            self.read(id, now)?;
        }
        self.commit_and_flush(now)?;
        // Explicitly, because TLS sends a close_notify.
        let ids: Vec<usize> = self.connections.iter().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.close(id));
        self.service.storage.wait_for_snapshot();
        self.service.storage.snapshot(&self.service.state)?;
        self.service.storage.wait_for_snapshot();
        info!(zxid = self.service.state.zxid(), "keeper stopped");
        Ok(())
    }
}

fn wall_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
