//! Tests of the rights of users on a bus, and of the API for operators.

use portcullis::fleet::dbus::connect::{Security, connect};
use tokio::process::Command;

use crate::agent::Agent;
use crate::world::{Client, MANAGER, World, node_path};

/// Runs `busctl call` as a user without rights, or as this one. Returns whether it succeeded, and
/// its errors.
async fn busctl(world: &World, as_nobody: bool, call: &[&str]) -> (bool, String) {
    let mut command = if as_nobody {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "busctl"]);
        command
    } else {
        Command::new("busctl")
    };
    command.arg(format!("--address={}", world.bus)).args(["call", "org.containers.hirte"]).args(call);
    let output = command.output().await.expect("busctl");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unprivileged_user_may_look_and_not_change() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let (node, interface) = (node_path("n1"), "org.containers.hirte.Node");
    let start = [node.as_str(), interface, "StartUnit", "ss", "a.service", "replace"];
    let kill = [node.as_str(), interface, "KillUnit", "ssi", "a.service", "main", "15"];
    let look = [MANAGER, "org.containers.hirte.Manager", "ListUnits"];
    let monitor = [MANAGER, "org.containers.hirte.Manager", "CreateMonitor"];
    for call in [&look[..], &monitor] {
        let (looked, errors) = busctl(&world, true, call).await;
        assert!(looked, "{errors}");
    }
    for call in [&start[..], &kill] {
        let (changed, errors) = busctl(&world, true, call).await;
        assert!(!changed && errors.contains("Access denied"), "{errors}");
        let (changed, errors) = busctl(&world, false, call).await;
        assert!(changed, "{errors}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_the_group_may_change() {
    let policy = portcullis::fleet::dbus::accept::TcpPolicy { tls: None, allow_plain: false };
    let group = Some("nogroup".to_owned());
    let world = World::with(&["n1"], crate::world::patient(), policy, group).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let node = node_path("n1");
    let start = [node.as_str(), "org.containers.hirte.Node", "StartUnit", "ss", "a.service", "replace"];
    let (changed, errors) = busctl(&world, true, &start).await;
    assert!(changed, "{errors}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_on_this_host_get_the_api_on_the_unix_socket() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.unix, "n1").await.unwrap();
    let peer = connect(&world.unix, &Security::Plain).await.unwrap();
    let mut operator = Client::new(peer.connection, peer.messages);
    let id = operator.job("n1", "StartUnit", "a.service", "fail").await.unwrap();
    assert_eq!(operator.removed().await, (id, "done".to_owned()));
    // Plain TCP proves nothing: it is for agents only.
    let peer = connect(&world.tcp, &Security::Plain).await.unwrap();
    let stranger = Client::new(peer.connection, peer.messages);
    let refused = stranger.call(MANAGER, "ListNodes", &()).await.unwrap_err();
    assert_eq!(refused.name, portcullis::fleet::dbus::errors::ACCESS_DENIED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_on_the_unix_socket_get_the_last_signals_of_a_manager_that_stops() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let peer = connect(&world.unix, &Security::Plain).await.unwrap();
    let mut operator = Client::new(peer.connection, peer.messages);
    let mut jobs = Vec::new();
    for at in 0..1_000 {
        jobs.push(operator.job("n1", "StartUnit", &format!("slow{at}.service"), "fail").await.unwrap());
    }
    world.stop().await;
    for id in jobs {
        assert_eq!(operator.removed().await, (id, "cancelled".to_owned()));
    }
}
