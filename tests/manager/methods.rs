//! Every method and property of the public API, with good and with bad arguments.

use portcullis::fleet::dbus::api::{self, Interface};
use portcullis::fleet::dbus::errors;
use portcullis::fleet::dbus::values::NodeUnitRow;
use zbus::{Message, OwnedObjectPath, Structure, Variant};

use crate::agent::Agent;
use crate::world::{Client, MANAGER, World, node_path};

/// An argument with this signature.
fn sample(name: &str, signature: &str) -> Variant<'static> {
    match (name, signature) {
        ("mode", _) => "replace".into(),
        ("who", _) => "main".into(),
        (_, "s") => "a.service".into(),
        (_, "as") => vec!["a.service"].into(),
        (_, "b") => false.into(),
        (_, "i") => 15_i32.into(),
        (_, "u") => 10_u32.into(),
        (_, "a(sv)") => Vec::<(String, Variant<'_>)>::new().into(),
        (_, "a(sa(sv))") => Vec::<(String, Vec<(String, Variant<'_>)>)>::new().into(),
        other => panic!("no sample for {other:?}"),
    }
}

async fn call_with_samples(client: &Client, path: &str, method: &api::Method) -> Message {
    let mut arguments = zbus::wire::StructureBuilder::new();
    for (name, signature) in method.input {
        arguments.push_value(sample(name, signature));
    }
    let called = if method.input.is_empty() {
        client.call(path, method.name, &()).await
    } else {
        let arguments: Structure<'_> = arguments.build().unwrap();
        client.call(path, method.name, &arguments).await
    };
    called.unwrap_or_else(|error| panic!("{}: {error}", method.name))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_of_a_node_reaches_its_agent_and_returns_what_the_introspection_data_say() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    agent.set_unit("a.service", "active").await;
    let client = world.client().await;
    for method in api::NODE.methods {
        let reply = call_with_samples(&client, &node_path("n1"), method).await;
        let expected: String = method.output.iter().map(|(_, signature)| *signature).collect();
        let found = reply.body().signature().to_string();
        let found = found.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(&found);
        assert_eq!(found, expected, "{}", method.name);
        let with_unit = format!("{} a.service", method.name);
        let is_named = method.input.first().is_some_and(|(_, signature)| *signature == "s");
        agent.called(if is_named { &with_unit } else { method.name }).await;
    }
    // The manager lists the units of all nodes, with the node first.
    let reply = client.call(MANAGER, "ListUnits", &()).await.unwrap();
    let body = reply.body();
    assert_eq!(body.signature().to_string(), "a(sssssssouso)");
    let rows: Vec<NodeUnitRow> = body.deserialize().unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].0.as_str(), rows[0].1.as_str()), ("n1", "a.service"));
    let reply = client.call(MANAGER, "ListUnitFiles", &()).await.unwrap();
    let files: Vec<(String, String, String)> = reply.body().deserialize().unwrap();
    assert_eq!(files, [("n1".into(), "/a.service".into(), "enabled".into())]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_listed_with_their_status_and_properties() {
    let world = World::start(&["n1", "rack-2.b"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let client = world.client().await;
    let reply = client.call(MANAGER, "ListNodes", &()).await.unwrap();
    let nodes: Vec<(String, OwnedObjectPath, String)> = reply.body().deserialize().unwrap();
    let shown: Vec<_> =
        nodes.iter().map(|(name, path, status)| (&**name, path.as_str(), &**status)).collect();
    let path = "/org/containers/hirte/node/rack_2d2_2eb";
    assert_eq!(shown, [("n1", "/org/containers/hirte/node/n1", "online"), ("rack-2.b", path, "offline")]);
    let reply = client.call(MANAGER, "GetNode", &"rack-2.b").await.unwrap();
    assert_eq!(reply.body().deserialize::<OwnedObjectPath>().unwrap().as_str(), path);
    assert_eq!(client.property::<Vec<String>>(MANAGER, "Manager", "Nodes").await, ["n1", "rack-2.b"]);
    assert_eq!(client.property::<String>(MANAGER, "Manager", "Status").await, "degraded");
    assert_eq!(client.property::<String>(path, "Node", "Name").await, "rack-2.b");
    assert_eq!(client.property::<u64>(path, "Node", "LastSeenTimestamp").await, 0);
    assert_eq!(client.property::<String>(&node_path("n1"), "Node", "PeerIp").await, "127.0.0.1");
    assert!(client.property::<u64>(&node_path("n1"), "Node", "LastSeenTimestamp").await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_calls_are_refused_with_the_error_that_a_client_expects() {
    let world = World::start(&["n1", "n2"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let client = world.client().await;
    let (n1, n2) = (node_path("n1"), node_path("n2"));
    let long = format!("{}.service", "a".repeat(300));
    let reply = client.call(MANAGER, "CreateMonitor", &()).await.unwrap();
    let monitor: OwnedObjectPath = reply.body().deserialize().unwrap();
    let monitor = monitor.as_str();
    let two = |a: &str, b: &str| Structure::from((a.to_owned(), b.to_owned()));
    let one = |a: &str| Structure::from((a.to_owned(),));
    for (path, member, body, expected) in [
        (n1.as_str(), "StartUnit", two("missing.service", "replace"), errors::NO_SUCH_UNIT),
        (&n1, "StartUnit", two("a.service", "isolate"), errors::INVALID_ARGS),
        (&n1, "StartUnit", two(&long, "replace"), errors::INVALID_ARGS),
        (&n1, "StartUnit", two("a b.service", "replace"), errors::INVALID_ARGS),
        (&n1, "StartUnit", two("", "replace"), errors::INVALID_ARGS),
        (&n1, "StartUnit", one("a.service"), errors::INVALID_ARGS),
        (&n1, "GetUnitProperties", one(&long), errors::INVALID_ARGS),
        (&n1, "GetUnitProperties", one("missing.service"), errors::NO_SUCH_UNIT),
        (&n1, "Explode", one("a.service"), errors::UNKNOWN_METHOD),
        (&n2, "StartUnit", two("a.service", "replace"), errors::OFFLINE),
        (&n2, "FreezeUnit", one("a.service"), errors::OFFLINE),
        (&node_path("n3"), "FreezeUnit", one("a.service"), errors::UNKNOWN_OBJECT),
        ("/org/containers/hirte/node/a_", "FreezeUnit", one("a.service"), errors::UNKNOWN_OBJECT),
        (MANAGER, "GetNode", one("n3"), errors::NO_SUCH_NODE),
        (MANAGER, "GetNode", one("a_b"), errors::NO_SUCH_NODE),
        (MANAGER, "SetLogLevel", one("loud"), errors::INVALID_ARGS),
        (monitor, "Subscribe", two("n3", "*"), errors::NO_SUCH_NODE),
        (monitor, "Subscribe", two("n1", &long), errors::INVALID_ARGS),
        (monitor, "Unsubscribe", Structure::from((77_u32,)), errors::NO_SUCH_SUBSCRIPTION),
        (monitor, "Unsubscribe", two("n1", "*"), errors::NO_SUCH_SUBSCRIPTION),
        (monitor, "Get", two("org.containers.hirte.Monitor", "Nodes"), errors::UNKNOWN_PROPERTY),
    ] {
        let error = client.call(path, member, &body).await.expect_err(member);
        assert_eq!(error.name, expected, "{path} {member} {body:?}: {error}");
        assert!(error.message.len() < 300, "{error}");
    }
    let missing = client.call("/org/containers/hirte/job/1000", "Cancel", &()).await.unwrap_err();
    assert_eq!(missing.name, errors::UNKNOWN_OBJECT);
    let set = ("org.containers.hirte.Manager", "Status", Variant::from("up"));
    assert_eq!(client.call(MANAGER, "Set", &set).await.unwrap_err().name, errors::PROPERTY_READ_ONLY);
    // The loss of the node ends a call that is under way.
    let path = node_path("n1");
    let frozen = client.call(&path, "FreezeUnit", &"stuck.service");
    let killed = async {
        agent.called("FreezeUnit stuck.service").await;
        agent.kill();
    };
    let (lost, ()) = tokio::join!(frozen, killed);
    assert_eq!(lost.unwrap_err().name, errors::OFFLINE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busctl_shows_every_member_and_calls_methods() {
    let world = World::start(&["n1"]).await;
    let agent = Agent::register(&world.tcp, "n1").await.unwrap();
    agent.set_unit("a.service", "active").await;
    let busctl = |arguments: &[&str]| {
        let mut command = tokio::process::Command::new("busctl");
        command.arg(format!("--address={}", world.bus)).args(arguments);
        async move {
            let output = command.output().await.expect("busctl");
            let (out, err) =
                (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{err}");
            out.into_owned()
        }
    };
    let name = "org.containers.hirte";
    let objects: [(&str, &Interface); 2] =
        [(MANAGER, &api::MANAGER), ("/org/containers/hirte/node/n1", &api::NODE)];
    for (path, interface) in objects {
        let shown = busctl(&["introspect", name, path, interface.name]).await;
        let methods = interface.methods.iter().map(|method| (method.name, "method"));
        let signals = interface.signals.iter().map(|signal| (signal.name, "signal"));
        let properties = interface.properties.iter().map(|property| (property.name, "property"));
        for (member, kind) in methods.chain(signals).chain(properties) {
            let is_shown = |line: &str| line.starts_with(&format!(".{member} ")) && line.contains(kind);
            assert!(shown.lines().any(is_shown), "{kind} {member} in {shown}");
        }
    }
    let tree = busctl(&["tree", name, "--list"]).await;
    assert!(tree.lines().any(|line| line == "/org/containers/hirte/node/n1"), "{tree}");
    let listed = busctl(&["call", name, MANAGER, api::MANAGER.name, "ListUnits"]).await;
    assert!(listed.starts_with("a(sssssssouso) 1 \"n1\" \"a.service\""), "{listed}");
    let node = "/org/containers/hirte/node/n1";
    let started =
        busctl(&["call", name, node, api::NODE.name, "StartUnit", "ss", "a.service", "replace"]).await;
    assert_eq!(started.trim(), "o \"/org/containers/hirte/job/1\"");
    let status = busctl(&["get-property", name, node, api::NODE.name, "Status"]).await;
    assert_eq!(status.trim(), "s \"online\"");
}

#[test]
fn the_reference_page_is_generated_from_the_introspection_data() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/dbus-api.md");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, api::document()).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == api::document(), "docs/reference/dbus-api.md differs; BLESS=1 writes it again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_an_agent_with_another_type_is_an_error() {
    let world = World::start(&["n1"]).await;
    let _agent = Agent::register(&world.tcp, "n1").await.unwrap();
    let client = world.client().await;
    client.call(&node_path("n1"), "GetUnitFileState", &"a.service").await.unwrap();
    let refused = client.call(&node_path("n1"), "GetUnitFileState", &"number.service").await.unwrap_err();
    assert_eq!(refused.name, errors::FAILED);
    assert_eq!(refused.message, "node 'n1' answered GetUnitFileState with 'u'");
}
