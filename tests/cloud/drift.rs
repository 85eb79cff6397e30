//! Changes by other clients of the same account.

use crate::controller::DEADLINE;
use crate::harness::wait_for;
use crate::world::World;

pub(crate) fn changes_by_hand_are_reverted_unless_foreign(world: &World) {
    let (controller, instance) = world.exposed("log", 1);
    let group = world.group(0).unwrap().group_id.unwrap();

    world.wait(world.account.open(&group, 5432));
    world.wait(world.account.close(&group, 80));
    world.has_ports(0, &[80, 5432]);
    world.wait_for_explanation(0, "5432/tcp");

    world.wait(world.account.other.delete_security_group().group_id(&group).send()).unwrap();
    world.has_ports(0, &[80]);
    let made = world.group(0).unwrap().group_id.unwrap();
    assert_ne!(made, group);
    wait_for("instance in its group", DEADLINE, || {
        let names = world.wait(world.account.groups_of(&instance));
        names.contains(&"juju-local-0".to_owned()).then_some(())
    });

    // Outside its group, an instance accepts no traffic. LocalStack can only remove adopted
    // instances from their group.
    let theirs = world.wait(world.account.make_instance());
    world.operator.does(&["add-machine", "--instance-id", &theirs]);
    let in_both = || {
        let names = world.wait(world.account.groups_of(&theirs));
        (names == ["default", "juju-local-1"]).then_some(())
    };
    wait_for("adopted instance in its group", DEADLINE, in_both);
    world.wait(world.account.leave_only("default", &theirs));
    wait_for("adopted instance in its group again", DEADLINE, in_both);
    wait_for("no problem", DEADLINE, || world.problem(0).is_none().then_some(()));
    controller.stop();
}

pub(crate) fn lost_instance_is_reported(world: &World) {
    let controller = world.controller("log", 1);
    world.operator.does(&["add-machine"]);
    world.operator.does(&["add-machine"]);
    let (lost, healthy) = (world.instance(0), world.instance(1));
    world.wait(world.account.other.terminate_instances().instance_ids(&lost).send()).unwrap();
    world.has_problem(0, &format!("instance {lost} has ended"));
    assert_eq!(world.machine(0)["instance-state"], "terminated");
    assert_eq!((world.problem(1), world.instance_state(&healthy).as_str()), (None, "running"));
    world.wait_for_explanation(0, "has ended");
    world.operator.does(&["add-machine", "--instance-id", "i-0123456789abcdef0"]);
    world.has_problem(2, "instance i-0123456789abcdef0 is not there");
    controller.stop();
}

pub(crate) fn full_group_is_reported_and_affects_no_other(world: &World) {
    let controller = world.controller("log", 1);
    for (machine, service) in [(0, "wordpress"), (1, "blog")] {
        world.operator.does(&["add-machine"]);
        world.instance(machine);
        world.deploy(service, machine);
    }
    let full = world.group(0).unwrap().group_id.unwrap();
    world.wait(async {
        for port in 1001..=1060 {
            world.account.open(&full, port).await;
        }
    });
    for service in ["wordpress", "blog"] {
        world.hook(&format!("{service}/0"), "open-port 80");
        world.operator.does(&["expose", service]);
    }
    world.has_ports(1, &[80]);
    world.has_problem(0, "is full: ");
    world.wait_for_explanation(0, "is full: ");
    assert_eq!(world.problem(1), None);
    world.wait(world.account.close(&full, 1001));
    wait_for("room, and the port in it", DEADLINE, || world.ports(0)?.contains(&80).then_some(()));
    wait_for("no problem", DEADLINE, || world.problem(0).is_none().then_some(()));
    assert_eq!(world.ports(0).unwrap().len(), 60, "the others are left alone");
    controller.stop();
}
