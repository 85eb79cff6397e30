//! Units that are on their machine's list and not in the view. `juju` removes a unit and its entry
//! on the list in one transaction, so `juju` did not remove such a unit. Either the list of units
//! was wrong, and the unit is read again, or its record is missing, and the unit keeps its ports
//! until the record is restored or the unit is removed. On a machine's own firewall the view comes
//! from the machine's list, and the units that had rules are looked up.

use std::collections::BTreeSet;

use crate::mutant;
use portcullis_provider::Firewall;
use tokio::time::Instant;

use super::{FirewallController, Scope};
use crate::firewall::observe::{self, UnitFacts, View};
use crate::firewall::observe_local;
use crate::model::{MachineId, UnitId};
use crate::store::changes::Key;
use crate::store::paths;
use crate::store::tree::{self, Read, Tree};

/// Why the unit's ports stay as they are although no record requests them.
fn missing(view: &View, unit: UnitId) -> String {
    match view.why_no_closes() {
        Some(reason) => reason,
        None => format!("{} is missing from the store, and its machine lists it", paths::unit(unit)),
    }
}

/// The problem that is reported for a machine on which units are missing.
pub(super) fn problem(view: &View, machine: MachineId) -> Option<String> {
    let on_machine = |among: &BTreeSet<UnitId>, what: &str| {
        let on = view.units.on_machine(machine).map(|(id, _)| id).filter(|id| among.contains(id));
        let units: Vec<String> = on.map(|id| id.key()).collect();
        (!units.is_empty()).then(|| format!("{what}: {}", units.join(", ")))
    };
    let missing = [
        on_machine(&view.missing_units, "listed on this machine and missing from /units"),
        on_machine(&view.unlisted_units, "in /units and missing from the list of this machine"),
    ];
    let missing: Vec<String> = missing.into_iter().flatten().collect();
    if missing.is_empty() {
        return None;
    }
    let way_out = "their ports stay open until they are restored, or removed with `juju remove-unit`";
    Some(view.why_no_closes().unwrap_or_else(|| format!("{}; {way_out}", missing.join("; "))))
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Adds units to the view that are missing from it and that one of `machines`
    /// lists.
    pub(super) async fn find_missing_units(
        &mut self,
        machines: &BTreeSet<MachineId>,
    ) -> Result<(), tree::Error> {
        let Some(view) = &mut self.view else { return Ok(()) };
        if let Scope::Machine { id, .. } = self.scope {
            let had = self.reports.granted(id);
            return observe_local::add_unlisted_units(&self.tree, id, had.into_keys(), view).await;
        }
        if mutant!(MissingRecordCountsAsRemoved) {
            return Ok(());
        }
        let machines: Vec<MachineId> =
            machines.iter().filter(|id| view.machines.contains_key(id)).copied().collect();
        if machines.is_empty() {
            return Ok(());
        }
        let lists = machines.iter().map(|id| Read::Children(paths::machine_units(*id))).collect();
        let mut listed: Vec<(UnitId, MachineId)> = Vec::new();
        for (machine, answer) in machines.iter().zip(self.tree.read_many(lists).await?) {
            let names = answer.into_children().unwrap_or_default();
            let ids = names.iter().filter_map(|name| UnitId::from_key(name).ok());
            listed.extend(ids.filter(|id| view.units.get(*id).is_none()).map(|id| (id, *machine)));
        }
        let units: Vec<Key> = listed.iter().map(|(id, _)| Key::Unit(*id)).collect();
        observe::refresh(&self.tree, view, &units).await?;
        let found = listed.iter().filter_map(|(id, _)| view.units.get(*id)?.service());
        let services: BTreeSet<Key> =
            found.filter(|id| !view.services.contains_key(id)).map(Key::Service).collect();
        observe::refresh(&self.tree, view, &services.into_iter().collect::<Vec<_>>()).await?;
        for (id, machine) in listed {
            if view.units.get(id).is_none() {
                let reason = missing(view, id);
                let facts =
                    UnitFacts { record: Err(reason.clone()), ports: Err(reason), listed_on: Some(machine) };
                view.units.insert(id, facts);
                view.missing_units.insert(id);
            }
        }
        self.confirmation.view_updated(Instant::now());
        Ok(())
    }
}
