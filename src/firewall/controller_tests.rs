//! Tests of the controller with paused time and with the in-memory store and provider.

use std::time::Duration;

use portcullis_provider::memory::{CallName, Failure, Fault, MemorySettings};
use portcullis_provider::provider::MachineNumber;
use portcullis_provider::rule::{Cidr, Rule};
use portcullis_provider::{Error as ProviderError, Memory, Subject};

use super::*;
use crate::firewall::change_log::{ChangeLog, Entry};
use crate::machine::number;
use crate::model::ports::parse_argument;
use crate::model::{ServiceId, ServiceName, UnitId, UnitName};
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::store::changes::Key;
use crate::store::lease::LeaseKey;
use crate::store::paths::{self, NodePath};
use crate::store::records::Placement;
use crate::store::tree::{Event, Write};
use crate::store::{Deploy, Environment, MemoryStore, MemoryTree, UnitPorts};

struct World {
    operator: Environment<MemoryTree>,
    provider: Memory,
    controller: FirewallController<MemoryTree, Memory>,
    lease: Lease,
}

fn everything() -> Dirty {
    let mut dirty = Dirty::default();
    dirty.add(&Event::Everything, Instant::now());
    dirty
}

impl World {
    async fn new() -> World {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let provider = Memory::new(MemorySettings::default());
        let roles = environment.info().roles.clone();
        let tree = store.connect(Some(&controller));
        let lease =
            Lease::acquire(&tree, &LeaseKey::firewall(), &roles.controllers(), "agent").await.unwrap();
        let policy = Policy::with_own_ports([2181]);
        let controller = FirewallController::new(tree, provider.clone(), policy, roles, || 0);
        controller.prepare().await.unwrap();
        World { operator: environment, provider, controller, lease }
    }

    /// Creates a service with one unit on its own machine, whose group exists.
    async fn deploy(&self, name: &str) -> UnitId {
        let machine = self.operator.add_machine(Some(format!("i-{name}").parse().unwrap())).await.unwrap();
        self.provider.add_group(number(machine));
        self.deploy_on(name, machine).await
    }

    async fn deploy_on(&self, name: &str, machine: MachineId) -> UnitId {
        let service: ServiceName = name.parse().unwrap();
        let deploy = Deploy {
            service: service.clone(),
            charm: format!("local:{name}-1").parse().unwrap(),
            metadata: serde_json::Map::new(),
            units: 1,
            to: Some(machine),
        };
        self.operator.deploy(&deploy).await.unwrap();
        self.operator.unit(&UnitName::new(service, 0)).await.unwrap().0
    }

    async fn open(&self, unit: UnitId, port: &str) {
        UnitPorts::new(self.operator.tree(), unit).open(parse_argument(port).unwrap()).await.unwrap();
    }

    async fn close(&self, unit: UnitId, port: &str) {
        UnitPorts::new(self.operator.tree(), unit).close(parse_argument(port).unwrap()).await.unwrap();
    }

    async fn expose(&self, name: &str) {
        self.operator.expose(&name.parse().unwrap()).await.unwrap();
    }

    async fn overwrite(&self, path: NodePath, data: &[u8]) {
        let version = self.operator.tree().get(&path).await.unwrap().version;
        let write = Write::SetIfVersion { path, data: data.to_vec(), version };
        self.operator.tree().write(vec![write]).await.unwrap();
    }

    async fn pass(&mut self) -> Pass {
        self.lease.confirm(self.operator.tree()).await.unwrap();
        self.controller.pass(&everything(), &self.lease).await.unwrap()
    }

    async fn pass_for(&mut self, key: Key) -> Pass {
        let path = match key {
            Key::Service(id) => paths::exposed(id),
            Key::Unit(id) => paths::unit_ports(id),
            Key::Machine(id) => paths::machine(id),
        };
        let mut dirty = Dirty::default();
        dirty.add(&Event::Changed(path), Instant::now());
        self.lease.confirm(self.operator.tree()).await.unwrap();
        self.controller.pass(&dirty, &self.lease).await.unwrap()
    }

    fn rules(&self, machine: u32) -> Vec<String> {
        let rules = self.provider.actual(MachineNumber::new(machine)).unwrap();
        rules
            .owned
            .iter()
            .filter(|rule| rule.source == Cidr::WORLD_V4)
            .map(|rule| rule.ports.to_string())
            .collect()
    }

    fn problem(&self, machine: u32) -> Option<String> {
        self.controller.reports.get(MachineId::new(machine)).and_then(|report| report.problem.clone())
    }
}

#[tokio::test(start_paused = true)]
async fn exposed_ports_open_and_unexposed_ones_close() {
    let mut world = World::new().await;
    let unit = world.deploy("wordpress").await;
    world.open(unit, "80").await;
    world.pass().await;
    assert_eq!(world.rules(0), Vec::<String>::new(), "requested, and not exposed");
    world.expose("wordpress").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    world.open(unit, "443").await;
    world.close(unit, "80").await;
    world.pass_for(Key::Unit(unit)).await;
    assert_eq!(world.rules(0), ["443/tcp"]);
    world.operator.unexpose(&"wordpress".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0), Vec::<String>::new());
}

async fn change_log(world: &World) -> Vec<(u64, Vec<String>)> {
    let node = world.operator.tree().get(&paths::firewall_log(MachineId::new(0))).await.unwrap();
    let change_log = ChangeLog::parse(&node.data).unwrap();
    let items = |entry: &Entry| entry.items.iter().map(|i| format!("{} {:?}", i.what, i.units)).collect();
    change_log.entries().iter().map(|entry| (entry.at, items(entry))).collect()
}

#[tokio::test(start_paused = true)]
async fn the_change_log_contains_each_change_once() {
    let mut world = World::new().await;
    let unit = world.deploy("wordpress").await;
    world.open(unit, "80").await;
    world.expose("wordpress").await;
    let start = Instant::now();
    world.controller.wall_ms = Box::new(move || 1_000 + u64::try_from(start.elapsed().as_millis()).unwrap());
    world.pass().await;
    tokio::time::advance(Duration::from_secs(1)).await;
    for _ in 0..3 {
        world.pass().await;
    }
    world.close(unit, "80").await;
    world.pass().await;
    let recorded = change_log(&world).await;
    let expected = [
        (1_000, vec!["open 80/tcp to 0.0.0.0/0, ::/0 [\"wordpress/0\"]".to_owned()]),
        (2_000, vec!["close 80/tcp from 0.0.0.0/0, ::/0 [\"wordpress/0\"]".to_owned()]),
    ];
    assert_eq!(recorded, expected);
}

#[tokio::test(start_paused = true)]
async fn a_converged_machine_causes_no_writes() {
    let mut world = World::new().await;
    let unit = world.deploy("wordpress").await;
    world.open(unit, "80").await;
    world.expose("wordpress").await;
    world.pass().await;
    let (writes, versions) = (world.provider.writes(), world.controller.reports.clone());
    for _ in 0..3 {
        let pass = world.pass().await;
        assert_eq!((pass.opened, pass.closed, pass.pending), (0, 0, 0));
    }
    assert_eq!(world.provider.writes(), writes);
    assert_eq!(world.controller.reports, versions);
}

#[tokio::test(start_paused = true)]
async fn one_changed_unit_costs_one_call_for_one_machine() {
    let mut world = World::new().await;
    let mut units = Vec::new();
    for name in ["a", "b", "c", "d"] {
        units.push(world.deploy(name).await);
        world.expose(name).await;
    }
    world.pass().await;
    let calls = world.provider.calls();
    world.open(units[2], "80").await;
    let pass = world.pass_for(Key::Unit(units[2])).await;
    assert_eq!((pass.machines, pass.opened), (1, 2), "one port, in both families");
    assert_eq!(world.provider.calls(), calls + 1, "what was seen is reported: one open and no read");
}

#[tokio::test(start_paused = true)]
async fn a_port_stays_open_until_the_last_unit_closes_it() {
    let mut world = World::new().await;
    let first = world.deploy("a").await;
    let second = world.deploy_on("b", MachineId::new(0)).await;
    for (name, unit) in [("a", first), ("b", second)] {
        world.open(unit, "80").await;
        world.expose(name).await;
    }
    world.pass().await;
    world.close(first, "80").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    world.operator.destroy_service(&"b".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn invalid_data_freezes_its_unit_and_no_other() {
    let mut world = World::new().await;
    let broken = world.deploy("a").await;
    let healthy = world.deploy_on("b", MachineId::new(0)).await;
    for (name, unit, port) in [("a", broken, "80"), ("b", healthy, "90")] {
        world.open(unit, port).await;
        world.expose(name).await;
    }
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp", "90/tcp"]);
    world.overwrite(paths::unit_ports(broken), b"garbage: [").await;
    world.close(healthy, "90").await;
    world.open(healthy, "91").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp", "91/tcp"]);
    let report = world.controller.reports.get(MachineId::new(0)).unwrap();
    assert!(report.frozen[&broken].starts_with("/units/unit-0000000000/ports: "), "{report:?}");
    // Even without the unit's record, the machine's own list shows where the unit is.
    world.overwrite(paths::unit(broken), b"\xff").await;
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp", "91/tcp"]);
}

#[tokio::test(start_paused = true)]
async fn manual_changes_are_reverted_and_foreign_rules_left_alone() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    let foreign = Rule::new(parse_argument("5432").unwrap(), "10.0.0.0/8".parse().unwrap());
    let wire = portcullis_provider::rule::WirePorts { proto: "tcp", from: Some(5432), to: Some(5432) };
    world.provider.tamper(MachineNumber::new(0), |rules| {
        rules.owned.clear();
        rules.foreign.push(portcullis_provider::provider::Foreign::from_wire(wire, foreign.source));
    });
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    assert_eq!(world.provider.actual(MachineNumber::new(0)).unwrap().foreign.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_identical_foreign_rule_is_not_created_again() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    let wire = portcullis_provider::rule::WirePorts { proto: "tcp", from: Some(80), to: Some(80) };
    world.provider.tamper(MachineNumber::new(0), |rules| {
        for source in [Cidr::WORLD_V4, Cidr::WORLD_V6] {
            rules.foreign.push(portcullis_provider::provider::Foreign::from_wire(wire, source));
        }
    });
    world.expose("a").await;
    let pass = world.pass().await;
    assert_eq!((pass.opened, pass.pending, world.provider.writes()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_failed_open_blocks_no_close_and_is_retried() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.close(unit, "80").await;
    world.open(unit, "443").await;
    let throttled = || Fault::Before(Failure::Error(ProviderError::Throttled { what: Subject::Provider }));
    world.provider.set_script(move |call| (call.name == CallName::Open).then(throttled));
    let pass = world.pass().await;
    assert_eq!((pass.closed, pass.failures.get("throttled")), (2, Some(&1)));
    assert_eq!(world.rules(0), Vec::<String>::new());
    assert!(world.problem(0).unwrap().contains("throttled"));
    world.provider.clear_script();
    tokio::time::sleep_until(world.controller.next_retry().unwrap()).await;
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(world.rules(0), ["443/tcp"]);
    assert_eq!((world.problem(0), world.controller.next_retry()), (None, None));
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_changes_nothing() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    tokio::time::advance(Duration::from_secs(60)).await;
    let failed = world.controller.pass(&everything(), &world.lease).await;
    assert!(failed.is_ok());
    assert_eq!(world.rules(0), Vec::<String>::new());
    assert_eq!(world.provider.writes(), 0);
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
}

#[tokio::test(start_paused = true)]
async fn an_unsent_change_is_pending_and_comes_first_in_the_next_pass() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    tokio::time::advance(Duration::from_secs(60)).await;
    world.controller.pass(&everything(), &world.lease).await.unwrap();
    assert_eq!(world.controller.next_retry(), Some(Instant::now()), "due at once");
    let report = |world: &World| world.controller.reports.get(MachineId::new(0)).unwrap().clone();
    assert!(!report(&world).pending.is_empty());
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!((world.rules(0), world.controller.next_retry()), (vec!["80/tcp".to_owned()], None));

    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    tokio::time::advance(Duration::from_secs(60)).await;
    world.controller.pass(&everything(), &world.lease).await.unwrap();
    assert_eq!(world.rules(0), ["80/tcp"]);
    assert!(!report(&world).granted[&unit].is_empty(), "it is open, and the report names its unit");
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(world.rules(0), Vec::<String>::new());
    assert!(report(&world).granted.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failed_close_is_not_reported_as_done() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    let throttled = || Fault::Before(Failure::Error(ProviderError::Throttled { what: Subject::Provider }));
    world.provider.set_script(move |call| (call.name == CallName::Close).then(throttled));
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    let report = world.controller.reports.get(MachineId::new(0)).unwrap();
    assert!(!report.granted[&unit].is_empty() && report.problem.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_machine_without_an_instance_delays_no_other() {
    let mut world = World::new().await;
    let waiting = world.operator.add_machine(None).await.unwrap();
    let early = world.deploy_on("early", waiting).await;
    let unit = world.deploy("a").await;
    for (name, unit) in [("early", early), ("a", unit)] {
        world.open(unit, "80").await;
        world.expose(name).await;
    }
    world.pass().await;
    assert_eq!(world.problem(0).as_deref(), Some("not provisioned yet"));
    assert_eq!(world.rules(1), ["80/tcp"]);
}

#[tokio::test(start_paused = true)]
async fn a_note_is_in_the_report_until_it_is_removed() {
    let mut world = World::new().await;
    let waiting = world.operator.add_machine(None).await.unwrap();
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    let ids = BTreeSet::from([waiting, MachineId::new(1)]);
    let notes: BTreeMap<_, _> = ids.iter().map(|id| (*id, "its instance is gone".to_owned())).collect();
    assert_eq!(world.controller.set_notes(&notes, true), ids);
    assert_eq!(world.controller.set_notes(&notes, true), BTreeSet::new(), "unchanged");
    world.pass().await;
    assert_eq!(
        [world.problem(0), world.problem(1)],
        [const { "its instance is gone" }; 2].map(|t| Some(t.to_owned()))
    );
    assert_eq!(world.rules(1), ["80/tcp"], "its rules are managed anyway");
    assert_eq!(world.controller.set_notes(&BTreeMap::new(), true), ids);
    world.pass().await;
    assert_eq!((world.problem(0).as_deref(), world.problem(1)), (Some("not provisioned yet"), None));
}

#[tokio::test(start_paused = true)]
async fn a_removed_machine_is_not_retried() {
    let mut world = World::new().await;
    let ids = [0, 1].map(|n| format!("i-{n}").parse().unwrap());
    for id in ids {
        world.operator.add_machine(Some(id)).await.unwrap();
    }
    world.pass().await;
    assert_eq!(world.problem(0).as_deref(), Some("the provider has no group for its rules"));
    assert!(world.controller.next_retry().is_some());
    world.operator.terminate_machines(&[MachineId::new(0)]).await.unwrap();
    world.overwrite(paths::machine(MachineId::new(1)), b"garbage").await;
    world.pass_for(Key::Machine(MachineId::new(0))).await;
    world.pass_for(Key::Machine(MachineId::new(1))).await;
    assert_eq!(world.controller.next_retry(), None);
}

#[tokio::test(start_paused = true)]
async fn a_report_is_removed_with_its_machine() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Unit(unit)).await;
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass().await;
    world.operator.terminate_machines(&[MachineId::new(0)]).await.unwrap();
    world.pass_for(Key::Machine(MachineId::new(0))).await;
    let path = paths::firewall_report(MachineId::new(0));
    assert!(!world.operator.tree().exists(&path).await.unwrap());
}

#[path = "controller_atomic_tests.rs"]
mod atomic;
#[path = "controller_capacity_tests.rs"]
mod capacity;
#[path = "controller_confirm_tests.rs"]
mod confirm;
#[path = "controller_join_tests.rs"]
mod join;
#[path = "controller_metrics_tests.rs"]
mod metrics_and_logs;
#[path = "controller_order_tests.rs"]
mod order;
#[path = "controller_policy_tests.rs"]
mod policy_file;
#[path = "controller_refusal_tests.rs"]
mod refusal;
