//! The oracle: computes which ports should be open from the actions alone, without any code of the
//! agent, and keeps the history of that state. An agent may act on a recent state, and on none
//! older than `MAX_AGE`.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, ServiceId, UnitId};
use tokio::time::Instant;

use crate::port_bits::{ARGUMENTS, PortBits};

/// The maximum age of the data that an agent acts on, if it missed no event: its lease, a read and
/// a plan, and the calls in between.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Exposed {
    #[default]
    No,
    World,
    /// To one of the named sources.
    To(usize),
}

#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub id: ServiceId,
    pub exposed: Exposed,
    pub corrupt: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Unit {
    pub service: usize,
    pub number: u32,
    pub machine: MachineId,
    /// Indices into `ARGUMENTS`, in the order of opening.
    pub ports: Vec<usize>,
    pub corrupt_ports: bool,
    pub corrupt_record: bool,
    /// Ports that were open for this unit alone when it became unreadable. They must stay open
    /// until the unit is readable or not exposed.
    pub kept: PortBits,
    /// Ports that other units on the machine requested since the world last converged: an agent may
    /// have opened them for those units.
    shared: PortBits,
}

impl Unit {
    pub(crate) fn new(service: usize, number: u32, machine: MachineId) -> Self {
        Unit {
            service,
            number,
            machine,
            ports: Vec::new(),
            corrupt_ports: false,
            corrupt_record: false,
            kept: PortBits::NONE,
            shared: PortBits::NONE,
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Machine {
    pub corrupt: bool,
}

/// The state of a machine from some time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    at: Instant,
    wanted: PortBits,
    kept: PortBits,
    /// The ports that all units of the machine request, readable or not.
    requested: PortBits,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Oracle {
    /// The provider returns outdated rules, so an agent cannot attribute open ports to units.
    pub lagging: bool,
    pub no_ipv6: bool,
    pub services: BTreeMap<usize, Service>,
    pub units: BTreeMap<UnitId, Unit>,
    pub machines: BTreeMap<MachineId, Machine>,
}

#[derive(Debug, Default)]
pub(crate) struct History {
    machines: BTreeMap<MachineId, VecDeque<Moment>>,
}

impl Oracle {
    fn requested(&self, unit: &Unit) -> PortBits {
        let sources: &[usize] = match self.services.get(&unit.service).map_or(Exposed::No, |s| s.exposed) {
            Exposed::No => &[],
            Exposed::World if self.no_ipv6 => &[0],
            Exposed::World => &[0, 1],
            Exposed::To(0) => &[2],
            Exposed::To(_) => &[3],
        };
        let ranges = unit.ports.iter().map(|n| parse_argument(ARGUMENTS[*n]).expect("a port"));
        let points = ranges.map(|range| PortBits::of(range, sources).expect("known ports"));
        points.fold(PortBits::NONE, PortBits::or).minus(PortBits::forbidden())
    }

    fn service_corrupt(&self, unit: &Unit) -> bool {
        self.services.get(&unit.service).is_some_and(|s| s.corrupt && s.exposed != Exposed::No)
    }

    /// Whether the ports of the unit cannot be read.
    pub(crate) fn frozen(&self, unit: &Unit) -> bool {
        let exposed = self.services.get(&unit.service).is_some_and(|s| s.exposed != Exposed::No);
        unit.corrupt_record || (exposed && (unit.corrupt_ports || self.service_corrupt(unit)))
    }

    pub(crate) fn on(&self, machine: MachineId) -> impl Iterator<Item = (UnitId, &Unit)> {
        self.units.iter().filter(move |(_, unit)| unit.machine == machine).map(|(id, unit)| (*id, unit))
    }

    pub(crate) fn has_frozen(&self, machine: MachineId) -> bool {
        self.on(machine).any(|(_, unit)| self.frozen(unit))
    }

    pub(crate) fn wanted(&self, machine: MachineId) -> PortBits {
        let readable = self.on(machine).filter(|(_, unit)| !self.frozen(unit));
        readable.map(|(_, unit)| self.requested(unit)).fold(PortBits::NONE, PortBits::or)
    }

    fn requested_on(&self, machine: MachineId) -> PortBits {
        self.on(machine).map(|(_, unit)| self.requested(unit)).fold(PortBits::NONE, PortBits::or)
    }

    pub(crate) fn kept(&self, machine: MachineId) -> PortBits {
        let frozen = self.on(machine).filter(|(_, unit)| self.frozen(unit));
        frozen.map(|(_, unit)| unit.kept).fold(PortBits::NONE, PortBits::or)
    }

    /// The part of `open` that is open because of this unit alone.
    pub(crate) fn alone(&self, id: UnitId, open: PortBits) -> PortBits {
        let unit = &self.units[&id];
        self.requested(unit).and(open).minus(unit.shared)
    }

    /// Updates `shared` of all units; `reset` discards the old value, because the world has
    /// converged.
    pub(crate) fn update_shared(&mut self, reset: bool) {
        let requested: Vec<(UnitId, MachineId, PortBits)> = self
            .units
            .iter()
            .map(|(id, unit)| (*id, unit.machine, self.requested(unit).or(unit.kept)))
            .collect();
        for (id, unit) in &mut self.units {
            let others = requested.iter().filter(|(other, on, _)| other != id && *on == unit.machine);
            let others = others.map(|(_, _, points)| *points).fold(PortBits::NONE, PortBits::or);
            unit.shared = if reset { others } else { unit.shared.or(others) };
            if self.lagging {
                unit.kept = unit.kept.minus(others);
            }
        }
    }

    /// Keeps no ports for a unit that is readable or not exposed.
    pub(crate) fn drop_kept_of_readable(&mut self) {
        let free: Vec<UnitId> =
            self.units.iter().filter(|(_, unit)| !self.frozen(unit)).map(|(id, _)| *id).collect();
        for id in free {
            if let Some(unit) = self.units.get_mut(&id) {
                unit.kept = PortBits::NONE;
            }
        }
    }

    /// Stops keeping these ports: a third party closed them, or a close was in progress.
    pub(crate) fn lost(&mut self, machine: MachineId, points: PortBits) {
        for unit in self.units.values_mut().filter(|unit| unit.machine == machine) {
            unit.kept = unit.kept.minus(points);
        }
    }
}

impl History {
    /// Called after every change of the oracle.
    pub(crate) fn remember(&mut self, oracle: &Oracle, now: Instant) {
        for &machine in oracle.machines.keys() {
            let moment = Moment {
                at: now,
                wanted: oracle.wanted(machine),
                kept: oracle.kept(machine),
                requested: oracle.requested_on(machine),
            };
            let moments = self.machines.entry(machine).or_default();
            if moments.back().is_some_and(|last| Moment { at: now, ..*last } == moment) {
                continue;
            }
            moments.push_back(moment);
            while moments.len() > 64 {
                moments.pop_front();
            }
        }
    }

    /// Whether the machine existed at `since`.
    pub(crate) fn knows(&self, machine: MachineId, since: Instant) -> bool {
        self.machines.get(&machine).and_then(VecDeque::front).is_some_and(|first| first.at <= since)
    }

    /// The states that were in effect at `since` or later.
    fn since(&self, machine: MachineId, since: Instant) -> impl Iterator<Item = &Moment> {
        let moments = self.machines.get(&machine);
        let first =
            moments.map_or(0, |all| all.iter().take_while(|m| m.at <= since).count().saturating_sub(1));
        moments.into_iter().flat_map(move |all| all.iter().skip(first))
    }

    /// The ports that were wanted, or had to be kept, at some time since then.
    pub(crate) fn ever(&self, machine: MachineId, since: Instant) -> PortBits {
        self.since(machine, since).fold(PortBits::NONE, |all, moment| all.or(moment.wanted).or(moment.kept))
    }

    /// The ports that units requested at some time since then, even if unreadable at the time.
    pub(crate) fn ever_requested(&self, machine: MachineId, since: Instant) -> PortBits {
        self.since(machine, since).fold(PortBits::NONE, |all, moment| all.or(moment.requested))
    }

    /// The ports that were wanted, or had to be kept, the whole time since then.
    pub(crate) fn always(&self, machine: MachineId, since: Instant) -> PortBits {
        if self.since(machine, since).next().is_none_or(|first| first.at > since) {
            return PortBits::NONE;
        }
        self.since(machine, since).fold(PortBits::ALL, |all, moment| all.and(moment.wanted.or(moment.kept)))
    }
}
