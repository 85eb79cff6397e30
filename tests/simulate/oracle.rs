//! What should be open, worked out from what was done and without any code of the agent's, and what of it was so for how
//! long: an agent may act on what was true a moment ago, and on nothing older.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, ServiceId, UnitId};
use tokio::time::Instant;

use crate::points::{ARGUMENTS, Points};

/// How old may be what an agent acts on, when nothing kept it from hearing of a change: its lease, a look and a plan, and
/// the calls in between.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

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
    /// Indices of arguments, in order of opening.
    pub ports: Vec<usize>,
    pub corrupt_ports: bool,
    pub corrupt_record: bool,
    /// What was open for it alone when it became unreadable. It must stay so until it is readable or not exposed.
    pub kept: Points,
    /// What others on its machine asked for since everything was last seen to be as it should: an agent may have
    /// opened it for them.
    shared: Points,
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
            kept: Points::NONE,
            shared: Points::NONE,
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Machine {
    pub corrupt: bool,
}

/// What held on a machine from some moment on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moment {
    at: Instant,
    wanted: Points,
    kept: Points,
    /// What all units of the machine ask for, whether that can be read or not.
    asked: Points,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Oracle {
    /// The provider shows what was there before: who cannot see what is open cannot say whose it is.
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
    fn asked(&self, unit: &Unit) -> Points {
        let sources: &[usize] = match self.services.get(&unit.service).map_or(Exposed::No, |s| s.exposed) {
            Exposed::No => &[],
            Exposed::World if self.no_ipv6 => &[0],
            Exposed::World => &[0, 1],
            Exposed::To(0) => &[2],
            Exposed::To(_) => &[3],
        };
        let ranges = unit.ports.iter().map(|n| parse_argument(ARGUMENTS[*n]).expect("a port"));
        let points = ranges.map(|range| Points::of(range, sources).expect("known ports"));
        points.fold(Points::NONE, Points::or).minus(Points::forbidden())
    }

    fn service_corrupt(&self, unit: &Unit) -> bool {
        self.services.get(&unit.service).is_some_and(|s| s.corrupt && s.exposed != Exposed::No)
    }

    /// Nobody can say what the unit asks for.
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

    pub(crate) fn wanted(&self, machine: MachineId) -> Points {
        let readable = self.on(machine).filter(|(_, unit)| !self.frozen(unit));
        readable.map(|(_, unit)| self.asked(unit)).fold(Points::NONE, Points::or)
    }

    fn asked_on(&self, machine: MachineId) -> Points {
        self.on(machine).map(|(_, unit)| self.asked(unit)).fold(Points::NONE, Points::or)
    }

    pub(crate) fn kept(&self, machine: MachineId) -> Points {
        let frozen = self.on(machine).filter(|(_, unit)| self.frozen(unit));
        frozen.map(|(_, unit)| unit.kept).fold(Points::NONE, Points::or)
    }

    /// What of `open` is there because of this unit and nobody else.
    pub(crate) fn alone(&self, id: UnitId, open: Points) -> Points {
        let unit = &self.units[&id];
        self.asked(unit).and(open).minus(unit.shared)
    }

    /// Notes who asks for the same as others; `afresh` if agents have put everything right meanwhile.
    pub(crate) fn share(&mut self, afresh: bool) {
        let asked: Vec<(UnitId, MachineId, Points)> =
            self.units.iter().map(|(id, unit)| (*id, unit.machine, self.asked(unit).or(unit.kept))).collect();
        for (id, unit) in &mut self.units {
            let others = asked.iter().filter(|(other, on, _)| other != id && *on == unit.machine);
            let others = others.map(|(_, _, points)| *points).fold(Points::NONE, Points::or);
            unit.shared = if afresh { others } else { unit.shared.or(others) };
            if self.lagging {
                unit.kept = unit.kept.minus(others);
            }
        }
    }

    /// Nothing is kept for a unit that can be read, or that nobody may reach.
    pub(crate) fn let_go(&mut self) {
        let free: Vec<UnitId> =
            self.units.iter().filter(|(_, unit)| !self.frozen(unit)).map(|(id, _)| *id).collect();
        for id in free {
            if let Some(unit) = self.units.get_mut(&id) {
                unit.kept = Points::NONE;
            }
        }
    }

    /// No longer to be kept: somebody else took it away, or a close was under way.
    pub(crate) fn lost(&mut self, machine: MachineId, points: Points) {
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
                asked: oracle.asked_on(machine),
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

    /// Whether the machine was there at `since`.
    pub(crate) fn knows(&self, machine: MachineId, since: Instant) -> bool {
        self.machines.get(&machine).and_then(VecDeque::front).is_some_and(|first| first.at <= since)
    }

    /// The moments that reached into the time since `since`.
    fn since(&self, machine: MachineId, since: Instant) -> impl Iterator<Item = &Moment> {
        let moments = self.machines.get(&machine);
        let first =
            moments.map_or(0, |all| all.iter().take_while(|m| m.at <= since).count().saturating_sub(1));
        moments.into_iter().flat_map(move |all| all.iter().skip(first))
    }

    /// Everything that was wanted at some time since then.
    pub(crate) fn ever(&self, machine: MachineId, since: Instant) -> Points {
        self.since(machine, since).fold(Points::NONE, |all, moment| all.or(moment.wanted).or(moment.kept))
    }

    /// Everything that units asked for at some time since then, though it could not be read at the time.
    pub(crate) fn ever_asked(&self, machine: MachineId, since: Instant) -> Points {
        self.since(machine, since).fold(Points::NONE, |all, moment| all.or(moment.asked))
    }

    /// What was wanted, or had to be kept, all the time since then.
    pub(crate) fn always(&self, machine: MachineId, since: Instant) -> Points {
        if self.since(machine, since).next().is_none_or(|first| first.at > since) {
            return Points::NONE;
        }
        self.since(machine, since).fold(Points::ALL, |all, moment| all.and(moment.wanted.or(moment.kept)))
    }
}
