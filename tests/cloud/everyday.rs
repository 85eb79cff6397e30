//! The operator's everyday commands.

use std::time::Duration;

use crate::controller::DEADLINE;
use crate::harness::wait_for;
use crate::world::World;

pub(crate) fn machine_is_launched_opened_closed_and_terminated(world: &World) {
    let controller = world.controller("log", 3600);
    world.operator.does(&["add-machine"]);
    let instance = world.instance(0);
    assert_eq!(world.wait(world.account.groups_of(&instance)), ["juju-local", "juju-local-0"]);
    wait_for("running instance", DEADLINE, || {
        (world.machine(0)["instance-state"] == "running").then_some(())
    });
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    // No calls of the launch are pending after this.
    world.quiet_for(Duration::from_secs(1));

    world.operator.does(&["expose", "wordpress"]);
    world.has_ports(0, &[80]);
    assert_eq!(world.requests(), (1, 0), "one authorize, and nothing is read again");
    world.hook("wordpress/0", "open-port 443/tcp");
    world.has_ports(0, &[80, 443]);
    world.operator.does(&["unexpose", "wordpress"]);
    world.has_ports(0, &[]);
    assert_eq!(world.requests(), (2, 0), "one authorize, one revoke");

    world.operator.does(&["destroy-service", "wordpress"]);
    world.operator.does(&["terminate-machine", "0"]);
    wait_for("end of the group", DEADLINE, || world.group(0).is_none().then_some(()));
    assert_eq!(world.instance_state(&instance), "terminated");
    assert!(!controller.log().contains("hunter2"), "the log has a secret");
    controller.stop();
}

pub(crate) fn adopted_instance_is_released_and_not_terminated(world: &World) {
    let controller = world.controller("log", 3600);
    let theirs = world.wait(world.account.make_instance());
    world.operator.does(&["add-machine", "--instance-id", &theirs]);
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    world.operator.does(&["expose", "wordpress"]);
    world.has_ports(0, &[80]);
    assert_eq!(world.wait(world.account.groups_of(&theirs)), ["default", "juju-local-0"]);
    assert!(world.machine(0)["dns-name"].is_string());

    world.operator.does(&["destroy-service", "wordpress"]);
    world.operator.does(&["terminate-machine", "0"]);
    wait_for("end of the group", DEADLINE, || world.group(0).is_none().then_some(()));
    assert_eq!(world.instance_state(&theirs), "running");
    assert_eq!(world.wait(world.account.groups_of(&theirs)), ["default"]);
    controller.stop();
}

/// The old environment leaves no group that would prevent the new one from launching.
pub(crate) fn destroyed_environment_can_be_created_again(world: &World) {
    let controller = world.controller("log", 3600);
    world.operator.does(&["add-machine"]);
    let instance = world.instance(0);
    world.deploy("wordpress", 0);
    world.operator.is_refused(
        &["destroy-environment", "--yes"],
        1,
        "is in use: services wordpress; machines 0",
    );
    world.operator.is_refused(&["destroy-environment", "--force"], 2, "confirm with --yes");
    world.operator.does(&["destroy-environment", "--yes", "--force"]);
    assert_eq!(world.instance_state(&instance), "terminated");
    assert!(world.group(0).is_none() && world.shared_group().is_none());
    world.operator.is_refused(&["status"], 1, "is not bootstrapped");
    controller.kill9();

    world.operator.does(&["bootstrap"]);
    let controller = world.controller("second", 3600);
    world.operator.does(&["add-machine"]);
    world.instance(0);
    // The shared group is also deleted after the last machine is terminated.
    world.operator.does(&["terminate-machine", "0"]);
    wait_for("end of the shared group", DEADLINE, || world.shared_group().is_none().then_some(()));
    controller.stop();
}

/// The store is lost with a machine in it, and a new store has the same environment name.
pub(crate) fn groups_of_a_lost_store_are_adopted_on_request(world: &World) {
    let controller = world.controller("log", 3600);
    world.operator.does(&["add-machine"]);
    let left = world.instance(0);
    controller.kill9();
    world.operator.does(&["destroy-environment", "--yes", "--force", "--leave-instances"]);
    world.operator.does(&["bootstrap"]);
    let controller = world.controller("second", 3600);
    // The group of machine 0 of the lost store has the same name as that of this machine 0.
    world.operator.does(&["add-machine"]);
    world.operator.does(&["add-machine"]);
    world.has_problem(1, "its tags are those of another environment or store");
    let adopted = world.operator.does(&["adopt-groups"]).stdout;
    assert!(adopted.contains("juju-local (sg-") && adopted.contains("): adopted from store "), "{adopted}");
    assert!(
        adopted.contains("juju-local-0 (sg-") && adopted.contains(&format!("instance {left} is in it")),
        "{adopted}"
    );
    world.instance(1);
    let none = world.operator.does(&["adopt-groups"]);
    assert!(none.stdout.contains("juju-local-0") && !none.stdout.contains("adopted from"), "{none:?}");
    assert_eq!(world.instance_state(&left), "running", "instances of the lost store keep running");
    controller.stop();
}

/// If a machine has IPv6, a port is opened and closed for IPv4 and IPv6.
pub(crate) fn vpc_with_ipv6_is_opened_for_both_families(world: &World) {
    let other = &world.account.other;
    let subnet = world.wait(async {
        let vpc = other.create_vpc().cidr_block("10.6.0.0/16").amazon_provided_ipv6_cidr_block(true);
        let vpc = vpc.send().await.unwrap().vpc.unwrap().vpc_id.unwrap();
        let made = other.create_subnet().vpc_id(vpc).cidr_block("10.6.1.0/24").send().await.unwrap();
        made.subnet.unwrap().subnet_id.unwrap()
    });
    let controller = world.controller_in(&subnet, "log");
    world.operator.does(&["add-machine"]);
    world.instance(0);
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    // No calls of the launch are pending after this.
    world.quiet_for(Duration::from_secs(1));
    world.operator.does(&["expose", "wordpress"]);
    let worlds = || {
        let group = world.group(0)?;
        let permissions = group.ip_permissions().iter().filter(|one| one.from_port() == Some(80));
        let sources = permissions.flat_map(|one| {
            let v4 = one.ip_ranges().iter().filter_map(|range| range.cidr_ip());
            v4.chain(one.ipv6_ranges().iter().filter_map(|range| range.cidr_ipv6())).map(str::to_owned)
        });
        Some(sources.collect::<Vec<String>>())
    };
    wait_for("both worlds", DEADLINE, || (worlds()? == ["0.0.0.0/0", "::/0"]).then_some(()));
    assert_eq!(world.requests(), (1, 0), "in one request");
    world.wait_for_explanation(0, "::/0");
    world.operator.does(&["unexpose", "wordpress"]);
    wait_for("neither world", DEADLINE, || worlds()?.is_empty().then_some(()));
    assert_eq!(world.requests(), (1, 0), "in one request");
    controller.stop();
}

pub(crate) fn next_controller_removes_leftover_groups(world: &World) {
    let first = world.controller("first", 3600);
    first.wait_for_log("leading");
    world.operator.does(&["add-machine"]);
    world.operator.does(&["add-machine"]);
    let (kept, ended) = (world.instance(0), world.instance(1));
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    world.operator.does(&["expose", "wordpress"]);
    world.has_ports(0, &[80]);
    let second = world.controller("second", 3600);
    first.kill9();
    world.hook("wordpress/0", "close-port 80");
    world.hook("wordpress/0", "open-port 81");
    world.operator.does(&["terminate-machine", "1"]);
    second.wait_for_log("leading");
    world.has_ports(0, &[81]);
    wait_for("end of the group", DEADLINE, || world.group(1).is_none().then_some(()));
    assert_eq!(world.instance_state(&ended), "terminated");
    assert_eq!(world.instance_state(&kept), "running");
    assert_eq!(world.instance(0), kept);
    second.stop();
}
