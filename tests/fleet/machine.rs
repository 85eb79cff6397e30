//! Machines for tests: each runs a complete systemd as its first process, in a container with its
//! own network link, control groups and root directory. A machine is slower to start than a `node`,
//! but it can lose its link, reboot and be switched off. See `machine.sh`. Needs root.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use crate::harness::groups::Groups;
use crate::harness::{HANG, binary, wait_for};

/// A bridge in a network namespace of its own, to which all machines of a test are connected.
#[derive(Debug)]
pub(crate) struct Network {
    /// This process keeps the namespace. It ends when its standard input is closed.
    holder: Child,
}

impl Network {
    pub(crate) fn new() -> Self {
        // Ports of the bridge forward packets at once.
        let script = "ip link set lo up; ip link add br0 type bridge forward_delay 0; \
                      ip addr add 10.88.0.254/24 dev br0; ip link set br0 up; echo ready; exec cat";
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-euc", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "no network");
        Self { holder }
    }

    /// Runs `ip` in the namespace of the bridge.
    #[track_caller]
    fn ip(&self, arguments: &str) {
        ip_in(self.holder.id(), arguments);
    }

    /// Prepares a program that runs in the network of the bridge, whose address is 10.88.0.254.
    pub(crate) fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.holder.id().to_string(), "--net"]).arg(program.as_ref());
        command.stdin(Stdio::null());
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// A running machine. Dropping it kills all its processes.
#[derive(Debug)]
pub(crate) struct Machine {
    network: Arc<Network>,
    name: String,
    number: u8,
    /// `supervise.sh`. The end of its standard input ends the machine.
    supervisor: Child,
    /// The process id of the machine's systemd, as seen from outside.
    systemd: u32,
    groups: Groups,
    dir: tempfile::TempDir,
}

impl Machine {
    /// Boots a machine that has the address 10.88.0.NUMBER and the services of `tests/fleet/units`,
    /// and waits until it is running.
    pub(crate) fn boot(network: &Arc<Network>, name: &str, number: u8) -> Self {
        let mut machine = Self::begin(network, name, number);
        machine.wait_until_running();
        machine
    }

    /// Boots several machines at the same time. Their addresses end in 1, 2, 3, ...
    pub(crate) fn boot_all(network: &Arc<Network>, names: &[&str]) -> Vec<Self> {
        let numbered = names.iter().zip(1..);
        let mut all: Vec<Self> = numbered.map(|(name, number)| Self::begin(network, name, number)).collect();
        all.iter_mut().for_each(Self::wait_until_running);
        all
    }

    fn begin(network: &Arc<Network>, name: &str, number: u8) -> Self {
        let dir = tempfile::Builder::new().prefix("portcullis-machine-").tempdir().unwrap();
        let units = dir.path().join("units");
        fs::create_dir(&units).unwrap();
        for file in fs::read_dir(source("units")).unwrap().map(Result::unwrap) {
            let name = file.file_name().into_string().unwrap();
            // The machine has a bus and targets already.
            if name.ends_with(".service") && name != "dbus.service" {
                fs::copy(file.path(), units.join(name)).unwrap();
            }
        }
        let groups = Groups::new(name);
        let directories: Vec<String> = groups.0.iter().map(|group| group.display().to_string()).collect();
        let output = File::create(dir.path().join("output")).unwrap();
        // The control group namespace is created after the process has entered the groups, so they
        // are the root groups of that namespace.
        let supervisor = Command::new("setsid")
            .arg(source("supervise.sh"))
            .arg(directories.join(" "))
            .args(["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"])
            .args(["--fork", "--kill-child=KILL"])
            .args([&source("machine.sh"), &root(), dir.path(), Path::new(name), &programs()])
            .env("PORTCULLIS_NODE", "test")
            .stdin(Stdio::piped())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let network = Arc::clone(network);
        let machine = Self { network, name: name.to_owned(), number, supervisor, systemd: 0, groups, dir };
        machine.connect();
        machine
    }

    /// Creates the link between the machine and the bridge.
    fn connect(&self) {
        let script = wait_for("the machine's first process", HANG, || {
            self.must_run();
            let unshare = children(self.supervisor.id()).into_iter().find(|pid| comm(*pid) == "unshare")?;
            children(unshare).first().copied()
        });
        let name = &self.name;
        self.network.ip(&format!("link add {name} type veth peer name eth0 netns {script}"));
        self.network.ip(&format!("link set {name} master br0 up"));
        ip_in(script, &format!("addr add {}/24 dev eth0", self.address()));
        ip_in(script, "link set eth0 up");
        ip_in(script, "link set lo up");
    }

    fn wait_until_running(&mut self) {
        let before = self.systemd;
        self.systemd = wait_for("systemd", HANG, || {
            self.must_run();
            self.find_systemd().filter(|found| *found != before)
        });
        wait_for("a running system", HANG, || {
            self.must_run();
            let output = self.command("systemctl").arg("is-system-running").output().unwrap();
            (output.stdout == b"running\n").then_some(())
        });
    }

    #[track_caller]
    fn must_run(&self) {
        let path = format!("/proc/{}/stat", self.supervisor.id());
        let state = fs::read_to_string(path).unwrap_or_default();
        assert!(!state.is_empty() && !state.contains(") Z "), "{} ended:\n{}", self.name, self.log());
    }

    /// Finds the machine's first process: the process that has the number 1 three namespaces deep.
    fn find_systemd(&self) -> Option<u32> {
        let unshare = children(self.supervisor.id()).into_iter().find(|pid| comm(*pid) == "unshare")?;
        let script = *children(unshare).first()?;
        let nspawn = children(script).into_iter().find(|pid| comm(*pid) == "systemd-nspawn")?;
        children(nspawn).into_iter().find(|pid| comm(*pid) == "systemd")
    }

    pub(crate) fn address(&self) -> String {
        format!("10.88.0.{}", self.number)
    }

    /// Returns the address of the machine's system bus, for clients outside.
    pub(crate) fn bus(&self) -> String {
        format!("unix:path=/proc/{}/root/run/dbus/system_bus_socket", self.systemd)
    }

    pub(crate) fn systemd(&self) -> u32 {
        self.systemd
    }

    /// Returns the path of a file that the machine sees below `/run/node`.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Prepares a program that runs on the machine. The programs of this workspace are in the path.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.systemd.to_string(), "--all", program]).stdin(Stdio::null());
        command.env_clear().env("PATH", "/opt/portcullis:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs a program on the machine, and returns what it printed.
    #[track_caller]
    pub(crate) fn run(&self, line: &[&str]) -> String {
        let output = self.try_run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {line:?}: {errors}", self.name);
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn try_run(&self, line: &[&str]) -> Output {
        self.command(line[0]).args(&line[1..]).output().unwrap()
    }

    /// Returns a property of a systemd unit, read from systemd itself.
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        self.run(&["systemctl", "show", unit, "--value", "--property", name]).trim().to_owned()
    }

    /// Writes a unit file and starts it. Its output is in the journal.
    pub(crate) fn install(&self, unit: &str, content: &str) {
        let path = format!("/proc/{}/root/etc/systemd/system/{unit}", self.systemd);
        fs::write(path, content).unwrap();
        self.run(&["systemctl", "daemon-reload"]);
        self.run(&["systemctl", "enable", "--now", "--quiet", unit]);
    }

    /// Drops all packets from and to the machine.
    pub(crate) fn cut(&self) {
        self.network.ip(&format!("link set {} down", self.name));
    }

    pub(crate) fn heal(&self) {
        self.network.ip(&format!("link set {} up", self.name));
    }

    /// Reboots the machine, and waits until it is running again. Files are kept.
    pub(crate) fn reboot(&mut self) {
        self.run(&["systemctl", "--no-block", "reboot"]);
        self.wait_until_running();
    }

    /// Shuts the machine down, and waits until all its processes have ended.
    pub(crate) fn power_off(&self) {
        // The signal is SIGRTMIN+4; see systemd(1).
        let status = Command::new("kill").args(["-s", "RTMIN+4", &self.systemd.to_string()]).status();
        assert!(status.unwrap().success());
        wait_for("an end of the machine", HANG, || {
            children(self.supervisor.id()).iter().all(|pid| comm(*pid) != "unshare").then_some(())
        });
    }

    /// Returns the output of the container and, if the machine is running, the end of its journal.
    pub(crate) fn log(&self) -> String {
        let console = fs::read(self.file("output")).unwrap_or_default();
        let journal = match self.systemd {
            0 => Vec::new(),
            _ => self.try_run(&["journalctl", "--no-pager", "--lines=200"]).stdout,
        };
        format!("{}{}", String::from_utf8_lossy(&console), String::from_utf8_lossy(&journal))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of {}:\n{}", self.name, self.log());
        }
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

#[track_caller]
fn ip_in(process: u32, arguments: &str) {
    let mut command = Command::new("nsenter");
    command.args(["-t", &process.to_string(), "--net", "ip"]).args(arguments.split(' '));
    let output = command.output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

fn children(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

fn comm(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet").join(name)
}

/// Returns the directory with the programs of this workspace.
fn programs() -> PathBuf {
    binary("portcullis").parent().unwrap().to_owned()
}

/// Returns the root directory that `rootfs.sh` has built beside the programs.
fn root() -> PathBuf {
    let root = programs().parent().unwrap().join("fleet-rootfs");
    assert!(root.exists(), "{} is missing: tests/run builds it", root.display());
    root
}

#[test]
fn machines_are_separate_reboot_and_leave_nothing_behind() {
    let network = Arc::new(Network::new());
    let mut one = Machine::boot(&network, "m1", 1);
    let two = Machine::boot(&network, "m2", 2);
    one.run(&["systemctl", "start", "quick.service"]);
    assert_eq!(one.property("quick.service", "ActiveState"), "active");
    assert_eq!(two.property("quick.service", "ActiveState"), "inactive");
    assert_eq!(one.run(&["cat", "/proc/sys/kernel/hostname"]), "m1\n");
    assert_ne!(one.run(&["cat", "/etc/machine-id"]), two.run(&["cat", "/etc/machine-id"]));
    let bus = format!("--address={}", one.bus());
    let busctl = Command::new("busctl").args([&bus, "status", "org.freedesktop.systemd1"]).status();
    assert!(busctl.unwrap().success(), "{bus}");
    assert!(one.run(&["portcullis", "--version"]).starts_with("portcullis "));
    assert!(!one.try_run(&["touch", "/opt/portcullis/test"]).status.success());
    assert!(root().join("tmp").read_dir().unwrap().next().is_none(), "the root directory has changed");
    fs::write(one.file("go"), "").unwrap();
    one.run(&["test", "-e", "/run/node/go"]);
    one.run(&["touch", "/etc/kept"]);

    let first = one.systemd();
    one.reboot();
    assert_ne!(one.systemd(), first);
    one.run(&["test", "-e", "/etc/kept"]);
    assert_eq!(one.property("quick.service", "ActiveState"), "inactive");
    assert!(!root().join("etc/kept").exists(), "the root directory has changed");

    one.power_off();
    assert!(!Path::new(&format!("/proc/{}", one.systemd())).exists());
    assert_eq!(two.property("quick.service", "ActiveState"), "inactive");
    let (groups, dir, systemd) = (two.groups.0.clone(), two.file(""), two.systemd());
    drop(two);
    assert!(groups.iter().chain([&dir]).all(|path| !path.exists()), "{groups:?}, {dir:?}");
    assert!(!Path::new(&format!("/proc/{systemd}")).exists());
}

#[test]
fn a_link_can_be_cut_and_healed() {
    let network = Arc::new(Network::new());
    let machines = Machine::boot_all(&network, &["m1", "m2"]);
    let (one, two) = (&machines[0], &machines[1]);
    // systemd accepts connections to this port.
    let socket = "[Socket]\nListenStream=700\nAccept=yes\n[Install]\nWantedBy=sockets.target\n";
    let service = "[Service]\nExecStart=/bin/echo hello\nStandardOutput=socket\n";
    fs::write(format!("/proc/{}/root/etc/systemd/system/greet@.service", two.systemd()), service).unwrap();
    two.install("greet.socket", socket);
    let greeting = |from: &dyn Fn(&str) -> Command| {
        let line = format!("exec 3<>/dev/tcp/{}/700; cat <&3", two.address());
        let output = from("timeout").args(["2", "bash", "-c", &line]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let (machine, outside) = (|p: &str| one.command(p), |p: &str| network.command(p));
    assert_eq!(greeting(&machine), "hello\n");
    assert_eq!(greeting(&outside), "hello\n");
    two.cut();
    assert_eq!(greeting(&machine), "");
    assert_eq!(greeting(&outside), "");
    two.heal();
    wait_for("a reply", HANG, || (greeting(&machine) == "hello\n").then_some(()));
}

/// A test that is killed cannot clean up; `supervise.sh` does it.
#[test]
fn a_killed_test_leaves_no_processes_and_no_groups() {
    let groups = Groups::new("killed");
    let directories: Vec<String> = groups.0.iter().map(|group| group.display().to_string()).collect();
    let mut test = Command::new("sh")
        .args(["-c", "sleep infinity | setsid \"$@\" & echo started; wait", "sh"])
        .arg(source("supervise.sh"))
        .arg(directories.join(" "))
        .args(["unshare", "--pid", "--fork", "--kill-child=KILL", "sh", "-c", "sleep infinity & wait"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let members = || fs::read_to_string(groups.0[0].join("cgroup.procs")).unwrap_or_default();
    wait_for("processes in the group", HANG, || (members().lines().count() >= 3).then_some(()));
    // The sleeping process stands for the test: it holds the supervisor's standard input open.
    let holder = children(test.id()).into_iter().find(|pid| comm(*pid) == "sleep").unwrap();
    let status = Command::new("kill").args(["-KILL", &holder.to_string()]).status().unwrap();
    assert!(status.success());
    wait_for("removed groups", HANG, || groups.0.iter().all(|group| !group.exists()).then_some(()));
    let _ = test.wait();
}

#[test]
fn the_script_of_a_machine_does_not_run_outside_namespaces() {
    for (spaces, known, expected) in [
        (&["--mount"][..], Some("test"), "not the first process"),
        (&["--mount", "--pid", "--fork", "--kill-child=KILL"], None, "not the machine of a test"),
    ] {
        let mut command = Command::new("unshare");
        command.args(spaces).arg(source("machine.sh")).args(["/nowhere"; 4]).env_remove("PORTCULLIS_NODE");
        let output = command.envs(known.map(|known| ("PORTCULLIS_NODE", known))).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && printed.contains(expected), "{output:?}");
    }
}
