//! What EC2 refuses, and what was set up wrongly.

use std::net::TcpListener;

use crate::cloud::front::Act;
use crate::controller::{Controller, DEADLINE};
use crate::harness::wait_for;
use crate::world::World;

pub(crate) fn an_endpoint_that_is_down_is_shown_and_waited_for(world: &World) {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    world.operator.does(&["add-machine"]);
    let mut command = world.controller_command("ec2", &["--resync", "1"]);
    command.env("AWS_ENDPOINT_URL", format!("http://{nobody}"));
    let lost = Controller::start(command, &world.operator, "log");
    world.has_problem(0, &format!("cannot reach EC2 at http://{nobody}"));
    world.explains(0, "cannot reach EC2");
    lost.ends();
    let controller = world.controller("log", 1);
    world.instance(0);
    wait_for("no problem", DEADLINE, || world.problem(0).is_none().then_some(()));
    controller.ends();
}

pub(crate) fn a_launch_that_is_refused_is_shown(world: &World) {
    world.account.front.always("RunInstances", Act::Refuse(403, "UnauthorizedOperation"));
    let controller = world.controller("log", 3600);
    let theirs = world.wait(world.account.make_instance());
    world.operator.does(&["add-machine"]);
    world.operator.does(&["add-machine", "--instance-id", &theirs]);
    world.deploy("wordpress", 1);
    world.hook("wordpress/0", "open-port 80");
    world.operator.does(&["expose", "wordpress"]);
    world.has_ports(1, &[80]);
    world.has_problem(0, "not allowed for machine 0");
    assert_eq!(world.machine(0)["instance-id"], "pending");
    assert_eq!(world.problem(1), None, "nobody else is held up");
    controller.ends();
}

pub(crate) fn a_dry_run_changes_nothing_and_says_so(world: &World) {
    let real = world.controller("real", 3600);
    world.operator.does(&["add-machine"]);
    world.instance(0);
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    real.ends();
    world.requests();
    world.operator.does(&["expose", "wordpress"]);
    let command = world.controller_command("dry-run", &["--resync", "1"]);
    let dry = Controller::start(command, &world.operator, "dry");
    world.has_problem(0, "dry run: machine 0 is left as it is; would open 80/tcp from 0.0.0.0/0");
    let plan = world.operator.juju(&["firewall", "plan"]);
    assert!(plan.code == 2 && plan.stdout.contains("80/tcp"), "{plan:?}");
    world.operator.does(&["add-machine"]);
    world.has_problem(1, "not provisioned yet");
    // Several resyncs later it has said each thing once, and changed nothing.
    let mut seen = 0;
    wait_for("several looks", DEADLINE, || {
        let (changes, looks) = world.requests();
        assert_eq!(changes, 0, "a dry run changed something");
        seen += looks;
        (seen >= 3).then_some(())
    });
    assert_eq!(dry.log().matches("firewall left alone").count(), 1, "{}", dry.log());
    assert_eq!(world.ports(0).unwrap().len(), 0);
    dry.ends();
}
