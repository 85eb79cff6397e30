//! What reads find, and the bodies of replies. Looks at the state and writes bytes; changes nothing.

use super::acl;
use super::jute::Put as _;
use super::proto::{Code, Op, Read, encode_acl, op};
use super::state::{Caller, OpResult, State};
use super::tree::Node;

/// What a read found.
#[derive(Debug)]
pub enum Found<'a> {
    Stat(&'a Node),
    Data(&'a Node),
    Children { node: &'a Node, wants_stat: bool },
    Acl { node: &'a Node, hashes: bool },
    Paths(Vec<&'a str>),
    Count(usize),
}

pub fn lookup<'a>(state: &'a State, caller: Caller<'_>, read: Read<'_>) -> Result<Found<'a>, Code> {
    let node = |path: &str, perm| {
        let node = state.tree.get(path).ok_or(Code::NoNode)?;
        if acl::allows(&node.acl, perm, caller.proved) { Ok(node) } else { Err(Code::NoAuth) }
    };
    Ok(match read {
        // As in ZooKeeper, everybody may ask whether a node exists.
        Read::Exists { path, .. } => Found::Stat(state.tree.get(path).ok_or(Code::NoNode)?),
        Read::Data { path, .. } => Found::Data(node(path, acl::READ)?),
        Read::Children { path, wants_stat, .. } => {
            Found::Children { node: node(path, acl::READ)?, wants_stat }
        }
        Read::Acl { path } => {
            let node = node(path, acl::READ | acl::ADMIN)?;
            Found::Acl { node, hashes: acl::allows(&node.acl, acl::ADMIN, caller.proved) }
        }
        Read::Ephemerals { prefix } => {
            let paths = state.tree.ephemerals_of(caller.session);
            Found::Paths(paths.filter(|path| path.starts_with(prefix)).collect())
        }
        Read::AllChildrenNumber { path } => {
            node(path, acl::READ)?;
            Found::Count(state.tree.count_below(path))
        }
    })
}

pub fn put_found(found: &Found<'_>, out: &mut Vec<u8>) {
    match found {
        Found::Stat(node) => node.stat().encode(out),
        Found::Data(node) => {
            out.put_optional_buffer(node.data.as_deref());
            node.stat().encode(out);
        }
        Found::Children { node, wants_stat } => {
            out.put_len(node.child_count());
            node.children().for_each(|child| out.put_string(child));
            if *wants_stat {
                node.stat().encode(out);
            }
        }
        Found::Acl { node, hashes } => {
            if *hashes {
                encode_acl(&node.acl, out);
            } else {
                encode_acl(&acl::without_hashes(&node.acl), out);
            }
            node.stat().encode(out);
        }
        Found::Paths(paths) => {
            out.put_len(paths.len());
            paths.iter().for_each(|path| out.put_string(path));
        }
        Found::Count(count) => out.put_len(*count),
    }
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
