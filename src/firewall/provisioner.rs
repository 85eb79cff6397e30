//! Instances for the machines of the tree, while we lead: looks at what the provider has, asks `provision.rs` what to do
//! about it, has it done and remembers what failed. It decides nothing about instances itself. All that it remembers may
//! be lost at any time: what is ours is marked at the provider, and what is wanted is in the tree.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use portcullis_provider::Machines;
use portcullis_provider::provider::Inventory;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::boot::Boot;
use super::enact::{Failure, Hands, Outcome, Stop, confirm};
use super::metrics::Metrics;
use super::provision::{Doubt, Missing, Provisioning, Records, Step, provision};
use super::retry::{Pace, Retries};
use crate::model::MachineId;
use crate::model::planted::{Bug, planted};
use crate::store::changes::{Dirty, Key};
use crate::store::election::Leadership;
use crate::store::paths;
use crate::store::records;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Read, Tree};

/// What the provisioner is to look at again. Whoever wakes it adds to this, and it takes all of it at once.
#[derive(Debug, Default)]
pub struct Wake {
    everything: bool,
    machines: BTreeSet<MachineId>,
}

impl Wake {
    pub fn add(&mut self, dirty: &Dirty) {
        self.everything |= dirty.everything();
        let machine = |key| if let Key::Machine(id) = key { Some(id) } else { None };
        self.machines.extend(dirty.keys().filter_map(machine));
    }

    pub fn is_empty(&self) -> bool {
        !self.everything && self.machines.is_empty()
    }
}

/// What the firewall agent is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    /// What is wrong with machines, all of them.
    pub problems: BTreeMap<MachineId, String>,
    /// Whether machines that are not named have no problem. Until all was seen and has settled, nobody knows.
    pub whole: bool,
    /// Machines whose place for rules may be another than it was.
    pub changed: BTreeSet<MachineId>,
}

/// What is tried again after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    /// Reading what the provider has.
    List,
    /// Instances that are on their way.
    Settle,
    /// The steps of one machine, or those that concern all.
    Steps(Option<MachineId>),
    /// A request of the operator.
    Request,
}

pub struct Provisioner<T, M> {
    tree: T,
    machines: M,
    boot: Boot,
    /// As last read from the tree or written to it; `None` before the first look.
    known: Option<Records>,
    retries: Retries<Instant, Task>,
    missing: Missing<Instant>,
    doubt: Doubt<Instant>,
    /// Why what the provider has could not be read, if it could not.
    unlisted: Option<String>,
    /// Machines whose instance is gone.
    gone: BTreeMap<MachineId, String>,
    /// Machines for which a step failed, and why; without a number for what concerns all.
    failures: BTreeMap<Option<MachineId>, String>,
    /// What the agent was told last; nothing yet in this reign if `None`.
    told: Option<(BTreeMap<MachineId, String>, bool)>,
    /// What the provider has was seen in this reign.
    listed: bool,
    /// Since when the provider shows nothing of the environment, while the operator waits for that.
    clear_since: Option<Instant>,
    random: Box<dyn FnMut() -> u64 + Send + Sync>,
    metrics: Metrics,
    /// Detects a store that was restored from an older backup.
    guard: Option<Arc<RollbackGuard>>,
    /// Machines that are not in the tree and are kept because the store was restored, with the
    /// reason.
    kept: BTreeMap<MachineId, String>,
}

impl<T, M> std::fmt::Debug for Provisioner<T, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Provisioner").field("failures", &self.failures).finish_non_exhaustive()
    }
}

impl<T: Tree, M: Machines> Provisioner<T, M> {
    pub fn new(
        tree: T,
        machines: M,
        boot: Boot,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            tree,
            machines,
            boot,
            known: None,
            retries: Retries::default(),
            missing: Missing::default(),
            doubt: Doubt::default(),
            unlisted: None,
            gone: BTreeMap::new(),
            failures: BTreeMap::new(),
            told: None,
            listed: false,
            clear_since: None,
            random: Box::new(random),
            metrics: Metrics::default(),
            guard: None,
            kept: BTreeMap::new(),
        }
    }

    /// Terminates no instance while `guard` reports a restored store.
    #[must_use]
    pub fn with_guard(mut self, guard: Arc<RollbackGuard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Counts where others count, too.
    pub fn count_in(&mut self, metrics: Metrics) {
        self.metrics = metrics;
    }

    /// Works for as long as we lead; ends once somebody else does.
    ///
    /// # Errors
    /// The failures of the store. The provider's are retried, and told as news.
    pub async fn work(
        &mut self,
        mut lead: Leadership,
        wakes: &watch::Sender<Wake>,
        news: &mpsc::Sender<News>,
    ) -> Result<(), crate::store::Error> {
        // What another leader did meanwhile is not known.
        (self.known, self.doubt) = (None, Doubt::default());
        (self.told, self.listed, self.clear_since) = (None, false, None);
        let mut woken = wakes.subscribe();
        // The first wake says everything, and may have been before us.
        if !wakes.borrow().is_empty() {
            woken.mark_changed();
        }
        loop {
            tokio::select! {
                biased;
                // The sender is borrowed, and so still there.
                _ = woken.changed() => {}
                () = due(self.next_look()) => {}
            }
            let mut wake = Wake::default();
            wakes.send_if_modified(|pending| {
                wake = std::mem::take(pending);
                false
            });
            match self.look(wake, &mut lead).await {
                Ok(changed) => self.tell(changed, news).await,
                Err(Stop::Replaced) => return Ok(()),
                Err(Stop::Store(error)) => return Err(error),
            }
        }
    }

    fn next_look(&self) -> Option<Instant> {
        // Nothing else can be done before the list can be had.
        self.retries.at(Task::List).or_else(|| {
            [self.retries.next(), self.missing.next(), self.doubt.next()].into_iter().flatten().min()
        })
    }

    /// One look and what follows from it; returns the machines for which something was changed.
    async fn look(&mut self, wake: Wake, lead: &mut Leadership) -> Result<BTreeSet<MachineId>, Stop> {
        let now = Instant::now();
        let due = wake.everything || self.next_look().is_some_and(|at| at <= now);
        // The next attempt at the list looks at everything, and comes soon enough.
        let in_vain = self.retries.waiting(Task::List, now);
        if in_vain || (!due && !self.is_news(&wake.machines).await.map_err(store)?) {
            return Ok(BTreeSet::new());
        }
        confirm(&self.tree, lead).await?;
        // The tree comes second: whatever the provider has, its machine was in the tree before. So one that was just
        // added is never taken for one that is gone.
        let listed = self.machines.list().await;
        let (records, newest) = self.read_all().await.map_err(store)?;
        self.known = Some(records.clone());
        match listed {
            Ok(inventory) => {
                self.unlisted = None;
                self.listed = true;
                self.retries.succeeded(Task::List);
                let changed = self.put_right((&records, newest), &inventory, lead).await?;
                self.answer_requests(&records, &inventory, lead).await?;
                Ok(changed)
            }
            Err(error) => {
                self.metrics.not_provisioned(error.kind());
                let problem = Some(error.to_string());
                if self.unlisted != problem {
                    warn!(%error, "instances not readable");
                }
                self.unlisted = problem;
                self.try_later(Task::List, Pace::after(&error));
                Ok(BTreeSet::new())
            }
        }
    }

    async fn put_right(
        &mut self,
        (records, newest): (&Records, i64),
        inventory: &Inventory,
        lead: &mut Leadership,
    ) -> Result<BTreeSet<MachineId>, Stop> {
        let now = Instant::now();
        let mut plan = provision(records, inventory, |ends| self.doubt.confirms(ends, now));
        self.hold_if_behind(&mut plan, newest, lead).await?;
        self.remember(&plan, now);
        let mut steps = plan.steps;
        steps.retain(|step| !self.retries.waiting(Task::Steps(step.machine()), now));
        let hands = Hands { tree: &self.tree, machines: &self.machines, boot: &self.boot };
        let outcomes = hands.enact(steps, lead).await?;
        let changed =
            outcomes.iter().filter(|(_, outcome)| outcome.acted).filter_map(|(id, _)| *id).collect();
        for (machine, outcome) in outcomes {
            self.learn(machine, outcome);
        }
        Ok(changed)
    }

    /// Removes terminations from the plan if the store was restored: a machine that is missing from
    /// it may have been added after the backup.
    async fn hold_if_behind(
        &mut self,
        plan: &mut Provisioning,
        newest: i64,
        lead: &Leadership,
    ) -> Result<(), Stop> {
        self.kept.clear();
        let Some(guard) = self.guard.as_ref().filter(|_| !plan.steps.is_empty()) else { return Ok(()) };
        let makes = plan.steps.iter().any(|step| !step.is_farewell());
        let basis = if makes { Basis::UpTo(newest) } else { Basis::Known };
        let Standing::Held(why) =
            guard.review(&self.tree, Some(lead.fence()), basis).await.map_err(refused)?
        else {
            return Ok(());
        };
        let why = format!("not in the store, and kept: {why}");
        let ending = plan.steps.iter().filter(|step| step.is_farewell()).filter_map(Step::machine);
        self.kept = ending.map(|machine| (machine, why.clone())).collect();
        plan.steps.retain(|step| !step.is_farewell());
        plan.confirmed.clear();
        Ok(())
    }

    fn remember(&mut self, plan: &Provisioning, now: Instant) {
        self.gone = self.missing.settled(&plan.vanished, now);
        if planted(Bug::SilentAboutTheGone) {
            self.gone.clear();
        }
        if !plan.doubted.is_empty() {
            warn!(ending = plan.doubted.len(), "would end most instances; looking again first");
        }
        self.doubt.hold(plan, now);
        // Whoever has nothing left to do has no failures either.
        let planned: BTreeSet<Option<MachineId>> = plan.steps.iter().map(|step| step.machine()).collect();
        self.failures.retain(|id, _| planned.contains(id));
        self.retries.forget_all_but(|task| !matches!(task, Task::Steps(id) if !planned.contains(&id)));
        if plan.unfinished {
            self.try_later(Task::Settle, Pace::BackOff);
        } else {
            self.retries.succeeded(Task::Settle);
        }
    }

    /// Takes in what became of a machine's steps.
    fn learn(&mut self, machine: Option<MachineId>, outcome: Outcome) {
        if let (Some(known), Some(machine), Some(record)) = (&mut self.known, machine, outcome.recorded) {
            known.insert(machine, Ok(record));
        }
        let task = Task::Steps(machine);
        match outcome.failure {
            // What was done may have left more to do: a group goes after its instance, say. The next look tells.
            None if outcome.acted => {
                self.failures.remove(&machine);
                self.try_later(task, Pace::BackOff);
            }
            None => {
                self.failures.remove(&machine);
                self.retries.succeeded(task);
            }
            Some(Failure::Stale) => self.try_later(task, Pace::ReadAgain),
            Some(Failure::Provider(error)) => {
                self.metrics.not_provisioned(error.kind());
                let problem = error.to_string();
                if self.failures.insert(machine, problem.clone()) != Some(problem) {
                    let machine = machine.map_or_else(|| "all".to_owned(), |machine| machine.to_string());
                    warn!(machine, %error, "not provisioned");
                }
                self.try_later(task, Pace::after(&error));
            }
        }
    }

    async fn tell(&mut self, changed: BTreeSet<MachineId>, news: &mpsc::Sender<News>) {
        let (problems, whole) = (self.problems(), self.listed && self.missing.next().is_none());
        let now = Some((problems.clone(), whole));
        if now != self.told || !changed.is_empty() {
            self.told = now;
            // Nobody listens any more only when we are about to be ended.
            let _ = news.send(News { problems, whole, changed }).await;
        }
    }

    /// What is wrong with each machine of the tree, and with those that have left it and are not gone yet.
    fn problems(&self) -> BTreeMap<MachineId, String> {
        let known = self.known.iter().flatten().map(|(id, _)| *id).collect::<BTreeSet<_>>();
        let left = self.failures.iter().filter_map(|(id, problem)| Some(((*id)?, problem)));
        let left = left.filter(|(id, _)| !known.contains(id));
        let left = left.map(|(id, problem)| (id, format!("terminated, and not gone yet: {problem}")));
        let kept = self.kept.iter().filter(|(id, _)| !known.contains(id));
        let left = left.chain(kept.map(|(id, why)| (*id, why.clone())));
        let problem = |(id, record): (&MachineId, &Result<records::Machine, String>)| {
            let has_none = matches!(record, Ok(records::Machine { instance_id: None, .. }));
            let unlisted = self.unlisted.as_ref().filter(|_| has_none);
            let problem = self.failures.get(&Some(*id)).or(unlisted).or(self.gone.get(id))?;
            Some((*id, problem.clone()))
        };
        self.known.iter().flatten().filter_map(problem).chain(left).collect()
    }

    fn try_later(&mut self, task: Task, pace: Pace) {
        let random = (self.random)();
        debug!(?task, ?pace, "again later");
        self.retries.failed(task, pace, Instant::now(), random);
    }

    /// Whether any of `machines` is another than it was known to be.
    async fn is_news(&mut self, machines: &BTreeSet<MachineId>) -> Result<bool, tree::Error> {
        let Some(known) = &self.known else { return Ok(true) };
        if machines.is_empty() {
            return Ok(false);
        }
        let (now, _) = read(&self.tree, machines.iter().copied()).await?;
        Ok(machines.iter().any(|id| now.get(id) != known.get(id)))
    }

    async fn read_all(&self) -> Result<(Records, i64), tree::Error> {
        self.tree.sync().await?;
        let names = self.tree.children(&paths::machines()).await?;
        read(&self.tree, names.iter().filter_map(|name| MachineId::from_key(name).ok())).await
    }
}

/// The records, and the zxid of the newest.
async fn read<T: Tree>(
    tree: &T,
    ids: impl Iterator<Item = MachineId>,
) -> Result<(Records, i64), tree::Error> {
    let ids: Vec<MachineId> = ids.collect();
    let reads = ids.iter().map(|id| Read::Data(paths::machine(*id))).collect();
    let (mut machines, mut newest) = (Records::new(), 0);
    for (id, answer) in ids.into_iter().zip(tree.read_many(reads).await?) {
        if let Some(node) = answer.into_data() {
            let record = records::Machine::parse(&paths::machine(id), &node.data);
            machines.insert(id, record.map_err(|error| error.to_string()));
            newest = newest.max(node.modified);
        }
    }
    Ok((machines, newest))
}

fn store(error: tree::Error) -> Stop {
    Stop::Store(error.into())
}

/// Maps the failure of a checkpoint.
fn refused(error: tree::Error) -> Stop {
    match error {
        // Another leader or an operator changed the tree: take the lock again and read everything
        // again.
        error if error.is_conflict() => Stop::Replaced,
        error => store(error),
    }
}

async fn due(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

mod answer;

#[cfg(test)]
#[path = "provisioner_tests.rs"]
mod tests;
