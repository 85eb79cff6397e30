//! Reads the part of the tree that the firewall needs: exposed services, the ports that units
//! request, and their machines. A read is complete or fails; an invalid znode is represented as
//! unreadable, never as empty. Decisions do not belong here.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::rule::RuleSet;

use super::unit_index::UnitIndex;
use crate::firewall::wanted::PortRequest;
use crate::model::ports::PortsDocument;
use crate::model::{Cidr, MachineId, PortRange, ServiceId, UnitId, UnitName};
use crate::mutant;
use crate::store::changes::Key;
use crate::store::paths::{self, NodePath};
use crate::store::records;
use crate::store::tree::{Answer, Error, Node, Read, Stat, Tree};
use crate::store::unexposed_by_command;

/// A value, or why it cannot be read.
pub use crate::store::snapshot::Readable;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exposure {
    No,
    /// Exposed to these sources; to the world if the list is empty.
    To(Readable<Vec<Cidr>>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitFacts {
    pub record: Readable<(UnitName, ServiceId, Option<MachineId>)>,
    pub ports: Readable<Vec<PortRange>>,
    /// From the machine's own list of units, for a unit whose record is unreadable.
    pub listed_on: Option<MachineId>,
}

impl UnitFacts {
    /// `None` if the record cannot be read.
    pub fn service(&self) -> Option<ServiceId> {
        self.record.as_ref().ok().map(|(_, service, _)| *service)
    }

    pub fn machine(&self) -> Option<MachineId> {
        match &self.record {
            Ok((_, _, machine)) => *machine,
            Err(_) => self.listed_on,
        }
    }
}

/// The part of the tree that the firewall needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    pub services: BTreeMap<ServiceId, Exposure>,
    pub units: UnitIndex,
    pub machines: BTreeMap<MachineId, Readable<records::Machine>>,
    /// Machines that manage their own firewall.
    pub self_managed: BTreeSet<MachineId>,
    /// The zxid of the newest data in this view.
    pub newest_zxid: i64,
    /// Missing container znodes. They are created with the environment and never removed by `juju`,
    /// so their children do not count as removed.
    pub missing_containers: BTreeSet<NodePath>,
    /// Units in this view whose record is missing although their machine lists them.
    pub missing_units: BTreeSet<UnitId>,
    /// Units in this view that are missing from their machine's list although their record exists.
    /// Only a machine that reads its own list has these.
    pub unlisted_units: BTreeSet<UnitId>,
    /// Services without an exposed flag that `juju unexpose` did not remove: they were never
    /// exposed, or another client removed the flag, and may be deleting the service or more.
    pub lost_flags: BTreeSet<ServiceId>,
    /// Units without a ports node. `juju` creates it with the unit and removes it only with the
    /// unit.
    pub without_ports: BTreeSet<UnitId>,
}

impl View {
    /// Why this view does not allow any close, if that is so.
    pub fn why_no_closes(&self) -> Option<String> {
        if self.missing_containers.is_empty() || mutant!(MissingRecordCountsAsRemoved) {
            return None;
        }
        let missing: Vec<&str> = self.missing_containers.iter().map(NodePath::as_str).collect();
        Some(format!("{} is missing from the store: no port is closed until it is back", missing.join(", ")))
    }

    /// The units of each machine. Iterates over all units.
    pub fn units_by_machine(&self) -> BTreeMap<MachineId, Vec<UnitId>> {
        let mut placed: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (id, unit) in self.units.iter() {
            if let Some(machine) = unit.machine() {
                placed.entry(machine).or_default().push(id);
            }
        }
        placed
    }

    /// The machines of the units among `keys`.
    pub fn machines_of(&self, keys: &[Key]) -> Vec<(UnitId, MachineId)> {
        let place = |key: &Key| match *key {
            Key::Unit(id) => self.units.get(id).and_then(UnitFacts::machine).map(|machine| (id, machine)),
            Key::Service(_) | Key::Machine(_) => None,
        };
        keys.iter().filter_map(place).collect()
    }

    /// The claim of each unit of a machine.
    pub fn requests_on(&self, machine: MachineId) -> BTreeMap<UnitId, PortRequest> {
        self.units.on_machine(machine).map(|(id, unit)| (id, self.request(unit))).collect()
    }

    /// The machines that a change of `keys` can affect, according to this view.
    pub fn affected_machines(&self, keys: impl Iterator<Item = Key>) -> BTreeSet<MachineId> {
        let mut machines = BTreeSet::new();
        for key in keys {
            match key {
                Key::Machine(id) => drop(machines.insert(id)),
                Key::Unit(id) => machines.extend(self.units.get(id).and_then(|unit| unit.machine())),
                Key::Service(_) if mutant!(ExposedFlagEventsIgnored) => {}
                Key::Service(id) => {
                    machines.extend(self.units.of_service(id).filter_map(|(_, unit)| unit.machine()));
                }
            }
        }
        machines
    }

    /// `keys`, and all other keys that determine the rules of the affected machines. They are read
    /// together; otherwise a port that moves from one unit to another could appear to belong to
    /// neither.
    pub fn keys_to_reread(&self, keys: impl Iterator<Item = Key>) -> Vec<Key> {
        let mut all: BTreeSet<Key> = keys.collect();
        for machine in self.affected_machines(all.clone().into_iter()) {
            for (id, unit) in self.units.on_machine(machine) {
                all.insert(Key::Unit(id));
                all.extend(unit.service().map(Key::Service));
            }
        }
        all.into_iter().collect()
    }

    /// Why the machine of this unit is unknown, if it is.
    pub fn why_machine_unknown(&self, unit: UnitId) -> Option<String> {
        let unit = self.units.get(unit)?;
        match (&unit.record, unit.machine()) {
            (Err(reason), None) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Updates the newest zxid with that of a znode.
    pub(super) fn include_zxid(&mut self, node: Option<&Node>) {
        self.newest_zxid = self.newest_zxid.max(node.map_or(0, |node| node.modified));
    }

    pub(super) fn include_service(&mut self, id: ServiceId, record: Stat, exposure: Exposure) {
        if exposure == Exposure::No && !unexposed_by_command(record) {
            self.lost_flags.insert(id);
        }
        self.services.insert(id, exposure);
    }

    /// The units of a machine whose service is in `lost_flags`.
    pub fn units_without_flag(&self, machine: MachineId) -> impl Iterator<Item = UnitId> {
        let has_lost = |unit: &UnitFacts| unit.service().is_some_and(|id| self.lost_flags.contains(&id));
        self.units.on_machine(machine).filter(move |(_, unit)| has_lost(unit)).map(|(id, _)| id)
    }

    /// Returns the claim of a unit that `had` these rules when it was last readable.
    pub fn request_after(&self, id: UnitId, unit: &UnitFacts, had: &RuleSet) -> PortRequest {
        match self.request(unit) {
            PortRequest::Exposed { ports, .. }
                if ports.is_empty()
                    && !had.is_empty()
                    && self.without_ports.contains(&id)
                    && !mutant!(MissingRecordCountsAsRemoved) =>
            {
                PortRequest::Frozen { reason: format!("{} is missing from the store", paths::unit_ports(id)) }
            }
            request => request,
        }
    }

    pub fn request(&self, unit: &UnitFacts) -> PortRequest {
        let service = match &unit.record {
            Ok((_, service, _)) => service,
            Err(reason) => return PortRequest::Frozen { reason: reason.clone() },
        };
        let sources = match self.services.get(service) {
            // `juju` removes a service together with its units or after them, so `juju` did not
            // remove this service.
            None if !mutant!(MissingRecordCountsAsRemoved) => {
                let path = paths::service(*service);
                return PortRequest::Frozen { reason: format!("{path} is missing from the store") };
            }
            None | Some(Exposure::No) if !mutant!(UnexposedPortsOpened) => {
                return PortRequest::NotExposed;
            }
            None | Some(Exposure::No) => vec![Cidr::WORLD_V4, Cidr::WORLD_V6],
            Some(Exposure::To(Err(reason))) => return PortRequest::Frozen { reason: reason.clone() },
            Some(Exposure::To(Ok(sources))) if sources.is_empty() || mutant!(ExposedSourcesIgnored) => {
                vec![Cidr::WORLD_V4, Cidr::WORLD_V6]
            }
            Some(Exposure::To(Ok(sources))) => sources.clone(),
        };
        match &unit.ports {
            Err(_) if mutant!(InvalidPortsCountAsNone) => PortRequest::NotExposed,
            Ok(ports) => PortRequest::Exposed { ports: ports.clone(), sources },
            Err(reason) => PortRequest::Frozen { reason: reason.clone() },
        }
    }
}

/// Reads everything. The number of round trips does not grow with the environment.
pub async fn observe<T: Tree>(tree: &T) -> Result<View, Error> {
    let lists = [paths::services(), paths::units(), paths::machines()];
    let mut lists = tree.read_many(lists.into_iter().map(Read::Children).collect()).await?.into_iter();
    let mut view = View::default();
    let mut names = |path: NodePath| {
        let names = lists.next().and_then(Answer::into_children);
        if names.is_none() {
            view.missing_containers.insert(path);
        }
        names.unwrap_or_default()
    };
    let mut keys: Vec<Key> = Vec::new();
    let services = names(paths::services());
    keys.extend(services.iter().filter_map(|n| ServiceId::from_key(n).ok()).map(Key::Service));
    let units = names(paths::units());
    keys.extend(units.iter().filter_map(|n| UnitId::from_key(n).ok()).map(Key::Unit));
    let machines = names(paths::machines());
    keys.extend(machines.iter().filter_map(|n| MachineId::from_key(n).ok()).map(Key::Machine));
    // Without the machines no other data can be interpreted.
    if view.missing_containers.contains(&paths::machines()) {
        return Err(Error::NoNode(paths::machines()));
    }
    refresh(tree, &mut view, &keys).await?;
    Ok(view)
}

/// Reads `keys` again and updates `view`. If the read fails, `view` is unchanged.
pub async fn refresh<T: Tree>(tree: &T, view: &mut View, keys: &[Key]) -> Result<(), Error> {
    let reads = keys.iter().flat_map(|key| match *key {
        Key::Service(id) => [paths::service(id), paths::exposed(id)],
        Key::Unit(id) => [paths::unit(id), paths::unit_ports(id)],
        Key::Machine(id) => [paths::machine(id), paths::machine_firewall(id)],
    });
    let mut answers = tree.read_each(reads.map(Read::Data).collect()).await?.into_iter();
    let mut node = || answers.next().map(|answer| answer.map(Answer::into_data)).unwrap_or(Ok(None));
    let mut next = View::default();
    let mut gone = Vec::new();
    for &key in keys {
        let (record, beside) = (node()?, node());
        next.include_zxid(record.as_ref());
        // A machine's own report never opens a port.
        if !matches!(key, Key::Machine(_)) {
            next.include_zxid(beside.as_ref().ok().and_then(Option::as_ref));
        }
        let Some(record) = record else {
            gone.push(key);
            continue;
        };
        match key {
            Key::Service(id) => {
                let flag = beside?;
                next.include_service(id, record.stat(), exposure(&paths::exposed(id), flag.as_ref()));
            }
            Key::Unit(id) => {
                let ports = beside?;
                if ports.is_none() {
                    next.without_ports.insert(id);
                }
                next.units.insert(id, unit_facts(id, &record, ports.as_ref()));
            }
            Key::Machine(id) => {
                // Only the existence of the machine's own node matters; its ACL may deny reading
                // it.
                if !matches!(beside, Ok(None)) {
                    next.self_managed.insert(id);
                }
                next.machines
                    .insert(id, readable(records::Machine::parse(&paths::machine(id), &record.data)));
            }
        }
    }
    find_machines_of_unreadable_units(tree, view, &mut next).await?;
    for key in keys {
        match key {
            Key::Machine(id) => drop(view.self_managed.remove(id)),
            Key::Unit(id) => _ = (view.without_ports.remove(id), view.missing_units.remove(id)),
            Key::Service(id) => drop(view.lost_flags.remove(id)),
        }
    }
    for key in gone {
        match key {
            Key::Service(id) => drop(view.services.remove(&id)),
            Key::Unit(id) => view.units.remove(id),
            Key::Machine(id) => drop(view.machines.remove(&id)),
        }
    }
    view.services.append(&mut next.services);
    view.units.merge(next.units);
    view.machines.append(&mut next.machines);
    view.self_managed.append(&mut next.self_managed);
    view.newest_zxid = view.newest_zxid.max(next.newest_zxid);
    view.without_ports.append(&mut next.without_ports);
    view.lost_flags.append(&mut next.lost_flags);
    Ok(())
}

pub(super) fn exposure(path: &NodePath, flag: Option<&Node>) -> Exposure {
    flag.map_or(Exposure::No, |flag| Exposure::To(readable(records::parse_exposed(path, &flag.data))))
}

pub(super) fn unit_facts(id: UnitId, record: &Node, ports: Option<&Node>) -> UnitFacts {
    let record = readable(records::Unit::parse(&paths::unit(id), &record.data));
    let record = record.map(|unit| (unit.name, unit.service, unit.machine));
    UnitFacts { record, ports: open_ports(id, ports), listed_on: None }
}

fn open_ports(id: UnitId, node: Option<&Node>) -> Readable<Vec<PortRange>> {
    let Some(node) = node else { return Ok(Vec::new()) };
    let parsed = PortsDocument::parse(&node.data).map(|document| document.ranges().collect());
    parsed.map_err(|err| format!("{}: {err}", paths::unit_ports(id)))
}

/// Finds the machines of units with an unreadable record in the machines' own lists. Costs one more
/// round trip, and only if there are such units.
async fn find_machines_of_unreadable_units<T: Tree>(
    tree: &T,
    view: &View,
    next: &mut View,
) -> Result<(), Error> {
    let lost: BTreeSet<UnitId> =
        next.units.iter().filter(|(_, unit)| unit.record.is_err()).map(|(id, _)| id).collect();
    if lost.is_empty() {
        return Ok(());
    }
    let machines: Vec<MachineId> = view.machines.keys().chain(next.machines.keys()).copied().collect();
    let reads = machines.iter().map(|id| Read::Children(paths::machine_units(*id))).collect();
    for (machine, answer) in machines.iter().zip(tree.read_many(reads).await?) {
        for name in answer.into_children().into_iter().flatten() {
            if let Ok(id) = UnitId::from_key(&name)
                && let Some(unit) = next.units.get(id).filter(|_| lost.contains(&id))
            {
                let found = UnitFacts { listed_on: Some(*machine), ..unit.clone() };
                next.units.insert(id, found);
            }
        }
    }
    Ok(())
}

pub(super) fn readable<R>(parsed: Result<R, crate::store::Error>) -> Readable<R> {
    parsed.map_err(|err| err.to_string())
}
