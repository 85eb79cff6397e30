//! Processes that a unit's hooks left running. They are found by the unit's control group, if there
//! is one, and by their environment: every hook has the path of its unit's credentials and the name
//! of its run in it, and its children inherit both unless they clear them. The user of a process is
//! not a criterion, because another environment may use the same one. Each process is opened by a
//! pidfd before it is examined, so that a reused process id cannot be hit.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::cgroup::Group;

/// The variable with the path of the credentials, which identifies the unit.
pub(super) const CREDENTIALS: &str = "JUJU_CREDENTIALS";

/// The variable that identifies one run of one hook.
pub(super) const RUN: &str = "JUJU_RUN";

/// How long processes have to end after the request, and again after the kill.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How many scans in a row must find no process.
const LOOKS: usize = 3;

/// The marks of the processes to find. One of them is enough.
#[derive(Debug)]
pub(super) struct Marks<'a> {
    /// Entries of the environment.
    pub(super) variable: (&'static str, &'a Path),
    /// Control groups.
    pub(super) groups: BTreeSet<Group>,
}

/// Ends every process that has one of the marks, and returns their number.
///
/// # Errors
/// If processes cannot be listed, or do not end.
pub(super) fn end(marks: &Marks<'_>) -> io::Result<usize> {
    let (variable, value) = marks.variable;
    let entry = [variable.as_bytes(), b"=", value.as_os_str().as_encoded_bytes()].concat();
    let asked = marked(&entry, marks)?;
    // Asked once: a process that one of them starts for its cleanup is not interrupted.
    for process in &asked {
        // It may have ended by itself.
        let _ = pidfd_send_signal(process, Signal::TERM);
    }
    let deadline = Instant::now() + KILL_TIMEOUT;
    while Instant::now() < deadline {
        if all_ended(&entry, marks)? {
            return Ok(asked.len());
        }
        sleep(POLL_INTERVAL);
    }
    let deadline = Instant::now() + KILL_TIMEOUT;
    while Instant::now() < deadline {
        marks.groups.iter().for_each(Group::kill);
        for process in marked(&entry, marks)? {
            // It may have ended by itself.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        if all_ended(&entry, marks)? {
            return Ok(asked.len());
        }
        sleep(POLL_INTERVAL);
    }
    Err(io::Error::other("processes of the unit do not end"))
}

/// Whether no process is left. A scan may miss a process that repeatedly starts another and exits;
/// the count of a control group does not.
fn all_ended(entry: &[u8], marks: &Marks<'_>) -> io::Result<bool> {
    for group in &marks.groups {
        if !group.is_empty()? {
            return Ok(false);
        }
    }
    for _ in 0..LOOKS {
        if !marked(entry, marks)?.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

fn marked(entry: &[u8], marks: &Marks<'_>) -> io::Result<Vec<OwnedFd>> {
    let own = std::process::id();
    let mut found = Vec::new();
    for listed in fs::read_dir("/proc")? {
        let name = listed?.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Some(pid) = Pid::from_raw(number).filter(|_| number.unsigned_abs() != own) else { continue };
        // A process that has ended, or that we may not examine, does not belong to a unit.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        let given = || {
            let environment = fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == entry)
        };
        let belongs = || marks.groups.iter().any(|group| group.has(number));
        if (given() || belongs()) && !is_dead(number) {
            found.push(handle);
        }
    }
    Ok(found)
}

/// Whether the process has ended and waits for its parent to collect it.
fn is_dead(number: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{number}/stat"));
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X'])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn only_the_processes_of_the_unit_end() {
        let home = tempfile::tempdir().unwrap();
        let (ours, theirs) = (home.path().join("ours"), home.path().join("ours-too"));
        let spawn = |credentials: &Path, script: &str| {
            let mut command = Command::new("setsid");
            command.args(["sh", "-c", script]).env(CREDENTIALS, credentials);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
        };
        let ready = |child: &mut std::process::Child| {
            let mut line = [0; 3];
            io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        };
        let mut gentle = spawn(&ours, "echo up; exec sleep 1000");
        let mut stubborn = spawn(&ours, "trap '' TERM; echo up; while :; do sleep 0.05; done");
        let mut other = spawn(&theirs, "echo up; exec sleep 1000");
        for child in [&mut gentle, &mut stubborn, &mut other] {
            ready(child);
        }
        let marks = Marks { variable: (CREDENTIALS, &ours), groups: BTreeSet::new() };
        assert!(end(&marks).unwrap() >= 2);
        assert!(!gentle.wait().unwrap().success() && !stubborn.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none(), "another unit's process was ended");
        assert_eq!(end(&marks).unwrap(), 0);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
