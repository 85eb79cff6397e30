//! The output of hooks: a log of limited size, and the last lines in memory. Output arrives through
//! a pipe, so that a hook and the processes that it leaves running cannot fill the disk. If the log
//! cannot be written, the output is dropped and the hook continues.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// The size limit of a log. When it is reached, the older half is removed.
pub const MAX_LOG_BYTES: u64 = 1024 * 1024;

/// How many of the last lines of a failed hook are reported.
const TAIL_BYTES: usize = 4096;
pub(super) const TAIL_LINES: usize = 10;
pub(super) const TAIL_LINE_CHARS: usize = 200;

const CHUNK_BYTES: usize = 64 * 1024;

/// The most bytes that are read before the time limit is checked again.
const MAX_CHUNKS: usize = 16;

/// A log that several processes may write to. Each write checks the current length.
#[derive(Debug)]
pub(super) struct Log(File);

impl Log {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // Append mode, so that a truncation by another process leaves no hole.
        OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path).map(Self)
    }

    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = self.0.metadata()?.len();
        if length + bytes.len() as u64 > MAX_LOG_BYTES {
            let mut newer = vec![0; usize::try_from(MAX_LOG_BYTES / 2).unwrap_or_default()];
            let from = length.saturating_sub(newer.len() as u64);
            let kept = read_at_most(&self.0, &mut newer, from)?;
            self.0.set_len(0)?;
            self.0.write_all(&newer[..kept])?;
        }
        self.0.write_all(bytes)
    }
}

fn read_at_most(file: &File, into: &mut [u8], from: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match file.read_at(&mut into[filled..], from + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    Ok(filled)
}

/// The output of one hook.
#[derive(Debug)]
pub(super) struct Output {
    pipe: PipeReader,
    log: Log,
    tail: VecDeque<u8>,
    /// No process can write to the pipe any more.
    pub(super) ended: bool,
}

impl Output {
    /// # Errors
    /// Those of the system.
    pub(super) fn new(pipe: PipeReader, log: Log) -> io::Result<Self> {
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        Ok(Self { pipe, log, tail: VecDeque::new(), ended: false })
    }

    pub(super) fn pipe(&self) -> &PipeReader {
        &self.pipe
    }

    /// Reads available output, up to a limit. Returns whether there may be more.
    ///
    /// # Errors
    /// Those of the pipe.
    pub(super) fn take(&mut self) -> io::Result<bool> {
        let mut chunk = vec![0; CHUNK_BYTES];
        for _ in 0..MAX_CHUNKS {
            match self.pipe.read(&mut chunk) {
                Ok(0) => {
                    self.ended = true;
                    return Ok(false);
                }
                Ok(read) => self.add(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn add(&mut self, bytes: &[u8]) {
        // With a full disk, for example, the last lines are still reported.
        let _ = self.log.add(bytes);
        self.tail.extend(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL_BYTES));
    }

    /// Returns the last lines, without control characters.
    pub(super) fn tail(&self) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        let shown = lines[lines.len().saturating_sub(TAIL_LINES)..].iter().map(|line| {
            let plain = line.chars().filter(|c| !c.is_control()).take(TAIL_LINE_CHARS);
            plain.chain(['\n']).collect::<String>()
        });
        shown.collect()
    }

    /// Returns the pipe for another reader; `None` if no output can follow.
    pub(super) fn rest(self) -> Option<PipeReader> {
        let flags = fcntl_getfl(&self.pipe).ok()?;
        fcntl_setfl(&self.pipe, flags - OFlags::NONBLOCK).ok()?;
        (!self.ended).then_some(self.pipe)
    }
}

/// Writes the output of processes that a hook left running to the log, until they have ended.
///
/// # Errors
/// If the log cannot be opened, or the pipe cannot be read.
pub(super) fn keep(mut pipe: impl io::Read, log: &Path) -> io::Result<()> {
    let mut log = Log::open(log)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match pipe.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(read) => {
                // Output that cannot be written is dropped, as above.
                let _ = log.add(&chunk[..read]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_the_newest_and_never_more_than_its_limit() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("log");
        let printed: Vec<u8> = (0..500_000u32).flat_map(|n| format!("{n}\n").into_bytes()).collect();
        assert!(printed.len() as u64 > 3 * MAX_LOG_BYTES);
        let mut log = Log::open(&path).unwrap();
        for chunk in printed.chunks(CHUNK_BYTES) {
            log.add(chunk).unwrap();
            assert!(path.metadata().unwrap().len() <= MAX_LOG_BYTES);
        }
        let kept = std::fs::read(&path).unwrap();
        assert!(kept.len() as u64 >= MAX_LOG_BYTES / 2);
        assert_eq!(kept, printed[printed.len() - kept.len()..], "the newest, without a gap");
    }
}
