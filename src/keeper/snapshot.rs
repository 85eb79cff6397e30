//! Snapshots: the whole state in one file with one checksum. Snapshot N is the state before log
//! segment N. A snapshot is written under a temporary name, synced and renamed, so that a file with
//! its final name is complete.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::acl::Acl;
use super::jute::{DecodeError, Put, Reader};
use super::log::{StorageError, create_draft, io_error, sync_dir};
use super::proto::{Stat, decode_acl, encode_acl};
use super::session::Sessions;
use super::state::{State, TreeLimits};
use super::tree::{DataTree, Node};
use super::txn::Password;

const MAGIC: &[u8; 8] = b"PCSNAP\0\x01";
const CHUNK_BYTES: usize = 64 << 10;

pub(super) fn snapshot_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("snapshot.{number:010}"))
}

/// The temporary name of a snapshot.
pub(super) fn draft_path(dir: &Path) -> PathBuf {
    dir.join("snapshot.new")
}

/// Encodes in chunks, so that a large tree needs no second copy in memory.
struct Writer<'a> {
    file: File,
    path: &'a Path,
    chunk: Vec<u8>,
    crc: u32,
    written: u64,
}

impl Writer<'_> {
    fn spill(&mut self) -> Result<(), StorageError> {
        self.crc = crc32c::crc32c_append(self.crc, &self.chunk);
        self.file.write_all(&self.chunk).map_err(io_error("write", self.path))?;
        self.written += self.chunk.len() as u64;
        self.chunk.clear();
        Ok(())
    }
}

/// A snapshot that is written but not yet synced.
#[derive(Debug)]
pub struct Unsynced {
    file: File,
    dir: PathBuf,
    temp_path: PathBuf,
    number: u64,
    bytes: u64,
}

/// Writes the state, which takes about 20 ms for 100,000 nodes. The slow sync is in
/// `Unsynced::publish`, which can run on another thread.
pub fn write(dir: &Path, number: u64, state: &State) -> Result<Unsynced, StorageError> {
    let temp_path = draft_path(dir);
    let file = create_draft(&temp_path)?;
    let mut out =
        Writer { file, path: &temp_path, chunk: Vec::with_capacity(2 * CHUNK_BYTES), crc: 0, written: 0 };
    out.chunk.put_bytes(MAGIC);
    out.chunk.put_i64(number as i64);
    out.chunk.put_i64(state.zxid());
    out.chunk.put_len(state.sessions.len());
    for (id, session) in state.sessions.iter() {
        out.chunk.put_i64(id);
        out.chunk.put_i32(session.timeout_ms);
        out.chunk.put_bytes(&session.password);
    }
    out.chunk.put_len(state.tree.len());
    for (path, node) in state.tree.walk() {
        encode_node(&path, node, &mut out.chunk);
        if out.chunk.len() >= CHUNK_BYTES {
            out.spill()?;
        }
    }
    out.spill()?;
    let crc = out.crc;
    out.file.write_all(&crc.to_be_bytes()).map_err(io_error("write", &temp_path))?;
    let Writer { file, written: bytes, .. } = out;
    Ok(Unsynced { file, dir: dir.to_owned(), temp_path, number, bytes })
}

impl Unsynced {
    /// Returns the size of the snapshot.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn publish(self) -> Result<u64, StorageError> {
        self.file.sync_all().map_err(io_error("sync", &self.temp_path))?;
        let path = snapshot_path(&self.dir, self.number);
        std::fs::rename(&self.temp_path, &path).map_err(io_error("rename to", &path))?;
        sync_dir(&self.dir)?;
        Ok(self.number)
    }
}

fn encode_node(path: &str, node: &Node, out: &mut Vec<u8>) {
    out.put_string(path);
    out.put_optional_buffer(node.data.as_deref());
    encode_acl(&node.acl, out);
    out.put_i32(node.creates);
    Stat { ephemeral_owner: node.owner, ..node.stat() }.encode(out);
}

fn decode_node<'a>(
    r: &mut Reader<'a>,
    acls: &mut Option<Arc<Vec<Acl>>>,
) -> Result<(&'a str, Node), DecodeError> {
    let path = r.string()?;
    let data = r.buffer()?.map(Box::from);
    let acl = decode_acl(r)?;
    // Adjacent nodes mostly share a list; `DataTree::insert` deduplicates the others.
    let acl = match acls {
        Some(last) if **last == acl => last.clone(),
        _ => acls.insert(Arc::new(acl)).clone(),
    };
    let creates = r.i32()?;
    let stat = Stat {
        czxid: r.i64()?,
        mzxid: r.i64()?,
        ctime: r.i64()?,
        mtime: r.i64()?,
        version: r.i32()?,
        cversion: r.i32()?,
        aversion: r.i32()?,
        ephemeral_owner: r.i64()?,
        data_length: r.i32()?,
        num_children: r.i32()?,
        pzxid: r.i64()?,
    };
    Ok((path, Node::restored(&stat, creates, data, acl)))
}

/// Reads a snapshot. Sessions get a full timeout from `mono_ms` on.
pub fn load(path: &Path, number: u64, limits: TreeLimits, mono_ms: i64) -> Result<State, StorageError> {
    let bytes = std::fs::read(path).map_err(io_error("read", path))?;
    let damaged = |offset: usize, what: &str| StorageError::Damaged {
        path: path.to_owned(),
        offset: offset as u64,
        what: what.to_owned(),
    };
    let Some((body, crc)) = bytes.split_last_chunk::<4>() else {
        return Err(damaged(0, "too short"));
    };
    if crc32c::crc32c(body).to_be_bytes() != *crc {
        return Err(damaged(0, "bad checksum"));
    }
    let mut r = Reader::new(body);
    let state = decode_state(&mut r, number, limits, mono_ms);
    state.map_err(|err| damaged(body.len() - r.remaining(), &err.to_string()))
}

fn decode_state(
    r: &mut Reader<'_>,
    number: u64,
    limits: TreeLimits,
    mono_ms: i64,
) -> Result<State, DecodeError> {
    if r.take(MAGIC.len())? != MAGIC || r.i64()? != number as i64 {
        return Err(DecodeError::BadValue(0));
    }
    let zxid = r.i64()?;
    let mut sessions = Sessions::default();
    for (id, timeout_ms, password) in r.vector(28, |r| {
        let (id, timeout_ms) = (r.i64()?, r.i32()?);
        let password: Password = r.take(16)?.try_into().map_err(|_| DecodeError::Truncated)?;
        Ok((id, timeout_ms, password))
    })? {
        sessions.open(id, timeout_ms, password, mono_ms);
    }
    let mut tree = DataTree::empty();
    let mut acls = None;
    for _ in 0..r.i32()? {
        let (path, node) = decode_node(r, &mut acls)?;
        tree.insert(path, node);
    }
    Ok(State::restored(tree, sessions, zxid, limits))
}
