//! A small blocking client of the wire protocol, independent of the keeper's own code, so that the
//! two cannot share a bug. It has one connection and no other state: no retries, no reconnects.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Time limit of one reply; the test fails after it.
pub(crate) const REPLY_DEADLINE: Duration = Duration::from_secs(20);

pub(crate) mod op {
    pub(crate) const CREATE: i32 = 1;
    pub(crate) const DELETE: i32 = 2;
    pub(crate) const EXISTS: i32 = 3;
    pub(crate) const GET_DATA: i32 = 4;
    pub(crate) const SET_DATA: i32 = 5;
    pub(crate) const GET_CHILDREN: i32 = 8;
    pub(crate) const SYNC: i32 = 9;
    pub(crate) const PING: i32 = 11;
    pub(crate) const CHECK: i32 = 13;
    pub(crate) const MULTI: i32 = 14;
    pub(crate) const CREATE2: i32 = 15;
    pub(crate) const MULTI_READ: i32 = 22;
    pub(crate) const AUTH: i32 = 100;
    pub(crate) const SET_WATCHES: i32 = 101;
    pub(crate) const ADD_WATCH: i32 = 106;
    pub(crate) const CLOSE: i32 = -11;
}

/// The protocol's flags of a created node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Create {
    Persistent = 0,
    Ephemeral = 1,
    Sequential = 2,
    EphemeralSequential = 3,
}

/// Writes jute.
#[derive(Clone, Debug, Default)]
pub(crate) struct Put(pub(crate) Vec<u8>);

impl Put {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn bool(mut self, value: bool) -> Self {
        self.0.push(u8::from(value));
        self
    }

    pub(crate) fn int(mut self, value: i32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(crate) fn long(mut self, value: i64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Writes a buffer or a string, which have the same encoding.
    pub(crate) fn bytes(mut self, value: impl AsRef<[u8]>) -> Self {
        let value = value.as_ref();
        self = self.int(i32::try_from(value.len()).expect("a short buffer"));
        self.0.extend(value);
        self
    }

    pub(crate) fn raw(mut self, value: &[u8]) -> Self {
        self.0.extend(value);
        self
    }

    /// Writes an ACL that grants everything to everyone.
    pub(crate) fn open_acl(self) -> Self {
        self.int(1).int(31).bytes("world").bytes("anyone")
    }

    /// Returns the bytes with their length before them.
    pub(crate) fn framed(self) -> Vec<u8> {
        Self::new().bytes(self.0).0
    }
}

/// Reads jute; panics if the input is too short, because the server's reply is then wrong.
#[derive(Clone, Debug)]
pub(crate) struct Take<'a>(pub(crate) &'a [u8]);

impl<'a> Take<'a> {
    pub(crate) fn raw(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    pub(crate) fn int(&mut self) -> i32 {
        i32::from_be_bytes(self.raw(4).try_into().expect("four bytes"))
    }

    pub(crate) fn long(&mut self) -> i64 {
        i64::from_be_bytes(self.raw(8).try_into().expect("eight bytes"))
    }

    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let length = self.int();
        self.raw(usize::try_from(length.max(0)).expect("not negative"))
    }

    pub(crate) fn string(&mut self) -> String {
        String::from_utf8(self.bytes().to_vec()).expect("UTF-8")
    }

    pub(crate) fn stat(&mut self) -> Stat {
        let (czxid, mzxid) = (self.long(), self.long());
        let _times = (self.long(), self.long());
        let (version, cversion, aversion) = (self.int(), self.int(), self.int());
        let ephemeral_owner = self.long();
        let (data_length, num_children) = (self.int(), self.int());
        let pzxid = self.long();
        Stat { czxid, mzxid, version, cversion, aversion, ephemeral_owner, data_length, num_children, pzxid }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) czxid: i64,
    pub(crate) mzxid: i64,
    pub(crate) version: i32,
    pub(crate) cversion: i32,
    pub(crate) aversion: i32,
    pub(crate) ephemeral_owner: i64,
    pub(crate) data_length: i32,
    pub(crate) num_children: i32,
    pub(crate) pzxid: i64,
}

/// A reply (or an event, with xid -1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) xid: i32,
    pub(crate) zxid: i64,
    pub(crate) err: i32,
    pub(crate) body: Vec<u8>,
}

/// The server's reply to a connect request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) id: i64,
    pub(crate) password: Vec<u8>,
    pub(crate) timeout_ms: i32,
    /// 37 with the read-only byte, 36 without.
    pub(crate) answer_length: usize,
}

/// A connect request, in which every field can be set to a wrong value.
#[derive(Clone, Debug)]
pub(crate) struct Hello {
    pub(crate) last_zxid: i64,
    pub(crate) timeout_ms: i32,
    pub(crate) session: i64,
    pub(crate) password: Vec<u8>,
    pub(crate) read_only_byte: bool,
}

impl Default for Hello {
    fn default() -> Self {
        Self { last_zxid: 0, timeout_ms: 10_000, session: 0, password: vec![0; 16], read_only_byte: true }
    }
}

impl Hello {
    pub(crate) fn again(session: &Session) -> Self {
        Self { session: session.id, password: session.password.clone(), ..Self::default() }
    }

    pub(crate) fn frame(&self) -> Vec<u8> {
        let put = Put::new()
            .int(0)
            .long(self.last_zxid)
            .int(self.timeout_ms)
            .long(self.session)
            .bytes(&self.password);
        if self.read_only_byte { put.bool(false).framed() } else { put.framed() }
    }
}

/// Why there is no reply.
#[derive(Debug)]
pub(crate) enum Lost {
    /// The server closed the connection or is not running.
    Closed,
    /// The time limit passed.
    Silent,
}

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    pub(crate) session: Session,
    /// The last used xid.
    pub(crate) xid: i32,
}

impl Client {
    /// Connects with a new session.
    pub(crate) fn connect(addr: SocketAddr) -> Self {
        Self::try_connect(addr, &Hello::default()).expect("a session")
    }

    pub(crate) fn try_connect(addr: SocketAddr, hello: &Hello) -> Result<Self, Lost> {
        let mut stream = dial(addr)?;
        send(&mut stream, &hello.frame())?;
        let session = read_session(&mut stream)?;
        Ok(Self { stream, session, xid: 0 })
    }

    /// Sends a request and returns its xid; `receive` returns the reply.
    pub(crate) fn send(&mut self, op: i32, body: &Put) -> Result<i32, Lost> {
        self.xid += 1;
        self.send_as(self.xid, op, body)
    }

    pub(crate) fn send_as(&mut self, xid: i32, op: i32, body: &Put) -> Result<i32, Lost> {
        send(&mut self.stream, &Put::new().int(xid).int(op).raw(&body.0).framed())?;
        Ok(xid)
    }

    pub(crate) fn receive(&mut self) -> Result<Reply, Lost> {
        let frame = read_frame(&mut self.stream)?;
        let mut take = Take(&frame);
        let (xid, zxid, err) = (take.int(), take.long(), take.int());
        Ok(Reply { xid, zxid, err, body: take.0.to_vec() })
    }

    /// Sends a request and returns its reply, which must be the next message.
    pub(crate) fn try_call(&mut self, op: i32, body: &Put) -> Result<Reply, Lost> {
        let xid = self.send(op, body)?;
        let reply = self.receive()?;
        assert_eq!(reply.xid, xid, "a reply to another request");
        Ok(reply)
    }

    pub(crate) fn call(&mut self, op: i32, body: &Put) -> Reply {
        self.try_call(op, body).expect("a reply")
    }

    /// Creates a node and returns its name. Panics if the server refuses.
    pub(crate) fn create(&mut self, path: &str, data: &[u8], create: Create) -> String {
        let reply = self.call(op::CREATE, &create_body(path, data, create));
        assert_eq!(reply.err, 0, "create {path}");
        Take(&reply.body).string()
    }

    pub(crate) fn get(&mut self, path: &str) -> Result<(Vec<u8>, Stat), i32> {
        let reply = self.call(op::GET_DATA, &Put::new().bytes(path).bool(false));
        if reply.err != 0 {
            return Err(reply.err);
        }
        let mut take = Take(&reply.body);
        Ok((take.bytes().to_vec(), take.stat()))
    }

    /// Writes if the node still has this version (-1 for any).
    pub(crate) fn set_if_version(&mut self, path: &str, data: &[u8], version: i32) -> Result<Stat, i32> {
        let reply = self.call(op::SET_DATA, &set_body(path, data, version));
        if reply.err != 0 { Err(reply.err) } else { Ok(Take(&reply.body).stat()) }
    }

    /// Closes the session, which deletes its ephemeral nodes.
    pub(crate) fn close(mut self) {
        assert_eq!(self.call(op::CLOSE, &Put::new()).err, 0, "close");
    }
}

pub(crate) fn create_body(path: &str, data: &[u8], create: Create) -> Put {
    Put::new().bytes(path).bytes(data).open_acl().int(create as i32)
}

pub(crate) fn set_body(path: &str, data: &[u8], version: i32) -> Put {
    Put::new().bytes(path).bytes(data).int(version)
}

pub(crate) fn dial(addr: SocketAddr) -> Result<TcpStream, Lost> {
    let stream = TcpStream::connect_timeout(&addr, REPLY_DEADLINE).map_err(|_| Lost::Closed)?;
    stream.set_nodelay(true).map_err(|_| Lost::Closed)?;
    stream.set_read_timeout(Some(REPLY_DEADLINE)).map_err(|_| Lost::Closed)?;
    stream.set_write_timeout(Some(REPLY_DEADLINE)).map_err(|_| Lost::Closed)?;
    Ok(stream)
}

pub(crate) fn send(stream: &mut TcpStream, bytes: &[u8]) -> Result<(), Lost> {
    stream.write_all(bytes).map_err(|error| lost(&error))
}

pub(crate) fn read_frame(stream: &mut TcpStream) -> Result<Vec<u8>, Lost> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).map_err(|error| lost(&error))?;
    let length = usize::try_from(i32::from_be_bytes(length)).expect("a length that is not negative");
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).map_err(|error| lost(&error))?;
    Ok(frame)
}

pub(crate) fn read_session(stream: &mut TcpStream) -> Result<Session, Lost> {
    let frame = read_frame(stream)?;
    let mut take = Take(&frame);
    assert_eq!(take.int(), 0, "protocol version");
    let (timeout_ms, id) = (take.int(), take.long());
    Ok(Session { id, timeout_ms, password: take.bytes().to_vec(), answer_length: frame.len() })
}

/// Returns whether the server closes the connection within the time limit of a reply.
pub(crate) fn closed(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    match stream.read(&mut byte) {
        Ok(count) => count == 0,
        Err(error) => matches!(lost(&error), Lost::Closed),
    }
}

fn lost(error: &std::io::Error) -> Lost {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Lost::Silent,
        _ => Lost::Closed,
    }
}
