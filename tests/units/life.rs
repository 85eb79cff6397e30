//! Units with correct hooks, and agents that are killed while these run.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, UdpSocket};
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::Duration;

use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::wait_for;
use crate::operator::fixture_charm;
use crate::world::{DEADLINE, DIG, World, is_alive};

on_both_stores![
    fixture_charms_work,
    operator_resolves_failed_hooks,
    failed_stop_hook_waits_for_the_operator,
    killed_agents_run_each_hook_once,
    output_after_a_stop_request_is_logged,
    files_of_root_units_are_given_to_their_new_users,
    stop_hook_runs_as_the_new_hook_user,
    recreated_environment_leaves_old_units_alone,
];

fn port_of(world: &World, unit: &str) -> u16 {
    fs::read_to_string(world.charm_dir(unit).join("port")).unwrap().parse().unwrap()
}

/// Sends one request and returns the status code and the body of the response.
fn request(port: u16, head: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let length = body.len();
    write!(stream, "{head} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some(format!("{} {body}", head.split(' ').nth(1)?))
}

fn fixture_charms_work(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    // Deployed before the machine has an agent.
    world.deploy(&fixture_charm("hello"), "hello");
    assert_eq!(world.unit("hello/0")["agent-state"], "pending");
    let agent = world.agent(&[]);
    for (charm, protocol) in [("hello", "tcp"), ("clock", "udp"), ("guestbook", "tcp")] {
        if charm != "hello" {
            world.deploy(&fixture_charm(charm), charm);
        }
        operator.does(&["expose", charm]);
        let unit = format!("{charm}/0");
        world.wait_for_state(&unit, "started");
        let port = port_of(&world, &unit);
        assert_eq!(world.unit(&unit)["open-ports"][0], format!("{port}/{protocol}"));
    }
    let (hello, clock, book) =
        (port_of(&world, "hello/0"), port_of(&world, "clock/0"), port_of(&world, "guestbook/0"));
    let says = |port, head: &str, wanted: &str| {
        wait_for(wanted, DEADLINE, || request(port, head, "a guest").filter(|printed| printed == wanted));
    };
    says(hello, "GET /", "200 Hello world, from hello/0.\n");
    says(book, "POST /", "201 Thank you.\n");
    says(book, "GET /", "200 The book of guestbook/0:\na guest\n");
    let asker = UdpSocket::bind("127.0.0.1:0").unwrap();
    asker.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    asker.send_to(b"?", ("127.0.0.1", clock)).unwrap();
    let mut time = [0; 64];
    let length = asker.recv(&mut time).unwrap();
    let seconds: f64 = std::str::from_utf8(&time[..length]).unwrap().trim().parse().unwrap();
    assert!(seconds > 1e9, "{seconds}");

    operator.does(&["unexpose", "hello"]);
    operator.does(&["unexpose", "guestbook"]);
    says(hello, "GET /", "200 Hello from hello/0.\n");
    says(book, "POST /", "403 The book is closed.\n");

    let pid = fs::read_to_string(world.charm_dir("hello/0").join("pid")).unwrap();
    assert!(is_alive(&pid));
    operator.does(&["remove-unit", "hello/0"]);
    for service in ["hello", "clock", "guestbook"] {
        operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&pid));
    assert_eq!(request(hello, "GET /", ""), None);
    agent.stop();
}

#[test]
fn stop_hooks_end_only_their_own_processes() {
    for charm in ["hello", "clock", "guestbook"] {
        let (own, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (directory, ends) in [(own.path(), true), (elsewhere.path(), false)] {
            let mut process = Command::new("sleep").arg("1000").current_dir(directory).spawn().unwrap();
            fs::write(own.path().join("pid"), process.id().to_string()).unwrap();
            let stop = format!("{}/hooks/stop", fixture_charm(charm));
            assert!(Command::new(stop).current_dir(own.path()).status().unwrap().success());
            // If the stop hook has already sent SIGTERM, this SIGKILL has no effect on the exit
            // status.
            process.kill().unwrap();
            let ended = process.wait().unwrap();
            assert_eq!(ended.signal(), Some(if ends { 15 } else { 9 }), "{charm} in {}", directory.display());
        }
    }
}

fn operator_resolves_failed_hooks(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    let agent = world.agent(&[]);
    let start = "echo looking for it; [ -e found ] || { echo 'not found' >&2; exit 4; }";
    let charm = world.charm("picky", &[("start", start), ("exposed", "kill -SEGV $$")]);
    world.deploy(&charm, "picky");
    let unit = world.wait_for_state("picky/0", "start-error");
    assert_eq!(unit["hook-error"], "start hook: exit code 4");
    assert_eq!(unit["hook-output"], serde_json::json!(["looking for it", "not found"]));
    operator.does(&["expose", "picky"]);
    operator.is_refused(&["resolved", "nobody/0"], 1, "Unit 'nobody/0' was not found");

    let printed = operator.does(&["resolved", "--retry", "picky/0"]);
    assert_eq!(printed.stderr, "Unit 'picky/0' runs its start hook again.\n");
    world.runs("picky", &["install", "start", "start"]);
    world.wait_for_state("picky/0", "start-error");
    fs::write(world.charm_dir("picky/0").join("found"), "").unwrap();
    operator.does(&["resolved", "--retry", "picky/0"]);
    let unit = world.wait_for_state("picky/0", "exposed-error");
    assert_eq!(unit["hook-error"], "exposed hook: signal 11 (SIGSEGV)");
    // A failed `exposed` hook counts as run, so `unexposed` follows it.
    operator.does(&["unexpose", "picky"]);
    let printed = operator.does(&["resolved", "picky/0"]);
    assert_eq!(printed.stderr, "Unit 'picky/0' continues without its exposed hook.\n");
    world.runs("picky", &["install", "start", "start", "start", "exposed", "unexposed"]);
    world.wait_for_state("picky/0", "started");
    operator.is_refused(&["resolved", "picky/0"], 1, "the unit has no hook that failed: it is started");
    agent.stop();
}

/// Agents are killed during hooks, between hooks and at rest: each hook runs once.
fn killed_agents_run_each_hook_once(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    let slow = "sleep 1; echo done >>ends; :";
    let charm = world.charm("slow", &[("install", slow), ("start", slow), ("exposed", slow)]);
    world.deploy(&charm, "slow");
    // Exposed before the unit is installed: the `exposed` hook runs once, after `start`.
    operator.does(&["expose", "slow"]);
    let mut agent = world.agent(&[]);
    for hooks in [&["install"][..], &["install", "start"], &["install", "start", "exposed"]] {
        world.runs("slow", hooks);
        agent.kill9();
        agent = world.agent(&[]);
    }
    world.wait_for_state("slow/0", "started");
    let ends = world.charm_dir("slow/0").join("ends");
    wait_for("three ends", DEADLINE, || {
        (fs::read_to_string(&ends).unwrap().lines().count() == 3).then_some(())
    });
    // At rest: the next agent runs no hook.
    agent.kill9();
    let before = agent.log();
    let agent = world.agent(&[]);
    let shown =
        |printed: &str| printed.matches("no such hook").count() + printed.matches("running hook").count();
    wait_for("an agent that holds the machine", DEADLINE, || {
        (agent.log()[before.len()..].contains("holding the machine")).then_some(())
    });
    operator.does(&["unexpose", "slow"]);
    world.runs("slow", &["install", "start", "exposed", "unexposed"]);
    assert_eq!(shown(&agent.log()[before.len()..]), 1, "{}", agent.log());
    agent.stop();
    assert_eq!(world.unit("slow/0")["agent-state"], "down");
}

/// A service prints a line and cleans up after SIGTERM: the reader of its output runs until the
/// service has ended.
fn output_after_a_stop_request_is_logged(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&[]);
    let cleaned = world.operator.home().join("cleaned");
    fs::write(&cleaned, "").unwrap();
    world.share(&cleaned);
    let start = format!(
        "setsid sh -c 'trap \"echo stopping; echo yes >{}; exit 0\" TERM; : >up; while :; do sleep \
         0.05; done' &",
        cleaned.display()
    );
    world.deploy(&world.charm("polite", &[("start", &start)]), "polite");
    world.wait_for_state("polite/0", "started");
    let up = world.charm_dir("polite/0").join("up");
    wait_for("a service", DEADLINE, || up.exists().then_some(()));
    world.operator.does(&["destroy-service", "polite"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert_eq!(fs::read_to_string(cleaned).unwrap(), "yes\n", "it was cut short");
    agent.stop();
}

/// Hooks that ran as root run as the unit's own user after a change of `--hook-user`, with the same
/// files.
fn files_of_root_units_are_given_to_their_new_users(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-user", "0:0"]);
    // Files appear and disappear all the time, and some are too deep for any path.
    let restless =
        "setsid sh -c 'while :; do mkdir -p gone/a; touch gone/a/b; rm -r gone; done' & echo $! >left";
    let start = format!("{restless}\n{DIG}\necho $(id -u) >deep/who; ln -s deep/who link");
    let exposed = "open-port 8080 && echo $(id -u) >>deep/who && touch hooks/more";
    world.deploy(&world.charm("old", &[("start", &start), ("exposed", exposed)]), "old");
    world.wait_for_state("old/0", "started");
    let charm = world.charm_dir("old/0");
    let left = fs::read_to_string(charm.join("left")).unwrap();
    agent.stop();
    let agent = world.agent(&[]);
    world.operator.does(&["expose", "old"]);
    wait_for("the new user", DEADLINE, || {
        assert_eq!(world.unit("old/0").get("hook-error"), None);
        (fs::read_to_string(charm.join("deep/who")).unwrap() == format!("0\n{}\n", world.first_uid))
            .then_some(())
    });
    world.runs("old", &["install", "start", "exposed"]);
    wait_for("a port", DEADLINE, || {
        (world.unit("old/0")["open-ports"] == serde_json::json!(["8080/tcp"])).then_some(())
    });
    // A process that was started as root still belongs to the unit, and ends with it.
    assert!(is_alive(&left));
    world.operator.does(&["destroy-service", "old"]);
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&left));
    agent.stop();
}

/// The first hook that runs as the new user may be the last hook of the unit.
fn stop_hook_runs_as_the_new_hook_user(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-user", "0:0"]);
    let who = world.operator.home().join("who");
    fs::write(&who, "").unwrap();
    world.share(&who);
    let stop = format!("touch last && echo $(id -u) >>{}", who.display());
    world.deploy(&world.charm("old", &[("stop", &stop)]), "old");
    world.wait_for_state("old/0", "started");
    agent.stop();
    // Removed while no agent runs, so that the next agent sees the unit only as removed.
    world.operator.does(&["destroy-service", "old"]);
    let agent = world.agent(&[]);
    wait_for("a machine without units", DEADLINE, || {
        assert_eq!(world.unit("old/0").get("hook-error"), None);
        world.is_cleared_away().then_some(())
    });
    assert_eq!(fs::read_to_string(who).unwrap(), format!("{}\n", world.first_uid));
    agent.stop();
}

/// A new environment with the same name, machine, unit numbers and directory has units of its own.
fn recreated_environment_leaves_old_units_alone(site: &Site) {
    let old = World::new(site);
    let agent = old.agent(&[]);
    old.deploy(&old.charm("old", &[("start", "setsid sleep 1000 & echo $! >left")]), "web");
    old.wait_for_state("web/0", "started");
    let left = fs::read_to_string(old.charm_dir("web/0").join("left")).unwrap();
    agent.stop();

    let new = World::new(&site.other()).on_the_host_of(&old).with_units_in(old.units_dir());
    new.deploy(&new.charm("new", &[]), "web");
    let agent = new.agent(&[]);
    // The new unit starts from the beginning, with its own charm.
    new.wait_for_state("web/0", "started");
    new.runs("new", &["install", "start"]);
    let problem = new.operator.status()["machines"]["0"]["problem"].as_str().unwrap().to_owned();
    assert_eq!(
        problem,
        format!(
            "{} has files of units of another environment or machine (1); they are left as they \
             are, and so is what they run",
            old.units_dir().display()
        )
    );
    // The agent of the old environment runs at the same time and finds its unit unchanged.
    let olds = old.agent(&[]);
    old.wait_for_state("web/0", "started");
    assert_eq!(old.operator.status()["machines"]["0"].get("problem"), None);
    new.operator.does(&["destroy-service", "web"]);
    new.runs("new", &["install", "start", "stop"]);
    let own = fs::read_dir(old.units_dir()).unwrap().map(|entry| entry.unwrap());
    let own =
        own.into_iter().find(|entry| entry.file_name().to_string_lossy().starts_with("of-")).unwrap().path();
    wait_for("an end of the new one", DEADLINE, || {
        fs::read_dir(own.join("runs")).unwrap().next().is_none().then_some(())
    });
    agent.stop();
    assert!(is_alive(&left) && old.is_here("web/0"));
    assert_eq!(old.ran("old"), ["install", "start"]);
    // The old environment can still stop its unit.
    old.operator.does(&["destroy-service", "web"]);
    old.runs("old", &["install", "start", "stop"]);
    wait_for("a machine without units", DEADLINE, || old.is_cleared_away().then_some(()));
    assert!(!is_alive(&left));
    olds.stop();
}

/// A removed unit whose stop hook failed has no ports and no processes, and stays in the status
/// until the hook succeeds or the operator skips it.
fn failed_stop_hook_waits_for_the_operator(site: &Site) {
    let world = World::new(site);
    let operator = &world.operator;
    let mut agent = world.agent(&[]);
    let start = "open-port 8080; setsid sleep 1000 & echo $! >left";
    let stop = "while [ -e hold ]; do sleep 0.05; done; echo 'so not'; [ -e let-go ] || exit 3";
    let charm = world.charm("clinging", &[("start", start), ("stop", stop)]);
    operator.does(&["deploy", &charm, "web", "-n", "3", "--to", "0"]);
    operator.does(&["expose", "web"]);
    for unit in ["web/0", "web/1", "web/2"] {
        world.wait_for_state(unit, "started");
    }
    let left = fs::read_to_string(world.charm_dir("web/0").join("left")).unwrap();
    let stops = || world.ran("clinging").iter().filter(|hook| *hook == "stop").count();
    let printed = operator.does(&["remove-unit", "web/0"]);
    assert_eq!(printed.stderr, "Unit 'web/0' removed from service 'web'\n");
    let unit = world.wait_for_state("web/0", "stop-error");
    assert_eq!(unit["hook-error"], "stop hook: exit code 3");
    assert_eq!(unit["hook-output"], serde_json::json!(["so not"]));
    assert_eq!((&unit["machine"], &unit["open-ports"]), (&serde_json::json!(0), &serde_json::json!([])));
    assert!(!is_alive(&left), "ended all the same");
    assert!(world.unit("web/1")["agent-state"] == "started" && world.is_here("web/0"));
    operator.is_refused(&["remove-unit", "web/0"], 1, "Unit 'web/0' was not found");

    // The next agent reads the state as well and does not run the hook again.
    agent.kill9();
    let mut agent = world.agent(&[]);
    world.wait_for_state("web/1", "started");
    world.wait_for_state("web/0", "stop-error");
    assert_eq!(stops(), 1);
    let in_charm = |file: &str| world.charm_dir("web/0").join(file);
    fs::write(in_charm("hold"), "").unwrap();
    let printed = operator.does(&["resolved", "--retry", "web/0"]);
    assert_eq!(printed.stderr, "Unit 'web/0' runs its stop hook again.\n");
    wait_for("another try", DEADLINE, || (stops() == 2).then_some(()));
    // While the hook runs there is no failure to resolve, and the command is refused.
    assert_eq!(world.unit("web/0")["agent-state"], "stopping");
    let nothing = "the unit has no hook that failed: it is stopping";
    operator.is_refused(&["resolved", "web/0"], 1, nothing);
    fs::remove_file(in_charm("hold")).unwrap();
    world.wait_for_state("web/0", "stop-error");
    fs::write(in_charm("let-go"), "").unwrap();
    operator.does(&["resolved", "--retry", "web/0"]);
    wait_for("an end of it", DEADLINE, || {
        (world.unit("web/0").is_null() && !world.is_here("web/0")).then_some(())
    });
    operator.is_refused(&["resolved", "web/0"], 1, "Unit 'web/0' was not found");
    let before = stops();

    // Also after the service is destroyed, and with a decision that is made while no agent runs.
    operator.does(&["destroy-service", "web"]);
    world.wait_for_state("web/1", "stop-error");
    world.wait_for_state("web/2", "stop-error");
    agent.kill9();
    let printed = operator.does(&["resolved", "web/1"]);
    assert_eq!(printed.stderr, "Unit 'web/1' continues without its stop hook.\n");
    assert!(world.is_here("web/1"));
    let mut agent = world.agent(&[]);
    wait_for("an end of it", DEADLINE, || (!world.is_here("web/1")).then_some(()));
    let shown = operator.status();
    assert_eq!(shown["services"]["web"]["units"].as_object().unwrap().len(), 1, "{shown}");
    world.wait_for_state("web/2", "stop-error");
    assert_eq!(stops(), before + 2);
    // The removal of a machine removes its units.
    agent.kill9();
    operator.does(&["terminate-machine", "0"]);
    assert_eq!(operator.status()["services"], serde_json::json!({}));
}
