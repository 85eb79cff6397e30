//! Regression scenarios: worlds that once failed, or in which a bug went undetected, written out as
//! actions. The choices behind a seed change with the simulator; these scenarios do not.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::requests::{Progress, Request};
use portcullis_provider::memory::Rewrite;
use portcullis_provider::provider::Origin;
use portcullis_provider::rule::Family;

use crate::LATENCIES_MS;
use crate::actions::{Action, RESYNC_RECOVERY, RETRY_RECOVERY};
use crate::checks::CHANGE_LIMIT;
use crate::faults::{Fault, Kind, Mishap};
use crate::instances;
use crate::interceptor::HANG;
use crate::oracle::MAX_AGE;
use crate::port_bits::PortBits;
use crate::record::Armed;
use crate::restored;
use crate::seeds::run_in_world;
use crate::world::{Shape, World, number};

type Run = Pin<Box<dyn Future<Output = ()>>>;
type Scenario = (&'static str, fn() -> Run);

/// Scenarios by name; each panics on failure.
pub(crate) const SCENARIOS: &[Scenario] = &[
    ("machines that become readable one by one", || Box::pin(machines_become_readable_one_by_one())),
    ("a read that fails", || Box::pin(a_read_fails())),
    ("a rule made by hand", || Box::pin(a_third_party_adds_the_rule())),
    ("a launch whose response is lost", || Box::pin(the_response_to_a_launch_is_lost())),
    ("a termination that hangs", || Box::pin(a_termination_hangs())),
    ("the last machine is removed", || Box::pin(the_last_machine_is_removed())),
    ("a store that is lost", || Box::pin(a_store_is_lost())),
    ("a lease too short for all changes", || Box::pin(a_lease_is_too_short())),
    ("a change during a backlog", || Box::pin(a_change_arrives_during_a_backlog())),
    ("opens that hang", || Box::pin(opens_hang())),
    ("ports after a restore", || Box::pin(restored::ports_stay_open())),
    ("another leader after a restore", || Box::pin(restored::another_controller_leads())),
    ("instances after a restore", || Box::pin(restored::instances_stay())),
    ("a mass close at a slow provider", || Box::pin(a_slow_provider_closes_most_rules())),
    ("records that are missing", || Box::pin(records_are_missing())),
    ("a rate limit that outlasts the lease", || Box::pin(the_rate_limit_outlasts_the_lease())),
    ("a denied request", || Box::pin(a_request_is_denied())),
    ("a refused port", || Box::pin(a_port_is_refused())),
    ("adjacent ports in a small group", || Box::pin(adjacent_ports_in_a_small_group())),
    ("adjacent ports at a provider that splits ranges", || Box::pin(adjacent_ports_are_split())),
    ("a denied repair", || Box::pin(a_repair_is_denied())),
    ("an empty list of machines", || Box::pin(instances::list_of_machines_is_empty())),
    ("a failed launch", || Box::pin(instances::a_failed_launch_waits_for_a_confirming_read())),
];

#[test]
fn all_regression_scenarios_pass() {
    for (name, scenario) in SCENARIOS {
        println!("{name}");
        run_in_world(scenario());
    }
}

fn armed(fault: Fault, kind: Kind) -> Action {
    Action::Arm(Armed { fault, kind: Some(kind), skip: 0 })
}

/// A read of the tree returned empty lists, the provider failed in the same pass, and the machines
/// recovered one by one: each closed fewer rules than the limit for a mass close, until all were
/// closed.
async fn machines_become_readable_one_by_one() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    // Opens six rules on every machine that has a unit.
    let placed: Vec<MachineId> =
        world.interceptor.lock().oracle.units.values().map(|unit| unit.machine).collect();
    let mut served = BTreeSet::new();
    for (unit, machine) in placed.into_iter().enumerate() {
        if served.insert(machine) {
            for port in [9, 10, 11] {
                world.perform(Action::Open(unit, port)).await;
            }
        }
    }
    for service in 0..3 {
        world.perform(Action::Expose(service)).await;
    }
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    let rules = |world: &World| -> Vec<usize> {
        let actual = served.iter().filter_map(|machine| world.interceptor.provider.actual(number(*machine)));
        actual.map(|rules| rules.owned.len()).collect()
    };
    let before = rules(&world);
    assert!(before.iter().all(|rules| *rules == 6) && before.len() > 1, "{before:?}");
    world.perform(armed(Fault::Empty, Kind::ReadLists)).await;
    world.perform(Action::FailCalls(1)).await;
    world.perform(Action::Expire(0)).await;
    world.pause(Duration::from_secs(5)).await;
    assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RETRY_RECOVERY).await;
    world.check().await;
    assert_eq!(rules(&world), before);
}

/// The shared group is deleted with the last machine and created again for the next one.
async fn the_last_machine_is_removed() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    for service in 0..3 {
        world.perform(Action::Destroy(service)).await;
    }
    // `Action::Terminate` never removes the last machine.
    let machines: Vec<MachineId> = world.interceptor.lock().oracle.machines.keys().copied().collect();
    world.operator.terminate_machines(&machines).await.expect("machines without units");
    {
        let mut shared = world.interceptor.lock();
        shared.oracle.machines.clear();
        shared.changed();
    }
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
    assert!(world.interceptor.provider.truth().groups.is_empty(), "{:?}", world.interceptor.provider.truth());
    world.operator.ask(Request::Clear).await.expect("a request");
    world.pause(RETRY_RECOVERY).await;
    let answer = world.operator.progress(Request::Clear).await.expect("a node");
    assert_eq!(answer, Progress::Done(Vec::new()));
    world.operator.withdraw(Request::Clear).await.expect("no request");
    world.perform(Action::Launch).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
    assert!(world.all_have_instances().await);
}

/// A new store replaces a lost one; launches succeed after its groups are adopted.
async fn a_store_is_lost() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(RESYNC_RECOVERY).await;
    world.check().await;
    world.interceptor.provider.lose_store("lost");
    world.perform(Action::Launch).await;
    world.pause(RESYNC_RECOVERY).await;
    assert!(!world.all_have_instances().await, "the group is another store's");
    world.operator.ask(Request::AdoptGroups).await.expect("a request");
    world.pause(RETRY_RECOVERY).await;
    let answer = world.operator.progress(Request::AdoptGroups).await.expect("a node");
    assert!(matches!(&answer, Progress::Done(lines) if lines.len() == 1), "{answer:?}");
    world.operator.withdraw(Request::AdoptGroups).await.expect("no request");
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    assert!(world.all_have_instances().await);
}

/// The read that follows an event fails, and the event is not repeated.
async fn a_read_fails() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    world.perform(Action::Expose(0)).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(armed(Fault::LostBefore, Kind::ReadMany)).await;
    world.perform(Action::Open(0, 0)).await;
    // Shorter than a resync, which would detect the change.
    world.pause(2 * RETRY_RECOVERY).await;
    assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
    world.check().await;
}

/// Only the middle one of three ports in a rule stays wanted, and a foreign rule already opens it.
async fn a_third_party_adds_the_rule() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let (service, machine) = {
        let shared = world.interceptor.lock();
        let unit = shared.oracle.units.values().next().expect("a unit");
        let machine = shared.oracle.machines.keys().position(|id| *id == unit.machine);
        (unit.service, machine.expect("a machine"))
    };
    for port in 0..3 {
        world.perform(Action::Open(0, port)).await;
    }
    world.perform(Action::Expose(service)).await;
    world.pause(CHANGE_LIMIT).await;
    world.perform(Action::EditRules(Mishap::ForeignEqual, machine)).await;
    world.perform(Action::Interrupt).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
    world.perform(Action::Close(0, 0)).await;
    world.perform(Action::Close(0, 2)).await;
    world.pause(CHANGE_LIMIT + Duration::from_secs(1)).await;
    world.check().await;
}

/// The response to a launch is lost; the provider lists the instance late and does not deduplicate
/// the launch.
async fn the_response_to_a_launch_is_lost() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(Action::Provider(Mishap::NoLaunchDeduplication, 0)).await;
    world.perform(Action::Provider(Mishap::DescribeLags, 3)).await;
    // Arming this fault also adds a machine to launch.
    world.perform(armed(Fault::LostAfter, Kind::Launch)).await;
    world.pause(Duration::from_millis(900)).await;
    let launched = world.interceptor.provider.truth().instances.len();
    assert_eq!(launched, 3 + 2, "one duplicate");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
}

/// A machine is removed with a port open, and the request to terminate or release its instance
/// hangs.
async fn a_termination_hangs() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.perform(Action::Launch).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    let leaves = number(world.idle_machine(0));
    let instances = world.interceptor.provider.truth().instances;
    let instance = instances.iter().find(|instance| instance.machine == leaves).expect("an instance");
    let end = if instance.origin == Origin::Launched { Kind::Terminate } else { Kind::Release };
    world.interceptor.lock().hanging = Some(end);
    world.cause_call(Kind::RevokeAll).await;
    assert!(
        world.interceptor.lock().oracle.machines.keys().all(|id| number(*id) != leaves),
        "the machine was removed"
    );
    world.pause(Duration::from_secs(1)).await;
    let rules = world.interceptor.provider.actual(leaves).expect("a group");
    assert!(rules.owned.is_empty() && world.interceptor.provider.is_running(&instance.id), "{rules:?}");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
}

/// A world in which every unit has a port, and a slow provider has to open those of one service.
async fn exposed_to_a_slow_provider(shape: Shape) -> World {
    let mut world = World::new(0, shape, false).await;
    let units = world.interceptor.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(Action::Latency(3_500)).await;
    world.perform(Action::Expose(0)).await;
    world
}

/// More machines need a change than a slow provider completes within a lease. No later event
/// triggers a pass for the others, and the resync is far away.
async fn a_lease_is_too_short() {
    let mut world = exposed_to_a_slow_provider(Shape::large(1, false)).await;
    world.pause(CHANGE_LIMIT).await;
    let late = world.lacking();
    assert!(!late.is_empty(), "some changes must not fit into the lease");
    for machine in late {
        let report = world.report(machine).await;
        assert!(report.is_pending(), "machine {machine} has no pending report: {report:?}");
    }
    world.pause(Duration::from_secs(23)).await;
    assert_eq!(world.lacking(), [], "postponed changes waited for a resync");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RETRY_RECOVERY + CHANGE_LIMIT).await;
    world.check().await;
}

/// A provider with a latency of up to 30 seconds has to close most rules.
async fn a_slow_provider_closes_most_rules() {
    for latency_ms in std::iter::once(0).chain(LATENCIES_MS) {
        let mut world = World::new(0, Shape::large(1, false), false).await;
        let units = world.interceptor.lock().oracle.units.len();
        for unit in 0..units {
            world.perform(Action::Open(unit, 0)).await;
        }
        for service in 0..3 {
            world.perform(Action::Expose(service)).await;
        }
        world.pause(CHANGE_LIMIT).await;
        world.check().await;
        world.perform(Action::Latency(latency_ms)).await;
        for service in 0..3 {
            world.perform(Action::Unexpose(service)).await;
        }
        for _ in 0..10 {
            world.pause(Duration::from_secs(1) + Duration::from_millis(latency_ms)).await;
            world.check().await;
        }
        assert_eq!(world.surplus(), [], "{latency_ms} ms");
        world.perform(Action::EndProviderFaults).await;
        world.pause(RETRY_RECOVERY + CHANGE_LIMIT).await;
        world.check().await;
    }
}

/// The znodes of a unit are deleted, then those of its service; then the unit is removed properly.
async fn records_are_missing() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let services: Vec<usize> =
        world.interceptor.lock().oracle.units.values().map(|unit| unit.service).collect();
    world.perform(Action::Open(0, 0)).await;
    world.perform(Action::Open(0, 9)).await;
    world.perform(Action::Expose(services[0])).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    for what in [Mishap::UnitNodesDeleted, Mishap::ServiceNodesDeleted] {
        let index = if what == Mishap::UnitNodesDeleted { 0 } else { services[0] };
        world.perform(Action::DeleteNodes(what, index)).await;
        world.pause(RESYNC_RECOVERY).await;
        world.check().await;
        world.perform(Action::RepairStore).await;
        world.pause(CHANGE_LIMIT).await;
        world.check().await;
    }
    world.perform(Action::DeleteNodes(Mishap::UnitNodesDeleted, 0)).await;
    world.pause(CHANGE_LIMIT).await;
    world.perform(Action::RemoveUnit(0)).await;
    world.pause(CHANGE_LIMIT + Duration::from_secs(1)).await;
    world.check().await;
}

/// A backlog of deferred changes keeps every pass busy; a new change is still processed.
async fn a_change_arrives_during_a_backlog() {
    let mut world = exposed_to_a_slow_provider(Shape { machines: 40, ..Shape::large(1, false) }).await;
    world.pause(Duration::from_secs(1)).await;
    world.perform(Action::Unexpose(0)).await;
    world.pause(Duration::from_secs(30)).await;
    world.check().await;
}

/// Every open hangs, on more machines than are changed concurrently. Closes are not delayed,
/// whether they are planned in the same pass or later.
async fn opens_hang() {
    let mut world = World::new(0, Shape::large(1, false), false).await;
    let on_own_machines = |world: &World| -> Vec<usize> {
        let shared = world.interceptor.lock();
        let mut machines = BTreeSet::new();
        let of_first = shared.oracle.units.values().enumerate().filter(|(_, unit)| unit.service == 0);
        of_first.filter(|(_, unit)| machines.insert(unit.machine)).map(|(index, _)| index).collect()
    };
    let units = on_own_machines(&world);
    assert!(units.len() >= 12, "{units:?}");
    for unit in &units {
        world.perform(Action::Open(*unit, 0)).await;
        world.perform(Action::Open(*unit, 3)).await;
    }
    world.perform(Action::Expose(0)).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.interceptor.lock().hanging = Some(Kind::Open);
    let (opening, closing) = units.split_at(units.len() - 3);
    for unit in opening {
        world.perform(Action::Open(*unit, 9)).await;
    }
    for unit in &closing[..2] {
        world.perform(Action::Close(*unit, 0)).await;
    }
    world.pause(Duration::from_secs(1)).await;
    assert_eq!(world.surplus(), [], "closes waited for opens");
    world.perform(Action::Close(closing[2], 0)).await;
    world.pause(HANG + CHANGE_LIMIT).await;
    assert_eq!(world.surplus(), [], "closes waited for opens of an earlier pass");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RETRY_RECOVERY + CHANGE_LIMIT).await;
    world.check().await;
}

/// Another agent becomes the leader while changes of the previous leader wait for the rate limit.
async fn the_rate_limit_outlasts_the_lease() {
    let mut world = World::new(0, Shape::large(2, false), false).await;
    let units = world.interceptor.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(Action::RateLimit(1_100)).await;
    world.perform(Action::Expose(0)).await;
    world.pause(Duration::from_millis(500)).await;
    let leader = world.interceptor.lock().lead.expect("a leader").0;
    world.perform(Action::Expire(leader)).await;
    world.pause(Duration::from_secs(30)).await;
    assert_eq!(world.lacking(), [], "all changes are sent");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
}

/// A request is denied, and further passes within the same minute do not repeat it.
async fn a_request_is_denied() {
    for kind in [Kind::Open, Kind::Observe] {
        let mut world = World::new(0, Shape::small(1, false), false).await;
        world.perform(Action::Open(0, 0)).await;
        world.pause(CHANGE_LIMIT).await;
        world.check().await;
        world.perform(armed(Fault::Denied, kind)).await;
        for service in 0..3 {
            world.perform(Action::Expose(service)).await;
        }
        for _ in 0..25 {
            world.perform(Action::Interrupt).await;
            world.pause(Duration::from_secs(2)).await;
            world.check().await;
        }
        assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
        world.pause(RETRY_RECOVERY).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// The provider refuses one of a unit's ports, as a single port or within a range.
async fn a_port_is_refused() {
    for (arguments, refused) in [([0, 3, 9], "443"), ([0, 1, 2], "81"), ([6, 3, 0], "8003")] {
        let mut world = World::new(0, Shape::small(1, false), false).await;
        let (service, machine) = {
            let shared = world.interceptor.lock();
            let unit = shared.oracle.units.values().next().expect("a unit");
            (unit.service, unit.machine)
        };
        for argument in arguments {
            world.perform(Action::Open(0, argument)).await;
        }
        let range = portcullis::model::ports::parse_argument(refused).expect("a port");
        let refused = PortBits::of(range, &[0, 1, 2, 3]).expect("a known port");
        world.interceptor.lock().refused = refused;
        world.perform(Action::Expose(service)).await;
        world.pause(CHANGE_LIMIT).await;
        let missing =
            world.interceptor.lock().oracle.wanted(machine).minus(world.interceptor.reachable(machine));
        assert!(!missing.is_empty() && missing.minus(refused).is_empty(), "other ports are closed:{missing}");
        world.interceptor.lock().refused = PortBits::NONE;
        world.pause(RETRY_RECOVERY).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// Adjacent ports are opened one by one in a group that is nearly full.
async fn adjacent_ports_in_a_small_group() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let (service, machine) = {
        let shared = world.interceptor.lock();
        let unit = shared.oracle.units.values().next().expect("a unit");
        (unit.service, unit.machine)
    };
    world.interceptor.provider.configure(|settings| settings.rules_per_family = 4);
    for argument in [9, 10] {
        world.perform(Action::Open(0, argument)).await;
    }
    world.perform(Action::Expose(service)).await;
    for argument in [0, 1, 2] {
        world.perform(Action::Open(0, argument)).await;
        // Longer than an agent may act on old data.
        world.pause(MAX_AGE + CHANGE_LIMIT).await;
        world.check().await;
    }
    let rules = world.interceptor.provider.actual(number(machine)).expect("a group").owned;
    let of_v4 = rules.iter().filter(|rule| rule.source.family() == Family::V4);
    assert_eq!(of_v4.count(), 3, "{rules:?}");
    world.perform(Action::EndProviderFaults).await;
    world.pause(RESYNC_RECOVERY + RETRY_RECOVERY).await;
    world.check().await;
}

/// The provider stores the range that replaces a rule as two rules, one of which equals the
/// replaced rule and must not be closed.
async fn adjacent_ports_are_split() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let service = world.interceptor.lock().oracle.units.values().next().expect("a unit").service;
    world.interceptor.provider.configure(|settings| settings.rewrite = Rewrite::Halves);
    world.perform(Action::Expose(service)).await;
    for argument in [0, 1, 2] {
        world.perform(Action::Open(0, argument)).await;
        // Longer than an agent may act on old data.
        world.pause(MAX_AGE + CHANGE_LIMIT).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// The provider denies the repair of a group's properties. The request is not repeated within a
/// minute, although changes and lost connections cause passes meanwhile.
async fn a_repair_is_denied() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    world.pause(CHANGE_LIMIT).await;
    world.check().await;
    world.perform(armed(Fault::Denied, Kind::Repair)).await;
    for machine in 0..3 {
        world.perform(Action::EditRules(Mishap::GroupDrift, machine)).await;
    }
    for _ in 0..25 {
        world.perform(Action::Interrupt).await;
        world.pause(Duration::from_secs(2)).await;
        world.check().await;
    }
    assert!(world.interceptor.lock().armed.is_empty(), "the fault must have occurred");
    world.pause(RETRY_RECOVERY).await;
    world.check().await;
}
