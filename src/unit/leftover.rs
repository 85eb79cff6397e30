//! Processes that a unit's hooks left behind. They are found by the control group that the unit's hooks are in, where there
//! is one, and by what they were given: every hook has the path of its unit's credentials and the name of its run in its
//! environment, and so has what it starts, unless it forgets. Who runs a process says nothing: another environment may
//! give the same user to a unit of its own. Each is held by a handle before it is looked at, so that no other process is
//! meant that has its number by then.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::cgroup::Group;

/// The variable that names the credentials, and with them the unit.
pub(super) const CREDENTIALS: &str = "JUJU_CREDENTIALS";

/// The variable that names one run of one hook.
pub(super) const RUN: &str = "JUJU_RUN";

/// How long processes have to end by themselves, and then to be gone.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How many looks in a row have to find nothing.
const LOOKS: usize = 3;

/// What tells processes from all others. One of these is enough.
#[derive(Debug)]
pub(super) struct Marks<'a> {
    /// In its environment.
    pub(super) variable: (&'static str, &'a Path),
    /// It is in one of these.
    pub(super) groups: BTreeSet<Group>,
}

/// Ends every process that has one of the marks, and returns how many there were.
///
/// # Errors
/// If processes cannot be listed, or do not go.
pub(super) fn end(marks: &Marks<'_>) -> io::Result<usize> {
    let (variable, value) = marks.variable;
    let entry = [variable.as_bytes(), b"=", value.as_os_str().as_encoded_bytes()].concat();
    let asked = marked(&entry, marks)?;
    // Once: what one of them starts in order to end well is not hurried.
    for process in &asked {
        // It may have ended by itself, which is as good.
        let _ = pidfd_send_signal(process, Signal::TERM);
    }
    let patience = Instant::now() + PATIENCE;
    while Instant::now() < patience {
        if all_ended(&entry, marks)? {
            return Ok(asked.len());
        }
        sleep(LOOK_AGAIN);
    }
    let patience = Instant::now() + PATIENCE;
    while Instant::now() < patience {
        marks.groups.iter().for_each(Group::kill);
        for process in marked(&entry, marks)? {
            // As above.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        if all_ended(&entry, marks)? {
            return Ok(asked.len());
        }
        sleep(LOOK_AGAIN);
    }
    Err(io::Error::other("processes of the unit do not end"))
}

/// Whether none is left. One that starts another and ends, again and again, may be missed by a look; in a group it is
/// counted all the same.
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
        // One that is gone, or that we may not look at, is not a unit's.
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

/// Ended, and waiting for its parent to notice.
fn is_dead(number: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{number}/stat"));
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X'])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn those_of_the_unit_end_and_no_other() {
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
