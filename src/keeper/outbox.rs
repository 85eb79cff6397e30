//! Bytes on their way to clients. Replies and events are appended while requests are handled, and leave only after the
//! log is durable: the server flushes, nobody else.

use std::io::{ErrorKind, Write};

use super::jute::Put as _;
use super::proto::Code;
use super::watch::EventKind;

/// Kept by an idle connection; more is given back.
const KEPT_BYTES: usize = 16 << 10;

/// Sent bytes are dropped from the front of a buffer when at least this many of them are kept.
const COMPACT_BYTES: usize = 64 << 10;

/// The xids that are no request's.
const EVENT_XID: i32 = -1;

#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    dirty: bool,
    /// Events in it were dropped: its connection must be closed.
    overflowed: bool,
}

impl Outbox {
    /// Removes sent bytes when they are most of the buffer: otherwise the buffer of a client that
    /// reads continuously, but never catches up, would grow for as long as it is connected.
    fn compact(&mut self) {
        if self.sent >= COMPACT_BYTES && 2 * self.sent >= self.bytes.len() {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }
}

/// The body of a reply that must fit into a frame.
#[derive(Debug)]
pub struct Body<'a> {
    out: &'a mut Vec<u8>,
    end: usize,
}

impl Body<'_> {
    /// The buffer, if it may grow by `bytes`. Asked before the bytes are made, so that a refused reply costs no memory.
    pub fn room(&mut self, bytes: usize) -> Result<&mut Vec<u8>, Code> {
        let fits = self.out.len().saturating_add(bytes) <= self.end;
        if fits { Ok(self.out) } else { Err(Code::Marshalling) }
    }
}

/// One outbox a connection, by its number.
#[derive(Debug, Default)]
pub struct Outboxes {
    boxes: Vec<Outbox>,
    dirty: Vec<usize>,
    /// Memory of all buffers together.
    total: usize,
    /// Bytes appended since the last `take_dirty`.
    fresh: usize,
    /// Above it, events are not added.
    limit: Option<usize>,
    /// Connections that have lost an event and must be closed.
    overflowed: Vec<usize>,
    pub frames: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    All,
    /// The client does not read as fast as it asks.
    Blocked,
    Broken,
}

impl Outboxes {
    /// Makes room for connection `id`, with nothing in it.
    pub fn open(&mut self, id: usize) {
        if self.boxes.len() <= id {
            self.boxes.resize_with(id + 1, Outbox::default);
        }
        let dirty = self.boxes[id].dirty;
        self.total -= self.boxes[id].bytes.capacity();
        self.boxes[id] = Outbox { dirty, ..Outbox::default() };
    }

    pub fn clear(&mut self, id: usize) {
        self.open(id);
        self.overflowed.retain(|overflowed| *overflowed != id);
    }

    /// Bytes that the client has not taken yet.
    pub fn waiting(&self, id: usize) -> usize {
        self.boxes[id].bytes.len() - self.boxes[id].sent
    }

    /// Sets the memory that the buffers may take together before an event closes the connection that it is for. One
    /// change can have an event for each connection, and none of them can leave before the change is durable.
    pub fn limit(&mut self, bytes: usize) {
        self.limit = Some(bytes);
    }

    pub fn take_overflowed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.overflowed)
    }

    /// Memory that the buffers of all connections take.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Bytes that were appended since the buffers were flushed last.
    pub fn fresh(&self) -> usize {
        self.fresh
    }

    /// Memory that the buffer of connection `id` takes.
    pub fn held(&self, id: usize) -> usize {
        self.boxes.get(id).map_or(0, |outbox| outbox.bytes.capacity())
    }

    pub fn take_dirty(&mut self) -> Vec<usize> {
        self.fresh = 0;
        let dirty = std::mem::take(&mut self.dirty);
        for id in &dirty {
            self.boxes[*id].dirty = false;
        }
        dirty
    }

    /// Hands the list back so that its memory is used again.
    pub fn recycle(&mut self, mut list: Vec<usize>) {
        if self.dirty.is_empty() {
            list.clear();
            self.dirty = list;
        }
    }

    /// Lets `write` append to the buffer of connection `id`, and keeps count of the memory.
    fn append(&mut self, id: usize, write: impl FnOnce(&mut Vec<u8>)) {
        let outbox = &mut self.boxes[id];
        if !outbox.dirty {
            outbox.dirty = true;
            self.dirty.push(id);
        }
        let (len, capacity) = (outbox.bytes.len(), outbox.bytes.capacity());
        write(&mut outbox.bytes);
        self.fresh += outbox.bytes.len() - len;
        self.total += outbox.bytes.capacity() - capacity;
    }

    /// Bytes without a frame around them: four-letter words.
    pub fn raw(&mut self, id: usize, bytes: &[u8]) {
        self.append(id, |out| out.extend_from_slice(bytes));
    }

    pub fn frame(&mut self, id: usize, body: impl FnOnce(&mut Vec<u8>)) {
        self.frames += 1;
        self.append(id, |bytes| {
            let start = bytes.len();
            bytes.put_i32(0);
            body(bytes);
            let len = (bytes.len() - start - 4) as u32;
            bytes[start..start + 4].copy_from_slice(&len.to_be_bytes());
        });
    }

    pub fn reply(&mut self, id: usize, xid: i32, zxid: i64, body: impl FnOnce(&mut Vec<u8>)) {
        self.frame(id, |out| {
            put_header(out, xid, zxid, Code::Ok);
            body(out);
        });
    }

    /// A reply whose body may turn out to be too large for a frame of `limit` bytes. `body` asks for room before it
    /// writes; when there is none, its error is the reply.
    pub fn bounded_reply(
        &mut self,
        id: usize,
        xid: i32,
        zxid: i64,
        limit: usize,
        body: impl FnOnce(&mut Body<'_>) -> Result<(), Code>,
    ) -> Result<(), Code> {
        let mut written = Ok(());
        self.frame(id, |out| {
            let start = out.len();
            put_header(out, xid, zxid, Code::Ok);
            let mut bounded = Body { end: start + limit, out };
            written = body(&mut bounded);
            if let Err(code) = written {
                bounded.out.truncate(start);
                put_header(bounded.out, xid, zxid, code);
            }
        });
        written
    }

    pub fn refusal(&mut self, id: usize, xid: i32, zxid: i64, code: Code) {
        self.frame(id, |out| put_header(out, xid, zxid, code));
    }

    pub fn event(&mut self, id: usize, kind: EventKind, path: &str) {
        const SYNC_CONNECTED: i32 = 3;
        if self.boxes[id].overflowed {
            return;
        }
        if self.limit.is_some_and(|limit| self.total > limit) {
            self.clear(id);
            self.boxes[id].overflowed = true;
            self.overflowed.push(id);
            return;
        }
        self.frame(id, |out| {
            put_header(out, EVENT_XID, -1, Code::Ok);
            out.put_i32(kind as i32);
            out.put_i32(SYNC_CONNECTED);
            out.put_string(path);
        });
    }

    pub fn flush(&mut self, id: usize, to: &mut impl Write) -> Flushed {
        let outbox = &mut self.boxes[id];
        while outbox.sent < outbox.bytes.len() {
            match to.write(&outbox.bytes[outbox.sent..]) {
                Ok(0) => return Flushed::Broken,
                Ok(n) => outbox.sent += n,
                Err(err) if err.kind() == ErrorKind::WouldBlock => {
                    outbox.compact();
                    return Flushed::Blocked;
                }
                Err(err) if err.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Flushed::Broken,
            }
        }
        // Inside TLS, what was taken has not gone yet.
        match to.flush() {
            Ok(()) => {}
            Err(err) if err.kind() == ErrorKind::WouldBlock => return Flushed::Blocked,
            Err(_) => return Flushed::Broken,
        }
        outbox.sent = 0;
        if outbox.bytes.capacity() > KEPT_BYTES {
            self.total -= outbox.bytes.capacity();
            outbox.bytes = Vec::new();
        } else {
            outbox.bytes.clear();
        }
        Flushed::All
    }
}

fn put_header(out: &mut Vec<u8>, xid: i32, zxid: i64, code: Code) {
    out.put_i32(xid);
    out.put_i64(zxid);
    out.put_i32(code.number());
}
