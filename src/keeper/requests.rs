//! Executes requests of ZooKeeper's protocol against the state machine. Writes go to the state, the
//! log and the watches; reads come from the state; replies and events go to outboxes. Sockets and
//! clocks do not belong here.

use std::collections::HashMap;
use std::net::IpAddr;

use tracing::{debug, warn};

use super::acl::{self, RedactedIdentities};
use super::identities::{Identities, IdentityLimits, TooMany};
use super::jute::{Put as _, Reader};
use super::outbox::Outboxes;
use super::proto::{Code, Connect, Op, Read, Request, decode, decode_connect, op};
use super::refusals::{Reason, Refusals};
use super::reply::{
    MULTI_HEADER_BYTES, lookup, multi_fits, put_multi_end, put_multi_error, put_multi_header,
    put_read_result, put_result, result_type,
};
use super::state::{Caller, Refusal, State};
use super::storage::Storage;
use super::txn::Password;
use super::watch::{Watch, Watches};
use super::watch_requests::WatchLimits;

/// The protocol state of a connection.
#[derive(Debug)]
pub struct Peer {
    pub id: usize,
    pub session: Option<i64>,
    addr: IpAddr,
}

impl Peer {
    pub fn new(id: usize, addr: IpAddr) -> Self {
        Peer { id, session: None, addr }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameOutcome {
    Continue,
    /// Close the connection after all pending bytes have been sent.
    Close,
}

/// The moment at which requests are handled.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    pub wall_ms: i64,
    pub mono_ms: i64,
}

#[derive(Debug, Clone)]
pub struct SessionRules {
    pub min_timeout_ms: i32,
    pub max_timeout_ms: i32,
    pub super_digest: Option<String>,
    /// The size limit of a reply.
    pub max_answer_bytes: usize,
    pub identities: IdentityLimits,
    pub watches: WatchLimits,
}

#[derive(Debug)]
pub struct Service {
    pub state: State,
    pub storage: Storage,
    pub watches: Watches<usize>,
    pub out: Outboxes,
    pub identities: Identities,
    pub refusals: Refusals,
    pub attached: HashMap<i64, usize>,
    pub rules: SessionRules,
    /// Connections to close: their session moved to another connection, or ended.
    pub evicted: Vec<usize>,
    pub requests: u64,
}

impl Service {
    pub fn new(state: State, storage: Storage, rules: SessionRules) -> Self {
        Service {
            state,
            storage,
            watches: Watches::default(),
            out: Outboxes::default(),
            identities: Identities::default(),
            refusals: Refusals::default(),
            attached: HashMap::new(),
            rules,
            evicted: Vec::new(),
            requests: 0,
        }
    }

    pub fn frame(&mut self, peer: &mut Peer, frame: &[u8], now: Now) -> FrameOutcome {
        self.requests += 1;
        match peer.session {
            None => self.handshake(peer, frame, now),
            Some(session) => self.request(peer, session, frame, now),
        }
    }

    fn handshake(&mut self, peer: &mut Peer, frame: &[u8], now: Now) -> FrameOutcome {
        let Ok(connect) = decode_connect(frame) else {
            self.note_bad_request(peer, 0, frame.len(), now);
            return FrameOutcome::Close;
        };
        if connect.seen_zxid > self.state.zxid() {
            debug!(
                seen = connect.seen_zxid,
                ours = self.state.zxid(),
                "client refused: it has seen a newer zxid"
            );
            return FrameOutcome::Close;
        }
        let timeout_ms = connect.timeout_ms.clamp(self.rules.min_timeout_ms, self.rules.max_timeout_ms);
        let opened = match connect.session {
            0 => self.open_session(timeout_ms, now),
            session => self.reattach(session, &connect, peer.id, timeout_ms, now),
        };
        let (session, password, timeout_ms) = match opened {
            Some((session, password)) => (session, password, timeout_ms),
            None => (0, [0; 16], 0),
        };
        self.out.frame(peer.id, |out| {
            out.put_i32(0);
            out.put_i32(timeout_ms);
            out.put_i64(session);
            out.put_buffer(&password);
            if connect.has_read_only {
                out.put_bool(false);
            }
        });
        if session == 0 {
            return FrameOutcome::Close;
        }
        peer.session = Some(session);
        self.identities.open(peer.id, peer.addr);
        self.attached.insert(session, peer.id);
        FrameOutcome::Continue
    }

    fn open_session(&mut self, timeout_ms: i32, now: Now) -> Option<(i64, Password)> {
        if !self.storage.can_open_session(self.state.sessions.len()) {
            return None;
        }
        let mut password = [0; 16];
        // A session with a predictable password could be taken over, so no session is opened.
        getrandom::fill(&mut password).ok()?;
        // The zxid that opens the session is positive and unique within a data directory.
        let id = self.state.zxid() + 1;
        let txn = self.state.open_session(id, timeout_ms, password, now.mono_ms);
        self.storage.append(self.state.zxid(), now.wall_ms, &txn);
        Some((id, password))
    }

    fn reattach(
        &mut self,
        session: i64,
        connect: &Connect<'_>,
        peer: usize,
        timeout_ms: i32,
        now: Now,
    ) -> Option<(i64, Password)> {
        let password = self.state.sessions.get(session)?.password;
        if password != connect.password {
            return None;
        }
        self.state.sessions.set_timeout(session, timeout_ms, now.mono_ms);
        if let Some(old) = self.attached.insert(session, peer) {
            self.evicted.push(old);
        }
        Some((session, password))
    }

    /// Returns the request in a frame; answers a frame that has none.
    fn decode_frame<'f>(
        &mut self,
        peer: &Peer,
        session: i64,
        frame: &'f [u8],
        now: Now,
    ) -> Result<(i32, Request<'f>), FrameOutcome> {
        let mut reader = Reader::new(frame);
        let (Ok(xid), Ok(opcode)) = (reader.i32(), reader.i32()) else {
            self.note_bad_request(peer, 0, frame.len(), now);
            return Err(FrameOutcome::Close);
        };
        if self.state.sessions.get(session).is_none() {
            // The session ended on another connection: a node created now would have no owner.
            self.out.error_reply(peer.id, xid, self.state.zxid(), Code::SessionExpired);
            return Err(FrameOutcome::Close);
        }
        self.state.sessions.touch(session, now.mono_ms);
        decode(opcode, &frame[8..]).map(|request| (xid, request)).map_err(|code| {
            // ZooKeeper replies to an unknown operation without a zxid.
            let zxid = if code == Code::Unimplemented { -1 } else { self.state.zxid() };
            if code == Code::Marshalling {
                self.note_bad_request(peer, opcode, frame.len(), now);
            }
            self.out.error_reply(peer.id, xid, zxid, code);
            FrameOutcome::Continue
        })
    }

    fn request(&mut self, peer: &mut Peer, session: i64, frame: &[u8], now: Now) -> FrameOutcome {
        let (xid, request) = match self.decode_frame(peer, session, frame, now) {
            Ok(decoded) => decoded,
            Err(outcome) => return outcome,
        };
        let proved = self.identities.get(peer.id);
        let caller = Caller { session, proved: &proved };
        let (id, zxid) = (peer.id, self.state.zxid());
        let mut outcome = FrameOutcome::Continue;
        match request {
            Request::Write(op) => self.write(id, xid, caller, &op, now),
            Request::Multi(ops) => self.multi(id, xid, caller, &ops, now),
            Request::Read(read) => self.read(id, xid, caller, read, now),
            Request::MultiRead(reads) => self.multi_read(id, xid, caller, &reads, now),
            Request::Sync { path } => self.out.reply(id, xid, zxid, |out| out.put_string(path)),
            Request::Ping => self.out.reply(id, xid, zxid, |_| {}),
            Request::CloseSession => {
                self.end_session(session, now);
                self.out.reply(id, xid, self.state.zxid(), |_| {});
                outcome = FrameOutcome::Close;
            }
            Request::Auth { scheme, auth } => {
                drop(proved);
                return self.authenticate(peer, xid, (scheme, auth), now);
            }
            Request::SetWatches(previous) => match self.set_watches(id, caller, &previous) {
                Ok(()) => self.out.reply(id, xid, zxid, |_| {}),
                // Clients ignore this reply, so the connection is closed: otherwise the client
                // would wait for events that never come.
                Err(code) => {
                    self.refuse(id, xid, code, "set_watches", now);
                    outcome = FrameOutcome::Close;
                }
            },
            Request::AddWatch { path, recursive } => {
                let watch = if recursive { Watch::Recursive } else { Watch::Persistent };
                match self.add_watch(id, caller, path, watch) {
                    Ok(()) => self.out.reply(id, xid, zxid, |out| out.put_i32(0)),
                    Err(code) => self.refuse(id, xid, code, path, now),
                }
            }
            Request::RemoveWatches { path, kind } => {
                let removed = self.watches.remove(id, path, kind);
                self.answer_watcher(id, xid, removed);
            }
            Request::CheckWatches { path, kind } => {
                let present = self.watches.contains(id, path, kind);
                self.answer_watcher(id, xid, present);
            }
            Request::WhoAmI => self.out.reply(id, xid, zxid, |out| {
                out.put_len(proved.len());
                for identity in proved.iter() {
                    out.put_string(&identity.scheme);
                    out.put_string(identity.name());
                }
            }),
        }
        outcome
    }

    fn authenticate(
        &mut self,
        peer: &Peer,
        xid: i32,
        (scheme, auth): (&str, &[u8]),
        now: Now,
    ) -> FrameOutcome {
        let limits = &self.rules.identities;
        let proved = match auth.len() {
            len if len > limits.max_auth_bytes => Err(Code::AuthFailed),
            _ => acl::authenticate(scheme, auth, peer.addr, self.rules.super_digest.as_deref()),
        };
        let within = proved
            .and_then(|more| self.identities.add(peer.id, more, limits).map_err(|TooMany| Code::AuthFailed));
        match within {
            Ok(()) => {
                self.out.reply(peer.id, xid, 0, |_| {});
                FrameOutcome::Continue
            }
            Err(code) => {
                if let Some(unlogged) = self.refusals.note(Reason::Identity, now.mono_ms) {
                    let names = RedactedIdentities(self.identities.of(peer.id));
                    warn!(addr = %peer.addr, identities = %names, bytes = auth.len(), unlogged,
                        "authentication refused: unknown scheme or limit reached");
                }
                self.out.error_reply(peer.id, xid, 0, code);
                FrameOutcome::Close
            }
        }
    }

    /// Replies with an error. Refusals for rights and limits are logged, rate-limited and without
    /// secrets.
    fn refuse(&mut self, id: usize, xid: i32, code: Code, path: &str, now: Now) {
        self.note_refusal(id, code, path, now);
        self.out.error_reply(id, xid, self.state.zxid(), code);
    }

    fn note_bad_request(&mut self, peer: &Peer, opcode: i32, bytes: usize, now: Now) {
        if let Some(unlogged) = self.refusals.note(Reason::BadFrame, now.mono_ms) {
            let identities = RedactedIdentities(self.identities.of(peer.id));
            warn!(addr = %peer.addr, %identities, opcode, bytes, unlogged, "request refused: malformed");
        }
    }

    fn note_refusal(&mut self, id: usize, code: Code, path: &str, now: Now) {
        let (reason, text) = match code {
            Code::NoAuth => (Reason::Rights, "request refused: not authorized"),
            Code::QuotaExceeded => (Reason::Watch, "request refused: limit reached"),
            Code::Marshalling => (Reason::Answer, "request refused: reply exceeds the frame limit"),
            _ => return,
        };
        if let Some(unlogged) = self.refusals.note(reason, now.mono_ms) {
            let path = path.get(..LOGGED_PATH_BYTES).unwrap_or(path);
            warn!(identities = %RedactedIdentities(self.identities.of(id)), path, unlogged, "{text}");
        }
    }

    fn answer_watcher(&mut self, id: usize, xid: i32, found: bool) {
        let zxid = self.state.zxid();
        if found {
            self.out.reply(id, xid, zxid, |_| {});
        } else {
            self.out.error_reply(id, xid, zxid, Code::NoWatcher);
        }
    }

    fn write(&mut self, id: usize, xid: i32, caller: Caller<'_>, op: &Op<'_>, now: Now) {
        if self.storage.is_full() {
            return self.out.error_reply(id, xid, self.state.zxid(), Code::QuotaExceeded);
        }
        match self.state.write(caller, std::slice::from_ref(op), now.wall_ms) {
            Ok(written) => {
                self.publish(written.changes, &written.deleted, now);
                let zxid = self.state.zxid();
                self.out.reply(id, xid, zxid, |out| written.results.iter().for_each(|r| put_result(r, out)));
            }
            Err(Refusal { code, .. }) => self.refuse(id, xid, code, op.path(), now),
        }
    }

    fn multi(&mut self, id: usize, xid: i32, caller: Caller<'_>, ops: &[Op<'_>], now: Now) {
        if self.storage.is_full() {
            return self.out.error_reply(id, xid, self.state.zxid(), Code::QuotaExceeded);
        }
        if !multi_fits(ops, self.rules.max_answer_bytes) {
            return self.refuse(id, xid, Code::Marshalling, ops.first().map_or("", Op::path), now);
        }
        let written = self.state.write(caller, ops, now.wall_ms);
        let zxid = self.state.zxid();
        match written {
            Ok(written) => {
                self.publish(written.changes, &written.deleted, now);
                self.out.reply(id, xid, zxid, |out| {
                    for (op, result) in ops.iter().zip(&written.results) {
                        put_multi_header(out, result_type(op), Code::Ok);
                        put_result(result, out);
                    }
                    put_multi_end(out);
                });
            }
            Err(refusal) => {
                self.note_refusal(id, refusal.code, ops.get(refusal.index).map_or("", Op::path), now);
                self.out.reply(id, xid, zxid, |out| {
                    for index in 0..ops.len() {
                        let code = match index.cmp(&refusal.index) {
                            std::cmp::Ordering::Less => Code::Ok,
                            std::cmp::Ordering::Equal => refusal.code,
                            std::cmp::Ordering::Greater => Code::RuntimeInconsistency,
                        };
                        put_multi_error(out, code);
                    }
                    put_multi_end(out);
                });
            }
        }
    }

    /// Ends the sessions whose timeout has passed.
    pub fn expire_sessions(&mut self, now: Now) {
        while let Some(session) = self.state.sessions.pop_expired(now.mono_ms) {
            debug!(session, "session expired");
            self.evicted.extend(self.attached.get(&session));
            self.end_session(session, now);
        }
    }

    pub fn disconnected(&mut self, peer: &Peer) {
        self.watches.forget(peer.id);
        self.identities.close(peer.id);
        if let Some(session) = peer.session
            && self.attached.get(&session) == Some(&peer.id)
        {
            self.attached.remove(&session);
        }
    }

    fn read(&mut self, id: usize, xid: i32, caller: Caller<'_>, read: Read<'_>, now: Now) {
        let (zxid, limit) = (self.state.zxid(), self.rules.max_answer_bytes);
        let watch = match self.wanted_watch(id, caller, read) {
            Ok(watch) => watch,
            Err(code) => return self.refuse(id, xid, code, read.path(), now),
        };
        let answered = match lookup(&self.state, caller, read) {
            Ok(found) => self.out.bounded_reply(id, xid, zxid, limit, |body| put_read_result(&found, body)),
            Err(code) => {
                self.out.error_reply(id, xid, zxid, code);
                // As in ZooKeeper, a client can watch for a node that does not exist yet.
                if matches!(read, Read::Exists { .. }) { Ok(()) } else { Err(code) }
            }
        };
        match (answered, watch) {
            (Ok(()), Some((path, watch))) => self.watches.add(id, path, watch),
            (Ok(()), None) => {}
            (Err(code), _) => self.note_refusal(id, code, read.path(), now),
        }
    }

    fn multi_read(&mut self, id: usize, xid: i32, caller: Caller<'_>, reads: &[Read<'_>], now: Now) {
        let limit = self.rules.max_answer_bytes;
        let mut refused = None;
        let answered = self.out.bounded_reply(id, xid, self.state.zxid(), limit, |body| {
            for read in reads {
                match lookup(&self.state, caller, *read) {
                    Ok(found) => {
                        let data = matches!(read, Read::Data { .. });
                        let kind = if data { op::GET_DATA } else { op::GET_CHILDREN };
                        put_multi_header(body.reserve(MULTI_HEADER_BYTES)?, kind, Code::Ok);
                        put_read_result(&found, body)?;
                    }
                    Err(code) => {
                        refused.get_or_insert((code, read.path()));
                        put_multi_error(body.reserve(MULTI_HEADER_BYTES + 4)?, code);
                    }
                }
            }
            put_multi_end(body.reserve(MULTI_HEADER_BYTES)?);
            Ok(())
        });
        if let Err(code) = answered {
            return self.note_refusal(id, code, reads.first().map_or("", Read::path), now);
        }
        if let Some((code, path)) = refused {
            self.note_refusal(id, code, path, now);
        }
    }
}

/// Longer paths are truncated in the log.
const LOGGED_PATH_BYTES: usize = 200;

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
