//! The services of an environment with their units, and removed units whose `stop` hook failed.
//! Pure.

use std::collections::BTreeMap;

use super::Section;
use crate::model::{MachineId, ServiceId, UnitId};
use crate::status::view::{Service, Unit, View};
use crate::store::Snapshot;
use crate::store::failed_stops::FailedStop;
use crate::store::snapshot::{Presence, StoredService, StoredUnit};

#[derive(Debug)]
pub struct Services<'a>(pub &'a Snapshot);

impl Section for Services<'_> {
    fn add_to(&self, view: &mut View) {
        let Self(snapshot) = self;
        for (id, stored) in &snapshot.services {
            view.services.insert(service_name(snapshot, *id), service(stored));
        }
        for (id, stored) in &snapshot.units {
            add_unit(view, snapshot, *id, stored);
        }
        for (id, (machine, report)) in &snapshot.failed_stops {
            add_failed_stop(view, snapshot, *id, *machine, report.as_ref());
        }
    }
}

fn add_unit(view: &mut View, snapshot: &Snapshot, id: UnitId, stored: &StoredUnit) {
    let name = match &stored.record {
        Ok(record) => record.name.to_string(),
        Err(_) => snapshot.unit_names.get(&id).cloned().unwrap_or_else(|| id.key()),
    };
    let service_id = stored.record.as_ref().ok().map(|record| record.service);
    let known = service_id.filter(|id| snapshot.services.contains_key(id));
    let service_name = match known {
        Some(id) => service_name(snapshot, id),
        None => name.split('/').next().unwrap_or_default().to_owned(),
    };
    let service = view.services.entry(service_name).or_insert_with(|| Service {
        error: Some(match service_id {
            Some(id) => format!("unit {name} is of {id}, which is not in the store"),
            None => "the service of this unit is not known".to_owned(),
        }),
        ..Service::default()
    });
    let unit = unit(snapshot, id, stored, service.exposed);
    service.units.insert(name, unit);
}

/// Adds a removed unit whose `stop` hook failed. Its service may be gone as well.
fn add_failed_stop(
    view: &mut View,
    snapshot: &Snapshot,
    id: UnitId,
    machine: MachineId,
    report: Result<&FailedStop, &String>,
) {
    let (service, name) = report.map_or_else(
        |_| (id.key(), id.key()),
        |report| (report.name.service().to_string(), report.name.to_string()),
    );
    let here = snapshot.machines.get(&machine).is_some_and(|stored| stored.agent == Presence::Here);
    let service = view.services.entry(service).or_default();
    let unit = Unit {
        id: None,
        agent_state: report.ok().map(|report| agent_state(Some(&report.state.label), here)),
        machine: snapshot.machines.contains_key(&machine).then_some(machine),
        open_ports: service.exposed.then(Vec::new),
        public_address: address(snapshot, machine),
        firewall: Vec::new(),
        failure: report.ok().and_then(|report| report.state.failure.clone()),
        errors: report.err().cloned().into_iter().collect(),
    };
    service.units.entry(name).or_insert(unit);
}

fn service_name(snapshot: &Snapshot, id: ServiceId) -> String {
    match snapshot.services.get(&id).map(|stored| &stored.record) {
        Some(Ok(record)) => record.name.to_string(),
        _ => snapshot.service_names.get(&id).cloned().unwrap_or_else(|| id.key()),
    }
}

fn service(stored: &StoredService) -> Service {
    let mut errors = Vec::new();
    let record = stored.record.as_ref().map_err(|problem| errors.push(problem.clone())).ok();
    let exposed_to = match &stored.exposed {
        Some(Ok(sources)) => sources.clone(),
        Some(Err(problem)) => {
            errors.push(problem.clone());
            Vec::new()
        }
        None => Vec::new(),
    };
    Service {
        charm: record.map(|record| record.charm.to_string()),
        exposed: stored.exposed.is_some(),
        exposed_to,
        units: BTreeMap::new(),
        error: (!errors.is_empty()).then(|| errors.join("; ")),
    }
}

fn unit(snapshot: &Snapshot, id: UnitId, stored: &StoredUnit, exposed: bool) -> Unit {
    let mut errors = Vec::new();
    let record = stored.record.as_ref().map_err(|problem| errors.push(problem.clone())).ok();
    let machine = record.and_then(|record| record.machine).filter(|id| snapshot.machines.contains_key(id));
    let public_address = machine.and_then(|id| address(snapshot, id));
    let open_ports = match &stored.ports {
        Ok(ports) => exposed.then(|| ports.clone()),
        Err(problem) => {
            errors.push(problem.clone());
            None
        }
    };
    let state = match &stored.state {
        Some(Ok(state)) => Some(state),
        Some(Err(problem)) => {
            errors.push(problem.clone());
            None
        }
        None => None,
    };
    let readable = record.is_some() && !matches!(stored.state, Some(Err(_)));
    let agent_state = readable.then(|| agent_state(state.map(|state| state.label.as_str()), stored.agent));
    let failure = state.and_then(|state| state.failure.clone());
    let id = Some(id);
    Unit { id, agent_state, machine, open_ports, public_address, firewall: Vec::new(), failure, errors }
}

fn address(snapshot: &Snapshot, machine: MachineId) -> Option<String> {
    snapshot.machines.get(&machine)?.address()
}

/// The state that a unit's agent wrote last, unless the agent is gone.
fn agent_state(workflow: Option<&str>, agent: bool) -> String {
    match (workflow, agent) {
        (None, _) => "pending",
        (Some(state), true) => state,
        (Some(_), false) => "down",
    }
    .to_owned()
}
