//! The provisioning loop of the leader: reads the store's machines and the provider's inventory,
//! has `plan.rs` plan steps and `apply.rs` carry them out, and schedules retries. Decisions about
//! instances do not belong here. Its state is only a cache: the provider's tags mark our objects,
//! and the store holds the wanted machines.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use portcullis_provider::Machines;
use portcullis_provider::provider::Inventory;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::apply::{Failure, Outcome, StepRunner, Stop, confirm};
use super::plan::{
    Confirmation, MASS_TERMINATION_MIN, Missing, Plan, Records, Step, named_by_units, provision,
    without_record,
};
use super::user_data::BootConfig;
use crate::machine::provisioning::{CountFailure, PendingReads, Provisioning, ProvisioningUpdate};
use crate::machine::retry::{Pace, Retries};
use crate::model::{MachineId, UnitId};
use crate::mutant;
use crate::runtime::clock;
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::store::lease::Lease;
use crate::store::paths;
use crate::store::records;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Read, Tree};

/// Tasks that are retried after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    /// Reading the provider's inventory.
    List,
    /// Reading again while instances are pending.
    Settle,
    /// The steps of one machine; `None` for steps that concern all machines.
    Steps(Option<MachineId>),
    /// An operator's request.
    Request,
}

pub struct Provisioner<T, M> {
    tree: T,
    machines: M,
    boot: BootConfig,
    /// Returns the time of day, in milliseconds since 1970.
    wall_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The records as last read or written; `None` before the first read.
    known: Option<Records>,
    retries: Retries<Instant, Task>,
    missing: Missing<Instant>,
    confirmation: Confirmation<Instant>,
    /// Since when launches wait for the read that confirms terminations.
    launches_wait_since: Option<Instant>,
    /// The error of the last read of the inventory, if it failed.
    list_error: Option<String>,
    /// Machines whose instance no longer exists, with the reason.
    missing_problems: BTreeMap<MachineId, String>,
    /// The errors of failed steps by machine; `None` for steps that concern all machines.
    failures: BTreeMap<Option<MachineId>, String>,
    /// The last report to the firewall controller; `None` before the first one under this lease.
    last_sent: Option<(BTreeMap<MachineId, String>, bool)>,
    /// Whether the inventory was read under this lease.
    is_listed: bool,
    /// Since when the inventory is empty; only tracked while an operator's request waits for that.
    clear_since: Option<Instant>,
    random: Box<dyn FnMut() -> u64 + Send + Sync>,
    count_failure: CountFailure,
    /// Detects a store that was restored from an older backup.
    guard: Option<Arc<RollbackGuard>>,
    /// Machines that are not in the tree and are kept because the store was restored, with the
    /// reason.
    kept_after_restore: BTreeMap<MachineId, String>,
    /// Machines without a record that a unit names, with the reason to keep their instances.
    unrecorded: BTreeMap<MachineId, String>,
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
        boot: BootConfig,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            tree,
            machines,
            boot,
            wall_ms: Box::new(clock::wall_ms),
            known: None,
            retries: Retries::default(),
            missing: Missing::default(),
            confirmation: Confirmation::default(),
            launches_wait_since: None,
            list_error: None,
            missing_problems: BTreeMap::new(),
            failures: BTreeMap::new(),
            last_sent: None,
            is_listed: false,
            clear_since: None,
            random: Box::new(random),
            count_failure: Box::new(|_| {}),
            guard: None,
            kept_after_restore: BTreeMap::new(),
            unrecorded: BTreeMap::new(),
        }
    }

    #[must_use]
    pub fn with_clock(mut self, wall_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.wall_ms = Box::new(wall_ms);
        self
    }

    /// Terminates no instance while `guard` reports a restored store.
    #[must_use]
    pub fn with_guard(mut self, guard: Arc<RollbackGuard>) -> Self {
        self.guard = Some(guard);
        self
    }

    fn next_pass(&self) -> Option<Instant> {
        // Every other task needs the inventory first.
        self.retries.at(Task::List).or_else(|| {
            [self.retries.next(), self.missing.next(), self.confirmation.next()].into_iter().flatten().min()
        })
    }

    /// Reads, plans and applies once. Returns the machines that were changed at the provider.
    async fn pass(&mut self, reads: PendingReads, lease: &mut Lease) -> Result<BTreeSet<MachineId>, Stop> {
        let now = Instant::now();
        let unit_changed = reads.units && !self.unrecorded.is_empty();
        let due = reads.everything || unit_changed || self.next_pass().is_some_and(|at| at <= now);
        // While the read of the inventory backs off, a pass is useless; its retry reads everything.
        let cannot_list = self.retries.waiting(Task::List, now);
        if cannot_list || (!due && !self.has_changed(&reads.machines).await.map_err(store)?) {
            return Ok(BTreeSet::new());
        }
        confirm(&self.tree, lease).await?;
        // The inventory is read before the store. A machine is recorded before its instance is
        // launched, so a machine that was just added is never taken for a removed one.
        let listed = self.machines.list().await;
        let (mut records, newest_zxid) = self.read_all().await.map_err(store)?;
        self.known = Some(records.clone());
        match listed {
            Ok(inventory) => {
                self.list_error = None;
                self.is_listed = true;
                self.retries.succeeded(Task::List);
                self.unrecorded = self.find_unrecorded(&records, &inventory).await.map_err(store)?;
                records.extend(self.unrecorded.iter().map(|(id, why)| (*id, Err(why.clone()))));
                let changed = self.reconcile((&records, newest_zxid), &inventory, lease).await?;
                self.answer_requests(&records, &inventory, lease).await?;
                Ok(changed)
            }
            Err(error) => {
                (self.count_failure)(error.kind());
                let problem = Some(error.to_string());
                if self.list_error != problem {
                    warn!(%error, "instances not readable");
                }
                self.list_error = problem;
                self.try_later(Task::List, Pace::after(&error));
                Ok(BTreeSet::new())
            }
        }
    }

    async fn reconcile(
        &mut self,
        (records, newest_zxid): (&Records, i64),
        inventory: &Inventory,
        lease: &mut Lease,
    ) -> Result<BTreeSet<MachineId>, Stop> {
        let now = Instant::now();
        let mut plan = provision(records, inventory, |removals| self.confirmation.confirms(removals, now));
        self.hold_if_rolled_back(&mut plan, newest_zxid, lease).await?;
        // A failure of another step of the machine, for example to close its ports, does not delay
        // its termination.
        for step in plan.confirmed.iter().filter(|step| !self.confirmation.has_confirmed(step)) {
            self.retries.succeeded(Task::Steps(step.machine()));
        }
        self.record_plan(&plan, now);
        let mut steps = plan.steps;
        if let Some(until) = self.launches_wait_until(now) {
            self.postpone_launches(&mut steps, until);
        }
        steps.retain(|step| !self.retries.waiting(Task::Steps(step.machine()), now));
        let (tree, now_ms) = (&self.tree, (self.wall_ms)());
        let runner = StepRunner { tree, machines: &self.machines, boot: &self.boot, now_ms };
        let outcomes = runner.run(steps, lease).await?;
        let changed =
            outcomes.iter().filter(|(_, outcome)| outcome.acted).filter_map(|(id, _)| *id).collect();
        for (machine, outcome) in outcomes {
            self.record_outcome(machine, outcome);
        }
        Ok(changed)
    }

    /// Returns when launches may be sent, or `None` if they need not wait. They wait while
    /// terminations need confirmation, because a launch that hangs would delay the second read, but
    /// only for the time of a few reads, however many machines are terminated.
    fn launches_wait_until(&mut self, now: Instant) -> Option<Instant> {
        let Some(confirm_at) = self.confirmation.next() else {
            self.launches_wait_since = None;
            return None;
        };
        let wait_ends = *self.launches_wait_since.get_or_insert(now) + 2 * CONFIRM_AFTER;
        (now < wait_ends).then(|| wait_ends.min(confirm_at))
    }

    /// Removes launches from `steps`, and postpones their retries: a retry that is due, but not
    /// sent, would cause one pass after another.
    fn postpone_launches(&mut self, steps: &mut Vec<Step>, until: Instant) {
        for launch in steps.extract_if(.., |step| matches!(step, Step::Launch(_))) {
            if !mutant!(WaitingLaunchRetriedAtOnce) {
                self.retries.postpone(Task::Steps(launch.machine()), until);
            }
        }
    }

    /// Removes terminations from the plan if the store was restored: a machine that is missing from
    /// it may have been added after the backup.
    async fn hold_if_rolled_back(
        &mut self,
        plan: &mut Plan,
        newest_zxid: i64,
        lease: &Lease,
    ) -> Result<(), Stop> {
        self.kept_after_restore.clear();
        let Some(guard) = self.guard.as_ref().filter(|_| !plan.steps.is_empty()) else { return Ok(()) };
        let makes = plan.steps.iter().any(|step| !step.is_removal());
        let basis = if makes { Basis::UpTo(newest_zxid) } else { Basis::Known };
        let Standing::RolledBack(why) =
            guard.review(&self.tree, Some(lease.fence()), basis).await.map_err(refused)?
        else {
            return Ok(());
        };
        let why = format!("not in the store, and kept: {why}");
        let ending = plan.steps.iter().filter(|step| step.is_removal()).filter_map(Step::machine);
        self.kept_after_restore = ending.map(|machine| (machine, why.clone())).collect();
        plan.steps.retain(|step| !step.is_removal());
        plan.confirmed.clear();
        Ok(())
    }

    fn record_plan(&mut self, plan: &Plan, now: Instant) {
        self.missing_problems = self.missing.settled(&plan.missing_instances, now);
        if mutant!(MissingInstanceNotReported) {
            self.missing_problems.clear();
        }
        match plan.unconfirmed.len() {
            0 => {}
            steps @ ..MASS_TERMINATION_MIN => {
                debug!(steps, "removals need confirmation; reading again first");
            }
            steps => warn!(steps, "removals need confirmation; reading again first"),
        }
        self.confirmation.add(plan, now);
        // A machine without planned steps has no failed steps.
        let planned: BTreeSet<Option<MachineId>> = plan.steps.iter().map(|step| step.machine()).collect();
        self.failures.retain(|id, _| planned.contains(id));
        self.retries.forget_all_but(|task| !matches!(task, Task::Steps(id) if !planned.contains(&id)));
        if plan.unfinished {
            self.try_later(Task::Settle, Pace::BackOff);
        } else {
            self.retries.succeeded(Task::Settle);
        }
    }

    /// Records the outcome of a machine's steps.
    fn record_outcome(&mut self, machine: Option<MachineId>, outcome: Outcome) {
        if let (Some(known), Some(machine), Some(record)) = (&mut self.known, machine, outcome.recorded) {
            known.insert(machine, Ok(record));
        }
        let task = Task::Steps(machine);
        match outcome.failure {
            // More steps may follow, for example deleting a group after its instance. The next pass
            // plans them.
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
                (self.count_failure)(error.kind());
                let problem = error.to_string();
                if self.failures.insert(machine, problem.clone()) != Some(problem) {
                    let machine = machine.map_or_else(|| "all".to_owned(), |machine| machine.to_string());
                    warn!(machine, %error, "machine not provisioned");
                }
                self.try_later(task, Pace::after(&error));
            }
        }
    }

    async fn send_update(
        &mut self,
        changed: BTreeSet<MachineId>,
        updates: &mpsc::Sender<ProvisioningUpdate>,
    ) {
        let (problems, is_complete) = (self.problems(), self.is_listed && self.missing.next().is_none());
        let now = Some((problems.clone(), is_complete));
        if now != self.last_sent || !changed.is_empty() {
            self.last_sent = now;
            // The receiver is closed only during shutdown.
            let _ = updates.send(ProvisioningUpdate { problems, is_complete, changed }).await;
        }
    }

    /// Returns the problem of each recorded machine, and of removed machines whose objects still
    /// exist.
    fn problems(&self) -> BTreeMap<MachineId, String> {
        let known = self.known.iter().flatten().map(|(id, _)| *id).collect::<BTreeSet<_>>();
        let left = self.failures.iter().filter_map(|(id, problem)| Some(((*id)?, problem)));
        let left = left.filter(|(id, _)| !known.contains(id));
        let left = left.map(|(id, problem)| (id, format!("terminated, and not removed yet: {problem}")));
        let kept =
            self.kept_after_restore.iter().chain(&self.unrecorded).filter(|(id, _)| !known.contains(id));
        let left = left.chain(kept.map(|(id, why)| (*id, why.clone())));
        let problem = |(id, record): (&MachineId, &Result<records::Machine, String>)| {
            let has_none = matches!(record, Ok(records::Machine { instance_id: None, .. }));
            let list_error = self.list_error.as_ref().filter(|_| has_none);
            let problem = self.failures.get(&Some(*id)).or(list_error).or(self.missing_problems.get(id))?;
            Some((*id, problem.clone()))
        };
        self.known.iter().flatten().filter_map(problem).chain(left).collect()
    }

    fn try_later(&mut self, task: Task, pace: Pace) {
        let random = (self.random)();
        debug!(?task, ?pace, "retry scheduled");
        self.retries.failed(task, pace, Instant::now(), random);
    }

    /// Returns whether the record of any of `machines` differs from the known one.
    async fn has_changed(&mut self, machines: &BTreeSet<MachineId>) -> Result<bool, tree::Error> {
        let Some(known) = &self.known else { return Ok(true) };
        if machines.is_empty() {
            return Ok(false);
        }
        let (now, _) = read(&self.tree, machines.iter().copied()).await?;
        Ok(machines.iter().any(|id| now.get(id) != known.get(id)))
    }

    /// Reads the units if the record of a machine is missing.
    async fn find_unrecorded(
        &self,
        records: &Records,
        inventory: &Inventory,
    ) -> Result<BTreeMap<MachineId, String>, tree::Error> {
        let missing = without_record(records, inventory);
        if missing.is_empty() {
            return Ok(BTreeMap::new());
        }
        let names = match self.tree.children(&paths::units()).await {
            Ok(names) => names,
            Err(tree::Error::NoNode(path)) => {
                let why = format!("neither its record nor {path} is in the store: its instance is kept");
                return Ok(missing.into_iter().map(|machine| (machine, why.clone())).collect());
            }
            Err(error) => return Err(error),
        };
        let ids: Vec<UnitId> = names.iter().filter_map(|name| UnitId::from_key(name).ok()).collect();
        let reads = ids.iter().map(|id| Read::Data(paths::unit(*id))).collect();
        let answers = self.tree.read_many(reads).await?;
        let units = ids.into_iter().zip(answers).filter_map(|(id, read)| Some((id, read.into_data()?.data)));
        Ok(named_by_units(&missing, &units.collect::<Vec<_>>()))
    }

    async fn read_all(&self) -> Result<(Records, i64), tree::Error> {
        self.tree.sync().await?;
        let names = self.tree.children(&paths::machines()).await?;
        read(&self.tree, names.iter().filter_map(|name| MachineId::from_key(name).ok())).await
    }
}

impl<T: Tree, M: Machines> Provisioning for Provisioner<T, M> {
    fn count_failures(&mut self, count: CountFailure) {
        self.count_failure = count;
    }

    async fn work(
        &mut self,
        mut lease: Lease,
        pending_reads: &watch::Sender<PendingReads>,
        updates: &mpsc::Sender<ProvisioningUpdate>,
    ) -> Result<(), crate::store::Error> {
        // Another leader may have changed anything since the last lease.
        (self.known, self.confirmation) = (None, Confirmation::default());
        (self.last_sent, self.is_listed, self.clear_since) = (None, false, None);
        self.launches_wait_since = None;
        let mut changed_reads = pending_reads.subscribe();
        // The first entry requests a full read, and may have been sent before this subscription.
        if !pending_reads.borrow().is_empty() {
            changed_reads.mark_changed();
        }
        loop {
            tokio::select! {
                biased;
                // The sender is borrowed, so the channel is open.
                _ = changed_reads.changed() => {}
                () = due(self.next_pass()) => {}
            }
            let mut reads = PendingReads::default();
            pending_reads.send_if_modified(|pending| {
                reads = std::mem::take(pending);
                false
            });
            match self.pass(reads, &mut lease).await {
                Ok(changed) => self.send_update(changed, updates).await,
                Err(Stop::Replaced) => return Ok(()),
                Err(Stop::Store(error)) => return Err(error),
            }
        }
    }
}

/// Returns the records and the zxid of the newest one.
async fn read<T: Tree>(
    tree: &T,
    ids: impl Iterator<Item = MachineId>,
) -> Result<(Records, i64), tree::Error> {
    let ids: Vec<MachineId> = ids.collect();
    let reads = ids.iter().map(|id| Read::Data(paths::machine(*id))).collect();
    let (mut machines, mut newest_zxid) = (Records::new(), 0);
    for (id, answer) in ids.into_iter().zip(tree.read_many(reads).await?) {
        if let Some(node) = answer.into_data() {
            let record = records::Machine::parse(&paths::machine(id), &node.data);
            machines.insert(id, record.map_err(|error| error.to_string()));
            newest_zxid = newest_zxid.max(node.modified);
        }
    }
    Ok((machines, newest_zxid))
}

fn store(error: tree::Error) -> Stop {
    Stop::Store(error.into())
}

/// Maps the failure of a checkpoint.
fn refused(error: tree::Error) -> Stop {
    match error {
        // Another leader or an operator changed the store: acquire the lease and read everything
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

mod requests;

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
