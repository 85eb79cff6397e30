//! Clients and nodes that are slow, and clients with many calls.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use portcullis::fleet::dbus::connect::{Security, connect};
use portcullis::fleet::dbus::errors;
use portcullis::fleet::dbus::values::NodeUnitRow;

use crate::agent::Agent;
use crate::monitors::{change, monitor};
use crate::world::{Client, MANAGER, World, node_path};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_beyond_those_that_run_wait_for_them() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let on_bus = world.client().await;
    let operator = operator(&world).await;
    // The bus itself allows 128 calls at a time.
    for (client, calls) in [(&on_bus, 120), (&operator, 2_000)] {
        let path = node_path("n1");
        let calls = (0..calls).map(|_| client.call(&path, "GetUnitProperties", &"a.service"));
        for answer in join_all(calls).await {
            answer.unwrap();
        }
    }
}

/// More changes than the queue of a client has room for.
const UNITS: usize = 8_000;

async fn operator(world: &World) -> Client {
    let peer = connect(&world.unix, &Security::Plain).await.unwrap();
    Client::new(peer.connection, peer.messages)
}

/// Reports the state of all units. Calls of another client make sure that the agent does not send
/// faster than the manager reads.
async fn report_units(world: &World, agent: &Agent, active: &str) {
    let operator = operator(world).await;
    for at in 0..UNITS {
        agent.set_unit(&format!("u{at}.service"), active).await;
        if at % 500 == 499 {
            operator.call(&node_path("n1"), "GetUnitProperties", &"a.service").await.unwrap();
        }
    }
}

/// Receives changes until each unit has this state.
async fn all_units_are(client: &mut Client, active: &str) {
    let mut reached = BTreeSet::new();
    while reached.len() < UNITS {
        let (_, unit, state) = change(client).await;
        if state == active {
            reached.insert(unit);
        } else {
            reached.remove(&unit);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_bus_loses_no_final_state() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut client = world.client().await;
    let path = monitor(&client).await;
    client.call(&path, "Subscribe", &("n1", "*")).await.unwrap();
    agent.called("Subscribe *").await;
    world.pause_bus(true);
    report_units(&world, &agent, "active").await;
    report_units(&world, &agent, "failed").await;
    world.pause_bus(false);
    all_units_are(&mut client, "failed").await;
    // The monitor still exists.
    client.call(&path, "Close", &()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_that_reads_slowly_loses_no_final_state() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut operator = operator(&world).await;
    let path = monitor(&operator).await;
    operator.call(&path, "Subscribe", &("n1", "*")).await.unwrap();
    agent.called("Subscribe *").await;
    report_units(&world, &agent, "active").await;
    report_units(&world, &agent, "failed").await;
    all_units_are(&mut operator, "failed").await;
    operator.call(&path, "Close", &()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_above_the_limit_of_a_message_is_an_error() {
    let world = World::start(&["n1", "n2"]).await;
    let mut agents = Vec::new();
    for name in ["n1", "n2"] {
        let agent = Agent::register(&world.tcp, name).await.unwrap();
        // The answer of each node is below the limit, and both together are above it.
        agent.set_unit(&"x".repeat(5 << 20), "active").await;
        agents.push(agent);
    }
    let operator = operator(&world).await;
    let refused = operator.call(MANAGER, "ListUnits", &()).await.unwrap_err();
    assert_eq!(refused.name, errors::LIMITS_EXCEEDED);
    operator.call(MANAGER, "ListNodes", &()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_answer_is_left_out_of_a_list() {
    let world = World::start(&["n1", "n2"]).await;
    let n1 = Agent::register(&world.tcp, "n1").await.unwrap();
    let n2 = Agent::register(&world.tcp, "n2").await.unwrap();
    n1.set_unit("a.service", "active").await;
    n2.set_unit("stuck-list.service", "active").await;
    let client = world.client().await;
    let path = node_path("n2");
    // A call that ends only after the longest wait for a node begins first.
    let stuck = client.call(&path, "FreezeUnit", &"stuck.service");
    let listed = async {
        n2.called("FreezeUnit stuck.service").await;
        client.call(MANAGER, "ListUnits", &()).await.unwrap()
    };
    tokio::select! {
        _ = stuck => panic!("the list took as long as a call of one node"),
        listed = listed => {
            let rows: Vec<NodeUnitRow> = listed.body().deserialize().unwrap();
            let rows: Vec<_> = rows.iter().map(|row| (row.0.as_str(), row.1.as_str())).collect();
            assert_eq!(rows, [("n1", "a.service")]);
        }
    }
}
