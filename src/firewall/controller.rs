//! The firewall agent: in each pass reads the tree and the provider, plans, applies and reports.
//! Cached data is dropped when it may be outdated, and each resync reads everything again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis_provider::Firewall;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::provider::MachineRules;
use portcullis_provider::rule::{Change, Family};
use tokio::time::Instant;

use super::apply::apply;
use super::capacity::Capacity;
use super::metrics::Metrics;
use super::observe::{self, View};
use super::observe_local;
use super::plan::{MachinePlan, plan_machine_within};
use super::policy::Policy;
use super::refusals::{Refusals, Request};
use super::report::Report;
use super::report_store::ReportStore;
use super::wanted::{PortRequest, Wanted, wanted};
use crate::machine::retry::{Pace, Retries};
use crate::model::MachineId;
use crate::runtime::clock;
use crate::store::acl::{Acl, Roles};
use crate::store::changes::Dirty;
use crate::store::lease::Lease;
use crate::store::rollback::{RollbackGuard, Standing};
use crate::store::tree::{self, Tree};
use confirm::Trust;

/// How long a firewall counts as full. The next full read after that sends the whole request again.
const FULL_FOR: Duration = Duration::from_secs(30);

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

/// The machines that an agent manages.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    /// Every machine that the provider has.
    Environment,
    /// The machine that the agent runs on, with that machine's rights; `by` describes its firewall.
    Machine { id: MachineId, by: String },
}

/// Reads the policy again, or returns why it cannot be used.
pub type PolicyReader = Box<dyn FnMut() -> Result<Policy, String> + Send + Sync>;

pub struct FirewallController<T, F> {
    tree: T,
    firewall: F,
    /// The last policy that was read successfully.
    policy: Policy,
    policy_reader: Option<PolicyReader>,
    /// Why the policy could not be read again. Shown in the reports of all machines.
    policy_problem: Option<String>,
    scope: Scope,
    /// `None` until the first read, and again after a failed read.
    view: Option<View>,
    /// Cached rules of each machine, updated by own changes; outdated entries are removed.
    seen: BTreeMap<MachineId, MachineRules>,
    reports: ReportStore,
    retries: Retries<Instant>,
    /// Recent refusals of the provider. A full read or the loss of the lease does not clear them.
    refusals: Refusals<Instant>,
    /// Machines whose change needs a second step, or was not sent because the lease would have
    /// expired, and since when. The next pass begins with them, the oldest first.
    postponed: BTreeMap<MachineId, Instant>,
    trust: Trust,
    /// Machines whose last open exceeded the provider's limit of rules, and when.
    full_since: BTreeMap<MachineId, Instant>,
    /// Problems of the machines themselves, from provisioning; part of the reports.
    notes: BTreeMap<MachineId, String>,
    /// Machines whose note changed since their last report.
    noted_anew: BTreeSet<MachineId>,
    /// Provisioning has sent no notes yet: the notes of the last reports remain valid.
    recalls_notes: bool,
    random: Box<dyn FnMut() -> u64 + Send + Sync>,
    metrics: Metrics,
    /// When the first change of this pass was noticed.
    since: Instant,
    /// When changes of machines that were not planned since were noticed.
    noticed: BTreeMap<MachineId, Instant>,
    /// Machines with unfinished changes, and since when.
    changing: BTreeMap<MachineId, Instant>,
    wall_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    guard: Option<std::sync::Arc<RollbackGuard>>,
    /// Whether the store is older than this agent's checkpoint, as of the last review.
    standing: Standing,
    /// The store was reviewed since the last full read.
    reviewed: bool,
}

impl<T, F> std::fmt::Debug for FirewallController<T, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FirewallController")
            .field("seen", &self.seen.len())
            .field("reports", &self.reports.len())
            .finish()
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
        (id, acl, by): (MachineId, Acl, &str),
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let scope = Scope::Machine { id, by: by.to_owned() };
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
        FirewallController {
            tree,
            firewall,
            policy,
            policy_reader: None,
            policy_problem: None,
            scope,
            view: None,
            seen: BTreeMap::new(),
            reports,
            retries: Retries::default(),
            refusals: Refusals::default(),
            postponed: BTreeMap::new(),
            trust: Trust::default(),
            full_since: BTreeMap::new(),
            notes: BTreeMap::new(),
            noted_anew: BTreeSet::new(),
            recalls_notes: false,
            random: Box::new(random),
            metrics: Metrics::default(),
            since: Instant::now(),
            noticed: BTreeMap::new(),
            changing: BTreeMap::new(),
            wall_ms: Box::new(clock::wall_ms),
            guard: None,
            standing: Standing::Good,
            reviewed: false,
        }
    }

    #[must_use]
    pub fn with_clock(mut self, wall_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.wall_ms = Box::new(wall_ms);
        self
    }

    /// Closes no port while `guard` reports a store that was restored from an older backup.
    #[must_use]
    pub fn with_guard(mut self, guard: std::sync::Arc<RollbackGuard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Drops all cached data, because another leader may have changed the rules.
    pub fn forget(&mut self) {
        if planted(Bug::RemembersItsLastReign) {
            return;
        }
        self.view = None;
        self.seen.clear();
        self.postponed.clear();
        self.reports.forget_untold();
        self.trust = Trust::default();
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

    /// When the next failed or postponed machine is due.
    pub fn next_retry(&self) -> Option<Instant> {
        if self.postponed.is_empty() {
            self.retries.next().into_iter().chain(self.refusals.next()).min()
        } else {
            Some(Instant::now())
        }
    }

    /// Keeps the notes of the last reports until provisioning sends the first [`note`](Self::note),
    /// so that a restart does not remove problems that still exist.
    pub fn recall_notes(&mut self) {
        self.notes.clear();
        self.recalls_notes = true;
    }

    /// Adds notes, or replaces all if they are the `whole`; returns machines whose note changed.
    pub fn note(&mut self, mut notes: BTreeMap<MachineId, String>, whole: bool) -> BTreeSet<MachineId> {
        if whole {
            self.recalls_notes = false;
        } else {
            self.notes.iter().for_each(|(id, note)| _ = notes.entry(*id).or_insert_with(|| note.clone()));
        }
        let ids: BTreeSet<MachineId> = notes.keys().chain(self.notes.keys()).copied().collect();
        let changed: BTreeSet<MachineId> =
            ids.into_iter().filter(|id| notes.get(id) != self.notes.get(id)).collect();
        self.notes = notes;
        self.noted_anew.extend(&changed);
        changed
    }

    /// The view of the last full read, unless it may be outdated.
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// Whether a close waits for confirmation by a second read.
    pub fn in_doubt(&self) -> bool {
        self.trust.in_doubt()
    }

    /// Runs one pass over changed, due and postponed machines.
    ///
    /// # Errors
    /// Failures of the store. The view is then dropped, and the next pass reads everything.
    pub async fn pass(&mut self, dirty: &Dirty, lead: &Lease) -> Result<Pass, crate::store::Error> {
        self.since = dirty.since().unwrap_or_else(Instant::now);
        let mut pass = Pass::default();
        let result = self.try_pass(dirty, lead, &mut pass).await;
        let requests = self.firewall.requests();
        match &result {
            Ok(()) => {
                pass.pending = self.reports.pending();
                self.metrics.passed(&pass, self.reports.len(), requests);
            }
            Err(_) => {
                if !planted(Bug::KeepsItsView) {
                    self.give_up_view();
                }
                self.metrics.failed(&pass, requests);
            }
        }
        result.map(|()| pass)
    }

    async fn try_pass(
        &mut self,
        dirty: &Dirty,
        lead: &Lease,
        pass: &mut Pass,
    ) -> Result<(), crate::store::Error> {
        let (mut machines, doubtful) = self.look(dirty).await?;
        self.find_vanished(&doubtful).await?;
        let now = Instant::now();
        machines.extend(self.retries.due(now));
        machines.extend(self.refusals.expire(now));
        let late = std::mem::take(&mut self.postponed);
        machines.extend(late.keys());
        pass.machines = machines.len();
        let more = self.round(machines, &late, lead, pass).await?;
        // A pass sends a machine at most one open and one close, so replacing a rule takes two.
        self.postponed.extend(more.into_iter().map(|machine| (machine, now)));
        Ok(())
    }

    fn give_up_view(&mut self) {
        self.trust.end(self.view.take());
    }

    /// Updates the view. Returns the affected machines, and those that may list units not in it.
    async fn look(
        &mut self,
        dirty: &Dirty,
    ) -> Result<(BTreeSet<MachineId>, BTreeSet<MachineId>), crate::store::Error> {
        let Some(view) = self.view.as_mut().filter(|view| !dirty.everything() && view.missing.is_empty())
        else {
            let begun = Instant::now();
            self.read_policy_again();
            self.tree.sync().await?;
            let view = match self.scope {
                Scope::Environment => observe::observe(&self.tree).await?,
                Scope::Machine { id, .. } => observe_local::observe(&self.tree, id).await?,
            };
            self.reports.read(&self.tree, view.machines.keys().copied()).await?;
            if std::mem::take(&mut self.recalls_notes) {
                let said = std::mem::replace(&mut self.notes, self.reports.notes());
                self.notes.extend(said);
            }
            self.seen.clear();
            let now = Instant::now();
            self.full_since.retain(|_, refused| now < *refused + FULL_FOR);
            self.reviewed = false;
            let mut machines: BTreeSet<MachineId> = view.machines.keys().copied().collect();
            let doubtful = machines.clone();
            self.retries.forget_all_but(|machine| machines.contains(&machine));
            self.refusals.forget_all_but(|machine| machines.contains(&machine));
            self.changing.retain(|machine, _| machines.contains(machine));
            self.noticed.retain(|machine, _| machines.contains(machine));
            self.give_up_view();
            self.trust.begin(&view, begun, now);
            self.view = Some(view);
            // Including machines that were removed from the tree.
            machines.extend(self.notes.keys());
            machines.append(&mut self.noted_anew);
            return Ok((machines, doubtful));
        };
        let mut machines = outcome::notice(view, dirty, &mut self.noticed);
        machines.append(&mut self.noted_anew);
        let keys = view.around(dirty.keys());
        let before = view.placed_among(&keys);
        observe::refresh(&self.tree, view, &keys).await?;
        self.trust.refreshed(Instant::now());
        machines.append(&mut outcome::notice(view, dirty, &mut self.noticed));
        let gone = before.into_iter().filter(|(unit, _)| view.units.get(*unit).is_none());
        Ok((machines, gone.map(|(_, machine)| machine).collect()))
    }

    /// Observes, plans, applies and reports for `machines`; returns those to continue with at once.
    async fn round(
        &mut self,
        machines: BTreeSet<MachineId>,
        late: &BTreeMap<MachineId, Instant>,
        lead: &Lease,
        pass: &mut Pass,
    ) -> Result<BTreeSet<MachineId>, crate::store::Error> {
        let mut reports: BTreeMap<MachineId, Report> = BTreeMap::new();
        let present = self.see(&machines, &mut reports, pass).await;
        let mut plans = BTreeMap::new();
        for machine in present {
            let Some(rules) = self.seen.get(&machine) else { continue };
            let Some(view) = &self.view else { break };
            let (wanted, plan) = self.plan(view, machine, rules);
            let mut report = self.describe(machine, &wanted, &plan);
            self.keep_granted(machine, &plan.withheld_closes, &mut report);
            reports.insert(machine, report);
            plans.insert(machine, plan);
        }
        let kept = self.hold_if_behind(&mut plans, &mut reports, lead).await?;
        let doubted = self.hold_if_in_doubt(&mut plans, &mut reports);
        let dry_run = self.firewall.is_dry_run();
        if dry_run {
            self.describe_dry_run(&plans, &mut reports);
        }
        let changes: BTreeMap<MachineId, Change> = plans
            .iter()
            .filter(|(id, plan)| {
                let drift = self.seen.get(id).is_some_and(|seen| !seen.drift.is_empty());
                let repairs = drift && !self.refusals.is_held(**id, Request::Repair);
                !dry_run && (repairs || !plan.change.is_empty())
            })
            .map(|(id, plan)| (*id, plan.change.clone()))
            .collect();
        let mut first: Vec<MachineId> = late.keys().copied().collect();
        first.sort_by_key(|machine| late.get(machine));
        let outcomes = apply(&self.firewall, &changes, &first, lead).await;
        let mut again = BTreeSet::new();
        let mut done = BTreeMap::new();
        for (machine, applied) in &outcomes {
            let (Some(change), report) = (changes.get(machine), reports.entry(*machine).or_default()) else {
                continue;
            };
            if let Some(entry) = self.entry(*machine, change, applied, report) {
                done.insert(*machine, entry);
            }
            let divided = plans.get(machine).is_some_and(|plan| plan.divided);
            self.learn(*machine, (change, divided), applied, report, pass);
            self.postpone_unsent(*machine, applied, late);
        }
        for (machine, plan) in &plans {
            let postponed = self.postponed.contains_key(machine);
            if let Some(report) =
                reports.get_mut(machine).filter(|report| postponed || report.problem.is_some())
            {
                self.keep_granted(*machine, &plan.deferred, report);
            }
            if postponed || doubted.contains(machine) {
                continue;
            }
            let failed = outcomes.get(machine).is_some_and(|applied| applied.errors().next().is_some());
            if dry_run || kept.contains(machine) {
                if !failed {
                    self.retries.succeeded(*machine);
                }
                continue;
            }
            self.time(*machine, plan);
            if !failed {
                // Replaced rules are closed only after a read shows the new ones: the provider may
                // have merged an old rule into them. Lagging reads are retried with growing pauses.
                if !plan.deferred.is_empty() && !plan.change.is_empty() {
                    self.seen.remove(machine);
                    self.try_later(*machine, Pace::ReadAgain);
                    continue;
                }
                self.retries.succeeded(*machine);
                // If nothing was sent, an immediate second pass would plan the same.
                if plan.divided && !plan.change.is_empty() {
                    again.insert(*machine);
                }
            }
        }
        let left = |view: &View, id: &MachineId| !view.machines.contains_key(id);
        if let Some(view) = &self.view {
            // The report of a removed machine only contains why its instance still exists.
            let noted = machines.iter().filter(|id| left(view, id) && self.notes.contains_key(id));
            noted.for_each(|id| _ = reports.insert(*id, Report::default()));
        }
        for (machine, report) in &mut reports {
            report.note = self.notes.get(machine).cloned();
            if let Some(note) = &report.note {
                report.problem.get_or_insert_with(|| note.clone());
            }
            self.add_policy_problem(report);
        }
        let gone = |id: &MachineId| {
            let view = self.view.as_ref().filter(|_| doubted.is_empty());
            view.is_some_and(|v| !reports.contains_key(id) && (left(v, id) || v.own.contains(id)))
        };
        let gone = machines.iter().copied().filter(gone).collect();
        if !doubted.is_empty() {
            self.give_up_view();
            again.clear();
        }
        self.reports.write(&self.tree, reports, done, &gone, lead).await?;
        Ok(again)
    }

    fn plan(&self, view: &View, machine: MachineId, rules: &MachineRules) -> (Wanted, MachinePlan) {
        let last = self.reports.granted(machine);
        let mut requests = view.requests_on(machine);
        // Units that had rules on this machine and whose machine can no longer be read.
        for unit in last.keys() {
            if let Some(reason) = view.lost(*unit) {
                requests.entry(*unit).or_insert(PortRequest::Frozen { reason });
            }
        }
        for (unit, request) in &mut requests {
            if let (Some(facts), Some(had)) = (view.units.get(*unit), last.get(unit)) {
                *request = view.request_after(*unit, facts, had);
            }
        }
        let families: &[Family] = if rules.ipv6 { &[Family::V4, Family::V6] } else { &[Family::V4] };
        let wanted = wanted(&requests, families, &self.policy);
        let capacity =
            Capacity::new(self.firewall.rules_per_family(), &rules.foreign, self.firewall.is_atomic());
        let theirs = rules.foreign.iter().filter_map(|foreign| foreign.exact).collect();
        let limits = (capacity, &self.refusals.holds(machine));
        let mut plan = plan_machine_within(&wanted, &rules.owned, &theirs, &last, &self.policy, limits);
        if self.full_since.contains_key(&machine) {
            plan.trim(&rules.owned, capacity);
        }
        (wanted, plan)
    }

    /// Creates the container of the reports if it is missing.
    ///
    /// # Errors
    /// Failures of the store.
    pub async fn prepare(&self) -> Result<(), tree::Error> {
        self.reports.prepare(&self.tree).await
    }
}

mod build_report;
mod confirm;
mod missing_units;
mod outcome;
mod policy_file;
mod read_provider;
mod rollback;

#[cfg(test)]
#[path = "controller_tests.rs"]
mod tests;
