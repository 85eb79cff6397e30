//! The rights of each identity, checked against the store. Each refusal has its positive control:
//! the permitted identity succeeds.

use super::Backend;
use super::operations::{controller, deploy, fresh, operator, service, unit};
use portcullis::firewall::observe;
use portcullis::model::MachineId;
use portcullis::store::acl::Roles;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::records::{Placement, parse_service_credential};
use portcullis::store::tree::{Error, Tree, Write};
use portcullis::store::{Credential, Snapshot};

fn roles() -> Roles {
    Roles { operator: operator().identity(), controller: controller().identity() }
}

async fn may_read(tree: &impl Tree, path: &NodePath) -> bool {
    match tree.get(path).await {
        Ok(_) => true,
        Err(Error::NoAuth(refused)) => {
            assert_eq!(refused, *path);
            false
        }
        Err(e) => panic!("{path}: {e}"),
    }
}

/// Tries to write the same data again, at the version that the operator reads.
async fn may_write(tree: &impl Tree, boss: &impl Tree, path: &NodePath) -> bool {
    let node = boss.get(path).await.unwrap();
    let set = Write::SetIfVersion { path: path.clone(), data: node.data, version: node.version };
    match tree.write(vec![set]).await {
        Ok(()) => true,
        Err(Error::NoAuth(refused)) => {
            assert_eq!(refused, *path);
            false
        }
        Err(e) => panic!("{path}: {e}"),
    }
}

async fn may_create(tree: &impl Tree, boss: &impl Tree, path: NodePath) -> bool {
    match tree.write(vec![Write::create(path.clone(), Vec::new(), roles().operators())]).await {
        Ok(()) => {
            boss.write(vec![Write::DeleteIfVersion { path, version: 0 }]).await.unwrap();
            true
        }
        Err(Error::NoAuth(_)) => false,
        Err(e) => panic!("{path}: {e}"),
    }
}

async fn may_delete(tree: &impl Tree, boss: &impl Tree, path: &NodePath) -> bool {
    let version = boss.get(path).await.unwrap().version;
    match tree.write(vec![Write::DeleteIfVersion { path: path.clone(), version }]).await {
        Ok(()) => true,
        Err(Error::NoAuth(_)) => false,
        Err(e) => panic!("{path}: {e}"),
    }
}

/// Two services with a unit each on a machine each; the first is exposed. Returns every znode.
async fn populate<P: Backend>(backend: &P) -> (portcullis::store::Environment<P::Tree>, Vec<NodePath>) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let (mine, other) = (deploy("mine", 1), deploy("other", 1));
    let mut nodes = vec![
        paths::initialized(),
        paths::controller(),
        paths::services(),
        paths::units(),
        paths::machines(),
        paths::names(),
        paths::service_names(),
        paths::unit_names(),
        paths::charms(),
        paths::root(),
    ];
    for wanted in [&mine, &other] {
        let made = environment.deploy(wanted).await.unwrap();
        environment.expose(&wanted.service).await.unwrap();
        let placed = &made.units[0];
        nodes.extend([
            paths::service(made.service),
            paths::exposed(made.service),
            paths::service_credentials(made.service),
            paths::service_name(&wanted.service),
            paths::unit_names_of(&wanted.service),
            paths::unit_name(&placed.name),
            paths::unit(placed.id),
            paths::unit_ports(placed.id),
            paths::unit_credentials(placed.id),
            paths::machine(placed.machine),
            paths::machine_units(placed.machine),
            paths::machine_unit(placed.machine, placed.id),
            paths::machine_credentials(placed.machine),
        ]);
    }
    (environment, nodes)
}

pub(super) async fn a_unit_writes_its_own_ports_and_nothing_else(backend: &impl Backend) {
    let (environment, nodes) = populate(backend).await;
    let boss = environment.tree();
    let credential = environment.unit_credential(&unit("mine/0")).await.unwrap();
    let hook = backend.connect(Some(&credential)).await;
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let (other, _) = environment.unit(&unit("other/0")).await.unwrap();
    let own = paths::unit_ports(id);
    for path in &nodes {
        let allowed = *path == own;
        assert_eq!(may_read(&hook, path).await, allowed, "read {path}");
        assert_eq!(may_write(&hook, boss, path).await, allowed, "write {path}");
        assert!(may_write(boss, boss, path).await, "the operator writes {path}");
    }
    for path in [paths::unit_agent(id), paths::unit_agent(other), paths::machine_agent(MachineId::new(0))] {
        assert!(!may_create(&hook, boss, path.clone()).await, "create {path}");
        assert!(may_create(boss, boss, path.clone()).await, "the operator creates {path}");
    }
    for path in [
        own.clone(),
        paths::unit_ports(other),
        paths::exposed(environment.service(&service("mine")).await.unwrap().0),
    ] {
        assert!(!may_delete(&hook, boss, &path).await, "delete {path}");
    }
    let grab = hook.set_acl(&own, roles().operators()).await;
    assert_eq!(grab, Err(Error::NoAuth(own)), "its own rights are not its to change");
}

pub(super) async fn a_machine_reads_its_own_units_only(backend: &impl Backend) {
    let (environment, nodes) = populate(backend).await;
    let boss = environment.tree();
    let machine = MachineId::new(0);
    let agent = backend.connect(Some(&environment.machine_credential(machine).await.unwrap())).await;
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let readable = [
        paths::machine(machine),
        paths::machine_units(machine),
        paths::machine_unit(machine, id),
        paths::unit(id),
        paths::unit_ports(id),
        paths::unit_credentials(id),
    ];
    for path in &nodes {
        assert_eq!(may_read(&agent, path).await, readable.contains(path), "read {path}");
        assert!(!may_write(&agent, boss, path).await, "write {path}");
    }
    for path in [paths::unit_agent(id), paths::machine_agent(machine)] {
        assert!(may_create(&agent, boss, path.clone()).await, "create {path}");
    }
    let (other, _) = environment.unit(&unit("other/0")).await.unwrap();
    for path in [
        paths::unit_agent(other),
        paths::machine_agent(MachineId::new(1)),
        paths::machine_unit(machine, other),
    ] {
        assert!(!may_create(&agent, boss, path.clone()).await, "create {path}");
    }
}

/// A machine's agent reads the sources that its units' services are exposed to.
pub(super) async fn a_machine_reads_the_flags_of_its_units_services(backend: &impl Backend) {
    let (environment, nodes) = populate(backend).await;
    let boss = environment.tree();
    let agent =
        backend.connect(Some(&environment.machine_credential(MachineId::new(0)).await.unwrap())).await;
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let (mine, _) = environment.service(&service("mine")).await.unwrap();
    assert!(!may_read(&agent, &paths::exposed(mine)).await);
    let path = paths::unit_credentials(id);
    let held = agent.get(&path).await.unwrap();
    let shared = parse_service_credential(&path, &held.data).unwrap().expect("a secret of the service");
    let before: Vec<NodePath> = readable(&agent, &nodes).await;
    for _ in 0..2 {
        agent.prove(&shared).await.unwrap();
    }
    let mut expected = before;
    expected.push(paths::exposed(mine));
    expected.sort();
    let mut now = readable(&agent, &nodes).await;
    now.sort();
    assert_eq!(now, expected, "the flag and nothing else");
    assert!(!may_write(&agent, boss, &paths::exposed(mine)).await);
    assert!(!may_delete(&agent, boss, &paths::exposed(mine)).await);
    // The machine of a second unit reads it, too, and so does it read a flag that was set again.
    environment.unexpose(&service("mine")).await.unwrap();
    let second = environment.add_units(&service("mine"), 1, None).await.unwrap();
    environment.expose(&service("mine")).await.unwrap();
    let other = second[0].machine;
    let agent = backend.connect(Some(&environment.machine_credential(other).await.unwrap())).await;
    let path = paths::unit_credentials(second[0].id);
    let held = agent.get(&path).await.unwrap();
    assert_eq!(parse_service_credential(&path, &held.data).unwrap(), Some(shared.clone()));
    agent.prove(&shared).await.unwrap();
    assert!(may_read(&agent, &paths::exposed(mine)).await);
}

async fn readable(tree: &impl Tree, nodes: &[NodePath]) -> Vec<NodePath> {
    let mut found = Vec::new();
    for path in nodes {
        if may_read(tree, path).await {
            found.push(path.clone());
        }
    }
    found
}

/// A machine writes its own lease and firewall report, and not those of another.
pub(super) async fn a_machine_reports_on_itself(backend: &impl Backend) {
    let (environment, _) = populate(backend).await;
    let boss = environment.tree();
    let (here, there) = (MachineId::new(0), MachineId::new(1));
    let credential = environment.machine_credential(here).await.unwrap();
    let identity = credential.identity();
    let agent = backend.connect(Some(&credential)).await;
    let controller = backend.connect(Some(&controller())).await;
    for (path, acl, writes) in [
        (paths::machine_firewall(here), roles().machine_firewall(&identity), true),
        (paths::machine_problem(here), roles().machine_problem(&identity), true),
        (paths::machine_stopping(here), roles().machine_stopping(&identity), false),
        (paths::machine_agent(here), roles().machine_agent(&identity), false),
    ] {
        agent.write(vec![Write::create(path.clone(), Vec::new(), acl)]).await.unwrap();
        for reader in [&agent, boss, &controller] {
            assert!(may_read(reader, &path).await, "read {path}");
        }
        assert_eq!(may_write(&agent, boss, &path).await, writes, "write {path}");
        assert!(!may_write(&controller, boss, &path).await, "the controller writes {path}");
        assert!(!may_delete(&agent, boss, &path).await, "delete {path}");
    }
    let credential = environment.machine_credential(there).await.unwrap();
    let other = backend.connect(Some(&credential)).await;
    for path in [
        paths::machine_firewall(here),
        paths::machine_problem(here),
        paths::machine_stopping(here),
        paths::machine_agent(here),
    ] {
        assert!(!may_read(&other, &path).await, "another machine reads {path}");
        assert!(!may_write(&other, boss, &path).await, "another machine writes {path}");
    }
    assert!(!may_create(&agent, boss, paths::machine_firewall(there)).await);
    // The machine reads its list of trackers and cannot write it.
    let trackers = paths::machine_trackers(here);
    let told = Write::create(trackers.clone(), Vec::new(), roles().machine_trackers(&identity));
    controller.write(vec![told]).await.unwrap();
    assert!(may_read(&agent, &trackers).await && may_write(&controller, boss, &trackers).await);
    assert!(!may_write(&agent, boss, &trackers).await && !may_read(&other, &trackers).await);
    assert!(!may_create(&agent, boss, paths::firewall_reports()).await);
}

/// A machine's agent writes the states of its units; hooks, other machines and the controller
/// cannot.
pub(super) async fn a_machine_writes_the_state_of_its_units(backend: &impl Backend) {
    let (environment, _) = populate(backend).await;
    let boss = environment.tree();
    let (here, there) = (MachineId::new(0), MachineId::new(1));
    let credential = environment.machine_credential(here).await.unwrap();
    let identity = credential.identity();
    let agent = backend.connect(Some(&credential)).await;
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let (other_id, _) = environment.unit(&unit("other/0")).await.unwrap();
    let (state, presence) = (paths::unit_state(id), paths::unit_agent(id));
    let creates = vec![
        Write::create(state.clone(), b"{}", roles().unit_state(&identity)),
        Write::create(presence.clone(), Vec::new(), roles().unit_agent(&identity)),
    ];
    agent.write(creates).await.unwrap();
    assert!(may_write(&agent, boss, &state).await, "the agent writes the state");
    assert!(may_write(boss, boss, &state).await, "the operator resolves errors");
    assert!(!may_delete(&agent, boss, &state).await);

    let controller = backend.connect(Some(&controller())).await;
    let hook = backend.connect(Some(&environment.unit_credential(&unit("mine/0")).await.unwrap())).await;
    let elsewhere = backend.connect(Some(&environment.machine_credential(there).await.unwrap())).await;
    for path in [&state, &presence] {
        assert!(may_read(&controller, path).await, "status of {path}");
        assert!(!may_write(&controller, boss, path).await, "the controller writes {path}");
        for (who, tree) in [("a hook", &hook), ("another machine", &elsewhere)] {
            assert!(!may_read(tree, path).await, "{who} reads {path}");
            assert!(!may_write(tree, boss, path).await, "{who} writes {path}");
        }
    }
    assert!(
        !may_create(&agent, boss, paths::unit_state(other_id)).await,
        "the state of another machine's unit"
    );
    assert!(may_create(&elsewhere, boss, paths::unit_state(other_id)).await);
    // A unit is removed in one step with everything that its agent added.
    environment.remove_unit(&unit("mine/0")).await.unwrap();
    assert!(!boss.exists(&state).await.unwrap());
}

pub(super) async fn the_controller_reads_all_and_writes_machine_records(backend: &impl Backend) {
    let (environment, nodes) = populate(backend).await;
    let boss = environment.tree();
    let tree = backend.connect(Some(&controller())).await;
    for path in &nodes {
        let secret = !path.as_str().starts_with("/machines/") && path.as_str().ends_with("/credentials");
        assert_eq!(may_read(&tree, path).await, !secret, "read {path}");
        let writable =
            [paths::machine(MachineId::new(0)), paths::machine(MachineId::new(1)), paths::controller()];
        assert_eq!(may_write(&tree, boss, path).await, writable.contains(path), "write {path}");
    }
    let (mine, _) = environment.service(&service("mine")).await.unwrap();
    assert!(!may_delete(&tree, boss, &paths::exposed(mine)).await);
    assert!(may_delete(boss, boss, &paths::exposed(mine)).await);
    assert!(!may_create(&tree, boss, paths::exposed(mine)).await);
}

pub(super) async fn other_identities_have_no_rights(backend: &impl Backend) {
    let (environment, nodes) = populate(backend).await;
    let boss = environment.tree();
    let guess = Credential::parse("operator:guess").unwrap();
    for tree in [backend.connect(None).await, backend.connect(Some(&guess)).await] {
        for path in &nodes {
            assert!(!may_read(&tree, path).await, "read {path}");
            assert!(!may_write(&tree, boss, path).await, "write {path}");
        }
        assert!(!may_create(&tree, boss, paths::service_name(&service("free"))).await);
    }
    for path in &nodes {
        assert!(may_read(boss, path).await, "the operator reads {path}");
    }
}

pub(super) async fn znodes_that_a_machine_hides_do_not_hide_others(backend: &impl Backend) {
    let (environment, _) = populate(backend).await;
    let (here, there) = (MachineId::new(0), MachineId::new(1));
    let credential = environment.machine_credential(here).await.unwrap();
    let agent = backend.connect(Some(&credential)).await;
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let (other, _) = environment.unit(&unit("other/0")).await.unwrap();
    let only_me = || Roles { operator: credential.identity(), controller: credential.identity() }.operators();
    let hidden = [paths::machine_firewall(here), paths::machine_agent(here), paths::unit_state(id)];
    for path in hidden {
        agent.write(vec![Write::create(path.clone(), b"{}", only_me())]).await.unwrap();
        assert!(!may_read(environment.tree(), &path).await, "{path} is not hidden");
    }
    let controller = backend.connect(Some(&controller())).await;
    let view = observe::observe(&controller).await.unwrap();
    assert!(view.self_managed.contains(&here) && !view.self_managed.contains(&there));
    assert_eq!((view.machines.len(), view.units.iter().count()), (2, 2));
    let seen = Snapshot::read(environment.tree()).await.unwrap();
    let refused = seen.units[&id].state.as_ref().unwrap().as_ref().unwrap_err();
    assert!(refused.starts_with(paths::unit_state(id).as_str()), "{refused}");
    assert_eq!(seen.units[&other].state, None);
    assert!(
        seen.machines[&here].firewall_reports[1].is_err()
            && seen.machines[&there].firewall_reports[1] == Ok(None)
    );
}

pub(super) async fn hidden_znodes_are_removed_with_their_machine(backend: &impl Backend) {
    let (environment, _) = populate(backend).await;
    let boss = environment.tree();
    let here = MachineId::new(0);
    let (id, _) = environment.unit(&unit("mine/0")).await.unwrap();
    let credential = environment.machine_credential(here).await.unwrap();
    let agent = backend.connect(Some(&credential)).await;
    let only_me = || Roles { operator: credential.identity(), controller: credential.identity() }.operators();
    let hidden = [paths::unit_state(id), paths::machine_trackers(here)];
    let hide = |path: &NodePath| Write::create(path.clone(), b"{}", only_me());
    agent.write(hidden.iter().map(hide).collect()).await.unwrap();
    for path in &hidden {
        assert!(!may_read(boss, path).await, "{path} is not hidden");
    }
    environment.remove_unit(&unit("mine/0")).await.unwrap();
    environment.terminate_machines(&[here]).await.unwrap();
    for path in [paths::unit(id), paths::machine(here)] {
        assert!(!boss.exists(&path).await.unwrap(), "{path} is still there");
    }
}
