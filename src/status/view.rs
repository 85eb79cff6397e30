//! From what the store holds to what is shown: which states, which ports, which machines remain under a scope. Pure.
//! What could not be read is shown as an error under the thing it belongs to, and hides nothing else.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::glob::Glob;
use crate::model::{Cidr, MachineId, PortRange, ServiceId, UnitId};
use crate::store::paths::NodePath;
use crate::store::records;
use crate::store::stopping::Stopping;

/// A record, or what is wrong with the znode that should hold it; the text names the znode.
pub type Held<T> = Result<T, String>;

/// Everything that status reads, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub services: BTreeMap<ServiceId, SeenService>,
    pub units: BTreeMap<UnitId, SeenUnit>,
    pub machines: BTreeMap<MachineId, SeenMachine>,
    /// Units that were removed and whose `stop` hook failed, as their machines say.
    pub stopping: BTreeMap<UnitId, (MachineId, Held<Stopping>)>,
    /// Of machines that beat; from whoever hears them.
    pub heard: BTreeMap<MachineId, Held<Heard>>,
    /// Names of those whose record does not tell, from the index of names.
    pub service_names: BTreeMap<ServiceId, String>,
    pub unit_names: BTreeMap<UnitId, String>,
    pub notes: Notes,
    /// Containers that every environment has and that are not in the store.
    pub missing: Vec<NodePath>,
}

/// What there is to say about the firewall, by whoever can read [`SeenMachine::said`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notes {
    /// What of a unit's ports is not as it was asked for, and why.
    pub units: BTreeMap<UnitId, Vec<String>>,
    /// What is wrong with a machine as a whole.
    pub machines: BTreeMap<MachineId, String>,
    /// Machines whose firewall is not changed, with what would be changed.
    pub dry_runs: BTreeMap<MachineId, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenService {
    pub record: Held<records::Service>,
    /// The flag, if there is one: the sources that it is limited to, none for the whole world.
    pub exposed: Option<Held<Vec<Cidr>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenUnit {
    pub record: Held<records::Unit>,
    pub ports: Held<Vec<PortRange>>,
    /// None until an agent has begun with the unit.
    pub state: Option<Held<records::UnitState>>,
    pub agent: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenMachine {
    pub record: Held<records::Machine>,
    pub agent: Presence,
    /// What was reported of its firewall, by a controller and by the machine itself, as it is in the tree.
    pub said: [Held<Option<Vec<u8>>>; 2],
    /// What keeps its agent from looking after its units, in its own words.
    pub problem: Option<String>,
}

/// Whether a machine's agent is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    Never,
    Here,
    Gone,
}

/// What is known of a machine's beats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heard {
    /// `ok`, `warned`, `dead`, `stopped` or `unknown`.
    pub health: String,
    /// What the state manager calls it.
    pub flag: String,
    pub last_beat: String,
}

/// What is shown. Services and units are keyed by name; one whose name is lost by its id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    pub machines: BTreeMap<MachineId, Machine>,
    /// Of machines that beat.
    pub heard: BTreeMap<MachineId, Held<Heard>>,
    pub services: BTreeMap<String, Service>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub state: MachineState,
    /// Only if there is something to say.
    pub problem: Option<String>,
    /// Its firewall is a dry run: what it would do, or nothing.
    pub dry_run: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineState {
    /// Not provisioned yet.
    Pending,
    Provisioned {
        agent_state: &'static str,
        dns_name: Option<String>,
        instance_id: String,
        instance_state: String,
    },
    Unreadable(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Service {
    pub charm: Option<String>,
    pub exposed: bool,
    /// Empty unless it is exposed to these and nobody else.
    pub exposed_to: Vec<Cidr>,
    pub units: BTreeMap<String, Unit>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// None if the record cannot be read.
    pub agent_state: Option<String>,
    pub machine: Option<MachineId>,
    /// None unless the service is exposed and the ports could be read.
    pub open_ports: Option<Vec<PortRange>>,
    pub public_address: Option<String>,
    /// What of its ports is not as it was asked for, and why. Mostly there is nothing to say.
    pub firewall: Vec<String>,
    /// The hook that failed, and the last lines of what it said.
    pub failure: Option<(String, Vec<String>)>,
    pub errors: Vec<String>,
}

/// Which part of the environment was asked for. No pattern at all means everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    services: Vec<Glob>,
    units: Vec<Glob>,
}

impl Scope {
    /// A pattern with a slash is for units, any other for services.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        let mut scope = Self::default();
        for pattern in patterns {
            let side = if pattern.contains('/') { &mut scope.units } else { &mut scope.services };
            side.push(Glob::new(pattern));
        }
        scope
    }

    fn is_everything(&self) -> bool {
        self.services.is_empty() && self.units.is_empty()
    }

    /// Cuts a whole view down: a service that matches stays with all its units, any other with those that match,
    /// and machines stay that a remaining unit is on.
    fn cut(&self, view: &mut View) {
        if self.is_everything() {
            return;
        }
        view.services.retain(|name, service| {
            if self.services.iter().any(|glob| glob.matches(name)) {
                return true;
            }
            service.units.retain(|unit, _| self.units.iter().any(|glob| glob.matches(unit)));
            !service.units.is_empty()
        });
        let used: BTreeSet<MachineId> = view
            .services
            .values()
            .flat_map(|service| service.units.values())
            .filter_map(|u| u.machine)
            .collect();
        view.machines.retain(|id, _| used.contains(id));
        view.heard.retain(|id, _| used.contains(id));
    }
}

impl View {
    pub fn new(snapshot: &Snapshot, scope: &Scope) -> Self {
        let machine = |(id, seen): (&MachineId, &SeenMachine)| {
            let problem = machine_problem(snapshot.notes.machines.get(id), seen);
            let heard = snapshot.heard.get(id).and_then(|heard| heard.as_ref().ok());
            let dry_run = snapshot.notes.dry_runs.get(id).cloned();
            (*id, Machine { state: machine_state(seen, heard), problem, dry_run })
        };
        let machines = snapshot.machines.iter().map(machine).collect();
        let mut view = Self { machines, heard: current_health(snapshot), services: BTreeMap::new() };
        for (id, seen) in &snapshot.services {
            view.services.insert(service_name(snapshot, *id), service(seen));
        }
        for (id, seen) in &snapshot.units {
            view.add_unit(snapshot, *id, seen);
        }
        for (id, (machine, said)) in &snapshot.stopping {
            view.add_stopping(snapshot, *id, *machine, said);
        }
        scope.cut(&mut view);
        view
    }

    fn add_unit(&mut self, snapshot: &Snapshot, id: UnitId, seen: &SeenUnit) {
        let name = match &seen.record {
            Ok(record) => record.name.to_string(),
            Err(_) => snapshot.unit_names.get(&id).cloned().unwrap_or_else(|| id.key()),
        };
        let service_id = seen.record.as_ref().ok().map(|record| record.service);
        let known = service_id.filter(|id| snapshot.services.contains_key(id));
        let service_name = match known {
            Some(id) => service_name(snapshot, id),
            None => name.split('/').next().unwrap_or_default().to_owned(),
        };
        let service = self.services.entry(service_name).or_insert_with(|| Service {
            error: Some(match service_id {
                Some(id) => format!("unit {name} is of {id}, which is not in the store"),
                None => "the service of this unit is not known".to_owned(),
            }),
            ..Service::default()
        });
        let firewall = snapshot.notes.units.get(&id).cloned().unwrap_or_default();
        let unit = Unit { firewall, ..unit(snapshot, seen, service.exposed) };
        service.units.insert(name, unit);
    }

    /// One that is a unit no more, of a service that may be gone as well.
    fn add_stopping(&mut self, snapshot: &Snapshot, id: UnitId, machine: MachineId, said: &Held<Stopping>) {
        let said = said.as_ref();
        let (service, name) = said.map_or_else(
            |_| (id.key(), id.key()),
            |said| (said.name.service().to_string(), said.name.to_string()),
        );
        let here = snapshot.machines.get(&machine).is_some_and(|seen| seen.agent == Presence::Here);
        let service = self.services.entry(service).or_default();
        let unit = Unit {
            agent_state: said.ok().map(|said| agent_state(Some(&said.state.label), here)),
            machine: snapshot.machines.contains_key(&machine).then_some(machine),
            open_ports: service.exposed.then(Vec::new),
            public_address: address(snapshot, machine),
            firewall: Vec::new(),
            failure: said.ok().and_then(|said| said.state.failure.clone()),
            errors: said.err().cloned().into_iter().collect(),
        };
        service.units.entry(name).or_insert(unit);
    }

    /// The same without when machines last beat, which is something else every few seconds and no news.
    pub fn without_last_beats(&self) -> Self {
        let mut view = self.clone();
        view.heard.values_mut().flatten().for_each(|heard| heard.last_beat.clear());
        view
    }

    /// What could not be read of a machine: its record, its beats.
    pub fn machine_errors(&self, id: MachineId) -> impl Iterator<Item = &String> {
        let record = self.machines.get(&id).and_then(|machine| match &machine.state {
            MachineState::Unreadable(problem) => Some(problem),
            MachineState::Pending | MachineState::Provisioned { .. } => None,
        });
        record.into_iter().chain(self.heard.get(&id).and_then(|heard| heard.as_ref().err()))
    }

    /// Everything that could not be read, each once.
    pub fn errors(&self) -> BTreeSet<&str> {
        let machines = self.machines.keys().flat_map(|id| self.machine_errors(*id));
        let services = self.services.values().flat_map(|service| {
            let units = service.units.values().flat_map(|unit| &unit.errors);
            service.error.iter().chain(units)
        });
        machines.chain(services).map(String::as_str).collect()
    }
}

fn service_name(snapshot: &Snapshot, id: ServiceId) -> String {
    match snapshot.services.get(&id).map(|seen| &seen.record) {
        Some(Ok(record)) => record.name.to_string(),
        _ => snapshot.service_names.get(&id).cloned().unwrap_or_else(|| id.key()),
    }
}

fn service(seen: &SeenService) -> Service {
    let mut errors = Vec::new();
    let record = seen.record.as_ref().map_err(|problem| errors.push(problem.clone())).ok();
    let exposed_to = match &seen.exposed {
        Some(Ok(sources)) => sources.clone(),
        Some(Err(problem)) => {
            errors.push(problem.clone());
            Vec::new()
        }
        None => Vec::new(),
    };
    Service {
        charm: record.map(|record| record.charm.to_string()),
        exposed: seen.exposed.is_some(),
        exposed_to,
        units: BTreeMap::new(),
        error: (!errors.is_empty()).then(|| errors.join("; ")),
    }
}

fn unit(snapshot: &Snapshot, seen: &SeenUnit, exposed: bool) -> Unit {
    let mut errors = Vec::new();
    let record = seen.record.as_ref().map_err(|problem| errors.push(problem.clone())).ok();
    let machine = record.and_then(|record| record.machine).filter(|id| snapshot.machines.contains_key(id));
    let public_address = machine.and_then(|id| address(snapshot, id));
    let open_ports = match &seen.ports {
        Ok(ports) => exposed.then(|| ports.clone()),
        Err(problem) => {
            errors.push(problem.clone());
            None
        }
    };
    let state = match &seen.state {
        Some(Ok(state)) => Some(state),
        Some(Err(problem)) => {
            errors.push(problem.clone());
            None
        }
        None => None,
    };
    let readable = record.is_some() && !matches!(seen.state, Some(Err(_)));
    let agent_state = readable.then(|| agent_state(state.map(|state| state.label.as_str()), seen.agent));
    let failure = state.and_then(|state| state.failure.clone());
    Unit { agent_state, machine, open_ports, public_address, firewall: Vec::new(), failure, errors }
}

fn address(snapshot: &Snapshot, machine: MachineId) -> Option<String> {
    snapshot.machines.get(&machine)?.record.as_ref().ok()?.addresses.first().cloned()
}

/// The workflow state is what a unit's agent wrote last; with the agent gone nobody vouches for it.
fn agent_state(workflow: Option<&str>, agent: bool) -> String {
    match (workflow, agent) {
        (None, _) => "pending",
        (Some(state), true) => state,
        (Some(_), false) => "down",
    }
    .to_owned()
}

/// The health of machines. An agent that runs although its machine has signed off has been started
/// again and has not sent its first beat yet: its health is not known.
fn current_health(snapshot: &Snapshot) -> BTreeMap<MachineId, Held<Heard>> {
    let runs = |id| snapshot.machines.get(id).is_some_and(|seen| seen.agent == Presence::Here);
    let mut heard = snapshot.heard.clone();
    for (_, heard) in heard.iter_mut().filter(|(id, _)| runs(*id)) {
        if let Ok(heard) = heard
            && heard.health == "stopped"
        {
            heard.health = "unknown".to_owned();
        }
    }
    heard
}

/// Whether somebody hears from it is a better word than its own.
fn machine_life(agent: Presence, heard: Option<&Heard>) -> &'static str {
    match (heard.map(|heard| heard.health.as_str()), agent) {
        (Some("ok" | "warned"), _) => "running",
        (Some("dead"), _) | (_, Presence::Gone) => "down",
        (_, Presence::Here) => "running",
        (_, Presence::Never) => "not-started",
    }
}

/// Of an agent that is gone nobody knows what would keep it.
fn machine_problem(firewall: Option<&String>, seen: &SeenMachine) -> Option<String> {
    let own = seen.problem.as_ref().filter(|_| seen.agent == Presence::Here);
    let all: Vec<&str> = firewall.into_iter().chain(own).map(String::as_str).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

fn machine_state(seen: &SeenMachine, heard: Option<&Heard>) -> MachineState {
    match &seen.record {
        Err(problem) => MachineState::Unreadable(problem.clone()),
        Ok(record) => match &record.instance_id {
            None => MachineState::Pending,
            Some(instance_id) => MachineState::Provisioned {
                agent_state: machine_life(seen.agent, heard),
                dns_name: record.addresses.first().cloned(),
                instance_id: instance_id.to_string(),
                instance_state: text(&record.rest, "instance-state").unwrap_or("unknown").to_owned(),
            },
        },
    }
}

fn text<'a>(rest: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    rest.get(key).and_then(Value::as_str)
}

mod document;
