//! What happens in a world: one event at a time, chosen by its seed.

use std::collections::BTreeSet;
use std::time::Duration;

use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, UnitId};
use portcullis::store::UnitPorts;
use portcullis::store::memory::Fault as StoreFault;
use portcullis::store::paths;
use portcullis::store::tree::{Tree as _, Write};
use portcullis_provider::memory::{Failure, Fault, Rewrite};
use portcullis_provider::provider::{Foreign, MachineNumber};
use portcullis_provider::rule::WirePorts;
use portcullis_provider::{Error, Subject};

use crate::oracle::{Point, points_of};
use crate::world::{RESYNC, RETRIES, Random, World, service_name};

const PORTS: [&str; 9] = ["80", "81", "82", "443", "22", "20-25", "8000-8010", "53/udp", "8005"];

impl World {
    /// One event, and time for some of its consequences.
    pub(crate) async fn act(&mut self) -> String {
        let what = match self.random.below(16) {
            0..=3 => self.open().await,
            4..=5 => self.close().await,
            6..=7 => self.expose().await,
            8 => self.unexpose().await,
            9 => self.corrupt().await,
            10 => {
                self.heal().await;
                "healed".to_owned()
            }
            11 => self.meddle(),
            12 => self.provider_faults(),
            13 => self.store_faults(),
            14 => self.crash(),
            _ => {
                self.cure();
                "the provider is well".to_owned()
            }
        };
        self.oracle.remember(&self.machines.clone());
        let pause = [0, 1, 20, 700, 5_000, 61_000][self.random.below(6)];
        tokio::time::sleep(Duration::from_millis(pause)).await;
        format!("{what}, then {pause} ms")
    }

    fn a_unit(&mut self) -> UnitId {
        let units: Vec<UnitId> = self.oracle.units.keys().copied().collect();
        *self.random.pick(&units)
    }

    async fn open(&mut self) -> String {
        let (id, text) = (self.a_unit(), *self.random.pick(&PORTS));
        let range = parse_argument(text).expect("a port");
        let (_, unit) = self.oracle.units.get_mut(&id).expect("a unit");
        if unit.corrupt {
            return format!("{id:?} is corrupt");
        }
        if !unit.ports.contains(&range) {
            unit.ports.push(range);
        }
        // Wanted from here on, whenever the agent sees it.
        self.oracle.remember(&self.machines.clone());
        UnitPorts::new(self.operator.tree(), id).open(range).await.expect("stored");
        format!("{id:?} opens {text}")
    }

    async fn close(&mut self) -> String {
        let (id, text) = (self.a_unit(), *self.random.pick(&PORTS));
        let range = parse_argument(text).expect("a port");
        let (_, unit) = self.oracle.units.get_mut(&id).expect("a unit");
        if unit.corrupt {
            return format!("{id:?} is corrupt");
        }
        unit.ports.retain(|open| *open != range);
        UnitPorts::new(self.operator.tree(), id).close(range).await.expect("stored");
        format!("{id:?} closes {text}")
    }

    async fn expose(&mut self) -> String {
        let service = self.random.below(3);
        self.oracle.exposed.insert(service);
        self.oracle.remember(&self.machines.clone());
        self.operator.expose(&service_name(service)).await.expect("exposed");
        format!("expose {service}")
    }

    async fn unexpose(&mut self) -> String {
        let service = self.random.below(3);
        self.oracle.exposed.remove(&service);
        // Shut while it cannot be read: when it is exposed again, there is nothing left to keep.
        for (_, unit) in self.oracle.units.values_mut().filter(|(_, unit)| unit.service == service) {
            unit.kept.clear();
        }
        self.operator.unexpose(&service_name(service)).await.expect("unexposed");
        format!("unexpose {service}")
    }

    async fn overwrite(&self, id: UnitId, data: Vec<u8>) {
        let path = paths::unit_ports(id);
        loop {
            let node = self.operator.tree().get(&path).await.expect("a ports node");
            if node.data == data {
                return;
            }
            let write = Write::SetIfVersion { path: path.clone(), data: data.clone(), version: node.version };
            match self.operator.tree().write(vec![write]).await {
                Err(err) if !err.is_ambiguous() => panic!("{err}"),
                _ => {}
            }
        }
    }

    async fn corrupt(&mut self) -> String {
        let id = self.a_unit();
        let garbage = *self.random.pick(&["{", "[[[[", "open: 7", "{\"open\": [{\"port\": 0}]}"]);
        // What the agent has never seen it cannot keep: only a world that has come to rest can be held to it.
        if !self.faulty {
            tokio::time::sleep(if self.drifted { RESYNC + RETRIES } else { RETRIES }).await;
        }
        let (machine, unit) = &self.oracle.units[&id];
        let asked = unit.ports.iter().copied().flat_map(points_of).collect::<BTreeSet<Point>>();
        let open = self.open_on(*machine);
        let exposed = self.oracle.exposed.contains(&unit.service);
        let kept = if self.faulty || unit.corrupt || !exposed { BTreeSet::new() } else { &asked & &open };
        self.overwrite(id, garbage.as_bytes().to_vec()).await;
        let (_, unit) = self.oracle.units.get_mut(&id).expect("a unit");
        if !unit.corrupt {
            unit.kept = kept;
        }
        unit.corrupt = true;
        format!("{id:?} is corrupted")
    }

    /// What was corrupt holds again what it held.
    pub(crate) async fn heal(&mut self) {
        let ids: Vec<UnitId> =
            self.oracle.units.iter().filter(|(_, (_, u))| u.corrupt).map(|(id, _)| *id).collect();
        for id in ids {
            let (_, unit) = self.oracle.units.get_mut(&id).expect("a unit");
            unit.corrupt = false;
            unit.kept.clear();
            let ports = unit.ports.clone();
            self.overwrite(id, Vec::new()).await;
            for range in ports {
                UnitPorts::new(self.operator.tree(), id).open(range).await.expect("stored");
            }
        }
    }

    /// Somebody else at the rules: takes one of ours away, or adds one of theirs.
    fn meddle(&mut self) -> String {
        let machine = *self.random.pick(&self.machines);
        let number = MachineNumber::new(machine.number());
        if self.random.below(2) == 0 && self.frozen_ports(machine).is_empty() {
            self.drifted = true;
            self.provider.tamper(number, |rules| {
                rules.owned.pop_first();
            });
            return format!("somebody removes a rule of {machine}");
        }
        let wire = WirePorts { proto: "tcp", from: Some(5432), to: Some(5432) };
        let theirs = Foreign::from_wire(wire, "10.0.0.0/8".parse().expect("a block"));
        self.provider.tamper(number, |rules| rules.foreign.push(theirs));
        self.foreign += 1;
        format!("somebody adds a rule to {machine}")
    }

    fn provider_faults(&mut self) -> String {
        self.faulty = true;
        let mut random = self.random.clone();
        let share = 2 + self.random.below(4);
        self.provider.set_script(move |_| (random.below(share) == 0).then(|| fault(&mut random)));
        let lag = self.random.below(4) as u64;
        let rewrite = [Rewrite::Nothing, Rewrite::Spelling, Rewrite::Halves][self.random.below(3)];
        self.provider.configure(|settings| {
            settings.lag_calls = lag;
            settings.rewrite = rewrite;
        });
        format!("one call in {share} fails, reads lag by {lag}, {rewrite:?}")
    }

    pub(crate) async fn change_in_a_bad_moment(&mut self) -> String {
        let faults = self.provider_faults();
        let what = if self.random.below(2) == 0 { self.expose().await } else { self.unexpose().await };
        tokio::time::sleep(Duration::from_millis(100)).await;
        format!("{faults}; {what}")
    }

    fn store_faults(&mut self) -> String {
        if self.random.below(2) == 0 {
            self.store.interrupt();
            return "the store's connections are lost".to_owned();
        }
        let fault = [StoreFault::LostBefore, StoreFault::LostAfter][self.random.below(2)];
        self.store.lose_answers([fault]);
        format!("the next write: {fault:?}")
    }

    fn crash(&mut self) -> String {
        self.agent = None;
        self.start_agent();
        "the agent crashes and starts again".to_owned()
    }

    /// Ports of units that cannot be read, which must stay open.
    pub(crate) fn frozen_ports(&self, machine: MachineId) -> BTreeSet<Point> {
        let units = self.oracle.units.values().filter(|(on, unit)| *on == machine && unit.corrupt);
        let exposed = units.filter(|(_, unit)| self.oracle.exposed.contains(&unit.service));
        exposed.flat_map(|(_, unit)| unit.kept.iter().copied()).collect()
    }
}

fn fault(random: &mut Random) -> Fault {
    let what = Subject::Provider;
    let reason = "simulated".to_owned();
    let error = match random.below(6) {
        0 => Error::Throttled { what },
        1 => Error::Unavailable { what, reason },
        2 => Error::Denied { what, reason },
        3 => Error::Conflict { what },
        4 => Error::NotFound { what },
        _ => return Fault::After(Failure::Error(Error::Ambiguous { what, reason })),
    };
    Fault::Before(Failure::Error(error))
}
