//! Hooks that do what no hook should: each ends in a state that says so, and the units beside it go on.

use std::fs;

use crate::harness::scenario::Site;
use crate::harness::wait_for;
use crate::world::{DEADLINE, World, is_alive};

pub(crate) fn bad_hooks_are_clear_states_and_nobody_elses_trouble(site: &Site) {
    let world = World::new(site);
    let agent = world.agent(&["--hook-timeout", "3"]);
    for (name, hooks, state, reason) in [
        ("hanging", &[("install", "sleep 1000")][..], "install-error", "ran for more than 3 s and was ended"),
        ("printing", &[("install", "yes & yes")], "install-error", "ran for more than 3 s and was ended"),
        ("changing", &[("install", "chmod -x hooks/start")], "start-error", "is not executable"),
        ("emptying", &[("install", "rm -r hooks")], "started", ""),
        ("killing", &[("install", "kill -9 $PPID; sleep 1000")], "install-error", "was interrupted 2 times"),
        ("forking", &[("install", "setsid sleep 1000 & echo $! >left")], "started", ""),
    ] {
        world.deploy(&world.charm(name, hooks), name);
        // One that does nothing wrong, at the same time.
        let good = format!("good-{name}");
        world.deploy(&world.charm(&good, &[]), &good);
        world.becomes(&format!("{good}/0"), "started");
        let unit = world.becomes(&format!("{name}/0"), state);
        let said = unit["hook-error"].as_str().unwrap_or_default();
        assert!(said.contains(reason), "{name}: {unit}");
        world.operator.does(&["destroy-service", &good]);
    }
    let left = fs::read_to_string(world.charm_dir("forking/0").join("left")).unwrap();
    assert!(is_alive(&left), "a hook may leave a process behind");
    let log = fs::metadata(world.units_dir().join("runs")).unwrap();
    assert!(log.is_dir());
    for name in ["hanging", "printing", "changing", "emptying", "killing", "forking"] {
        world.operator.does(&["destroy-service", name]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    assert!(!is_alive(&left), "but not when its unit is removed");
    agent.ends();
}

pub(crate) fn removed_in_the_middle_of_a_hook(site: &Site) {
    let world = World::new(site);
    let mut agent = world.agent(&[]);
    let charm = world.charm("endless", &[("start", "echo $$ >pid; sleep 1000")]);
    for killed in [false, true] {
        let service = if killed { "second" } else { "first" };
        world.deploy(&charm, service);
        let pid = wait_for("a hook that runs", DEADLINE, || {
            let pid = fs::read_to_string(
                world.units_dir().join("units").read_dir().ok()?.next()?.ok()?.path().join("charm/pid"),
            );
            pid.ok().filter(|pid| pid.ends_with('\n'))
        });
        if killed {
            // Its agent is dead, and the unit is removed before there is another.
            agent.kill9();
        }
        world.operator.does(&["destroy-service", service]);
        if killed {
            assert!(is_alive(&pid), "a hook outlives its agent");
            agent = world.agent(&[]);
        }
        wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
        assert!(!is_alive(&pid));
    }
    // Neither was started, so there was nothing to stop.
    world.runs("endless", &["install", "start", "install", "start"]);
    agent.ends();
}
