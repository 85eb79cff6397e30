//! Executes reads and encodes the bodies of replies. Must not modify the state.

use super::acl;
use super::jute::Put as _;
use super::outbox::Body;
use super::proto::{Code, Op, Read, STAT_BYTES, encode_acl, op};
use super::state::{Caller, OpResult, State};
use super::tree::Node;

/// The result of a read.
#[derive(Debug)]
pub enum ReadResult<'a> {
    Stat(&'a Node),
    Data(&'a Node),
    Children { node: &'a Node, wants_stat: bool },
    Acl { node: &'a Node, hashes: bool },
    Paths(Vec<&'a str>),
    Count(usize),
}

pub fn lookup<'a>(state: &'a State, caller: Caller<'_>, read: Read<'_>) -> Result<ReadResult<'a>, Code> {
    let node = |path: &str, perm| {
        let node = state.tree.get(path).ok_or(Code::NoNode)?;
        if acl::allows(&node.acl, perm, caller.proved) { Ok(node) } else { Err(Code::NoAuth) }
    };
    Ok(match read {
        // As in ZooKeeper, `exists` needs no right.
        Read::Exists { path, .. } => ReadResult::Stat(state.tree.get(path).ok_or(Code::NoNode)?),
        Read::Data { path, .. } => ReadResult::Data(node(path, acl::READ)?),
        Read::Children { path, wants_stat, .. } => {
            ReadResult::Children { node: node(path, acl::READ)?, wants_stat }
        }
        Read::Acl { path } => {
            let node = node(path, acl::READ | acl::ADMIN)?;
            ReadResult::Acl { node, hashes: acl::allows(&node.acl, acl::ADMIN, caller.proved) }
        }
        Read::Ephemerals { prefix } => {
            let paths = state.tree.ephemerals_of(caller.session);
            ReadResult::Paths(paths.filter(|path| path.starts_with(prefix)).collect())
        }
        Read::AllChildrenNumber { path } => {
            node(path, acl::READ)?;
            ReadResult::Count(state.tree.count_below(path))
        }
    })
}

/// Encodes the result of a read. The size of each part is checked before it is encoded: a reply
/// that does not fit into a frame is an error, and never takes more memory than a frame.
pub fn put_read_result(found: &ReadResult<'_>, body: &mut Body<'_>) -> Result<(), Code> {
    match found {
        ReadResult::Stat(node) => node.stat().encode(body.reserve(STAT_BYTES)?),
        ReadResult::Data(node) => {
            let data = node.data.as_deref();
            let out = body.reserve(4 + data.map_or(0, <[u8]>::len) + STAT_BYTES)?;
            out.put_optional_buffer(data);
            node.stat().encode(out);
        }
        ReadResult::Children { node, wants_stat } => {
            put_strings(node.children(), body)?;
            if *wants_stat {
                node.stat().encode(body.reserve(STAT_BYTES)?);
            }
        }
        ReadResult::Acl { node, hashes } => {
            let bytes: usize =
                node.acl.iter().map(|acl| 12 + acl.identity.scheme.len() + acl.identity.id.len()).sum();
            let out = body.reserve(4 + bytes + STAT_BYTES)?;
            if *hashes {
                encode_acl(&node.acl, out);
            } else {
                encode_acl(&acl::without_hashes(&node.acl), out);
            }
            node.stat().encode(out);
        }
        ReadResult::Paths(paths) => put_strings(paths.iter().copied(), body)?,
        ReadResult::Count(count) => body.reserve(4)?.put_len(*count),
    }
    Ok(())
}

fn put_strings<'a>(strings: impl ExactSizeIterator<Item = &'a str>, body: &mut Body<'_>) -> Result<(), Code> {
    body.reserve(4 + 4 * strings.len())?.put_len(strings.len());
    for string in strings {
        body.reserve(4 + string.len())?.put_string(string);
    }
    Ok(())
}

/// Bytes of the header of each result of a multi, and of the header that marks the end.
pub const MULTI_HEADER_BYTES: usize = 9;

/// Returns whether the largest possible results of `ops` fit into a reply of `limit` bytes. Checked
/// before the operations are applied, because an applied write must not be answered with an error.
pub fn multi_fits(ops: &[Op<'_>], limit: usize) -> bool {
    /// The reply header and the header that marks the end.
    const AROUND: usize = 16 + MULTI_HEADER_BYTES;
    /// The number that a sequential node gets at the end of its name.
    const SEQUENCE_BYTES: usize = 10;
    let result = |op: &Op<'_>| match op {
        Op::Create { path, .. } => 4 + path.len() + SEQUENCE_BYTES + STAT_BYTES,
        Op::SetData { .. } | Op::SetAcl { .. } => STAT_BYTES,
        // The body of an error repeats its code.
        Op::Delete { .. } | Op::Check { .. } => 4,
    };
    ops.iter().map(|op| MULTI_HEADER_BYTES + result(op)).sum::<usize>() + AROUND <= limit
}

pub fn put_result(result: &OpResult, out: &mut Vec<u8>) {
    match result {
        OpResult::Created { path, stat, wants_stat } => {
            out.put_string(path);
            if *wants_stat {
                stat.encode(out);
            }
        }
        OpResult::Set(stat) => stat.encode(out),
        OpResult::Deleted | OpResult::Checked => {}
    }
}

pub fn result_type(op: &Op<'_>) -> i32 {
    match op {
        Op::Create { wants_stat: true, .. } => op::CREATE2,
        Op::Create { .. } => op::CREATE,
        Op::Delete { .. } => op::DELETE,
        Op::SetData { .. } => op::SET_DATA,
        Op::SetAcl { .. } => op::SET_ACL,
        Op::Check { .. } => op::CHECK,
    }
}

pub fn put_multi_header(out: &mut Vec<u8>, kind: i32, code: Code) {
    out.put_i32(kind);
    out.put_bool(false);
    out.put_i32(code.number());
}

pub fn put_multi_error(out: &mut Vec<u8>, code: Code) {
    put_multi_header(out, op::ERROR, code);
    out.put_i32(code.number());
}

pub fn put_multi_end(out: &mut Vec<u8>) {
    out.put_i32(op::ERROR);
    out.put_bool(true);
    out.put_i32(-1);
}
