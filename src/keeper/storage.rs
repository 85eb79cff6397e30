//! The data directory: who holds it, what it says after a start, and the turn from one segment to the next with its
//! snapshot. Two snapshots are kept, and every segment that the older one needs.

use std::fs::{DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::fs::{FlockOperation, flock};
use tracing::{info, warn};

use super::log::{self, Draft, FILE_MODE, Segment, StorageError, Stored, Tail, io_error, segment_path};
use super::reserve::Reserve;
use super::snapshot::{self, snapshot_path};
use super::state::{State, TreeLimits};
use super::txn::Txn;

const SNAPSHOTS_KEPT: usize = 2;
/// The log may outgrow the snapshot this many times: writing snapshots then costs a share of writing the log, however
/// large the tree, and a start takes a few times as long as reading its snapshot.
const LOG_PER_SNAPSHOT: u64 = 2;
/// Allocated for the log when the disk is full, so that sessions can still be opened and closed: a
/// quarter of the reserve within these bounds. The rest is for snapshots.
const FULL_LOG_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=4 << 20;
/// The default size of the reserve for a full disk.
pub const RESERVE_BYTES: u64 = 16 << 20;
/// An upper bound for the log record of a session's end, with its frame.
const SESSION_END_BYTES: u64 = 64;

#[derive(Debug)]
pub struct Storage {
    dir: PathBuf,
    /// Number of the segment that is being written.
    number: u64,
    segment: Segment,
    /// Log bytes since the newest snapshot, in earlier segments.
    earlier_bytes: u64,
    /// Log bytes at the last attempt at a snapshot, if it has not succeeded.
    attempted_at_bytes: u64,
    /// Of the newest snapshot; 0 if there is none.
    snapshot_bytes: u64,
    publishing: Option<JoinHandle<Result<u64, StorageError>>>,
    reserve: Reserve,
    /// Whether the disk is full: the reserve is in use, and no changes may be logged.
    full: bool,
    /// Snapshots to write immediately. A snapshot allows old files to be deleted, which may be
    /// enough on a full disk. As many as are kept, because the log since the oldest of them is kept
    /// too.
    snapshots_wanted: usize,
    /// Bytes of the disk that are allocated to the log in advance while the disk is full.
    full_log_bytes: u64,
    /// Whether the log says that there is no reserve.
    warned: bool,
    /// Held for as long as the directory is ours.
    _lock: File,
}

/// What a directory held.
#[derive(Debug)]
pub struct Recovered {
    pub state: State,
    last_segment: u64,
    /// How that one ends, if there is one.
    tail: Option<Tail>,
    bytes: u64,
    snapshot_bytes: u64,
}

impl Storage {
    /// Takes the directory, recovers its state and starts a new segment with a new epoch.
    pub fn open(
        dir: &Path,
        limits: TreeLimits,
        now_ms: i64,
        mono_ms: i64,
    ) -> Result<(Self, State), StorageError> {
        Storage::open_with_reserve(dir, limits, RESERVE_BYTES, (now_ms, mono_ms))
    }

    /// The same, with `reserve_bytes` of the disk set aside for when it is full; 0 is none.
    pub fn open_with_reserve(
        dir: &Path,
        limits: TreeLimits,
        reserve_bytes: u64,
        (now_ms, mono_ms): (i64, i64),
    ) -> Result<(Self, State), StorageError> {
        // Secrets are stored here like anything else: for nobody but this user.
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error("create", dir))?;
        let lock = lock(dir)?;
        // A snapshot that a crash cut short.
        discard(&snapshot::draft_path(dir));
        let Recovered { mut state, last_segment, tail, bytes, snapshot_bytes } =
            recover(dir, limits, mono_ms)?;
        let epoch = state.begin_epoch();
        let number = last_segment + 1;
        let mut reserve = Reserve::in_dir(dir, reserve_bytes);
        let mut full = false;
        let salt = random_salt(dir)?;
        let draft = match Draft::write(dir, number, salt, tail) {
            Err(err) if err.is_full_disk() && reserve.release() => {
                full = true;
                Draft::write(dir, number, salt, tail)
            }
            draft => draft,
        };
        let mut segment = draft?.publish()?;
        segment.append(state.zxid(), now_ms, &epoch);
        let mut storage = Storage {
            dir: dir.to_owned(),
            number,
            segment,
            earlier_bytes: bytes,
            attempted_at_bytes: 0,
            snapshot_bytes,
            publishing: None,
            reserve,
            full,
            snapshots_wanted: 0,
            full_log_bytes: *FULL_LOG_BYTES.start(),
            warned: false,
            _lock: lock,
        };
        storage.commit()?;
        storage.poll_space();
        // Without a reserve the first change that does not fit would stop the keeper.
        storage.full |= reserve_bytes > 0 && storage.reserve.bytes() == 0;
        if storage.full {
            warn!(dir = %dir.display(), "disk full: the keeper serves reads and refuses changes until there is room");
            storage.segment.reserve_ahead(storage.full_log_bytes);
        }
        Ok((storage, state))
    }

    /// Whether the disk is full. Changes must not be logged then, so that sessions can be.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Whether one more session can be opened, with all that are open to be closed later.
    pub fn has_room_for_session(&self, open: usize) -> bool {
        const SLACK_BYTES: u64 = 64 << 10;
        !self.full || self.segment.room() > SLACK_BYTES + SESSION_END_BYTES * open as u64
    }

    /// Empties the reserve, if there is one. From then on no changes are logged.
    fn use_reserve(&mut self, err: &StorageError) -> bool {
        let bytes = self.reserve.bytes();
        if !self.reserve.release() {
            return false;
        }
        self.full = true;
        self.snapshots_wanted = SNAPSHOTS_KEPT;
        self.full_log_bytes = (bytes / 4).clamp(*FULL_LOG_BYTES.start(), *FULL_LOG_BYTES.end());
        warn!(
            error = %Chain(err),
            "disk full: the keeper uses its reserve, serves reads and refuses changes; make room in {}",
            self.dir.display()
        );
        true
    }

    /// Sets the reserve aside again, once there is room for it; then changes can be logged again.
    pub fn poll_space(&mut self) {
        match self.reserve.fill(self.snapshot_bytes) {
            Ok(()) if std::mem::take(&mut self.full) => {
                info!("the disk has room again; changes are accepted");
            }
            Ok(()) => {}
            Err(err) if !self.full && !self.warned => {
                self.warned = true;
                warn!(%err, dir = %self.dir.display(), "no reserve set aside: the disk is nearly full");
            }
            Err(_) => {}
        }
    }

    pub fn append(&mut self, zxid: i64, now_ms: i64, txn: &Txn<'_>) {
        self.segment.append(zxid, now_ms, txn);
    }

    pub fn pending_bytes(&self) -> usize {
        self.segment.pending_bytes()
    }

    pub fn commit(&mut self) -> Result<(), StorageError> {
        match self.segment.commit() {
            Err(err) if err.is_full_disk() && self.use_reserve(&err) => {
                self.segment.reserve_ahead(self.full_log_bytes);
                self.segment.commit()
            }
            done => done,
        }
    }

    /// Log bytes that a start would have to replay.
    fn bytes_since_snapshot(&self) -> u64 {
        self.earlier_bytes + self.segment.written_bytes()
    }

    /// Whether the log has grown by `every_bytes`, more for a large tree, since the last snapshot, or since the last
    /// attempt at one: one that fails must not be tried at every turn, each time with a new segment.
    pub fn snapshot_is_due(&self, every_bytes: u64) -> bool {
        let grown = self.bytes_since_snapshot().saturating_sub(self.attempted_at_bytes);
        self.snapshots_wanted > 0 || grown > every_bytes.max(LOG_PER_SNAPSHOT * self.snapshot_bytes)
    }

    /// Turns to a new segment and writes the snapshot that precedes it; its sync runs on a thread of its own. A
    /// snapshot that fails costs nothing but a longer replay; a failed turn of the log is final, unless there was just
    /// no room to begin it: the log goes on where it was.
    pub fn snapshot(&mut self, state: &State) -> Result<(), StorageError> {
        if self.publishing.is_some() {
            return Ok(());
        }
        self.commit()?;
        let salt = random_salt(&self.dir)?;
        let draft = |storage: &Self| {
            Draft::write(&storage.dir, storage.number + 1, salt, Some(storage.segment.tail()))
        };
        let drafted = match draft(self) {
            Err(err) if err.is_full_disk() && self.use_reserve(&err) => draft(self),
            drafted => drafted,
        };
        let next = match drafted {
            Err(err) if err.is_shortage() => {
                warn!(error = %Chain(&err), "snapshot put off");
                self.attempted_at_bytes = self.bytes_since_snapshot();
                self.snapshots_wanted = 0;
                discard(&log::draft_path(&self.dir));
                return Ok(());
            }
            draft => draft?.publish()?,
        };
        let finished = std::mem::replace(&mut self.segment, next);
        self.earlier_bytes += finished.written_bytes();
        self.attempted_at_bytes = self.earlier_bytes;
        self.number += 1;
        finished.finish()?;
        let written = match snapshot::write(&self.dir, self.number, state) {
            Err(err) if err.is_full_disk() && self.use_reserve(&err) => {
                snapshot::write(&self.dir, self.number, state)
            }
            written => written,
        };
        if self.full {
            self.segment.reserve_ahead(self.full_log_bytes);
        }
        self.snapshots_wanted = self.snapshots_wanted.saturating_sub(1);
        match written {
            Ok(unsynced) => {
                self.snapshot_bytes = unsynced.bytes();
                self.publishing = Some(std::thread::spawn(move || unsynced.publish()));
            }
            Err(err) => self.snapshot_failed(&err),
        }
        Ok(())
    }

    /// Looks whether a snapshot has become durable, and removes what it makes superfluous.
    pub fn poll_snapshot(&mut self) {
        if self.publishing.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait_for_snapshot();
        }
    }

    pub fn is_publishing(&self) -> bool {
        self.publishing.is_some()
    }

    pub fn wait_for_snapshot(&mut self) {
        let Some(publishing) = self.publishing.take() else { return };
        match publishing.join() {
            Ok(Ok(number)) => {
                self.earlier_bytes = 0;
                self.attempted_at_bytes = 0;
                purge(&self.dir);
                info!(number, "snapshot written");
            }
            Ok(Err(err)) => self.snapshot_failed(&err),
            Err(_) => warn!("the snapshot thread panicked"),
        }
    }

    fn snapshot_failed(&self, err: &StorageError) {
        warn!(error = %Chain(err), "snapshot not written");
        discard(&snapshot::draft_path(&self.dir));
    }
}

/// Removes what was begun and not completed, which takes room that may be short.
fn discard(path: &Path) {
    match std::fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => {
            warn!(file = %path.display(), %err, "unfinished file not removed");
        }
        _ => {}
    }
}

/// An error with its causes on one line.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(err) = source {
            write!(f, ": {err}")?;
            source = err.source();
        }
        Ok(())
    }
}

fn lock(dir: &Path) -> Result<File, StorageError> {
    let path = dir.join("lock");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
        .open(&path)
        .map_err(io_error("open", &path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StorageError::InUse { path: dir.to_owned() }),
        Err(err) => Err(io_error("lock", &path)(err.into())),
    }
}

fn random_salt(dir: &Path) -> Result<u64, StorageError> {
    let mut salt = [0; 8];
    getrandom::fill(&mut salt)
        .map_err(|err| io_error("choose a salt in", dir)(std::io::Error::other(err)))?;
    Ok(u64::from_ne_bytes(salt))
}

/// Rebuilds the state from the newest good snapshot and all segments from it on.
pub fn recover(dir: &Path, limits: TreeLimits, mono_ms: i64) -> Result<Recovered, StorageError> {
    let snapshots = numbered(dir, "snapshot.")?;
    let segments = numbered(dir, "log.")?;
    let (snapshot, mut state) = newest_snapshot(dir, &snapshots, limits, mono_ms)?;
    let first = snapshot.unwrap_or(1);
    let snapshot_bytes = std::fs::metadata(snapshot_path(dir, first)).map_or(0, |metadata| metadata.len());
    // A snapshot is begun only when its segment is there: without that one, what was written since is lost.
    let last = segments.last().copied().max(snapshot).unwrap_or(0);
    let (mut bytes, mut tail) = (0, None);
    for number in first..=last {
        let path = segment_path(dir, number);
        if !segments.contains(&number) {
            return Err(StorageError::Missing { path });
        }
        let segment = Stored::read(&path, number)?;
        if let Some(tail) = tail {
            segment.check_before(&segment_path(dir, number - 1), tail)?;
        }
        let end = segment.replay(number == last, |record| {
            if record.zxid < state.zxid() {
                return Err(format!("zxid {:#x} follows {:#x}", record.zxid, state.zxid()));
            }
            state.replay(record.zxid, record.now_ms, &record.txn, mono_ms).map_err(|err| err.to_string())
        })?;
        if end.torn {
            warn!(segment = %path.display(), offset = end.tail.end, "cut off a record that was never completed");
        }
        if number == last {
            log::cut(&path, end.tail)?;
        }
        bytes += end.tail.end;
        tail = Some(end.tail);
    }
    Ok(Recovered { state, last_segment: last, tail, bytes, snapshot_bytes })
}

fn newest_snapshot(
    dir: &Path,
    numbers: &[u64],
    limits: TreeLimits,
    mono_ms: i64,
) -> Result<(Option<u64>, State), StorageError> {
    let mut refused = None;
    for &number in numbers.iter().rev() {
        let path = snapshot_path(dir, number);
        match snapshot::load(&path, number, limits, mono_ms) {
            Ok(state) => return Ok((Some(number), state)),
            Err(err) => {
                warn!(error = %Chain(&err), "snapshot not usable, trying an older one");
                refused.get_or_insert(err);
            }
        }
    }
    match refused {
        // The log from its beginning replaces any snapshot.
        Some(err) if !segment_path(dir, 1).exists() => Err(err),
        _ => Ok((None, State::new(limits))),
    }
}

/// The numbers of the files called `prefix` + number, in order.
fn numbered(dir: &Path, prefix: &str) -> Result<Vec<u64>, StorageError> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_error("read", dir))? {
        let name = entry.map_err(io_error("read", dir))?.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix(prefix)).and_then(|n| n.parse::<u64>().ok());
        numbers.extend(number);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Removes the snapshots that are too many and the segments that no kept one needs.
fn purge(dir: &Path) {
    let (Ok(snapshots), Ok(segments)) = (numbered(dir, "snapshot."), numbered(dir, "log.")) else {
        return;
    };
    let Some(&oldest_kept) = snapshots.iter().nth_back(SNAPSHOTS_KEPT - 1) else { return };
    let old_snapshots = snapshots.iter().filter(|n| **n < oldest_kept).map(|n| snapshot_path(dir, *n));
    let old_segments = segments.iter().filter(|n| **n < oldest_kept).map(|n| segment_path(dir, *n));
    for path in old_snapshots.chain(old_segments) {
        if let Err(err) = std::fs::remove_file(&path) {
            warn!(file = %path.display(), %err, "old file not removed");
        }
    }
}

#[cfg(test)]
#[path = "storage_tests.rs"]
mod tests;
