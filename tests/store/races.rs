//! Two concurrent operations: one runs completely between the last read and the write of the other,
//! and the result is as if they had run one after the other. Also a read of the whole environment
//! with a change between any two of its reads.

use super::block_on;
use super::operations::{deploy, fresh, operator, service};
use portcullis::model::MachineId;
use portcullis::status::sections::{Machines, Services};
use portcullis::status::{Scope, View};
use portcullis::store::acl::Acl;
use portcullis::store::memory::MemoryFeed;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::records::Placement;
use portcullis::store::tree::{Answer, Error, Node, Read, Stat, Tree, Write};
use portcullis::store::{Deploy, Environment, MemoryStore, MemoryTree, Snapshot};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::oneshot;

/// When the other operation runs.
enum Moment {
    BeforeTheFirstWrite,
    /// After so many reads.
    AfterReads(AtomicUsize),
}

/// A tree that lets another operation run, once.
struct Interrupted {
    tree: MemoryTree,
    moment: Moment,
    turn: Mutex<Option<(oneshot::Sender<()>, oneshot::Receiver<()>)>>,
}

impl Interrupted {
    async fn give_way(&self) {
        let turn = self.turn.lock().unwrap().take();
        if let Some((begin, ended)) = turn {
            begin.send(()).unwrap();
            ended.await.unwrap();
        }
    }
}

impl Tree for Interrupted {
    type Feed = MemoryFeed;

    async fn get(&self, path: &NodePath) -> Result<Node, Error> {
        self.tree.get(path).await
    }

    async fn stat(&self, path: &NodePath) -> Result<Option<Stat>, Error> {
        self.tree.stat(path).await
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, Error> {
        self.tree.children(path).await
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, Error>>, Error> {
        let Moment::AfterReads(left) = &self.moment else { return self.tree.read_each(reads).await };
        let mut answers = Vec::new();
        for read in reads {
            if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
                self.give_way().await;
            }
            answers.extend(self.tree.read_each(vec![read]).await?);
        }
        Ok(answers)
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), Error> {
        if matches!(self.moment, Moment::BeforeTheFirstWrite) {
            self.give_way().await;
        }
        self.tree.write(writes).await
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), Error> {
        self.tree.set_acl(path, acl).await
    }

    async fn sync(&self) -> Result<(), Error> {
        self.tree.sync().await
    }

    async fn watch(&self, path: &NodePath) -> Result<MemoryFeed, Error> {
        self.tree.watch(path).await
    }
}

/// Runs `main` on an environment with `web/0` on machine 0 and nothing on machine 1, and
/// `interlude` just before its first write.
fn race(
    main: impl AsyncFnOnce(&Environment<Interrupted>),
    interlude: impl AsyncFnOnce(&Environment<MemoryTree>),
) {
    assert!(race_at(Moment::BeforeTheFirstWrite, main, interlude), "no write was interrupted");
}

/// The same at another time. Returns whether that time came.
fn race_at(
    moment: Moment,
    main: impl AsyncFnOnce(&Environment<Interrupted>),
    interlude: impl AsyncFnOnce(&Environment<MemoryTree>),
) -> bool {
    let store = MemoryStore::default();
    block_on(async {
        let other = fresh(&store, Placement::Unassigned).await;
        other.deploy(&deploy("web", 1)).await.unwrap();
        other.add_machine(None).await.unwrap();
        let (begin, begun) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let turn = Mutex::new(Some((begin, ended)));
        let tree = Interrupted { tree: store.connect(Some(&operator())), moment, turn };
        let environment = Environment::open(tree).await.unwrap();
        let interrupted = async {
            main(&environment).await;
            // An operation that still waits does not run.
            drop(environment);
        };
        let between = async {
            let came = begun.await.is_ok();
            if came {
                interlude(&other).await;
                end.send(()).unwrap();
            }
            came
        };
        tokio::join!(interrupted, between).1
    })
}

async fn units_and_assignments(tree: &impl Tree) -> (usize, usize) {
    let units = tree.children(&paths::units()).await.unwrap();
    let places = tree.children(&paths::machine_units(MachineId::new(0))).await.unwrap();
    (units.len(), places.len())
}

#[test]
fn a_service_destroyed_before_its_units_are_added() {
    race(
        async |environment| {
            let refusal = environment.add_units(&service("web"), 1, None).await.unwrap_err();
            assert_eq!(refusal.to_string(), "Service 'web' was not found");
            assert_eq!(units_and_assignments(environment.tree()).await, (0, 0));
        },
        async |other| other.destroy_service(&service("web")).await.unwrap(),
    );
}

#[test]
fn a_service_replaced_before_its_units_are_added() {
    race(
        async |environment| {
            let placed = environment.add_units(&service("web"), 1, None).await.unwrap();
            assert_eq!(placed[0].name.to_string(), "web/1");
            let (id, _) = environment.service(&service("web")).await.unwrap();
            let (_, unit) = environment.unit(&placed[0].name).await.unwrap();
            assert_eq!(unit.service, id, "a unit of a service that is gone");
        },
        async |other| {
            other.destroy_service(&service("web")).await.unwrap();
            other.deploy(&deploy("web", 0)).await.unwrap();
        },
    );
}

#[test]
fn units_added_before_their_service_is_destroyed() {
    race(
        async |environment| {
            environment.destroy_service(&service("web")).await.unwrap();
            assert_eq!(units_and_assignments(environment.tree()).await, (0, 0));
        },
        async |other| {
            other.add_units(&service("web"), 1, Some(MachineId::new(0))).await.unwrap();
        },
    );
}

#[test]
fn a_machine_terminated_before_a_unit_is_assigned() {
    race(
        async |environment| {
            let wanted = Deploy { to: Some(MachineId::new(0)), ..deploy("late", 1) };
            let refusal = environment.deploy(&wanted).await.unwrap_err();
            assert_eq!(refusal.to_string(), "Machine 0 was not found");
            assert!(environment.service(&service("late")).await.is_err(), "half of a deployment");
        },
        async |other| {
            other.destroy_service(&service("web")).await.unwrap();
            other.terminate_machines(&[MachineId::new(0)]).await.unwrap();
        },
    );
}

#[test]
fn a_unit_assigned_before_its_machine_is_terminated() {
    race(
        async |environment| {
            let refusal = environment.terminate_machines(&[MachineId::new(1)]).await.unwrap_err();
            assert_eq!(refusal.to_string(), "Resources are currently assigned to machine 1");
            assert_eq!(environment.machine_ids().await.unwrap().len(), 2);
        },
        async |other| {
            other.add_units(&service("web"), 1, Some(MachineId::new(1))).await.unwrap();
        },
    );
}

#[test]
fn a_snapshot_during_changes_has_the_machine_of_every_unit() {
    for ends in [false, true] {
        let changed_after = |reads: usize| {
            let look = async |environment: &Environment<Interrupted>| {
                let read = Snapshot::read(environment.tree()).await.unwrap();
                let view = View::new(&[&Machines(&read), &Services(&read)], &Scope::default());
                assert!(view.errors().is_empty(), "after {reads} reads: {:?}", view.errors());
                for (name, unit) in view.services.values().flat_map(|service| &service.units) {
                    let machine = unit.machine.filter(|machine| view.machines.contains_key(machine));
                    assert!(machine.is_some(), "after {reads} reads: {name} is nowhere");
                }
            };
            race_at(Moment::AfterReads(AtomicUsize::new(reads)), look, async |other| {
                if ends {
                    other.destroy_service(&service("web")).await.unwrap();
                    other.terminate_machines(&[MachineId::new(0)]).await.unwrap();
                } else {
                    other.deploy(&deploy("late", 1)).await.unwrap();
                }
            })
        };
        let reads = (0..).find(|&reads| !changed_after(reads)).unwrap();
        assert!(reads > 10, "only {reads} reads");
    }
}
