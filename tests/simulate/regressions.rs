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
use crate::actions::{Action, DEEP, SHALLOW};
use crate::checks::FAST;
use crate::faults::{Fault, Kind, Mishap};
use crate::in_a_world;
use crate::instances;
use crate::interceptor::HANG;
use crate::oracle::GRACE;
use crate::port_bits::PortBits;
use crate::record::Armed;
use crate::restored;
use crate::world::{Shape, World, number};

type Telling = Pin<Box<dyn Future<Output = ()>>>;
type Story = (&'static str, fn() -> Telling);

/// Scenarios by name; each panics on failure.
pub(crate) const STORIES: &[Story] = &[
    ("seed 8303", || Box::pin(machines_come_back_one_by_one())),
    ("a look that failed", || Box::pin(a_look_fails())),
    ("a rule made by hand", || Box::pin(somebody_makes_the_rule())),
    ("a launch that was forgotten", || Box::pin(a_launch_is_forgotten())),
    ("an end that takes its time", || Box::pin(an_end_takes_its_time())),
    ("the last machine goes", || Box::pin(the_last_machine_goes())),
    ("a store that is lost", || Box::pin(a_store_is_lost())),
    ("a lease too short for all", || Box::pin(a_lease_is_too_short())),
    ("seed 4763", || Box::pin(a_change_comes_while_others_wait())),
    ("opens that hang", || Box::pin(opens_hang())),
    ("ports after a restore", || Box::pin(restored::ports_stay_open())),
    ("another leader after a restore", || Box::pin(restored::another_controller_leads())),
    ("instances after a restore", || Box::pin(restored::instances_stay())),
    ("a mass close at a slow provider", || Box::pin(a_slow_provider_closes_most_rules())),
    ("records that are missing", || Box::pin(records_are_missing())),
    ("leave to act that ends while another is waited for", || Box::pin(leave_is_scarce())),
    ("a denied request", || Box::pin(a_request_is_denied())),
    ("a refused port", || Box::pin(a_port_is_refused())),
    ("adjacent ports in a small group", || Box::pin(adjacent_ports_in_a_small_group())),
    ("adjacent ports at a provider that splits ranges", || Box::pin(adjacent_ports_are_split())),
    ("a denied repair", || Box::pin(a_repair_is_denied())),
    ("an empty list of machines", || Box::pin(instances::list_of_machines_is_empty())),
];

#[test]
fn seed_8303_and_the_other_kept_stories_end_well() {
    for (name, story) in STORIES {
        println!("{name}");
        in_a_world(story());
    }
}

fn armed(fault: Fault, kind: Kind) -> Action {
    Action::Arm(Armed { fault, kind: Some(kind), skip: 0 })
}

/// A read of the tree returned empty lists, the provider failed in the same pass, and the machines
/// recovered one by one: each closed fewer rules than the limit for a mass close, until all were
/// closed.
async fn machines_come_back_one_by_one() {
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
    world.pause(FAST).await;
    world.check().await;
    let rules = |world: &World| -> Vec<usize> {
        let actual = served.iter().filter_map(|machine| world.interceptor.provider.actual(number(*machine)));
        actual.map(|rules| rules.owned.len()).collect()
    };
    let before = rules(&world);
    assert!(before.iter().all(|rules| *rules == 6) && before.len() > 1, "{before:?}");

    world.perform(armed(Fault::Empty, Kind::ReadLists)).await;
    world.perform(Action::Storm(1)).await;
    world.perform(Action::Expire(0)).await;
    world.pause(Duration::from_secs(5)).await;
    assert!(world.interceptor.lock().armed.is_empty(), "the tree was to show nothing");
    world.perform(Action::Cure).await;
    world.pause(SHALLOW).await;
    world.check().await;
    assert_eq!(rules(&world), before);
}

/// The shared group is deleted with the last machine and created again for the next one.
async fn the_last_machine_goes() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(DEEP).await;
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
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
    assert!(world.interceptor.provider.truth().groups.is_empty(), "{:?}", world.interceptor.provider.truth());
    world.operator.ask(Request::Clear).await.expect("a request");
    world.pause(SHALLOW).await;
    let answer = world.operator.progress(Request::Clear).await.expect("a node");
    assert_eq!(answer, Progress::Done(Vec::new()));
    world.operator.withdraw(Request::Clear).await.expect("no request");
    world.perform(Action::Launch).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
    assert!(world.all_have_instances().await);
}

/// A new store replaces a lost one; launches succeed after its groups are adopted.
async fn a_store_is_lost() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(DEEP).await;
    world.check().await;
    world.interceptor.provider.lose_store("lost");
    world.perform(Action::Launch).await;
    world.pause(DEEP).await;
    assert!(!world.all_have_instances().await, "the group is another store's");
    world.operator.ask(Request::AdoptGroups).await.expect("a request");
    world.pause(SHALLOW).await;
    let answer = world.operator.progress(Request::AdoptGroups).await.expect("a node");
    assert!(matches!(&answer, Progress::Done(lines) if lines.len() == 1), "{answer:?}");
    world.operator.withdraw(Request::AdoptGroups).await.expect("no request");
    world.pause(DEEP + SHALLOW).await;
    assert!(world.all_have_instances().await);
}

/// The read that follows an event fails, and the event is not repeated.
async fn a_look_fails() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    world.perform(Action::Expose(0)).await;
    world.pause(FAST).await;
    world.check().await;
    world.perform(armed(Fault::LostBefore, Kind::ReadMany)).await;
    world.perform(Action::Open(0, 0)).await;
    // Shorter than a resync, which would detect the change.
    world.pause(2 * SHALLOW).await;
    assert!(world.interceptor.lock().armed.is_empty(), "a read was to fail");
    world.check().await;
}

/// Only the middle one of three ports in a rule stays wanted, and a foreign rule already opens it.
async fn somebody_makes_the_rule() {
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
    world.pause(FAST).await;
    world.perform(Action::Meddle(Mishap::ForeignEqual, machine)).await;
    world.perform(Action::Interrupt).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
    world.perform(Action::Close(0, 0)).await;
    world.perform(Action::Close(0, 2)).await;
    world.pause(FAST + Duration::from_secs(1)).await;
    world.check().await;
}

/// The response to a launch is lost; the provider lists the instance late and does not deduplicate
/// the launch.
async fn a_launch_is_forgotten() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Provider(Mishap::Forgetful, 0)).await;
    world.perform(Action::Provider(Mishap::DescribeLags, 3)).await;
    // Arming this fault also adds a machine to launch.
    world.perform(armed(Fault::LostAfter, Kind::Launch)).await;
    world.pause(Duration::from_millis(900)).await;
    let launched = world.interceptor.provider.truth().instances.len();
    assert_eq!(launched, 3 + 2, "one too many");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// A machine is removed with a port open, and the request to terminate or release its instance
/// hangs.
async fn an_end_takes_its_time() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.perform(Action::Launch).await;
    world.pause(FAST).await;
    world.check().await;
    let leaves = number(world.idle_machine(0));
    let instances = world.interceptor.provider.truth().instances;
    let instance = instances.iter().find(|instance| instance.machine == leaves).expect("an instance");
    let end = if instance.origin == Origin::Launched { Kind::Terminate } else { Kind::Release };
    world.interceptor.lock().hanging = Some(end);
    world.provoke(Kind::RevokeAll).await;
    assert!(world.interceptor.lock().oracle.machines.keys().all(|id| number(*id) != leaves), "it has left");
    world.pause(Duration::from_secs(1)).await;
    let rules = world.interceptor.provider.actual(leaves).expect("a group");
    assert!(rules.owned.is_empty() && world.interceptor.provider.is_running(&instance.id), "{rules:?}");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// A world in which every unit has a port, and a slow provider has to open those of one service.
async fn exposed_to_a_slow_provider(shape: Shape) -> World {
    let mut world = World::new(0, shape, false).await;
    let units = world.interceptor.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Sluggish(3_500)).await;
    world.perform(Action::Expose(0)).await;
    world
}

/// More machines need a change than a slow provider completes within a lease. No later event
/// triggers a pass for the others, and the resync is far away.
async fn a_lease_is_too_short() {
    let mut world = exposed_to_a_slow_provider(Shape::large(1, false)).await;
    world.pause(FAST).await;
    let late = world.lacking();
    assert!(!late.is_empty(), "there was to be no time for some");
    for machine in late {
        let report = world.report(machine).await;
        assert!(report.is_pending(), "machine {machine} is said to be as it should: {report:?}");
    }
    world.pause(Duration::from_secs(23)).await;
    assert_eq!(world.lacking(), [], "a slow provider is no reason to wait for a resync");
    world.perform(Action::Cure).await;
    world.pause(SHALLOW + FAST).await;
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
        world.pause(FAST).await;
        world.check().await;
        world.perform(Action::Sluggish(latency_ms)).await;
        for service in 0..3 {
            world.perform(Action::Unexpose(service)).await;
        }
        for _ in 0..10 {
            world.pause(Duration::from_secs(1) + Duration::from_millis(latency_ms)).await;
            world.check().await;
        }
        assert_eq!(world.surplus(), [], "{latency_ms} ms");
        world.perform(Action::Cure).await;
        world.pause(SHALLOW + FAST).await;
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
    world.pause(FAST).await;
    world.check().await;
    for what in [Mishap::UnitVanished, Mishap::ServiceVanished] {
        let index = if what == Mishap::UnitVanished { 0 } else { services[0] };
        world.perform(Action::Vanish(what, index)).await;
        world.pause(DEEP).await;
        world.check().await;
        world.perform(Action::Heal).await;
        world.pause(FAST).await;
        world.check().await;
    }
    world.perform(Action::Vanish(Mishap::UnitVanished, 0)).await;
    world.pause(FAST).await;
    world.perform(Action::RemoveUnit(0)).await;
    world.pause(FAST + Duration::from_secs(1)).await;
    world.check().await;
}

/// A backlog of deferred changes keeps every pass busy; a new change is still processed.
async fn a_change_comes_while_others_wait() {
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
    world.pause(FAST).await;
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
    assert_eq!(world.surplus(), [], "closes wait for opens");
    world.perform(Action::Close(closing[2], 0)).await;
    world.pause(HANG + FAST).await;
    assert_eq!(world.surplus(), [], "and for those of the pass before");
    world.perform(Action::Cure).await;
    world.pause(SHALLOW + FAST).await;
    world.check().await;
}

/// Another agent becomes the leader while changes of the previous leader wait for the rate limit.
async fn leave_is_scarce() {
    let mut world = World::new(0, Shape::large(2, false), false).await;
    let units = world.interceptor.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Scarce(1_100)).await;
    world.perform(Action::Expose(0)).await;
    world.pause(Duration::from_millis(500)).await;
    let leader = world.interceptor.lock().lead.expect("a leader").0;
    world.perform(Action::Expire(leader)).await;
    world.pause(Duration::from_secs(30)).await;
    assert_eq!(world.lacking(), [], "all have their turn");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// A request is denied, and further passes within the same minute do not repeat it.
async fn a_request_is_denied() {
    for kind in [Kind::Open, Kind::Observe] {
        let mut world = World::new(0, Shape::small(1, false), false).await;
        world.perform(Action::Open(0, 0)).await;
        world.pause(FAST).await;
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
        assert!(world.interceptor.lock().armed.is_empty(), "a request was to be denied");
        world.pause(SHALLOW).await;
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
        world.pause(FAST).await;
        let missing =
            world.interceptor.lock().oracle.wanted(machine).minus(world.interceptor.reachable(machine));
        assert!(!missing.is_empty() && missing.minus(refused).is_empty(), "other ports are shut:{missing}");
        world.interceptor.lock().refused = PortBits::NONE;
        world.pause(SHALLOW).await;
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
        world.pause(GRACE + FAST).await;
        world.check().await;
    }
    let rules = world.interceptor.provider.actual(number(machine)).expect("a group").owned;
    let of_v4 = rules.iter().filter(|rule| rule.source.family() == Family::V4);
    assert_eq!(of_v4.count(), 3, "{rules:?}");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
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
        world.pause(GRACE + FAST).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// The provider denies the repair of a group's properties. The request is not repeated within a
/// minute, although changes and lost connections cause passes meanwhile.
async fn a_repair_is_denied() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    world.pause(FAST).await;
    world.check().await;
    world.perform(armed(Fault::Denied, Kind::Repair)).await;
    for machine in 0..3 {
        world.perform(Action::Meddle(Mishap::GroupDrift, machine)).await;
    }
    for _ in 0..25 {
        world.perform(Action::Interrupt).await;
        world.pause(Duration::from_secs(2)).await;
        world.check().await;
    }
    assert!(world.interceptor.lock().armed.is_empty(), "a repair was to be denied");
    world.pause(SHALLOW).await;
    world.check().await;
}
