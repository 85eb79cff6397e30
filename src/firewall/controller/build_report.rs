//! Builds the report of a machine and the change log entries of its changes. Their formats are in
//! `report` and `change_log`.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::rule::{Change, Rule, RuleSet};
use portcullis_provider::{Applied, Firewall};

use tracing::info;

use super::{FirewallController, Planned, Scope, missing_units};
use crate::firewall::change_log::Entry;
use crate::firewall::plan::MachinePlan;
use crate::firewall::report::Report;
use crate::firewall::wanted::Wanted;
use crate::model::{MachineId, UnitId};
use crate::store::tree::Tree;

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    pub(super) fn describe(&self, machine: MachineId, wanted: &Wanted, plan: &MachinePlan) -> Report {
        let mut granted = wanted.granted.clone();
        let last = self.reports.get(machine).map(|report| &report.granted);
        for unit in wanted.frozen.keys() {
            // Includes the rules that are kept now, so that they stay recorded for this unit even
            // while another unit has the same rules.
            if let Some(had) = last.and_then(|last| last.get(unit)) {
                granted.insert(*unit, had.union(&plan.kept_for_frozen));
            }
        }
        let mut problems =
            self.machines.get(machine).map(|state| state.refusals.problems()).unwrap_or_default();
        if !plan.over_capacity.is_empty() {
            problems.push(format!("its firewall is full: {} rules do not fit", plan.over_capacity.len()));
        }
        let vanished = self.view.as_ref().and_then(|view| missing_units::problem(view, machine));
        problems.extend(vanished.filter(|_| plan.over_capacity.is_empty()));
        let rules = self.machines.rules(machine);
        let foreign = rules.map(|rules| rules.foreign.iter().map(|f| f.text.clone()).collect());
        let names = granted.keys().map(|unit| (*unit, self.name(machine, *unit))).collect();
        Report {
            dry_run: self.firewall.is_dry_run().then(|| plan.dry_run_text()),
            names,
            by: match &self.scope {
                Scope::Environment => None,
                Scope::Machine { firewall_kind, .. } => Some(firewall_kind.clone()),
            },
            granted,
            pending: (&(&plan.change.open | &plan.over_capacity) | &plan.withheld_opens)
                .into_iter()
                .collect(),
            denied: Report::denied_from(&wanted.denied),
            more_denied: 0,
            frozen: wanted.frozen.clone(),
            problem: (!problems.is_empty()).then(|| problems.join("; ")),
            note: None,
            foreign: foreign.unwrap_or_default(),
            no_ipv6: rules.is_some_and(|rules| !rules.ipv6),
        }
    }

    /// Keeps all rules as granted, because a dry run closes none, and logs each machine's changes
    /// once.
    pub(super) fn describe_dry_run(&self, planned: &mut Planned) {
        for (machine, plan) in &planned.plans {
            let Some(report) = planned.reports.get_mut(machine) else { continue };
            self.copy_last_rules(*machine, &(&plan.change.close | &plan.deferred), report);
            let last = self.reports.get(*machine).and_then(|report| report.dry_run.as_ref());
            if let Some(changes) = report.dry_run.as_ref().filter(|changes| last != Some(changes)) {
                info!(%machine, changes, "dry run: firewall left unchanged");
            }
        }
    }

    /// Adds notes and the problem of the policy file to the reports, and reports about removed
    /// machines that have a note.
    pub(super) fn complete_reports(
        &self,
        machines: &BTreeSet<MachineId>,
        reports: &mut BTreeMap<MachineId, Report>,
    ) {
        if let Some(view) = &self.view {
            // The report of a removed machine only contains why its instance still exists.
            let removed = machines.iter().filter(|id| !view.machines.contains_key(id));
            let noted = removed.filter(|id| self.machines.note(**id).is_some());
            noted.for_each(|id| _ = reports.insert(*id, Report::default()));
        }
        for (machine, report) in reports {
            report.note = self.machines.note(*machine).cloned();
            if let Some(note) = &report.note {
                report.problem.get_or_insert_with(|| note.clone());
            }
            self.policy.add_problem(report);
        }
    }

    /// Returns the machines whose reports are to be removed: they left the tree, or manage their
    /// own firewall and have no group.
    pub(super) fn without_report(
        &self,
        machines: &BTreeSet<MachineId>,
        reports: &BTreeMap<MachineId, Report>,
    ) -> BTreeSet<MachineId> {
        let Some(view) = &self.view else { return BTreeSet::new() };
        let is_gone = |id: &&MachineId| !view.machines.contains_key(id) || view.self_managed.contains(id);
        let unreported = machines.iter().filter(|id| !reports.contains_key(id));
        unreported.filter(is_gone).copied().collect()
    }

    /// Copies rules that should have been closed and are still open into the report of the units
    /// that had them.
    pub(super) fn copy_last_rules(&self, machine: MachineId, open: &BTreeSet<Rule>, report: &mut Report) {
        let open: RuleSet = open.iter().copied().collect();
        for (unit, had) in self.reports.granted(machine) {
            let kept = had.minus(&had.minus(&open));
            if !kept.is_empty() {
                let now = report.granted.entry(unit).or_default();
                *now = now.union(&kept);
                report.names.entry(unit).or_insert_with(|| self.name(machine, unit));
            }
        }
    }

    /// The change log entry of a change, if any part of it was sent. Opened rules are recorded for
    /// the units that have them now, closed rules for the units that had them.
    pub(super) fn entry(
        &self,
        machine: MachineId,
        change: &Change,
        applied: &Applied,
        now: &Report,
    ) -> Option<Entry> {
        let change = &applied.begun_of(change);
        if change.is_empty() && applied.is_cut_short() {
            return None;
        }
        let before = self.reports.granted(machine);
        let drift = self.machines.rules(machine).map(|rules| rules.drift.as_slice()).unwrap_or_default();
        Some(Entry::new((self.wall_ms)(), change, applied, drift, |rule| {
            let granted = if change.open.contains(rule) { &now.granted } else { &before };
            let has = |(_, rules): &(&UnitId, &RuleSet)| !rules.minus(&rules.minus(&one(*rule))).is_empty();
            granted.iter().filter(has).map(|(id, _)| self.name(machine, *id)).collect()
        }))
    }

    /// The name of a unit, or the name in the machine's last report if the record is missing or
    /// unreadable.
    fn name(&self, machine: MachineId, id: UnitId) -> String {
        let unit = self.view.as_ref().and_then(|view| view.units.get(id));
        if let Some(Ok((name, _, _))) = unit.map(|unit| &unit.record) {
            return name.to_string();
        }
        let last = self.reports.get(machine).and_then(|report| report.names.get(&id));
        last.cloned().unwrap_or_else(|| id.key())
    }
}

fn one(rule: Rule) -> RuleSet {
    [rule].into_iter().collect()
}
