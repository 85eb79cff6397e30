//! Lost answers: every write of every operation loses its answer once before and once after it was
//! applied. In every case the operation ends as if no answer had been lost, and creates nothing
//! twice.

use super::block_on;
use super::operations::{deploy, fresh, operator, service, unit};
use portcullis::model::{MachineId, ports::parse_argument};
use portcullis::store::memory::Fault;
use portcullis::store::paths;
use portcullis::store::records::Placement;
use portcullis::store::tree::Tree;
use portcullis::store::{Environment, Flag, IdempotencyKey, MemoryStore, MemoryTree, NewMachine, UnitPorts};
use std::fmt::Debug;
use std::time::Duration;

const FAULTS: [&[Fault]; 5] = [
    &[],
    &[Fault::LostBefore],
    &[Fault::LostAfter],
    &[Fault::LostBefore, Fault::LostAfter],
    &[Fault::LostBefore, Fault::LostBefore, Fault::LostBefore],
];

/// Runs `operation` on a fresh environment once per way of losing answers, and compares what it
/// returns and leaves.
fn same_whatever_is_lost<V: Debug + PartialEq>(operation: &impl AsyncFn(&Environment<MemoryTree>) -> V) {
    let mut expected = None;
    for faults in FAULTS {
        let store = MemoryStore::default();
        let found = block_on(async {
            let environment = fresh(&store, Placement::Unassigned).await;
            environment.deploy(&deploy("web", 2)).await.unwrap();
            store.lose_answers(faults.iter().copied());
            let value = operation(&environment).await;
            (value, picture(environment.tree()).await)
        });
        match &expected {
            None => expected = Some(found),
            Some(expected) => assert_eq!(found, *expected, "after {faults:?}"),
        }
    }
}

/// The number of objects of each kind, and the counters.
async fn picture(tree: &MemoryTree) -> Vec<(String, Vec<String>, String)> {
    let mut picture = Vec::new();
    for path in [
        paths::services(),
        paths::units(),
        paths::machines(),
        paths::service_names(),
        paths::unit_names_of(&service("web")),
    ] {
        let node = tree.get(&path).await.unwrap();
        let children = tree.children(&path).await.unwrap();
        picture.push((path.to_string(), children, String::from_utf8(node.data).unwrap()));
    }
    picture
}

#[test]
fn deploy_creates_its_objects_once() {
    same_whatever_is_lost(&async |environment| environment.deploy(&deploy("mysql", 2)).await.unwrap());
}

#[test]
fn a_used_name_is_refused() {
    same_whatever_is_lost(&async |environment| {
        environment.deploy(&deploy("web", 2)).await.unwrap_err().to_string()
    });
}

#[test]
fn units_are_added_once() {
    same_whatever_is_lost(&async |environment| {
        environment.add_units(&service("web"), 3, None).await.unwrap()
    });
}

#[test]
fn machines_are_added_once() {
    same_whatever_is_lost(&async |environment| environment.add_machine(None).await.unwrap());
    same_whatever_is_lost(&async |environment| {
        let name = Some("web".parse().unwrap());
        environment.add_machine(NewMachine { name, ..NewMachine::default() }).await.unwrap()
    });
}

/// The same command in another process, after the first process lost its answer.
#[test]
fn a_repeated_command_is_applied_once() {
    for applied in [Fault::LostBefore, Fault::LostAfter] {
        let store = MemoryStore::default();
        block_on(async {
            let environment = fresh(&store, Placement::Unassigned).await;
            environment.deploy(&deploy("web", 1)).await.unwrap();
            let operation = IdempotencyKey::new().unwrap();
            let once = async |again: bool| {
                let operation = if again {
                    IdempotencyKey::again(operation.as_str()).unwrap()
                } else {
                    operation.clone()
                };
                let tree = store.connect(Some(&operator()));
                Environment::open(tree).await.unwrap().with_key(operation)
            };
            // The process ends after its one write.
            store.lose_answers([applied, Fault::LostBefore, Fault::LostBefore]);
            let first = once(false).await;
            let lost = tokio::time::timeout(Duration::ZERO, first.add_units(&service("web"), 2, None)).await;
            drop(lost);
            store.lose_answers([]);
            let placed = once(true).await.add_units(&service("web"), 2, None).await.unwrap();
            assert_eq!(placed.len(), 2);
            assert_eq!(once(true).await.add_units(&service("web"), 2, None).await.unwrap(), placed);
            assert_eq!(environment.tree().children(&paths::units()).await.unwrap().len(), 3);
        });
    }
}

#[test]
fn removals_succeed_once() {
    same_whatever_is_lost(&async |environment| environment.remove_unit(&unit("web/1")).await.unwrap());
    same_whatever_is_lost(&async |environment| environment.destroy_service(&service("web")).await.unwrap());
    same_whatever_is_lost(&async |environment| {
        environment.remove_unit(&unit("web/1")).await.unwrap();
        environment.terminate_machines(&[MachineId::new(1)]).await.unwrap();
    });
}

#[test]
fn flags_are_reported_as_changed() {
    same_whatever_is_lost(&async |environment| {
        assert_eq!(environment.expose(&service("web")).await.unwrap(), Flag::Changed);
        assert_eq!(environment.expose(&service("web")).await.unwrap(), Flag::AlreadySo);
        assert_eq!(environment.unexpose(&service("web")).await.unwrap(), Flag::Changed);
        assert_eq!(environment.unexpose(&service("web")).await.unwrap(), Flag::AlreadySo);
    });
}

#[test]
fn ports_are_stored_once() {
    same_whatever_is_lost(&async |environment| {
        let (id, _) = environment.unit(&unit("web/0")).await.unwrap();
        let ports = UnitPorts::new(environment.tree(), id);
        for argument in ["80", "443", "80"] {
            ports.open(parse_argument(argument).unwrap()).await.unwrap();
        }
        ports.read().await.unwrap()
    });
}

#[test]
fn bootstrap_ends_with_one_environment() {
    for faults in FAULTS {
        let store = MemoryStore::default();
        store.lose_answers(faults.iter().copied());
        block_on(async {
            // The rights of the root are set outside the multi: a lost answer there is the caller's
            // to repeat.
            let mut environment = None;
            for _ in 0..FAULTS.len() {
                let tree = store.connect(Some(&operator()));
                match Environment::bootstrap(tree, &super::operations::wanted(Placement::Local)).await {
                    Ok(made) => {
                        environment = Some(made);
                        break;
                    }
                    Err(e) => assert!(matches!(e, portcullis::store::Error::Tree(e) if e.is_ambiguous())),
                }
            }
            let environment = environment.expect("an environment in the end");
            assert_eq!(environment.machine_ids().await.unwrap(), [MachineId::new(0)]);
            assert!(store.connect(None).children(&paths::root()).await.is_err(), "the root is open to all");
        });
    }
}
