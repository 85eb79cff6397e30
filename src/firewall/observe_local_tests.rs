//! Tests of a machine that manages its own firewall, with the in-memory store and provider and with
//! only the machine's own rights.

use portcullis_provider::memory::MemorySettings;
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::Cidr;
use portcullis_provider::{Firewall, Memory};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

use super::*;
use crate::firewall::controller::FirewallController;
use crate::firewall::leader_loop::Progress;
use crate::firewall::leader_loop::tests::{CHANGE, Slow, took};
use crate::firewall::local_loop::run;
use crate::firewall::policy::Policy;
use crate::firewall::report::Report;
use crate::machine::presence::{Error as MachineError, MachineClaim};
use crate::model::ports::parse_argument;
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::store::lease::{Lease, LeaseKey};
use crate::store::records::Placement;
use crate::store::rollback::{Memory as CheckpointStorage, RollbackGuard};
use crate::store::tree::{Event, Write};
use crate::store::{Acceptance, Deploy, Environment, MemoryStore, MemoryTree, UnitPorts};

const HERE: MachineId = MachineId::new(0);

struct World {
    store: MemoryStore,
    operator: Environment<MemoryTree>,
    controller: MemoryTree,
    machine: MemoryTree,
    identity: crate::store::Identity,
    provider: Memory,
}

impl World {
    /// Two services with one unit each on the same machine.
    async fn new() -> Self {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Local).await;
        for name in ["web", "sql"] {
            let deploy = Deploy {
                service: name.parse().unwrap(),
                charm: format!("local:{name}-1").parse().unwrap(),
                metadata: serde_json::Map::new(),
                units: 1,
                to: None,
            };
            environment.deploy(&deploy).await.unwrap();
        }
        let credential = environment.machine_credential(HERE).await.unwrap();
        let provider = Memory::new(MemorySettings::default());
        provider.add_group(MachineNumber::new(0));
        World {
            store: store.clone(),
            operator: environment,
            controller: store.connect(Some(&controller)),
            machine: store.connect(Some(&credential)),
            identity: credential.identity(),
            provider,
        }
    }

    async fn expose(&self, name: &str, unit: u32, port: &str) {
        let ports = UnitPorts::new(self.operator.tree(), UnitId::new(unit));
        ports.open(parse_argument(port).unwrap()).await.unwrap();
        self.operator.expose(&name.parse().unwrap()).await.unwrap();
    }

    fn agent(&self) -> FirewallController<MemoryTree, Memory> {
        self.controller_over(self.provider.clone())
    }

    fn controller_over<F: Firewall>(&self, firewall: F) -> FirewallController<MemoryTree, F> {
        let acl = self.operator.info().roles.machine_firewall(&self.identity);
        let policy = Policy::for_own_machine([]);
        FirewallController::for_machine(self.machine.clone(), firewall, policy, (HERE, acl, "a table"), || 0)
    }

    fn claim(&self, holder: &str) -> MachineClaim {
        let acl = self.operator.info().roles.machine_agent(&self.identity);
        let resync = Duration::from_secs(60);
        MachineClaim { machine: HERE, acl, holder: holder.to_owned(), resync, host: None }
    }

    fn rules(&self) -> Vec<String> {
        let rules = self.provider.actual(MachineNumber::new(0)).unwrap();
        let v4 = rules.owned.iter().filter(|rule| rule.source == Cidr::WORLD_V4);
        v4.map(|rule| rule.ports.to_string()).collect()
    }

    async fn until(&self, what: &str, fact: impl Fn(&Self) -> bool) {
        let waited = async {
            while !fact(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // Shorter than a resync, so that only an event can have triggered the change.
        tokio::time::timeout(Duration::from_secs(30), waited).await.unwrap_or_else(|_| panic!("no {what}"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_machine_reacts_to_changes_of_its_units_and_services() {
    let world = World::new().await;
    let (stop, stopped) = watch::channel(false);
    let (progress, _) = watch::channel(Progress::default());
    let (mut agent, claim) = (world.agent(), world.claim("one"));
    let tree = world.machine.clone();
    let running = async { run(Some(&mut agent), &tree, &claim, &progress, stopped).await };
    let scenario = async {
        world.expose("web", 0, "80").await;
        world.until("80", |world| world.rules() == ["80/tcp"]).await;
        world.expose("sql", 1, "3306").await;
        world.until("3306", |world| world.rules() == ["80/tcp", "3306/tcp"]).await;
        world.operator.unexpose(&"web".parse().unwrap()).await.unwrap();
        world.until("close", |world| world.rules() == ["3306/tcp"]).await;
        world.operator.add_units(&"web".parse().unwrap(), 1, Some(HERE)).await.unwrap();
        world.expose("web", 2, "8081").await;
        world.until("8081", |world| world.rules() == ["80/tcp", "3306/tcp", "8081/tcp"]).await;
        let writes = world.provider.writes();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.provider.writes(), writes, "no writes after convergence");
        stop.send_replace(true);
    };
    let (ended, ()) = tokio::join!(running, scenario);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_mass_close_is_confirmed_long_before_the_next_resync() {
    let world = World::new().await;
    for port in 0..12 {
        world.expose("web", 0, &(8000 + 2 * port).to_string()).await;
    }
    let (stop, stopped) = watch::channel(false);
    let (progress, _) = watch::channel(Progress::default());
    let (mut agent, claim) = (world.agent(), world.claim("one"));
    let tree = world.machine.clone();
    let running = async { run(Some(&mut agent), &tree, &claim, &progress, stopped).await };
    let scenario = async {
        world.until("twelve ports", |world| world.rules().len() == 12).await;
        world.operator.unexpose(&"web".parse().unwrap()).await.unwrap();
        world.until("closing", |world| world.rules().is_empty()).await;
        stop.send_replace(true);
    };
    let (ended, ()) = tokio::join!(running, scenario);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_change_includes_the_pass_before_it() {
    let world = World::new().await;
    for name in ["web", "sql"] {
        world.operator.expose(&name.parse().unwrap()).await.unwrap();
    }
    let (stop, stopped) = watch::channel(false);
    let (progress, _) = watch::channel(Progress::default());
    let (mut agent, claim) = (world.controller_over(Slow(world.provider.clone())), world.claim("one"));
    let (tree, metrics) = (world.machine.clone(), agent.metrics());
    let running = async { run(Some(&mut agent), &tree, &claim, &progress, stopped).await };
    let scenario = async {
        let open = async |unit, port| {
            let ports = UnitPorts::new(world.operator.tree(), UnitId::new(unit));
            ports.open(parse_argument(port).unwrap()).await.unwrap();
        };
        tokio::time::sleep(CHANGE).await;
        open(0, "80").await;
        tokio::time::sleep(CHANGE / 4).await;
        open(1, "443").await;
        tokio::time::sleep(2 * CHANGE).await;
        stop.send_replace(true);
    };
    let (ended, ()) = tokio::join!(running, scenario);
    ended.unwrap();
    assert_eq!(took(&metrics), (2, 20 + 35), "the second waited for one and a half seconds");
}

#[tokio::test(start_paused = true)]
async fn a_missing_record_does_not_count_as_removed() {
    let world = World::new().await;
    world.expose("web", 0, "80").await;
    let delete = async |path: NodePath| {
        let tree = world.operator.tree();
        for name in tree.children(&path).await.unwrap() {
            tree.write(vec![Write::Delete { path: path.child(&name) }]).await.unwrap();
        }
        tree.write(vec![Write::Delete { path }]).await.unwrap();
    };
    delete(paths::service(ServiceId::new(0))).await;
    let view = observe(&world.machine, HERE).await.unwrap();
    let requests = view.requests_on(HERE);
    let missing = |unit: u32,
                   part: &str,
                   requests: &BTreeMap<UnitId, crate::firewall::wanted::PortRequest>| {
        let request = &requests[&UnitId::new(unit)];
        let crate::firewall::wanted::PortRequest::Frozen { reason } = request else { panic!("{request:?}") };
        assert!(reason.contains(part) && reason.contains("is missing from the store"), "{reason}");
    };
    missing(0, "/services/service-0000000000", &requests);
    delete(paths::unit(UnitId::new(1))).await;
    missing(1, "/units/unit-0000000001", &observe(&world.machine, HERE).await.unwrap().requests_on(HERE));
    world.operator.remove_unit(&"sql/0".parse().unwrap()).await.unwrap();
    let view = observe(&world.machine, HERE).await.unwrap();
    assert_eq!(view.units.get(UnitId::new(1)), None, "removed with a command");
}

impl World {
    /// Runs one full pass of an agent that has just started.
    async fn pass<F: Firewall>(&self, agent: &mut FirewallController<MemoryTree, F>, lease: &mut Lease) {
        lease.confirm(&self.machine).await.unwrap();
        let mut everything = crate::store::changes::Dirty::default();
        everything.add(&Event::Everything, Instant::now());
        agent.pass(&everything, lease).await.unwrap();
    }

    async fn lease(&self) -> Lease {
        let claim = self.claim("one");
        Lease::acquire(&self.machine, &LeaseKey::machine(HERE), &claim.acl, &claim.holder).await.unwrap()
    }

    async fn report(&self) -> Report {
        let node = self.operator.tree().get(&paths::machine_firewall(HERE)).await.unwrap();
        Report::parse(&node.data).unwrap()
    }
}

/// Another client deletes the entries of the machine's list of units: one of them, and all.
#[tokio::test(start_paused = true)]
async fn a_unit_that_is_missing_from_the_list_keeps_its_ports() {
    for lost in [vec![0], vec![0, 1]] {
        let world = World::new().await;
        world.expose("web", 0, "80").await;
        world.expose("sql", 1, "3306").await;
        let (mut agent, mut lease) = (world.agent(), world.lease().await);
        world.pass(&mut agent, &mut lease).await;
        assert_eq!(world.rules(), ["80/tcp", "3306/tcp"]);
        for unit in &lost {
            let path = paths::machine_units(HERE).child(&UnitId::new(*unit).key());
            world.operator.tree().write(vec![Write::Delete { path }]).await.unwrap();
        }
        let mut started = world.agent();
        for agent in [&mut agent, &mut started] {
            for _ in 0..4 {
                world.pass(agent, &mut lease).await;
                tokio::time::advance(CONFIRM_AFTER).await;
            }
            assert_eq!(world.rules(), ["80/tcp", "3306/tcp"], "{lost:?}");
            let report = world.report().await;
            let problem = report.problem.as_deref().unwrap_or_default();
            assert!(
                problem.starts_with("in /units and missing from the list of this machine: "),
                "{problem}"
            );
            assert_eq!(report.frozen.len(), lost.len(), "{report:?}");
            let reason = &report.frozen[&UnitId::new(0)];
            assert!(reason.contains("and /units/unit-0000000000 names this machine"), "{reason}");
        }
        // The control: units that a command removes.
        for unit in &lost {
            let name = ["web/0", "sql/0"][*unit as usize];
            world.operator.remove_unit(&name.parse().unwrap()).await.unwrap();
        }
        for _ in 0..2 {
            world.pass(&mut agent, &mut lease).await;
            tokio::time::advance(CONFIRM_AFTER).await;
        }
        let rest: &[&str] = if lost.len() == 1 { &["3306/tcp"] } else { &[] };
        assert_eq!(world.rules(), rest, "{lost:?}");
    }
}

/// Deletes a service one znode at a time, with a pass after each.
#[tokio::test(start_paused = true)]
async fn a_flag_that_is_deleted_before_its_service_closes_nothing() {
    let world = World::new().await;
    world.expose("web", 0, "80").await;
    world.expose("sql", 1, "3306").await;
    let (mut agent, mut lease) = (world.agent(), world.lease().await);
    world.pass(&mut agent, &mut lease).await;
    let service = paths::service(ServiceId::new(0));
    let below = world.operator.tree().children(&service).await.unwrap();
    for path in below.iter().map(|name| service.child(name)).chain([service.clone()]) {
        world.operator.tree().write(vec![Write::Delete { path }]).await.unwrap();
        world.pass(&mut agent, &mut lease).await;
        assert_eq!(world.rules(), ["80/tcp", "3306/tcp"]);
    }
    for _ in 0..3 {
        tokio::time::advance(CONFIRM_AFTER).await;
        world.pass(&mut agent, &mut lease).await;
    }
    assert_eq!(world.rules(), ["80/tcp", "3306/tcp"]);
    // The controls: a command closes at once, and another client's removal of a flag after a second
    // read.
    world.operator.unexpose(&"sql".parse().unwrap()).await.unwrap();
    world.pass(&mut agent, &mut lease).await;
    assert_eq!(world.rules(), ["80/tcp"]);
    world.operator.expose(&"sql".parse().unwrap()).await.unwrap();
    world.pass(&mut agent, &mut lease).await;
    let path = paths::exposed(ServiceId::new(1));
    world.operator.tree().write(vec![Write::Delete { path }]).await.unwrap();
    for open in [2, 2, 1] {
        world.pass(&mut agent, &mut lease).await;
        assert_eq!(world.rules().len(), open);
        tokio::time::advance(CONFIRM_AFTER / 2).await;
    }
}

/// Checkpoint storage of one test.
#[derive(Default)]
struct Disk(std::sync::Mutex<Option<Vec<u8>>>);

impl CheckpointStorage for Disk {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn save(&self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        *self.0.lock().unwrap() = Some(bytes);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_closes_no_port_until_it_is_accepted() {
    let world = World::new().await;
    let disk: Arc<Disk> = Arc::default();
    let agent = || {
        let memory: Arc<dyn CheckpointStorage> = Arc::clone(&disk) as _;
        let guard = RollbackGuard::of_machine(HERE, &world.operator.info().roles, &world.identity, memory);
        world.agent().with_guard(Arc::new(guard))
    };
    let backup = world.store.backup();
    let (mut first, mut lease) = (agent(), world.lease().await);
    world.expose("web", 0, "80").await;
    world.pass(&mut first, &mut lease).await;
    assert_eq!(world.rules(), ["80/tcp"]);
    world.store.restore(&backup);
    let mut lease = world.lease().await;
    first.drop_caches();
    let mut second = agent();
    for agent in [&mut first, &mut second] {
        for _ in 0..3 {
            world.pass(agent, &mut lease).await;
            assert_eq!(world.rules(), ["80/tcp"]);
            tokio::time::advance(CONFIRM_AFTER).await;
        }
        let problem = world.report().await.problem.unwrap_or_default();
        assert!(problem.contains("the store went back"), "{problem}");
    }
    let accepted = world.operator.accept_store().await.unwrap();
    assert_eq!(accepted.agents, [Acceptance::Machine(HERE)]);
    world.pass(&mut second, &mut lease).await;
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass(&mut second, &mut lease).await;
    assert_eq!(world.rules(), Vec::<String>::new(), "the control: the restored store exposes nothing");
}

#[tokio::test(start_paused = true)]
async fn unreadable_data_is_frozen_and_affects_no_other_service() {
    let world = World::new().await;
    world.expose("web", 0, "80").await;
    world.expose("sql", 1, "3306").await;
    let flag = paths::exposed(ServiceId::new(0));
    world.operator.tree().set_acl(&flag, world.operator.info().roles.operators()).await.unwrap();
    let view = observe(&world.machine, HERE).await.unwrap();
    let Exposure::To(Err(reason)) = &view.services[&ServiceId::new(0)] else { panic!("{view:?}") };
    assert!(reason.starts_with(flag.as_str()), "{reason}");
    assert_eq!(view.services[&ServiceId::new(1)], Exposure::To(Ok(vec![])));
    let secret = paths::unit_credentials(UnitId::new(1));
    let version = world.operator.tree().get(&secret).await.unwrap().version;
    let garbage = Write::SetIfVersion { path: secret.clone(), data: b"{".to_vec(), version };
    world.operator.tree().write(vec![garbage]).await.unwrap();
    let view = observe(&world.machine, HERE).await.unwrap();
    assert_eq!(
        view.services[&ServiceId::new(1)],
        Exposure::To(Ok(vec![])),
        "the credential was added before"
    );
}

#[tokio::test(start_paused = true)]
async fn the_error_of_a_second_agent_names_the_first() {
    let world = World::new().await;
    let claim = world.claim("process 1 on here");
    let key = LeaseKey::machine(HERE);
    let mut lease = Lease::acquire(&world.machine, &key, &claim.acl, &claim.holder).await.unwrap();
    let (_stop, stopped) = watch::channel(false);
    let (progress, _) = watch::channel(Progress::default());
    let mut agent = world.agent();
    let second = world.claim("process 2 on here");
    let refused = run(Some(&mut agent), &world.machine, &second, &progress, stopped).await.unwrap_err();
    assert_eq!(refused.to_string(), "machine 0 already has an agent: process 1 on here");
    assert!(lease.confirm(&world.machine).await.unwrap());
    assert!(matches!(refused, MachineError::Claimed { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_controller_ignores_a_self_managed_machine_without_a_group() {
    let world = World::new().await;
    world.expose("web", 0, "80").await;
    let roles = world.operator.info().roles.clone();
    let acl = roles.controllers();
    let lease = Lease::acquire(&world.controller, &LeaseKey::firewall(), &acl, "c").await.unwrap();
    let cloud = Memory::new(MemorySettings::default());
    let policy = Policy::with_own_ports([]);
    let mut controller =
        FirewallController::new(world.controller.clone(), cloud.clone(), policy, roles.clone(), || 0);
    controller.prepare().await.unwrap();
    let mut everything = crate::store::changes::Dirty::default();
    everything.add(&Event::Everything, Instant::now());
    let pass = controller.pass(&everything, &lease).await.unwrap();
    assert_eq!(pass.pending, 1, "no agent manages it yet");
    let acl = roles.machine_firewall(&world.identity);
    let report = Write::create(paths::machine_firewall(HERE), "{\"granted\": {}}", acl);
    world.machine.write(vec![report]).await.unwrap();
    let pass = controller.pass(&everything, &lease).await.unwrap();
    assert_eq!(pass.pending, 0);
    assert!(!world.operator.tree().exists(&paths::firewall_report(HERE)).await.unwrap());
    // A group in the cloud is managed as well: a packet has to pass both firewalls.
    cloud.add_group(MachineNumber::new(0));
    controller.pass(&everything, &lease).await.unwrap();
    assert!(world.operator.tree().exists(&paths::firewall_report(HERE)).await.unwrap());
}
