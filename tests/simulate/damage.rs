//! Damage to znodes: invalid data, records of other versions, deleted znodes, and their repair.

use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{PortRange, UnitId};
use portcullis::store::UnitPorts;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{self, Tree as _, Write};

use crate::faults::Mishap;
use crate::oracle::Exposed;
use crate::port_bits::{ARGUMENTS, PortBits};
use crate::world::World;

const BETWEEN_DELETIONS: Duration = Duration::from_millis(100);

/// Data that is invalid as a record, a list of ports, a flag and a report.
fn garbage(how: usize, original: &[u8]) -> (Vec<u8>, Option<Mishap>) {
    let text = |text: &str| (text.as_bytes().to_vec(), None);
    match how % 7 {
        0 => text("{"),
        1 => text("[1, 2"),
        2 => text("{\"open\": 7, \"name\": 7, \"to\": [], \"instance-id\": 7, \"granted\": 7}"),
        3 => text("\u{0}\u{1}\u{2}"),
        4 if original.len() > 8 => (original[..original.len() / 2].to_vec(), Some(Mishap::Truncated)),
        5 => {
            let entries = vec!["{\"port\":80,\"proto\":\"tcp\"}"; 1001].join(",");
            (
                format!("{{\"to\": 7, \"name\": 7, \"instance-id\": 7, \"open\":[{entries}]}}").into_bytes(),
                Some(Mishap::TooLarge),
            )
        }
        _ => (
            format!("{{\"open\":{}{}}}", "[".repeat(200), "]".repeat(200)).into_bytes(),
            Some(Mishap::DeeplyNested),
        ),
    }
}

/// Encodes ports as the first Juju or a later version of this project would.
fn other_ports(ranges: &[PortRange], older: bool) -> Vec<u8> {
    if older && ranges.is_empty() {
        return b"null".to_vec();
    }
    let entries = ranges.iter().map(|range| {
        let (from, to, proto) = (range.from(), range.to(), range.proto().name());
        let to = if from == to { String::new() } else { format!("\"to\": {to}, ") };
        let new = if older { "" } else { ", \"label\": {\"of\": \"later\"}" };
        format!("{{\"port\": {from}, {to}\"proto\": {proto:?}{new}}}")
    });
    if older {
        return entries.fold("open:\n".to_owned(), |all, entry| format!("{all}- {entry}\n")).into_bytes();
    }
    format!("{{\"later\": [1], \"open\": [{}]}}", entries.collect::<Vec<_>>().join(", ")).into_bytes()
}

impl World {
    /// Replaces the data of a znode, if it exists. Returns the previous data.
    async fn overwrite(&self, path: NodePath, data: Vec<u8>) -> Vec<u8> {
        match self.operator.tree().get(&path).await {
            Ok(node) => {
                let write = Write::SetIfVersion { path, data, version: node.version };
                self.operator.tree().write(vec![write]).await.expect("written");
                node.data
            }
            Err(tree::Error::NoNode(_)) => Vec::new(),
            Err(err) => panic!("{err}"),
        }
    }

    /// Overwrites a znode of the kind that `what` selects with invalid data.
    pub(crate) async fn corrupt(&mut self, what: Mishap, index: usize, how: usize) {
        let path = {
            let shared = self.interceptor.lock();
            let oracle = &shared.oracle;
            let unit = oracle.units.iter().nth(index % oracle.units.len().max(1));
            let service = oracle.services.values().nth(index % oracle.services.len().max(1));
            let machine = oracle.machines.keys().nth(index % oracle.machines.len()).copied();
            match what {
                // The ports znode does not exist until a hook opens a port.
                Mishap::CorruptPorts => unit.map(|(id, _)| paths::unit_ports(*id)),
                Mishap::CorruptUnit => unit.map(|(id, _)| paths::unit(*id)),
                Mishap::CorruptFlag => {
                    service.filter(|service| service.exposed != Exposed::No).map(|s| paths::exposed(s.id))
                }
                Mishap::CorruptMachine => machine.map(paths::machine),
                _ => machine.map(paths::firewall_report),
            }
        };
        let Some(path) = path else { return };
        let Ok(node) = self.operator.tree().get(&path).await else { return };
        let (data, special) = garbage(how, &node.data);
        self.count_mishap(what);
        special.into_iter().for_each(|special| self.count_mishap(special));
        self.freeze_units(what, index);
        self.damaged.entry(path.clone()).or_insert(node.data);
        self.overwrite(path, data).await;
        let mut shared = self.interceptor.lock();
        if what == Mishap::CorruptReport {
            // Agents detect this only at a resync, or when they write the report.
            shared.record_resync_fault();
        }
        shared.changed();
    }

    /// Whether the service exists and its znodes were not deleted.
    pub(crate) fn is_whole(&self, service: usize) -> bool {
        let path =
            self.interceptor.lock().oracle.services.get(&service).map(|service| paths::service(service.id));
        path.is_some_and(|path| self.deleted_nodes.iter().all(|(deleted, _)| *deleted != path))
    }

    /// Whether the unit's znodes were deleted.
    pub(crate) fn has_deleted_nodes(&self, unit: UnitId) -> bool {
        self.deleted_nodes.iter().any(|(path, _)| *path == paths::unit(unit))
    }

    /// Deletes the znodes of a unit or a service without removing it.
    pub(crate) async fn delete_nodes(&mut self, what: Mishap, index: usize) {
        let top = {
            let shared = self.interceptor.lock();
            let oracle = &shared.oracle;
            match what {
                Mishap::UnitNodesDeleted => {
                    oracle.units.keys().nth(index % oracle.units.len().max(1)).map(|id| paths::unit(*id))
                }
                _ => {
                    let service = oracle.services.values().nth(index % oracle.services.len().max(1));
                    service.filter(|service| service.exposed != Exposed::No).map(|s| paths::service(s.id))
                }
            }
        };
        let Some(top) = top.filter(|top| self.deleted_nodes.iter().all(|(path, _)| path != top)) else {
            return;
        };
        self.count_mishap(what);
        self.freeze_units(what, index);
        let tree = self.operator.tree();
        let mut found = vec![top.clone()];
        for name in tree.children(&top).await.expect("children") {
            found.push(top.child(&name));
        }
        for path in &found {
            self.deleted_nodes.push((path.clone(), tree.get(path).await.expect("a node").data));
        }
        for path in found.into_iter().rev() {
            tree.write(vec![Write::Delete { path }]).await.expect("deleted");
            // Time for a pass that finds a part of the znodes.
            tokio::time::sleep(BETWEEN_DELETIONS).await;
        }
        self.interceptor.lock().changed();
    }

    /// Restores the deleted znodes of units and services that were not removed, parents first.
    async fn restore_missing(&mut self) {
        let acl = self.operator.info().roles.operators();
        for (path, data) in std::mem::take(&mut self.deleted_nodes) {
            let there = {
                let shared = self.interceptor.lock();
                let oracle = &shared.oracle;
                let below = |top: NodePath| path.as_str().starts_with(top.as_str());
                oracle.units.keys().any(|id| below(paths::unit(*id)))
                    || oracle.services.values().any(|service| below(paths::service(service.id)))
            };
            if there {
                let write = Write::create(path, data, acl.clone());
                self.operator.tree().write(vec![write]).await.expect("put back");
            }
        }
    }

    /// Marks the units as unreadable in the oracle: the ports that are open for them alone must
    /// stay open.
    fn freeze_units(&mut self, what: Mishap, index: usize) {
        let interceptor = self.interceptor.clone();
        let mut shared = interceptor.lock();
        let oracle = &mut shared.oracle;
        let ids: Vec<UnitId> = match what {
            Mishap::CorruptPorts | Mishap::CorruptUnit | Mishap::UnitNodesDeleted => {
                oracle.units.keys().nth(index % oracle.units.len()).into_iter().copied().collect()
            }
            Mishap::CorruptFlag | Mishap::ServiceNodesDeleted => {
                let service = *oracle.services.keys().nth(index % oracle.services.len()).expect("a service");
                oracle.services.get_mut(&service).expect("a service").corrupt = true;
                oracle.units.iter().filter(|(_, unit)| unit.service == service).map(|(id, _)| *id).collect()
            }
            Mishap::CorruptMachine => {
                let machine = *oracle.machines.keys().nth(index % oracle.machines.len()).expect("a machine");
                oracle.machines.get_mut(&machine).expect("a machine").corrupt = true;
                return;
            }
            _ => return,
        };
        drop(shared);
        for id in ids {
            let machine = interceptor.lock().oracle.units[&id].machine;
            let open = interceptor.open_on(machine).unwrap_or(PortBits::NONE);
            let mut shared = interceptor.lock();
            let already = shared.oracle.units[&id].corrupt_ports || shared.oracle.units[&id].corrupt_record;
            let kept = if already { shared.oracle.units[&id].kept } else { shared.oracle.alone(id, open) };
            let unit = shared.oracle.units.get_mut(&id).expect("a unit");
            unit.kept = kept;
            let deleted = what == Mishap::UnitNodesDeleted;
            unit.corrupt_ports |= what == Mishap::CorruptPorts || deleted;
            unit.corrupt_record |= what == Mishap::CorruptUnit || deleted;
        }
    }

    /// Restores all damaged znodes.
    pub(crate) async fn repair_store(&mut self) {
        self.restore_missing().await;
        for (path, data) in std::mem::take(&mut self.damaged) {
            if !path.as_str().ends_with("/ports") && !path.as_str().starts_with("/controller") {
                self.overwrite(path, data).await;
            }
        }
        let ports: Vec<(UnitId, Vec<usize>)> = {
            let shared = self.interceptor.lock();
            let damaged = shared.oracle.units.iter().filter(|(_, unit)| unit.corrupt_ports);
            damaged.map(|(id, unit)| (*id, unit.ports.clone())).collect()
        };
        for (id, ports) in ports {
            self.overwrite(paths::unit_ports(id), Vec::new()).await;
            for argument in ports {
                let range = parse_argument(ARGUMENTS[argument]).expect("a port");
                UnitPorts::new(self.operator.tree(), id).open(range).await.expect("stored");
            }
        }
        let mut shared = self.interceptor.lock();
        shared.oracle.units.values_mut().for_each(|unit| {
            unit.corrupt_ports = false;
            unit.corrupt_record = false;
        });
        shared.oracle.services.values_mut().for_each(|service| service.corrupt = false);
        shared.oracle.machines.values_mut().for_each(|machine| machine.corrupt = false);
        shared.changed();
    }

    /// Rewrites records with the same content in the format of another version.
    pub(crate) async fn other_version(&mut self, index: usize, older: bool) {
        let found = {
            let shared = self.interceptor.lock();
            let units = &shared.oracle.units;
            units.iter().nth(index % units.len().max(1)).map(|(id, unit)| (*id, unit.clone()))
        };
        let Some((id, unit)) = found.filter(|(_, unit)| !unit.corrupt_ports) else { return };
        self.count_mishap(if older { Mishap::OlderRecord } else { Mishap::NewerRecord });
        let ranges: Vec<PortRange> =
            unit.ports.iter().map(|n| parse_argument(ARGUMENTS[*n]).expect("a port")).collect();
        self.overwrite(paths::unit_ports(id), other_ports(&ranges, older)).await;
        if older || unit.corrupt_record || !self.is_whole(unit.service) {
            return;
        }
        let (service, machine) = {
            let shared = self.interceptor.lock();
            (shared.oracle.services[&unit.service].clone(), shared.oracle.machines[&unit.machine])
        };
        let mut records = vec![paths::unit(id), paths::service(service.id)];
        if !machine.corrupt {
            records.push(paths::machine(unit.machine));
        }
        for path in records {
            let node = self.operator.tree().get(&path).await.expect("a record");
            let Ok(serde_json::Value::Object(mut map)) = serde_json::from_slice(&node.data) else { continue };
            map.insert("later".to_owned(), serde_json::json!({"a": [1, {"b": null}]}));
            self.overwrite(path, serde_json::Value::Object(map).to_string().into_bytes()).await;
        }
    }
}
