//! Where everything is kept. Every znode path is built here and nowhere else; no I/O.
//!
//! A [`NodePath`] is relative to the environment's root, which is the chroot of the connect string or `/`.

use crate::model::{MachineId, ServiceId, ServiceName, UnitId, UnitName};
use std::fmt;

/// The absolute path of a znode within the environment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePath(String);

impl NodePath {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of a child that the store listed.
    pub(super) fn child(&self, name: &str) -> Self {
        if self.0 == "/" { Self(format!("/{name}")) } else { Self(format!("{}/{name}", self.0)) }
    }

    /// A path that the store itself named, in a watch event.
    pub(super) fn reported(path: &str) -> Self {
        Self(path.to_owned())
    }
}

impl fmt::Display for NodePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn fixed(path: &str) -> NodePath {
    NodePath(path.to_owned())
}

pub fn root() -> NodePath {
    fixed("/")
}

/// Created last: whoever sees it sees a whole environment.
pub fn initialized() -> NodePath {
    fixed("/initialized")
}

/// Where the controller keeps its elections and reports.
pub fn controller() -> NodePath {
    fixed("/controller")
}

/// Ephemeral: who acts for the environment.
pub fn leader() -> NodePath {
    controller().child("leader")
}

/// Its version is the number of leaders so far; each leader's writes name theirs.
pub fn epoch() -> NodePath {
    controller().child("epoch")
}

/// One report per machine: what the firewall agent found, did and could not do.
pub fn firewall_reports() -> NodePath {
    controller().child("firewall")
}

pub fn firewall_report(id: MachineId) -> NodePath {
    firewall_reports().child(&id.key())
}

pub fn services() -> NodePath {
    fixed("/services")
}

pub fn service(id: ServiceId) -> NodePath {
    services().child(&id.key())
}

/// The flag: its existence is the fact.
pub fn exposed(id: ServiceId) -> NodePath {
    service(id).child("exposed")
}

/// The secret that the service's units share: it opens the flag for whoever runs one of them.
pub fn service_credentials(id: ServiceId) -> NodePath {
    service(id).child("credentials")
}

pub fn units() -> NodePath {
    fixed("/units")
}

pub fn unit(id: UnitId) -> NodePath {
    units().child(&id.key())
}

pub fn unit_ports(id: UnitId) -> NodePath {
    unit(id).child("ports")
}

/// Ephemeral: the unit's agent is up.
pub fn unit_agent(id: UnitId) -> NodePath {
    unit(id).child("agent")
}

pub fn unit_credentials(id: UnitId) -> NodePath {
    unit(id).child("credentials")
}

pub fn machines() -> NodePath {
    fixed("/machines")
}

pub fn machine(id: MachineId) -> NodePath {
    machines().child(&id.key())
}

/// Ephemeral: the machine's agent is up.
pub fn machine_agent(id: MachineId) -> NodePath {
    machine(id).child("agent")
}

pub fn machine_credentials(id: MachineId) -> NodePath {
    machine(id).child("credentials")
}

/// What the machine says about its own firewall, if it looks after that itself.
pub fn machine_firewall(id: MachineId) -> NodePath {
    machine(id).child("firewall")
}

/// One child per unit assigned to the machine. A machine's agent lists its own work here, without a right to see the
/// rest, and a machine cannot be deleted while this has children.
pub fn machine_units(id: MachineId) -> NodePath {
    machine(id).child("units")
}

pub fn machine_unit(id: MachineId, unit: UnitId) -> NodePath {
    machine_units(id).child(&unit.key())
}

pub fn names() -> NodePath {
    fixed("/names")
}

pub fn service_names() -> NodePath {
    names().child("services")
}

pub fn service_name(name: &ServiceName) -> NodePath {
    service_names().child(name.as_str())
}

pub fn unit_names() -> NodePath {
    names().child("units")
}

/// The counter of unit numbers of a service name. Outlives the service, so that numbers are never given twice.
pub fn unit_names_of(name: &ServiceName) -> NodePath {
    unit_names().child(name.as_str())
}

pub fn unit_name(name: &UnitName) -> NodePath {
    unit_names_of(name.service()).child(&name.number().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_as_laid_out() {
        let name: UnitName = "wordpress/3".parse().unwrap();
        for (path, text) in [
            (root().child("x"), "/x"),
            (exposed(ServiceId::new(1)), "/services/service-0000000001/exposed"),
            (service_credentials(ServiceId::new(1)), "/services/service-0000000001/credentials"),
            (machine_firewall(MachineId::new(0)), "/machines/machine-0000000000/firewall"),
            (unit_ports(UnitId::new(2)), "/units/unit-0000000002/ports"),
            (unit_agent(UnitId::new(2)), "/units/unit-0000000002/agent"),
            (unit_credentials(UnitId::new(2)), "/units/unit-0000000002/credentials"),
            (machine_agent(MachineId::new(0)), "/machines/machine-0000000000/agent"),
            (machine_credentials(MachineId::new(0)), "/machines/machine-0000000000/credentials"),
            (
                machine_unit(MachineId::new(0), UnitId::new(2)),
                "/machines/machine-0000000000/units/unit-0000000002",
            ),
            (service_name(name.service()), "/names/services/wordpress"),
            (unit_name(&name), "/names/units/wordpress/3"),
        ] {
            assert_eq!(path.as_str(), text);
        }
    }
}
