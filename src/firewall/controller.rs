//! The firewall controller: in each pass reads the tree and the provider, plans, applies and
//! reports. `plan` and `wanted` decide about rules, `outcome` about retries. Cached data is dropped
//! when it may be outdated, and each resync reads everything again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::mutant;
use portcullis_provider::Firewall;
use portcullis_provider::provider::MachineRules;
use portcullis_provider::rule::{Change, Family};
use tokio::time::Instant;
use tracing::{info, warn};

use super::apply::{Outcomes, apply};
use super::capacity::Capacity;
use super::change_log::Entry;
use super::metrics::Metrics;
use super::observe::{self, View};
use super::observe_local;
use super::plan::{MachinePlan, plan_machine_within};
use super::policy::Policy;
use super::refusals::{LimitsAfterRefusal, Request};
use super::report::Report;
use super::report_store::ReportStore;
use super::wanted::{PortRequest, Wanted, wanted};
use crate::model::MachineId;
use crate::runtime::clock;
use crate::store::acl::{Acl, Roles};
use crate::store::changes::Dirty;
use crate::store::lease::Lease;
use crate::store::rollback::RollbackGuard;
use crate::store::tree::{self, Tree};
use confirm::Confirmation;
use outcome::{Attempt, CloseHold, settle};
use policy_file::PolicyFile;
use rollback::RollbackCheck;
use state::MachineStates;

mod build_report;
mod confirm;
mod missing_units;
mod outcome;
mod policy_file;
mod read_provider;
mod rollback;
mod state;

pub use policy_file::PolicyReader;

/// The result of one pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pass {
    pub machines: usize,
    pub opened: usize,
    pub closed: usize,
    /// By kind of error: one per failed read, and one per machine and half of its change.
    pub failures: BTreeMap<&'static str, usize>,
    /// Machines whose reports have pending rules or a problem.
    pub pending: usize,
}

/// The machines that a controller manages.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    /// Every machine that the provider has.
    Environment,
    /// The machine that the process runs on, with that machine's rights; `by` describes its
    /// firewall.
    Machine { id: MachineId, firewall_kind: String },
}

/// The plans of a pass, and the reports about them.
#[derive(Debug, Default)]
struct Planned {
    plans: BTreeMap<MachineId, MachinePlan>,
    /// Also contains machines whose rules cannot be read or changed.
    reports: BTreeMap<MachineId, Report>,
}

pub struct FirewallController<T, F> {
    tree: T,
    firewall: F,
    policy: PolicyFile,
    scope: Scope,
    /// `None` until the first read, and again after a failed read.
    view: Option<View>,
    machines: MachineStates<Instant>,
    reports: ReportStore,
    confirmation: Confirmation,
    /// Provisioning has sent no notes yet: the notes of the last reports remain valid.
    recalls_notes: bool,
    random: Box<dyn FnMut() -> u64 + Send + Sync>,
    metrics: Metrics,
    /// When the first change of this pass was noticed.
    pass_since: Instant,
    wall_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    rollback: RollbackCheck,
}

impl<T, F> std::fmt::Debug for FirewallController<T, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FirewallController").field("reports", &self.reports.len()).finish_non_exhaustive()
    }
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    pub fn new(
        tree: T,
        firewall: F,
        policy: Policy,
        roles: Roles,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self::with(tree, firewall, policy, Scope::Environment, ReportStore::new(roles), random)
    }

    /// Manages one machine only: `acl` is for its report, and `by` describes its firewall.
    pub fn for_machine(
        tree: T,
        firewall: F,
        policy: Policy,
        (id, acl, firewall_kind): (MachineId, Acl, &str),
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let scope = Scope::Machine { id, firewall_kind: firewall_kind.to_owned() };
        Self::with(tree, firewall, policy, scope, ReportStore::for_machine(acl), random)
    }

    fn with(
        tree: T,
        firewall: F,
        policy: Policy,
        scope: Scope,
        reports: ReportStore,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            tree,
            firewall,
            policy: PolicyFile::new(policy),
            scope,
            view: None,
            machines: MachineStates::default(),
            reports,
            confirmation: Confirmation::default(),
            recalls_notes: false,
            random: Box::new(random),
            metrics: Metrics::default(),
            pass_since: Instant::now(),
            wall_ms: Box::new(clock::wall_ms),
            rollback: RollbackCheck::default(),
        }
    }

    #[must_use]
    pub fn with_clock(mut self, wall_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.wall_ms = Box::new(wall_ms);
        self
    }

    /// Closes no port while `guard` reports a store that was restored from an older backup.
    #[must_use]
    pub fn with_guard(mut self, guard: Arc<RollbackGuard>) -> Self {
        self.rollback = RollbackCheck::new(guard);
        self
    }

    /// Sets a policy that is read again at every full comparison.
    #[must_use]
    pub fn with_policy_reader(mut self, reader: Option<PolicyReader>) -> Self {
        self.policy.set_reader(reader);
        self
    }

    /// Uses counters that are shared with other parts of the process.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }

    /// Drops all cached data, because another leader may have changed the rules.
    pub fn drop_caches(&mut self) {
        if mutant!(CachesKeptAcrossLeases) {
            return;
        }
        self.view = None;
        self.machines.end_lease();
        self.reports.drop_unwritten();
        self.confirmation = Confirmation::default();
    }

    /// When the next failed or postponed machine is due.
    pub fn next_retry(&self) -> Option<Instant> {
        self.machines.next_due(Instant::now())
    }

    /// Keeps the notes of the last reports until provisioning sends the first notes, so that a
    /// restart does not remove problems that still exist.
    pub fn recall_notes(&mut self) {
        self.machines.clear_notes();
        self.recalls_notes = true;
    }

    /// Adds notes of provisioning, or replaces all if `is_complete`. Returns the machines
    /// whose note changed.
    pub fn set_notes(
        &mut self,
        notes: &BTreeMap<MachineId, String>,
        is_complete: bool,
    ) -> BTreeSet<MachineId> {
        self.recalls_notes &= !is_complete;
        self.machines.set_notes(notes, is_complete)
    }

    /// The view of the last full read, unless it may be outdated.
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// Whether a close waits for confirmation by a second read.
    pub fn awaits_confirmation(&self) -> bool {
        self.confirmation.is_awaited()
    }

    /// Creates the container of the reports if it is missing.
    ///
    /// # Errors
    /// Failures of the store.
    pub async fn prepare(&self) -> Result<(), tree::Error> {
        self.reports.prepare(&self.tree).await
    }

    /// Runs one pass over changed, due and postponed machines.
    ///
    /// # Errors
    /// Failures of the store. The view is then dropped, and the next pass reads everything.
    pub async fn pass(&mut self, dirty: &Dirty, lease: &Lease) -> Result<Pass, crate::store::Error> {
        self.pass_since = dirty.since().unwrap_or_else(Instant::now);
        let mut pass = Pass::default();
        let result = self.try_pass(dirty, lease, &mut pass).await;
        let requests = self.firewall.requests();
        match &result {
            Ok(()) => {
                pass.pending = self.reports.pending();
                self.metrics.passed(&pass, self.reports.len(), requests);
            }
            Err(_) => {
                if !mutant!(ViewKeptAfterStoreFailure) {
                    self.drop_view();
                }
                self.metrics.failed(&pass, requests);
            }
        }
        result.map(|()| pass)
    }

    async fn try_pass(
        &mut self,
        dirty: &Dirty,
        lease: &Lease,
        pass: &mut Pass,
    ) -> Result<(), crate::store::Error> {
        let is_current = self.view.as_ref().is_some_and(|view| view.missing_containers.is_empty());
        let (mut machines, may_miss_units) = if is_current && !dirty.everything() {
            self.read_changes(dirty).await?
        } else {
            self.read_everything().await?
        };
        self.find_missing_units(&may_miss_units).await?;
        let now = Instant::now();
        machines.extend(self.machines.take_due(now));
        let postponed = self.machines.take_postponed();
        machines.extend(postponed.keys());
        pass.machines = machines.len();
        let continued = self.reconcile(&machines, &postponed, lease, pass).await?;
        // A pass sends a machine at most one open and one close, so replacing a rule takes two.
        continued.into_iter().for_each(|machine| self.machines.entry(machine).postponed_since = Some(now));
        Ok(())
    }

    fn drop_view(&mut self) {
        let all_read = !self.machines.any_unread();
        self.confirmation.end_view(self.view.take(), all_read);
    }

    /// Makes a new view. Returns all machines, and those that may list units not in the view.
    async fn read_everything(
        &mut self,
    ) -> Result<(BTreeSet<MachineId>, BTreeSet<MachineId>), crate::store::Error> {
        let begun = Instant::now();
        self.policy.reread();
        self.tree.sync().await?;
        let view = match self.scope {
            Scope::Environment => observe::observe(&self.tree).await?,
            Scope::Machine { id, .. } => observe_local::observe(&self.tree, id).await?,
        };
        self.reports.read(&self.tree, view.machines.keys().copied()).await?;
        if std::mem::take(&mut self.recalls_notes) {
            self.machines.add_missing_notes(self.reports.notes());
        }
        self.drop_view();
        let now = Instant::now();
        let machines: BTreeSet<MachineId> = view.machines.keys().copied().collect();
        self.machines.start_view(&machines, now);
        self.rollback.must_review();
        self.confirmation.start_view(begun, now);
        self.view = Some(view);
        // Including machines that were removed from the tree.
        let noted = &self.machines.noted() | &self.machines.take_changed_notes();
        Ok((&machines | &noted, machines))
    }

    /// Updates the view. Returns the affected machines, and those that may list units not in it.
    async fn read_changes(
        &mut self,
        dirty: &Dirty,
    ) -> Result<(BTreeSet<MachineId>, BTreeSet<MachineId>), crate::store::Error> {
        let mut machines = self.notice_changes(dirty);
        machines.append(&mut self.machines.take_changed_notes());
        let Some(view) = &mut self.view else { return Ok((machines, BTreeSet::new())) };
        let keys = view.keys_to_reread(dirty.keys());
        let before = view.machines_of(&keys);
        observe::refresh(&self.tree, view, &keys).await?;
        let gone = before.into_iter().filter(|(unit, _)| view.units.get(*unit).is_none());
        let may_miss_units = gone.map(|(_, machine)| machine).collect();
        self.confirmation.view_updated(Instant::now());
        machines.append(&mut self.notice_changes(dirty));
        Ok((machines, may_miss_units))
    }

    /// Returns the machines that changes affect, and records when each was first affected.
    fn notice_changes(&mut self, dirty: &Dirty) -> BTreeSet<MachineId> {
        let mut machines = BTreeSet::new();
        let Some(view) = &self.view else { return machines };
        for (key, at) in dirty.noticed() {
            let affected = view.affected_machines(std::iter::once(key));
            affected.iter().for_each(|machine| self.machines.entry(*machine).notice(at));
            machines.extend(affected);
        }
        machines
    }

    /// Observes, plans, applies and reports for `machines`; returns those to continue with at once.
    async fn reconcile(
        &mut self,
        machines: &BTreeSet<MachineId>,
        postponed: &BTreeMap<MachineId, Instant>,
        lease: &Lease,
        pass: &mut Pass,
    ) -> Result<BTreeSet<MachineId>, crate::store::Error> {
        let mut planned = Planned::default();
        let readable = self.read_rules(machines, &mut planned.reports, pass).await;
        self.plan_machines(readable, &mut planned);
        let mut kept_open = self.hold_if_rolled_back(&mut planned, lease).await?;
        let unconfirmed = self.hold_unconfirmed(&mut planned);
        if self.firewall.is_dry_run() {
            self.describe_dry_run(&mut planned);
            kept_open = planned.plans.keys().copied().collect();
        }
        let changes = self.changes_to_send(&planned.plans);
        let mut first: Vec<MachineId> = postponed.keys().copied().collect();
        first.sort_by_key(|machine| postponed.get(machine));
        let outcomes = apply(&self.firewall, &changes, &first, lease).await;
        let hold = |machine: MachineId| match () {
            () if unconfirmed.contains(&machine) => CloseHold::Unconfirmed,
            () if kept_open.contains(&machine) => CloseHold::KeptOpen,
            () => CloseHold::None,
        };
        let (entries, mut continued) = self.settle_all(&mut planned, &outcomes, hold, postponed, pass);
        let mut reports = planned.reports;
        self.complete_reports(machines, &mut reports);
        let mut gone = self.without_report(machines, &reports);
        if !unconfirmed.is_empty() {
            self.drop_view();
            gone.clear();
            continued.clear();
        }
        self.reports.write(&self.tree, reports, entries, &gone, lease).await?;
        Ok(continued)
    }

    fn plan_machines(&self, readable: BTreeSet<MachineId>, planned: &mut Planned) {
        let Some(view) = &self.view else { return };
        for machine in readable {
            let Some(rules) = self.machines.rules(machine) else { continue };
            let (wanted, plan) = self.plan(view, machine, rules);
            let mut report = self.describe(machine, &wanted, &plan);
            self.copy_last_rules(machine, &plan.withheld_closes, &mut report);
            planned.reports.insert(machine, report);
            planned.plans.insert(machine, plan);
        }
    }

    fn plan(&self, view: &View, machine: MachineId, rules: &MachineRules) -> (Wanted, MachinePlan) {
        let last = self.reports.granted(machine);
        let mut requests = view.requests_on(machine);
        // Units that had rules on this machine and whose machine can no longer be read.
        for unit in last.keys() {
            if let Some(reason) = view.why_machine_unknown(*unit) {
                requests.entry(*unit).or_insert(PortRequest::Frozen { reason });
            }
        }
        for (unit, request) in &mut requests {
            if let (Some(facts), Some(had)) = (view.units.get(*unit), last.get(unit)) {
                *request = view.request_after(*unit, facts, had);
            }
        }
        let families: &[Family] = if rules.ipv6 { &[Family::V4, Family::V6] } else { &[Family::V4] };
        let policy = self.policy.current();
        let wanted = wanted(&requests, families, policy);
        let capacity =
            Capacity::new(self.firewall.rules_per_family(), &rules.foreign, self.firewall.is_atomic());
        let foreign = rules.foreign.iter().filter_map(|foreign| foreign.exact).collect();
        let state = self.machines.get(machine);
        let after_refusal = state.map_or_else(LimitsAfterRefusal::default, |state| state.refusals.limits());
        let limits = (capacity, &after_refusal);
        let mut plan = plan_machine_within(&wanted, &rules.owned, &foreign, &last, policy, limits);
        if state.is_some_and(|state| state.full_since.is_some()) {
            plan.trim(&rules.owned, capacity);
        }
        (wanted, plan)
    }

    /// The changes of machines that need one, including repairs without rules.
    fn changes_to_send(&self, plans: &BTreeMap<MachineId, MachinePlan>) -> BTreeMap<MachineId, Change> {
        if self.firewall.is_dry_run() {
            return BTreeMap::new();
        }
        let needs_repair = |machine: MachineId| {
            let state = self.machines.get(machine);
            let drifted =
                state.and_then(|state| state.rules.as_ref()).is_some_and(|rules| !rules.drift.is_empty());
            drifted && state.is_some_and(|state| state.refusals.denial(Request::Repair).is_none())
        };
        let needed = plans.iter().filter(|(id, plan)| !plan.change.is_empty() || needs_repair(**id));
        needed.map(|(id, plan)| (*id, plan.change.clone())).collect()
    }

    /// Settles the plans of all machines. Returns the entries of their change logs, and the
    /// machines to continue with at once.
    fn settle_all(
        &mut self,
        planned: &mut Planned,
        outcomes: &Outcomes,
        hold: impl Fn(MachineId) -> CloseHold,
        postponed: &BTreeMap<MachineId, Instant>,
        pass: &mut Pass,
    ) -> (BTreeMap<MachineId, Entry>, BTreeSet<MachineId>) {
        let (mut entries, mut continued) = (BTreeMap::new(), BTreeSet::new());
        let now = Instant::now();
        for (&machine, plan) in &planned.plans {
            let (applied, report) = (outcomes.get(&machine), planned.reports.entry(machine).or_default());
            if let Some(applied) = applied {
                entries
                    .extend(self.entry(machine, &plan.change, applied, report).map(|entry| (machine, entry)));
            }
            let attempt = Attempt {
                plan,
                applied,
                hold: hold(machine),
                is_atomic: self.firewall.is_atomic(),
                last_problem: self.reports.get(machine).and_then(|report| report.problem.as_deref()),
                postponed_since: postponed.get(&machine).copied(),
                pass_since: self.pass_since,
            };
            let settled = settle(self.machines.entry(machine), report, &attempt, now, &mut *self.random);
            self.copy_last_rules(machine, &settled.still_open, report);
            pass.opened += settled.opened;
            pass.closed += settled.closed;
            settled.failures.iter().for_each(|kind| *pass.failures.entry(kind).or_default() += 1);
            if let Some((opened, closed)) = settled.logged_change {
                info!(%machine, opened, closed, "firewall changed");
            }
            if let Some(problem) = settled.new_problem {
                warn!(%machine, problem, "firewall not changed");
            }
            if let Some(since) = settled.completed_since {
                self.metrics.changed(since.elapsed());
            }
            if settled.continues {
                continued.insert(machine);
            }
        }
        (entries, continued)
    }
}

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
