//! An in-memory provider for tests, with injected faults, stale reads and changes by others. It has
//! no randomness, and uses the clock only for deadlines: the same calls under the same script give
//! the same results.
//!
//! This file handles locking, the fault script and the journal. The effects of calls belong in
//! `world`.

mod stale_reads;
mod world;

use crate::error::Error;
use crate::provider::{
    Applied, Firewall, GroupId, Instance, InstanceId, Inventory, Launch, MachineNumber, MachineRules,
    Machines, OtherGroup, Seen,
};
use crate::rule::{Change, Rule};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::time::Instant;
use world::World;
pub use world::{MemorySettings, Rewrite};

/// The requests that are counted and can fail. A change consists of up to two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallName {
    Observe,
    Open,
    Close,
    /// Repairs drift where there is nothing to open or close.
    Repair,
    List,
    Launch,
    Adopt,
    EnsureGroup,
    Release,
    Terminate,
    RevokeAll,
    DeleteGroup,
    AdoptGroups,
}

impl CallName {
    pub const ALL: [Self; 13] = [
        Self::Observe,
        Self::Open,
        Self::Close,
        Self::Repair,
        Self::List,
        Self::Launch,
        Self::Adopt,
        Self::EnsureGroup,
        Self::Release,
        Self::Terminate,
        Self::RevokeAll,
        Self::DeleteGroup,
        Self::AdoptGroups,
    ];

    pub fn is_write(self) -> bool {
        !matches!(self, Self::Observe | Self::List)
    }
}

/// A request without its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Counted from 1 over all requests.
    pub index: u64,
    pub name: CallName,
    /// `None` for a request about several machines.
    pub machine: Option<MachineNumber>,
    /// The rules to open or close.
    pub rules: BTreeSet<Rule>,
}

/// A request with its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub call: Call,
    /// Whether it had its effect; the reply may say otherwise.
    pub applied: bool,
    /// The reply; `None` if there was none.
    pub answer: Option<Result<(), Error>>,
}

/// An injected fault of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The request fails without an effect.
    Before(Failure),
    /// The request has its effect, but reports a failure.
    After(Failure),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    Error(Error),
    /// There is no reply. The caller waits until its future is dropped, as in a crash.
    Silence,
}

/// Size limit of the journal; all requests are counted.
const JOURNAL_MAX: usize = 10_000;

type Script = Box<dyn FnMut(&Call) -> Option<Fault> + Send>;

/// An in-memory provider. Clones share one world.
#[derive(Clone)]
pub struct Memory {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    world: World,
    /// Faults by index, which take precedence over `script`. Each is used once.
    faults: BTreeMap<u64, Fault>,
    script: Option<Script>,
    journal: VecDeque<Entry>,
    counts: BTreeMap<CallName, usize>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("world", &self.lock().world).finish_non_exhaustive()
    }
}

impl Memory {
    pub fn new(settings: MemorySettings) -> Self {
        let shared = Shared {
            world: World::new(settings),
            faults: BTreeMap::new(),
            script: None,
            journal: VecDeque::new(),
            counts: BTreeMap::new(),
        };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Makes the request with this index fail, once.
    pub fn fail_at(&self, index: u64, fault: Fault) {
        self.lock().faults.insert(index, fault);
    }

    /// Sets a function that injects faults. It runs under the lock of this provider and must not
    /// use it.
    pub fn set_script(&self, script: impl FnMut(&Call) -> Option<Fault> + Send + 'static) {
        self.lock().script = Some(Box::new(script));
    }

    pub fn clear_script(&self) {
        self.lock().script = None;
    }

    /// Changes the settings.
    pub fn configure(&self, change: impl FnOnce(&mut MemorySettings)) {
        change(&mut self.lock().world.settings);
    }

    /// Returns the latest requests, oldest first.
    pub fn journal(&self) -> Vec<Entry> {
        self.lock().journal.iter().cloned().collect()
    }

    /// Returns the number of requests so far, which is the index of the last one.
    pub fn calls(&self) -> u64 {
        self.lock().world.calls
    }

    pub fn calls_of(&self, name: CallName) -> usize {
        self.lock().counts.get(&name).copied().unwrap_or(0)
    }

    pub fn writes(&self) -> usize {
        self.lock().counts.iter().filter(|(name, _)| name.is_write()).map(|(_, count)| count).sum()
    }

    /// Returns the true state of a machine, without stale reads.
    pub fn actual(&self, machine: MachineNumber) -> Option<MachineRules> {
        self.lock().world.rules(machine).cloned()
    }

    /// Returns the true inventory, without stale reads.
    pub fn truth(&self) -> Inventory {
        self.lock().world.inventory_as_of(u64::MAX)
    }

    /// Creates the machine's group, with our mark and no rules. Returns its id.
    pub fn add_group(&self, machine: MachineNumber) -> GroupId {
        self.lock().world.add_group(machine)
    }

    /// Changes the machine's group as another client; returns `false` if it has none.
    pub fn tamper(&self, machine: MachineNumber, change: impl FnOnce(&mut MachineRules)) -> bool {
        self.lock().world.tamper(machine, change)
    }

    /// Deletes the machine's group as another client.
    pub fn remove_group(&self, machine: MachineNumber) {
        self.lock().world.remove_group(machine);
    }

    /// Creates the group that all machines share, with our mark.
    pub fn add_environment_group(&self) {
        self.lock().world.environment = Some(GroupId::new("sg-environment"));
    }

    /// Simulates a lost store whose environment name is used by a new one: the group that all
    /// machines share carries the id of the old store, and launches fail until it is adopted.
    pub fn lose_store(&self, store: &str) {
        let mut inner = self.lock();
        let group = inner.world.environment.take();
        inner.world.lost = group.map(|group| (group, store.to_owned()));
    }

    /// Creates a foreign group with the name of the machine's group.
    pub fn squat(&self, machine: MachineNumber) {
        self.lock().world.squat(machine);
    }

    /// Returns the machines whose group name belongs to a foreign group.
    pub fn squatted(&self) -> BTreeSet<MachineNumber> {
        self.lock().world.squatted()
    }

    /// Deletes the foreign groups with names of machines' groups.
    pub fn end_squatting(&self) {
        self.lock().world.end_squatting();
    }

    /// Launches a foreign instance.
    pub fn add_instance(&self, instance: &InstanceId) {
        self.lock().world.add_instance(instance);
    }

    /// Ends an instance, as another client or a hardware failure would.
    pub fn lose_instance(&self, instance: &InstanceId) {
        self.lock().world.lose_instance(instance);
    }

    /// Returns whether an instance runs, ours or foreign.
    pub fn is_running(&self, instance: &InstanceId) -> bool {
        self.lock().world.is_running(instance)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A script that panics fails its test anyway; the state stays consistent.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one request that changes rules, unless `until` has passed.
    async fn change(
        &self,
        name: CallName,
        machine: MachineNumber,
        rules: &BTreeSet<Rule>,
        until: Instant,
        effect: impl FnOnce(&mut World) -> Result<(), Error> + Send,
    ) -> Result<(), Error> {
        if Instant::now() >= until {
            return Err(Error::NotBegun { what: machine.into() });
        }
        self.call(name, Some(machine), rules.clone(), effect).await
    }

    async fn call<T>(
        &self,
        name: CallName,
        machine: Option<MachineNumber>,
        rules: BTreeSet<Rule>,
        effect: impl FnOnce(&mut World) -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        let answer = self.lock().answer(name, machine, rules, effect);
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
}

impl Shared {
    /// Executes a request under the fault script. Returns `None` if there is no reply.
    fn answer<T>(
        &mut self,
        name: CallName,
        machine: Option<MachineNumber>,
        rules: BTreeSet<Rule>,
        effect: impl FnOnce(&mut World) -> Result<T, Error>,
    ) -> Option<Result<T, Error>> {
        self.world.calls += 1;
        let call = Call { index: self.world.calls, name, machine, rules };
        let fault = match self.faults.remove(&call.index) {
            Some(fault) => Some(fault),
            None => self.script.as_mut().and_then(|script| script(&call)),
        };
        let (applied, answer) = match fault {
            None => {
                let result = effect(&mut self.world);
                (result.is_ok(), Some(result))
            }
            Some(Fault::Before(failure)) => (false, failure.answer()),
            Some(Fault::After(failure)) => (effect(&mut self.world).is_ok(), failure.answer()),
        };
        let recorded = answer.as_ref().map(|result| result.as_ref().map(|_| ()).map_err(Error::clone));
        *self.counts.entry(name).or_default() += 1;
        if self.journal.len() == JOURNAL_MAX {
            self.journal.pop_front();
        }
        self.journal.push_back(Entry { call, applied, answer: recorded });
        answer
    }
}

impl Failure {
    fn answer<T>(self) -> Option<Result<T, Error>> {
        match self {
            Self::Error(error) => Some(Err(error)),
            Self::Silence => None,
        }
    }
}

impl Firewall for Memory {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        self.call(CallName::Observe, None, BTreeSet::new(), |world| {
            machines.iter().map(|&machine| Ok((machine, world.observe(machine)?))).collect()
        })
        .await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        if change.is_empty() {
            let repair = |world: &mut World| world.repair(machine);
            return Applied::as_one(
                self.change(CallName::Repair, machine, &change.open, until, repair).await,
            );
        }
        let mut applied = Applied::as_one(Ok(()));
        if !change.close.is_empty() {
            let close = |world: &mut World| world.close(machine, &change.close);
            applied.closed = self.change(CallName::Close, machine, &change.close, until, close).await;
        }
        if !change.open.is_empty() {
            let open = |world: &mut World| world.open(machine, &change.open);
            applied.opened = self.change(CallName::Open, machine, &change.open, until, open).await;
        }
        applied
    }

    fn rules_per_family(&self) -> Option<usize> {
        Some(self.lock().world.settings.rules_per_family)
    }
}

impl Machines for Memory {
    async fn list(&self) -> Result<Inventory, Error> {
        self.call(CallName::List, None, BTreeSet::new(), |world| Ok(world.inventory())).await
    }

    async fn launch(&self, launch: &Launch) -> Result<Instance, Error> {
        let machine = launch.machine;
        self.call(CallName::Launch, Some(machine), BTreeSet::new(), |world| world.launch(machine)).await
    }

    async fn adopt(&self, machine: MachineNumber, instance: &InstanceId) -> Result<Instance, Error> {
        let adopt = |world: &mut World| world.adopt(machine, instance);
        self.call(CallName::Adopt, Some(machine), BTreeSet::new(), adopt).await
    }

    async fn ensure_group(&self, machine: MachineNumber, instance: &InstanceId) -> Result<GroupId, Error> {
        let ensure = |world: &mut World| world.ensure_group(machine, instance);
        self.call(CallName::EnsureGroup, Some(machine), BTreeSet::new(), ensure).await
    }

    async fn release(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        let release = |world: &mut World| world.release(machine, instance);
        self.call(CallName::Release, Some(machine), BTreeSet::new(), release).await
    }

    async fn terminate(&self, machine: MachineNumber, instance: &InstanceId) -> Result<(), Error> {
        let terminate = |world: &mut World| world.terminate(machine, instance);
        self.call(CallName::Terminate, Some(machine), BTreeSet::new(), terminate).await
    }

    async fn revoke_all(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        let revoke = |world: &mut World| world.revoke_all(machine, group);
        self.call(CallName::RevokeAll, Some(machine), BTreeSet::new(), revoke).await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        self.call(CallName::DeleteGroup, None, BTreeSet::new(), |world| world.delete_group(group)).await
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        self.call(CallName::AdoptGroups, None, BTreeSet::new(), |world| Ok(world.adopt_groups())).await
    }
}
