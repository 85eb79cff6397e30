//! Worlds that once came to grief, or that a mistake slipped through, told again as what happened in them: the choices behind
//! a seed change with the simulator, the story does not.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::time::Duration;

use portcullis::model::MachineId;
use portcullis::store::requests::{Progress, Request};
use portcullis_provider::provider::Origin;
use portcullis_provider::rule::Family;

use crate::LATENCIES_MS;
use crate::actions::{Action, DEEP, SHALLOW};
use crate::checks::FAST;
use crate::faults::{Fault, Kind, Mishap};
use crate::in_a_world;
use crate::ledger::Armed;
use crate::oracle::GRACE;
use crate::points::Points;
use crate::restored;
use crate::seam::HANG;
use crate::world::{Shape, World, number};

type Telling = Pin<Box<dyn Future<Output = ()>>>;
type Story = (&'static str, fn() -> Telling);

/// By name; each panics if something is not as it must be.
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

/// The tree showed nothing, the provider failed in the same pass, and the machines came back one by one: each closed fewer
/// rules than a mass close has, until nothing was left.
async fn machines_come_back_one_by_one() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    // Six rules on every machine that has a unit.
    let placed: Vec<MachineId> = world.seam.lock().oracle.units.values().map(|unit| unit.machine).collect();
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
        let actual = served.iter().filter_map(|machine| world.seam.provider.actual(number(*machine)));
        actual.map(|rules| rules.owned.len()).collect()
    };
    let before = rules(&world);
    assert!(before.iter().all(|rules| *rules == 6) && before.len() > 1, "{before:?}");

    world.perform(armed(Fault::Empty, Kind::ReadLists)).await;
    world.perform(Action::Storm(1)).await;
    world.perform(Action::Expire(0)).await;
    world.pause(Duration::from_secs(5)).await;
    assert!(world.seam.lock().armed.is_empty(), "the tree was to show nothing");
    world.perform(Action::Cure).await;
    world.pause(SHALLOW).await;
    world.check().await;
    assert_eq!(rules(&world), before);
}

/// The group that all machines share goes with the last of them, and is made again for the next.
async fn the_last_machine_goes() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(DEEP).await;
    world.check().await;
    for service in 0..3 {
        world.perform(Action::Destroy(service)).await;
    }
    // Other worlds keep one machine at least.
    let machines: Vec<MachineId> = world.seam.lock().oracle.machines.keys().copied().collect();
    world.operator.terminate_machines(&machines).await.expect("machines without units");
    {
        let mut shared = world.seam.lock();
        shared.oracle.machines.clear();
        shared.changed();
    }
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
    assert!(world.seam.provider.truth().groups.is_empty(), "{:?}", world.seam.provider.truth());
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

/// The store that took a lost one's place has its groups adopted, and launches then.
async fn a_store_is_lost() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(DEEP).await;
    world.check().await;
    world.seam.provider.lose_store("lost");
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

/// The read that follows an event fails: nobody says a second time what changed.
async fn a_look_fails() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    world.perform(Action::Expose(0)).await;
    world.pause(FAST).await;
    world.check().await;
    world.perform(armed(Fault::LostBefore, Kind::ReadMany)).await;
    world.perform(Action::Open(0, 0)).await;
    // Less than a resync, which would find it.
    world.pause(2 * SHALLOW).await;
    assert!(world.seam.lock().armed.is_empty(), "a read was to fail");
    world.check().await;
}

/// Of three ports in one rule the middle one is left, and somebody else keeps that open already.
async fn somebody_makes_the_rule() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let (service, machine) = {
        let shared = world.seam.lock();
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

/// The answer to a launch is lost, and the provider neither shows the instance at once nor knows that it launched one.
async fn a_launch_is_forgotten() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Provider(Mishap::Forgetful, 0)).await;
    world.perform(Action::Provider(Mishap::DescribeLags, 3)).await;
    // Arming it has one launched.
    world.perform(armed(Fault::LostAfter, Kind::Launch)).await;
    world.pause(Duration::from_millis(900)).await;
    let launched = world.seam.provider.truth().instances.len();
    assert_eq!(launched, 3 + 2, "one too many");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// A machine leaves with a port open, and its instance is neither ended nor let go.
async fn an_end_takes_its_time() {
    let mut world = World::new(0, Shape::small(1, true), false).await;
    world.perform(Action::Launch).await;
    world.pause(FAST).await;
    world.check().await;
    let leaves = number(world.idle_machine(0));
    let instances = world.seam.provider.truth().instances;
    let instance = instances.iter().find(|instance| instance.machine == leaves).expect("an instance");
    let end = if instance.origin == Origin::Launched { Kind::Terminate } else { Kind::Release };
    world.seam.lock().hanging = Some(end);
    world.provoke(Kind::Shut).await;
    assert!(world.seam.lock().oracle.machines.keys().all(|id| number(*id) != leaves), "it has left");
    world.pause(Duration::from_secs(1)).await;
    let rules = world.seam.provider.actual(leaves).expect("a group");
    assert!(rules.owned.is_empty() && world.seam.provider.is_running(&instance.id), "{rules:?}");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// Every unit has a port, and all of them are to be opened by a provider that takes its time.
async fn exposed_to_a_slow_provider(shape: Shape) -> World {
    let mut world = World::new(0, shape, false).await;
    let units = world.seam.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Sluggish(3_500)).await;
    world.perform(Action::Expose(0)).await;
    world
}

/// More machines want a change than a slow provider makes while the lease lasts; then nothing happens that could help the
/// rest of them, and the resync is far away.
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

/// Most of all rules are to be closed by a provider that answers in up to half a minute.
async fn a_slow_provider_closes_most_rules() {
    for latency_ms in std::iter::once(0).chain(LATENCIES_MS) {
        let mut world = World::new(0, Shape::large(1, false), false).await;
        let units = world.seam.lock().oracle.units.len();
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

/// The znodes of a unit are deleted, then those of a service, then the unit is removed as it should be.
async fn records_are_missing() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let services: Vec<usize> = world.seam.lock().oracle.units.values().map(|unit| unit.service).collect();
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

/// So much was put off that there is always something to do at once: what changes meanwhile is looked at all the same.
async fn a_change_comes_while_others_wait() {
    let mut world = exposed_to_a_slow_provider(Shape { machines: 40, ..Shape::large(1, false) }).await;
    world.pause(Duration::from_secs(1)).await;
    world.perform(Action::Unexpose(0)).await;
    world.pause(Duration::from_secs(30)).await;
    world.check().await;
}

/// Every open hangs, on more machines than are changed at a time: what is to be closed is closed at once, whether it is known
/// of at the same time or comes later.
async fn opens_hang() {
    let mut world = World::new(0, Shape::large(1, false), false).await;
    let on_own_machines = |world: &World| -> Vec<usize> {
        let shared = world.seam.lock();
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

    world.seam.lock().hanging = Some(Kind::Open);
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

/// Somebody else has led for a while when the turn comes of a change that was waited with.
async fn leave_is_scarce() {
    let mut world = World::new(0, Shape::large(2, false), false).await;
    let units = world.seam.lock().oracle.units.len();
    for unit in 0..units {
        world.perform(Action::Open(unit, 0)).await;
    }
    world.pause(FAST).await;
    world.check().await;
    world.perform(Action::Scarce(1_100)).await;
    world.perform(Action::Expose(0)).await;
    world.pause(Duration::from_millis(500)).await;
    let leader = world.seam.lock().lead.expect("a leader").0;
    world.perform(Action::Expire(leader)).await;
    world.pause(Duration::from_secs(30)).await;
    assert_eq!(world.lacking(), [], "all have their turn");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}

/// An open is denied, and everything is looked at again and again before a minute has passed.
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
        assert!(world.seam.lock().armed.is_empty(), "a request was to be denied");
        world.pause(SHALLOW).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// The provider refuses one of the ports that a unit asks for: alone, and within a range.
async fn a_port_is_refused() {
    for (arguments, refused) in [([0, 3, 9], "443"), ([0, 1, 2], "81"), ([6, 3, 0], "8003")] {
        let mut world = World::new(0, Shape::small(1, false), false).await;
        let (service, machine) = {
            let shared = world.seam.lock();
            let unit = shared.oracle.units.values().next().expect("a unit");
            (unit.service, unit.machine)
        };
        for argument in arguments {
            world.perform(Action::Open(0, argument)).await;
        }
        let range = portcullis::model::ports::parse_argument(refused).expect("a port");
        let refused = Points::of(range, &[0, 1, 2, 3]).expect("a known port");
        world.seam.lock().refused = refused;
        world.perform(Action::Expose(service)).await;
        world.pause(FAST).await;
        let missing = world.seam.lock().oracle.wanted(machine).minus(world.seam.reachable(machine));
        assert!(!missing.is_empty() && missing.minus(refused).is_empty(), "other ports are shut:{missing}");
        world.seam.lock().refused = Points::NONE;
        world.pause(SHALLOW).await;
        world.check().await;
        assert_eq!(world.lacking(), []);
    }
}

/// Adjacent ports are opened one by one in a group that other ports have nearly filled.
async fn adjacent_ports_in_a_small_group() {
    let mut world = World::new(0, Shape::small(1, false), false).await;
    let (service, machine) = {
        let shared = world.seam.lock();
        let unit = shared.oracle.units.values().next().expect("a unit");
        (unit.service, unit.machine)
    };
    world.seam.provider.configure(|settings| settings.rules_per_family = 4);
    for argument in [9, 10] {
        world.perform(Action::Open(0, argument)).await;
    }
    world.perform(Action::Expose(service)).await;
    for argument in [0, 1, 2] {
        world.perform(Action::Open(0, argument)).await;
        // Longer than an agent may act on what was so before.
        world.pause(GRACE + FAST).await;
        world.check().await;
    }
    let rules = world.seam.provider.actual(number(machine)).expect("a group").owned;
    let of_v4 = rules.iter().filter(|rule| rule.source.family() == Family::V4);
    assert_eq!(of_v4.count(), 3, "{rules:?}");
    world.perform(Action::Cure).await;
    world.pause(DEEP + SHALLOW).await;
    world.check().await;
}
