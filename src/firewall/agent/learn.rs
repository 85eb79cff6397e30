//! What an agent takes from what became of its changes: what it now knows of a machine, when that is due again, and what is
//! said of it.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::{Change, Rule};
use portcullis_provider::{Applied, Error, Firewall};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Agent, Pass};
use crate::firewall::observe::View;
use crate::firewall::plan::MachinePlan;
use crate::firewall::refusals::Request;
use crate::firewall::report::Report;
use crate::firewall::retry::Pace;
use crate::model::MachineId;
use crate::store::changes::Dirty;
use crate::store::tree::Tree;

/// Each half of a change with what became of it.
fn halves<'a>(
    change: &'a Change,
    applied: &'a Applied,
) -> [(Request, &'a BTreeSet<Rule>, &'a Result<(), Error>); 2] {
    [(Request::Open, &change.open, &applied.opened), (Request::Close, &change.close, &applied.closed)]
}

fn slowest(applied: &Applied) -> Pace {
    applied.errors().map(Pace::after).max().unwrap_or(Pace::ReadAgain)
}

/// The machines that are concerned, each with the time of the first word of it.
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

impl<T: Tree, F: Firewall> Agent<T, F> {
    /// Takes in what became of a machine's change.
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
                    rules.amiss.clear();
                }
            }
            return;
        }
        // What the machine has now is unknown: it is looked at again before anything is planned for it.
        if !planted(Bug::KeepsWhatItSaw) {
            self.seen.remove(&machine);
        }
        let full = matches!(applied.opened, Err(Error::QuotaExceeded { .. }))
            && self.crowded.insert(machine, Instant::now()).is_none();
        let told = self.reports.get(machine).and_then(|report| report.problem.clone());
        let mut problems = Vec::new();
        for error in applied.errors() {
            *pass.failures.entry(error.kind()).or_default() += 1;
            problems.push(error.to_string());
        }
        let problem = problems.join("; ");
        // The same again is no news: the report says it for as long as it lasts.
        if told.as_ref() != Some(&problem) {
            warn!(%machine, problem, "firewall not changed");
        }
        report.problem = Some(problem);
        self.try_again(machine, change, applied, full);
    }

    /// Decides when the machine is due again. A request that `refusals` holds back is due when its time is over.
    fn try_again(&mut self, machine: MachineId, change: &Change, applied: &Applied, full: bool) {
        let mut pace = None;
        let mut at_once = false;
        for (request, rules, result) in halves(change, applied) {
            let Err(error) = result else { continue };
            if rules.is_empty() || matches!(error, Error::NotBegun { .. }) {
                continue;
            }
            let (now, random) = (Instant::now(), (self.random)());
            // The first time that a machine is full, the next request has what there is room for.
            let divisible = !(self.firewall.at_once() || full && request == Request::Open);
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
            None if at_once => drop(self.put_off.insert(machine, Instant::now())),
            None if change.is_empty() => self.try_later(machine, slowest(applied)),
            None => self.retries.succeeded(machine),
        }
    }

    /// The pass took longer than we may act for: the next one begins with what is left, and a fresh lease. Where something
    /// failed, what was not begun comes with the next try.
    pub(super) fn put_off_if_late(
        &mut self,
        machine: MachineId,
        applied: &Applied,
        late: &BTreeMap<MachineId, Instant>,
    ) {
        if applied.is_cut_short() && applied.errors().next().is_none() && !planted(Bug::CallsItDone) {
            let since = late.get(&machine).copied().unwrap_or_else(Instant::now);
            self.put_off.insert(machine, since);
        }
    }

    /// A change counts from when it was noticed, and as made once nothing is left of it, however many tries that took.
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
