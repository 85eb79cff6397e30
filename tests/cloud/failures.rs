//! EC2's errors, and wrong configurations.

use std::net::SocketAddr;
use std::process::Command;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::cloud::front::Act;
use crate::controller::{Controller, DEADLINE};
use crate::harness::wait_for;
use crate::operator::{Output, output_of};
use crate::world::World;

/// Returns a controller without the variable `missing` and without the instance metadata service as
/// a fallback.
fn without(world: &World, missing: &str) -> Command {
    let mut command = world.controller_command("ec2", &["--resync", "1"]);
    command.env("AWS_EC2_METADATA_DISABLED", "true").env_remove(missing);
    command
}

/// Runs a controller that refuses to start, and returns its output without the lines of the log
/// level `info`: roles that have started before may log.
fn refusal(command: &mut Command) -> Output {
    let mut shown = output_of(command);
    let lines = shown.stderr.lines().filter(|line| !line.contains(" INFO "));
    shown.stderr = lines.map(|line| format!("{line}\n")).collect();
    shown
}

pub(crate) fn ec2_failures_are_reported_and_close_nothing(world: &World) {
    let (controller, _) = world.exposed("before", 3600);
    controller.stop();
    world.requests();

    refusal(&mut without(world, "AWS_REGION")).is_refusal(1, "no region for EC2");
    refusal(without(world, "").env("AWS_REGION", "no where"))
        .is_refusal(1, "no region of EC2 is called \"no where\"");

    let nobody = Controller::start(without(world, "AWS_ACCESS_KEY_ID"), &world.operator, "nobody");
    world.wait_for_problem(0, "no credentials for EC2");
    world.wait_for_explanation(0, "no credentials for EC2");
    nobody.stop();

    let mut command = without(world, "AWS_ENDPOINT_URL");
    command.env("AWS_REGION", "no-where-1");
    let lost = Controller::start(command, &world.operator, "lost");
    world.wait_for_problem(0, "cannot reach EC2 in region 'no-where-1' (is that the right one?)");
    world.wait_for_explanation(0, "cannot reach EC2 in region 'no-where-1'");
    lost.stop();

    // The port is reserved, and has no listener yet.
    let down = TcpSocket::new_v4().unwrap();
    down.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let endpoint = format!("http://{}", down.local_addr().unwrap());
    let mut command = world.launching_command(1);
    command.env("AWS_ENDPOINT_URL", &endpoint);
    let patient = Controller::start(command, &world.operator, "patient");
    world.hook("wordpress/0", "open-port 443");
    world.operator.does(&["add-machine"]);
    let problem = format!("cannot reach EC2 at {endpoint}");
    for machine in [0, 1] {
        world.wait_for_problem(machine, &problem);
        world.wait_for_explanation(machine, &problem);
    }
    let unit = &world.operator.status()["services"]["wordpress"]["units"]["wordpress/0"];
    assert_eq!(unit["firewall"], "pending", "{unit}");
    let why = unit["firewall-info"].to_string();
    assert!(why.contains("443/tcp opening") && why.contains(&problem), "{unit}");
    assert_eq!((world.requests(), world.ports(0).unwrap().len()), ((0, 0), 1), "open ports stay open");

    world.wait(async {
        tokio::spawn(relay(down.listen(64).unwrap(), world.account.front.address));
    });
    world.has_ports(0, &[80, 443]);
    world.instance(1);
    for machine in [0, 1] {
        wait_for("no problem", DEADLINE, || world.machine(machine).get("problem").is_none().then_some(()));
    }
    patient.stop();
}

async fn relay(listener: TcpListener, to: SocketAddr) {
    while let Ok((mut client, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut server = TcpStream::connect(to).await?;
            copy_bidirectional(&mut client, &mut server).await
        });
    }
}

pub(crate) fn refused_launch_is_reported(world: &World) {
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
    assert_eq!(world.problem(1), None, "other machines are not affected");
    controller.stop();
}

pub(crate) fn refused_termination_is_reported_with_ports_closed(world: &World) {
    let (first, instance) = world.exposed("first", 3600);
    // No controller runs that could close ports before the machine is removed.
    first.stop();
    world.operator.does(&["destroy-service", "wordpress"]);
    world.operator.does(&["add-machine"]);
    world.operator.does(&["terminate-machine", "0"]);
    world.account.front.always("TerminateInstances", Act::Refuse(400, "OperationNotPermitted"));
    let second = world.controller("second", 3600);
    world.has_ports(0, &[]);
    let explained =
        world.wait_for_explanation(0, "terminated, and not removed yet: not allowed for instance");
    assert_eq!(explained.code, 0, "{explained:?}");
    let plan = world.operator.juju(&["firewall", "plan"]);
    assert_eq!(plan.code, 2, "{plan:?}");
    assert!(plan.stdout.contains("machine 0\n  problem: terminated, and not removed yet"), "{plan:?}");
    assert_eq!(world.instance_state(&instance), "running");
    world.account.front.reset();
    second.stop();
    let third = world.controller("third", 3600);
    wait_for("the end of the instance", DEADLINE, || {
        (world.instance_state(&instance) == "terminated" && world.group(0).is_none()).then_some(())
    });
    wait_for("no problem in the status", DEADLINE, || {
        (world.operator.juju(&["firewall", "explain", "0"]).code == 1).then_some(())
    });
    third.stop();
}

pub(crate) fn dry_run_changes_nothing_and_is_reported(world: &World) {
    let real = world.controller("real", 3600);
    world.operator.does(&["add-machine"]);
    world.instance(0);
    world.deploy("wordpress", 0);
    world.hook("wordpress/0", "open-port 80");
    real.stop();
    world.requests();
    world.operator.does(&["expose", "wordpress"]);
    let command = world.controller_command("dry-run", &["--resync", "1"]);
    let dry = Controller::start(command, &world.operator, "dry");
    wait_for("the steps of the dry run", DEADLINE, || {
        let found = world.machine(0);
        let words = found["firewall-info"].as_str().unwrap_or_default().to_owned();
        (found["firewall"] == "dry-run" && words.contains("would open 80/tcp from 0.0.0.0/0")).then_some(())
    });
    assert!(world.problem(0).is_none() && world.machine(0).get("problem").is_none());
    let plan = world.operator.juju(&["firewall", "plan"]);
    assert!(plan.code == 0 && plan.stdout.contains("80/tcp  dry-run"), "{plan:?}");
    world.operator.does(&["add-machine"]);
    world.has_problem(1, "not provisioned yet");
    // After several resyncs, each message was logged once and nothing was changed.
    let mut seen = 0;
    wait_for("several looks", DEADLINE, || {
        let (changes, looks) = world.requests();
        assert_eq!(changes, 0, "a dry run changed something");
        seen += looks;
        (seen >= 3).then_some(())
    });
    assert_eq!(dry.log().matches("firewall left unchanged").count(), 1, "{}", dry.log());
    assert_eq!(world.ports(0).unwrap().len(), 0);
    dry.stop();
}
