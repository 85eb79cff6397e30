//! The figures that a person would notice, on the embedded keeper. Each is met by at least one of several rounds: how quick
//! it is on a quiet machine is measured by `cargo bench-units`, and what a busy one adds is not ours.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use crate::harness::scenario::Site;
use crate::harness::wire::{Client, Put, op};
use crate::harness::{Kind, Store, wait_for};
use crate::world::{Agent, DEADLINE, World};

const UNITS: usize = 200;
const MAX_AGENT_KB: u64 = 100 * 1024;

/// A charm that is seen in the memory of who has it.
const LARGE_KB: u64 = 12 * 1024;

/// How long an agent with nothing to do is looked at, and how often.
const AT_REST: Duration = Duration::from_secs(4);
const ROUNDS_AT_REST: usize = 3;

const DEPLOYED_WITHIN: Duration = Duration::from_millis(100);
const HEARD_WITHIN: Duration = Duration::from_millis(50);
const ROUNDS: usize = 40;

fn on_a_keeper(test: impl FnOnce(&World, &Site)) {
    let store = Store::keeper();
    let site = Site { kind: Kind::Keeper, addr: store.addr(), chroot: String::new() };
    test(&World::new(&site), &site);
}

/// A charm with these hooks and no others.
fn charm(world: &World, name: &str, hooks: &[(&str, &str)]) -> String {
    let charm = world.operator.charm(name, &format!("name: {name}\nsummary: s\ndescription: d\n"));
    fs::create_dir_all(Path::new(&charm).join("hooks")).unwrap();
    for (hook, body) in hooks {
        let path = Path::new(&charm).join("hooks").join(hook);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    charm
}

#[test]
fn two_hundred_units_are_small_and_a_restart_runs_no_hook() {
    on_a_keeper(|world, _| {
        let started = world.operator.home().join("started");
        fs::write(&started, "").unwrap();
        world.share(&started);
        let count = || fs::read_to_string(&started).unwrap().lines().count();
        let charm = charm(world, "many", &[("start", &format!("echo up >>{}", started.display()))]);
        let mut agent = world.agent(&[]);
        world.operator.does(&["deploy", &charm, "-n", &UNITS.to_string(), "--to", "0"]);
        wait_for("two hundred units", DEADLINE, || (count() == UNITS).then_some(()));
        all_are_started(world);
        assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());

        let said = agent.said().len();
        agent.kill9();
        let agent = world.agent_at_rest();
        let since = || agent.said()[said..].to_owned();
        // By then the session of the one before is over, and nobody of its units is shown to be there.
        wait_for("the next agent", DEADLINE, || since().contains("holding the machine").then_some(()));
        all_are_started(world);
        assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());
        // All of them have a look, and what was due before would have come before this.
        world.operator.does(&["expose", "many"]);
        let hooks = || -> Vec<String> {
            let said = since();
            let about =
                said.lines().filter(|line| line.contains("running hook") || line.contains("no such hook"));
            about.filter_map(|line| Some(line.split_once("hook=")?.1.to_owned())).collect()
        };
        wait_for("a hook of each", DEADLINE, || (hooks().len() >= UNITS).then_some(()));
        assert_eq!((count(), hooks()), (UNITS, vec!["exposed".to_owned(); UNITS]), "a hook ran again");
        assert!(is_idle(&agent), "it does something without end");
        agent.ends();
    });
}

/// However many units are made of it at once, a charm is in memory once or twice.
#[test]
fn a_large_charm_for_many_units_takes_no_more_than_for_one() {
    on_a_keeper(|world, _| {
        let charm = charm(world, "large", &[("start", "exit 0")]);
        fs::write(Path::new(&charm).join("blob"), vec![7; LARGE_KB as usize * 1024]).unwrap();
        let agent = world.agent(&[]);
        let small = agent.most_kb();
        world.operator.does(&["deploy", &charm, "-n", "8", "--to", "0"]);
        for unit in 0..8 {
            world.becomes(&format!("large/{unit}"), "started");
        }
        // As it comes, and unpacked; each with what its parts were read into.
        let more = agent.most_kb().saturating_sub(small);
        assert!((LARGE_KB..7 * LARGE_KB).contains(&more), "{more} KB for a charm of {LARGE_KB}");
        agent.ends();
    });
}

/// Whether it takes less than a hundredth of a core, once what was to be done is done.
fn is_idle(agent: &Agent) -> bool {
    (0..ROUNDS_AT_REST).any(|_| {
        let before = agent.cpu_time();
        std::thread::sleep(AT_REST);
        agent.cpu_time() - before < AT_REST / 100
    })
}

fn all_are_started(world: &World) {
    wait_for("units that are started", DEADLINE, || {
        let status = world.operator.status();
        let units = status["services"]["many"]["units"].as_object()?;
        let all = units.len() == UNITS && units.values().all(|unit| unit["agent-state"] == "started");
        all.then_some(())
    });
}

/// The shortest of several rounds, which end with the first that is short enough.
fn best(within: Duration, mut round: impl FnMut(usize) -> Duration) -> Duration {
    let mut best = Duration::MAX;
    for number in 0..ROUNDS {
        best = best.min(round(number));
        if best < within {
            break;
        }
    }
    best
}

#[test]
fn alone_a_deploy_is_started_at_once() {
    on_a_keeper(|world, site| {
        let agent = world.agent(&[]);
        wait_for("an agent", DEADLINE, || agent.said().contains("holding the machine").then_some(()));
        let charm = charm(world, "plain", &[]);
        let mut client = as_operator(world, site);
        let took = best(DEPLOYED_WITHIN, |round| {
            let begin = Instant::now();
            world.deploy(&charm, &format!("plain-{}", "x".repeat(round + 1)));
            let state = format!("/units/unit-{round:010}/state");
            wait_for("a unit that is started", DEADLINE, || {
                let (state, _) = client.get(&state).ok()?;
                let state: serde_json::Value = serde_json::from_slice(&state).ok()?;
                (state["state"] == "started").then_some(())
            });
            begin.elapsed()
        });
        assert!(took < DEPLOYED_WITHIN, "{took:?}");
        agent.ends();
    });
}

#[test]
fn alone_an_exposed_hook_begins_at_once() {
    on_a_keeper(|world, _| {
        let agent = world.agent(&[]);
        let hooks = [("exposed", "date +%s%N >>times"), ("unexposed", "echo >>ends")];
        world.deploy(&charm(world, "heard", &hooks), "heard");
        world.becomes("heard/0", "started");
        let line = |file: &str, number: usize| {
            let path = world.charm_dir("heard/0").join(file);
            wait_for("a hook", DEADLINE, || {
                let text = fs::read_to_string(&path).ok()?;
                let line = text.split_inclusive('\n').nth(number)?;
                line.ends_with('\n').then(|| line.trim().to_owned())
            })
        };
        let took = best(HEARD_WITHIN, |round| {
            let begin = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            world.operator.does(&["expose", "heard"]);
            let heard = Duration::from_nanos(line("times", round).parse().unwrap());
            world.operator.does(&["unexpose", "heard"]);
            line("ends", round);
            heard.checked_sub(begin).expect("a clock that goes on")
        });
        assert!(took < HEARD_WITHIN, "{took:?}");
        agent.ends();
    });
}

fn as_operator(world: &World, site: &Site) -> Client {
    let held = fs::read_to_string(world.operator.config("local.json")).unwrap();
    let held: serde_json::Value = serde_json::from_str(&held).unwrap();
    let mut client = Client::connect(site.addr);
    let auth = Put::new().int(0).bytes("digest").bytes(held["auth"].as_str().unwrap());
    client.send_as(-4, op::AUTH, &auth).expect("sent");
    assert_eq!(client.receive().expect("an answer").err, 0);
    client
}
