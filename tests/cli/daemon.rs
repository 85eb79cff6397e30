//! `portcullis up`: start, stop, restart, and two instances at the same time.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::harness::{golden, wait_for};
use crate::operator::{Operator, Output, fixture_charm, output_of};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A running `portcullis`, killed if the test ends before it does.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) addr: String,
}

impl Daemon {
    fn up(operator: &Operator) -> Self {
        Self::start(operator.command("portcullis").args(["up", "--listen", "127.0.0.1:0"]))
    }

    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child =
            command.env_remove("JUJU_ZOOKEEPER").stdout(Stdio::piped()).spawn().expect("portcullis starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its stdout")).read_line(&mut line).expect("a line");
        let addr = line.trim_end().strip_prefix("listening on ").expect("where it listens").to_owned();
        Self { child, addr }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal and returns the exit code.
    pub(crate) fn stop(mut self, signal: &str) -> Option<i32> {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        wait_for("end of portcullis", DEADLINE, || self.child.try_wait().expect("wait")).code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The process has ended already, unless the test failed.
        let _ = (self.child.kill(), self.child.wait());
    }
}

/// Runs `juju` without global flags and without environment variables.
pub(crate) fn juju(operator: &Operator, args: &[&str]) -> Output {
    output_of(operator.command("juju").env_remove("JUJU_ZOOKEEPER").args(args))
}

#[test]
fn up_continues_after_a_restart() {
    let operator = Operator::with_store("");
    let first = Daemon::up(&operator);
    let deployed = juju(&operator, &["deploy", &fixture_charm("wordpress")]);
    assert_eq!(deployed.code, 0, "{deployed:?}");
    assert_eq!(juju(&operator, &["expose", "wordpress"]).stderr, "Service 'wordpress' was exposed.\n");
    // The machine has an agent, sends heartbeats, and the charm's hooks ran. Only the time of the
    // last beat may differ. Its firewall is a dry run, which is shown once, under the machine.
    let dry = "firewall: dry-run\n    firewall-info: would open 80/tcp from 0.0.0.0/0, 80/tcp from ::/0\n";
    let running = |shown: &String| {
        ["agent-state: running", "agent-state: started", "flag: OK\n    health: ok\n", dry]
            .iter()
            .all(|part| shown.contains(part))
    };
    let status = || {
        let shown = juju(&operator, &["status"]).stdout;
        let same = shown.lines().filter(|line| !line.trim_start().starts_with("last-beat: "));
        same.map(|line| format!("{line}\n")).collect::<String>()
    };
    let before = wait_for("a unit that is started", DEADLINE, || Some(status()).filter(running));
    assert!(before.contains("instance-id: local") && before.contains("machine: 0"), "{before}");
    assert!(before.contains("        open-ports:\n        - 80/tcp\n"), "{before}");
    assert!(!before.contains("pending") && !before.contains("problem"), "{before}");
    let plan = juju(&operator, &["firewall", "plan"]);
    assert!(plan.code == 0 && plan.stdout.contains("dry-run"), "{plan:?}");
    let wait_for_explanation = juju(&operator, &["firewall", "explain", "0"]).stdout;
    assert!(
        wait_for_explanation.contains("a dry run for nftables on the machine itself"),
        "{wait_for_explanation}"
    );
    let tables = output_of(Command::new("nft").args(["list", "tables"]));
    assert!(tables.code == 0 && !tables.stdout.contains("portcullis"), "{tables:?}");
    let mode = fs::metadata(operator.home().join("data/portcullis/local")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);

    let up = |args: &[&str]| {
        output_of(operator.command("portcullis").env_remove("JUJU_ZOOKEEPER").arg("up").args(args))
    };
    up(&["--listen", "127.0.0.1:0"]).is_refusal(1, "is in use by another keeper");
    up(&["--listen", &first.addr, "--data-dir", "other"])
        .is_refusal(1, &format!("cannot listen on {}", first.addr));
    up(&["--listen", "127.0.0.1:0", "--data-dir", "third"])
        .is_refusal(1, "environment 'local' belongs to the store at");
    assert_eq!(status(), before);

    assert_eq!(first.stop("-TERM"), Some(0));
    juju(&operator, &["status"]).is_refusal(1, "cannot reach the store");
    golden::refusals("up");
    let second = Daemon::up(&operator);
    let after = wait_for("the machine's agent", DEADLINE, || Some(status()).filter(running));
    assert_eq!(after, before);
    assert_eq!(second.stop("-INT"), Some(0));
}

#[test]
fn up_continues_after_a_crash_before_bootstrap() {
    let operator = Operator::with_store("");
    let mut first = Daemon::up(&operator);
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    // The state after a crash between saving the credentials and creating the tree.
    fs::remove_dir_all(operator.home().join("data/portcullis")).unwrap();
    for file in ["local.json", "local-controller.json"] {
        let path = operator.config(file);
        let mut known: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert!(known.as_object_mut().unwrap().remove("cluster-id").is_some());
        fs::write(&path, known.to_string()).unwrap();
    }
    let second = Daemon::up(&operator);
    let status = juju(&operator, &["status"]);
    assert_eq!(status.code, 0, "{status:?}");
    assert_eq!(second.stop("-TERM"), Some(0));
}

#[test]
fn up_refuses_a_store_that_lost_its_environment() {
    let operator = Operator::with_store("");
    let up = || {
        output_of(operator.command("portcullis").env_remove("JUJU_ZOOKEEPER").args([
            "up",
            "--listen",
            "127.0.0.1:0",
        ]))
    };
    assert_eq!(Daemon::up(&operator).stop("-TERM"), Some(0));
    let (data, aside) = (operator.home().join("data/portcullis/local"), operator.home().join("aside"));
    fs::rename(&data, &aside).unwrap();
    up().is_refusal(1, "environment 'local' was created in the store at 127.0.0.1:");
    golden::refusals("up_empty_store");
    fs::remove_dir_all(&data).unwrap();
    fs::rename(&aside, &data).unwrap();
    let again = Daemon::up(&operator);
    let shown = juju(&operator, &["status"]);
    assert_eq!((shown.code, shown.stderr.as_str()), (0, ""), "{shown:?}");
    assert_eq!(again.stop("-TERM"), Some(0));
}

#[test]
fn metrics_off_loopback_are_warned_about() {
    let operator = Operator::with_store("");
    for (addr, is_warned) in [("127.0.0.1:0", false), ("0.0.0.0:0", true)] {
        let log = operator.home().join("log");
        let mut command = operator.command("portcullis");
        command.args(["keeper", "--data-dir", "keeper", "--listen", "127.0.0.1:0", "--metrics", addr]);
        let keeper = Daemon::start(command.stderr(fs::File::create(&log).unwrap()));
        let printed = wait_for("an address of metrics", DEADLINE, || {
            fs::read_to_string(&log).ok().filter(|printed| printed.contains("metrics on http://"))
        });
        let warning = "metrics are served as plain text on an address that is not loopback";
        assert_eq!(printed.contains(warning), is_warned, "{printed}");
        assert_eq!(keeper.stop("-TERM"), Some(0));
    }
}

#[test]
fn a_charm_path_may_be_invalid_utf8() {
    use std::os::unix::ffi::OsStrExt as _;
    let operator = Operator::with_store("");
    let up = Daemon::up(&operator);
    let name = std::ffi::OsStr::from_bytes(b"charm-\xff");
    output_of(operator.command("juju").env_remove("JUJU_ZOOKEEPER").arg("deploy").arg(name))
        .is_refusal(1, "metadata.yaml is missing");
    golden::refusals("charm_path_not_utf8");
    assert_eq!(up.stop("-TERM"), Some(0));
}
