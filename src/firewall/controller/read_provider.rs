//! Reads the rules of machines from the provider where they are not cached, and reports why where
//! they cannot be read. `plan` decides about changes.

use std::collections::{BTreeMap, BTreeSet};

use crate::mutant;
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::{Error, Firewall};
use tokio::time::Instant;
use tracing::warn;

use super::{FirewallController, Pass, Scope};
use crate::firewall::refusals::Request;
use crate::firewall::report::{NO_GROUP, NOT_PROVISIONED, Report};
use crate::machine::number;
use crate::machine::retry::Pace;
use crate::model::MachineId;
use crate::store::tree::Tree;

type Reports = BTreeMap<MachineId, Report>;

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Reads the rules of `machines` that are not cached, and returns the machines whose rules are
    /// known.
    pub(super) async fn read_rules(
        &mut self,
        machines: &BTreeSet<MachineId>,
        reports: &mut Reports,
        pass: &mut Pass,
    ) -> BTreeSet<MachineId> {
        let Some(mut known) = self.machines_with_rules(machines, reports) else { return BTreeSet::new() };
        let mut failed = self.denied_reads(&known, reports);
        known.retain(|id| !failed.contains(id));
        let uncached: BTreeSet<MachineId> =
            known.iter().filter(|id| self.machines.rules(**id).is_none()).copied().collect();
        if !uncached.is_empty() {
            let numbers = uncached.iter().map(|id| number(*id)).collect();
            // Boxed, for the reason given in `apply`.
            match Box::pin(self.firewall.observe(&numbers)).await {
                Ok(found) => {
                    let absent = self.record_rules(&uncached, found, reports);
                    known.retain(|id| !absent.contains(id));
                }
                Err(error) => {
                    warn!(%error, machines = uncached.len(), "provider not readable");
                    *pass.failures.entry(error.kind()).or_default() += 1;
                    self.record_failed_read(&uncached, &error, reports);
                    known.retain(|id| !uncached.contains(id));
                    failed.extend(uncached);
                }
            }
        }
        self.machines.mark_read(machines.difference(&failed));
        known
    }

    /// Returns the machines that have rules according to the view.
    fn machines_with_rules(
        &mut self,
        machines: &BTreeSet<MachineId>,
        reports: &mut Reports,
    ) -> Option<BTreeSet<MachineId>> {
        let mut with_rules = BTreeSet::new();
        let Some(view) = &self.view else { return Some(with_rules) };
        for &machine in machines {
            match view.machines.get(&machine) {
                // Removed from the tree: provisioning removes its group together with its instance.
                None => {
                    let state = self.machines.entry(machine);
                    (state.rules, state.changing_since) = (None, None);
                }
                // A controller for its own machine needs neither the instance nor the record.
                Some(_) if self.scope != Scope::Environment => drop(with_rules.insert(machine)),
                Some(Err(_)) if mutant!(InvalidRecordBlocksAllMachines) => return None,
                Some(Err(reason)) => {
                    reports.insert(machine, self.reports.keep(machine, reason.clone()));
                }
                Some(Ok(record)) if record.instance_id.is_some() => drop(with_rules.insert(machine)),
                Some(Ok(_)) if view.self_managed.contains(&machine) => {}
                Some(Ok(_)) => {
                    let note = self.machines.note(machine).map_or(NOT_PROVISIONED, String::as_str);
                    reports.insert(machine, self.reports.keep(machine, note.to_owned()));
                }
            }
            // There is no request that could be retried; the next change of the machine triggers a
            // pass.
            if !with_rules.contains(&machine) && !mutant!(RemovedMachineRetried) {
                let state = self.machines.entry(machine);
                (state.retry, state.noticed_at) = (None, None);
            }
        }
        Some(with_rules)
    }

    /// Returns those of `machines` whose rules are not cached and must not be read for now, because
    /// the last read was denied.
    fn denied_reads(&mut self, machines: &BTreeSet<MachineId>, reports: &mut Reports) -> BTreeSet<MachineId> {
        let mut denied = BTreeSet::new();
        for &id in machines {
            let state = self.machines.entry(id);
            let Some(reason) = state.refusals.denial(Request::Read).filter(|_| state.rules.is_none()) else {
                continue;
            };
            reports.insert(id, self.reports.keep(id, reason.to_owned()));
            state.noticed_at.get_or_insert(self.pass_since);
            // The machine is due again when the hold ends, and not before.
            state.retry = None;
            denied.insert(id);
        }
        denied
    }

    /// Caches the rules that the provider returned. Returns the machines for which it has none.
    fn record_rules(
        &mut self,
        uncached: &BTreeSet<MachineId>,
        mut found: BTreeMap<MachineNumber, Seen>,
        reports: &mut Reports,
    ) -> BTreeSet<MachineId> {
        let (mut absent, now) = (BTreeSet::new(), Instant::now());
        for &id in uncached {
            let state = self.machines.entry(id);
            state.refusals.accepted(Request::Read, false);
            if let Some(Seen::Present(rules)) = found.remove(&number(id)) {
                state.rules = Some(rules);
                continue;
            }
            absent.insert(id);
            if self.view.as_ref().is_some_and(|view| view.self_managed.contains(&id)) {
                state.retry = None;
                continue;
            }
            let problem = state.note.clone().unwrap_or_else(|| NO_GROUP.to_owned());
            reports.insert(id, self.reports.keep(id, problem));
            state.retry_after(Pace::BackOff, now, (self.random)());
        }
        absent
    }

    /// Records that the rules of these machines could not be read. A single request was sent for
    /// all machines, so after a denial they are due again together.
    fn record_failed_read(&mut self, uncached: &BTreeSet<MachineId>, error: &Error, reports: &mut Reports) {
        let (now, random) = (Instant::now(), (self.random)());
        for &id in uncached {
            reports.insert(id, self.reports.keep(id, error.to_string()));
            let state = self.machines.entry(id);
            state.noticed_at.get_or_insert(self.pass_since);
            if !state.deny(Request::Read, error, now, random) {
                state.retry_after(Pace::after(error), now, (self.random)());
            }
        }
    }
}
