//! What each request does: the meaning of ZooKeeper's protocol over the state machine. Writes go to the state, the
//! log and the watchers; reads come from the state; replies and events go to outboxes. Touches no socket and no clock.

use std::collections::HashMap;
use std::net::IpAddr;

use tracing::debug;

use super::acl::{self, Identity};
use super::jute::{Put as _, Reader};
use super::outbox::Outboxes;
use super::proto::{Code, Connect, HeldWatches, Op, Read, Request, decode, decode_connect, op};
use super::reply::{
    lookup, put_found, put_multi_end, put_multi_error, put_multi_header, put_result, result_type,
};
use super::state::{Caller, Refusal, State};
use super::storage::Storage;
use super::txn::{Change, Password, Txn};
use super::watch::{EventKind, Watch, Watches};

/// Containers and TTL nodes that go at one time.
const REAPED_A_TURN: usize = 1_000;

/// A connection as the protocol sees it.
#[derive(Debug)]
pub struct Peer {
    pub id: usize,
    pub session: Option<i64>,
    pub proved: Vec<Identity>,
    addr: IpAddr,
}

impl Peer {
    pub fn new(id: usize, addr: IpAddr) -> Self {
        Peer { id, session: None, proved: vec![Identity::ip(addr)], addr }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Continue,
    /// Close when everything has been sent.
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
}

#[derive(Debug)]
pub struct Service {
    pub state: State,
    pub storage: Storage,
    pub watches: Watches<usize>,
    pub out: Outboxes,
    pub attached: HashMap<i64, usize>,
    pub rules: SessionRules,
    /// Connections that must go because another took their session over, or because it ended.
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
            attached: HashMap::new(),
            rules,
            evicted: Vec::new(),
            requests: 0,
        }
    }

    pub fn frame(&mut self, peer: &mut Peer, frame: &[u8], now: Now) -> Verdict {
        self.requests += 1;
        match peer.session {
            None => self.handshake(peer, frame, now),
            Some(session) => self.request(peer, session, frame, now),
        }
    }

    fn handshake(&mut self, peer: &mut Peer, frame: &[u8], now: Now) -> Verdict {
        let Ok(connect) = decode_connect(frame) else { return Verdict::Close };
        if connect.seen_zxid > self.state.zxid() {
            debug!(
                seen = connect.seen_zxid,
                ours = self.state.zxid(),
                "client has seen a later state than ours"
            );
            return Verdict::Close;
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
            return Verdict::Close;
        }
        peer.session = Some(session);
        self.attached.insert(session, peer.id);
        Verdict::Continue
    }

    fn open_session(&mut self, timeout_ms: i32, now: Now) -> Option<(i64, Password)> {
        let mut password = [0; 16];
        // Without randomness nobody else could be kept out of the session, so there is none.
        getrandom::fill(&mut password).ok()?;
        // The zxid of its beginning: positive, and none is ever given out twice from one data directory.
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

    fn request(&mut self, peer: &mut Peer, session: i64, frame: &[u8], now: Now) -> Verdict {
        let mut reader = Reader::new(frame);
        let (Ok(xid), Ok(opcode)) = (reader.i32(), reader.i32()) else { return Verdict::Close };
        if self.state.sessions.get(session).is_none() {
            // Ended over another connection. What it made now would belong to nobody.
            self.out.refusal(peer.id, xid, self.state.zxid(), Code::SessionExpired);
            return Verdict::Close;
        }
        self.state.sessions.touch(session, now.mono_ms);
        let request = match decode(opcode, &frame[8..]) {
            Ok(request) => request,
            Err(code) => {
                self.out.refusal(peer.id, xid, self.state.zxid(), code);
                return Verdict::Continue;
            }
        };
        let proved = std::mem::take(&mut peer.proved);
        let caller = Caller { session, proved: &proved };
        let (id, zxid) = (peer.id, self.state.zxid());
        let mut verdict = Verdict::Continue;
        match request {
            Request::Write(op) => self.write(id, xid, caller, &op, now),
            Request::Multi(ops) => self.multi(id, xid, caller, &ops, now),
            Request::Read(read) => self.read(id, xid, caller, read),
            Request::MultiRead(reads) => self.multi_read(id, xid, caller, &reads),
            Request::Sync { path } => self.out.reply(id, xid, zxid, |out| out.put_string(path)),
            Request::Ping => self.out.reply(id, xid, zxid, |_| {}),
            Request::CloseSession => {
                self.end_session(session, now);
                self.out.reply(id, xid, self.state.zxid(), |_| {});
                verdict = Verdict::Close;
            }
            Request::Auth { scheme, auth } => {
                match acl::authenticate(scheme, auth, peer.addr, self.rules.super_digest.as_deref()) {
                    Ok(more) => {
                        self.out.reply(id, xid, 0, |_| {});
                        peer.proved = more;
                    }
                    Err(code) => {
                        self.out.refusal(id, xid, 0, code);
                        verdict = Verdict::Close;
                    }
                }
            }
            Request::SetWatches(held) => {
                self.set_watches(id, &held);
                self.out.reply(id, xid, zxid, |_| {});
            }
            Request::AddWatch { path, recursive } => {
                self.watches.add(id, path, if recursive { Watch::Recursive } else { Watch::Persistent });
                self.out.reply(id, xid, zxid, |out| out.put_i32(0));
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
                for who in &proved {
                    out.put_string(&who.scheme);
                    out.put_string(
                        who.id.split(':').next().filter(|_| &*who.scheme == "digest").unwrap_or(&who.id),
                    );
                }
            }),
        }
        let more = std::mem::replace(&mut peer.proved, proved);
        for who in more {
            if !peer.proved.contains(&who) {
                peer.proved.push(who);
            }
        }
        verdict
    }

    fn answer_watcher(&mut self, id: usize, xid: i32, found: bool) {
        let zxid = self.state.zxid();
        if found {
            self.out.reply(id, xid, zxid, |_| {});
        } else {
            self.out.refusal(id, xid, zxid, Code::NoWatcher);
        }
    }

    fn write(&mut self, id: usize, xid: i32, caller: Caller<'_>, op: &Op<'_>, now: Now) {
        match self.state.write(caller, std::slice::from_ref(op), now.wall_ms) {
            Ok(written) => {
                self.publish(written.changes, now);
                let zxid = self.state.zxid();
                self.out.reply(id, xid, zxid, |out| written.results.iter().for_each(|r| put_result(r, out)));
            }
            Err(Refusal { code, .. }) => self.out.refusal(id, xid, self.state.zxid(), code),
        }
    }

    fn multi(&mut self, id: usize, xid: i32, caller: Caller<'_>, ops: &[Op<'_>], now: Now) {
        let written = self.state.write(caller, ops, now.wall_ms);
        let zxid = self.state.zxid();
        match written {
            Ok(written) => {
                self.publish(written.changes, now);
                self.out.reply(id, xid, zxid, |out| {
                    for (op, result) in ops.iter().zip(&written.results) {
                        put_multi_header(out, result_type(op), Code::Ok);
                        put_result(result, out);
                    }
                    put_multi_end(out);
                });
            }
            Err(refusal) => self.out.reply(id, xid, zxid, |out| {
                for index in 0..ops.len() {
                    let code = match index.cmp(&refusal.index) {
                        std::cmp::Ordering::Less => Code::Ok,
                        std::cmp::Ordering::Equal => refusal.code,
                        std::cmp::Ordering::Greater => Code::RuntimeInconsistency,
                    };
                    put_multi_error(out, code);
                }
                put_multi_end(out);
            }),
        }
    }

    /// Logs decided changes and tells the watchers. Both wait in memory until the server commits.
    fn publish(&mut self, changes: Vec<Change<'_>>, now: Now) {
        for change in &changes {
            let (kind, path) = match change {
                Change::Create { path, .. } => (EventKind::Created, path),
                Change::Delete { path } => (EventKind::Deleted, path),
                Change::SetData { path, .. } => (EventKind::DataChanged, path),
                Change::SetAcl { .. } => continue,
            };
            self.tell(kind, path);
        }
        if !changes.is_empty() {
            self.storage.append(self.state.zxid(), now.wall_ms, &Txn::Changes(changes));
        }
    }

    fn tell(&mut self, kind: EventKind, path: &str) {
        let out = &mut self.out;
        self.watches.trigger(kind, path, &mut |id, kind, path| out.event(id, kind, path));
    }

    pub fn end_session(&mut self, session: i64, now: Now) {
        let (txn, gone) = self.state.close_session(session);
        self.storage.append(self.state.zxid(), now.wall_ms, &txn);
        self.attached.remove(&session);
        for path in &gone {
            self.tell(EventKind::Deleted, path);
        }
    }

    /// Ends the sessions that were silent for too long.
    pub fn expire_sessions(&mut self, now: Now) {
        while let Some(session) = self.state.sessions.pop_expired(now.mono_ms) {
            debug!(session, "session expired");
            self.evicted.extend(self.attached.get(&session));
            self.end_session(session, now);
        }
    }

    /// Deletes containers and TTL nodes whose time has come.
    pub fn reap(&mut self, now: Now) {
        let changes = self.state.reap(now.wall_ms, REAPED_A_TURN);
        self.publish(changes, now);
    }

    pub fn disconnected(&mut self, peer: &Peer) {
        self.watches.forget(peer.id);
        if let Some(session) = peer.session
            && self.attached.get(&session) == Some(&peer.id)
        {
            self.attached.remove(&session);
        }
    }

    fn read(&mut self, id: usize, xid: i32, caller: Caller<'_>, read: Read<'_>) {
        let zxid = self.state.zxid();
        match lookup(&self.state, caller, read) {
            Ok(found) => self.out.reply(id, xid, zxid, |out| put_found(&found, out)),
            Err(code) => self.out.refusal(id, xid, zxid, code),
        }
        self.watch_read(id, caller, read);
    }

    fn multi_read(&mut self, id: usize, xid: i32, caller: Caller<'_>, reads: &[Read<'_>]) {
        self.out.reply(id, xid, self.state.zxid(), |out| {
            for read in reads {
                match lookup(&self.state, caller, *read) {
                    Ok(found) => {
                        let data = matches!(read, Read::Data { .. });
                        put_multi_header(out, if data { op::GET_DATA } else { op::GET_CHILDREN }, Code::Ok);
                        put_found(&found, out);
                    }
                    Err(code) => put_multi_error(out, code),
                }
            }
            put_multi_end(out);
        });
        for read in reads {
            self.watch_read(id, caller, *read);
        }
    }

    /// A read that asked for a watch and may have it.
    fn watch_read(&mut self, id: usize, caller: Caller<'_>, read: Read<'_>) {
        let (path, watch) = match read {
            Read::Exists { path, watch: true } => return self.watches.add(id, path, Watch::Data),
            Read::Data { path, watch: true } => (path, Watch::Data),
            Read::Children { path, watch: true, .. } => (path, Watch::Child),
            _ => return,
        };
        if lookup(&self.state, caller, read).is_ok() {
            self.watches.add(id, path, watch);
        }
    }

    /// After a reconnect: what was missed is told at once, the rest is watched again.
    fn set_watches(&mut self, id: usize, held: &HeldWatches<'_>) {
        let Service { state, watches, out, .. } = self;
        let node = |path: &str| state.tree.get(path);
        for path in &held.data {
            match node(path) {
                None => out.event(id, EventKind::Deleted, path),
                Some(node) if node.mzxid > held.seen_zxid => out.event(id, EventKind::DataChanged, path),
                Some(_) => watches.add(id, path, Watch::Data),
            }
        }
        for path in &held.exist {
            match node(path) {
                Some(_) => out.event(id, EventKind::Created, path),
                None => watches.add(id, path, Watch::Data),
            }
        }
        for path in &held.child {
            match node(path) {
                None => out.event(id, EventKind::Deleted, path),
                Some(node) if node.pzxid > held.seen_zxid => out.event(id, EventKind::ChildrenChanged, path),
                Some(_) => watches.add(id, path, Watch::Child),
            }
        }
        held.persistent.iter().for_each(|path| watches.add(id, path, Watch::Persistent));
        held.recursive.iter().for_each(|path| watches.add(id, path, Watch::Recursive));
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
