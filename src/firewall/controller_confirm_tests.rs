//! Tests of closes that need confirmation by a second read.

use super::*;
use crate::model::ServiceId;

#[tokio::test(start_paused = true)]
async fn closing_most_rules_takes_two_reads() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    for port in 0..12 {
        world.open(unit, &(8000 + 2 * port).to_string()).await;
    }
    world.expose("a").await;
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12);
    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12, "one read is not enough");
    assert!(world.controller.awaits_confirmation() && world.problem(0).unwrap().contains("second read"));
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12, "nor are two reads at the same time");
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass().await;
    assert_eq!(
        (world.rules(0).len(), world.controller.awaits_confirmation(), world.problem(0)),
        (0, false, None)
    );
}

/// Even a single close needs confirmation if the tree appears empty.
#[tokio::test(start_paused = true)]
async fn closes_after_a_read_without_units_are_confirmed() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    assert!(world.controller.awaits_confirmation() && world.problem(0).unwrap().contains("second read"));
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass().await;
    assert_eq!(
        (world.rules(0).len(), world.controller.awaits_confirmation(), world.problem(0)),
        (0, false, None)
    );
}

/// Whether units are removed one by one or all together, the ports of the last one are closed after
/// two reads agree.
#[tokio::test(start_paused = true)]
async fn removing_the_last_unit_takes_a_second_read() {
    for known_before in [false, true] {
        let mut world = World::new().await;
        if !known_before {
            world.pass().await;
        }
        let unit = world.deploy("a").await;
        world.open(unit, "80").await;
        world.expose("a").await;
        world.pass().await;
        assert_eq!(world.rules(0), ["80/tcp"]);
        world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
        world.pass_for(Key::Unit(unit)).await;
        assert_eq!(
            (world.rules(0).len(), world.controller.awaits_confirmation()),
            (1, true),
            "an event is one read"
        );
        tokio::time::advance(CONFIRM_AFTER).await;
        world.pass().await;
        assert_eq!(
            (world.rules(0).len(), world.controller.awaits_confirmation(), world.problem(0)),
            (0, false, None)
        );
    }
}

impl World {
    /// A znode and its descendants, in the order in which `deleteall` of ZooKeeper's shell deletes
    /// them.
    async fn descendants(&self, top: NodePath) -> Vec<NodePath> {
        let (tree, mut found) = (self.operator.tree(), vec![top]);
        let mut next = 0;
        while let Some(path) = found.get(next).cloned() {
            found.extend(tree.children(&path).await.unwrap().iter().map(|name| path.child(name)));
            next += 1;
        }
        found.reverse();
        found
    }

    async fn delete(&self, path: NodePath) {
        self.operator.tree().write(vec![Write::Delete { path }]).await.unwrap();
    }

    async fn delete_all(&self, top: NodePath) {
        for path in self.descendants(top).await {
            self.delete(path).await;
        }
    }

    /// Runs passes for the machines that events would name, and then full passes, several times.
    async fn pass_often(&mut self, unit: UnitId) {
        self.pass_for(Key::Unit(unit)).await;
        self.pass_for(Key::Service(ServiceId::new(0))).await;
        for _ in 0..4 {
            tokio::time::advance(CONFIRM_AFTER).await;
            self.pass().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_subtree_closes_nothing() {
    let unit = UnitId::new(0);
    for deleted in [
        paths::units(),
        paths::services(),
        paths::unit(unit),
        paths::service(ServiceId::new(0)),
        paths::unit_ports(unit),
    ] {
        let mut world = World::new().await;
        assert_eq!(world.deploy("a").await, unit);
        world.open(unit, "80").await;
        world.expose("a").await;
        world.pass().await;
        world.delete_all(deleted.clone()).await;
        world.pass_often(unit).await;
        assert_eq!(world.rules(0), ["80/tcp"], "{deleted}");
        let report = world.controller.reports.get(MachineId::new(0)).unwrap();
        let reason = report.frozen.get(&unit).unwrap_or_else(|| panic!("{deleted}: {report:?}"));
        assert!(reason.contains(" is missing from the store"), "{deleted}: {reason}");
        assert!(reason.contains(deleted.as_str()) || deleted == paths::services(), "{deleted}: {reason}");
        // A controller that starts at this point has no earlier view.
        world.controller.drop_caches();
        world.pass_often(unit).await;
        assert_eq!(world.rules(0), ["80/tcp"], "{deleted}");
    }
}

/// The exposed flags are deleted before the records of their services. A pass after every deletion,
/// and half of the time to a confirming read between two of them, finds each state in between.
#[tokio::test(start_paused = true)]
async fn a_pass_between_the_deletions_of_a_subtree_closes_nothing() {
    for (deleted, reported) in [
        (paths::services(), true),
        (paths::services(), false),
        (paths::service(ServiceId::new(0)), true),
        (paths::service(ServiceId::new(0)), false),
    ] {
        let mut world = World::new().await;
        for name in ["a", "b"] {
            let unit = world.deploy(name).await;
            world.open(unit, "80").await;
            world.expose(name).await;
        }
        world.pass().await;
        if !reported {
            for machine in [0, 1] {
                world.delete_all(paths::firewall_report(MachineId::new(machine))).await;
            }
            world.controller.drop_caches();
        }
        for path in world.descendants(deleted.clone()).await {
            world.delete(path.clone()).await;
            for service in [0, 1] {
                world.pass_for(Key::Service(ServiceId::new(service))).await;
            }
            world.pass().await;
            assert_eq!((world.rules(0).len(), world.rules(1).len()), (1, 1), "{deleted}: {path}");
            tokio::time::advance(CONFIRM_AFTER / 2).await;
        }
        world.pass_often(UnitId::new(0)).await;
        assert_eq!((world.rules(0).len(), world.rules(1).len()), (1, 1), "{deleted}");
    }
}

/// The specification makes the existence of the flag the fact, whichever client removes it.
#[tokio::test(start_paused = true)]
async fn a_flag_that_another_client_removes_is_confirmed_and_a_command_is_not() {
    let mut world = World::new().await;
    for name in ["a", "b"] {
        let unit = world.deploy(name).await;
        world.open(unit, "80").await;
        world.expose(name).await;
    }
    world.pass().await;
    world.delete(paths::exposed(ServiceId::new(0))).await;
    world.pass_for(Key::Service(ServiceId::new(0))).await;
    assert_eq!((world.rules(0).len(), world.controller.awaits_confirmation()), (1, true));
    let problem = world.problem(0).unwrap();
    assert!(problem.contains("second read: an exposed flag is gone"), "{problem}");
    // Meanwhile a command is carried out at once.
    world.operator.unexpose(&"b".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Service(ServiceId::new(1))).await;
    assert_eq!((world.rules(0).len(), world.rules(1).len()), (1, 0));
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass().await;
    assert_eq!((world.rules(0).len(), world.problem(0)), (0, None));
    assert!(!world.controller.awaits_confirmation());
}

/// The rules stay even if no report says which unit they were opened for.
#[tokio::test(start_paused = true)]
async fn a_deleted_container_closes_nothing_without_reports() {
    for deleted in [paths::units(), paths::services()] {
        let mut world = World::new().await;
        let unit = world.deploy("a").await;
        world.open(unit, "80").await;
        world.expose("a").await;
        world.pass().await;
        world.delete_all(paths::firewall_report(MachineId::new(0))).await;
        world.delete_all(deleted.clone()).await;
        world.controller.drop_caches();
        for _ in 0..4 {
            tokio::time::advance(CONFIRM_AFTER).await;
            world.pass().await;
        }
        assert_eq!(world.rules(0), ["80/tcp"], "{deleted}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_unit_whose_record_is_missing_can_be_removed() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.deploy("b").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.delete_all(paths::unit(unit)).await;
    world.pass_often(unit).await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    assert!(world.problem(0).unwrap().contains("`juju remove-unit`"), "{:?}", world.problem(0));
    world.operator.remove_unit(&"a/0".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Machine(MachineId::new(0))).await;
    assert_eq!((world.rules(0).len(), world.problem(0)), (0, None));
}
