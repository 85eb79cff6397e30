//! A store that is restored from an older backup. Rules and instances that agents made after the
//! backup stay until an operator accepts the store (S7): none of these ports is closed, and no
//! instance is terminated.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::memory::Backup;
use portcullis::store::paths::NodePath;
use portcullis::store::rollback::Memory;
use tokio::time::Instant;

use crate::actions::{Action, RESYNC_RECOVERY, RETRY_RECOVERY};
use crate::checks::CHANGE_LIMIT;
use crate::faults::Mishap;
use crate::oracle::{MAX_AGE, Oracle};
use crate::port_bits::PortBits;
use crate::record::Shared;
use crate::world::{Shape, World, number};

/// The checkpoint file of one agent. It outlives the process.
#[derive(Default)]
pub(crate) struct CheckpointFile(Mutex<Option<Vec<u8>>>);

impl Memory for CheckpointFile {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn save(&self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A backup of the store, and the state of the world at that time.
pub(crate) struct Saved {
    store: Backup,
    oracle: Oracle,
    damaged: BTreeMap<NodePath, Vec<u8>>,
    /// The agent that held the lock at that time.
    leader: Option<usize>,
    /// The world had converged: every port that is opened later is opened because of a later
    /// change.
    recovered_at: bool,
}

/// Rules and machines that were made after a backup and may not be removed.
#[derive(Debug, Default)]
pub(crate) struct Protected {
    /// Opened by agents since the last backup.
    opened: BTreeMap<MachineId, PortBits>,
    /// After a restore: the ports that were opened after the backup.
    points: BTreeMap<MachineId, PortBits>,
    /// After a restore: machines that were added after the backup.
    machines: BTreeSet<MachineId>,
}

impl Shared {
    /// Records the effect of an agent's call, and checks it against S7.
    pub(crate) fn check_against_restore(&mut self, machine: MachineId, opened: PortBits, closed: PortBits) {
        let since = self.protected.opened.entry(machine).or_default();
        *since = since.or(opened).minus(closed);
        let kept = self.protected.points.get(&machine).copied().unwrap_or_default();
        let lost = closed.and(kept);
        if !lost.is_empty() {
            self.violated(format!("S7: {machine} closed{lost}, opened after the backup that was restored"));
        }
    }

    /// Checks S7 before an agent ends the instance of a machine or deletes its resources.
    pub(crate) fn check_termination(&mut self, machine: MachineId) {
        if self.protected.machines.contains(&machine) {
            self.violated(format!("S7: {machine} is ended, added after the backup that was restored"));
        }
    }
}

impl World {
    pub(crate) fn back_up(&mut self) {
        let recovered_at = self.is_due();
        let mut shared = self.interceptor.lock();
        shared.protected.opened.clear();
        let (oracle, leader) = (shared.oracle.clone(), shared.lead.map(|(agent, _)| agent));
        drop(shared);
        let (store, damaged) = (self.interceptor.store.backup(), self.damaged.clone());
        self.backup = Some(Saved { store, oracle, damaged, leader, recovered_at });
    }

    /// Restores the store to the backup; the provider and the agents keep their state.
    pub(crate) fn restore(&mut self) {
        let Some(saved) = self.backup.take() else { return };
        self.damaged = saved.damaged;
        self.deleted_nodes.clear();
        self.interceptor.lock().was_restored = true;
        self.count_mishap(Mishap::Restored);
        self.interceptor.store.restore(&saved.store);
        self.restored = true;
        self.unaccepted = true;
        let live: BTreeSet<u32> = self
            .interceptor
            .provider
            .truth()
            .instances
            .iter()
            .map(|instance| instance.machine.get())
            .collect();
        let mut shared = self.interceptor.lock();
        // The restored lock belongs to the agent that held it when the backup was made.
        shared.lead = saved.leader.map(|agent| (agent, Instant::now()));
        let before = std::mem::replace(&mut shared.oracle, saved.oracle);
        // The next leader and its saved checkpoint depend on the events that each agent received.
        if saved.recovered_at && self.agents() == 1 {
            let added = before.machines.keys().filter(|id| !shared.oracle.machines.contains_key(id));
            let added = added.filter(|id| live.contains(&id.number())).copied().collect();
            let kept = |(id, opened): (&MachineId, &PortBits)| {
                (*id, opened.and(before.wanted(*id)).minus(shared.oracle.wanted(*id)))
            };
            let points = shared.protected.opened.iter().map(kept).collect();
            (shared.protected.points, shared.protected.machines) = (points, added);
        }
        if self.provisions {
            self.foreign.retain(|machine, _| shared.oracle.machines.contains_key(machine));
        }
        // The restore includes the reports, and with them the rules that are kept for unreadable
        // units.
        for unit in shared.oracle.units.values_mut() {
            unit.kept = PortBits::NONE;
        }
        shared.past = None;
        shared.changed();
        shared.record_resync_fault();
        shared.allow_outdated_data(Instant::now(), MAX_AGE);
    }

    /// The operator accepts the store, from now on for every agent that detects the restore.
    pub(crate) async fn accept(&mut self) {
        self.unaccepted = false;
        self.interceptor.lock().protected = Protected::default();
        let accepted = self.operator.accept_store().await.expect("accepted");
        assert!(accepted.failed.is_empty(), "{:?}", accepted.failed);
        if !accepted.agents.is_empty() {
            let mut shared = self.interceptor.lock();
            shared.changed();
            shared.record_resync_fault();
            shared.allow_outdated_data(Instant::now(), MAX_AGE);
        }
    }

    /// Every agent checks whether the store was restored, and the operator accepts it.
    pub(crate) async fn accept_for_all(&mut self) {
        if !self.restored {
            return;
        }
        for agent in 0..self.agents() {
            self.accept().await;
            self.pause(RESYNC_RECOVERY).await;
            self.accept().await;
            if self.agents() > 1 {
                self.perform(Action::Crash(agent)).await;
            }
        }
        self.pause(RETRY_RECOVERY).await;
        self.accept().await;
        self.pause(RETRY_RECOVERY).await;
    }
}

/// A world in which the first unit opened a port before the backup and another one after it, and
/// the store was restored.
async fn restored(agents: usize) -> (World, MachineId, PortBits) {
    let mut world = World::new(0, Shape::small(agents, false), false).await;
    let (service, machine) = {
        let shared = world.interceptor.lock();
        let unit = shared.oracle.units.values().next().expect("a unit");
        (unit.service, unit.machine)
    };
    world.perform(Action::Open(0, 0)).await;
    world.perform(Action::Expose(service)).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(Action::Backup).await;
    world.perform(Action::Open(0, 3)).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    let open = world.interceptor.open_on(machine).expect("a group");
    world.perform(Action::Restore).await;
    (world, machine, open)
}

/// A port that was opened after the backup stays open until the operator accepts the restored
/// store.
pub(crate) async fn ports_stay_open() {
    let (mut world, machine, open) = restored(1).await;
    for agent in [0, 0] {
        world.pause(RESYNC_RECOVERY).await;
        world.check().await;
        assert_eq!(world.interceptor.open_on(machine), Some(open));
        world.perform(Action::Crash(agent)).await;
    }
    world.pause(RETRY_RECOVERY).await;
    let problem = world.report(machine).await.problem.unwrap_or_default();
    assert!(problem.contains("ports are not closed: the store went back"), "{problem}");
    world.perform(Action::Accept).await;
    world.pause(CHANGE_LIMIT + Duration::from_secs(5)).await;
    assert_ne!(world.interceptor.open_on(machine), Some(open), "closed at once");
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    assert_eq!(world.report(machine).await.problem, None);
}

/// The same if another controller leads after the restore: it has saved the checkpoints of the
/// previous leader.
pub(crate) async fn another_controller_leads() {
    let (mut world, machine, open) = restored(2).await;
    for agent in [0, 1] {
        world.perform(Action::Crash(agent)).await;
        world.pause(RESYNC_RECOVERY).await;
        assert_eq!(world.interceptor.open_on(machine), Some(open));
    }
    world.accept_for_all().await;
    world.check().await;
    assert_ne!(world.interceptor.open_on(machine), Some(open));
}

/// A machine that was added after the backup keeps its instance until the operator accepts the
/// restored store.
pub(crate) async fn instances_stay() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(RETRY_RECOVERY).await;
    world.check().await;
    world.perform(Action::Backup).await;
    world.perform(Action::Launch).await;
    world.pause(RETRY_RECOVERY).await;
    world.check().await;
    let machine = *world.interceptor.lock().oracle.machines.keys().last().expect("a machine");
    assert!(world.has_instance(machine).await);
    world.perform(Action::Restore).await;
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    let ours = |world: &World| {
        let truth = world.interceptor.provider.truth();
        truth.groups.iter().any(|group| group.machine == Some(number(machine)))
    };
    assert!(ours(&world), "the machine's group stays");
    world.perform(Action::Accept).await;
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    assert!(!ours(&world), "the machine is gone");
}
