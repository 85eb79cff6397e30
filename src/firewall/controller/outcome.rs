//! Processes the results of the agent's changes: updates the cached rules of a machine, schedules
//! its next attempt, and completes its report.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::{Change, Rule};
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{FirewallController, Pass};
use crate::firewall::observe::View;
use crate::firewall::plan::MachinePlan;
use crate::firewall::refusals::Request;
use crate::firewall::report::Report;
use crate::machine::retry::Pace;
use crate::model::MachineId;
use crate::store::changes::Dirty;
use crate::store::tree::Tree;

/// Each half of a change with its result.
fn halves<'a>(
    change: &'a Change,
    applied: &'a Applied,
) -> [(Request, &'a BTreeSet<Rule>, &'a Result<(), Error>); 2] {
    [(Request::Open, &change.open, &applied.opened), (Request::Close, &change.close, &applied.closed)]
}

fn slowest(applied: &Applied) -> Pace {
    applied.errors().map(Pace::after).max().unwrap_or(Pace::ReadAgain)
}

/// Returns the affected machines, and records when each was first affected.
pub(super) fn notice(
    view: &View,
    dirty: &Dirty,
    noticed: &mut BTreeMap<MachineId, Instant>,
) -> BTreeSet<MachineId> {
    let mut machines = BTreeSet::new();
    for (key, at) in dirty.noticed() {
        let concerned = view.concerned(std::iter::once(key));
        for machine in &concerned {
            let first = noticed.entry(*machine).or_insert(at);
            *first = at.min(*first);
        }
        machines.extend(concerned);
    }
    machines
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Processes the result of a machine's change.
    pub(super) fn learn(
        &mut self,
        machine: MachineId,
        (change, divided): (&Change, bool),
        applied: &Applied,
        report: &mut Report,
        pass: &mut Pass,
    ) {
        for (request, rules, result) in halves(change, applied) {
            if result.is_ok() && !rules.is_empty() {
                self.refusals.accepted(machine, request, divided);
            }
        }
        if applied.is_ok() {
            self.refusals.accepted(machine, Request::Repair, false);
        }
        if applied.opened.is_ok() {
            pass.opened += change.open.len();
            report.pending.retain(|rule| !change.open.contains(rule));
        }
        if applied.closed.is_ok() {
            pass.closed += change.close.len();
        } else {
            self.keep_granted(machine, &change.close, report);
        }
        if applied.errors().next().is_none() {
            let done = applied.begun_of(change);
            if !done.is_empty() || applied.is_ok() {
                info!(%machine, opened = done.open.len(), closed = done.close.len(), "firewall changed");
            }
            if let Some(rules) = self.seen.get_mut(&machine).filter(|_| !planted(Bug::ForgetsItsOwnChange)) {
                rules.owned = done.applied_to(&rules.owned);
                if applied.is_ok() {
                    rules.drift.clear();
                }
            }
            return;
        }
        // The rules of the machine are unknown now: they are read again before the next plan.
        if !planted(Bug::KeepsWhatItSaw) {
            self.seen.remove(&machine);
        }
        let full = matches!(applied.opened, Err(Error::QuotaExceeded { .. }))
            && self.full_since.insert(machine, Instant::now()).is_none();
        let told = self.reports.get(machine).and_then(|report| report.problem.clone());
        let mut problems = Vec::new();
        for error in applied.errors() {
            *pass.failures.entry(error.kind()).or_default() += 1;
            problems.push(error.to_string());
        }
        let problem = problems.join("; ");
        // A repeated problem is not logged again: the report shows it for as long as it lasts.
        if told.as_ref() != Some(&problem) {
            warn!(%machine, problem, "firewall not changed");
        }
        report.problem = Some(problem);
        self.try_again(machine, change, applied, full);
    }

    /// Decides when the machine is due again. A request that `refusals` holds back is due when its
    /// hold ends.
    fn try_again(&mut self, machine: MachineId, change: &Change, applied: &Applied, full: bool) {
        let mut pace = None;
        let mut at_once = false;
        if change.is_empty()
            && let Some(error) = applied.errors().next()
        {
            let (now, random) = (Instant::now(), (self.random)());
            if self.refusals.denied(machine, Request::Repair, error, now, random) {
                return self.retries.succeeded(machine);
            }
        }
        for (request, rules, result) in halves(change, applied) {
            let Err(error) = result else { continue };
            if rules.is_empty() || matches!(error, Error::NotBegun { .. }) {
                continue;
            }
            let (now, random) = (Instant::now(), (self.random)());
            // The first time that a machine is full, the next request contains only the rules that
            // fit.
            let divisible = !(self.firewall.is_atomic() || full && request == Request::Open);
            if divisible && self.refusals.divided((machine, request), rules, error, now, random) {
                at_once = true;
            } else if full && request == Request::Open && applied.closed.is_ok() {
                pace = pace.max(Some(Pace::ReadAgain));
            } else if !self.refusals.denied(machine, request, error, now, random) {
                pace = pace.max(Some(Pace::after(error)));
            }
        }
        match pace {
            Some(pace) => self.try_later(machine, pace),
            None if at_once => drop(self.postponed.insert(machine, Instant::now())),
            None if change.is_empty() => self.try_later(machine, slowest(applied)),
            None => self.retries.succeeded(machine),
        }
    }

    /// Postpones the rest of a change if the lease ended during the pass: the next pass begins with
    /// it, under a renewed lease. After a failure, the retry includes the requests that were not
    /// sent.
    pub(super) fn postpone_unsent(
        &mut self,
        machine: MachineId,
        applied: &Applied,
        late: &BTreeMap<MachineId, Instant>,
    ) {
        if applied.is_cut_short() && applied.errors().next().is_none() && !planted(Bug::CallsItDone) {
            let since = late.get(&machine).copied().unwrap_or_else(Instant::now);
            self.postponed.insert(machine, since);
        }
    }

    /// Measures the time from noticing a change until it is complete, including all retries.
    pub(super) fn time(&mut self, machine: MachineId, plan: &MachinePlan) {
        let since = self.noticed.remove(&machine).unwrap_or(self.since);
        if !plan.change.is_empty() {
            self.changing.entry(machine).or_insert(since);
        }
        if self.seen.contains_key(&machine)
            && plan.deferred.is_empty()
            && let Some(since) = self.changing.remove(&machine)
        {
            self.metrics.changed(since.elapsed());
        }
    }

    pub(super) fn try_later(&mut self, machine: MachineId, pace: Pace) {
        let random = (self.random)();
        self.retries.failed(machine, pace, Instant::now(), random);
    }
}
