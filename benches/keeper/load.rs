//! The client that loads both servers: one connection, a fixed number of requests in flight, and no
//! work except counting replies. It does not interpret the numbers.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::harness::wire::{Client, Create, Put, create_body, op, set_body};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Get,
    Set,
    Create,
}

impl Op {
    pub(crate) const ALL: [Op; 3] = [Op::Get, Op::Set, Op::Create];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Get => "get",
            Op::Set => "set",
            Op::Create => "create",
        }
    }
}

/// The kind of request, their number, and how many of them are in flight.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) op: Op,
    pub(crate) in_flight: usize,
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    /// An existing node; creates go below it.
    pub(crate) parent: String,
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) wall: Duration,
    /// The time from request to reply, for each request.
    pub(crate) times: Vec<Duration>,
}

/// Creates the parent with data of the right size.
pub(crate) fn prepare(addr: SocketAddr, load: &Load) {
    Client::connect(addr).create(&load.parent, &vec![b'x'; load.bytes], Create::Persistent);
}

pub(crate) fn run(addr: SocketAddr, load: &Load) -> Ran {
    let mut client = Client::connect(addr);
    let ran = drive(&mut client.stream, load);
    client.close();
    ran
}

/// Sends the load over a connection that has a session.
pub(crate) fn drive(stream: &mut (impl Read + Write), load: &Load) -> Ran {
    let data = vec![b'x'; load.bytes];
    let mut sent = Vec::with_capacity(load.count);
    let mut times = Vec::with_capacity(load.count);
    let mut replies = Replies { bytes: Vec::new(), buffer: vec![0; 1 << 18] };
    let start = Instant::now();
    while times.len() < load.count {
        let mut out = Vec::new();
        while sent.len() < load.count && sent.len() - times.len() < load.in_flight {
            request(&mut out, sent.len(), load, &data);
            sent.push(Instant::now());
        }
        stream.write_all(&out).expect("sent");
        stream.flush().expect("sent");
        for _ in 0..replies.receive(stream) {
            times.push(sent[times.len()].elapsed());
        }
    }
    Ran { wall: start.elapsed(), times }
}

fn request(out: &mut Vec<u8>, number: usize, load: &Load, data: &[u8]) {
    let xid = i32::try_from(number + 1).expect("a small number");
    let (code, body) = match load.op {
        Op::Get => (op::GET_DATA, Put::new().bytes(&load.parent).bool(false)),
        Op::Set => (op::SET_DATA, set_body(&load.parent, data, -1)),
        Op::Create => {
            (op::CREATE, create_body(&format!("{}/{number}", load.parent), data, Create::Persistent))
        }
    };
    out.extend(Put::new().int(xid).int(code).raw(&body.0).framed());
}

#[derive(Debug)]
struct Replies {
    bytes: Vec<u8>,
    buffer: Vec<u8>,
}

impl Replies {
    /// Waits for bytes and returns the number of replies that they complete. Panics on an error
    /// reply.
    fn receive(&mut self, stream: &mut impl Read) -> usize {
        let count = stream.read(&mut self.buffer).expect("a reply");
        assert!(count > 0, "the server hung up");
        self.bytes.extend_from_slice(&self.buffer[..count]);
        let (mut at, mut complete) = (0, 0);
        while let Some(head) = self.bytes[at..].first_chunk::<4>() {
            let length = usize::try_from(i32::from_be_bytes(*head)).expect("a length");
            let Some(frame) = self.bytes[at + 4..].get(..length) else { break };
            assert_eq!(frame[12..16], [0; 4], "an error reply");
            at += 4 + length;
            complete += 1;
        }
        self.bytes.drain(..at);
        complete
    }
}
