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
use super::snapshot::{self, snapshot_path};
use super::state::{State, TreeLimits};
use super::txn::Txn;

const SNAPSHOTS_KEPT: usize = 2;
/// The log may outgrow the snapshot this many times: writing snapshots then costs a share of writing the log, however
/// large the tree, and a start takes a few times as long as reading its snapshot.
const LOG_PER_SNAPSHOT: u64 = 2;

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
        // Secrets are stored here like anything else: for nobody but this user.
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error("create", dir))?;
        let lock = lock(dir)?;
        // A snapshot that a crash cut short.
        discard(&snapshot::draft_path(dir));
        let Recovered { mut state, last_segment, tail, bytes, snapshot_bytes } =
            recover(dir, limits, mono_ms)?;
        let epoch = state.begin_epoch();
        let number = last_segment + 1;
        let mut segment = Draft::write(dir, number, random_salt(dir)?, tail)?.publish()?;
        segment.append(state.zxid(), now_ms, &epoch);
        segment.commit()?;
        let storage = Storage {
            dir: dir.to_owned(),
            number,
            segment,
            earlier_bytes: bytes,
            attempted_at_bytes: 0,
            snapshot_bytes,
            publishing: None,
            _lock: lock,
        };
        Ok((storage, state))
    }

    pub fn append(&mut self, zxid: i64, now_ms: i64, txn: &Txn<'_>) {
        self.segment.append(zxid, now_ms, txn);
    }

    pub fn pending_bytes(&self) -> usize {
        self.segment.pending_bytes()
    }

    pub fn commit(&mut self) -> Result<(), StorageError> {
        self.segment.commit()
    }

    /// Log bytes that a start would have to replay.
    fn bytes_since_snapshot(&self) -> u64 {
        self.earlier_bytes + self.segment.written_bytes()
    }

    /// Whether the log has grown by `every_bytes`, more for a large tree, since the last snapshot, or since the last
    /// attempt at one: one that fails must not be tried at every turn, each time with a new segment.
    pub fn snapshot_is_due(&self, every_bytes: u64) -> bool {
        let grown = self.bytes_since_snapshot().saturating_sub(self.attempted_at_bytes);
        grown > every_bytes.max(LOG_PER_SNAPSHOT * self.snapshot_bytes)
    }

    /// Turns to a new segment and writes the snapshot that precedes it; its sync runs on a thread of its own. A
    /// snapshot that fails costs nothing but a longer replay; a failed turn of the log is final, unless there was just
    /// no room to begin it: the log goes on where it was.
    pub fn snapshot(&mut self, state: &State) -> Result<(), StorageError> {
        if self.publishing.is_some() {
            return Ok(());
        }
        self.segment.commit()?;
        let next = match Draft::write(
            &self.dir,
            self.number + 1,
            random_salt(&self.dir)?,
            Some(self.segment.tail()),
        ) {
            Err(err) if err.is_shortage() => {
                warn!(error = %Chain(&err), "snapshot put off");
                self.attempted_at_bytes = self.bytes_since_snapshot();
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
        match snapshot::write(&self.dir, self.number, state) {
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
