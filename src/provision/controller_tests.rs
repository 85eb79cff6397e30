//! Tests of the provisioning loop with paused time, an in-memory store and an in-memory provider.

use std::time::Duration;

use portcullis_provider::memory::{CallName, Failure as Answer, Fault, MemorySettings};
use portcullis_provider::provider::{InstanceId, Launch, MachineNumber, UserData};
use portcullis_provider::{Error, Memory, Subject};
use tokio::task::JoinHandle;

use super::*;
use crate::firewall::controller::FirewallController;
use crate::firewall::leader_loop::{Progress, run_provisioning};
use crate::firewall::metrics::Metrics;
use crate::firewall::policy::Policy;
use crate::firewall::report::Report;
use crate::model::UnitName;
use crate::model::ports::parse_argument;
use crate::provision::plan::Step;
use crate::store::lease::LeaseKey;
use crate::store::paths::NodePath;
use crate::store::records::Placement;
use crate::store::tree::Write;
use crate::store::{Credential, Deploy, Environment, MemoryStore, MemoryTree, UnitPorts};

const RESYNC: Duration = Duration::from_secs(60);

/// Longer than several resyncs and the longest pause between retries.
const LONG: Duration = Duration::from_secs(300);

struct World {
    store: MemoryStore,
    operator: Environment<MemoryTree>,
    controller: Credential,
    provider: Memory,
    metrics: Metrics,
    running: Option<JoinHandle<()>>,
    /// Kept, because a dropped sender counts as a request to stop.
    stop: watch::Sender<bool>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.crash();
    }
}

impl World {
    async fn new(settings: MemorySettings) -> World {
        let (store, operator, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let provider = Memory::new(settings);
        let stop = watch::Sender::new(false);
        let metrics = Metrics::default();
        World { store, operator, controller, provider, metrics, running: None, stop }
    }

    fn start(&mut self) {
        let tree = self.store.connect(Some(&self.controller));
        let roles = self.operator.info().roles.clone();
        let boot = BootConfig::new("test".parse().unwrap(), "zk:2181".parse().unwrap(), None, roles.clone());
        let mut provisioner = Provisioner::new(tree.clone(), self.provider.clone(), boot, || 0);
        let (policy, provider) = (Policy::with_own_ports([2181]), self.provider.clone());
        let controller = FirewallController::new(tree.clone(), provider, policy, roles.clone(), || 0);
        let mut controller = controller.with_metrics(self.metrics.clone());
        let stopped = self.stop.subscribe();
        self.running = Some(tokio::spawn(async move {
            let progress = watch::Sender::new(Progress::default());
            let some = Some(&mut provisioner);
            run_provisioning(&mut controller, some, &tree, &roles, RESYNC, &progress, stopped).await.unwrap();
        }));
    }

    fn crash(&mut self) {
        self.running.take().into_iter().for_each(|running| running.abort());
    }

    async fn started(settings: MemorySettings) -> World {
        let mut world = World::new(settings).await;
        world.start();
        world
    }

    async fn record(&self, machine: MachineId) -> records::Machine {
        self.operator.machine(machine).await.unwrap()
    }

    async fn instance(&self, machine: MachineId) -> Option<InstanceId> {
        self.record(machine).await.instance_id.map(|id| InstanceId::new(id.as_str()))
    }

    async fn report(&self, machine: MachineId) -> Report {
        let node = self.operator.tree().get(&paths::firewall_report(machine)).await;
        node.map(|node| Report::parse(&node.data).unwrap()).unwrap_or_default()
    }

    /// Deletes a node and everything below it, which no command does.
    async fn lose(&self, root: NodePath) {
        let tree = self.operator.tree();
        let (mut lost, mut next) = (vec![root], 0);
        while let Some(path) = lost.get(next).cloned() {
            lost.extend(tree.children(&path).await.unwrap().iter().map(|name| path.child(name)));
            next += 1;
        }
        tree.write(lost.into_iter().rev().map(|path| Write::Delete { path }).collect()).await.unwrap();
    }

    fn ports(&self, machine: MachineId) -> Option<usize> {
        self.provider.actual(MachineNumber::new(machine.number())).map(|rules| rules.owned.len())
    }

    /// Deploys an exposed service with an open port on a machine.
    async fn expose_on(&self, name: &str, machine: MachineId) {
        let deploy = Deploy {
            service: name.parse().unwrap(),
            charm: format!("local:{name}-1").parse().unwrap(),
            metadata: serde_json::Map::new(),
            units: 1,
            to: Some(machine),
        };
        self.operator.deploy(&deploy).await.unwrap();
        let unit = self.operator.unit(&UnitName::new(name.parse().unwrap(), 0)).await.unwrap().0;
        UnitPorts::new(self.operator.tree(), unit).open(parse_argument("80").unwrap()).await.unwrap();
        self.operator.expose(&name.parse().unwrap()).await.unwrap();
    }
}

fn denied() -> Answer {
    Answer::Error(Error::Denied { what: Subject::Provider, reason: "no rights".to_owned() })
}

async fn soon() {
    tokio::time::sleep(Duration::from_secs(10)).await;
}

#[tokio::test(start_paused = true)]
async fn a_machine_is_launched_recorded_and_gets_its_rules() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    world.expose_on("a", machine).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let record = world.record(machine).await;
    assert!(world.provider.is_running(&world.instance(machine).await.unwrap()));
    assert_eq!(record.addresses.len(), 2);
    assert_eq!(record.rest["instance-state"], "running");
    assert_eq!(world.ports(machine), Some(2), "one port, in both families");
    assert_eq!(world.report(machine).await.problem, None);
}

#[tokio::test(start_paused = true)]
async fn a_converged_controller_only_reads_and_ignores_units() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    soon().await;
    let (writes, lists) = (world.provider.writes(), world.provider.calls_of(CallName::List));
    world.expose_on("a", machine).await;
    soon().await;
    assert_eq!(world.provider.calls_of(CallName::List), lists, "no look for units and ports");
    assert_eq!(world.provider.writes(), writes + 1, "the rules, in one request");
    tokio::time::sleep(10 * RESYNC).await;
    assert_eq!(world.provider.writes(), writes + 1);
    let looks = world.provider.calls_of(CallName::List) - lists;
    assert!((9..=11).contains(&looks), "one look a resync, not {looks}");
}

#[tokio::test(start_paused = true)]
async fn a_terminated_machine_loses_its_instance_and_then_its_group() {
    let world = World::started(MemorySettings { busy_calls: 12, ..MemorySettings::default() }).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    soon().await;
    let instance = world.instance(machine).await.unwrap();
    world.operator.terminate_machines(&[machine]).await.unwrap();
    soon().await;
    assert!(!world.provider.is_running(&instance));
    assert!(world.ports(machine).is_some(), "in use for as long as the instance ends");
    tokio::time::sleep(LONG).await;
    assert_eq!(world.ports(machine), None);
    assert!(world.provider.calls_of(CallName::DeleteGroup) > 1);
}

#[tokio::test(start_paused = true)]
async fn an_instance_is_kept_while_a_unit_names_a_machine_whose_record_is_missing() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    world.operator.add_machine(None).await.unwrap();
    world.expose_on("a", machine).await;
    soon().await;
    let instance = world.instance(machine).await.unwrap();
    world.lose(paths::machine(machine)).await;
    tokio::time::sleep(LONG).await;
    assert!(world.provider.is_running(&instance));
    assert_eq!(world.ports(machine), Some(2), "its ports stay open");
    let note = world.report(machine).await.note.unwrap();
    assert!(note.starts_with("its record is missing from the store and unit a/0 names it"), "{note}");
    world.lose(paths::unit(world.operator.unit(&"a/0".parse().unwrap()).await.unwrap().0)).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!world.provider.is_running(&instance));
}

/// A record that is missing in one read and back in the next ends no instance.
#[tokio::test(start_paused = true)]
async fn an_instance_is_kept_if_its_record_is_missing_only_for_a_moment() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    world.operator.add_machine(None).await.unwrap();
    soon().await;
    let (instance, path) = (world.instance(machine).await.unwrap(), paths::machine(machine));
    let record = world.operator.tree().get(&path).await.unwrap().data;
    let lists = world.provider.calls_of(CallName::List);
    world.lose(path.clone()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(world.provider.calls_of(CallName::List) > lists, "no pass read the store without the record");
    let acl = world.operator.info().roles.machine(&world.operator.info().roles.controller);
    world.operator.tree().write(vec![Write::create(path, record, acl)]).await.unwrap();
    tokio::time::sleep(LONG).await;
    assert!(world.provider.is_running(&instance));
    assert_eq!(world.provider.calls_of(CallName::Terminate), 0);
}

#[tokio::test(start_paused = true)]
async fn removal_closes_ports_and_terminates_independently() {
    for (refused, open, runs) in [(CallName::Terminate, 0, true), (CallName::RevokeAll, 2, false)] {
        let mut world =
            World::started(MemorySettings { busy_calls: u64::MAX / 2, ..MemorySettings::default() }).await;
        let machine = world.operator.add_machine(None).await.unwrap();
        world.operator.add_machine(None).await.unwrap();
        world.expose_on("a", machine).await;
        soon().await;
        let instance = world.instance(machine).await.unwrap();
        // No controller runs that could close the ports before the machine is removed.
        world.crash();
        world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
        world.operator.terminate_machines(&[machine]).await.unwrap();
        world.provider.set_script(move |call| (call.name == refused).then(|| Fault::Before(denied())));
        world.start();
        soon().await;
        assert_eq!(world.ports(machine), Some(open), "{refused:?}");
        assert_eq!(world.provider.is_running(&instance), runs, "{refused:?}");
        let problem = "terminated, and not removed yet: not allowed for the provider: no rights";
        assert_eq!(world.report(machine).await.problem.as_deref(), Some(problem), "{refused:?}");
        let writes = world.provider.writes();
        tokio::time::sleep(2 * RESYNC).await;
        assert!(world.provider.writes() <= writes + 12, "{refused:?}: tried again, and not all the time");
        assert_eq!(world.report(machine).await.problem.as_deref(), Some(problem), "{refused:?}");
        world.provider.clear_script();
        world.provider.configure(|settings| settings.busy_calls = 0);
        tokio::time::sleep(2 * RESYNC).await;
        assert_eq!((world.ports(machine), world.report(machine).await.problem), (None, None));
    }
}

/// Without machines in the store, the report about the removed machine is all that is left.
#[tokio::test(start_paused = true)]
async fn the_last_removed_machine_is_reported_until_its_objects_are_gone() {
    let world =
        World::started(MemorySettings { busy_calls: u64::MAX / 2, ..MemorySettings::default() }).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    soon().await;
    world.operator.terminate_machines(&[machine]).await.unwrap();
    tokio::time::sleep(2 * RESYNC).await;
    let problem = world.report(machine).await.problem.unwrap();
    assert!(problem.starts_with("terminated, and not removed yet: "), "{problem}");
    assert!(problem.ends_with("still in use"), "{problem}");
    let deletes = world.provider.calls_of(CallName::DeleteGroup);
    let version = world.operator.tree().get(&paths::firewall_report(machine)).await.unwrap().version;
    tokio::time::sleep(LONG).await;
    let tries = world.provider.calls_of(CallName::DeleteGroup) - deletes;
    assert!((4..=15).contains(&tries), "{tries} tries at the slowest pace of a back-off");
    let node = world.operator.tree().get(&paths::firewall_report(machine)).await.unwrap();
    assert_eq!(node.version, version, "written once");
    world.provider.configure(|settings| settings.busy_calls = 0);
    tokio::time::sleep(LONG).await;
    assert_eq!(world.ports(machine), None);
    let report = world.operator.tree().get(&paths::firewall_report(machine)).await;
    assert!(matches!(report, Err(tree::Error::NoNode(_))), "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn removals_do_not_wait_for_launches() {
    let mut world = World::new(MemorySettings::default()).await;
    for _ in 0..20 {
        world.operator.add_machine(None).await.unwrap();
    }
    let user_data = UserData::new("");
    let left = world.provider.launch(&Launch { machine: MachineNumber::new(50), user_data }).await.unwrap();
    world
        .provider
        .set_script(|call| (call.name == CallName::Launch).then_some(Fault::Before(Answer::Silence)));
    world.start();
    soon().await;
    assert!(!world.provider.is_running(&left.id));
}

#[tokio::test(start_paused = true)]
async fn a_machine_without_credentials_is_reported_and_not_launched() {
    let mut world = World::new(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    let path = paths::machine_credentials(machine);
    world.operator.tree().write(vec![Write::Delete { path: path.clone() }]).await.unwrap();
    world.start();
    soon().await;
    let problem = format!("machine {machine} cannot be used: {path} is missing");
    assert_eq!(world.report(machine).await.problem, Some(problem));
    assert_eq!(world.provider.calls_of(CallName::Launch), 0);
}

#[tokio::test(start_paused = true)]
async fn an_adopted_instance_is_released_and_not_terminated() {
    let world = World::started(MemorySettings::default()).await;
    let theirs = InstanceId::new("i-theirs");
    world.provider.add_instance(&theirs);
    let machine = world.operator.add_machine(Some("i-theirs".parse().unwrap())).await.unwrap();
    world.expose_on("a", machine).await;
    soon().await;
    assert_eq!(world.ports(machine), Some(2));
    assert_eq!(world.record(machine).await.addresses[0], "i-theirs.public.example.com");
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.operator.terminate_machines(&[machine]).await.unwrap();
    soon().await;
    assert!(world.provider.is_running(&theirs) && world.ports(machine).is_none());
    assert_eq!(world.provider.calls_of(CallName::Terminate), 0);
}

#[tokio::test(start_paused = true)]
async fn a_missing_instance_is_reported_and_not_replaced() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    soon().await;
    let instance = world.instance(machine).await.unwrap();
    world.provider.lose_instance(&instance);
    tokio::time::sleep(2 * RESYNC).await;
    assert_eq!(world.report(machine).await.problem, Some(format!("instance {instance} has ended")));
    assert_eq!(world.record(machine).await.rest["instance-state"], "terminated");
    assert_eq!(world.provider.calls_of(CallName::Launch), 1);
    let missing = world.operator.add_machine(Some("i-nowhere".parse().unwrap())).await.unwrap();
    soon().await;
    assert_eq!(world.report(missing).await.problem.unwrap(), "instance i-nowhere is not there");
    world.provider.add_instance(&InstanceId::new("i-nowhere"));
    tokio::time::sleep(LONG).await;
    assert_eq!(world.report(missing).await.problem, None);
}

#[tokio::test(start_paused = true)]
async fn a_refused_launch_is_reported_and_delays_no_other() {
    let world = World::started(MemorySettings::default()).await;
    let refused = world.operator.add_machine(None).await.unwrap();
    let number = MachineNumber::new(refused.number());
    world.provider.set_script(move |call| {
        (call.name == CallName::Launch && call.machine == Some(number)).then(|| Fault::Before(denied()))
    });
    let other = world.operator.add_machine(None).await.unwrap();
    soon().await;
    assert!(world.instance(other).await.is_some());
    assert_eq!(world.report(refused).await.problem.unwrap(), "not allowed for the provider: no rights");
    let launches = world.provider.calls_of(CallName::Launch);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(
        world.provider.calls_of(CallName::Launch),
        launches,
        "at the pace of what only people can help"
    );
    world.provider.clear_script();
    tokio::time::sleep(LONG).await;
    assert!(world.instance(refused).await.is_some());
    assert_eq!(world.report(refused).await.problem, None);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_provider_is_reported_and_terminates_nothing() {
    let mut world = World::started(MemorySettings::default()).await;
    let first = world.operator.add_machine(None).await.unwrap();
    soon().await;
    world.crash();
    world.provider.set_script(|call| (call.name == CallName::List).then(|| Fault::Before(denied())));
    world.start();
    let second = world.operator.add_machine(None).await.unwrap();
    soon().await;
    assert_eq!(world.report(second).await.problem.unwrap(), "not allowed for the provider: no rights");
    assert_eq!(world.report(first).await.problem, None, "its rules are as they should be");
    world.provider.clear_script();
    tokio::time::sleep(LONG).await;
    assert!(world.instance(second).await.is_some());
    assert_eq!(world.provider.calls_of(CallName::Terminate), 0);
}

#[tokio::test(start_paused = true)]
async fn failures_are_counted_by_kind() {
    let mut world = World::new(MemorySettings::default()).await;
    let throttled = || Answer::Error(Error::Throttled { what: Subject::Provider });
    let mut lists = 0;
    world.provider.set_script(move |call| {
        lists += u32::from(call.name == CallName::List);
        match call.name {
            CallName::List if lists <= 2 => Some(Fault::Before(throttled())),
            CallName::Launch => Some(Fault::Before(denied())),
            _ => None,
        }
    });
    world.operator.add_machine(None).await.unwrap();
    world.start();
    soon().await;
    let text = world.metrics.render(&Progress::default());
    for line in ["{kind=\"throttled\"} 2", "{kind=\"denied\"} 1"] {
        let line = format!("portcullis_firewall_failures_total{line}");
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_group_is_created_again_with_its_rules() {
    let world = World::started(MemorySettings::default()).await;
    let machine = world.operator.add_machine(None).await.unwrap();
    world.expose_on("a", machine).await;
    soon().await;
    world.provider.remove_group(MachineNumber::new(machine.number()));
    tokio::time::sleep(RESYNC + Duration::from_secs(5)).await;
    assert_eq!(world.ports(machine), Some(2));
    assert_eq!(world.report(machine).await.problem, None);
}

#[path = "controller_crash_tests.rs"]
mod crashes;
