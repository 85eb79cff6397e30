//! A provider that lives in this process and can be made to fail, lag and be meddled with, so that whatever is built on
//! a provider can be tried against all of that. It has no randomness, and asks the time only to begin nothing too late: the
//! same calls under the same script give the same answers.
//!
//! This file is the shell: it takes the lock, asks the script, keeps the journal. What calls do is in `world`.

mod lagging;
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
pub use world::{Rewrite, Settings};

/// The requests that are counted and can be made to fail. A change is up to two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallName {
    Observe,
    Open,
    Close,
    /// Putting right what is amiss where there is nothing to open or close.
    Mend,
    List,
    Launch,
    Adopt,
    EnsureGroup,
    Release,
    Terminate,
    Shut,
    DeleteGroup,
    AdoptGroups,
}

impl CallName {
    pub const ALL: [Self; 13] = [
        Self::Observe,
        Self::Open,
        Self::Close,
        Self::Mend,
        Self::List,
        Self::Launch,
        Self::Adopt,
        Self::EnsureGroup,
        Self::Release,
        Self::Terminate,
        Self::Shut,
        Self::DeleteGroup,
        Self::AdoptGroups,
    ];

    pub fn is_write(self) -> bool {
        !matches!(self, Self::Observe | Self::List)
    }
}

/// One request, before it is known how it ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Counted from 1 over all requests.
    pub index: u64,
    pub name: CallName,
    /// `None` for a request about several.
    pub machine: Option<MachineNumber>,
    /// What is opened or closed.
    pub rules: BTreeSet<Rule>,
}

/// A request, and how it ended for the one who made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub call: Call,
    /// Whether it had its effect, which the caller does not always learn.
    pub applied: bool,
    /// `None` if the answer never came.
    pub answer: Option<Result<(), Error>>,
}

/// What goes wrong with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It fails and has no effect.
    Before(Failure),
    /// It has its effect, and the caller is told that it failed.
    After(Failure),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    Error(Error),
    /// There is never an answer. The caller waits until it is dropped, which is how a crash at this place looks.
    Silence,
}

/// The latest requests that are kept to be looked at; all of them are counted.
const JOURNAL_MAX: usize = 10_000;

type Script = Box<dyn FnMut(&Call) -> Option<Fault> + Send>;

/// Clones share one world.
#[derive(Clone)]
pub struct Memory {
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    world: World,
    /// Wins over `script`; each is used once.
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
    pub fn new(settings: Settings) -> Self {
        let shared = Shared {
            world: World::new(settings),
            faults: BTreeMap::new(),
            script: None,
            journal: VecDeque::new(),
            counts: BTreeMap::new(),
        };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// The request of this index fails, once.
    pub fn fail_at(&self, index: u64, fault: Fault) {
        self.lock().faults.insert(index, fault);
    }

    /// Asked about every request from now on. It is called under the lock of this provider and must not use it.
    pub fn set_script(&self, script: impl FnMut(&Call) -> Option<Fault> + Send + 'static) {
        self.lock().script = Some(Box::new(script));
    }

    pub fn clear_script(&self) {
        self.lock().script = None;
    }

    /// Changes how the provider behaves from now on.
    pub fn configure(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut self.lock().world.settings);
    }

    /// The latest requests, oldest first.
    pub fn journal(&self) -> Vec<Entry> {
        self.lock().journal.iter().cloned().collect()
    }

    /// How many requests there were so far; the next one has the index after this.
    pub fn calls(&self) -> u64 {
        self.lock().world.calls
    }

    pub fn calls_of(&self, name: CallName) -> usize {
        self.lock().counts.get(&name).copied().unwrap_or(0)
    }

    pub fn writes(&self) -> usize {
        self.lock().counts.iter().filter(|(name, _)| name.is_write()).map(|(_, count)| count).sum()
    }

    /// The truth about a machine, whatever an observer is shown.
    pub fn actual(&self, machine: MachineNumber) -> Option<MachineRules> {
        self.lock().world.rules(machine).cloned()
    }

    /// The truth about what has our mark, whatever a list shows.
    pub fn truth(&self) -> Inventory {
        self.lock().world.inventory_as_of(u64::MAX)
    }

    /// Somebody makes the machine's group, with our mark and no rules. Returns its id.
    pub fn add_group(&self, machine: MachineNumber) -> GroupId {
        self.lock().world.add_group(machine)
    }

    /// Somebody else changes the machine's group; `false` if it has none.
    pub fn tamper(&self, machine: MachineNumber, change: impl FnOnce(&mut MachineRules)) -> bool {
        self.lock().world.tamper(machine, change)
    }

    /// Somebody else deletes the machine's group.
    pub fn remove_group(&self, machine: MachineNumber) {
        self.lock().world.remove_group(machine);
    }

    /// Somebody makes the group that all machines share, with our mark.
    pub fn add_environment_group(&self) {
        self.lock().world.environment = Some(GroupId::new("sg-environment"));
    }

    /// The store of the environment is lost and a new one has its name: the group that all machines share carries the id
    /// of the old one, and no launch succeeds before it is adopted.
    pub fn lose_store(&self, store: &str) {
        let mut inner = self.lock();
        let group = inner.world.environment.take();
        inner.world.lost = group.map(|group| (group, store.to_owned()));
    }

    /// Somebody else makes a group that has the name of the machine's, without our mark.
    pub fn squat(&self, machine: MachineNumber) {
        self.lock().world.squat(machine);
    }

    /// Machines whose group's name is taken by somebody else.
    pub fn squatted(&self) -> BTreeSet<MachineNumber> {
        self.lock().world.squatted()
    }

    /// Whoever took names gives them back.
    pub fn end_squatting(&self) {
        self.lock().world.end_squatting();
    }

    /// Somebody else launches an instance.
    pub fn add_instance(&self, instance: &InstanceId) {
        self.lock().world.add_instance(instance);
    }

    /// Somebody else ends an instance, or its hardware does.
    pub fn lose_instance(&self, instance: &InstanceId) {
        self.lock().world.lose_instance(instance);
    }

    /// Whether an instance runs, whoever made it.
    pub fn is_running(&self, instance: &InstanceId) -> bool {
        self.lock().world.is_running(instance)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // A script that panics fails its test anyway; nothing here is left half done by it.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request that changes rules, if there is still time for it.
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
    /// `None` is silence.
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
        let told = answer.as_ref().map(|result| result.as_ref().map(|_| ()).map_err(Error::clone));
        *self.counts.entry(name).or_default() += 1;
        if self.journal.len() == JOURNAL_MAX {
            self.journal.pop_front();
        }
        self.journal.push_back(Entry { call, applied, answer: told });
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
            let mend = |world: &mut World| world.mend(machine);
            return Applied::as_one(self.change(CallName::Mend, machine, &change.open, until, mend).await);
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

    async fn shut(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        let shut = |world: &mut World| world.shut(machine, group);
        self.call(CallName::Shut, Some(machine), BTreeSet::new(), shut).await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        self.call(CallName::DeleteGroup, None, BTreeSet::new(), |world| world.delete_group(group)).await
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        self.call(CallName::AdoptGroups, None, BTreeSet::new(), |world| Ok(world.adopt_groups())).await
    }
}
