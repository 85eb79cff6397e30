//! `juju node` and `hirtectl` on the bus of a manager: exit codes, output and refusals.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::agent::Agent;
use crate::world::{World, soon};

/// The output of a command, and its exit code.
#[derive(Debug)]
struct Done {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Done {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|_| panic!("not one document: {self:?}"))
    }
}

fn command(program: &str, bus: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).args(["--bus", bus]).env_clear().stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn finish(child: Child) -> Done {
    let output = soon("end of a command", child.wait_with_output()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `juju node`.
async fn node(world: &World, arguments: &[&str]) -> Done {
    finish(start(world, arguments)).await
}

fn start(world: &World, arguments: &[&str]) -> Child {
    let arguments = [&["node"], arguments].concat();
    command(env!("CARGO_BIN_EXE_juju"), &world.bus, &arguments).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_end_with_0_only_if_they_are_done() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    for (verb, unit) in [("start", "a.service"), ("stop", "early.service"), ("reload", "a.service")] {
        let done = node(&world, &[verb, "n1", unit]).await;
        assert_eq!((done.code, done.stdout.as_str()), (0, ""), "{done:?}");
        assert!(done.stderr.ends_with(&format!(" ({verb} of {unit} on n1) is done.\n")), "{done:?}");
    }
    let done = node(&world, &["restart", "n1", "a.service", "--json"]).await;
    let mut document = done.json();
    assert!(document["job"].take().is_u64());
    let expected =
        json!({"job": null, "type": "restart", "node": "n1", "systemd-unit": "a.service", "result": "done"});
    assert_eq!((done.code, document), (0, expected));
    assert_eq!(done.stderr, "");

    let missing = node(&world, &["start", "n1", "missing.service"]).await;
    assert_eq!(
        (missing.code, missing.stderr.as_str()),
        (
            1,
            "error: cannot start 'missing.service' on node 'n1': Unit missing.service not found. \
             (org.freedesktop.systemd1.NoSuchUnit)\nhint: `juju node units` lists the units that systemd \
             has loaded\n"
        )
    );

    let queued = node(&world, &["start", "n1", "slow1.service", "--no-wait"]).await;
    assert_eq!(queued.code, 0, "{queued:?}");
    assert!(queued.stderr.ends_with(" (start of slow1.service on n1) is queued.\n"), "{queued:?}");
    let late = node(&world, &["start", "n1", "slow2.service", "--timeout", "1s"]).await;
    assert_eq!(late.code, 1, "{late:?}");
    assert!(late.stderr.contains(" did not end within 1 s and goes on\n"), "{late:?}");

    // The loss of the node ends the job, and with it the command.
    let waiting = start(&world, &["start", "n1", "slow3.service", "--json"]);
    agent.called("StartUnit slow3.service").await;
    agent.kill();
    let failed = finish(waiting).await;
    let result = failed.json()["result"].as_str().unwrap().to_owned();
    assert!(failed.code == 1 && result != "done", "{failed:?}");
    let error = format!("error: start of 'slow3.service' on node 'n1' ended with the result '{result}'\n");
    assert!(failed.stderr.starts_with(&error), "{failed:?}");
    let offline = node(&world, &["start", "n1", "a.service"]).await;
    assert!(offline.code == 1 && offline.stderr.contains("(org.containers.hirte.Offline)"), "{offline:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_is_replaced_ends_its_command() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    assert_eq!(node(&world, &["start", "n1", "slow.service", "--no-wait"]).await.code, 0);
    agent.called("StartUnit slow.service").await;
    let mut signals = world.client().await;
    let waiting = start(&world, &["stop", "n1", "slow.service"]);
    signals.signal("JobNew").await;
    let refused = node(&world, &["stop", "n1", "slow.service", "--mode", "fail"]).await;
    assert!(refused.code == 1 && refused.stderr.contains("TransactionIsDestructive"), "{refused:?}");
    assert!(
        refused.stderr.ends_with("hint: wait for that job, or replace it with --mode replace\n"),
        "{refused:?}"
    );
    assert_eq!(node(&world, &["restart", "n1", "slow.service", "--no-wait"]).await.code, 0);
    let replaced = finish(waiting).await;
    assert!(replaced.code == 1 && replaced.stderr.contains("the result 'cancelled'"), "{replaced:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_units_and_states_are_shown() {
    let world = World::start(&["n-1", "n2"]).await;
    let agent = Agent::register(&world.tcp, "n-1").await.unwrap();
    agent.set_unit("a.service", "active").await;
    agent.set_unit("b.service", "failed").await;
    let listed = node(&world, &["list", "--json"]).await.json();
    let (online, offline) = (&listed[0], &listed[1]);
    assert_eq!(
        (&online["node"], &online["status"], &online["address"]),
        (&json!("n-1"), &json!("online"), &json!("127.0.0.1"))
    );
    assert!(online["last-seen"].is_string());
    let expected = json!({"node": "n2", "status": "offline", "address": null, "last-seen": null});
    assert_eq!(offline, &expected);
    let table = node(&world, &["list"]).await.stdout;
    assert!(table.starts_with("NODE  STATUS   ADDRESS    LAST-SEEN\nn-1   online   127.0.0.1  "), "{table}");

    for arguments in [&["units"][..], &["units", "n-1"]] {
        let shown = node(&world, arguments).await;
        let expected = "\
NODE  SYSTEMD-UNIT  LOAD    ACTIVE  SUB  DESCRIPTION
n-1   a.service     loaded  active  sub  about
n-1   b.service     loaded  failed  sub  about
";
        assert_eq!((shown.code, shown.stdout.as_str()), (0, expected), "{shown:?}");
    }
    let filtered = node(&world, &["units", "--filter", "b*", "--json"]).await.json();
    assert_eq!(filtered.as_array().unwrap().len(), 1);
    assert_eq!(filtered[0]["systemd-unit"], "b.service");

    let state = node(&world, &["status", "n-1", "a.service", "--json"]).await;
    assert_eq!((state.code, &state.json()[0]["active"]), (0, &json!("active")));
    let enabled = node(&world, &["enable", "n-1", "a.service", "--json"]).await;
    let expected = json!({"node": "n-1", "changes": [{"change": "symlink", "link": "a", "target": "b"}]});
    assert_eq!((enabled.code, enabled.json()), (0, expected));
    agent.called("Reload").await;
    let disabled = node(&world, &["disable", "n-1", "a.service"]).await;
    assert_eq!((disabled.code, disabled.stdout.as_str()), (0, "CHANGE  LINK  TARGET\nunlink  a     -\n"));

    // The failure of one unit does not prevent the others.
    let some = node(&world, &["freeze", "n-1", "missing.service", "a.service", "--json"]).await;
    let document = some.json();
    assert_eq!((some.code, &document[1]["error"]), (1, &Value::Null), "{some:?}");
    assert_eq!(document[0]["error-name"], "org.freedesktop.systemd1.NoSuchUnit");
    agent.called("FreezeUnit a.service").await;
    for (verb, call) in [("thaw", "ThawUnit a.service"), ("reset-failed", "ResetFailedUnit a.service")] {
        assert_eq!(node(&world, &[verb, "n-1", "a.service"]).await.code, 0);
        agent.called(call).await;
    }
    assert_eq!(node(&world, &["kill", "n-1", "a.service", "--signal", "HUP"]).await.code, 0);
    agent.called("KillUnit a.service").await;

    let hirtectl = command(env!("CARGO_BIN_EXE_hirtectl"), &world.bus, &["list-units", "n-1", "--json"]);
    let units = finish({ hirtectl }.spawn().unwrap()).await;
    assert_eq!((units.code, units.json().as_array().unwrap().len()), (0, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn monitors_print_one_line_for_each_change_until_the_manager_stops() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    agent.set_unit("a.service", "active").await;
    let mut monitor = start(&world, &["monitor", "n1", "a*", "--json"]);
    let mut lines = BufReader::new(monitor.stdout.take().unwrap()).lines();
    let mut next = async || -> Value {
        let line = soon("line of the monitor", lines.next_line()).await.unwrap().expect("a line");
        serde_json::from_str(&line).unwrap()
    };
    let first = next().await;
    assert_eq!((&first["event"], &first["active"]), (&json!("unit"), &json!("active")), "{first}");
    agent.set_unit("b.service", "failed").await;
    agent.set_unit("a.service", "inactive").await;
    let second = next().await;
    assert_eq!((&second["systemd-unit"], &second["active"]), (&json!("a.service"), &json!("inactive")));
    agent.kill();
    let lost = [next().await, next().await];
    let events: Vec<_> = lost.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert!(events.contains(&"unit-lost") && events.contains(&"node"), "{lost:?}");
    world.stop().await;
    let ended = finish(monitor).await;
    assert_eq!(
        (ended.code, ended.stderr.lines().next()),
        (1, Some("error: the monitor ended: the manager was lost"))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stop_of_the_manager_ends_every_command() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let waiting = start(&world, &["start", "n1", "slow.service"]);
    agent.called("StartUnit slow.service").await;
    world.stop().await;
    let ended = finish(waiting).await;
    // If the manager stops before it has answered the call, the bus reports that there is no reply.
    let reasons = ["the result 'cancelled'", "no reply"];
    let has_reason = reasons.iter().any(|reason| ended.stderr.contains(reason));
    assert!(ended.code == 1 && has_reason, "{ended:?}");
    let none = node(&world, &["list"]).await;
    let expected = "error: cannot list the nodes: no manager is running on the bus\nhint: start `portcullis \
                    manager`, or select another bus with --bus\n";
    assert_eq!((none.code, none.stderr.as_str()), (1, expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_arguments_are_refused_with_one_sentence() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let long = format!("{}.service", "a".repeat(300));
    for (arguments, code, error) in [
        (
            &["start", "n9", "a.service"][..],
            1,
            "cannot start 'a.service' on node 'n9': there is no node 'n9'",
        ),
        (&["units", "n9"], 1, "cannot list the units of node 'n9': there is no node 'n9'"),
        (&["start", "n_1", "a.service"], 2, "name \"n_1\": it takes lower-case letters, digits, '-' and '.'"),
        (&["monitor", "n_1"], 2, "name \"n_1\""),
        (&["start", "n1", &long], 2, "invalid systemd unit name: it has more than 255 characters"),
        (&["status", "n1", "a/b.service"], 2, "invalid systemd unit name: it may have letters"),
        (
            &["start", "n1", "nginx"],
            2,
            "systemd unit 'nginx' has no type; for a service it is 'nginx.service'",
        ),
        (
            &["start", "n1", "a.service", "--mode", "isolate"],
            2,
            "invalid value 'isolate' for '--mode <MODE>'",
        ),
        (&["kill", "n1", "a.service", "--signal", "99"], 2, "invalid value '99' for '--signal <SIGNAL>'"),
        (&["kill", "n1", "a.service", "--who", "me"], 2, "invalid value 'me' for '--who <WHO>'"),
        (&["start", "n1", "a.service", "--timeout", "0s"], 2, "'0s' is not a time"),
        (&["freeze", "n1"], 2, "the following required arguments were not provided"),
    ] {
        let refused = node(&world, arguments).await;
        let line = refused.stderr.lines().next().unwrap_or_default();
        assert!(refused.code == code && line.contains(error), "{arguments:?}: {refused:?}");
        assert!(line.starts_with("error: ") && refused.stdout.is_empty(), "{arguments:?}: {refused:?}");
    }
    for bus in ["unix:path=/nowhere/bus", "nonsense"] {
        let list = command(env!("CARGO_BIN_EXE_juju"), bus, &["node", "list"]).spawn().unwrap();
        let refused = finish(list).await;
        let error = format!("error: cannot connect to the bus at {bus}: ");
        assert!(refused.code == 1 && refused.stderr.starts_with(&error), "{refused:?}");
    }
}
