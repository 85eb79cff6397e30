//! One seeded world: a store, a provider, an environment of a few machines, and the agents that
//! manage it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use portcullis::model::{EnvironmentName, MachineId, ServiceName, UnitName};
use portcullis::store::memory::Backup;
use portcullis::store::paths::NodePath;
use portcullis::store::records::Placement;
use portcullis::store::{Bootstrap, Credential, Deploy, Environment, MemoryStore, MemoryTree};
use portcullis_provider::Memory;
use portcullis_provider::memory::MemorySettings;
use portcullis_provider::provider::{Foreign, InstanceId, MachineNumber};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::agents::{Start, supervise};
use crate::faults::{Coverage, Mishap};
use crate::interceptor::{FOREIGN, Interceptor};
use crate::oracle::{Machine, Oracle, Service, Unit};
use crate::random::Random;
use crate::restored::Saved;

pub(crate) const SERVICES: usize = 3;

/// The parameters of a world.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub agents: usize,
    /// Whether the agents provision, too.
    pub provisions: bool,
    pub machines: usize,
    /// Whether the provider supports IPv6.
    pub ipv6: bool,
    /// For how many calls a group stays in use after its instance has ended.
    pub busy_calls: u64,
}

impl Shape {
    pub(crate) const fn small(agents: usize, provisions: bool) -> Shape {
        Shape { agents, provisions, machines: 3, ipv6: true, busy_calls: 0 }
    }

    /// More machines than an agent changes concurrently, most of them with units of one service.
    pub(crate) const fn large(agents: usize, provisions: bool) -> Shape {
        Shape { machines: 14, ..Shape::small(agents, provisions) }
    }

    fn is_large(self) -> bool {
        self.machines > 3
    }
}

/// The number of initial environments, which differ in the placement of their units.
const TEMPLATES: u64 = 8;

pub(crate) struct World {
    pub random: Random,
    pub interceptor: Interceptor,
    pub operator: Environment<MemoryTree>,
    /// Foreign rules that were added, and must not change.
    pub foreign: BTreeMap<MachineId, Vec<Foreign>>,
    /// Machines whose group name is taken by a foreign group.
    pub taken_group_names: BTreeSet<MachineNumber>,
    pub backup: Option<Saved>,
    /// The store was restored at some time.
    pub restored: bool,
    /// The store was restored, and no operator has accepted it yet.
    pub unaccepted: bool,
    /// The data of znodes before they were damaged.
    pub damaged: BTreeMap<NodePath, Vec<u8>>,
    /// Deleted znodes with their data; parents before their children.
    pub deleted_nodes: Vec<(NodePath, Vec<u8>)>,
    /// Whether the agents provision.
    pub provisions: bool,
    /// The provider's settings without faults.
    pub normal_settings: MemorySettings,
    /// Foreign instances.
    pub foreign_instances: BTreeSet<InstanceId>,
    pub before_action: crate::checks::BeforeAction,
    agents: Vec<JoinHandle<()>>,
    pub started_at: Instant,
}

impl Drop for World {
    fn drop(&mut self) {
        for agent in &self.agents {
            agent.abort();
        }
    }
}

/// An environment in its initial state. Built once and copied for each world.
struct Template {
    backup: Backup,
    operator: Credential,
    controller: Credential,
    oracle: Oracle,
}

pub(crate) fn service_name(service: usize) -> ServiceName {
    ["blog", "wiki", "mail"][service].parse().expect("a name")
}

pub(crate) fn unit_name(unit: &Unit) -> UnitName {
    UnitName::new(service_name(unit.service), unit.number)
}

pub(crate) fn number(machine: MachineId) -> MachineNumber {
    MachineNumber::new(machine.number())
}

pub(crate) fn deployment(service: usize, to: MachineId) -> Deploy {
    let name = service_name(service);
    Deploy {
        charm: format!("local:{name}-1").parse().expect("a charm"),
        service: name,
        metadata: serde_json::Map::new(),
        units: 1,
        to: Some(to),
    }
}

async fn template(variant: u64, shape: Shape) -> Rc<Template> {
    type Made = BTreeMap<(u64, usize), Rc<Template>>;
    thread_local!(static MADE: RefCell<Made> = const { RefCell::new(BTreeMap::new()) });
    let key = (variant, shape.machines);
    if let Some(made) = MADE.with_borrow(|made| made.get(&key).cloned()) {
        return made;
    }
    let store = MemoryStore::default();
    let operator = Credential::generate("operator").expect("random bytes");
    let controller = Credential::generate("controller").expect("random bytes");
    let wanted = Bootstrap {
        environment: "simulated".parse::<EnvironmentName>().expect("a name"),
        placement: Placement::Unassigned,
        operator: operator.identity(),
        controller: controller.identity(),
    };
    let tree = store.connect(Some(&operator));
    let environment = Environment::bootstrap(tree, &wanted).await.expect("a fresh store");
    let mut random = Random::new(variant);
    let mut oracle = Oracle::default();
    for n in 0..shape.machines {
        let instance = format!("i-{n}").parse().expect("an id");
        let machine = environment.add_machine(Some(instance)).await.expect("a machine");
        oracle.machines.insert(machine, Machine::default());
    }
    let machines: Vec<MachineId> = oracle.machines.keys().copied().collect();
    for service in 0..SERVICES {
        let to = random.pick(&machines);
        let deployed = environment.deploy(&deployment(service, to)).await.expect("a service");
        let exposed = crate::oracle::Exposed::No;
        oracle.services.insert(service, Service { id: deployed.service, exposed, corrupt: false });
        let name = service_name(service);
        let mut units = deployed.units;
        // In a large world the first service has a unit on nearly every machine.
        let more = if shape.is_large() && service == 0 { machines.len() - 2 } else { 1 };
        for n in 0..more {
            let to = if more > 1 { machines[n] } else { random.pick(&machines) };
            units.extend(environment.add_units(&name, 1, Some(to)).await.expect("a unit"));
        }
        for placed in units {
            let machine = placed.machine;
            oracle.units.insert(placed.id, Unit::new(service, placed.name.number(), machine));
        }
    }
    drop(environment);
    let backup = store.backup();
    let made = Rc::new(Template { backup, operator, controller, oracle });
    MADE.with_borrow_mut(|all| all.insert(key, made.clone()));
    made
}

impl World {
    pub(crate) async fn new(seed: u64, shape: Shape, log: bool) -> World {
        let Shape { agents, provisions, machines, ipv6, busy_calls } = shape;
        let template = template(seed % TEMPLATES, shape).await;
        let mut random = Random::new(seed);
        let store = MemoryStore::from_backup(&template.backup);
        let normal_settings = MemorySettings { ipv6, busy_calls, ..MemorySettings::default() };
        let provider = Memory::new(normal_settings.clone());
        let operator =
            Environment::open(store.connect(Some(&template.operator))).await.expect("an environment");
        // Agents that provision create the groups, and delete groups of machines that are not in
        // the tree, but no others.
        if provisions {
            provider.add_environment_group();
        } else {
            template.oracle.machines.keys().for_each(|machine| _ = provider.add_group(number(*machine)));
            provider.add_group(MachineNumber::new(FOREIGN));
        }
        let interceptor = Interceptor::new(random.fork(), agents, store, provider, log);
        {
            let mut shared = interceptor.lock();
            shared.oracle = Oracle { no_ipv6: !ipv6, ..template.oracle.clone() };
            shared.changed();
        }
        let roles = operator.info().roles.clone();
        let start = |agent| Start {
            agent,
            credential: template.controller.clone(),
            roles: roles.clone(),
            provisions,
            checkpoint: Arc::default(),
        };
        let agents =
            (0..agents).map(|agent| tokio::spawn(supervise(interceptor.clone(), start(agent)))).collect();
        let mut world = World {
            random,
            interceptor,
            operator,
            foreign: BTreeMap::new(),
            taken_group_names: BTreeSet::new(),
            backup: None,
            restored: false,
            unaccepted: false,
            damaged: BTreeMap::new(),
            deleted_nodes: Vec::new(),
            provisions,
            normal_settings,
            foreign_instances: BTreeSet::new(),
            before_action: crate::checks::BeforeAction::default(),
            agents,
            started_at: Instant::now(),
        };
        for n in 0..machines {
            world.add_foreign_instance(&format!("i-{n}"));
        }
        world.add_foreign_instance("i-theirs");
        if !ipv6 {
            world.count_mishap(Mishap::NoIpv6);
        }
        world
    }

    pub(crate) fn agents(&self) -> usize {
        self.agents.len()
    }

    pub(crate) fn count_mishap(&self, mishap: Mishap) {
        self.interceptor.lock().coverage.count_mishap(mishap);
    }

    pub(crate) fn log(&self, what: std::fmt::Arguments<'_>) {
        self.interceptor.lock().log(what);
    }

    /// Lets time pass. Performs an action for each call that waits for one
    /// (`Fault::ActionDuringCall`).
    pub(crate) async fn pause(&mut self, long: Duration) {
        let until = Instant::now() + long;
        loop {
            let interceptor = self.interceptor.clone();
            tokio::select! {
                () = sleep_until(until) => return,
                () = interceptor.action_during_call() => {
                    let action = self.choose_operation();
                    self.perform(action).await;
                    self.interceptor.resume_call();
                }
            }
        }
    }

    pub(crate) fn finish(self) -> (Coverage, String) {
        let mut coverage = std::mem::take(&mut self.interceptor.lock().coverage);
        coverage.simulated_ms = (Instant::now() - self.started_at).as_millis() as u64;
        (coverage, self.interceptor.take_log())
    }
}
