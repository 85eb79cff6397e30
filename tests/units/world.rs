//! An environment with an operator, one machine, and its agent, which tests start and stop.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::harness::scenario::Site;
use crate::harness::{binary, groups, wait_for};
use crate::operator::Operator;

/// Longer than the session of a killed agent lasts on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Returns the first of 32 UIDs that no other world has. The kernel counts the processes of a user
/// over all tests, ended ones included until init reaps them, and hooks have a limit of processes.
pub(crate) fn next_first_uid() -> u32 {
    static WORLDS: AtomicU32 = AtomicU32::new(0);
    1_000_000_000 + std::process::id() * 512 + WORLDS.fetch_add(1, Ordering::Relaxed) * 32
}

/// Arguments for an agent with a long resync interval, as in normal operation.
const AT_REST: &[&str] = &["--resync", "60"];

pub(crate) struct World {
    pub(crate) operator: Operator,
    units: PathBuf,
    /// The file of assigned unit users on the agents' host, if it is not this operator's own.
    users: Option<PathBuf>,
    /// The UID of the first unit, unless `--hook-user` is given.
    pub(crate) first_uid: u32,
}

/// A running agent; dropping it kills the process.
pub(crate) struct Agent {
    child: Child,
    pub(crate) log: PathBuf,
}

impl World {
    pub(crate) fn new(site: &Site) -> Self {
        // Built with the programs; the agent looks for it in its own directory.
        binary("open-port");
        let operator = Operator::bootstrapped(site);
        operator.does(&["add-machine", "--instance-id", "metal"]);
        let units = operator.home().join("units");
        Self { operator, units, users: None, first_uid: next_first_uid() }
    }

    /// Sets another directory for the files of units.
    pub(crate) fn with_units_in(mut self, directory: PathBuf) -> Self {
        self.units = directory;
        self
    }

    /// Places the agents on the host of another environment, whose data is in another directory.
    pub(crate) fn on_the_host_of(mut self, other: &Self) -> Self {
        self.users = Some(other.operator.users());
        self
    }

    pub(crate) fn units_dir(&self) -> PathBuf {
        self.units.clone()
    }

    /// Starts the agent of the machine and writes its process number to a file for hooks.
    pub(crate) fn agent(&self, more: &[&str]) -> Agent {
        let agent = self.agent_of("0", &self.units, more);
        fs::write(self.agent_number(), agent.child.id().to_string()).unwrap();
        agent
    }

    /// Starts the agent with a resync interval as in normal operation, not every two seconds.
    pub(crate) fn agent_at_rest(&self) -> Agent {
        self.agent(AT_REST)
    }

    /// Starts the agent without control groups: an empty file system is mounted over them.
    pub(crate) fn agent_without_groups(&self) -> Agent {
        let agent = self.spawn("0", &self.units, &[], |command| {
            let mut alone = Command::new("unshare");
            let hide = "mount --make-rprivate / && mount -t tmpfs none /sys/fs/cgroup && exec \"$@\"";
            alone.args(["--mount", "sh", "-c", hide, "sh"]).arg(command.get_program());
            like(&command, alone)
        });
        fs::write(self.agent_number(), agent.child.id().to_string()).unwrap();
        agent
    }

    /// Starts the agent from a directory with the hook tools, which it requires, and without the
    /// other programs of this project.
    pub(crate) fn agent_alone(&self) -> Agent {
        let alone = self.operator.home().join("alone");
        fs::create_dir(&alone).unwrap();
        for program in ["portcullis", "open-port", "close-port", "opened-ports"] {
            fs::copy(binary(program), alone.join(program)).unwrap();
        }
        self.spawn("0", &self.units, &[], |command| like(&command, Command::new(alone.join("portcullis"))))
    }

    pub(crate) fn agent_number(&self) -> PathBuf {
        self.operator.home().join("agent.number")
    }

    /// Starts the agent of one of several machines, with a units directory of its own.
    pub(crate) fn agent_of(&self, machine: &str, units: &Path, more: &[&str]) -> Agent {
        self.spawn(machine, units, more, |command| command)
    }

    fn spawn(&self, machine: &str, units: &Path, more: &[&str], wrap: impl Fn(Command) -> Command) -> Agent {
        let log = self.operator.home().join(format!("agent-{machine}.log"));
        let child = wrap(self.command(machine, units, more))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::options().create(true).append(true).open(&log).expect("a log"))
            .spawn()
            .expect("portcullis starts");
        Agent { child, log }
    }

    fn command(&self, machine: &str, units: &Path, more: &[&str]) -> Command {
        let mut command = self.operator.command("portcullis");
        let resync = if more == AT_REST { &[][..] } else { &["--resync", "2"] };
        command.args(["--log-level", "debug", "machine", "--id", machine]).args(resync);
        command.arg("--units-dir").arg(units).args(more);
        if !more.contains(&"--hook-user") {
            command.args(["--hook-user", &format!("{}+", self.first_uid)]);
        }
        command.envs(self.users.iter().map(|users| ("PORTCULLIS_UNIT_USERS", users)));
        command
    }

    /// Starts the agent of the machine through another program, which gets its command line.
    pub(crate) fn agent_under(&self, mut other: Command) -> Child {
        let command = self.command("0", &self.units, &[]);
        other.arg(command.get_program());
        let log = File::options().create(true).append(true).open(self.agent_log()).expect("a log");
        like(&command, other)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("it starts")
    }

    pub(crate) fn agent_log(&self) -> PathBuf {
        self.operator.home().join("agent-0.log")
    }

    /// Creates a charm whose hooks append their name to a journal and then run the given code.
    pub(crate) fn charm(&self, name: &str, hooks: &[(&str, &str)]) -> String {
        let metadata = format!("name: {name}\nsummary: A charm\ndescription: For a test.\n");
        let charm = self.operator.charm(name, &metadata);
        fs::create_dir_all(Path::new(&charm).join("hooks")).unwrap();
        for hook in ["install", "start", "stop", "exposed", "unexposed"] {
            let body = hooks.iter().find(|(known, _)| *known == hook).map_or("", |(_, body)| body);
            let path = Path::new(&charm).join("hooks").join(hook);
            let journal = self.journal(name);
            let script = format!("#!/bin/sh\necho {hook} >>{}\n{body}\n", journal.display());
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        charm
    }

    fn journal(&self, charm: &str) -> PathBuf {
        let path = self.operator.home().join(format!("{charm}.journal"));
        if !path.exists() {
            fs::write(&path, "").unwrap();
            self.share(&path);
        }
        path
    }

    /// Makes a file writable for the hooks of all users.
    pub(crate) fn share(&self, path: &Path) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
    }

    /// Returns the hooks of a charm that ran, in order.
    pub(crate) fn ran(&self, charm: &str) -> Vec<String> {
        fs::read_to_string(self.journal(charm)).unwrap().lines().map(str::to_owned).collect()
    }

    #[track_caller]
    pub(crate) fn runs(&self, charm: &str, wanted: &[&str]) {
        wait_for(&format!("{wanted:?} of {charm}, but {:?}", self.ran(charm)), DEADLINE, || {
            (self.ran(charm).len() >= wanted.len()).then_some(())
        });
        assert_eq!(self.ran(charm), wanted);
    }

    pub(crate) fn deploy(&self, charm: &str, service: &str) {
        self.operator.does(&["deploy", charm, service, "--to", "0"]);
    }

    pub(crate) fn unit(&self, name: &str) -> Value {
        let service = name.split('/').next().unwrap_or_default();
        self.operator.status()["services"][service]["units"][name].clone()
    }

    #[track_caller]
    pub(crate) fn wait_for_state(&self, unit: &str, state: &str) -> Value {
        wait_for(&format!("{state} of {unit}"), DEADLINE, || {
            Some(self.unit(unit)).filter(|seen| seen["agent-state"] == state)
        })
    }

    /// Returns the directory of a unit's charm.
    pub(crate) fn charm_dir(&self, unit: &str) -> PathBuf {
        self.units_dir().join("units").join(self.key_of(unit).expect("a unit")).join("charm")
    }

    /// Returns whether the machine has files of a unit.
    pub(crate) fn is_here(&self, unit: &str) -> bool {
        self.key_of(unit).is_some()
    }

    fn key_of(&self, unit: &str) -> Option<OsString> {
        let mut runs = fs::read_dir(self.units_dir().join("runs")).unwrap().map(|entry| entry.unwrap());
        let found =
            runs.find(|entry| fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name == unit));
        found.map(|entry| entry.file_name())
    }

    pub(crate) fn is_cleared_away(&self) -> bool {
        let empty = |name: &str| {
            fs::read_dir(self.units_dir().join(name)).is_ok_and(|mut entries| entries.next().is_none())
        };
        empty("units") && empty("runs")
    }
}

/// Appends the arguments of `command` to `other` and gives it the same environment.
pub(crate) fn like(command: &Command, mut other: Command) -> Command {
    other.args(command.get_args());
    other.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    other
}

impl Drop for World {
    fn drop(&mut self) {
        // The units directory may be outside the home directory.
        groups::end_below(&self.units);
    }
}

impl Agent {
    pub(crate) fn kill9(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    /// Waits until another process has killed the agent.
    #[track_caller]
    pub(crate) fn is_killed(&mut self) {
        let ended = wait_for("an agent that is killed", DEADLINE, || self.child.try_wait().expect("wait"));
        assert_eq!(ended.signal(), Some(9), "{ended}: {}", self.log());
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }

    /// Returns the peak memory of the process.
    pub(crate) fn most_kb(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    #[track_caller]
    pub(crate) fn stop(mut self) {
        let sent = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        let ended = wait_for("end of the agent", DEADLINE, || self.child.try_wait().expect("wait"));
        assert_eq!(ended.code(), Some(0), "{}", self.log());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the agent:\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
        // In every test that passes the agent has ended already.
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// Hook code that creates nested directories, deeper than any path or stack allows.
pub(crate) const DIG: &str = r#"python3 -c '
import os
for _ in range(5000):
    os.mkdir("deep")
    os.chdir("deep")
'"#;

/// Returns the program that writes the output of a unit's services to `log`.
pub(crate) fn reader_of(log: &Path) -> Option<PathBuf> {
    let ending = format!("\0keep-log\0{}\0", log.display());
    let mut processes = fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let reads = |process: &fs::DirEntry| {
        fs::read(process.path().join("cmdline")).is_ok_and(|line| line.ends_with(ending.as_bytes()))
    };
    fs::read_link(processes.find(reads)?.path().join("exe")).ok()
}

/// Returns whether a process exists and is not a zombie.
pub(crate) fn is_alive(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|stat| !stat.contains(") Z "))
}
