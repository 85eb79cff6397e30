//! Reads the part of the tree that one machine may read: its own node, the units on its list, and
//! the exposed flags of their services, using the service credentials stored with those units. A
//! read is complete or fails; data that is invalid or may not be read is represented as unreadable,
//! never as empty. Decisions do not belong here.

use std::collections::BTreeMap;

use futures_util::future::try_join_all;

use super::observe::{Exposure, Readable, UnitFacts, View, exposure, readable, unit_facts};
use crate::model::{MachineId, ServiceId, UnitId};
use crate::mutant;
use crate::store::paths::{self, NodePath};
use crate::store::records;
use crate::store::tree::{Answer, Error, Node, Read, Tree};

/// Reads everything that concerns the machine.
///
/// # Errors
/// [`Error::NoNode`] if there is no such machine, and failures of the store.
pub async fn observe<T: Tree>(tree: &T, machine: MachineId) -> Result<View, Error> {
    let reads = vec![Read::Data(paths::machine(machine)), Read::Children(paths::machine_units(machine))];
    let mut answers = tree.read_many(reads).await?.into_iter();
    let gone = |path| move || Error::NoNode(path);
    let record = answers.next().and_then(Answer::into_data).ok_or_else(gone(paths::machine(machine)))?;
    let names =
        answers.next().and_then(Answer::into_children).ok_or_else(gone(paths::machine_units(machine)))?;
    let mut view = View::default();
    view.include_zxid(Some(&record));
    let record = readable(records::Machine::parse(&paths::machine(machine), &record.data));
    view.machines.insert(machine, record);
    let ids: Vec<UnitId> = names.iter().filter_map(|name| UnitId::from_key(name).ok()).collect();
    let secrets = read_units(tree, machine, &ids, &mut view).await?;
    add_missing_units(tree, machine, &ids, &mut view).await?;
    read_exposed_flags(tree, &secrets, &mut view).await?;
    Ok(view)
}

/// The paths to watch for changes that concern the machine, according to `view`.
pub fn paths_to_watch(view: &View, machine: MachineId) -> Vec<NodePath> {
    let mut paths = vec![paths::machine(machine)];
    paths.extend(view.units.iter().map(|(id, _)| paths::unit(id)));
    paths.extend(view.services.keys().map(|id| paths::exposed(*id)));
    paths
}

/// Returns the units' credentials as they are in the tree.
async fn read_units<T: Tree>(
    tree: &T,
    machine: MachineId,
    ids: &[UnitId],
    view: &mut View,
) -> Result<BTreeMap<UnitId, Readable<Node>>, Error> {
    let paths =
        ids.iter().flat_map(|&id| [paths::unit(id), paths::unit_ports(id), paths::unit_credentials(id)]);
    let mut answers = tree.data_of_each(paths.collect()).await?.into_iter();
    let mut next = || answers.next().unwrap_or(Ok(None));
    let mut secrets = BTreeMap::new();
    for &id in ids {
        let (record, ports, secret) = (next(), next(), next());
        for node in [&record, &ports].into_iter().flatten() {
            view.include_zxid(node.as_ref());
        }
        let unit = match (record, &ports) {
            // Removed since it was listed, or missing.
            (Ok(None), _) => continue,
            (Ok(Some(record)), Ok(ports)) => unit_facts(id, &record, ports.as_ref()),
            (Ok(Some(record)), Err(reason)) => {
                UnitFacts { ports: Err(reason.clone()), ..unit_facts(id, &record, None) }
            }
            (Err(reason), _) => {
                UnitFacts { record: Err(reason.clone()), ports: Err(reason), listed_on: None }
            }
        };
        if matches!(ports, Ok(None)) {
            view.without_ports.insert(id);
        }
        // The machine's own list shows where a unit with an unreadable record is.
        view.units.insert(id, UnitFacts { listed_on: Some(machine), ..unit });
        if let Some(secret) = secret.transpose() {
            secrets.insert(id, secret);
        }
    }
    Ok(secrets)
}

/// Adds units that have no record and are still on the machine's list. `juju` removes a unit and
/// its entry on the list in one transaction, so `juju` did not remove these units: they keep their
/// ports.
async fn add_missing_units<T: Tree>(
    tree: &T,
    machine: MachineId,
    listed: &[UnitId],
    view: &mut View,
) -> Result<(), Error> {
    let unread: Vec<UnitId> = listed.iter().copied().filter(|id| view.units.get(*id).is_none()).collect();
    if unread.is_empty() {
        return Ok(());
    }
    let path = paths::machine_units(machine);
    let names = tree.read_many(vec![Read::Children(path.clone())]).await?.into_iter().next();
    let names = names.and_then(Answer::into_children).ok_or(Error::NoNode(path))?;
    for id in unread.into_iter().filter(|id| names.contains(&id.key())) {
        let reason = format!("{} is missing from the store, and its machine lists it", paths::unit(id));
        let facts = UnitFacts { record: Err(reason.clone()), ports: Err(reason), listed_on: Some(machine) };
        view.units.insert(id, facts);
        view.missing_units.insert(id);
    }
    Ok(())
}

/// Adds the units among `had` that are not on the machine's list and whose record still names the
/// machine. `juju` removes the two in one transaction, so `juju` did not remove these units: they
/// keep their ports.
pub(super) async fn add_unlisted_units<T: Tree>(
    tree: &T,
    machine: MachineId,
    had: impl Iterator<Item = UnitId>,
    view: &mut View,
) -> Result<(), Error> {
    let unlisted: Vec<UnitId> = had.filter(|id| view.units.get(*id).is_none()).collect();
    if unlisted.is_empty() || mutant!(MissingRecordCountsAsRemoved) {
        return Ok(());
    }
    let records = tree.data_of_each(unlisted.iter().map(|id| paths::unit(*id)).collect()).await?;
    for (id, record) in unlisted.into_iter().zip(records) {
        let (path, entry) = (paths::unit(id), paths::machine_units(machine).child(&id.key()));
        let reason = match record.map(|record| record.map(|node| records::Unit::parse(&path, &node.data))) {
            Ok(None) => continue,
            Ok(Some(Ok(unit))) if unit.machine != Some(machine) => continue,
            Ok(Some(Ok(_))) => format!("{entry} is missing from the store, and {path} names this machine"),
            Ok(Some(Err(err))) => err.to_string(),
            Err(reason) => reason,
        };
        let facts = UnitFacts { record: Err(reason.clone()), ports: Err(reason), listed_on: Some(machine) };
        view.units.insert(id, facts);
        view.unlisted_units.insert(id);
    }
    Ok(())
}

/// Reads the exposed flags of the units' services. An unreadable flag counts as present with
/// unknown sources.
async fn read_exposed_flags<T: Tree>(
    tree: &T,
    secrets: &BTreeMap<UnitId, Readable<Node>>,
    view: &mut View,
) -> Result<(), Error> {
    let services: BTreeMap<ServiceId, UnitId> =
        view.units.iter().filter_map(|(id, unit)| unit.service().map(|service| (service, id))).collect();
    let mut unproved: BTreeMap<ServiceId, String> = BTreeMap::new();
    for (service, unit) in &services {
        let path = paths::unit_credentials(*unit);
        let secret = match secrets.get(unit) {
            Some(Ok(node)) => readable(records::parse_service_credential(&path, &node.data)),
            Some(Err(reason)) => Err(reason.clone()),
            None => Ok(None),
        };
        match secret {
            Ok(Some(secret)) => tree.prove(&secret).await?,
            // The flag may be readable without the credential; otherwise the read returns the
            // reason.
            Ok(None) => {}
            Err(reason) => drop(unproved.insert(*service, reason)),
        }
    }
    // The machine may not read the service, but it can check that the service exists. If the
    // service is missing, `juju unexpose` did not remove the flag.
    let records: Vec<NodePath> = services.keys().map(|id| paths::service(*id)).collect();
    let records = try_join_all(records.iter().map(|path| tree.stat(path))).await?;
    let flags = services.keys().map(|id| paths::exposed(*id)).collect();
    let flags = tree.data_of_each(flags).await?;
    for ((service, record), flag) in services.keys().zip(records).zip(flags) {
        let Some(record) = record else { continue };
        view.include_zxid(flag.as_ref().ok().and_then(Option::as_ref));
        let seen = match flag {
            Ok(flag) => exposure(&paths::exposed(*service), flag.as_ref()),
            Err(reason) => Exposure::To(Err(unproved.remove(service).unwrap_or(reason))),
        };
        view.include_service(*service, record, seen);
    }
    Ok(())
}

#[cfg(test)]
#[path = "observe_local_tests.rs"]
mod tests;
