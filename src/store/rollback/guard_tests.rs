//! A store that is restored under an agent.

use std::sync::{Mutex as Lock, PoisonError};
use std::time::Duration;

use super::*;
use crate::store::memory::Backup;
use crate::store::records::Placement;
use crate::store::{Acceptance, Environment, MemoryStore, MemoryTree};

/// Checkpoint storage that outlives the agent, on a disk that may be full.
#[derive(Default)]
struct Disk {
    saved: Lock<Option<Vec<u8>>>,
    full: Lock<bool>,
}

impl Disk {
    fn fill(&self, full: bool) {
        *self.full.lock().unwrap_or_else(PoisonError::into_inner) = full;
    }
}

impl Memory for Disk {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.saved.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn save(&self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        Box::pin(async {
            if *self.full.lock().unwrap_or_else(PoisonError::into_inner) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
            Ok(())
        })
    }
}

struct World {
    store: MemoryStore,
    operator: Environment<MemoryTree>,
    /// Machine 0 as its agent sees it.
    machine: MemoryTree,
    identity: Identity,
}

const MACHINE: MachineId = MachineId::new(0);

impl World {
    async fn new() -> Self {
        let (store, operator, _) = MemoryStore::bootstrapped(Placement::Local).await;
        let credential = operator.machine_credential(MACHINE).await.unwrap();
        let machine = store.connect(Some(&credential));
        Self { store, operator, machine, identity: credential.identity() }
    }

    /// An agent that was started just now.
    fn agent(&self, disk: &Arc<Disk>) -> RollbackGuard {
        let memory: Arc<dyn Memory> = Arc::clone(disk) as _;
        RollbackGuard::of_machine(MACHINE, &self.operator.info().roles, &self.identity, memory)
    }

    async fn review(&self, agent: &RollbackGuard, basis: Basis) -> Standing {
        agent.review(&self.machine, None, basis).await.unwrap()
    }

    async fn version(&self) -> i32 {
        self.machine.get(&paths::machine_checkpoint(MACHINE)).await.unwrap().version
    }

    /// A backup, and then `steps` more things that the agent acts on.
    async fn act_after_backup(&self, agent: &RollbackGuard, steps: usize) -> Backup {
        let backup = self.store.backup();
        for _ in 0..steps {
            assert_eq!(self.review(agent, Basis::New).await, Standing::Good);
        }
        backup
    }
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_holds_the_agent_until_it_is_accepted() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    assert_eq!(world.review(&agent, Basis::New).await, Standing::Good);
    let backup = world.act_after_backup(&agent, 2).await;
    assert_eq!(world.operator.accept_store().await.unwrap().agents, [], "no agent is held");
    world.store.restore(&backup);
    let why = "the store went back: it is at checkpoint 1, and this agent acted on checkpoint 3; nothing \
               is removed until an operator runs `juju accept-store`";
    // Also after a restart.
    for agent in [&agent, &world.agent(&disk)] {
        assert_eq!(world.review(agent, Basis::Known).await.rolled_back(), Some(why));
    }
    let written = world.version().await;
    assert!(world.review(&agent, Basis::New).await.rolled_back().is_some());
    assert_eq!(world.version().await, written, "a held agent writes its record once");
    assert_eq!(world.operator.accept_store().await.unwrap().agents, [Acceptance::Machine(MACHINE)]);
    assert_eq!(world.review(&agent, Basis::Known).await, Standing::Good);
    assert_eq!(world.operator.accept_store().await.unwrap().agents, []);
    assert_eq!(world.review(&world.agent(&disk), Basis::Known).await, Standing::Good);
}

#[tokio::test(start_paused = true)]
async fn an_unusable_machine_does_not_prevent_the_acceptance_for_others() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    let backup = world.act_after_backup(&agent, 2).await;
    world.store.restore(&backup);
    assert!(world.review(&agent, Basis::Known).await.rolled_back().is_some());
    // Two more machines: the checkpoint of one cannot be parsed. Its number comes after machine 0
    // and before the controller's.
    let broken = world.operator.add_machine(None).await.unwrap();
    let acl = world.operator.info().roles.machine_checkpoint(&world.identity);
    let path = paths::machine_checkpoint(broken);
    let garbage = Write::create(path.clone(), "{", acl.clone());
    world.operator.tree().write(vec![garbage]).await.unwrap();
    let held = world.operator.add_machine(None).await.unwrap();
    let record = world.machine.get(&paths::machine_checkpoint(MACHINE)).await.unwrap().data;
    let copy = Write::create(paths::machine_checkpoint(held), record, acl);
    world.operator.tree().write(vec![copy]).await.unwrap();
    let accepted = world.operator.accept_store().await.unwrap();
    assert_eq!(accepted.agents, [Acceptance::Machine(MACHINE), Acceptance::Machine(held)]);
    let [(failed, error)] = accepted.failed.as_slice() else { panic!("{:?}", accepted.failed) };
    assert_eq!(*failed, Acceptance::Machine(broken));
    assert!(error.to_string().contains(path.as_str()), "{error}");
    assert_eq!(world.review(&agent, Basis::Known).await, Standing::Good);
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_that_was_written_to_is_still_recognised() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    let backup = world.act_after_backup(&agent, 1).await;
    world.store.restore(&backup);
    // The restored store reaches a higher zxid than before, and another machine with a new disk
    // even writes a checkpoint with the same number.
    for _ in 0..20 {
        world.operator.add_machine(None).await.unwrap();
    }
    assert_eq!(world.review(&world.agent(&Arc::default()), Basis::Known).await, Standing::Good);
    assert!(world.review(&agent, Basis::Known).await.rolled_back().unwrap().contains("another checkpoint 1"));
}

#[tokio::test(start_paused = true)]
async fn an_acceptance_does_not_hold_for_a_later_restore() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    let backup = world.act_after_backup(&agent, 1).await;
    world.store.restore(&backup);
    assert!(world.review(&agent, Basis::Known).await.rolled_back().is_some());
    world.operator.accept_store().await.unwrap();
    let accepted = world.store.backup();
    assert_eq!(world.review(&agent, Basis::Known).await, Standing::Good);
    for backup in [&accepted, &backup] {
        world.store.restore(backup);
        assert!(world.review(&agent, Basis::Known).await.rolled_back().is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn no_checkpoint_is_written_without_new_data() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    assert_eq!(world.review(&agent, Basis::UpTo(1)).await, Standing::Good);
    let newest = world.machine.get(&paths::machine_checkpoint(MACHINE)).await.unwrap().modified;
    for basis in [Basis::Known, Basis::UpTo(newest), Basis::UpTo(1)] {
        assert_eq!(world.review(&agent, basis).await, Standing::Good);
    }
    assert_eq!(world.review(&world.agent(&disk), Basis::UpTo(newest)).await, Standing::Good);
    assert_eq!(world.version().await, 0);
    assert_eq!(world.review(&agent, Basis::UpTo(newest + 1)).await, Standing::Good);
    assert_eq!(world.version().await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_crash_before_the_file_is_written_is_no_alarm() {
    let (world, disk) = (World::new().await, Arc::<Disk>::default());
    let agent = world.agent(&disk);
    assert_eq!(world.review(&agent, Basis::New).await, Standing::Good);
    disk.fill(true);
    for _ in 0..3 {
        assert_eq!(world.review(&agent, Basis::New).await, Standing::Good);
    }
    disk.fill(false);
    let restarted = world.agent(&disk);
    assert_eq!(world.review(&restarted, Basis::Known).await, Standing::Good);
    assert!(disk.load().unwrap().is_some_and(|saved| parse_checkpoint(&saved).unwrap().number == 4));
}

#[tokio::test(start_paused = true)]
async fn a_file_that_cannot_be_read_holds_the_agent() {
    let (world, disk) = (World::new().await, Arc::<Disk>::default());
    disk.save(b"{".to_vec()).await.unwrap();
    let agent = world.agent(&disk);
    let standing = world.review(&agent, Basis::Known).await;
    assert!(standing.rolled_back().unwrap().contains("the checkpoint file cannot be read"), "{standing:?}");
    assert_eq!(world.operator.accept_store().await.unwrap().agents, [Acceptance::Machine(MACHINE)]);
    assert_eq!(world.review(&agent, Basis::Known).await, Standing::Good);
    assert_eq!(world.review(&world.agent(&disk), Basis::Known).await, Standing::Good);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_lags_behind_is_not_a_restored_store() {
    let (world, disk) = (World::new().await, Arc::default());
    let agent = world.agent(&disk);
    for basis in [Basis::Known, Basis::New] {
        let past = world.act_after_backup(&agent, 2).await;
        world.machine.fall_behind(&past);
        assert_eq!(world.review(&agent, basis).await, Standing::Good, "{basis:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn standby_replica_saves_the_leaders_checkpoints() {
    let (world, disk, standby) = (World::new().await, Arc::default(), Arc::<Disk>::default());
    let (leader, replica) = (world.agent(&disk), world.agent(&standby));
    let backup = tokio::select! {
        error = replica.follow(&world.machine) => panic!("{error}"),
        backup = async {
            let backup = world.act_after_backup(&leader, 3).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            backup
        } => backup,
    };
    world.store.restore(&backup);
    assert!(world.review(&world.agent(&standby), Basis::Known).await.rolled_back().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_from_before_the_agents_last_changes_does_not_count() {
    let (world, disk) = (World::new().await, Arc::<Disk>::default());
    let agent = world.agent(&disk);
    let checkpoint = async || {
        let node = world.machine.get(&paths::machine_checkpoint(MACHINE)).await.unwrap();
        parse_record(&node.data).unwrap().checkpoint.unwrap()
    };
    assert_eq!(agent.review_tombstone(None).await.unwrap(), Standing::Good, "the agent never acted");
    assert_eq!(world.review(&agent, Basis::New).await, Standing::Good);
    let old = checkpoint().await;
    assert_eq!(agent.review_tombstone(Some(&old)).await.unwrap(), Standing::Good);
    assert_eq!(world.review(&agent, Basis::New).await, Standing::Good);
    let new = checkpoint().await;
    for (tombstone, is_held) in [(Some(&new), false), (Some(&old), true), (None, true)] {
        for agent in [&agent, &world.agent(&disk)] {
            let standing = agent.review_tombstone(tombstone).await.unwrap();
            assert_eq!(standing.rolled_back().is_some(), is_held, "{tombstone:?}: {standing:?}");
        }
    }
    disk.save(b"{".to_vec()).await.unwrap();
    assert!(world.agent(&disk).review_tombstone(Some(&new)).await.unwrap().rolled_back().is_some());
}
