//! The content of status: services with their units, and machines, restricted to a scope. Pure. An
//! unreadable record is shown as an error of the object that it belongs to, and hides no other.

use std::collections::{BTreeMap, BTreeSet};

use super::sections::{Health, Section};
use crate::model::{Cidr, Glob, MachineId, PortRange, UnitId};
use crate::store::fleet::NodeRecords;
use crate::store::snapshot::{Presence, Readable};

/// Everything that is shown. Services and units are keyed by name, or by id if the name is
/// unreadable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    pub machines: BTreeMap<MachineId, Machine>,
    /// Only of machines that send beats.
    pub health: BTreeMap<MachineId, Readable<Health>>,
    pub services: BTreeMap<String, Service>,
    /// The nodes of the fleet; none without a manager.
    pub nodes: NodeRecords,
    /// Why the nodes cannot be read.
    pub nodes_error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub state: MachineState,
    pub agent: Presence,
    pub problem: Option<String>,
    /// The name that the operator gave to it.
    pub name: Option<String>,
    /// Its firewall is a dry run: the changes that it would make, or an empty text.
    pub dry_run: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineState {
    /// Not provisioned yet.
    Pending,
    /// A plain machine, which no controller launched. Its agent has run.
    Plain {
        agent_state: &'static str,
        dns_name: Option<String>,
        /// The host name that the agent reported.
        hostname: Option<String>,
    },
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
    /// The only sources that it is exposed to; empty for the whole world.
    pub exposed_to: Vec<Cidr>,
    pub units: BTreeMap<String, Unit>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// `None` for a removed unit whose `stop` hook failed.
    pub id: Option<UnitId>,
    /// `None` if the record cannot be read.
    pub agent_state: Option<String>,
    pub machine: Option<MachineId>,
    /// `None` unless the service is exposed and the ports could be read.
    pub open_ports: Option<Vec<PortRange>>,
    pub public_address: Option<String>,
    /// Ports that are not as requested, and why. Usually empty.
    pub firewall: Vec<String>,
    /// The hook that failed, and the last lines of its output.
    pub failure: Option<(String, Vec<String>)>,
    pub errors: Vec<String>,
}

/// The services and units to show. No pattern at all means everything.
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

    /// Cuts a view down. A service that matches keeps all its units, any other those that match;
    /// machines of the remaining units stay.
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
        view.health.retain(|id, _| used.contains(id));
        view.nodes.retain(|_, node| node.machine.is_some_and(|id| used.contains(&MachineId::new(id))));
    }
}

impl View {
    /// Builds the view from its sections, in order, and cuts it down to the scope.
    pub fn new(sections: &[&dyn Section], scope: &Scope) -> Self {
        let mut view = Self::default();
        for section in sections {
            section.add_to(&mut view);
        }
        scope.cut(&mut view);
        view
    }

    /// A copy without the times of the last beats, which change every few seconds.
    pub fn without_last_beats(&self) -> Self {
        let mut view = self.clone();
        view.health.values_mut().flatten().for_each(|health| health.last_beat.clear());
        view
    }

    /// The unreadable parts of a machine: its record, its beats.
    pub fn machine_errors(&self, id: MachineId) -> impl Iterator<Item = &String> {
        let record = self.machines.get(&id).and_then(|machine| match &machine.state {
            MachineState::Unreadable(problem) => Some(problem),
            MachineState::Pending | MachineState::Plain { .. } | MachineState::Provisioned { .. } => None,
        });
        record.into_iter().chain(self.health.get(&id).and_then(|health| health.as_ref().err()))
    }

    /// Every problem with unreadable records, each once.
    pub fn errors(&self) -> BTreeSet<&str> {
        let machines = self.machines.keys().flat_map(|id| self.machine_errors(*id));
        let services = self.services.values().flat_map(|service| {
            let units = service.units.values().flat_map(|unit| &unit.errors);
            service.error.iter().chain(units)
        });
        machines.chain(services).chain(&self.nodes_error).map(String::as_str).collect()
    }
}

mod document;
