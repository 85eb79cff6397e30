//! Differences between the ports that units opened and the real rules, and problems of machines'
//! firewalls. Pure.

use std::collections::BTreeMap;

use super::Section;
use crate::model::{MachineId, UnitId};
use crate::status::view::View;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Ports of a unit that are not as requested, and why.
    pub units: BTreeMap<UnitId, Vec<String>>,
    /// The problem of a machine's firewall as a whole.
    pub machines: BTreeMap<MachineId, String>,
    /// Machines whose firewall is not changed, with the changes that would be made.
    pub dry_runs: BTreeMap<MachineId, String>,
}

impl Section for Firewall {
    fn add_to(&self, view: &mut View) {
        for (id, machine) in &mut view.machines {
            if let Some(problem) = self.machines.get(id) {
                let own = machine.problem.take();
                machine.problem =
                    Some(own.map_or_else(|| problem.clone(), |own| format!("{problem}; {own}")));
            }
            machine.dry_run = self.dry_runs.get(id).cloned();
        }
        for unit in view.services.values_mut().flat_map(|service| service.units.values_mut()) {
            if let Some(reasons) = unit.id.and_then(|id| self.units.get(&id)) {
                unit.firewall.clone_from(reasons);
            }
        }
    }
}
