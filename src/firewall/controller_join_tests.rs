//! Tests of joins: adjacent ports become one rule long before a group is full, and no wanted port
//! is closed for a join.

use super::*;
use portcullis_provider::rule::RuleSet;

/// Collects the ports that were open and that a request closes; for tests that only open ports.
fn record_closed_ports(provider: &Memory) -> Arc<std::sync::Mutex<Vec<String>>> {
    let closed_ports = Arc::<std::sync::Mutex<Vec<String>>>::default();
    let (seen, mut owned) = (closed_ports.clone(), BTreeSet::<Rule>::new());
    provider.set_script(move |call| {
        let before: RuleSet = owned.iter().collect();
        match call.name {
            CallName::Open => owned.extend(call.rules.iter().copied()),
            CallName::Close => owned.retain(|rule| !call.rules.contains(rule)),
            _ => {}
        }
        let lost = before.minus(&owned.iter().collect());
        seen.lock().unwrap().extend(lost.rules().map(|rule| rule.to_string()));
        None
    });
    closed_ports
}

async fn open_one_by_one(world: &mut World, unit: UnitId, ports: impl Iterator<Item = u16>) -> usize {
    let mut most = 0;
    for port in ports {
        world.open(unit, &port.to_string()).await;
        world.pass_for(Key::Unit(unit)).await;
        while world.controller.next_retry().is_some_and(|at| at <= Instant::now()) {
            world.lease.confirm(world.operator.tree()).await.unwrap();
            world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
        }
        most = most.max(world.rules(0).len());
    }
    most
}

#[tokio::test(start_paused = true)]
async fn adjacent_ports_that_are_opened_one_by_one_are_one_rule() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.expose("a").await;
    world.pass().await;
    let closed_ports = record_closed_ports(&world.provider);
    let most = open_one_by_one(&mut world, unit, 20_000..20_150).await;
    assert_eq!((world.rules(0), most), (vec!["20000-20149/tcp".to_owned()], 1));
    // Ports are added from both ends, and the gap between them is filled last.
    let ports = (30_000..30_010).chain((30_011..30_020).rev()).chain([30_010]);
    open_one_by_one(&mut world, unit, ports).await;
    assert_eq!(world.rules(0), ["20000-20149/tcp", "30000-30019/tcp"]);
    assert_eq!(*closed_ports.lock().unwrap(), Vec::<String>::new());
}

/// A group with few free rules, because other ports use most of them.
#[tokio::test(start_paused = true)]
async fn no_wanted_port_is_closed_in_a_nearly_full_group() {
    let mut world = World::new().await;
    world.provider.configure(|settings| settings.rules_per_family = 5);
    let unit = world.deploy("a").await;
    world.expose("a").await;
    world.pass().await;
    let closed_ports = record_closed_ports(&world.provider);
    let ports = [9001, 9003, 9005].into_iter().chain(20_000..20_020);
    open_one_by_one(&mut world, unit, ports).await;
    assert_eq!(world.rules(0), ["9001/tcp", "9003/tcp", "9005/tcp", "20000-20019/tcp"]);
    assert_eq!((closed_ports.lock().unwrap().clone(), world.problem(0)), (Vec::new(), None));
}

/// An earlier version left a full group of adjacent ports: a join needs one free rule, which an
/// operator must provide.
#[tokio::test(start_paused = true)]
async fn a_full_group_is_joined_once_there_is_one_free_rule() {
    let mut world = World::new().await;
    world.provider.configure(|settings| settings.rules_per_family = 6);
    let unit = world.deploy("a").await;
    for port in 20_000..20_005 {
        world.open(unit, &port.to_string()).await;
    }
    world.open(unit, "443").await;
    let rule = |port, source| Rule::new(parse_argument(port).unwrap(), source);
    let ports = ["443", "20000", "20001", "20002", "20003", "20004"];
    let full =
        ports.iter().flat_map(|port| [Cidr::WORLD_V4, Cidr::WORLD_V6].map(|source| rule(port, source)));
    world.provider.tamper(MachineNumber::new(0), |rules| rules.owned = full.collect());
    world.expose("a").await;
    world.open(unit, "20005").await;
    for _ in 0..4 {
        world.pass().await;
    }
    assert_eq!(world.rules(0).len(), 6, "no wanted port is closed for a join");
    assert!(world.problem(0).unwrap().contains("full"), "{:?}", world.problem(0));
    world.close(unit, "443").await;
    for _ in 0..4 {
        world.pass().await;
    }
    assert_eq!((world.rules(0), world.problem(0)), (vec!["20000-20005/tcp".to_owned()], None));
}
