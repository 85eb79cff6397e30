//! Third-party clients against a manager on a system bus: pyhirte, which is hirte's own client, and
//! `busctl`.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::client::MANAGER;
use crate::harness::{HANG, wait_for};
use crate::world::World;

#[tokio::test(flavor = "multi_thread")]
async fn pyhirte_works_unchanged() {
    let world = World::start().await;
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = checkout.join(".venv-pyhirte/bin/python");
    assert!(python.exists(), "{} is missing: tests/run creates it", python.display());
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", "tests/fleet/pyhirte"])
        .current_dir(checkout)
        .env("DBUS_SYSTEM_BUS_ADDRESS", world.manager.bus())
        .env("GO", world.node("n1").file("go"))
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
}

fn busctl(world: &World, arguments: &[&str]) -> Command {
    let mut command = Command::new("busctl");
    command.arg(format!("--address={}", world.manager.bus())).args(arguments).stdin(Stdio::null());
    command
}

#[track_caller]
fn printed(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the members of an interface as `busctl introspect` shows them: name, kind, signature of
/// the arguments or of the property, and signature of the reply.
fn members(world: &World, path: &str, interface: &str) -> BTreeSet<String> {
    let lines = printed(busctl(world, &["introspect", "org.containers.hirte", path, interface]));
    let fields = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let shown = if fields[1] == "method" { &fields[..4] } else { &fields[..3] };
        shown.join(" ").trim_start_matches('.').to_owned()
    };
    lines.lines().filter(|line| line.starts_with('.')).map(fields).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn busctl_shows_every_member() {
    let world = World::start().await;
    for (path, interface, expected) in [
        (
            MANAGER.to_owned(),
            "Manager",
            "ListUnits method - a(sssssssouso)|ListUnitFiles method - a(sss)|ListNodes method - a(sos)|\
             ListProxies method - a(sssssts)|GetNode method s o|CreateMonitor method - o|\
             SetLogLevel method s -|JobNew signal uoss|JobRemoved signal uosss|\
             NodeConnectionStateChanged signal ss|Nodes property as|Status property s",
        ),
        (
            format!("{MANAGER}/node/n1"),
            "Node",
            "StartUnit method ss o|StopUnit method ss o|ReloadUnit method ss o|RestartUnit method ss o|\
             KillUnit method ssi -|ReadJournal method sus as|GetUnitProperties method ss a{sv}|\
             ListUnits method - a(ssssssouso)|FreezeUnit method s -|ThawUnit method s -|\
             EnableUnitFiles method asbb ba(sss)|DisableUnitFiles method asb a(sss)|\
             SetUnitProperties method sba(sv) -|GetUnitProperty method sss v|\
             ListUnitFiles method - a(ss)|GetUnitFileState method s s|\
             Reload method - -|ResetFailed method - -|ResetFailedUnit method s -|\
             StartTransientUnit method ssa(sv)a(sa(sv)) o|GetDefaultTarget method - s|\
             SetDefaultTarget method sb a(sss)|Name property s|Status property s|PeerIp property s|\
             LastSeenTimestamp property t",
        ),
    ] {
        let expected: BTreeSet<String> = expected.split('|').map(str::to_owned).collect();
        let shown = members(&world, &path, &format!("org.containers.hirte.{interface}"));
        assert_eq!(shown, expected, "{interface}");
    }
    // A monitor exists as long as the client that created it, so busctl cannot look at its own. The
    // object of a job exists while the job runs.
    let node = format!("{MANAGER}/node/n1");
    let call = ["call", "org.containers.hirte", &node, "org.containers.hirte.Node", "StartUnit", "ss"];
    let job = printed(busctl(&world, &[&call[..], &["slow.service", "replace"]].concat()));
    let job = job.trim().trim_start_matches("o \"").trim_end_matches('"');
    let expected = "Cancel method - -|Id property u|Node property s|Unit property s|JobType property s|\
                    State property s";
    let expected: BTreeSet<String> = expected.split('|').map(str::to_owned).collect();
    assert_eq!(members(&world, job, "org.containers.hirte.Job"), expected);

    // busctl reports the end of the job.
    let record = world.manager.file("signals");
    let mut monitor = busctl(&world, &["monitor", "org.containers.hirte"])
        .stdout(File::create(&record).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let recorded = || std::fs::read_to_string(&record).unwrap();
    wait_for("a record of a call", HANG, || {
        let call = ["get-property", "org.containers.hirte", MANAGER, "org.containers.hirte.Manager", "Nodes"];
        printed(busctl(&world, &call));
        recorded().contains("Nodes").then_some(())
    });
    printed(busctl(&world, &["call", "org.containers.hirte", job, "org.containers.hirte.Job", "Cancel"]));
    wait_for("JobRemoved", HANG, || recorded().contains("JobRemoved").then_some(()));
    let seen = recorded();
    let _ = (monitor.kill(), monitor.wait());
    assert!(seen.contains("STRING \"cancelled\""), "{seen}");
}

/// A user without privileges may look and not act.
#[tokio::test(flavor = "multi_thread")]
async fn other_users_may_look_and_not_act() {
    let world = World::start().await;
    let node = format!("{MANAGER}/node/n1");
    let call = |user: &str, interface: &str, path: &str, arguments: &[&str]| {
        let command = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "busctl", "call"];
        let target = ["org.containers.hirte", path, interface];
        world.manager.try_run(&[&command[..], &target, arguments].concat())
    };
    let (on_node, on_manager) = ("org.containers.hirte.Node", "org.containers.hirte.Manager");
    for (interface, path, arguments) in [
        (on_manager, MANAGER, &["ListUnits"][..]),
        (on_manager, MANAGER, &["ListNodes"]),
        (on_manager, MANAGER, &["CreateMonitor"]),
        (on_node, &node, &["ListUnits"]),
        (on_node, &node, &["GetUnitProperties", "s", "quick.service"]),
    ] {
        let output = call("65534", interface, path, arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    for (interface, path, arguments) in [
        (on_manager, MANAGER, &["SetLogLevel", "s", "debug"][..]),
        (on_node, &node, &["StartUnit", "ss", "quick.service", "replace"]),
        (on_node, &node, &["KillUnit", "ssi", "quick.service", "main", "9"]),
        (on_node, &node, &["FreezeUnit", "s", "quick.service"]),
        (on_node, &node, &["EnableUnitFiles", "asbb", "1", "quick.service", "true", "false"]),
        (on_node, &node, &["Reload"]),
    ] {
        let output = call("65534", interface, path, arguments);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && printed.contains("enied"), "{arguments:?}: {output:?}");
    }
    assert_eq!(world.node("n1").property("quick.service", "ActiveState"), "inactive");
    // root may act.
    let output = call("0", on_node, &node, &["StartUnit", "ss", "quick.service", "replace"]);
    assert!(output.status.success(), "{output:?}");
    let machine = world.node("n1");
    wait_for("a started unit", HANG, || {
        (machine.property("quick.service", "ActiveState") == "active").then_some(())
    });
}
