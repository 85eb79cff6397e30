//! Reads the rules of machines from the provider where they are not cached, and reports why where
//! they cannot be read. `plan` decides about changes.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::Firewall;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::provider::Seen;
use tokio::time::Instant;
use tracing::warn;

use super::{FirewallController, Pass, Scope};
use crate::firewall::refusals::Request;
use crate::firewall::report::{NOT_PROVISIONED, Report};
use crate::machine::number;
use crate::machine::retry::Pace;
use crate::model::MachineId;
use crate::store::tree::Tree;

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Reads the rules of `machines` that are not cached, and returns the machines whose rules are
    /// known.
    pub(super) async fn see(
        &mut self,
        machines: &BTreeSet<MachineId>,
        reports: &mut BTreeMap<MachineId, Report>,
        pass: &mut Pass,
    ) -> BTreeSet<MachineId> {
        let mut wanted = BTreeSet::new();
        let mut failed = BTreeSet::new();
        for &machine in machines {
            let Some(view) = &self.view else { break };
            match view.machines.get(&machine) {
                // Removed from the tree: provisioning removes its group together with its instance.
                None => _ = (self.seen.remove(&machine), self.changing.remove(&machine)),
                // An agent for its own machine needs neither the instance nor the record.
                Some(_) if self.scope != Scope::Environment => drop(wanted.insert(machine)),
                Some(Err(_)) if planted(Bug::OneSpoilsAll) => return BTreeSet::new(),
                Some(Err(reason)) => {
                    reports.insert(machine, self.reports.keep(machine, reason.clone()));
                }
                Some(Ok(record)) if record.instance_id.is_none() && view.own.contains(&machine) => {}
                Some(Ok(record)) if record.instance_id.is_none() => {
                    let note = self.notes.get(&machine).map_or(NOT_PROVISIONED, String::as_str);
                    reports.insert(machine, self.reports.keep(machine, note.to_owned()));
                }
                Some(Ok(_)) => drop(wanted.insert(machine)),
            }
            // There is no request that could be retried; the next change of the machine triggers a
            // pass.
            if !wanted.contains(&machine) && !planted(Bug::NeverLetsGo) {
                self.retries.succeeded(machine);
                self.noticed.remove(&machine);
            }
        }
        let mut unseen: BTreeSet<_> =
            wanted.iter().filter(|id| !self.seen.contains_key(id)).map(|id| number(*id)).collect();
        unseen.retain(|&number| {
            let id = MachineId::new(number.get());
            let Some(reason) = self.refusals.look(id) else { return true };
            reports.insert(id, self.reports.keep(id, reason.to_owned()));
            self.noticed.entry(id).or_insert(self.since);
            // The machine is due again when the hold ends, and not before.
            self.retries.succeeded(id);
            wanted.remove(&id);
            failed.insert(id);
            false
        });
        if unseen.is_empty() {
            self.trust.judged(machines.difference(&failed));
            return wanted;
        }
        // Boxed, for the reason given in `apply`.
        let found = Box::pin(self.firewall.observe(&unseen)).await;
        let ids: Vec<MachineId> = unseen.iter().map(|number| MachineId::new(number.get())).collect();
        match found {
            Ok(mut found) => {
                for id in ids {
                    self.refusals.accepted(id, Request::Look, false);
                    match found.remove(&number(id)) {
                        Some(Seen::Present(rules)) => drop(self.seen.insert(id, rules)),
                        Some(Seen::Absent) | None => {
                            wanted.remove(&id);
                            if self.view.as_ref().is_some_and(|view| view.own.contains(&id)) {
                                self.retries.succeeded(id);
                                continue;
                            }
                            let note = self.notes.get(&id).map(String::as_str);
                            let problem =
                                note.unwrap_or("the provider has nothing to hold its rules").to_owned();
                            reports.insert(id, self.reports.keep(id, problem));
                            self.try_later(id, Pace::BackOff);
                        }
                    }
                }
            }
            Err(err) => {
                warn!(error = %err, machines = ids.len(), "provider not readable");
                *pass.failures.entry(err.kind()).or_default() += 1;
                // A single request was denied for all machines, so they are due again together.
                let (now, random) = (Instant::now(), (self.random)());
                for id in ids {
                    wanted.remove(&id);
                    failed.insert(id);
                    self.noticed.entry(id).or_insert(self.since);
                    reports.insert(id, self.reports.keep(id, err.to_string()));
                    if self.refusals.denied(id, Request::Look, &err, now, random) {
                        self.retries.succeeded(id);
                    } else {
                        self.try_later(id, Pace::after(&err));
                    }
                }
            }
        }
        self.trust.judged(machines.difference(&failed));
        wanted
    }
}
