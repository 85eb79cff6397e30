//! A store is restored from an older backup while a machine's agent runs: a unit that was deployed
//! after the backup keeps its processes and files until an operator accepts the store.

use std::fs;
use std::path::Path;

use crate::harness::scenario::Site;
use crate::harness::wire::{Client, Create};
use crate::harness::{Store, wait_for};
use crate::world::{DEADLINE, World, is_alive};

#[test]
fn restored_keeper_removes_no_unit_until_accepted() {
    no_unit_is_removed_until_the_store_is_accepted(Store::keeper());
}

#[test]
fn restored_zookeeper_removes_no_unit_until_accepted() {
    no_unit_is_removed_until_the_store_is_accepted(Store::zookeeper());
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Stops the store, calls `work` with its directory, and starts it again.
fn offline(store: &mut Store, work: impl FnOnce(&Path)) {
    store.sigterm();
    work(&store.data_dir());
    store.restart();
}

fn problem(world: &World) -> String {
    let status = world.operator.status();
    status["machines"]["0"]["problem"].as_str().unwrap_or_default().to_owned()
}

fn no_unit_is_removed_until_the_store_is_accepted(mut store: Store) {
    let site = Site { kind: store.kind(), addr: store.addr(), chroot: "/restored".to_owned() };
    Client::connect(store.addr()).create(&site.chroot, b"", Create::Persistent);
    let world = World::new(&site);
    let agent = world.agent(&[]);
    let daemon = "sleep 100000 >/dev/null 2>&1 & echo $! >$CHARM_DIR/pid";
    let charm = |name: &str| world.charm(name, &[("start", daemon)]);
    let (early, late, newer) = (charm("early"), charm("late"), charm("newer"));
    world.deploy(&early, "early");
    world.wait_for_state("early/0", "started");
    let backup = world.operator.home().join("backup");
    offline(&mut store, |data| copy(data, &backup));
    world.deploy(&late, "late");
    world.wait_for_state("late/0", "started");
    let files = world.charm_dir("late/0");
    let pid = fs::read_to_string(files.join("pid")).unwrap();

    offline(&mut store, |data| {
        fs::remove_dir_all(data).unwrap();
        copy(&backup, data);
    });
    let held = || Some(problem(&world)).filter(|problem| problem.contains("units are not removed"));
    let why = wait_for("a machine that is held", DEADLINE, held);
    assert!(why.contains("the store went back") && why.contains("`juju accept-store`"), "{why}");
    // An agent that starts after the restore is held as well.
    agent.stop();
    let agent = world.agent(&[]);
    // The store assigns the number of the lost unit to another one, which waits.
    world.deploy(&newer, "newer");
    wait_for("an agent that is held", DEADLINE, || {
        let log = agent.log();
        (log.matches("store went back").count() >= 2).then_some(())
    });
    assert_eq!(world.unit("newer/0")["agent-state"], "pending");
    assert!(is_alive(&pid) && files.join("pid").exists(), "{}", agent.log());
    assert_eq!(world.ran("late"), ["install", "start"]);

    let accepted = world.operator.does(&["accept-store"]);
    assert_eq!(accepted.stderr, "Machine 0 continues with the store as it is.\n");
    wait_for("the end of the lost unit", DEADLINE, || (!is_alive(&pid)).then_some(()));
    world.runs("late", &["install", "start", "stop"]);
    world.wait_for_state("newer/0", "started");
    assert_eq!(world.ran("newer"), ["install", "start"]);
    assert_eq!(world.ran("early"), ["install", "start"], "untouched");
    wait_for("a machine that is not held", DEADLINE, || problem(&world).is_empty().then_some(()));
    let again = world.operator.does(&["accept-store"]);
    assert!(again.stderr.starts_with("No agent is held"), "{}", again.stderr);
    for service in ["early", "newer"] {
        world.operator.does(&["destroy-service", service]);
    }
    wait_for("a machine without units", DEADLINE, || world.is_cleared_away().then_some(()));
    agent.stop();
}
