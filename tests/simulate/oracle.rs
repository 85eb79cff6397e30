//! What should be open, worked out from what was done and without any code of the agent's: ports as plain numbers.

use std::collections::{BTreeMap, BTreeSet};

use portcullis::model::{MachineId, PortRange, Protocol, UnitId};
use portcullis_provider::rule::{Rule, RuleSet};

/// One port of one protocol.
pub(crate) type Point = (u16, bool);

/// What policy forbids in every world.
pub(crate) const FORBIDDEN: u16 = 22;

#[derive(Debug, Clone, Default)]
pub(crate) struct Unit {
    pub service: usize,
    pub ports: Vec<PortRange>,
    pub corrupt: bool,
    /// What was open for it when it became unreadable, and must stay so while it is and its service is exposed.
    pub kept: BTreeSet<Point>,
}

#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub units: BTreeMap<UnitId, (MachineId, Unit)>,
    pub exposed: BTreeSet<usize>,
    /// Everything that was ever wanted on a machine: nothing else may ever be open there.
    ever: BTreeMap<MachineId, BTreeSet<Point>>,
}

pub(crate) fn points_of(range: PortRange) -> impl Iterator<Item = Point> {
    let udp = range.proto() == Protocol::Udp;
    (range.from()..=range.to()).map(move |port| (port, udp))
}

pub(crate) fn points<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> BTreeSet<Point> {
    let merged: RuleSet = rules.into_iter().collect();
    merged.rules().flat_map(|rule| points_of(rule.ports)).collect()
}

impl Oracle {
    pub(crate) fn wanted(&self, machine: MachineId) -> BTreeSet<Point> {
        let here =
            self.units.values().filter(|(on, unit)| *on == machine && self.exposed.contains(&unit.service));
        let ports = here.flat_map(|(_, unit)| unit.ports.iter().copied().flat_map(points_of));
        ports.filter(|(port, udp)| *udp || *port != FORBIDDEN).collect()
    }

    /// Must be called after every change of what is wanted.
    pub(crate) fn remember(&mut self, machines: &[MachineId]) {
        for &machine in machines {
            let wanted = self.wanted(machine);
            self.ever.entry(machine).or_default().extend(wanted);
        }
    }

    pub(crate) fn was_ever_wanted(&self, machine: MachineId, point: Point) -> bool {
        self.ever.get(&machine).is_some_and(|ever| ever.contains(&point))
    }
}
