//! The units in the firewall's view, indexed by machine and by service. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::observe::UnitFacts;
use crate::model::{MachineId, ServiceId, UnitId};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitIndex {
    facts: BTreeMap<UnitId, UnitFacts>,
    by_machine: BTreeMap<MachineId, BTreeSet<UnitId>>,
    by_service: BTreeMap<ServiceId, BTreeSet<UnitId>>,
}

impl UnitIndex {
    pub fn get(&self, id: UnitId) -> Option<&UnitFacts> {
        self.facts.get(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (UnitId, &UnitFacts)> {
        self.facts.iter().map(|(id, facts)| (*id, facts))
    }

    pub fn is_empty(&self) -> bool {
        self.facts.is_empty()
    }

    /// The units of one machine.
    pub fn on_machine(&self, machine: MachineId) -> impl Iterator<Item = (UnitId, &UnitFacts)> {
        self.lookup(self.by_machine.get(&machine))
    }

    /// The units of one service whose records are readable.
    pub fn of_service(&self, service: ServiceId) -> impl Iterator<Item = (UnitId, &UnitFacts)> {
        self.lookup(self.by_service.get(&service))
    }

    fn lookup(&self, ids: Option<&BTreeSet<UnitId>>) -> impl Iterator<Item = (UnitId, &UnitFacts)> {
        ids.into_iter().flatten().filter_map(|id| Some((*id, self.facts.get(id)?)))
    }

    pub fn insert(&mut self, id: UnitId, facts: UnitFacts) {
        self.remove(id);
        if let Some(machine) = facts.machine() {
            self.by_machine.entry(machine).or_default().insert(id);
        }
        if let Some(service) = facts.service() {
            self.by_service.entry(service).or_default().insert(id);
        }
        self.facts.insert(id, facts);
    }

    /// Inserts all units of `newer`.
    pub fn merge(&mut self, newer: UnitIndex) {
        newer.facts.into_iter().for_each(|(id, facts)| self.insert(id, facts));
    }

    pub fn remove(&mut self, id: UnitId) {
        let Some(facts) = self.facts.remove(&id) else { return };
        if let Some(machine) = facts.machine() {
            remove_from(&mut self.by_machine, machine, id);
        }
        if let Some(service) = facts.service() {
            remove_from(&mut self.by_service, service, id);
        }
    }
}

fn remove_from<K: Ord + Copy>(index: &mut BTreeMap<K, BTreeSet<UnitId>>, key: K, id: UnitId) {
    if let Some(ids) = index.get_mut(&key) {
        ids.remove(&id);
        if ids.is_empty() {
            index.remove(&key);
        }
    }
}

impl FromIterator<(UnitId, UnitFacts)> for UnitIndex {
    fn from_iter<I: IntoIterator<Item = (UnitId, UnitFacts)>>(facts: I) -> Self {
        let mut units = Self::default();
        facts.into_iter().for_each(|(id, facts)| units.insert(id, facts));
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(service: u32, machine: Option<u32>) -> UnitFacts {
        let record = Ok(("web/0".parse().unwrap(), ServiceId::new(service), machine.map(MachineId::new)));
        UnitFacts { record, ports: Ok(Vec::new()), listed_on: None }
    }

    fn ids<'a>(found: impl Iterator<Item = (UnitId, &'a UnitFacts)>) -> Vec<u32> {
        found.map(|(id, _)| id.number()).collect()
    }

    #[test]
    fn the_index_follows_changes_of_machine_and_service() {
        let mut units: UnitIndex =
            [(UnitId::new(0), unit(0, Some(1))), (UnitId::new(1), unit(0, None))].into_iter().collect();
        assert_eq!(ids(units.on_machine(MachineId::new(1))), [0]);
        assert_eq!(ids(units.of_service(ServiceId::new(0))), [0, 1]);
        units.insert(UnitId::new(0), unit(2, Some(3)));
        assert_eq!(
            (ids(units.on_machine(MachineId::new(1))), ids(units.on_machine(MachineId::new(3)))),
            (vec![], vec![0])
        );
        assert_eq!(
            (ids(units.of_service(ServiceId::new(0))), ids(units.of_service(ServiceId::new(2)))),
            (vec![1], vec![0])
        );
        let lost = UnitFacts {
            record: Err("garbage".into()),
            ports: Ok(vec![]),
            listed_on: Some(MachineId::new(4)),
        };
        units.insert(UnitId::new(0), lost);
        assert_eq!(
            (ids(units.on_machine(MachineId::new(4))), ids(units.of_service(ServiceId::new(2)))),
            (vec![0], vec![])
        );
        units.remove(UnitId::new(0));
        units.remove(UnitId::new(1));
        assert_eq!(units, UnitIndex::default());
    }
}
