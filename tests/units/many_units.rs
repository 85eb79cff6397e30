//! Many units, and large charms, on the embedded keeper: memory, hooks after a restart, and
//! requests at rest. `cargo bench-units` measures times and CPU shares.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::harness::scenario::Site;
use crate::harness::{Kind, Store, wait_for, wait_for_count};
use crate::world::{DEADLINE, World};

const UNITS: usize = 200;
const MAX_AGENT_KB: u64 = 100 * 1024;

/// The size of a charm: large enough for a copy of it to be visible in a process's memory.
const LARGE_KB: u64 = 12 * 1024;

fn on_a_keeper(test: impl FnOnce(&World)) {
    let store = Store::keeper();
    let site = Site { kind: Kind::Keeper, addr: store.addr(), chroot: String::new() };
    test(&World::new(&site));
}

/// Creates a charm with these hooks and no others.
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
fn restart_with_two_hundred_units_runs_no_hook() {
    on_a_keeper(|world| {
        let started = world.operator.home().join("started");
        fs::write(&started, "").unwrap();
        world.share(&started);
        let count = || fs::read_to_string(&started).unwrap().lines().count();
        let charm = charm(world, "many", &[("start", &format!("echo up >>{}", started.display()))]);
        let mut agent = world.agent_at_rest();
        world.operator.does(&["deploy", &charm, "-n", &UNITS.to_string(), "--to", "0"]);
        wait_for_count("start hooks", UNITS, count);
        all_are_started(world);
        assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());

        let printed = agent.log().len();
        agent.kill9();
        let agent = world.agent_at_rest();
        let since = || agent.log()[printed..].to_owned();
        // By then the session of the previous agent has ended, and none of its units is shown as
        // running.
        wait_for("the next agent", DEADLINE, || since().contains("holding the machine").then_some(()));
        all_are_started(world);
        assert!(agent.most_kb() < MAX_AGENT_KB, "{} KB", agent.most_kb());
        // Every unit now runs its `exposed` hook; a hook that was due earlier would have run before
        // it.
        world.operator.does(&["expose", "many"]);
        let hooks = || -> Vec<String> {
            let printed = since();
            let about =
                printed.lines().filter(|line| line.contains("running hook") || line.contains("no such hook"));
            about.filter_map(|line| Some(line.split_once("hook=")?.1.to_owned())).collect()
        };
        wait_for_count("hooks after the restart", UNITS, || hooks().len());
        assert_eq!((count(), hooks()), (UNITS, vec!["exposed".to_owned(); UNITS]), "a hook ran again");
        agent.stop();
    });
}

/// A charm is in memory once or twice, however many units are created from it at once.
#[test]
fn memory_for_a_large_charm_does_not_grow_with_units() {
    on_a_keeper(|world| {
        let charm = charm(world, "large", &[("start", "exit 0")]);
        fs::write(Path::new(&charm).join("blob"), vec![7; LARGE_KB as usize * 1024]).unwrap();
        let agent = world.agent(&[]);
        let small = agent.most_kb();
        world.operator.does(&["deploy", &charm, "-n", "8", "--to", "0"]);
        for unit in 0..8 {
            world.wait_for_state(&format!("large/{unit}"), "started");
        }
        // The archive and its unpacked form, each with its read buffers.
        let more = agent.most_kb().saturating_sub(small);
        assert!((LARGE_KB..7 * LARGE_KB).contains(&more), "{more} KB for a charm of {LARGE_KB}");
        agent.stop();
    });
}

fn all_are_started(world: &World) {
    wait_for_count("started units", UNITS, || {
        let status = world.operator.status();
        let units = status["services"]["many"]["units"].as_object();
        let is_started = |unit: &&serde_json::Value| unit["agent-state"] == "started";
        units.map_or(0, |units| units.values().filter(is_started).count())
    });
}

/// Between two resyncs an agent sends only the session's pings and the renewals of the machine's
/// lease to the store.
#[test]
fn units_at_rest_are_not_read_again() {
    on_a_keeper(|world| {
        let charm = charm(world, "quiet", &[("start", ":")]);
        let agent = world.agent_at_rest();
        world.operator.does(&["deploy", &charm, "-n", "5", "--to", "0"]);
        for unit in 0..5 {
            world.wait_for_state(&format!("quiet/{unit}"), "started");
        }
        // If units were read repeatedly, there would never be three pings in a row without a read.
        wait_for("three pings without a read of a unit", DEADLINE, || {
            let printed = agent.log();
            let since = printed.rsplit("MultiRead").next()?;
            (since.matches("got ping response").count() >= 3).then_some(())
        });
        agent.stop();
    });
}
