//! One seeded world: a store, a provider, an environment of a few machines, and an agent that can be killed.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use portcullis::firewall::agent::Agent;
use portcullis::firewall::policy::Policy;
use portcullis::firewall::run::{Progress, run};
use portcullis::model::{EnvironmentName, MachineId, ServiceName, UnitName};
use portcullis::store::records::Placement;
use portcullis::store::{Bootstrap, Credential, Deploy, Environment, MemoryStore, MemoryTree};
use portcullis_provider::Memory;
use portcullis_provider::memory::Settings;
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::Cidr;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::oracle::{FORBIDDEN, Oracle, Point, Unit, points};

/// Long, so that a world without drift must come right by events and retries alone.
pub(crate) const RESYNC: Duration = Duration::from_secs(600);

/// Longer than the longest pause between two tries, several times over.
pub(crate) const RETRIES: Duration = Duration::from_secs(200);
const MACHINES: usize = 3;
const SERVICES: usize = 3;

/// splitmix64: small, good enough, and the same everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn pick<'a, V>(&mut self, from: &'a [V]) -> &'a V {
        &from[self.below(from.len())]
    }
}

pub(crate) struct World {
    pub random: Random,
    pub store: MemoryStore,
    pub operator: Environment<MemoryTree>,
    pub controller: Credential,
    pub provider: Memory,
    pub machines: Vec<MachineId>,
    pub oracle: Oracle,
    pub agent: Option<Running>,
    pub foreign: usize,
    /// Somebody else took a rule away.
    pub drifted: bool,
    /// Faults of the provider are on.
    pub faulty: bool,
    log: String,
}

/// An agent's task; dropping it is a crash.
pub(crate) struct Running {
    task: JoinHandle<()>,
    _stop: watch::Sender<bool>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn service_name(service: usize) -> ServiceName {
    format!("service-{}", ["a", "b", "c"][service]).parse().expect("a name")
}

impl World {
    pub(crate) async fn new(seed: u64) -> World {
        let store = MemoryStore::default();
        let operator = Credential::generate("operator").expect("random bytes");
        let controller = Credential::generate("controller").expect("random bytes");
        let wanted = Bootstrap {
            environment: "simulated".parse::<EnvironmentName>().expect("a name"),
            placement: Placement::Unassigned,
            operator: operator.identity(),
            controller: controller.identity(),
        };
        let operator =
            Environment::bootstrap(store.connect(Some(&operator)), &wanted).await.expect("a fresh store");
        let provider = Memory::new(Settings::default());
        let mut world = World {
            random: Random(seed),
            store,
            operator,
            controller,
            provider,
            machines: Vec::new(),
            oracle: Oracle::default(),
            agent: None,
            foreign: 0,
            drifted: false,
            faulty: false,
            log: String::new(),
        };
        world.populate().await;
        world.start_agent();
        world
    }

    async fn populate(&mut self) {
        for n in 0..MACHINES {
            let instance = format!("i-{n}").parse().expect("an id");
            let machine = self.operator.add_machine(Some(instance)).await.expect("a machine");
            self.provider.add_group(MachineNumber::new(machine.number()));
            self.machines.push(machine);
        }
        for service in 0..SERVICES {
            let name = service_name(service);
            for unit in 0..2 {
                let machine = *self.random.pick(&self.machines);
                if unit == 0 {
                    let deploy = Deploy {
                        service: name.clone(),
                        charm: format!("local:{name}-1").parse().expect("a charm"),
                        metadata: serde_json::Map::new(),
                        units: 1,
                        to: Some(machine),
                    };
                    self.operator.deploy(&deploy).await.expect("a service");
                } else {
                    self.operator.add_units(&name, 1, Some(machine)).await.expect("a unit");
                }
                let (id, _) = self.operator.unit(&UnitName::new(name.clone(), unit)).await.expect("the unit");
                self.oracle.units.insert(id, (machine, Unit { service, ..Unit::default() }));
            }
        }
    }

    pub(crate) fn start_agent(&mut self) {
        let tree = self.store.connect(Some(&self.controller));
        let roles = self.operator.info().roles.clone();
        let mut random = self.random.clone();
        let policy = Policy::with_own_ports([]);
        let mut agent =
            Agent::new(tree.clone(), self.provider.clone(), policy, roles.clone(), move || random.next());
        let (progress, _) = watch::channel(Progress::default());
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let ended = run(&mut agent, &tree, &roles, RESYNC, &progress, stopped).await;
            // No fault here is one that an agent may die of.
            panic!("the agent ended: {ended:?}");
        });
        self.agent = Some(Running { task, _stop: stop });
    }

    pub(crate) fn open_on(&self, machine: MachineId) -> BTreeSet<Point> {
        let rules = self.provider.actual(MachineNumber::new(machine.number())).expect("a group");
        points(rules.owned.iter().filter(|rule| rule.source == Cidr::WORLD_V4))
    }

    pub(crate) fn log(&mut self, what: &str) {
        let open: Vec<_> = self.machines.iter().map(|machine| self.open_on(*machine).len()).collect();
        let _infallible = writeln!(self.log, "{what}: open {open:?}, calls {}", self.provider.calls());
    }

    /// What must hold at every moment, whatever is going on.
    pub(crate) fn check(&self) {
        if let Some(agent) = &self.agent {
            assert!(!agent.task.is_finished(), "the agent died\n{}", self.log);
        }
        for &machine in &self.machines {
            for point in self.open_on(machine) {
                assert!(point != (FORBIDDEN, false), "policy was broken on {machine}\n{}", self.log);
                let asked = self.oracle.was_ever_wanted(machine, point);
                assert!(asked, "{point:?} was never wanted on {machine}\n{}", self.log);
            }
            let open = self.open_on(machine);
            for kept in self.frozen_ports(machine) {
                assert!(
                    open.contains(&kept),
                    "{kept:?} of a frozen unit was closed on {machine}\n{}",
                    self.log
                );
            }
        }
        let foreign: usize = self.machines.iter().map(|machine| self.foreign_on(*machine)).sum();
        assert_eq!(foreign, self.foreign, "rules of others were touched\n{}", self.log);
    }

    fn foreign_on(&self, machine: MachineId) -> usize {
        self.provider.actual(MachineNumber::new(machine.number())).map_or(0, |rules| rules.foreign.len())
    }

    /// The faults stop; then what is open becomes what is wanted, and there is silence.
    pub(crate) async fn settle(&mut self) {
        self.heal().await;
        // The last change falls into a bad moment, and nothing happens after it that could help.
        let last = self.change_in_a_bad_moment().await;
        self.log(&last);
        self.cure();
        // Only a resync can find what somebody else did to the rules.
        tokio::time::sleep(if self.drifted { RESYNC + RETRIES } else { RETRIES }).await;
        self.log("settled");
        self.check();
        for &machine in &self.machines {
            assert_eq!(
                self.open_on(machine),
                self.oracle.wanted(machine),
                "{machine} at the end\n{}",
                self.log
            );
        }
        let writes = self.provider.writes();
        tokio::time::sleep(RESYNC).await;
        assert_eq!(self.provider.writes(), writes, "converged, and not silent\n{}", self.log);
    }

    /// Nothing is wrong with the provider any more.
    pub(crate) fn cure(&mut self) {
        self.faulty = false;
        self.provider.clear_script();
        self.provider.configure(|settings| *settings = Settings::default());
    }

    pub(crate) fn finish(self) -> String {
        self.log
    }
}
