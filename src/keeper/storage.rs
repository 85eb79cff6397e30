//! The data directory: its lock, recovery at the start, and the switch to a new log segment with
//! its snapshot. Two snapshots are kept, and all segments since the older one.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::fs::{FlockOperation, flock};
use tracing::{info, warn};

use super::log::{
    self, FILE_MODE, NewSegment, Segment, StorageError, StoredSegment, Tail, io_error, segment_path,
};
use super::reserve::Reserve;
use super::snapshot::{self, snapshot_path};
use super::state::{State, TreeLimits};
use super::txn::Txn;

const SNAPSHOTS_KEPT: usize = 2;
/// The log may grow to this multiple of the snapshot. The cost of snapshots is then a fraction of
/// the cost of the log, however large the tree, and recovery takes a few times as long as reading
/// the snapshot.
const LOG_PER_SNAPSHOT: u64 = 2;
/// Allocated for the log when the disk is full, so that sessions can still be opened and closed: a
/// quarter of the reserve within these bounds. The rest is for snapshots.
const FULL_LOG_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=4 << 20;
/// Default size of the reserve for a full disk.
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
    /// Size of the newest snapshot; 0 if there is none.
    snapshot_bytes: u64,
    publishing: Option<JoinHandle<Result<u64, StorageError>>>,
    reserve: Reserve,
    /// Whether the disk is full: the reserve is in use, and no changes may be logged.
    full: bool,
    /// Number of snapshots to write immediately. On a full disk, a snapshot allows old files to be
    /// deleted. `SNAPSHOTS_KEPT` are needed, because the log since the oldest of them is kept too.
    snapshots_wanted: usize,
    /// Disk space that is allocated to the log in advance while the disk is full.
    full_log_bytes: u64,
    /// Whether the missing reserve has been logged.
    warned: bool,
    /// Syncs of the log since the start.
    syncs: u64,
    /// Locks the directory until it is dropped.
    _lock: File,
}

/// The result of recovery.
#[derive(Debug)]
pub struct Recovered {
    pub state: State,
    last_segment: u64,
    /// End of the last segment, if there is one.
    tail: Option<Tail>,
    bytes: u64,
    snapshot_bytes: u64,
}

impl Storage {
    /// Locks the directory, recovers its state and starts a new segment with a new epoch.
    pub fn open(
        dir: &Path,
        limits: TreeLimits,
        now_ms: i64,
        mono_ms: i64,
    ) -> Result<(Self, State), StorageError> {
        Storage::open_with_reserve(dir, limits, RESERVE_BYTES, (now_ms, mono_ms))
    }

    /// As `open`, with `reserve_bytes` of disk space reserved for a full disk; 0 reserves none.
    pub fn open_with_reserve(
        dir: &Path,
        limits: TreeLimits,
        reserve_bytes: u64,
        (now_ms, mono_ms): (i64, i64),
    ) -> Result<(Self, State), StorageError> {
        // Stored data may be secret, so that only this user gets access.
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error("create", dir))?;
        let lock = lock(dir)?;
        // A crash can leave an incomplete snapshot.
        discard(&snapshot::draft_path(dir));
        let Recovered { mut state, last_segment, tail, bytes, snapshot_bytes } =
            recover(dir, limits, mono_ms)?;
        let epoch = state.begin_epoch();
        let number = last_segment + 1;
        let mut reserve = Reserve::in_dir(dir, reserve_bytes);
        let mut full = false;
        let salt = random_salt(dir)?;
        let draft = match NewSegment::write(dir, number, salt, tail) {
            Err(err) if err.is_full_disk() && reserve.release() => {
                full = true;
                NewSegment::write(dir, number, salt, tail)
            }
            draft => draft,
        };
        let draft = match draft {
            Err(err) if err.is_full_disk() && reserve_bytes > 0 => {
                full = true;
                // Without a spare segment, the first error gives the reason.
                NewSegment::write_to_spare(dir, number, salt, tail).map_err(|_| err)
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
            syncs: 0,
            _lock: lock,
        };
        storage.commit()?;
        storage.poll_space();
        // Without a reserve, the first write on a full disk would stop the keeper.
        storage.full |= reserve_bytes > 0 && storage.reserve.bytes() == 0;
        if storage.full {
            warn!(dir = %dir.display(), "disk full: refusing changes until there is free space");
            storage.segment.reserve_ahead(storage.full_log_bytes);
        }
        Ok((storage, state))
    }

    /// Returns whether the disk is full. The remaining space is then used for sessions only;
    /// changes must not be logged.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Returns whether one more session can be opened, with enough space left to close all `open`
    /// sessions later.
    pub fn can_open_session(&self, open: usize) -> bool {
        const SLACK_BYTES: u64 = 64 << 10;
        !self.full || self.segment.free_bytes() > SLACK_BYTES + SESSION_END_BYTES * open as u64
    }

    /// Releases the reserve, if there is one. From then on changes are refused.
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
            dir = %self.dir.display(),
            "disk full: using the reserve, refusing changes until there is free space"
        );
        true
    }

    /// Allocates the reserve again when there is space for it. Then changes are accepted again.
    pub fn poll_space(&mut self) {
        let filled = self.reserve.fill(self.snapshot_bytes).and_then(|()| {
            if self.reserve.bytes() == 0 {
                return Ok(());
            }
            log::allocate_spare(&self.dir).map_err(|err| match err {
                StorageError::Io { source, .. } => source,
                other => io::Error::other(other),
            })
        });
        match filled {
            Ok(()) if std::mem::take(&mut self.full) => {
                info!("disk has free space again: accepting changes");
            }
            Ok(()) => {}
            Err(err) if !self.full && !self.warned => {
                self.warned = true;
                warn!(%err, dir = %self.dir.display(), "no reserve allocated: disk nearly full");
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

    pub fn syncs(&self) -> u64 {
        self.syncs
    }

    pub fn commit(&mut self) -> Result<(), StorageError> {
        self.syncs += u64::from(self.pending_bytes() > 0);
        match self.segment.commit() {
            Err(err) if err.is_full_disk() && self.use_reserve(&err) => {
                self.segment.reserve_ahead(self.full_log_bytes);
                self.segment.commit()
            }
            done => done,
        }
    }

    /// Returns the log bytes that a start would have to replay.
    fn bytes_since_snapshot(&self) -> u64 {
        self.earlier_bytes + self.segment.written_bytes()
    }

    /// Returns whether the log has grown by `every_bytes`, or more for a large tree, since the last
    /// snapshot or the last attempt. A failed snapshot is not retried at once, because each attempt
    /// starts a new segment.
    pub fn snapshot_is_due(&self, every_bytes: u64) -> bool {
        let grown = self.bytes_since_snapshot().saturating_sub(self.attempted_at_bytes);
        self.snapshots_wanted > 0 || grown > every_bytes.max(LOG_PER_SNAPSHOT * self.snapshot_bytes)
    }

    /// Starts a new segment and writes the snapshot that precedes it; the snapshot is synced on a
    /// separate thread. A failed snapshot only makes the next replay longer. A failed switch of
    /// segments is fatal, unless there was no space to start the segment: then the current segment
    /// stays in use.
    pub fn snapshot(&mut self, state: &State) -> Result<(), StorageError> {
        if self.publishing.is_some() {
            return Ok(());
        }
        self.commit()?;
        let salt = random_salt(&self.dir)?;
        let draft = |storage: &Self| {
            NewSegment::write(&storage.dir, storage.number + 1, salt, Some(storage.segment.tail()))
        };
        let drafted = match draft(self) {
            Err(err) if err.is_full_disk() && self.use_reserve(&err) => draft(self),
            drafted => drafted,
        };
        let next = match drafted {
            Err(err) if err.is_out_of_resources() => {
                warn!(error = %Chain(&err), "snapshot postponed");
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

    /// Deletes old files if the running snapshot has become durable.
    pub fn poll_snapshot(&mut self) {
        if self.publishing.as_ref().is_some_and(JoinHandle::is_finished) {
            self.wait_for_snapshot();
        }
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
            Err(_) => warn!("snapshot thread panicked"),
        }
    }

    fn snapshot_failed(&self, err: &StorageError) {
        warn!(error = %Chain(err), "snapshot failed");
        discard(&snapshot::draft_path(&self.dir));
    }
}

/// Removes an incomplete file, to free its disk space.
fn discard(path: &Path) {
    match std::fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => {
            warn!(file = %path.display(), %err, "removing an incomplete file failed");
        }
        _ => {}
    }
}

/// Formats an error with its causes on one line.
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
    getrandom::fill(&mut salt).map_err(|err| io_error("choose a salt in", dir)(io::Error::other(err)))?;
    Ok(u64::from_ne_bytes(salt))
}

/// Returns the data of a znode in the directory of a keeper that does not run. A directory without
/// a keeper's files contains none.
///
/// # Errors
/// If another keeper uses the directory, or its files cannot be read.
pub fn read_stored(dir: &Path, path: &str) -> Result<Option<Vec<u8>>, StorageError> {
    if !dir.join("lock").exists() {
        return Ok(None);
    }
    let _lock = lock(dir)?;
    // The limits concern new znodes only.
    let state = recover(dir, TreeLimits::default(), 0)?.state;
    Ok(state.tree.get(path).map(|node| node.data.as_deref().unwrap_or_default().to_vec()))
}

/// Recovers the state from the newest valid snapshot and all segments since.
pub fn recover(dir: &Path, limits: TreeLimits, mono_ms: i64) -> Result<Recovered, StorageError> {
    let snapshots = numbered(dir, "snapshot.")?;
    let segments = numbered(dir, "log.")?;
    let (snapshot, mut state) = newest_snapshot(dir, &snapshots, limits, mono_ms)?;
    let first = snapshot.unwrap_or(1);
    let snapshot_bytes = std::fs::metadata(snapshot_path(dir, first)).map_or(0, |metadata| metadata.len());
    // A snapshot is written after its segment is created. If that segment is missing, changes are
    // lost.
    let last = segments.last().copied().max(snapshot).unwrap_or(0);
    let (mut bytes, mut tail) = (0, None);
    for number in first..=last {
        let path = segment_path(dir, number);
        if !segments.contains(&number) {
            return Err(StorageError::Missing { path });
        }
        let segment = StoredSegment::read(&path, number)?;
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
            warn!(segment = %path.display(), offset = end.tail.end, "torn record cut off");
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
                warn!(error = %Chain(&err), "snapshot unusable, trying an older one");
                refused.get_or_insert(err);
            }
        }
    }
    match refused {
        // The complete log replaces a snapshot.
        Some(err) if !segment_path(dir, 1).exists() => Err(err),
        _ => Ok((None, State::new(limits))),
    }
}

/// Returns the sorted numbers of the files named `prefix` + number.
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

/// Removes old snapshots, and the segments that no kept snapshot needs.
fn purge(dir: &Path) {
    let (Ok(snapshots), Ok(segments)) = (numbered(dir, "snapshot."), numbered(dir, "log.")) else {
        return;
    };
    let Some(&oldest_kept) = snapshots.iter().nth_back(SNAPSHOTS_KEPT - 1) else { return };
    let old_snapshots = snapshots.iter().filter(|n| **n < oldest_kept).map(|n| snapshot_path(dir, *n));
    let old_segments = segments.iter().filter(|n| **n < oldest_kept).map(|n| segment_path(dir, *n));
    for path in old_snapshots.chain(old_segments) {
        if let Err(err) = std::fs::remove_file(&path) {
            warn!(file = %path.display(), %err, "removing an old file failed");
        }
    }
}

#[cfg(test)]
#[path = "storage_tests.rs"]
mod tests;
