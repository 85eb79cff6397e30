//! A hook that runs, watched over: what it prints is taken in, its end is noticed at once, and it is ended with its process
//! group when its time is over or its unit is removed. What its end means is told in `hook`.

use std::io;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::{Order, pid};
use crate::unit::output::Output;

/// A hook that is asked to end has this long before it is made to.
const GRACE: Duration = Duration::from_secs(5);

/// How long the last of what a hook printed is waited for, if something that it left behind goes on printing.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How often a running hook's time, and the order to stop it, are looked at. Its end is noticed at once.
const LOOK: Duration = Duration::from_millis(50);

/// How a hook came to its end.
pub(super) enum Over {
    By(ExitStatus),
    Late,
    Stopped,
}

/// A hook that runs, and what it prints.
pub(super) struct Watch<'a> {
    child: &'a mut Child,
    /// Says at once that it has ended.
    handle: OwnedFd,
    output: &'a mut Output,
}

impl<'a> Watch<'a> {
    pub(super) fn over(child: &'a mut Child, output: &'a mut Output) -> io::Result<Self> {
        let handle = pidfd_open(pid(child)?, PidfdFlags::empty())?;
        Ok(Self { child, handle, output })
    }

    pub(super) fn wait(&mut self, order: &Order, stop: &Path) -> io::Result<Over> {
        let limit = Instant::now() + Duration::from_millis(order.limit_ms);
        loop {
            if let Some(status) = self.look(LOOK)? {
                return Ok(Over::By(status));
            }
            let late = Instant::now() >= limit;
            if late || stop.exists() {
                self.end()?;
                return Ok(if late { Over::Late } else { Over::Stopped });
            }
        }
    }

    /// Waits for something to happen, takes in what was printed, and says whether the hook has ended.
    fn look(&mut self, patience: Duration) -> io::Result<Option<ExitStatus>> {
        let timeout = Timespec::try_from(patience).map_err(io::Error::other)?;
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
        // All that the hook itself printed is in the pipe by now; what others print meanwhile has no end.
        let patience = Instant::now() + LAST_WORDS;
        while self.output.take()? && Instant::now() < patience {}
        Ok(Some(status))
    }

    /// Asks the hook and everything that it started and that is still in its group to end, and then makes it.
    fn end(&mut self) -> io::Result<()> {
        let group = pid(self.child)?;
        let tell = |signal| {
            // All of them may have ended by themselves meanwhile.
            let _ = kill_process_group(group, signal);
        };
        tell(Signal::TERM);
        let patience = Instant::now() + GRACE;
        while Instant::now() < patience && self.look(LOOK)?.is_none() {}
        tell(Signal::KILL);
        self.child.wait()?;
        self.output.take().map(drop)
    }
}
