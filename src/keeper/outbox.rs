//! Send buffers of connections. Replies and events are appended while requests are handled; only
//! the server flushes them, after the log is durable.

use std::io::{ErrorKind, Write};

use super::jute::Put as _;
use super::proto::Code;
use super::watch::EventKind;

/// Buffer capacity that an idle connection keeps; larger buffers are freed.
const KEPT_BYTES: usize = 16 << 10;

/// Minimum of sent bytes that are removed from the front of a buffer.
const COMPACT_BYTES: usize = 64 << 10;

/// The xid of events, which belong to no request.
const EVENT_XID: i32 = -1;

#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    dirty: bool,
    /// Whether events were dropped, so that the connection must be closed.
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

/// The body of a reply, bounded by the frame limit.
#[derive(Debug)]
pub struct Body<'a> {
    out: &'a mut Vec<u8>,
    end: usize,
}

impl Body<'_> {
    /// Returns the buffer if it may grow by `bytes`. Called before the bytes are encoded, so that a
    /// refused reply takes no memory.
    pub fn reserve(&mut self, bytes: usize) -> Result<&mut Vec<u8>, Code> {
        let fits = self.out.len().saturating_add(bytes) <= self.end;
        if fits { Ok(self.out) } else { Err(Code::Marshalling) }
    }
}

/// The outboxes of all connections, indexed by connection id.
#[derive(Debug, Default)]
pub struct Outboxes {
    boxes: Vec<Outbox>,
    dirty: Vec<usize>,
    /// Memory of all buffers together.
    total: usize,
    /// Bytes appended since the last `take_dirty`.
    unflushed_bytes: usize,
    /// Memory limit above which events are dropped.
    limit: Option<usize>,
    /// Connections that have lost an event and must be closed.
    overflowed: Vec<usize>,
    pub frames: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    All,
    /// The socket is not writable: the client does not read fast enough.
    Blocked,
    Broken,
}

impl Outboxes {
    /// Creates an empty buffer for connection `id`.
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

    /// Returns the bytes that the socket has not accepted yet.
    pub fn unsent_bytes(&self, id: usize) -> usize {
        self.boxes[id].bytes.len() - self.boxes[id].sent
    }

    /// Sets the memory limit of all buffers together. Above it, an event closes its connection. One
    /// change can cause an event for each connection, and none can be sent before the change is
    /// durable.
    pub fn set_memory_limit(&mut self, bytes: usize) {
        self.limit = Some(bytes);
    }

    pub fn take_overflowed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.overflowed)
    }

    /// Returns the memory of all buffers.
    pub fn memory_bytes(&self) -> usize {
        self.total
    }

    /// Returns the bytes appended since the last flush.
    pub fn unflushed_bytes(&self) -> usize {
        self.unflushed_bytes
    }

    /// Returns the memory of the buffer of connection `id`.
    pub fn capacity_of(&self, id: usize) -> usize {
        self.boxes.get(id).map_or(0, |outbox| outbox.bytes.capacity())
    }

    pub fn take_dirty(&mut self) -> Vec<usize> {
        self.unflushed_bytes = 0;
        let dirty = std::mem::take(&mut self.dirty);
        for id in &dirty {
            self.boxes[*id].dirty = false;
        }
        dirty
    }

    /// Takes back the list of `take_dirty`, to reuse its memory.
    pub fn recycle(&mut self, mut list: Vec<usize>) {
        if self.dirty.is_empty() {
            list.clear();
            self.dirty = list;
        }
    }

    /// Appends to the buffer of connection `id` with `write` and updates the counters.
    fn append(&mut self, id: usize, write: impl FnOnce(&mut Vec<u8>)) {
        let outbox = &mut self.boxes[id];
        if !outbox.dirty {
            outbox.dirty = true;
            self.dirty.push(id);
        }
        let (len, capacity) = (outbox.bytes.len(), outbox.bytes.capacity());
        write(&mut outbox.bytes);
        self.unflushed_bytes += outbox.bytes.len() - len;
        self.total += outbox.bytes.capacity() - capacity;
    }

    /// Appends bytes without a frame: replies to four-letter commands.
    pub fn unframed(&mut self, id: usize, bytes: &[u8]) {
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

    /// Appends a reply of at most `limit` bytes. `body` reserves space before it writes; if it
    /// fails, its error becomes the reply.
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

    pub fn error_reply(&mut self, id: usize, xid: i32, zxid: i64, code: Code) {
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
        // TLS buffers the bytes until it is flushed.
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
