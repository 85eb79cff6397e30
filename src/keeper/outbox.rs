//! Bytes on their way to clients. Replies and events are appended while requests are handled, and leave only after the
//! log is durable: the server flushes, nobody else.

use std::io::{ErrorKind, Write};

use super::jute::Put as _;
use super::proto::Code;
use super::watch::EventKind;

/// Kept by an idle connection; more is given back.
const KEPT_BYTES: usize = 16 << 10;

/// The xids that are no request's.
const EVENT_XID: i32 = -1;

#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    dirty: bool,
}

/// One outbox a connection, by its number.
#[derive(Debug, Default)]
pub struct Outboxes {
    boxes: Vec<Outbox>,
    dirty: Vec<usize>,
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
        self.boxes[id] = Outbox { dirty, ..Outbox::default() };
    }

    pub fn clear(&mut self, id: usize) {
        self.open(id);
    }

    /// Bytes that the client has not taken yet.
    pub fn waiting(&self, id: usize) -> usize {
        self.boxes[id].bytes.len() - self.boxes[id].sent
    }

    pub fn take_dirty(&mut self) -> Vec<usize> {
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

    fn touch(&mut self, id: usize) -> &mut Vec<u8> {
        let outbox = &mut self.boxes[id];
        if !outbox.dirty {
            outbox.dirty = true;
            self.dirty.push(id);
        }
        &mut outbox.bytes
    }

    /// Bytes without a frame around them: four-letter words.
    pub fn raw(&mut self, id: usize, bytes: &[u8]) {
        self.touch(id).extend_from_slice(bytes);
    }

    pub fn frame(&mut self, id: usize, body: impl FnOnce(&mut Vec<u8>)) {
        self.frames += 1;
        let bytes = self.touch(id);
        let start = bytes.len();
        bytes.put_i32(0);
        body(bytes);
        let len = (bytes.len() - start - 4) as u32;
        bytes[start..start + 4].copy_from_slice(&len.to_be_bytes());
    }

    pub fn reply(&mut self, id: usize, xid: i32, zxid: i64, body: impl FnOnce(&mut Vec<u8>)) {
        self.frame(id, |out| {
            put_header(out, xid, zxid, Code::Ok);
            body(out);
        });
    }

    pub fn refusal(&mut self, id: usize, xid: i32, zxid: i64, code: Code) {
        self.frame(id, |out| put_header(out, xid, zxid, code));
    }

    pub fn event(&mut self, id: usize, kind: EventKind, path: &str) {
        const SYNC_CONNECTED: i32 = 3;
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
                Err(err) if err.kind() == ErrorKind::WouldBlock => return Flushed::Blocked,
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
