//! Two operations at once, where it hurts: one runs whole between the last read and the write of the other. Whichever
//! was first, the result is as if they had come one after the other. And a look at everything, which is not a snapshot of
//! the store, with a change between any two of its reads.

use super::block_on;
use super::operations::{deploy, fresh, operator, service};
use portcullis::model::MachineId;
use portcullis::status::{Scope, View, collect};
use portcullis::store::acl::Acl;
use portcullis::store::memory::MemoryFeed;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::records::Placement;
use portcullis::store::tree::{Answer, Error, Node, Read, Tree, Write};
use portcullis::store::{Deploy, Environment, MemoryStore, MemoryTree};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::oneshot;

/// When it is another's turn.
enum Moment {
    BeforeTheFirstWrite,
    /// After so many reads.
    AfterReads(AtomicUsize),
}

/// A tree that waits for another's turn, once.
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

    async fn exists(&self, path: &NodePath) -> Result<bool, Error> {
        self.tree.exists(path).await
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

/// Runs `main` on an environment with `web/0` on machine 0 and nothing on machine 1, and `interlude` just before its first write.
fn race(
    main: impl AsyncFnOnce(&Environment<Interrupted>),
    interlude: impl AsyncFnOnce(&Environment<MemoryTree>),
) {
    assert!(race_at(Moment::BeforeTheFirstWrite, main, interlude), "nothing was written");
}

/// The same at another moment. Says whether it came.
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
            // Whoever still waits for a turn will not have one.
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

async fn units_and_their_places(tree: &impl Tree) -> (usize, usize) {
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
            assert_eq!(units_and_their_places(environment.tree()).await, (0, 0));
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
            assert_eq!(units_and_their_places(environment.tree()).await, (0, 0));
        },
        async |other| {
            other.add_units(&service("web"), 1, Some(MachineId::new(0))).await.unwrap();
        },
    );
}

#[test]
fn a_machine_terminated_before_a_unit_gets_there() {
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
fn a_unit_that_gets_there_before_its_machine_is_terminated() {
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
fn whatever_happens_while_status_looks_no_unit_is_without_its_place() {
    for ends in [false, true] {
        let changed_after = |reads: usize| {
            let look = async |environment: &Environment<Interrupted>| {
                let view = View::new(&collect(environment.tree()).await.unwrap(), &Scope::default());
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
