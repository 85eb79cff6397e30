//! The firewall agent: looks at the tree and at the provider, plans, applies, and writes down what came of it. One pass
//! at a time. It remembers what it has seen only to spare calls; every memory is dropped when it could be wrong, and
//! everything is looked at again at the pace of the resync.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis_provider::Firewall;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::provider::MachineRules;
use portcullis_provider::rule::{Change, Family};
use tokio::time::Instant;

use super::apply::apply;
use super::metrics::Metrics;
use super::observe::{self, View};
use super::own;
use super::plan::{MachinePlan, plan_machine_within};
use super::policy::Policy;
use super::refusals::Refusals;
use super::report::Report;
use super::reports::Reports;
use super::retry::Retries;
use super::room::Room;
use super::wanted::{Claim, Wanted, wanted};
use crate::model::MachineId;
use crate::runtime::clock;
use crate::store::acl::{Acl, Roles};
use crate::store::changes::Dirty;
use crate::store::election::Leadership;
use crate::store::rollback::{RollbackGuard, Standing};
use crate::store::tree::{self, Tree};
use doubt::Trust;

/// How long it is taken for granted that a machine's firewall is full. After that the next look at everything tries it.
const CROWDED: Duration = Duration::from_secs(30);

/// How a pass went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pass {
    pub machines: usize,
    pub opened: usize,
    pub closed: usize,
    /// By kind of error, one per look, and one per machine and half of its change.
    pub failures: BTreeMap<&'static str, usize>,
    /// Machines that are not yet as they should be.
    pub pending: usize,
}

/// Whose firewall an agent looks after.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    /// That of every machine that the provider has.
    Environment,
    /// That of the machine it runs on, with that machine's rights. The words say what it is made of.
    Machine { id: MachineId, by: String },
}

/// Reads the policy again, or says why it cannot be used.
pub type PolicyReader = Box<dyn FnMut() -> Result<Policy, String> + Send + Sync>;

pub struct Agent<T, F> {
    tree: T,
    firewall: F,
    /// The last policy that could be read.
    policy: Policy,
    policy_reader: Option<PolicyReader>,
    /// Why the policy could not be read again. Shown in the reports of all machines.
    policy_problem: Option<String>,
    scope: Scope,
    /// `None` until the first look, and again after a look that failed.
    view: Option<View>,
    /// What the provider was last seen to have, with our own changes since. A machine is in it only if nothing has
    /// happened that could make it wrong.
    seen: BTreeMap<MachineId, MachineRules>,
    reports: Reports,
    retries: Retries<Instant>,
    /// Recent refusals of the provider. They are kept when everything is read again, and when the lease is lost.
    refusals: Refusals<Instant>,
    /// Machines whose change, or a half of it, was not begun because the lease would not have lasted, or that have a second
    /// step before them, and since when that is so: the first in the next pass, those that wait longest before all others.
    put_off: BTreeMap<MachineId, Instant>,
    trust: Trust,
    /// Machines whose last open was refused for want of room, and when.
    crowded: BTreeMap<MachineId, Instant>,
    /// What is wrong with machines themselves, as provisioning says: shown in their reports.
    notes: BTreeMap<MachineId, String>,
    /// Machines of which something else was noted since they were last told of.
    noted_anew: BTreeSet<MachineId>,
    /// Provisioning has not spoken yet: what was noted last is in the reports.
    recalls_notes: bool,
    random: Box<dyn FnMut() -> u64 + Send + Sync>,
    metrics: Metrics,
    /// When the first of what the pass is about was noticed.
    since: Instant,
    /// When changes were noticed of machines that nothing was planned for since.
    noticed: BTreeMap<MachineId, Instant>,
    /// Since when there is something to change on machines.
    changing: BTreeMap<MachineId, Instant>,
    /// The time of day, for the journal.
    wall_ms: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Detects a store that was restored from an older backup.
    guard: Option<std::sync::Arc<RollbackGuard>>,
    /// Whether the store is older than this agent's checkpoint, as of the last review.
    standing: Standing,
    /// The store was reviewed since everything was last read.
    reviewed: bool,
}

impl<T, F> std::fmt::Debug for Agent<T, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("seen", &self.seen.len()).field("reports", &self.reports.len()).finish()
    }
}

impl<T: Tree, F: Firewall> Agent<T, F> {
    pub fn new(
        tree: T,
        firewall: F,
        policy: Policy,
        roles: Roles,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self::with(tree, firewall, policy, Scope::Environment, Reports::new(roles), random)
    }

    /// For one machine that looks after itself: `acl` is for its report, `by` says what its firewall is made of.
    pub fn of_machine(
        tree: T,
        firewall: F,
        policy: Policy,
        (id, acl, by): (MachineId, Acl, &str),
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        let scope = Scope::Machine { id, by: by.to_owned() };
        Self::with(tree, firewall, policy, scope, Reports::of_machine(acl), random)
    }

    fn with(
        tree: T,
        firewall: F,
        policy: Policy,
        scope: Scope,
        reports: Reports,
        random: impl FnMut() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Agent {
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
            put_off: BTreeMap::new(),
            trust: Trust::default(),
            crowded: BTreeMap::new(),
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

    /// With another time of day than the system's.
    #[must_use]
    pub fn with_clock(mut self, wall_ms: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.wall_ms = Box::new(wall_ms);
        self
    }

    /// Closes no port while `guard` reports a restored store.
    #[must_use]
    pub fn with_guard(mut self, guard: std::sync::Arc<RollbackGuard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Forgets everything that was seen: what happened while another led is not known.
    pub fn forget(&mut self) {
        if planted(Bug::RemembersItsLastReign) {
            return;
        }
        self.view = None;
        self.seen.clear();
        self.put_off.clear();
        self.reports.forget_untold();
        self.trust = Trust::default();
    }

    /// Counting where others count, too.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// What it has done so far, to be looked at while it goes on.
    pub fn metrics(&self) -> Metrics {
        self.metrics.clone()
    }

    /// When a machine that failed is due again, or one that there was no time for.
    pub fn next_retry(&self) -> Option<Instant> {
        if self.put_off.is_empty() {
            self.retries.next().into_iter().chain(self.refusals.next()).min()
        } else {
            Some(Instant::now())
        }
    }

    /// Somebody provisions, and will [`note`](Self::note) what is wrong. Until then what was noted last holds, or a restart
    /// would take back what it is about to say again.
    pub fn recall_notes(&mut self) {
        self.notes.clear();
        self.recalls_notes = true;
    }

    /// Takes in what is wrong with machines, in place of what was said before if it is the `whole` of it; returns those
    /// that are to be told anew.
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

    /// The last whole look at the tree, unless it can no longer be trusted.
    pub fn view(&self) -> Option<&View> {
        self.view.as_ref()
    }

    /// Whether a close waits for a second look.
    pub fn in_doubt(&self) -> bool {
        self.trust.in_doubt()
    }

    /// One pass over what is dirty, what is due again, and what those passes leave to do.
    ///
    /// # Errors
    /// The failures of the store. What was seen of the tree is then forgotten, and the next pass looks at all of it.
    pub async fn pass(&mut self, dirty: &Dirty, lead: &Leadership) -> Result<Pass, crate::store::Error> {
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
        lead: &Leadership,
        pass: &mut Pass,
    ) -> Result<(), crate::store::Error> {
        let (mut machines, doubtful) = self.look(dirty).await?;
        self.find_vanished(&doubtful).await?;
        let now = Instant::now();
        machines.extend(self.retries.due(now));
        machines.extend(self.refusals.expire(now));
        let late = std::mem::take(&mut self.put_off);
        machines.extend(late.keys());
        pass.machines = machines.len();
        let more = self.round(machines, &late, lead, pass).await?;
        // A rule that is spelled anew takes two passes: the new one is open, and the next pass closes the old. A pass sends
        // no machine more than one request to open and one to close.
        self.put_off.extend(more.into_iter().map(|machine| (machine, now)));
        Ok(())
    }

    fn give_up_view(&mut self) {
        self.trust.end(self.view.take());
    }

    /// Updates the view. Returns the machines that this may affect, and those whose list of units
    /// may contain a unit that is not in the view.
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
                Scope::Machine { id, .. } => own::observe(&self.tree, id).await?,
            };
            self.reports.read(&self.tree, view.machines.keys().copied()).await?;
            if std::mem::take(&mut self.recalls_notes) {
                let said = std::mem::replace(&mut self.notes, self.reports.notes());
                self.notes.extend(said);
            }
            self.seen.clear();
            let now = Instant::now();
            self.crowded.retain(|_, refused| now < *refused + CROWDED);
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
            // Also those that have left.
            machines.extend(self.notes.keys());
            machines.append(&mut self.noted_anew);
            return Ok((machines, doubtful));
        };
        let mut machines = learn::notice(view, dirty, &mut self.noticed);
        machines.append(&mut self.noted_anew);
        let keys = view.around(dirty.keys());
        let before = view.placed_among(&keys);
        observe::refresh(&self.tree, view, &keys).await?;
        self.trust.refreshed(Instant::now());
        machines.append(&mut learn::notice(view, dirty, &mut self.noticed));
        let gone = before.into_iter().filter(|(unit, _)| view.units.get(*unit).is_none());
        Ok((machines, gone.map(|(_, machine)| machine).collect()))
    }

    /// Observe, plan, apply and report for `machines`; returns those that have more to do at once.
    async fn round(
        &mut self,
        machines: BTreeSet<MachineId>,
        late: &BTreeMap<MachineId, Instant>,
        lead: &Leadership,
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
                let amiss = self.seen.get(id).is_some_and(|seen| !seen.amiss.is_empty());
                !dry_run && (amiss || !plan.change.is_empty())
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
            self.put_off_if_late(*machine, applied, late);
        }
        for (machine, plan) in &plans {
            let put_off = self.put_off.contains_key(machine);
            if let Some(report) =
                reports.get_mut(machine).filter(|report| put_off || report.problem.is_some())
            {
                self.keep_granted(*machine, &plan.deferred, report);
            }
            if put_off || doubted.contains(machine) || kept.contains(machine) {
                continue;
            }
            if dry_run {
                self.retries.succeeded(*machine);
                continue;
            }
            self.time(*machine, plan);
            if outcomes.get(machine).is_none_or(|applied| applied.errors().next().is_none()) {
                self.retries.succeeded(*machine);
                // A close that waits for an open which was not sent waits for the next look at everything.
                let opened = !plan.deferred.is_empty() && !plan.change.is_empty();
                if opened || plan.divided {
                    again.insert(*machine);
                }
            }
        }
        let left = |view: &View, id: &MachineId| !view.machines.contains_key(id);
        if let Some(view) = &self.view {
            // All that is known of who has left is why it is not gone.
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
        let mut claims = view.claims_on(machine);
        // Units that were here and whose place can no longer be read.
        for unit in last.keys() {
            if let Some(reason) = view.lost(*unit) {
                claims.entry(*unit).or_insert(Claim::Frozen { reason });
            }
        }
        for (unit, claim) in &mut claims {
            if let (Some(facts), Some(had)) = (view.units.get(*unit), last.get(unit)) {
                *claim = view.claim_after(*unit, facts, had);
            }
        }
        let families: &[Family] = if rules.ipv6 { &[Family::V4, Family::V6] } else { &[Family::V4] };
        let wanted = wanted(&claims, families, &self.policy);
        let room = Room::new(self.firewall.rules_per_family(), &rules.foreign, self.firewall.at_once());
        let theirs = rules.foreign.iter().filter_map(|foreign| foreign.exact).collect();
        let limits = (room, &self.refusals.holds(machine));
        let mut plan = plan_machine_within(&wanted, &rules.owned, &theirs, &last, &self.policy, limits);
        if self.crowded.contains_key(&machine) {
            plan.trim(&rules.owned, room);
        }
        (wanted, plan)
    }

    /// The container of the reports, made once.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn prepare(&self) -> Result<(), tree::Error> {
        self.reports.prepare(&self.tree).await
    }
}

mod behind;
mod doubt;
mod learn;
mod read_policy;
mod see;
mod tell;
mod vanished;

#[cfg(test)]
#[path = "agent_tests.rs"]
mod tests;
