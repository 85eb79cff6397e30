//! Supervises a running hook: reads its output, notices its end at once, and kills its process
//! group when its time is over or its unit is removed. `hook` decides what the end means.

use std::io;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{HookSpec, pid};
use crate::unit::hook_log::Output;

/// How long a hook has to end after the request, before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// How long the rest of a hook's output is waited for if other processes keep printing.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

/// Interval at which the time limit and the request to stop are checked. The end of the hook is
/// noticed at once.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How a hook ended.
pub(super) enum HookEnd {
    Exited(ExitStatus),
    TimedOut,
    Stopped,
}

/// A running hook and its output.
pub(super) struct Watch<'a> {
    child: &'a mut Child,
    /// Becomes readable when the hook ends.
    handle: OwnedFd,
    output: &'a mut Output,
}

impl<'a> Watch<'a> {
    pub(super) fn new(child: &'a mut Child, output: &'a mut Output) -> io::Result<Self> {
        let handle = pidfd_open(pid(child)?, PidfdFlags::empty())?;
        Ok(Self { child, handle, output })
    }

    pub(super) fn wait(&mut self, spec: &HookSpec, stop: &Path) -> io::Result<HookEnd> {
        let limit = Instant::now() + Duration::from_millis(spec.limit_ms);
        loop {
            if let Some(status) = self.poll(POLL_INTERVAL)? {
                return Ok(HookEnd::Exited(status));
            }
            let timed_out = Instant::now() >= limit;
            if timed_out || stop.exists() {
                self.end()?;
                return Ok(if timed_out { HookEnd::TimedOut } else { HookEnd::Stopped });
            }
        }
    }

    /// Waits for an event, reads available output, and returns whether the hook has ended.
    fn poll(&mut self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        let mut waited = vec![PollFd::new(&self.handle, PollFlags::IN)];
        if !self.output.ended {
            waited.push(PollFd::new(self.output.pipe(), PollFlags::IN));
        }
        match poll(&mut waited, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.output.take()?;
        let Some(status) = self.child.try_wait()? else { return Ok(None) };
        // The hook's own output is completely in the pipe by now; other processes may print without
        // end.
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.output.take()? && Instant::now() < deadline {}
        Ok(Some(status))
    }

    /// Asks the hook and the processes in its group to end, and kills them after a while.
    fn end(&mut self) -> io::Result<()> {
        let group = pid(self.child)?;
        let signal_group = |signal| {
            // All of them may have ended by themselves meanwhile.
            let _ = kill_process_group(group, signal);
        };
        signal_group(Signal::TERM);
        let deadline = Instant::now() + GRACE;
        while Instant::now() < deadline && self.poll(POLL_INTERVAL)?.is_none() {}
        signal_group(Signal::KILL);
        self.child.wait()?;
        self.output.take().map(drop)
    }
}
