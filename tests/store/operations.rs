//! The typed operations: their results, their refusals, and concurrent calls.

use super::Backend;
use portcullis::model::{MachineId, ServiceName, UnitId, UnitName};
use portcullis::store::paths::{self, NodePath};
use portcullis::store::records::Placement;
use portcullis::store::tree::{self, Tree, Write};
use portcullis::store::{Bootstrap, Credential, Deploy, Environment, Error, Flag, UnitPorts};
use std::fmt::Debug;

pub(super) fn operator() -> Credential {
    Credential::parse("operator:hunter2").unwrap()
}

pub(super) fn controller() -> Credential {
    Credential::parse("controller:hunter3").unwrap()
}

pub(super) fn wanted(placement: Placement) -> Bootstrap {
    Bootstrap {
        environment: "prod".parse().unwrap(),
        placement,
        operator: operator().identity(),
        controller: controller().identity(),
    }
}

pub(super) async fn fresh<P: Backend>(backend: &P, placement: Placement) -> Environment<P::Tree> {
    let tree = backend.connect(Some(&operator())).await;
    Environment::bootstrap(tree, &wanted(placement)).await.unwrap()
}

pub(super) fn deploy(name: &str, units: u32) -> Deploy {
    Deploy {
        service: name.parse().unwrap(),
        charm: format!("local:{name}-1").parse().unwrap(),
        metadata: serde_json::Map::from_iter([("summary".to_owned(), "A thing".into())]),
        units,
        to: None,
    }
}

pub(super) fn service(name: &str) -> ServiceName {
    name.parse().unwrap()
}

pub(super) fn unit(name: &str) -> UnitName {
    name.parse().unwrap()
}

fn error_text<V: Debug>(result: Result<V, Error>) -> String {
    result.unwrap_err().to_string()
}

/// Every path below the root, to check that nothing was created or left.
async fn all_paths(tree: &impl Tree) -> Vec<String> {
    let mut found = Vec::new();
    for top in [paths::services(), paths::units(), paths::machines(), paths::service_names()] {
        for name in tree.children(&top).await.unwrap() {
            found.push(format!("{top}/{name}"));
        }
    }
    found
}

pub(super) async fn bootstrap_creates_a_complete_environment_once(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    let cluster_id = environment.info().cluster_id.clone();
    assert_eq!(cluster_id.len(), 32);
    assert_eq!(environment.machine(MachineId::new(0)).await.unwrap().addresses, ["localhost"]);

    // Again with the same identities: the same environment. With others: refused.
    let again = fresh(backend, Placement::Local).await;
    assert_eq!(again.info().cluster_id, cluster_id);
    let mut other = wanted(Placement::Local);
    other.environment = "other".parse().unwrap();
    let tree = backend.connect(Some(&operator())).await;
    assert_eq!(
        error_text(Environment::bootstrap(tree, &other).await.map(|_| ())),
        "the environment is bootstrapped already, as 'prod'"
    );
    let thief = Credential::parse("operator:guess").unwrap();
    let tree = backend.connect(Some(&thief)).await;
    let theirs = Bootstrap { operator: thief.identity(), ..wanted(Placement::Local) };
    assert_eq!(
        error_text(Environment::bootstrap(tree, &theirs).await.map(|_| ())),
        "the store refuses these credentials"
    );

    environment.verify_identity(&"prod".parse().unwrap(), Some(&cluster_id)).unwrap();
    assert_eq!(
        error_text(environment.verify_identity(&"test".parse().unwrap(), None)),
        "the store holds environment 'prod', not 'test'"
    );
    assert!(
        error_text(environment.verify_identity(&"prod".parse().unwrap(), Some("0")))
            .starts_with("the store is not the one")
    );
}

pub(super) async fn bootstrap_refuses_a_root_with_foreign_znodes(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    let acl = portcullis::store::acl::Roles {
        operator: operator().identity(),
        controller: controller().identity(),
    };
    // Any znode that bootstrap does not create is a foreign one.
    tree.write(vec![Write::create(paths::services(), *b"kafka", acl.operators())]).await.unwrap();
    let refusal = error_text(Environment::bootstrap(tree, &wanted(Placement::Local)).await.map(|_| ()));
    assert!(refusal.starts_with("the store's root holds 'services', which is not ours"), "{refusal}");
}

pub(super) async fn opening_needs_bootstrap_and_the_right_credentials(backend: &impl Backend) {
    let tree = backend.connect(Some(&operator())).await;
    assert_eq!(error_text(Environment::open(tree).await.map(|_| ())), "the environment is not bootstrapped");
    fresh(backend, Placement::Unassigned).await;
    for wrong in [None, Some(Credential::parse("operator:guess").unwrap())] {
        let tree = backend.connect(wrong.as_ref()).await;
        assert_eq!(
            error_text(Environment::open(tree).await.map(|_| ())),
            "the store refuses these credentials"
        );
    }
    let opened = Environment::open(backend.connect(Some(&controller())).await).await.unwrap();
    assert_eq!(opened.info().placement, Placement::Unassigned);
}

pub(super) async fn deploy_creates_service_units_and_machines(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let made = environment.deploy(&deploy("wordpress", 2)).await.unwrap();
    let placed: Vec<_> = made.units.iter().map(|u| (u.name.to_string(), u.machine.number())).collect();
    assert_eq!(placed, [("wordpress/0".to_owned(), 0), ("wordpress/1".to_owned(), 1)]);

    let (id, record) = environment.service(&service("wordpress")).await.unwrap();
    assert_eq!(id, made.service);
    assert_eq!(record.charm.to_string(), "local:wordpress-1");
    assert_eq!(record.rest.get("summary"), Some(&"A thing".into()));
    let (unit_id, record) = environment.unit(&unit("wordpress/1")).await.unwrap();
    assert_eq!((record.service, record.machine), (id, Some(MachineId::new(1))));
    // The ports znode is created empty with its unit.
    let ports = environment.tree().get(&paths::unit_ports(unit_id)).await.unwrap();
    assert_eq!(ports.data, b"");
    assert_eq!(environment.machine(MachineId::new(1)).await.unwrap().instance_id, None);
    let children = environment.tree().children(&paths::machine_units(MachineId::new(1))).await.unwrap();
    assert_eq!(children, [unit_id.key()]);

    let empty = environment.deploy(&deploy("empty", 0)).await.unwrap();
    assert_eq!(empty.units, []);
    assert_eq!(
        error_text(environment.deploy(&deploy("huge", 100_000)).await),
        "100000 units are more than the 200 that can be made at once"
    );
    environment.deploy(&deploy("large", 200)).await.unwrap();
}

pub(super) async fn a_service_name_is_unique(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    environment.deploy(&deploy("wordpress", 1)).await.unwrap();
    let before = all_paths(environment.tree()).await;
    assert_eq!(
        error_text(environment.deploy(&deploy("wordpress", 3)).await),
        "Service 'wordpress' already exists"
    );
    assert_eq!(all_paths(environment.tree()).await, before);
}

pub(super) async fn placement_takes_the_lowest_empty_machine(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let first = environment.add_machine(None).await.unwrap();
    let adopted = environment.add_machine(Some("i-1".parse().unwrap())).await.unwrap();
    assert_eq!((first.number(), adopted.number()), (0, 1));
    let record = environment.machine(adopted).await.unwrap();
    assert_eq!((record.instance_id.unwrap().as_str(), record.adopted), ("i-1", true));

    let made = environment.deploy(&Deploy { to: Some(adopted), ..deploy("a", 1) }).await.unwrap();
    assert_eq!(made.units[0].machine, adopted);
    let more = environment.add_units(&service("a"), 2, None).await.unwrap();
    let seats: Vec<_> = more.iter().map(|unit| unit.machine.number()).collect();
    assert_eq!(seats, [0, 2], "the empty machine, then a new one");
    environment.remove_unit(&unit("a/1")).await.unwrap();
    assert_eq!(environment.add_units(&service("a"), 1, None).await.unwrap()[0].machine, first);
    let nowhere = Some(MachineId::new(9));
    assert_eq!(error_text(environment.add_units(&service("a"), 1, nowhere).await), "Machine 9 was not found");
    assert_eq!(
        error_text(environment.deploy(&Deploy { to: nowhere, ..deploy("b", 1) }).await),
        "Machine 9 was not found"
    );
    assert_eq!(error_text(environment.service(&service("b")).await), "Service 'b' was not found");
}

pub(super) async fn units_are_added_and_removed(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    environment.deploy(&deploy("mysql", 1)).await.unwrap();
    let more = environment.add_units(&service("mysql"), 2, None).await.unwrap();
    assert_eq!(more.iter().map(|u| u.name.to_string()).collect::<Vec<_>>(), ["mysql/1", "mysql/2"]);
    let (id, _) = environment.unit(&unit("mysql/1")).await.unwrap();
    environment.remove_unit(&unit("mysql/1")).await.unwrap();
    assert_eq!(error_text(environment.unit(&unit("mysql/1")).await), "Unit 'mysql/1' was not found");
    assert_eq!(environment.tree().exists(&paths::unit(id)).await, Ok(false));
    let left = environment.tree().children(&paths::machine_units(MachineId::new(0))).await.unwrap();
    assert_eq!(left, [UnitId::new(0).key(), UnitId::new(2).key()]);
    environment.destroy_service(&service("mysql")).await.unwrap();
    assert_eq!(all_paths(environment.tree()).await, ["/machines/machine-0000000000"]);
    assert_eq!(environment.tree().children(&paths::machine_units(MachineId::new(0))).await.unwrap(), [""; 0]);
}

pub(super) async fn numbers_are_never_reused(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let first = environment.deploy(&deploy("web", 2)).await.unwrap();
    environment.expose(&service("web")).await.unwrap();
    environment.destroy_service(&service("web")).await.unwrap();
    environment.terminate_machines(&[MachineId::new(0), MachineId::new(1)]).await.unwrap();
    let second = environment.deploy(&deploy("web", 1)).await.unwrap();
    assert_ne!(first.service, second.service);
    assert_eq!(second.units[0].name.to_string(), "web/2");
    assert_eq!((second.units[0].id.number(), second.units[0].machine.number()), (2, 2));
    // A new service with an old name is not exposed.
    assert_eq!(environment.unexpose(&service("web")).await.unwrap(), Flag::AlreadySo);
}

pub(super) async fn flags_change_once(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    let made = environment.deploy(&deploy("wordpress", 0)).await.unwrap();
    let name = service("wordpress");
    let flag = paths::exposed(made.service);
    for (expected, exists) in [(Flag::Changed, true), (Flag::AlreadySo, true)] {
        assert_eq!(environment.expose(&name).await.unwrap(), expected);
        assert_eq!(environment.tree().exists(&flag).await, Ok(exists));
    }
    assert_eq!(environment.tree().get(&flag).await.unwrap().data, b"{}");
    let limited = ["192.0.2.0/24", "10.0.0.0/8"].map(|text| text.parse().unwrap());
    let other_way_round = ["10.0.0.0/8", "192.0.2.0/24"].map(|text| text.parse().unwrap());
    assert_eq!(environment.expose_to(&name, &limited).await.unwrap(), Flag::Changed);
    assert_eq!(environment.expose_to(&name, &other_way_round).await.unwrap(), Flag::AlreadySo);
    let data = br#"{"to":["10.0.0.0/8","192.0.2.0/24"]}"#;
    assert_eq!(environment.tree().get(&flag).await.unwrap().data, data);
    assert_eq!(environment.expose(&name).await.unwrap(), Flag::Changed);
    assert_eq!(environment.tree().get(&flag).await.unwrap().data, b"{}");
    let many: Vec<_> = (0..51).map(|n| format!("10.0.0.{n}/32").parse().unwrap()).collect();
    let refused = environment.expose_to(&name, &many).await.unwrap_err().to_string();
    assert_eq!(refused, "51 sources are more than the 50 that a service can be exposed to");
    for expected in [Flag::Changed, Flag::AlreadySo] {
        assert_eq!(environment.unexpose(&name).await.unwrap(), expected);
        assert_eq!(environment.tree().exists(&flag).await, Ok(false));
    }
}

pub(super) async fn machines_in_use_are_not_terminated(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    environment.deploy(&deploy("a", 2)).await.unwrap();
    environment.remove_unit(&unit("a/0")).await.unwrap();
    let ids = |numbers: &[u32]| numbers.iter().map(|&n| MachineId::new(n)).collect::<Vec<_>>();
    assert_eq!(
        error_text(environment.terminate_machines(&ids(&[0, 1])).await),
        "Resources are currently assigned to machine 1"
    );
    assert_eq!(error_text(environment.terminate_machines(&ids(&[0, 7])).await), "Machine 7 was not found");
    assert_eq!(environment.machine_ids().await.unwrap(), ids(&[0, 1]));
    environment.terminate_machines(&ids(&[0, 0])).await.unwrap();
    assert_eq!(environment.machine_ids().await.unwrap(), ids(&[1]));
}

pub(super) async fn unknown_names_are_refused_and_nothing_is_created(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    let before = all_paths(environment.tree()).await;
    let (name, one) = (service("foobar"), unit("foobar/0"));
    let missing = "Service 'foobar' was not found";
    assert_eq!(error_text(environment.expose(&name).await), missing);
    assert_eq!(error_text(environment.unexpose(&name).await), missing);
    assert_eq!(error_text(environment.destroy_service(&name).await), missing);
    assert_eq!(error_text(environment.add_units(&name, 1, None).await), missing);
    assert_eq!(error_text(environment.remove_unit(&one).await), "Unit 'foobar/0' was not found");
    assert_eq!(error_text(environment.unit_credential(&one).await), "Unit 'foobar/0' was not found");
    assert_eq!(
        error_text(environment.machine_credential(MachineId::new(5)).await),
        "Machine 5 was not found"
    );
    assert_eq!(
        error_text(environment.terminate_machines(&[MachineId::new(0)]).await),
        "Machine 0 is the one that this environment runs on"
    );
    assert_eq!(all_paths(environment.tree()).await, before);
}

async fn overwrite(tree: &impl Tree, path: NodePath, data: &[u8]) {
    let version = tree.get(&path).await.unwrap().version;
    tree.write(vec![Write::SetIfVersion { path, data: data.to_vec(), version }]).await.unwrap();
}

pub(super) async fn corrupt_znodes_are_named_and_never_read_as_empty(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    let made = environment.deploy(&deploy("web", 1)).await.unwrap();
    let tree = environment.tree();
    let id = made.units[0].id;

    overwrite(tree, paths::unit_ports(id), b"{\"open\": [80").await;
    let ports = UnitPorts::new(tree, id);
    let open = ports.open(portcullis::model::ports::parse_argument("80").unwrap()).await;
    for refusal in [error_text(ports.read().await), error_text(open)] {
        assert!(refusal.starts_with("/units/unit-0000000000/ports: neither JSON nor YAML"), "{refusal}");
    }
    assert_eq!(tree.get(&paths::unit_ports(id)).await.unwrap().data, b"{\"open\": [80");

    overwrite(tree, paths::unit(id), b"[]").await;
    assert_eq!(
        error_text(environment.unit(&unit("web/0")).await),
        "/units/unit-0000000000: not a JSON object"
    );
    overwrite(tree, paths::unit(id), br#"{"name": "web/0", "service": "web"}"#).await;
    assert_eq!(
        error_text(environment.unit(&unit("web/0")).await),
        "/units/unit-0000000000: \"service\" is wrong: 'web' is not a service id"
    );
    overwrite(tree, paths::units(), b"{}").await;
    assert_eq!(
        error_text(environment.add_units(&service("web"), 1, None).await),
        "/units: \"next\" is missing"
    );
    overwrite(tree, paths::service(made.service), b"\xff\xfe").await;
    assert!(
        error_text(environment.service(&service("web")).await)
            .starts_with("/services/service-0000000000: not JSON")
    );
    overwrite(tree, paths::machine(MachineId::new(0)), br#"{"addresses": "x"}"#).await;
    assert_eq!(
        error_text(environment.machine(MachineId::new(0)).await),
        "/machines/machine-0000000000: \"addresses\" is not a list"
    );
    overwrite(tree, paths::service_name(&service("web")), b"null").await;
    assert_eq!(
        error_text(environment.expose(&service("web")).await),
        "/names/services/web: not a JSON object"
    );
    overwrite(tree, paths::initialized(), br#"{"format": 2}"#).await;
    assert_eq!(
        error_text(Environment::open(backend.connect(Some(&operator())).await).await.map(|_| ())),
        "/initialized: \"format\" is 2; this version knows 1"
    );
}

pub(super) async fn concurrent_deployments_do_not_collide(backend: &impl Backend) {
    const DEPLOYERS: usize = 12;
    let environment = fresh(backend, Placement::Unassigned).await;
    let mut others = Vec::new();
    for _ in 0..DEPLOYERS {
        others.push(Environment::open(backend.connect(Some(&operator())).await).await.unwrap());
    }
    // Three clients want each name, and one gets it. All compete for numbers and machines.
    let names: Vec<String> = (0..DEPLOYERS).map(|n| format!("s{}", n % 4)).collect();
    let wanted: Vec<Deploy> = names.iter().map(|name| deploy(name, 2)).collect();
    let results =
        join_all(others.iter().zip(&wanted).map(|(other, wanted)| other.deploy(wanted)).collect()).await;
    let (mut won, mut machines) = (Vec::new(), Vec::new());
    for (name, result) in names.iter().zip(results) {
        match result {
            Ok(made) => {
                machines.extend(made.units.iter().map(|unit| unit.machine));
                won.push(name.as_str());
            }
            Err(e) => assert_eq!(e.to_string(), format!("Service '{name}' already exists")),
        }
    }
    won.sort_unstable();
    assert_eq!(won, ["s0", "s1", "s2", "s3"]);
    machines.sort_unstable();
    machines.dedup();
    assert_eq!(machines.len(), 8, "two units share a machine");
    assert_eq!(environment.machine_ids().await.unwrap(), machines);
    assert_eq!(environment.tree().children(&paths::units()).await.unwrap().len(), 8);
}

pub(super) async fn destroying_a_large_service_takes_several_steps(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    environment.deploy(&deploy("big", 200)).await.unwrap();
    environment.add_units(&service("big"), 50, None).await.unwrap();
    environment.destroy_service(&service("big")).await.unwrap();
    assert_eq!(all_paths(environment.tree()).await, ["/machines/machine-0000000000"]);
}

/// Polls all of them at once, on this thread.
async fn join_all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Some(Box::pin(future)), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in &mut futures {
            if let Some(running) = future
                && let std::task::Poll::Ready(value) = running.as_mut().poll(context)
            {
                (*future, *output) = (None, Some(value));
            }
        }
        if futures.iter().all(|(future, _)| future.is_none()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    futures.into_iter().filter_map(|(_, output)| output).collect()
}

fn port(argument: &str) -> portcullis::model::PortRange {
    portcullis::model::ports::parse_argument(argument).unwrap()
}

async fn stored(tree: &impl Tree, id: UnitId) -> String {
    String::from_utf8(tree.get(&paths::unit_ports(id)).await.unwrap().data).unwrap()
}

pub(super) async fn ports_are_kept_in_order_without_duplicates(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Local).await;
    let id = environment.deploy(&deploy("web", 1)).await.unwrap().units[0].id;
    let credential = environment.unit_credential(&unit("web/0")).await.unwrap();
    assert_eq!(credential.user(), id.key());
    let hook = backend.connect(Some(&credential)).await;
    let ports = UnitPorts::new(&hook, id);
    ports.close(port("443")).await.unwrap();
    assert_eq!(stored(&hook, id).await, r#"{"open":[]}"#);
    for argument in ["8000-8080", "53/udp", "53", "8000-8080/TCP"] {
        ports.open(port(argument)).await.unwrap();
    }
    let all = concat!(
        r#"{"open":[{"port":8000,"to":8080,"proto":"tcp"},{"port":53,"proto":"udp"},"#,
        r#"{"port":53,"proto":"tcp"}]}"#
    );
    assert_eq!(stored(&hook, id).await, all);
    let version = hook.get(&paths::unit_ports(id)).await.unwrap().version;
    ports.open(port("53")).await.unwrap();
    ports.close(port("9")).await.unwrap();
    assert_eq!(hook.get(&paths::unit_ports(id)).await.unwrap().version, version, "converged is silent");
    ports.close(port("8000-8080")).await.unwrap();
    let open: Vec<_> = ports.read().await.unwrap().ranges().map(|range| range.to_string()).collect();
    assert_eq!(open, ["53/udp", "53/tcp"]);

    overwrite(
        environment.tree(),
        paths::unit_ports(id),
        b"open:\n- {port: 80, proto: tcp, note: old}\nkept: 1\n",
    )
    .await;
    ports.open(port("81")).await.unwrap();
    assert_eq!(
        stored(&hook, id).await,
        r#"{"open":[{"port":80,"proto":"tcp","note":"old"},{"port":81,"proto":"tcp"}],"kept":1}"#
    );
    // A unit without its znode has no open ports, and can open none.
    environment.remove_unit(&unit("web/0")).await.unwrap();
    assert_eq!(ports.read().await.unwrap().ranges().count(), 0);
    assert_eq!(error_text(ports.open(port("80")).await), "/units/unit-0000000000/ports: no such znode");
}

pub(super) async fn concurrent_port_changes_are_both_kept(backend: &impl Backend) {
    const WRITERS: u16 = 16;
    let environment = fresh(backend, Placement::Local).await;
    let id = environment.deploy(&deploy("web", 1)).await.unwrap().units[0].id;
    let credential = environment.unit_credential(&unit("web/0")).await.unwrap();
    let mut trees = Vec::new();
    for _ in 0..WRITERS {
        trees.push(backend.connect(Some(&credential)).await);
    }
    let writers: Vec<_> = trees.iter().map(|tree| UnitPorts::new(tree, id)).collect();
    let opens = writers.iter().zip(1000..).map(|(ports, n): (_, u16)| {
        let range = portcullis::model::PortRange::single(n, portcullis::model::Protocol::Tcp).unwrap();
        ports.open(range)
    });
    for result in join_all(opens.collect()).await {
        result.unwrap();
    }
    let mut open: Vec<_> = writers[0].read().await.unwrap().ranges().map(|range| range.from()).collect();
    open.sort_unstable();
    assert_eq!(open, (1000..1000 + WRITERS).collect::<Vec<_>>());
}

pub(super) async fn a_removed_unit_has_no_open_ports(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    environment.deploy(&deploy("blog", 1)).await.unwrap();
    let (id, _) = environment.unit(&unit("blog/0")).await.unwrap();
    let hook = backend.connect(Some(&environment.unit_credential(&unit("blog/0")).await.unwrap())).await;
    let ports = UnitPorts::new(&hook, id);
    let web = portcullis::model::ports::parse_argument("80").unwrap();
    ports.open(web).await.unwrap();
    environment.destroy_service(&service("blog")).await.unwrap();
    // The stop hook runs after the unit was removed, and closes the ports that start opened.
    ports.close(web).await.unwrap();
    assert!(matches!(ports.open(web).await, Err(Error::Tree(tree::Error::NoNode(_)))), "no port is opened");
}
