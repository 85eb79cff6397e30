//! ZooKeeper's wire types: operation and error numbers, decoding of requests, encoding of stats and
//! access lists. Executing requests belongs in `state.rs` and `requests.rs`. Pure.

use super::acl::{Acl, Identity};
use super::jute::{DecodeError, Put, Reader};

/// The ZooKeeper error codes that this server sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    RuntimeInconsistency = -2,
    Marshalling = -5,
    Unimplemented = -6,
    BadArguments = -8,
    NoNode = -101,
    NoAuth = -102,
    BadVersion = -103,
    NoChildrenForEphemerals = -108,
    NodeExists = -110,
    NotEmpty = -111,
    SessionExpired = -112,
    InvalidAcl = -114,
    AuthFailed = -115,
    NoWatcher = -121,
    QuotaExceeded = -125,
}

impl Code {
    pub fn number(self) -> i32 {
        self as i32
    }
}

impl From<DecodeError> for Code {
    fn from(_: DecodeError) -> Self {
        Code::Marshalling
    }
}

pub mod op {
    pub const ERROR: i32 = -1;
    pub const CLOSE_SESSION: i32 = -11;
    pub const CREATE: i32 = 1;
    pub const DELETE: i32 = 2;
    pub const EXISTS: i32 = 3;
    pub const GET_DATA: i32 = 4;
    pub const SET_DATA: i32 = 5;
    pub const GET_ACL: i32 = 6;
    pub const SET_ACL: i32 = 7;
    pub const GET_CHILDREN: i32 = 8;
    pub const SYNC: i32 = 9;
    pub const PING: i32 = 11;
    pub const GET_CHILDREN2: i32 = 12;
    pub const CHECK: i32 = 13;
    pub const MULTI: i32 = 14;
    pub const CREATE2: i32 = 15;
    pub const CHECK_WATCHES: i32 = 17;
    pub const REMOVE_WATCHES: i32 = 18;
    pub const CREATE_CONTAINER: i32 = 19;
    pub const CREATE_TTL: i32 = 21;
    pub const MULTI_READ: i32 = 22;
    pub const AUTH: i32 = 100;
    pub const SET_WATCHES: i32 = 101;
    pub const GET_EPHEMERALS: i32 = 103;
    pub const GET_ALL_CHILDREN_NUMBER: i32 = 104;
    pub const SET_WATCHES2: i32 = 105;
    pub const ADD_WATCH: i32 = 106;
    pub const WHO_AM_I: i32 = 107;
}

/// A znode's stat, in wire order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stat {
    pub czxid: i64,
    pub mzxid: i64,
    pub ctime: i64,
    pub mtime: i64,
    pub version: i32,
    pub cversion: i32,
    pub aversion: i32,
    pub ephemeral_owner: i64,
    pub data_length: i32,
    pub num_children: i32,
    pub pzxid: i64,
}

/// The encoded size of a stat.
pub const STAT_BYTES: usize = 68;

impl Stat {
    pub fn encode(&self, out: &mut impl Put) {
        out.put_i64(self.czxid);
        out.put_i64(self.mzxid);
        out.put_i64(self.ctime);
        out.put_i64(self.mtime);
        out.put_i32(self.version);
        out.put_i32(self.cversion);
        out.put_i32(self.aversion);
        out.put_i64(self.ephemeral_owner);
        out.put_i32(self.data_length);
        out.put_i32(self.num_children);
        out.put_i64(self.pzxid);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateMode {
    Persistent,
    Ephemeral,
    Container,
    Ttl(i64),
}

/// One write operation, alone or in a multi.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op<'a> {
    Create {
        path: &'a str,
        data: Option<&'a [u8]>,
        acl: Vec<Acl>,
        mode: CreateMode,
        sequential: bool,
        wants_stat: bool,
    },
    Delete {
        path: &'a str,
        version: i32,
    },
    SetData {
        path: &'a str,
        data: Option<&'a [u8]>,
        version: i32,
    },
    SetAcl {
        path: &'a str,
        acl: Vec<Acl>,
        version: i32,
    },
    Check {
        path: &'a str,
        version: i32,
    },
}

impl<'a> Op<'a> {
    pub fn path(&self) -> &'a str {
        match self {
            Op::Create { path, .. }
            | Op::Delete { path, .. }
            | Op::SetData { path, .. }
            | Op::SetAcl { path, .. }
            | Op::Check { path, .. } => path,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read<'a> {
    Exists { path: &'a str, watch: bool },
    Data { path: &'a str, watch: bool },
    Children { path: &'a str, watch: bool, wants_stat: bool },
    Acl { path: &'a str },
    Ephemerals { prefix: &'a str },
    AllChildrenNumber { path: &'a str },
}

impl<'a> Read<'a> {
    pub fn path(&self) -> &'a str {
        match self {
            Read::Exists { path, .. }
            | Read::Data { path, .. }
            | Read::Children { path, .. }
            | Read::Acl { path }
            | Read::Ephemerals { prefix: path }
            | Read::AllChildrenNumber { path } => path,
        }
    }
}

/// Selects watches of a connection on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatcherKind {
    Children,
    Data,
    Any,
}

/// The watches that a client had before it reconnected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PreviousWatches<'a> {
    pub seen_zxid: i64,
    pub data: Vec<&'a str>,
    pub exist: Vec<&'a str>,
    pub child: Vec<&'a str>,
    pub persistent: Vec<&'a str>,
    pub recursive: Vec<&'a str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    Write(Op<'a>),
    Multi(Vec<Op<'a>>),
    Read(Read<'a>),
    MultiRead(Vec<Read<'a>>),
    Sync { path: &'a str },
    Ping,
    CloseSession,
    Auth { scheme: &'a str, auth: &'a [u8] },
    SetWatches(PreviousWatches<'a>),
    AddWatch { path: &'a str, recursive: bool },
    RemoveWatches { path: &'a str, kind: WatcherKind },
    CheckWatches { path: &'a str, kind: WatcherKind },
    WhoAmI,
}

/// The first frame of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect<'a> {
    pub seen_zxid: i64,
    pub timeout_ms: i32,
    pub session: i64,
    pub password: &'a [u8],
    /// Whether the client sent the read-only byte. Old clients do not, and must not receive one.
    pub has_read_only: bool,
}

pub fn decode_connect(frame: &[u8]) -> Result<Connect<'_>, DecodeError> {
    let mut r = Reader::new(frame);
    let _protocol_version = r.i32()?;
    let seen_zxid = r.i64()?;
    let timeout_ms = r.i32()?;
    let session = r.i64()?;
    let password = r.buffer()?.unwrap_or(&[]);
    Ok(Connect { seen_zxid, timeout_ms, session, password, has_read_only: r.remaining() > 0 })
}

pub fn decode(opcode: i32, body: &[u8]) -> Result<Request<'_>, Code> {
    let r = &mut Reader::new(body);
    Ok(match opcode {
        op::CREATE
        | op::CREATE2
        | op::CREATE_CONTAINER
        | op::CREATE_TTL
        | op::DELETE
        | op::SET_DATA
        | op::SET_ACL
        | op::CHECK => Request::Write(decode_op(opcode, r)?),
        op::MULTI => Request::Multi(decode_multi(r, |opcode, r| match opcode {
            // ZooKeeper has no setACL inside a multi.
            op::SET_ACL => Err(Code::Marshalling),
            _ => decode_op(opcode, r).map(as_in_multi),
        })?),
        op::MULTI_READ => Request::MultiRead(decode_multi(r, |opcode, r| match opcode {
            op::GET_DATA | op::GET_CHILDREN => decode_read(opcode, r),
            _ => Err(Code::Marshalling),
        })?),
        op::EXISTS
        | op::GET_DATA
        | op::GET_CHILDREN
        | op::GET_CHILDREN2
        | op::GET_ACL
        | op::GET_EPHEMERALS
        | op::GET_ALL_CHILDREN_NUMBER => Request::Read(decode_read(opcode, r)?),
        op::SYNC => Request::Sync { path: r.string()? },
        op::PING => Request::Ping,
        op::CLOSE_SESSION => Request::CloseSession,
        op::AUTH => {
            let _kind = r.i32()?;
            Request::Auth { scheme: r.string()?, auth: r.buffer()?.unwrap_or(&[]) }
        }
        op::SET_WATCHES | op::SET_WATCHES2 => Request::SetWatches(decode_previous_watches(opcode, r)?),
        op::ADD_WATCH => {
            let path = r.string()?;
            let recursive = match r.i32()? {
                0 => false,
                1 => true,
                _ => return Err(Code::Marshalling),
            };
            Request::AddWatch { path, recursive }
        }
        op::REMOVE_WATCHES => Request::RemoveWatches { path: r.string()?, kind: decode_kind(r)? },
        op::CHECK_WATCHES => Request::CheckWatches { path: r.string()?, kind: decode_kind(r)? },
        op::WHO_AM_I => Request::WhoAmI,
        _ => return Err(Code::Unimplemented),
    })
}

fn decode_op<'a>(opcode: i32, r: &mut Reader<'a>) -> Result<Op<'a>, Code> {
    Ok(match opcode {
        op::CREATE | op::CREATE2 | op::CREATE_CONTAINER | op::CREATE_TTL => decode_create(opcode, r)?,
        op::DELETE => Op::Delete { path: r.string()?, version: r.i32()? },
        op::SET_DATA => Op::SetData { path: r.string()?, data: r.buffer()?, version: r.i32()? },
        op::SET_ACL => Op::SetAcl { path: r.string()?, acl: decode_acl(r)?, version: r.i32()? },
        op::CHECK => Op::Check { path: r.string()?, version: r.i32()? },
        _ => return Err(Code::Marshalling),
    })
}

/// Sets `wants_stat` as in ZooKeeper: inside a multi the kind of node decides, not the operation.
/// Containers and TTL nodes are answered with a stat, all others with the path alone.
fn as_in_multi(op: Op<'_>) -> Op<'_> {
    match op {
        Op::Create { path, data, acl, mode, sequential, wants_stat: _ } => {
            let wants_stat = matches!(mode, CreateMode::Container | CreateMode::Ttl(_));
            Op::Create { path, data, acl, mode, sequential, wants_stat }
        }
        other => other,
    }
}

fn decode_create<'a>(opcode: i32, r: &mut Reader<'a>) -> Result<Op<'a>, Code> {
    let (path, data, acl, flags) = (r.string()?, r.buffer()?, decode_acl(r)?, r.i32()?);
    let (mode, sequential) = match (opcode, flags) {
        (op::CREATE_TTL, 5 | 6) => (CreateMode::Ttl(r.i64()?), flags == 6),
        (op::CREATE_TTL, _) | (_, 5 | 6) => return Err(Code::BadArguments),
        (_, 0 | 2) => (CreateMode::Persistent, flags == 2),
        (_, 1 | 3) => (CreateMode::Ephemeral, flags == 3),
        (_, 4) => (CreateMode::Container, false),
        _ => return Err(Code::BadArguments),
    };
    Ok(Op::Create { path, data, acl, mode, sequential, wants_stat: opcode != op::CREATE })
}

fn decode_read<'a>(opcode: i32, r: &mut Reader<'a>) -> Result<Read<'a>, Code> {
    let path = r.string()?;
    Ok(match opcode {
        op::EXISTS => Read::Exists { path, watch: r.bool()? },
        op::GET_DATA => Read::Data { path, watch: r.bool()? },
        op::GET_CHILDREN => Read::Children { path, watch: r.bool()?, wants_stat: false },
        op::GET_CHILDREN2 => Read::Children { path, watch: r.bool()?, wants_stat: true },
        op::GET_ACL => Read::Acl { path },
        op::GET_EPHEMERALS => Read::Ephemerals { prefix: path },
        op::GET_ALL_CHILDREN_NUMBER => Read::AllChildrenNumber { path },
        _ => return Err(Code::Marshalling),
    })
}

/// Decodes headers and bodies up to the header that is marked as the last.
fn decode_multi<'a, T>(
    r: &mut Reader<'a>,
    mut item: impl FnMut(i32, &mut Reader<'a>) -> Result<T, Code>,
) -> Result<Vec<T>, Code> {
    let mut items = Vec::new();
    loop {
        let (opcode, done, _err) = (r.i32()?, r.bool()?, r.i32()?);
        if done {
            return Ok(items);
        }
        items.push(item(opcode, r)?);
    }
}

fn decode_previous_watches<'a>(opcode: i32, r: &mut Reader<'a>) -> Result<PreviousWatches<'a>, DecodeError> {
    let mut previous = PreviousWatches {
        seen_zxid: r.i64()?,
        data: r.strings()?,
        exist: r.strings()?,
        child: r.strings()?,
        ..PreviousWatches::default()
    };
    if opcode == op::SET_WATCHES2 {
        previous.persistent = r.strings()?;
        previous.recursive = r.strings()?;
    }
    Ok(previous)
}

fn decode_kind(r: &mut Reader<'_>) -> Result<WatcherKind, Code> {
    match r.i32()? {
        1 => Ok(WatcherKind::Children),
        2 => Ok(WatcherKind::Data),
        3 => Ok(WatcherKind::Any),
        _ => Err(Code::BadArguments),
    }
}

pub fn decode_acl(r: &mut Reader<'_>) -> Result<Vec<Acl>, DecodeError> {
    r.vector(12, |r| {
        let (perms, scheme) = (r.i32()?, r.string()?);
        // kazoo sends a null id with the scheme `auth`, which needs no id.
        let id = match r.string() {
            Err(DecodeError::Null) => "",
            id => id?,
        };
        Ok(Acl { perms, identity: Identity::new(scheme, id) })
    })
}

pub fn encode_acl(list: &[Acl], out: &mut impl Put) {
    out.put_len(list.len());
    for acl in list {
        out.put_i32(acl.perms);
        out.put_string(&acl.identity.scheme);
        out.put_string(&acl.identity.id);
    }
}
