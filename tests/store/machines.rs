//! Machines with names and addresses, and the reports of their agents about the host.

use portcullis::model::{MachineId, NodeName};
use portcullis::store::lease::{Lease, LeaseKey};
use portcullis::store::presence::{mark_machine_started, report_host};
use portcullis::store::records::{Host, Placement};
use portcullis::store::tombstones::find_tombstone;
use portcullis::store::tree::{Tree, Write};
use portcullis::store::{Environment, Error, NewMachine, Snapshot, Termination, paths};

use super::Backend;
use super::operations::{deploy, fresh};

fn named(name: &str) -> NewMachine {
    NewMachine { name: Some(name.parse().unwrap()), ..NewMachine::default() }
}

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

pub(super) async fn names_of_machines_are_unique_until_they_are_terminated(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let first = environment.add_machine(named("web.rack1")).await.unwrap();
    assert_eq!(environment.machine(first).await.unwrap().name, Some(name("web.rack1")));
    let refused = environment.add_machine(named("web.rack1")).await.unwrap_err();
    assert_eq!(refused.to_string(), "Machine 'web.rack1' already exists");
    assert!(matches!(environment.add_machine(named("7")).await, Err(Error::ReservedMachineName(_))));
    assert_eq!(environment.machine_ids().await.unwrap(), [first], "refused machines are not added");

    environment.terminate_machines(&[first]).await.unwrap();
    let second = environment.add_machine(named("web.rack1")).await.unwrap();
    assert_eq!(second, MachineId::new(1));

    // A machine with an unreadable record can be terminated, and its name is free again.
    let path = paths::machine(second);
    let version = environment.tree().get(&path).await.unwrap().version;
    let garbage = Write::SetIfVersion { path, data: b"garbage".to_vec(), version };
    environment.tree().write(vec![garbage]).await.unwrap();
    environment.terminate_machines(&[second]).await.unwrap();
    environment.add_machine(named("web.rack1")).await.unwrap();
}

/// Certificates of machines contain their names and their addresses.
pub(super) async fn no_address_of_a_machine_is_the_name_of_another(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let at = |address: &str, name: Option<&str>| NewMachine {
        address: Some(address.parse().unwrap()),
        name: name.map(|name| name.parse().unwrap()),
        ..NewMachine::default()
    };
    let first = environment.add_machine(named("web1")).await.unwrap();
    let second = environment.add_machine(at("db1.example", Some("db1"))).await.unwrap();
    for (refused, message) in [
        (at("Web1", None), "'web1' is the name of machine 0, so it cannot be the address of another one"),
        (
            named("db1.example"),
            "'db1.example' is an address of machine 1, so it cannot be the name of another one",
        ),
    ] {
        assert_eq!(environment.add_machine(refused).await.unwrap_err().to_string(), message);
    }
    assert_eq!(environment.machine_ids().await.unwrap(), [first, second]);
    environment.add_machine(at("web3", Some("web3"))).await.unwrap();
    environment.add_machine(at("192.0.2.7", Some("web4"))).await.unwrap();
}

/// An environment of an older version has no index of names.
pub(super) async fn the_index_of_names_is_created_on_first_use(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    environment.tree().write(vec![Write::Delete { path: paths::machine_names() }]).await.unwrap();
    let plain = environment.add_machine(None).await.unwrap();
    environment.terminate_machines(&[plain]).await.unwrap();
    environment.add_machine(named("web")).await.unwrap();
    assert!(environment.tree().exists(&paths::machine_name(&name("web"))).await.unwrap());
}

pub(super) async fn a_machine_reports_its_host_and_no_other_one(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let address = NewMachine { address: Some("192.0.2.9".parse().unwrap()), ..NewMachine::default() };
    let (one, two) =
        (environment.add_machine(None).await.unwrap(), environment.add_machine(address).await.unwrap());
    let credential = environment.machine_credential(one).await.unwrap();
    let agent = backend.connect(Some(&credential)).await;
    let acl = environment.info().roles.machine_host(&credential.identity());
    let host = Host::new("host7", ["192.0.2.7".parse().unwrap()]);
    report_host(&agent, one, &host, &acl).await.unwrap();
    report_host(&agent, one, &host, &acl).await.unwrap();
    let node = environment.tree().get(&paths::machine_host(one)).await.unwrap();
    assert_eq!((node.version, node.data), (0, host.to_bytes()), "an equal report is not written");
    assert!(report_host(&agent, two, &host, &acl).await.is_err(), "the host of another machine");

    let snapshot = Snapshot::read(environment.tree()).await.unwrap();
    let [one, two] = [one, two].map(|id| &snapshot.machines[&id]);
    assert_eq!((one.host.clone(), one.address()), (Some(Ok(host)), Some("192.0.2.7".to_owned())));
    assert_eq!((two.host.clone(), two.address()), (None, Some("192.0.2.9".to_owned())));
}

/// Connects as the agent of a machine and claims the machine.
async fn agent_of<P: Backend>(backend: &P, environment: &Environment<P::Tree>, id: MachineId) -> P::Tree {
    let credential = environment.machine_credential(id).await.unwrap();
    let agent = backend.connect(Some(&credential)).await;
    let acl = environment.info().roles.machine_agent(&credential.identity());
    Lease::try_acquire(&agent, &LeaseKey::machine(id), &acl, "agent").await.unwrap().expect("a lease");
    mark_machine_started(&agent, id, &acl).await.unwrap();
    agent
}

pub(super) async fn a_machine_whose_agent_is_down_is_terminated_by_force_only(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    environment.deploy(&deploy("wordpress", 2)).await.unwrap();
    let (down, other) = (MachineId::new(0), MachineId::new(1));
    let agent = agent_of(backend, &environment, down).await;
    let used = environment.terminate_machines(&[down]).await.unwrap_err();
    assert!(matches!(used, Error::MachineInUse(id) if id == down), "{used}");
    backend.close(agent).await;
    environment.remove_unit(&"wordpress/0".parse().unwrap()).await.unwrap();
    let refused = environment.terminate_machines(&[down]).await.unwrap_err();
    assert!(matches!(refused, Error::AgentDown(id) if id == down), "{refused}");

    // By force, also with units on another machine that never had an agent.
    environment.terminate(&[down, other], Termination::Forced).await.unwrap();
    assert_eq!(environment.machine_ids().await.unwrap(), []);
    assert_eq!(environment.tree().children(&paths::units()).await.unwrap(), Vec::<String>::new());
    assert!(environment.tree().exists(&paths::tombstone(down)).await.unwrap());
    assert!(!environment.tree().exists(&paths::tombstone(other)).await.unwrap(), "it never had an agent");
    let missing = environment.terminate(&[down], Termination::Forced).await.unwrap_err();
    assert!(matches!(missing, Error::MachineNotFound(_)), "{missing}");

    // A machine whose agent runs needs no force.
    let running = environment.add_machine(None).await.unwrap();
    let _agent = agent_of(backend, &environment, running).await;
    environment.terminate_machines(&[running]).await.unwrap();
    assert!(environment.tree().exists(&paths::tombstone(running)).await.unwrap());
}

pub(super) async fn only_the_terminated_machine_reads_its_tombstone(backend: &impl Backend) {
    let environment = fresh(backend, Placement::Unassigned).await;
    let ids = [environment.add_machine(None).await.unwrap(), environment.add_machine(None).await.unwrap()];
    let mut agents = Vec::new();
    for id in ids {
        let identity = environment.machine_credential(id).await.unwrap().identity();
        agents.push((agent_of(backend, &environment, id).await, identity));
    }
    let (one, identity) = &agents[0];
    let (two, other) = &agents[1];
    assert_eq!(find_tombstone(one, ids[0], identity).await.unwrap(), None, "the machine exists");
    environment.terminate_machines(&[ids[0]]).await.unwrap();
    let found = find_tombstone(one, ids[0], identity).await.unwrap().expect("a tombstone");
    assert_eq!(found.checkpoint(), None);
    assert_eq!(find_tombstone(two, ids[0], other).await.unwrap(), None, "of another machine");
    assert_eq!(find_tombstone(one, ids[1], identity).await.unwrap(), None, "of a machine that exists");

    // A tombstone that cannot be parsed, or that is for other credentials, is none.
    let path = paths::tombstone(ids[0]);
    for data in [&b"garbage"[..], br#"{"identity":"machine-0000000000:AAAAAAAAAAAAAAAAAAAAAAAAAAA="}"#] {
        let version = environment.tree().get(&path).await.unwrap().version;
        let write = Write::SetIfVersion { path: path.clone(), data: data.to_vec(), version };
        environment.tree().write(vec![write]).await.unwrap();
        assert_eq!(find_tombstone(one, ids[0], identity).await.unwrap(), None);
    }
}
