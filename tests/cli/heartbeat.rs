//! Heartbeats from end to end: the tracker of `portcullis up` publishes its address in the store,
//! another machine's agent finds it there, and `juju status` shows both machines. The rules of the
//! tracker are tested elsewhere.

use std::fs::{self, File};
use std::process::{Child, Command};

use portcullis::store::tree::Tree as _;
use portcullis::store::{Credential, Environment, ZkTree, paths};
use serde_json::Value;

use crate::controller::ask_metrics;
use crate::daemon::{DEADLINE, Daemon, juju};
use crate::harness::{golden, wait_for};
use crate::operator::{Operator, Transcript};

const UP: [&str; 3] = ["up", "--listen", "127.0.0.1:0"];

/// A process that is killed when the test ends.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.env_remove("JUJU_ZOOKEEPER").spawn().expect("it starts"))
    }

    fn stop(mut self) -> Option<i32> {
        let sent = Command::new("kill").arg(self.0.id().to_string()).status().expect("kill");
        assert!(sent.success());
        wait_for("its end", DEADLINE, || self.0.try_wait().expect("wait")).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process has ended already, unless the test failed.
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn machine(operator: &Operator, id: &str) -> Value {
    let shown = juju(operator, &["status", "--format", "json"]);
    assert_eq!(shown.code, 0, "{shown:?}");
    serde_json::from_str::<Value>(&shown.stdout).expect("JSON")["machines"][id].clone()
}

fn has_health(operator: &Operator, id: &str, health: &str) {
    wait_for(&format!("machine {id} {health}"), DEADLINE, || {
        (machine(operator, id)["health"] == health).then_some(())
    });
}

#[test]
fn machines_find_the_tracker_in_the_store() {
    let operator = Operator::with_store("");
    let up = Daemon::start(operator.command("portcullis").args(UP));
    // A late beat on a busy machine must not cause a warning.
    let patient = juju(&operator, &["heartbeat", "params", "Warntime=3000", "Errtime=3600"]);
    assert_eq!(patient.code, 0, "{patient:?}");
    let added = juju(&operator, &["add-machine", "--instance-id", "i-1"]);
    assert_eq!(added.code, 0, "{added:?}");
    // The agent finds the tracker in the store only.
    let agent = Running::start(operator.command("portcullis").args(["machine", "--id", "1"]));
    for id in ["0", "1"] {
        has_health(&operator, id, "ok");
    }
    let seen = machine(&operator, "1");
    assert!(seen["agent-state"] == "running" && seen["flag"] == "OK", "{seen}");
    heartbeat_commands_print_the_golden_text(&operator, &up);
    a_new_last_beat_alone_repaints_the_status(&operator);
    assert_eq!(agent.stop(), Some(0));
    has_health(&operator, "1", "stopped");
    assert_eq!(machine(&operator, "0")["health"], "ok");
    assert_eq!(up.stop("-TERM"), Some(0));
}

fn heartbeat_commands_print_the_golden_text(operator: &Operator, up: &Daemon) {
    let mut shown = Transcript::of(operator);
    // The numbers begin above the time.
    let listed = operator.does(&["heartbeat", "list", "--format", "json"]).stdout;
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    for component in &listed {
        golden::placeholder(&component["sequence"].to_string(), "SEQUENCE");
    }
    for args in [
        &["heartbeat", "list"][..],
        &["heartbeat", "list", "--unwell"],
        &["heartbeat", "list", "--format", "json"],
        &["heartbeat", "show", "1"],
        &["heartbeat", "show", "nobody"],
        &["heartbeat", "show", "a/b"],
        &["heartbeat", "params"],
        &["heartbeat", "params", "Warntime"],
        &["heartbeat", "params", "Warntime=0"],
        &["heartbeat", "release"],
        &["machine", "maintenance", "7"],
        &["machine", "maintenance", "a/b"],
        &["machine", "maintenance", "0", "--for", "soon"],
        &["machine", "maintenance", "0", "--for", "1h"],
        &["machine", "maintenance", "0", "--end"],
    ] {
        shown.juju(&[&["--zookeeper", &up.addr], args].concat());
    }
    shown.is("heartbeat.txt");
}

fn a_new_last_beat_alone_repaints_the_status(operator: &Operator) {
    let seen = operator.home().join("seen");
    let mut command = operator.command("juju");
    let output = File::create(&seen).expect("a file");
    let watching = Running::start(command.args(["status", "--watch"]).stdout(output));
    let is_last_beat = |line: &&str| line.trim_start().starts_with("last-beat: ");
    let without_beats = |picture: &str| -> Vec<String> {
        picture.lines().filter(|line| !is_last_beat(line)).map(str::to_owned).collect()
    };
    wait_for("a picture with nothing new but beats", DEADLINE, || {
        let text = fs::read_to_string(&seen).expect("the recorded output");
        let pictures: Vec<&str> = text.split("---\n").skip(1).collect();
        let [.., before, last] = pictures[..] else { return None };
        (before != last && without_beats(before) == without_beats(last)).then_some(())
    });
    assert_eq!(watching.stop(), Some(0));
}

/// Revokes the tracker's access to its znodes.
fn revoke_access(operator: &Operator, up: &Daemon) {
    let file = fs::read(operator.config("local.json")).expect("credentials");
    let held: Value = serde_json::from_slice(&file).expect("JSON");
    let credential = Credential::parse(held["auth"].as_str().expect("auth")).expect("a credential");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let address = up.addr.parse().expect("an address");
        let tree = ZkTree::connect(&address, Some(&credential)).await.expect("a session");
        let environment = Environment::open(tree).await.expect("an environment");
        let nobody = environment.info().roles.service_credentials();
        environment.tree().set_acl(&paths::heartbeat_batches(), nobody).await.expect("a lock");
    });
}

#[test]
fn up_continues_after_a_failure_of_its_tracker() {
    let operator = Operator::with_store("");
    let printed = operator.home().join("printed");
    let log = File::create(&printed).expect("a file");
    let up = Daemon::start(operator.command("portcullis").args(UP).stderr(log));
    has_health(&operator, "0", "ok");
    revoke_access(&operator, &up);
    let warning = wait_for("a warning", DEADLINE, || {
        let printed = fs::read_to_string(&printed).expect("the output");
        printed.lines().find(|line| line.contains("the heartbeat tracker failed: ")).map(str::to_owned)
    });
    assert!(
        warning.contains("WARN") && warning.contains(&paths::heartbeat_batches().to_string()),
        "{warning}"
    );
    // The other roles continue, and the health of the machine is unknown.
    has_health(&operator, "0", "unknown");
    assert_eq!(machine(&operator, "0")["agent-state"], "running");
    assert_eq!(up.stop("-TERM"), Some(0));
}

#[test]
fn up_exposes_the_metrics_of_all_its_roles() {
    let operator = Operator::with_store("");
    let log = operator.home().join("up.log");
    let stderr = File::create(&log).expect("a file");
    let metrics = ["--metrics", "127.0.0.1:0"];
    let up = Daemon::start(operator.command("portcullis").args(UP).args(metrics).stderr(stderr));
    let ready = "keeper: serving\nmachine: leading\nheartbeat: tracking\n";
    wait_for("readiness", DEADLINE, || {
        (ask_metrics(&log, "/readyz") == (200, ready.to_owned())).then_some(())
    });
    // The keeper publishes its figures once a second.
    let metrics = wait_for("figures of the keeper", DEADLINE, || {
        let (status, text) = ask_metrics(&log, "/metrics");
        assert_eq!(status, 200);
        (!text.contains("portcullis_keeper_sessions 0\n")).then_some(text)
    });
    for name in [
        "portcullis_keeper_connections",
        "portcullis_keeper_requests_total",
        "portcullis_keeper_fsyncs_total",
        "portcullis_keeper_refusals_total{reason=\"rights\"}",
        "portcullis_keeper_znodes",
        "portcullis_keeper_data_bytes",
        "portcullis_firewall_passes_total",
        "portcullis_heartbeat_beats_total",
    ] {
        assert!(metrics.lines().any(|line| line.starts_with(name)), "{name} is not in\n{metrics}");
    }
    assert_eq!(up.stop("-TERM"), Some(0));
}
