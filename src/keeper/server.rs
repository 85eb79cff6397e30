//! The server: one thread, one loop. Each turn reads what the sockets hold, handles it, makes the log durable with one
//! sync, and only then sends what was answered. So a write is seen by nobody before it is on disk, all writes that
//! arrived during one sync share the next, and there is no lock, no queue and no reply to hold back.
//!
//! What a request means is in `serve.rs`; here are sockets, limits and time.

use std::io::{self, ErrorKind, Read as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mio::event::Event;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::process::{Resource, getrlimit};
use rustls::ServerConfig;
use slab::Slab;
use tracing::{debug, info, warn};

use super::admission::Admission;
use super::door::{Door, Stream};
use super::outbox::Flushed;
use super::serve::{Now, Peer, Service, SessionRules, Verdict};
use super::start::{Config, KeeperError, StopHandle};
use super::storage::Storage;
use super::words;

pub(super) const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
pub(super) const TLS_LISTENER: Token = Token(usize::MAX - 2);
const EVENTS_A_TURN: usize = 1024;
const READ_BYTES: usize = 256 << 10;
/// The longest first frame of a connection.
const MAX_CONNECT_BYTES: usize = 4 << 10;
/// More answers than this are sent before more is read.
const FLUSH_BYTES: usize = 16 << 20;
/// More than this waiting for its sync is synced before more is read.
const COMMIT_BYTES: usize = 4 << 20;
/// Housekeeping: transient nodes, connections that never spoke.
const CHORES_EVERY_MS: i64 = 1_000;
/// A turn that came this much late means that we stood still, not that the clients did.
const LATE_MS: i64 = 500;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) peer: Peer,
    pub(super) addr: SocketAddr,
    /// The beginning of a frame whose end has not come yet, or requests that wait for their client to read.
    pub(super) unhandled: Vec<u8>,
    pub(super) since_ms: i64,
    /// Since when it is only there for its last answers to be taken.
    pub(super) closing_since_ms: Option<i64>,
    /// Its client does not take its answers; nothing is read from it until it does.
    blocked: bool,
}

#[derive(Debug)]
pub struct Server {
    pub(super) config: Config,
    poll: Poll,
    pub(super) plain: Door,
    pub(super) secure: Option<Door>,
    pub(super) service: Service,
    pub(super) connections: Slab<Connection>,
    pub(super) admission: Admission,
    /// Memory of requests that are not handled yet, of all connections.
    pub(super) unhandled_bytes: usize,
    /// Connections that may hold more than one read took, and will not be reported as readable again.
    unread: Vec<usize>,
    scratch: Box<[u8]>,
    started: Instant,
    stopping: Arc<AtomicBool>,
    pub(super) outstanding_closed: u64,
}

impl Server {
    pub fn new(mut config: Config) -> Result<(Server, StopHandle), KeeperError> {
        let started = Instant::now();
        config.limits = config.limits.within(getrlimit(Resource::Nofile).current);
        let poll = Poll::new().map_err(KeeperError::Poll)?;
        let plain = Door::open(&poll, LISTENER, config.listen, None)?;
        let secure = match &config.tls {
            Some(tls) => Some(Door::open(&poll, TLS_LISTENER, tls.listen, Some(tls.config.clone()))?),
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
        info!(local_addr = %plain.addr, zxid = state.zxid(), nodes = state.tree.len(), "keeper recovered");
        let mut service = Service::new(state, storage, rules);
        service.out.limit(config.limits.max_buffer_bytes);
        let server = Server {
            poll,
            plain,
            secure,
            service,
            connections: Slab::new(),
            admission: Admission::default(),
            unhandled_bytes: 0,
            unread: Vec::new(),
            scratch: vec![0; READ_BYTES].into_boxed_slice(),
            started,
            stopping: stopping.clone(),
            outstanding_closed: 0,
            config,
        };
        Ok((server, StopHandle::new(stopping, waker)))
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.plain.addr
    }

    /// Where TLS is served, if it is.
    pub fn tls_addr(&self) -> Option<SocketAddr> {
        self.secure.as_ref().map(|door| door.addr)
    }

    pub(super) fn now(&self) -> Now {
        Now { wall_ms: wall_ms(), mono_ms: self.started.elapsed().as_millis() as i64 }
    }

    pub fn run(mut self) -> Result<(), KeeperError> {
        let mut events = Events::with_capacity(EVENTS_A_TURN);
        let mut chores_at_ms = CHORES_EVERY_MS;
        // Sessions from before the start had no chance to be heard while we recovered.
        self.service.state.sessions.forgive(self.now().mono_ms);
        while !self.stopping.load(Ordering::Acquire) {
            let before_ms = self.now().mono_ms;
            let wait_ms = self.wait_ms(before_ms, chores_at_ms);
            match self.poll.poll(&mut events, Some(Duration::from_millis(wait_ms as u64))) {
                Err(err) if err.kind() == ErrorKind::Interrupted => continue,
                result => result.map_err(KeeperError::Poll)?,
            }
            let now = self.now();
            let late_ms = now.mono_ms - before_ms - wait_ms;
            if late_ms > LATE_MS {
                warn!(late_ms, "stood still; sessions get that time back");
                self.service.state.sessions.forgive(late_ms);
            }
            self.turn(&events, now)?;
            // With a full batch more clients may be waiting to be heard: not now.
            if events.iter().count() < EVENTS_A_TURN {
                self.service.expire_sessions(now);
            }
            if now.mono_ms >= chores_at_ms {
                chores_at_ms = now.mono_ms + CHORES_EVERY_MS;
                self.chores(now)?;
            }
            self.settle(now)?;
        }
        self.shut_down()
    }

    fn wait_ms(&self, now_ms: i64, chores_at_ms: i64) -> i64 {
        if !self.unread.is_empty() {
            return 0;
        }
        let expiry_ms = self.service.state.sessions.next_deadline_ms().unwrap_or(i64::MAX);
        (expiry_ms.min(chores_at_ms) - now_ms).clamp(0, CHORES_EVERY_MS)
    }

    fn turn(&mut self, events: &Events, now: Now) -> Result<(), KeeperError> {
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
        if event.is_writable() && (connection.blocked || connection.stream.holds_back()) {
            // Goes out with the rest, after the sync: it may hold answers of this very turn.
            self.service.out.raw(id, &[]);
        }
        if event.is_read_closed() || event.is_error() {
            // The end may lie behind the bytes that this read takes, and is not announced again.
            self.unread.push(id);
        }
        if event.is_readable() {
            self.read(id, now)?;
        }
        Ok(())
    }

    pub(super) fn accept(&mut self, token: Token, now: Now) {
        loop {
            let door = self.secure.as_ref().filter(|_| token == TLS_LISTENER).unwrap_or(&self.plain);
            let tls = door.tls.clone();
            let (socket, addr) = match door.listener.accept() {
                Ok(accepted) => accepted,
                Err(err) if err.kind() == ErrorKind::WouldBlock => return,
                Err(err) if err.kind() == ErrorKind::Interrupted => continue,
                Err(err) => {
                    warn!(%err, "could not accept a connection");
                    return;
                }
            };
            if !self.has_room_for(addr, now) {
                continue;
            }
            if let Err(err) = self.admit(socket, addr, tls.as_ref(), now) {
                warn!(%addr, %err, "could not serve a connection");
            }
        }
    }

    fn admit(
        &mut self,
        socket: TcpStream,
        addr: SocketAddr,
        tls: Option<&Arc<ServerConfig>>,
        now: Now,
    ) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let mut stream = match tls {
            Some(config) => Stream::tls(socket, config)?,
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

    /// One read, and everything complete in it.
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
                debug!(addr = %connection.addr, %err, "connection lost");
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
            || self.service.out.fresh() > FLUSH_BYTES
            || self.buffer_bytes() > self.config.limits.max_buffer_bytes
        {
            self.settle(now)?;
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

    /// Handles the complete frames in `bytes` and says how many bytes those were.
    fn handle(&mut self, id: usize, bytes: &[u8], now: Now) -> usize {
        let mut at = 0;
        while let Some(head) = bytes[at..].first_chunk::<4>() {
            let Some(connection) = self.connections.get_mut(id) else { break };
            if connection.peer.session.is_none() && words::is_word(*head) {
                let text = words::answer(*head, &self.facts());
                self.service.out.raw(id, text.as_bytes());
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
            if self.service.frame(&mut connection.peer, frame, now) == Verdict::Close {
                connection.closing_since_ms = Some(now.mono_ms);
                // Also with nothing left to say: the flush is what closes.
                self.service.out.raw(id, &[]);
                return bytes.len();
            }
            if self.service.out.waiting(id) > self.config.limits.max_outstanding_bytes {
                connection.blocked = true;
                break;
            }
        }
        at
    }

    /// Makes everything durable, then sends it.
    pub(super) fn settle(&mut self, now: Now) -> Result<(), KeeperError> {
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
        self.relieve(now);
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
                if self.service.out.waiting(id) > 4 * self.config.limits.max_outstanding_bytes {
                    self.outstanding_closed += 1;
                    warn!(addr = %connection.addr, "connection closed: its client does not read");
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
        // The number is free for a new connection from here on, which must not be closed in this one's place.
        self.service.evicted.retain(|evicted| *evicted != id);
        if let Err(err) = self.poll.registry().deregister(&mut connection.stream) {
            debug!(%err, "deregister");
        }
        connection.stream.end();
    }

    /// Answers what has arrived, then leaves a snapshot so that the next start is quick.
    fn shut_down(mut self) -> Result<(), KeeperError> {
        let now = self.now();
        let ids: Vec<usize> = self.connections.iter().map(|(id, _)| id).collect();
        for id in ids {
            self.read(id, now)?;
        }
        self.settle(now)?;
        // Not left to the end of the process: TLS has a farewell.
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
