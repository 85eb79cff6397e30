//! Monitors: first states, changes, losses, and the end of the client.

use portcullis::fleet::dbus::connect::{Security, connect};
use portcullis::fleet::dbus::errors;
use portcullis::fleet::dbus::values::Properties;
use zbus::OwnedObjectPath;

use crate::agent::Agent;
use crate::world::{Client, MANAGER, World};

pub(crate) async fn monitor(client: &Client) -> String {
    let reply = client.call(MANAGER, "CreateMonitor", &()).await.unwrap();
    let path: OwnedObjectPath = reply.body().deserialize().unwrap();
    path.as_str().to_owned()
}

/// Returns node, unit and active state of the next change.
pub(crate) async fn change(client: &mut Client) -> (String, String, String) {
    let message = client.signal("UnitPropertiesChanged").await;
    let body = message.body();
    let (node, unit, properties): (String, String, Properties) = body.deserialize().unwrap();
    let active = <&str>::try_from(&properties["ActiveState"]).unwrap().to_owned();
    (node, unit, active)
}

/// Returns the arguments of the next signal with this name.
async fn text(client: &mut Client, member: &str) -> String {
    let message = client.signal(member).await;
    let body = message.body();
    let arguments: zbus::Structure<'_> = body.deserialize().unwrap();
    let texts = arguments.fields().iter().map(|value| <&str>::try_from(value).unwrap_or("?"));
    texts.collect::<Vec<_>>().join(" ")
}

fn expected(node: &str, unit: &str, active: &str) -> (String, String, String) {
    (node.to_owned(), unit.to_owned(), active.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_monitor_gets_the_first_states_and_each_change_once() {
    let world = World::start(&["n1", "n2"]).await;
    let n1 = Agent::register(&world.tcp, "n1").await.unwrap();
    let n2 = Agent::register(&world.tcp, "n2").await.unwrap();
    n1.set_unit("a.service", "active").await;
    n2.set_unit("b.socket", "active").await;
    let mut client = world.client().await;
    let path = monitor(&client).await;
    client.call(&path, "Subscribe", &("*", "*.service")).await.unwrap();
    assert_eq!(text(&mut client, "UnitNew").await, "n1 a.service virtual");
    assert_eq!(text(&mut client, "UnitStateChanged").await, "n1 a.service active sub virtual");
    assert_eq!(change(&mut client).await, expected("n1", "a.service", "active"));
    // The same state again is no change, and the socket of the other node does not match.
    n1.set_unit("a.service", "active").await;
    n2.set_unit("b.socket", "failed").await;
    n1.set_unit("a.service", "failed").await;
    assert_eq!(text(&mut client, "UnitStateChanged").await, "n1 a.service failed sub real");
    assert_eq!(change(&mut client).await, expected("n1", "a.service", "failed"));
    n2.set_unit("c.service", "active").await;
    assert_eq!(change(&mut client).await, expected("n2", "c.service", "active"));
    // A lost node, and its return.
    n1.kill();
    assert_eq!(text(&mut client, "UnitRemoved").await, "n1 a.service virtual");
    let n1 = Agent::register(&world.tcp, "n1").await.unwrap();
    n1.called("Subscribe *.service").await;
    n1.set_unit("a.service", "active").await;
    assert_eq!(text(&mut client, "UnitNew").await, "n1 a.service virtual");
    n1.emit("UnitRemoved", &"a.service").await;
    assert_eq!(text(&mut client, "UnitRemoved").await, "n1 a.service real");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_end_by_id_by_name_and_with_their_client() {
    let world = World::start(&["n1"]).await;
    let n1 = Agent::register(&world.tcp, "n1").await.unwrap();
    let client = world.client().await;
    let path = monitor(&client).await;
    let reply = client.call(&path, "Subscribe", &("n1", "a*")).await.unwrap();
    let id: u32 = reply.body().deserialize().unwrap();
    client.call(&path, "Unsubscribe", &id).await.unwrap();
    n1.called("Unsubscribe a*").await;
    client.call(&path, "Subscribe", &("n1", "b*")).await.unwrap();
    client.call(&path, "Unsubscribe", &("n1", "b*")).await.unwrap();
    n1.called("Unsubscribe b*").await;
    // Node and units as one structure, as pyhirte has them.
    client.call(&path, "SubscribeList", &(("n1", vec!["c.service", "d.service"]),)).await.unwrap();
    n1.called("Subscribe d.service").await;
    client.call(&path, "Close", &()).await.unwrap();
    n1.called("Unsubscribe d.service").await;
    let gone = client.call(&path, "Subscribe", &("n1", "a*")).await.unwrap_err();
    assert_eq!(gone.name, errors::UNKNOWN_OBJECT);
    // Monitors belong to the client that created them.
    let path = monitor(&client).await;
    let other = world.client().await;
    let denied = other.call(&path, "Subscribe", &("n1", "a*")).await.unwrap_err();
    assert_eq!(denied.name, errors::UNKNOWN_OBJECT);
    client.call(&path, "Subscribe", &("n1", "e*")).await.unwrap();
    n1.called("Subscribe e*").await;
    client.disconnect().await;
    n1.called("Unsubscribe e*").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_and_monitors_of_a_client_are_limited() {
    let world = World::start(&["n1"]).await;
    let client = world.client().await;
    let path = monitor(&client).await;
    let many: Vec<String> = (0..10_000).map(|at| format!("{at}.service")).collect();
    let refused = client.call(&path, "SubscribeList", &("n1", many)).await.unwrap_err();
    assert_eq!(refused.name, errors::LIMITS_EXCEEDED);
    client.call(&path, "Subscribe", &("n1", "a*")).await.unwrap();
    let mut monitors = 1;
    while client.call(MANAGER, "CreateMonitor", &()).await.is_ok() {
        monitors += 1;
        assert!(monitors <= 64, "no limit");
    }
    let other = world.client().await;
    monitor(&other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_thousands_of_subscriptions_registers_and_stays_online() {
    let world = World::start(&["n1"]).await;
    let mut clients = Vec::new();
    for at in 0..5 {
        let client = world.client().await;
        let path = monitor(&client).await;
        let patterns: Vec<String> = (0..1_000).map(|pattern| format!("c{at}-{pattern}.service")).collect();
        client.call(&path, "SubscribeList", &("*", patterns)).await.unwrap();
        clients.push((client, path));
    }
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    agent.called("Subscribe c4-999.service").await;
    agent.set_unit("c4-999.service", "active").await;
    let (client, _) = &mut clients[4];
    assert_eq!(change(client).await, expected("n1", "c4-999.service", "active"));
    // While the node is online, thousands of changes at once do not end its connection either.
    let (client, path) = &clients[0];
    client.call(path, "Close", &()).await.unwrap();
    agent.called("Unsubscribe c0-999.service").await;
    let status = client.property::<String>(&crate::world::node_path("n1"), "Node", "Status").await;
    assert_eq!(status, "online");
}

/// The ids of all monitors.
async fn monitors(client: &Client) -> Vec<String> {
    let reply = client.call(&format!("{MANAGER}/monitor"), "Introspect", &()).await.unwrap();
    let document: String = reply.body().deserialize().unwrap();
    let names = document.split("<node name=\"").skip(1);
    names.map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_wait_create_no_monitor_after_their_client_has_left() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let mut observer = world.client().await;
    let own = monitor(&observer).await;
    let on_bus = world.client().await;
    let operator = connect(&world.unix, &Security::Plain).await.unwrap();
    let operator = Client::new(operator.connection, operator.messages);
    // As many calls as are executed at once get no answer; those that create monitors wait.
    for client in [&on_bus, &operator] {
        for _ in 0..64 {
            let node = crate::world::node_path("n1");
            client.send(&node, "FreezeUnit", &"stuck.service").await;
        }
        for _ in 0..20 {
            client.send(MANAGER, "CreateMonitor", &()).await;
        }
    }
    agent.called_times("FreezeUnit stuck.service", 128).await;
    assert_eq!(monitors(&observer).await.len(), 1);
    on_bus.disconnect().await;
    operator.disconnect().await;
    // The stuck calls end when the node is lost, and then those that wait would be executed.
    agent.kill();
    observer.until_status("n1", "offline").await;
    for _ in 0..200 {
        assert_eq!(monitors(&observer).await.len(), 1, "a monitor without a client");
    }
    observer.call(&own, "Close", &()).await.unwrap();
}
