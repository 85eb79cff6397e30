//! Plain machines, which no controller launches: `juju status` shows them from the presence of
//! their agents.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{golden, wait_for};
use crate::machine::Agent;
use crate::operator::{Operator, fixture_charm, output_of};

const DEADLINE: Duration = Duration::from_secs(60);

on_both_stores![
    a_plain_machine_is_shown_as_running_with_its_address,
    a_returning_agent_of_a_terminated_machine_leaves,
    a_machine_leaves_by_hand,
];

pub(crate) fn agent(operator: &Operator, id: &str, more: &[&str]) -> Agent {
    let log = operator.home().join(format!("machine-{id}"));
    let child = operator
        .command("portcullis")
        .args(["--log-level", "info", "machine", "--id", id])
        .args(more)
        .stdout(Stdio::null())
        .stderr(File::create(&log).expect("a log"))
        .spawn()
        .expect("portcullis starts");
    Agent { child, log }
}

#[track_caller]
pub(crate) fn wait_for_state(operator: &Operator, id: &str, state: &str) -> Value {
    wait_for(&format!("machine {id} {state}"), DEADLINE, || {
        let machine = operator.status()["machines"][id].clone();
        // The agent reports its host after it has claimed the machine.
        (machine["agent-state"] == state && machine["dns-name"].is_string()).then_some(machine)
    })
}

fn a_plain_machine_is_shown_as_running_with_its_address(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine"]);
    operator.does(&["add-machine", "--name", "web", "--address", "192.0.2.9"]);
    let machines = operator.status()["machines"].clone();
    assert_eq!(machines["0"]["instance-id"], "pending");
    assert_eq!(
        (&machines["1"]["agent-state"], &machines["1"]["name"]),
        (&"not-started".into(), &"web".into())
    );

    let first = agent(&operator, "0", &["--address", "192.0.2.7", "--address", "2001:db8::7"]);
    let second = agent(&operator, "1", &[]);
    let shown = wait_for_state(&operator, "0", "running");
    assert_eq!(shown["dns-name"], "192.0.2.7");
    assert!(shown["hostname"].is_string() && shown["instance-id"].is_null(), "{shown}");
    let shown = wait_for_state(&operator, "1", "running");
    assert_eq!(shown["dns-name"], "192.0.2.9", "the operator's address, not the agent's");
    let table = operator.does(&["status", "--format", "tabular"]).stdout;
    assert!(table.lines().any(|line| line.starts_with("1 ") && line.ends_with(" web")), "{table}");

    drop((first, second));
    let shown = wait_for_state(&operator, "0", "down");
    assert_eq!(shown["dns-name"], "192.0.2.7", "the last known address");
}

/// Deploys a unit to machine 0 and waits until its service runs. Returns a file that the agent
/// wrote for the unit.
fn started_unit(operator: &Operator) -> PathBuf {
    operator.does(&["deploy", &fixture_charm("hello"), "--to", "0"]);
    wait_for("a started unit", DEADLINE, || {
        let status = operator.status();
        (status["services"]["hello"]["units"]["hello/0"]["agent-state"] == "started").then_some(())
    });
    let mut found = Vec::new();
    files_below(operator.home(), &mut found);
    let name = found.into_iter().find(|path| path.ends_with("runs/unit-0000000000/name"));
    name.expect("the files of the unit")
}

fn files_below(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            files_below(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// Counts processes whose environment names the unit's credentials.
fn processes_of_units(operator: &Operator) -> usize {
    let home = operator.home().to_str().expect("UTF-8").to_owned();
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let environments = processes.filter_map(|process| fs::read(process.path().join("environ")).ok());
    let is_units = |environ: &Vec<u8>| {
        let entries = String::from_utf8_lossy(environ);
        entries.split('\0').any(|entry| entry.starts_with("JUJU_CREDENTIALS=") && entry.contains(&home))
    };
    environments.filter(is_units).count()
}

fn a_returning_agent_of_a_terminated_machine_leaves(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine"]);
    let mut first = agent(&operator, "0", &[]);
    let file = started_unit(&operator);
    assert!(processes_of_units(&operator) > 0, "control: the service runs");
    first.child.kill().expect("killed");
    first.child.wait().expect("gone");
    wait_for_state(&operator, "0", "down");
    operator.is_refused(&["terminate-machine", "0"], 1, "Resources are currently assigned to machine 0");
    operator.does(&["remove-unit", "hello/0"]);
    operator.is_refused(&["terminate-machine", "0"], 1, "the agent of machine 0 is down");

    // Control: while the machine is in the store, an agent that cannot find the tombstone removes
    // nothing of it.
    operator.does(&["terminate-machine", "--force", "0"]);
    assert!(file.exists() && processes_of_units(&operator) > 0, "no agent has run since");
    let machine_file = operator.config("local-machines/machine-0000000000.json");
    assert!(machine_file.exists());
    let mut second = agent(&operator, "0", &[]);
    assert_eq!(second.end(), Some(3));
    second.record(Some(3));
    assert_eq!((file.exists(), machine_file.exists(), processes_of_units(&operator)), (false, false, 0));
    // Without the machine file there is nothing to start with.
    let again = output_of(operator.command("portcullis").args(["machine", "--id", "0"]));
    again.is_refusal(1, "Machine 0 was not found");
    golden::refusals("machine_leaves");
}

fn a_machine_leaves_by_hand(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine"]);
    let units = operator.home().join("elsewhere");
    let mut running = operator.command("portcullis");
    running.args(["machine", "--id", "0", "--units-dir"]).arg(&units);
    // As a service whose data directory is another one than the operator's.
    running.env("XDG_DATA_HOME", operator.home().join("service")).stdout(Stdio::null());
    let log = operator.home().join("machine-0");
    let child = running.stderr(File::create(&log).expect("a log")).spawn().expect("portcullis starts");
    let running = Agent { child, log };
    let file = started_unit(&operator);
    assert!(file.starts_with(&units), "{}", file.display());
    drop(running);
    // Credentials without the directories of the agent.
    let machine_file = operator.config("local-machines/machine-0000000000.json");
    let mut saved: Value = serde_json::from_slice(&fs::read(&machine_file).unwrap()).unwrap();
    let saved = saved.as_object_mut().unwrap();
    assert_eq!(saved.remove("units-dir"), Some(units.to_str().unwrap().into()));
    let named = operator.home().join("named.json");
    fs::write(&named, Value::from(saved.clone()).to_string()).unwrap();
    fs::set_permissions(&named, fs::Permissions::from_mode(0o600)).unwrap();
    let leave = |more: &[&str]| {
        output_of(operator.command("portcullis").args(["machine", "--id", "0", "--leave"]).args(more))
    };
    let refused = leave(&["--credentials", named.to_str().unwrap()]);
    refused.fails_with(1, "machine 0 has no directory");
    assert!(named.exists() && file.exists() && refused.stderr.contains("--units-dir"), "{refused:?}");

    let key = operator.home().join("service/portcullis/local/identity/machine-0.key");
    assert!(key.exists());
    let left = leave(&[]);
    assert_eq!(left.code, 0, "{left:?}");
    assert!(left.stderr.contains("Machine 0 has left: 1 units"), "{left:?}");
    assert_eq!((file.exists(), key.exists(), processes_of_units(&operator)), (false, false, 0));
    leave(&[]).fails_with(3, "no credentials for machine 0");
    golden::all_compared();
}
