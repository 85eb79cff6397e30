//! Machines that are heard, from end to end: a tracker in `portcullis up` says in the store where it is, another machine's
//! agent finds it there, and `juju status` shows both. What a tracker makes of beats is tested elsewhere.

use std::fs::{self, File};
use std::process::{Child, Command};

use portcullis::store::tree::Tree as _;
use portcullis::store::{Credential, Environment, ZkTree, paths};
use serde_json::Value;

use crate::daemon::{DEADLINE, Daemon, juju};
use crate::harness::wait_for;
use crate::operator::Operator;

const UP: [&str; 3] = ["up", "--listen", "127.0.0.1:0"];

/// A process that ends with the test.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.env_remove("JUJU_ZOOKEEPER").spawn().expect("it starts"))
    }

    fn ends(mut self) -> Option<i32> {
        let sent = Command::new("kill").arg(self.0.id().to_string()).status().expect("kill");
        assert!(sent.success());
        wait_for("its end", DEADLINE, || self.0.try_wait().expect("wait")).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Ended already in every test that passes.
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn machine(operator: &Operator, id: &str) -> Value {
    let shown = juju(operator, &["status", "--format", "json"]);
    assert_eq!(shown.code, 0, "{shown:?}");
    serde_json::from_str::<Value>(&shown.stdout).expect("JSON")["machines"][id].clone()
}

fn is_heard(operator: &Operator, id: &str, health: &str) {
    wait_for(&format!("machine {id} {health}"), DEADLINE, || {
        (machine(operator, id)["health"] == health).then_some(())
    });
}

#[test]
fn machines_find_the_tracker_in_the_store_and_are_heard() {
    let operator = Operator::with_store("");
    let up = Daemon::start(operator.command("portcullis").args(UP));
    let added = juju(&operator, &["add-machine", "--instance-id", "i-1"]);
    assert_eq!(added.code, 0, "{added:?}");
    // Nobody tells it where to beat but the store.
    let agent = Running::start(operator.command("portcullis").args(["machine", "--id", "1"]));
    for id in ["0", "1"] {
        is_heard(&operator, id, "ok");
    }
    let seen = machine(&operator, "1");
    assert!(seen["agent-state"] == "running" && seen["flag"] == "OK", "{seen}");
    a_new_last_beat_alone_repaints_the_status(&operator);
    assert_eq!(agent.ends(), Some(0));
    is_heard(&operator, "1", "stopped");
    assert_eq!(machine(&operator, "0")["health"], "ok");
    assert_eq!(up.ends("-TERM"), Some(0));
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
        let text = fs::read_to_string(&seen).expect("what was seen");
        let pictures: Vec<&str> = text.split("---\n").skip(1).collect();
        let [.., before, last] = pictures[..] else { return None };
        (before != last && without_beats(before) == without_beats(last)).then_some(())
    });
    assert_eq!(watching.ends(), Some(0));
}

/// Nobody but the operator may read or write there any more.
fn lock_out(operator: &Operator, up: &Daemon) {
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
fn up_goes_on_without_its_tracker_and_says_so() {
    let operator = Operator::with_store("");
    let said = operator.home().join("said");
    let log = File::create(&said).expect("a file");
    let up = Daemon::start(operator.command("portcullis").args(UP).stderr(log));
    is_heard(&operator, "0", "ok");
    lock_out(&operator, &up);
    let warning = wait_for("a warning", DEADLINE, || {
        let said = fs::read_to_string(&said).expect("what was said");
        said.lines().find(|line| line.contains("the tracker of heartbeats has ended: ")).map(str::to_owned)
    });
    assert!(
        warning.contains("WARN") && warning.contains(&paths::heartbeat_batches().to_string()),
        "{warning}"
    );
    // The rest is as it was, and nobody vouches for the machine's beats.
    is_heard(&operator, "0", "unknown");
    assert_eq!(machine(&operator, "0")["agent-state"], "running");
    assert_eq!(up.ends("-TERM"), Some(0));
}
