//! Nodes for tests: user instances of systemd, each with its own bus, directories, mounts,
//! processes and control groups. A node sees its directory as `/run/node`; see `node.sh`.
//! Expectations about the fleet do not belong here. Needs root.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::harness::groups::Groups;
use crate::harness::{HANG, wait_for};

/// A running node. Dropping it kills all its processes.
#[derive(Debug)]
pub(crate) struct Node {
    /// The end of this process ends all processes of the node.
    unshare: Child,
    /// The process id of systemd, as seen from outside.
    systemd: u32,
    groups: Groups,
    dir: tempfile::TempDir,
}

impl Node {
    /// Starts a node with the units of `tests/fleet/units`, and waits until systemd is on its bus.
    pub(crate) fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("portcullis-node-").tempdir().unwrap();
        for name in ["run", "home", "config", "units"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for file in fs::read_dir(source("units")).unwrap().map(Result::unwrap) {
            fs::copy(file.path(), dir.path().join("units").join(file.file_name())).unwrap();
        }
        std::os::unix::fs::symlink("/dev/null", dir.path().join("units/masked.service")).unwrap();
        let groups = Groups::new("node");
        // The process enters the groups before the control group namespace is created, so they are
        // the root groups of that namespace.
        let spaces = "--mount --pid --ipc --cgroup --fork --kill-child=KILL";
        let line = format!("{}exec setpriv --pdeathsig KILL unshare {spaces} \"$@\"", groups.enter());
        let output = File::create(dir.path().join("output")).unwrap();
        let unshare = Command::new("sh")
            .args(["-euc", &line, "sh"])
            .arg(source("node.sh"))
            .arg(dir.path())
            .env("PORTCULLIS_NODE", "test")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let mut node = Self { unshare, systemd: 0, groups, dir };
        wait_for("systemd on the bus", HANG, || {
            let ended = node.unshare.try_wait().unwrap();
            assert!(ended.is_none(), "the node ended:\n{}", node.log());
            node.busctl(&["status", "org.freedesktop.systemd1"]).status.success().then_some(())
        });
        node.systemd = node.find_systemd();
        node
    }

    /// Returns the address of the node's bus.
    pub(crate) fn address(&self) -> String {
        format!("unix:path={}", self.file("run/bus").display())
    }

    /// Returns the path of a file that the node sees below `/run/node`.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the process id of systemd.
    pub(crate) fn systemd(&self) -> u32 {
        self.systemd
    }

    /// Returns the control groups of the node.
    pub(crate) fn groups(&self) -> &[PathBuf] {
        &self.groups.0
    }

    /// Lets `slow.service` finish its start.
    pub(crate) fn let_slow_start(&self) {
        File::create(self.file("go")).unwrap();
    }

    /// Runs `systemctl` on the node, and returns its output.
    #[track_caller]
    pub(crate) fn systemctl(&self, arguments: &[&str]) -> String {
        let output = self.command("systemctl").arg("--user").args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "systemctl {arguments:?}: {errors}\n{}", self.log());
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns a property of a unit, read from systemd itself.
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        self.systemctl(&["show", unit, "--value", "--property", name]).trim().to_owned()
    }

    /// Prepares a program that runs inside the node.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.systemd.to_string(), "--mount", "--pid", program]).stdin(Stdio::null());
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/run/node/home");
        command.env("XDG_RUNTIME_DIR", "/run/node/run").env("XDG_CONFIG_HOME", "/run/node/config");
        command
    }

    /// Runs `busctl` on the node's bus, from outside.
    pub(crate) fn busctl(&self, arguments: &[&str]) -> Output {
        let address = format!("--address={}", self.address());
        Command::new("busctl").arg(address).args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Returns the output of systemd and of its units.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.file("output")).unwrap_or_default()).into_owned()
    }

    /// Finds systemd among the processes of the node: the child of the shell in `node.sh`.
    fn find_systemd(&self) -> u32 {
        let child = |pid: u32| -> Option<u32> {
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
            children.split_whitespace().next()?.parse().ok()
        };
        wait_for("systemd's process", HANG, || {
            let systemd = child(child(self.unshare.id())?)?;
            (fs::read_to_string(format!("/proc/{systemd}/comm")).ok()? == "systemd\n").then_some(systemd)
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the node:\n{}", self.log());
        }
        let _ = (self.unshare.kill(), self.unshare.wait());
    }
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet").join(name)
}

#[test]
fn nodes_are_separate_and_leave_nothing_behind() {
    let (one, two) = (Node::start(), Node::start());
    assert_ne!(one.systemd(), two.systemd());
    one.systemctl(&["start", "quick.service", "templated@1.service"]);
    assert_eq!(one.property("quick.service", "ActiveState"), "active");
    assert_eq!(two.property("quick.service", "ActiveState"), "inactive");
    let sleeper = one.property("quick.service", "ControlGroup");
    let group = one.groups().iter().map(|group| group.join(sleeper.trim_start_matches('/')));
    assert!(group.clone().any(|group| group.exists()), "{sleeper} is not below {:?}", one.groups());
    // The node sees neither /tmp nor /run of this machine, and cannot write anywhere else.
    let listed = one.command("ls").args(["/tmp", "/run"]).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    // mount(8) creates a directory of its own.
    let listed: Vec<&str> = listed.split_whitespace().filter(|name| *name != "mount").collect();
    assert_eq!(listed, ["/run:", "node", "systemd", "/tmp:"]);
    assert!(!one.command("touch").arg("/usr/portcullis-test").output().unwrap().status.success());
    let (groups, dir, systemd) = (one.groups().to_vec(), one.file(""), one.systemd());
    drop(one);
    assert!(groups.iter().chain([&dir]).all(|path| !path.exists()), "{groups:?}, {dir:?}");
    assert!(!Path::new(&format!("/proc/{systemd}")).exists());
    assert_eq!(two.property("quick.service", "ActiveState"), "inactive");
}

#[test]
fn the_script_of_a_node_does_not_run_outside_namespaces() {
    for (spaces, known, expected) in [
        (&["--mount"][..], Some("test"), "not the first process"),
        (&["--mount", "--pid", "--fork", "--kill-child=KILL"], None, "not the node of a test"),
    ] {
        let mut command = Command::new("unshare");
        command.args(spaces).arg(source("node.sh")).arg("/nowhere").env_remove("PORTCULLIS_NODE");
        let output = command.envs(known.map(|known| ("PORTCULLIS_NODE", known))).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && printed.contains(expected), "{output:?}");
    }
}
