//! The one read of a whole environment: the lists, then everything on them in one pipelined batch.
//! The number of round trips does not depend on the number of units. An unreadable record is kept
//! as such and hides no other; a failure of the store fails the whole read. The
//! callers interpret the records.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::error;
use super::failed_stops::{self, FailedStop};
use super::paths::{self, NodePath};
use super::records;
use super::tree::{Answer, Error, Node, Read, Tree};
use crate::model::ports::PortsDocument;
use crate::model::{Cidr, InvalidId, MachineId, PortRange, ServiceId, ServiceName, UnitId, UnitName};

/// A record, or what is wrong with the znode that should hold it; the text names the znode.
pub type Readable<T> = Result<T, String>;

/// Everything in an environment, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub services: BTreeMap<ServiceId, StoredService>,
    pub units: BTreeMap<UnitId, StoredUnit>,
    pub machines: BTreeMap<MachineId, StoredMachine>,
    /// Units that were removed and whose `stop` hook failed, as their machines report.
    pub failed_stops: BTreeMap<UnitId, (MachineId, Readable<FailedStop>)>,
    /// Names of services and units whose record is unreadable, from the index of names.
    pub service_names: BTreeMap<ServiceId, String>,
    pub unit_names: BTreeMap<UnitId, String>,
    /// Containers that every environment has and that are not in the store.
    pub missing: Vec<NodePath>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredService {
    pub record: Readable<records::Service>,
    /// The flag, if there is one: the sources that it is limited to, none for the whole world.
    pub exposed: Option<Readable<Vec<Cidr>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredUnit {
    pub record: Readable<records::Unit>,
    pub ports: Readable<Vec<PortRange>>,
    /// `None` until an agent has started the unit.
    pub state: Option<Readable<records::UnitState>>,
    pub agent: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredMachine {
    pub record: Readable<records::Machine>,
    pub agent: Presence,
    /// The host as the agent reported it last.
    pub host: Option<Readable<records::Host>>,
    /// The reports about its firewall as stored: by a controller, and by the machine itself.
    pub firewall_reports: [Readable<Option<Vec<u8>>>; 2],
    /// The reason why its agent does not run its units, as the agent reports it.
    pub problem: Option<String>,
}

impl StoredMachine {
    /// The address to show: the record's, else the first that the agent reported.
    pub fn address(&self) -> Option<String> {
        let recorded = self.record.as_ref().ok()?.addresses.first().cloned();
        let reported = || Some(self.host.as_ref()?.as_ref().ok()?.addresses.first()?.to_string());
        recorded.or_else(reported)
    }
}

/// Whether a machine's agent is connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Never,
    Here,
    Gone,
}

impl Snapshot {
    /// Reads everything.
    pub async fn read<T: Tree>(tree: &T) -> Result<Self, Error> {
        // Units first, so that a unit created meanwhile finds its service and machine on the lists
        // read after it.
        let lists = vec![paths::units(), paths::services(), paths::machines()];
        let mut lists = tree.read_many(lists.into_iter().map(Read::Children).collect()).await?.into_iter();
        let mut snapshot = Snapshot::default();
        let (list, path) = (lists.next(), paths::units());
        let units = ids(list, UnitId::from_key, &path).or_else(|missing| snapshot.lacks(path, missing))?;
        let (list, path) = (lists.next(), paths::services());
        let services =
            ids(list, ServiceId::from_key, &path).or_else(|missing| snapshot.lacks(path, missing))?;
        let machines = ids(lists.next(), MachineId::from_key, &paths::machines())?;

        // Units last: a unit that still exists then had its service and its machine when those were
        // read.
        let reads = services.iter().flat_map(|&id| service_paths(id));
        let reads = reads.chain(machines.iter().flat_map(|&id| machine_paths(id)));
        let reads = reads.chain(units.iter().flat_map(|&id| unit_paths(id))).collect();
        // A machine can deny access to znodes that it created; that must hide nothing else.
        let mut nodes = tree.data_of_each(reads).await?.into_iter();

        for id in services {
            snapshot.add_service(id, next(&mut nodes));
        }
        let mut stopping = Vec::new();
        for id in machines {
            if snapshot.add_machine(id, next(&mut nodes)) {
                stopping.push(id);
            }
        }
        for id in units {
            snapshot.add_unit(id, next(&mut nodes));
        }
        // Usually there are none, and nothing more is read.
        if !stopping.is_empty() {
            let reports = failed_stops::read_all(tree, &stopping).await?.into_iter();
            snapshot.failed_stops =
                reports.map(|(machine, unit, report)| (unit, (machine, report))).collect();
        }
        add_lost_names(tree, &mut snapshot).await?;
        Ok(snapshot)
    }

    /// Adds a service from its znodes, if it still exists; see [`service_paths`].
    fn add_service(&mut self, id: ServiceId, [record, exposed]: [MaybeNode; 2]) {
        if let Some(record) = read(record, |data| records::Service::parse(&paths::service(id), data)) {
            let exposed = read(exposed, |data| records::parse_exposed(&paths::exposed(id), data));
            self.services.insert(id, StoredService { record, exposed });
        }
    }

    /// Adds a machine from its znodes, if it still exists; see [`machine_paths`]. Returns whether
    /// it has reports of failed `stop` hooks.
    fn add_machine(&mut self, id: MachineId, nodes: [MaybeNode; 8]) -> bool {
        let [record, agent, started, host, firewall, own_firewall, problem, stopping] = nodes;
        if let Some(record) = read(record, |data| records::Machine::parse(&paths::machine(id), data)) {
            let agent = presence(is_there(&agent), is_there(&started));
            let host = read(host, |data| records::Host::parse(&paths::machine_host(id), data));
            let firewall_reports =
                [firewall, own_firewall].map(|node| node.map(|node| node.map(|node| node.data)));
            let reported =
                read(problem, |data| records::parse_machine_problem(&paths::machine_problem(id), data));
            // An unreadable problem is still a problem.
            let problem = reported.and_then(|reported| reported.unwrap_or_else(Some));
            let machine = StoredMachine { record, agent, host, firewall_reports, problem };
            self.machines.insert(id, machine);
        }
        matches!(stopping, Ok(Some(list)) if list.children > 0)
    }

    /// Adds a unit from its znodes, if it still exists; see [`unit_paths`].
    fn add_unit(&mut self, id: UnitId, [record, ports, state, agent]: [MaybeNode; 4]) {
        if let Some(record) = read(record, |data| records::Unit::parse(&paths::unit(id), data)) {
            let state = read(state, |data| records::UnitState::parse(&paths::unit_state(id), data));
            let ports = ports.and_then(|ports| open_ports(id, ports));
            self.units.insert(id, StoredUnit { record, ports, state, agent: is_there(&agent) });
        }
    }

    /// A missing list hides nothing else.
    fn lacks<I>(&mut self, path: NodePath, error: Error) -> Result<Vec<I>, Error> {
        if error != Error::NoNode(path.clone()) {
            return Err(error);
        }
        self.missing.push(path);
        Ok(Vec::new())
    }
}

/// A znode, if it exists, or the reason why it cannot be read.
type MaybeNode = Readable<Option<Node>>;

/// Takes the next znodes.
fn next<const N: usize>(nodes: &mut impl Iterator<Item = MaybeNode>) -> [MaybeNode; N] {
    std::array::from_fn(|_| nodes.next().unwrap_or(Ok(None)))
}

fn service_paths(id: ServiceId) -> [NodePath; 2] {
    [paths::service(id), paths::exposed(id)]
}

fn machine_paths(id: MachineId) -> [NodePath; 8] {
    [
        paths::machine(id),
        paths::machine_agent(id),
        paths::machine_started(id),
        paths::machine_host(id),
        paths::firewall_report(id),
        paths::machine_firewall(id),
        paths::machine_problem(id),
        paths::machine_stopping(id),
    ]
}

fn unit_paths(id: UnitId) -> [NodePath; 4] {
    [paths::unit(id), paths::unit_ports(id), paths::unit_state(id), paths::unit_agent(id)]
}

fn presence(here: bool, ever: bool) -> Presence {
    match (here, ever) {
        (true, _) => Presence::Here,
        (false, true) => Presence::Gone,
        (false, false) => Presence::Never,
    }
}

/// The ids among the children of a list. The lists are created with the environment, so an absent
/// list is not an empty one. Children that are no ids are ignored.
fn ids<I: Ord>(
    answer: Option<Answer>,
    parse: impl Fn(&str) -> Result<I, InvalidId>,
    path: &NodePath,
) -> Result<Vec<I>, Error> {
    let names = answer.and_then(Answer::into_children).ok_or_else(|| Error::NoNode(path.clone()))?;
    let mut ids: Vec<I> = names.iter().filter_map(|name| parse(name).ok()).collect();
    ids.sort();
    Ok(ids)
}

/// Parses a znode, if it exists.
fn read<R>(node: MaybeNode, parse: impl FnOnce(&[u8]) -> Result<R, error::Error>) -> Option<Readable<R>> {
    match node {
        Ok(node) => node.map(|node| parse(&node.data).map_err(|problem| problem.to_string())),
        Err(refused) => Some(Err(refused)),
    }
}

/// A znode that may not be read exists.
fn is_there(node: &MaybeNode) -> bool {
    !matches!(node, Ok(None))
}

fn open_ports(id: UnitId, node: Option<Node>) -> Readable<Vec<PortRange>> {
    match node {
        None => Ok(Vec::new()),
        Some(node) => match PortsDocument::parse(&node.data) {
            Ok(document) => Ok(document.ranges().collect()),
            Err(problem) => Err(format!("{}: {problem}", paths::unit_ports(id))),
        },
    }
}

/// Looks up the names of unreadable services and units in the index: three more round trips, only
/// if there are some.
async fn add_lost_names<T: Tree>(tree: &T, snapshot: &mut Snapshot) -> Result<(), Error> {
    let lost_service = snapshot.services.values().any(|seen| seen.record.is_err());
    let lost_unit = snapshot.units.values().any(|seen| seen.record.is_err());
    if !lost_service && !lost_unit {
        return Ok(());
    }
    let tops = vec![Read::Children(paths::service_names()), Read::Children(paths::unit_names())];
    let mut tops = tree.read_many(tops).await?.into_iter().map(names::<ServiceName>);
    let (services, numbered) = (tops.next().unwrap_or_default(), tops.next().unwrap_or_default());
    let lists = numbered.iter().map(|name| Read::Children(paths::unit_names_of(name))).collect();
    let lists = tree.read_many(lists).await?;
    let units = numbered.iter().zip(lists).flat_map(|(service, numbers)| {
        names::<u32>(numbers).into_iter().map(|number| UnitName::new(service.clone(), number))
    });
    let mut entries: Vec<(String, NodePath)> =
        services.iter().map(|name| (name.to_string(), paths::service_name(name))).collect();
    entries.extend(units.map(|name| (name.to_string(), paths::unit_name(&name))));
    let nodes = tree.read_many(entries.iter().map(|(_, path)| Read::Data(path.clone())).collect()).await?;
    for ((name, path), node) in entries.into_iter().zip(nodes) {
        // Without a readable entry the id is shown instead.
        let Some(Ok(key)) = node.into_data().map(|node| records::named_id(&path, &node.data)) else {
            continue;
        };
        if let Ok(id) = ServiceId::from_key(&key) {
            snapshot.service_names.insert(id, name);
        } else if let Ok(id) = UnitId::from_key(&key) {
            snapshot.unit_names.insert(id, name);
        }
    }
    Ok(())
}

/// The children of a list that are valid names.
fn names<N: FromStr>(list: Answer) -> Vec<N> {
    list.into_children().into_iter().flatten().filter_map(|name| name.parse().ok()).collect()
}
