//! One look at the whole environment: the lists, then everything on them in one pipelined batch. The number of round
//! trips is the same for one unit and for ten thousand. What a znode means is for `view`; all that is decided here
//! is that one unreadable record does not hide the others, while a store that fails does fail the whole look.

use std::str::FromStr;

use super::view::{Held, Presence, SeenMachine, SeenService, SeenUnit, Snapshot};
use crate::model::ports::PortsDocument;
use crate::model::{InvalidId, MachineId, PortRange, ServiceId, ServiceName, UnitId, UnitName};
use crate::store::paths::{self, NodePath};
use crate::store::tree::{Answer, Error, Node, Read, Tree};
use crate::store::{self, records};

pub async fn collect<T: Tree>(tree: &T) -> Result<Snapshot, Error> {
    // Units first: what is made meanwhile is on the lists that are read after it, and not the other way round.
    let lists = vec![paths::units(), paths::services(), paths::machines()];
    let mut lists = tree.read_many(lists.into_iter().map(Read::Children).collect()).await?.into_iter();
    let mut snapshot = Snapshot::default();
    let (list, path) = (lists.next(), paths::units());
    let units = ids(list, UnitId::from_key, &path).or_else(|missing| snapshot.lacks(path, missing))?;
    let (list, path) = (lists.next(), paths::services());
    let services = ids(list, ServiceId::from_key, &path).or_else(|missing| snapshot.lacks(path, missing))?;
    let machines = ids(lists.next(), MachineId::from_key, &paths::machines())?;

    let mut reads = Vec::with_capacity(2 * services.len() + 4 * units.len() + 7 * machines.len());
    reads.extend(services.iter().flat_map(|&id| [paths::service(id), paths::exposed(id)]));
    reads.extend(machines.iter().flat_map(|&id| {
        let said = [paths::firewall_report(id), paths::machine_firewall(id)];
        let own = [paths::machine(id), paths::machine_agent(id), paths::machine_started(id)];
        own.into_iter().chain(said).chain([paths::machine_problem(id), paths::machine_stopping(id)])
    }));
    // And last: one that is still there had its service and its machine when those were read.
    reads.extend(units.iter().flat_map(|&id| {
        [paths::unit(id), paths::unit_ports(id), paths::unit_state(id), paths::unit_agent(id)]
    }));
    // What a machine makes for itself and its units, it can also keep from others: that must hide nothing else.
    let mut nodes = tree.data_of_each(reads).await?.into_iter();
    let mut node = || nodes.next().unwrap_or(Ok(None));

    for id in services {
        let (record, exposed) = (node(), node());
        if let Some(record) = read(record, |data| records::Service::parse(&paths::service(id), data)) {
            let exposed = read(exposed, |data| records::parse_exposed(&paths::exposed(id), data));
            snapshot.services.insert(id, SeenService { record, exposed });
        }
    }
    let mut stopping = Vec::new();
    for id in machines {
        let (record, agent, started) = (node(), node(), node());
        let said = [node(), node()].map(|node| node.map(|node| node.map(|node| node.data)));
        let (problem, stopped) = (node(), node());
        if matches!(&stopped, Ok(Some(list)) if list.children > 0) {
            stopping.push(id);
        }
        if let Some(record) = read(record, |data| records::Machine::parse(&paths::machine(id), data)) {
            let agent = presence(is_there(&agent), is_there(&started));
            let said_of_units =
                read(problem, |data| records::parse_machine_problem(&paths::machine_problem(id), data));
            // What it says may be of no use to anybody, but that it says something is.
            let problem = said_of_units.and_then(|said| said.unwrap_or_else(Some));
            snapshot.machines.insert(id, SeenMachine { record, agent, said, problem });
        }
    }
    for id in units {
        let (record, ports, state, agent) = (node(), node(), node(), node());
        if let Some(record) = read(record, |data| records::Unit::parse(&paths::unit(id), data)) {
            let state = read(state, |data| records::UnitState::parse(&paths::unit_state(id), data));
            let ports = ports.and_then(|ports| open_ports(id, ports));
            snapshot.units.insert(id, SeenUnit { record, ports, state, agent: is_there(&agent) });
        }
    }
    // Mostly there are none, and nothing more is read.
    if !stopping.is_empty() {
        let said = store::stopping::stopping(tree, &stopping).await?.into_iter();
        snapshot.stopping = said.map(|(machine, unit, said)| (unit, (machine, said))).collect();
    }
    add_lost_names(tree, &mut snapshot).await?;
    Ok(snapshot)
}

impl Snapshot {
    /// If this list is missing, status shows everything else.
    fn lacks<I>(&mut self, path: NodePath, error: Error) -> Result<Vec<I>, Error> {
        if error != Error::NoNode(path.clone()) {
            return Err(error);
        }
        self.missing.push(path);
        Ok(Vec::new())
    }
}

fn presence(here: bool, ever: bool) -> Presence {
    match (here, ever) {
        (true, _) => Presence::Here,
        (false, true) => Presence::Gone,
        (false, false) => Presence::Never,
    }
}

/// The ids among the children of a list. The lists are as old as the environment: one that is not there is no
/// empty list. A child that is no id is not ours.
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

/// What a znode says, if it is there.
fn read<R>(
    node: Held<Option<Node>>,
    parse: impl FnOnce(&[u8]) -> Result<R, store::Error>,
) -> Option<Held<R>> {
    match node {
        Ok(node) => node.map(|node| parse(&node.data).map_err(|problem| problem.to_string())),
        Err(refused) => Some(Err(refused)),
    }
}

/// One that may not be read is there.
fn is_there(node: &Held<Option<Node>>) -> bool {
    !matches!(node, Ok(None))
}

fn open_ports(id: UnitId, node: Option<Node>) -> Held<Vec<PortRange>> {
    match node {
        None => Ok(Vec::new()),
        Some(node) => match PortsDocument::parse(&node.data) {
            Ok(document) => Ok(document.ranges().collect()),
            Err(problem) => Err(format!("{}: {problem}", paths::unit_ports(id))),
        },
    }
}

/// Names of what cannot tell its own, from the index of names: three more round trips, only if something is corrupt.
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
        // An entry that cannot be read names nothing; what it should name is shown by its id.
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

/// The children of a list that are names at all.
fn names<N: FromStr>(list: Answer) -> Vec<N> {
    list.into_children().into_iter().flatten().filter_map(|name| name.parse().ok()).collect()
}
