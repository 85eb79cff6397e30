//! The write-ahead log: numbered segments of frames. A frame holds all records of one `fdatasync`
//! under one checksum, so a power cut leaves at most one bad frame, at the end of the log, which
//! recovery cuts off. A bad frame before a good one is damage; it is reported with its offset and
//! never skipped.
//!
//! Segment: magic, number, salt, salt and end of the previous segment, crc. The next segment thus
//! detects the loss of whole frames at the end of the previous one. Frame: mark, payload length,
//! crc, payload. Mark and crc depend on the salt and the offset, so data that a client stored
//! cannot be mistaken for a frame. Unused space at the end is zeros.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::jute::{Put as _, Reader};
use super::txn::Txn;

const MAGIC: &[u8; 8] = b"PCLOG\0\0\x02";
const SEGMENT_HEADER_LEN: usize = 44;
/// The first version of the format, whose header does not describe the previous segment.
const OLD_MAGIC: &[u8; 8] = b"PCLOG\0\0\x01";
const OLD_SEGMENT_HEADER_LEN: usize = 28;
pub(super) const FRAME_HEADER_LEN: usize = 12;
/// Size of the zero-filled space ahead of the log. Overwriting allocated blocks syncs data only,
/// while each newly allocated block costs a commit of the file system's journal.
const RESERVE_BYTES: u64 = 1 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// Step of `reserve_ahead`: small, so that it uses most of a nearly full disk.
const AHEAD_STEP: usize = 4 << 10;
/// Size of the segment for a start on a full disk: enough for some thousand sessions.
const SPARE_BYTES: u64 = 256 << 10;
/// Mode of every file in the data directory. Stored data may be secret, whatever the mode of the
/// directory is.
pub(super) const FILE_MODE: u32 = 0o600;

/// An error while reading or writing the data directory.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error("cannot {doing} {}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is damaged at byte {offset}: {what}", path.display())]
    Damaged { path: PathBuf, offset: u64, what: String },
    #[error("{} is missing: part of the log is lost", path.display())]
    Missing { path: PathBuf },
    #[error("{} is in use by another keeper", path.display())]
    InUse { path: PathBuf },
}

pub(super) fn io_error<'a>(
    doing: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> StorageError + 'a {
    move |source| StorageError::Io { doing, path: path.to_owned(), source }
}

pub(super) fn segment_path(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("log.{number:010}"))
}

impl StorageError {
    /// Returns whether the system was out of open files or disk space, so that a later retry can
    /// succeed.
    pub(super) fn is_out_of_resources(&self) -> bool {
        let StorageError::Io { source, .. } = self else { return false };
        let short = [Errno::MFILE, Errno::NFILE, Errno::NOSPC, Errno::DQUOT];
        Errno::from_io_error(source).is_some_and(|errno| short.contains(&errno))
    }
}

impl StorageError {
    /// Returns whether a write failed because the disk is full. Unlike a failed sync, it can be
    /// repeated at the same offset.
    pub(super) fn is_full_disk(&self) -> bool {
        let StorageError::Io { doing: "write", source, .. } = self else { return false };
        Errno::from_io_error(source).is_some_and(|errno| [Errno::NOSPC, Errno::DQUOT].contains(&errno))
    }
}

/// A new segment under a temporary name. Recovery ignores it until it is published.
#[derive(Debug)]
pub struct NewSegment {
    file: File,
    temp_path: PathBuf,
    /// Opened before the rename: once the segment has its name, the directory must be synced.
    dir: File,
    path: PathBuf,
    salt: u64,
    /// The zero-filled bytes at the beginning of the file that the disk has allocated already.
    allocated: u64,
}

impl NewSegment {
    pub fn write(dir: &Path, number: u64, salt: u64, before: Option<Tail>) -> Result<Self, StorageError> {
        let file = create_draft(&draft_path(dir))?;
        NewSegment::write_to(file, 0, dir, &segment_header(number, salt, before), (number, salt))
    }

    /// As `write`, in the file of [`allocate_spare`], which is used up. It needs no free disk
    /// space.
    pub fn write_to_spare(
        dir: &Path,
        number: u64,
        salt: u64,
        before: Option<Tail>,
    ) -> Result<Self, StorageError> {
        let (spare, temp_path) = (spare_path(dir), draft_path(dir));
        std::fs::rename(&spare, &temp_path).map_err(io_error("rename", &spare))?;
        let file = OpenOptions::new().write(true).open(&temp_path).map_err(io_error("open", &temp_path))?;
        let allocated = file.metadata().map_err(io_error("read", &temp_path))?.len();
        NewSegment::write_to(file, allocated, dir, &segment_header(number, salt, before), (number, salt))
    }

    fn write_to(
        file: File,
        allocated: u64,
        dir: &Path,
        header: &[u8],
        (number, salt): (u64, u64),
    ) -> Result<Self, StorageError> {
        let temp_path = draft_path(dir);
        let handle = File::open(dir).map_err(io_error("open", dir))?;
        file.write_all_at(header, 0).map_err(io_error("write", &temp_path))?;
        file.sync_all().map_err(io_error("sync", &temp_path))?;
        Ok(NewSegment { file, temp_path, dir: handle, path: segment_path(dir, number), salt, allocated })
    }

    /// Renames the segment to its final name and syncs the directory.
    pub fn publish(self) -> Result<Segment, StorageError> {
        std::fs::rename(&self.temp_path, &self.path).map_err(io_error("rename to", &self.path))?;
        self.dir.sync_all().map_err(io_error("sync the directory of", &self.path))?;
        let mut segment = Segment {
            file: self.file,
            path: self.path,
            salt: self.salt,
            offset: SEGMENT_HEADER_LEN as u64,
            reserved: Some(self.allocated),
            pending: Vec::new(),
        };
        segment.start_frame();
        Ok(segment)
    }
}

/// Creates a file that is renamed when it is complete. The log writes on through the same file, and
/// a snapshot is synced in another thread, so `runtime::atomic_file` does not fit.
pub(super) fn create_draft(path: &Path) -> Result<File, StorageError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(FILE_MODE);
    options.open(path).map_err(io_error("create", path))
}

/// The name of a segment for the next start.
fn spare_path(dir: &Path) -> PathBuf {
    dir.join("log.spare")
}

/// Allocates a segment for a start on a full disk, unless there is one. Another process may use up
/// any disk space that is free for a moment, so the start needs a file that has its blocks already.
pub(super) fn allocate_spare(dir: &Path) -> Result<(), StorageError> {
    let path = spare_path(dir);
    if std::fs::metadata(&path).is_ok_and(|found| found.len() >= SPARE_BYTES) {
        return Ok(());
    }
    let file = create_draft(&path)?;
    let written = (0..SPARE_BYTES / ZEROS.len() as u64)
        .try_for_each(|step| file.write_all_at(&ZEROS, step * ZEROS.len() as u64))
        .and_then(|()| file.sync_all());
    if let Err(err) = written {
        // A partial segment would only take space from the log.
        file.set_len(0).map_err(io_error("cut", &path))?;
        return Err(io_error("write", &path)(err));
    }
    Ok(())
}

/// The temporary name of a new segment.
pub(super) fn draft_path(dir: &Path) -> PathBuf {
    dir.join("log.new")
}

/// Identity and end of a segment, as recorded in the header of the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    pub salt: u64,
    pub end: u64,
}

/// Recorded by the first segment, which has no predecessor. No segment ends at 0.
const NO_TAIL: Tail = Tail { salt: 0, end: 0 };

fn segment_header(number: u64, salt: u64, before: Option<Tail>) -> Vec<u8> {
    let before = before.unwrap_or(NO_TAIL);
    let mut header = Vec::with_capacity(SEGMENT_HEADER_LEN);
    header.put_bytes(MAGIC);
    header.put_bytes(&number.to_be_bytes());
    header.put_bytes(&salt.to_be_bytes());
    header.put_bytes(&before.salt.to_be_bytes());
    header.put_bytes(&before.end.to_be_bytes());
    header.put_bytes(&crc32c::crc32c(&header).to_be_bytes());
    header
}

/// The segment that is being written.
#[derive(Debug)]
pub struct Segment {
    file: File,
    path: PathBuf,
    salt: u64,
    offset: u64,
    /// End of the zero-filled space; `None` after the disk was too full to write zeros.
    reserved: Option<u64>,
    /// The next frame; its header is filled in by `commit`.
    pending: Vec<u8>,
}

impl Segment {
    fn start_frame(&mut self) {
        // Releases the memory of an unusually large frame.
        if self.pending.capacity() > 1 << 20 {
            self.pending = Vec::new();
        }
        self.pending.clear();
        self.pending.resize(FRAME_HEADER_LEN, 0);
    }

    pub fn append(&mut self, zxid: i64, now_ms: i64, txn: &Txn<'_>) {
        self.pending.put_i64(zxid);
        self.pending.put_i64(now_ms);
        txn.encode(&mut self.pending);
    }

    pub fn pending_bytes(&self) -> usize {
        self.pending.len() - FRAME_HEADER_LEN
    }

    /// Bytes written so far.
    pub fn written_bytes(&self) -> u64 {
        self.offset
    }

    /// Returns the end of the durable part.
    pub fn tail(&self) -> Tail {
        Tail { salt: self.salt, end: self.offset }
    }

    /// Makes all appended records durable with one sync; does nothing if there are none. After an
    /// error the segment must not be used again: it is unknown which bytes reached the disk, and a
    /// retry could hide a loss.
    pub fn commit(&mut self) -> Result<(), StorageError> {
        let len = self.pending_bytes();
        if len == 0 {
            return Ok(());
        }
        let end = self.offset + self.pending.len() as u64;
        if let Some(reserved) = self.reserved.filter(|reserved| end > *reserved) {
            self.reserved = self.reserve(reserved.max(self.offset), end + RESERVE_BYTES);
        }
        let header = frame_header(self.salt, self.offset, &self.pending[FRAME_HEADER_LEN..]);
        self.pending[..FRAME_HEADER_LEN].copy_from_slice(&header);
        self.file.write_all_at(&self.pending, self.offset).map_err(io_error("write", &self.path))?;
        self.file.sync_data().map_err(io_error("sync", &self.path))?;
        self.offset = end;
        self.start_frame();
        Ok(())
    }

    /// Allocates up to `bytes` of disk space for later records, or as much of it as is free.
    pub fn reserve_ahead(&mut self, bytes: u64) {
        let to = self.offset + self.pending.len() as u64 + bytes;
        let mut at = self.reserved.unwrap_or(0).max(self.offset);
        while at < to && self.file.write_all_at(&ZEROS[..AHEAD_STEP], at).is_ok() {
            at += AHEAD_STEP as u64;
        }
        self.reserved = Some(at);
    }

    /// Returns the bytes that can be logged without allocating disk space.
    pub fn free_bytes(&self) -> u64 {
        let used = self.offset + self.pending.len() as u64;
        self.reserved.map_or(0, |reserved| reserved.saturating_sub(used))
    }

    /// Writes zeros ahead of the log. Only an optimisation: after a failure, `commit` grows the
    /// file itself or reports the error.
    fn reserve(&self, from: u64, to: u64) -> Option<u64> {
        let mut at = from;
        while at < to {
            let step = usize::try_from(to - at).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
            self.file.write_all_at(&ZEROS[..step], at).ok()?;
            at += step as u64;
        }
        Some(to)
    }

    /// Cuts off the unused space. Only the last segment may have bytes after its last frame.
    pub fn finish(self) -> Result<(), StorageError> {
        self.file.set_len(self.offset).map_err(io_error("cut", &self.path))?;
        self.file.sync_all().map_err(io_error("sync", &self.path))
    }
}

fn mark(salt: u64) -> u32 {
    // Never zero: zeros are unused space.
    (salt as u32) | 1
}

pub(super) fn frame_header(salt: u64, offset: u64, payload: &[u8]) -> [u8; FRAME_HEADER_LEN] {
    let len = payload.len() as u32;
    let mut header = [0; FRAME_HEADER_LEN];
    header[..4].copy_from_slice(&mark(salt).to_be_bytes());
    header[4..8].copy_from_slice(&len.to_be_bytes());
    header[8..].copy_from_slice(&frame_crc(salt, offset, payload).to_be_bytes());
    header
}

fn frame_crc(salt: u64, offset: u64, payload: &[u8]) -> u32 {
    let place = crc32c::crc32c_append(crc32c::crc32c(&salt.to_be_bytes()), &offset.to_be_bytes());
    crc32c::crc32c_append(place, payload)
}

/// Returns the payload of the frame at `offset`, if there is a complete and valid one.
fn frame_at(bytes: &[u8], salt: u64, offset: usize) -> Option<&[u8]> {
    let rest = bytes.get(offset..)?;
    let (header, rest) = rest.split_at_checked(FRAME_HEADER_LEN)?;
    if header[..4] != mark(salt).to_be_bytes() {
        return None;
    }
    let len = u32::from_be_bytes(header[4..8].try_into().ok()?);
    let payload = rest.get(..len as usize)?;
    (header[8..] == frame_crc(salt, offset as u64, payload).to_be_bytes()).then_some(payload)
}

/// One logged transaction.
#[derive(Debug)]
pub struct Record<'a> {
    pub zxid: i64,
    pub now_ms: i64,
    pub txn: Txn<'a>,
    /// Offset of its frame.
    pub offset: u64,
}

/// The end of a segment's valid frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    pub tail: Tail,
    /// Whether an incomplete frame follows.
    pub torn: bool,
}

/// A segment that was read for recovery.
#[derive(Debug)]
pub struct StoredSegment {
    path: PathBuf,
    bytes: Vec<u8>,
    salt: u64,
    /// The recorded end of the previous segment; `None` in the first version of the format.
    before: Option<Tail>,
    header_len: usize,
}

impl StoredSegment {
    pub fn read(path: &Path, number: u64) -> Result<Self, StorageError> {
        let bytes = std::fs::read(path).map_err(io_error("read", path))?;
        let damaged = |what: &str| damaged(path, 0, what.to_owned());
        let header_len =
            if bytes.starts_with(OLD_MAGIC) { OLD_SEGMENT_HEADER_LEN } else { SEGMENT_HEADER_LEN };
        let header = bytes.get(..header_len).ok_or_else(|| damaged("incomplete header"))?;
        if !header.starts_with(MAGIC) && !header.starts_with(OLD_MAGIC) {
            return Err(damaged("not a log segment of a supported version"));
        }
        let (fields, crc) = header.split_at(header_len - 4);
        if crc != crc32c::crc32c(fields).to_be_bytes() {
            return Err(damaged("bad checksum of the header"));
        }
        let (fields, _) = fields[8..].as_chunks::<8>();
        let fields: Vec<u64> = fields.iter().map(|field| u64::from_be_bytes(*field)).collect();
        let (salt, before) = match fields[..] {
            [found, ..] if found != number => return Err(damaged("number in the header and name differ")),
            [_, salt, before_salt, end] => (salt, Some(Tail { salt: before_salt, end })),
            [_, salt] => (salt, None),
            _ => return Err(damaged("incomplete header")),
        };
        Ok(StoredSegment { path: path.to_owned(), bytes, salt, before, header_len })
    }

    /// Checks the previous segment, which is at `path`, against the end that this one recorded.
    pub fn check_before(&self, path: &Path, found: Tail) -> Result<(), StorageError> {
        match self.before {
            Some(recorded) if recorded.salt != found.salt => {
                Err(damaged(path, 0, format!("not the segment that precedes {}", self.path.display())))
            }
            Some(recorded) if recorded.end != found.end => {
                let what = format!(
                    "its records end here, but {} expects byte {}",
                    self.path.display(),
                    recorded.end
                );
                Err(damaged(path, found.end, what))
            }
            _ => Ok(()),
        }
    }

    /// Calls `each` for every record, in order. Only the `last` segment may have a torn end.
    pub fn replay(
        &self,
        last: bool,
        mut each: impl FnMut(Record<'_>) -> Result<(), String>,
    ) -> Result<End, StorageError> {
        let (bytes, salt) = (&self.bytes, self.salt);
        let damaged = |offset: usize, what: String| damaged(&self.path, offset as u64, what);
        let mut offset = self.header_len;
        while let Some(payload) = frame_at(bytes, salt, offset) {
            let mut reader = Reader::new(payload);
            while reader.remaining() > 0 {
                let record = (|| {
                    let (zxid, now_ms) = (reader.i64()?, reader.i64()?);
                    Ok(Record { zxid, now_ms, txn: Txn::decode(&mut reader)?, offset: offset as u64 })
                })();
                let record =
                    record.map_err(|err: super::jute::DecodeError| damaged(offset, err.to_string()))?;
                each(record).map_err(|what| damaged(offset, what))?;
            }
            offset += FRAME_HEADER_LEN + payload.len();
        }
        let torn = bytes[offset..].iter().any(|byte| *byte != 0);
        if torn {
            if let Some(good) = next_frame(bytes, salt, offset + 1) {
                return Err(damaged(offset, format!("a valid record follows at byte {good}")));
            }
            if !last {
                return Err(damaged(
                    offset,
                    "torn record at its end, but it is not the last segment".to_owned(),
                ));
            }
        }
        Ok(End { tail: Tail { salt, end: offset as u64 }, torn })
    }
}

fn damaged(path: &Path, offset: u64, what: String) -> StorageError {
    StorageError::Damaged { path: path.to_owned(), offset, what }
}

fn next_frame(bytes: &[u8], salt: u64, from: usize) -> Option<usize> {
    (from..bytes.len().saturating_sub(FRAME_HEADER_LEN))
        .find(|offset| frame_at(bytes, salt, *offset).is_some())
}

/// Cuts a segment after its last valid frame.
pub fn cut(path: &Path, tail: Tail) -> Result<(), StorageError> {
    let file = OpenOptions::new().write(true).open(path).map_err(io_error("open", path))?;
    file.set_len(tail.end).map_err(io_error("cut", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

pub(super) fn sync_dir(dir: &Path) -> Result<(), StorageError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}
