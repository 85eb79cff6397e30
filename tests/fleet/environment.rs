//! The manager of an environment with real systemd nodes: `portcullis up`, a machine that joins,
//! two managers of which one is killed, and `juju node` over TLS.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{HANG, binary, wait_for};
use crate::node::Node;

/// A user with a home directory, and the processes that run there.
struct Home {
    dir: tempfile::TempDir,
    running: Vec<Running>,
}

struct Running(Child);

impl Running {
    /// Ends the process with SIGKILL.
    fn kill(&mut self) {
        // It may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Hook users have to reach their files.
        for path in [dir.path(), &dir.path().join("data")] {
            fs::create_dir_all(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        for program in ["open-port", "close-port", "opened-ports"] {
            binary(program);
        }
        Self { dir, running: Vec::new() }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary(program));
        command.args(arguments).env_clear().env("HOME", self.dir.path()).stdin(Stdio::null());
        command.env("XDG_CONFIG_HOME", self.path("config")).env("XDG_DATA_HOME", self.path("data"));
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("PORTCULLIS_UNIT_USERS", self.path("users.json"));
        command
    }

    /// Starts a program, and waits until its output contains `ready`. Returns the output so far.
    fn start(&mut self, name: &str, arguments: &[&str], ready: &str) -> String {
        let path = self.path(&format!("{name}.log"));
        let log = File::create(&path).unwrap();
        let mut command = self.command("portcullis", arguments);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.running.push(Running(command.spawn().unwrap()));
        wait_for(ready, HANG, || {
            let shown = fs::read_to_string(&path).unwrap();
            let is_failed = shown.lines().any(|line| line.starts_with("error:"));
            assert!(!is_failed, "{arguments:?}: {shown}");
            shown.contains(ready).then_some(shown)
        })
    }

    fn juju(&self, arguments: &[&str]) -> Output {
        self.command("juju", arguments).output().unwrap()
    }

    #[track_caller]
    fn done(&self, arguments: &[&str]) -> String {
        let output = self.juju(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "juju {arguments:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.done(arguments)).unwrap()
    }

    fn wait_until_online(&self, nodes: &[&str]) {
        wait_for("online nodes", HANG, || {
            let output = self.juju(&["node", "list", "--json"]);
            let listed: Value = serde_json::from_slice(&output.stdout).ok()?;
            let is_online = |name: &&str| {
                let rows = listed.as_array().into_iter().flatten();
                rows.clone().any(|row| row["node"] == **name && row["status"] == "online")
            };
            nodes.iter().all(is_online).then_some(())
        });
    }
}

#[track_caller]
fn assert_refused(output: &Output, code: i32, text: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(code) && errors.contains(text), "{output:?}");
}

/// The text after `before` up to the end of its line.
fn rest_of_line<'a>(text: &'a str, before: &str) -> &'a str {
    text.split_once(before).unwrap().1.lines().next().unwrap().trim()
}

#[test]
fn machines_of_an_environment_are_nodes_of_its_manager() {
    let (zero, one) = (Node::start(), Node::start());
    let mut operator = Home::new();
    let systemd = zero.address();
    let options = ["up", "--listen", "127.0.0.1:0", "--fleet", "127.0.0.1:0", "--systemd", &systemd];
    operator.start("up", &options, "is up;");
    let join = operator.done(&["add-machine", "--name", "web1", "--address", "127.0.0.1"]);
    let token = rest_of_line(&join, "portcullis join ").to_owned();
    let mut machine = Home::new();
    let joined = machine.command("portcullis", &["join", &token]).output().unwrap();
    assert!(joined.status.success(), "{joined:?}");
    let units = machine.path("units");
    let units = units.to_str().unwrap();
    let options = ["machine", "--id", "1", "--systemd", &one.address(), "--units-dir", units];
    let options = [&["--log-level", "info"][..], &options].concat();
    machine.start("machine", &options, "machine ready");
    operator.wait_until_online(&["0", "web1"]);

    // Jobs on both nodes, with the results of systemd.
    operator.done(&["node", "start", "web1", "quick.service"]);
    assert_eq!(one.property("quick.service", "ActiveState"), "active");
    assert_eq!(zero.property("quick.service", "ActiveState"), "inactive");
    operator.done(&["node", "start", "0", "quick.service"]);
    assert_eq!(zero.property("quick.service", "ActiveState"), "active");
    operator.done(&["node", "stop", "web1", "quick.service"]);
    assert_eq!(one.property("quick.service", "ActiveState"), "inactive");
    assert_refused(&operator.juju(&["node", "start", "web1", "failing.service"]), 1, "result 'failed'");
    assert_refused(&operator.juju(&["node", "start", "web9", "quick.service"]), 1, "there is no node 'web9'");
    assert_refused(&operator.juju(&["node", "start", "web1", "nothing.service"]), 1, "NoSuchUnit");

    // The status has the nodes, with their failed units.
    wait_for("a failed unit in the status", HANG, || {
        let node = operator.json(&["status", "--format", "json"])["nodes"]["web1"].clone();
        assert_eq!(node["status"], json!("online"), "{node}");
        node.to_string().contains("failing.service").then_some(())
    });

    // An added operator has a certificate with the same rights; a machine's certificate has not.
    operator.done(&["operator", "add", "alice"]);
    let alice = Home::new();
    let (from, to) = (operator.path("config/portcullis"), alice.path("config/portcullis"));
    fs::create_dir_all(to.join("local-identity")).unwrap();
    fs::set_permissions(to.join("local-identity"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::copy(from.join("local-operators/alice.json"), to.join("local.json")).unwrap();
    let identity = |from: &Path, name: &str, certificate: &str| {
        for end in ["pem", "key"] {
            let path = to.join(format!("local-identity/operator.{end}"));
            fs::copy(from.join(format!("{name}.{end}")), &path).unwrap();
            let mode = if end == "key" { 0o600 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        assert!(to.join("local-identity/operator.pem").exists(), "{certificate}");
    };
    assert_refused(&alice.juju(&["node", "list"]), 1, "no certificate of the operator");
    identity(&from.join("local-operators"), "alice", "an added operator's");
    wait_for("the rights of the operator", HANG, || {
        alice.juju(&["node", "start", "web1", "quick.service"]).status.success().then_some(())
    });
    identity(&machine.path("data/portcullis/local/identity"), "machine-1", "a machine's");
    let refused = alice.juju(&["node", "stop", "web1", "quick.service"]);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(one.property("quick.service", "ActiveState"), "active");
    identity(&from.join("local-operators"), "alice", "an added operator's");
    operator.done(&["operator", "remove", "alice"]);
    assert!(!alice.juju(&["node", "stop", "web1", "quick.service"]).status.success());

    // A machine that is terminated is no node any more.
    operator.done(&["terminate-machine", "1", "--force"]);
    wait_for("the end of a node", HANG, || {
        let listed = operator.done(&["node", "list"]);
        (!listed.contains("web1")).then_some(())
    });
    assert_eq!(one.property("quick.service", "ActiveState"), "active", "systemd units stay");
}

#[test]
fn a_standby_leads_when_the_manager_is_killed() {
    let node = Node::start();
    let mut operator = Home::new();
    let data = operator.path("keeper");
    let data = data.to_str().unwrap();
    let listening =
        operator.start("keeper", &["keeper", "--data-dir", data, "--listen", "127.0.0.1:0"], "listening on");
    let store = rest_of_line(&listening, "listening on ").to_owned();
    operator.done(&["--zookeeper", &store, "bootstrap"]);
    assert_refused(&operator.juju(&["node", "list"]), 1, "no manager has led");
    let options = ["controller", "--provider", "memory", "--fleet", "127.0.0.1:0"];
    let options = [&["--log-level", "info"][..], &options].concat();
    operator.start("first", &options, "manager leads");
    operator.done(&["add-machine", "--name", "n1", "--address", "127.0.0.1"]);
    let units = operator.path("units");
    let options = ["machine", "--id", "0", "--systemd", &node.address(), "--units-dir"];
    let options = [&["--log-level", "info"][..], &options, &[units.to_str().unwrap()]].concat();
    operator.start("machine", &options, "registered");
    operator.wait_until_online(&["n1"]);
    operator.done(&["node", "start", "n1", "quick.service"]);
    let pid = node.property("quick.service", "MainPID");

    let options = ["--log-level", "info", "manager", "--bus", "none", "--listen", "127.0.0.1:0"];
    operator.start("second", &options, "listening on");
    let second = i32::try_from(operator.running[3].0.id()).unwrap();
    kill_process(Pid::from_raw(second).unwrap(), Signal::HUP).unwrap();
    wait_for("the end of no manager", HANG, || {
        let log = fs::read_to_string(operator.path("second.log")).unwrap();
        log.contains("SIGHUP ignored").then_some(())
    });
    operator.running[1].kill();
    operator.wait_until_online(&["n1"]);
    assert_eq!(node.property("quick.service", "MainPID"), pid, "the unit was touched");
    operator.done(&["node", "restart", "n1", "quick.service"]);
    assert_ne!(node.property("quick.service", "MainPID"), pid);
    let second = fs::read_to_string(operator.path("second.log")).unwrap();
    assert!(second.contains("manager leads"), "{second}");
}
