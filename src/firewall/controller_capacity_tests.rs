//! Tests of limits: more ports than fit on the machine, in its report, or within the policy.

use super::*;

/// The store accepts at most 64 KiB in one znode; a machine whose report exceeds that does not stop
/// the agent.
#[tokio::test(start_paused = true)]
async fn a_unit_with_too_many_ports_is_reported_and_delays_no_other() {
    let mut world = World::new().await;
    let (wild, tame) = (world.deploy("wild").await, world.deploy("tame").await);
    for port in 0..1_000 {
        world.open(wild, &(20_001 + 2 * port).to_string()).await;
    }
    world.open(tame, "80").await;
    world.expose("wild").await;
    world.expose("tame").await;
    world.pass().await;
    let rules = |machine| world.provider.actual(MachineNumber::new(machine)).unwrap().owned.len();
    assert_eq!((rules(0), rules(1)), (100, 2), "the maximum of the policy, in both families");
    let report = world.controller.reports.get(MachineId::new(0)).unwrap().clone();
    assert_eq!(report.denied.len() + report.more_denied, 950, "each port once");
    let version = |world: &World| {
        let path = paths::firewall_report(MachineId::new(0));
        let node = world.operator.tree().clone();
        async move { node.get(&path).await.unwrap().version }
    };
    let before = version(&world).await;
    world.pass().await;
    assert_eq!(version(&world).await, before, "an unchanged report is not written");
}

/// EC2 refuses a whole request to open rules if it exceeds the limit by one rule.
#[tokio::test(start_paused = true)]
async fn a_full_firewall_gets_the_rules_that_fit_and_no_retries() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.provider.configure(|settings| (settings.rules_per_family, settings.ipv6) = (3, false));
    world.provider.tamper(MachineNumber::new(0), |rules| rules.ipv6 = false);
    for port in ["1", "3", "5", "7", "9"] {
        world.open(unit, port).await;
    }
    world.expose("a").await;
    world.pass().await;
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(world.provider.actual(MachineNumber::new(0)).unwrap().owned.len(), 3);
    assert_eq!(world.provider.calls_of(CallName::Open), 2, "one refused, one with the rules that fit");
    let report = world.controller.reports.get(MachineId::new(0)).unwrap();
    assert_eq!(report.problem.as_deref(), Some("its firewall is full: 2 rules do not fit"));
    assert_eq!(report.pending.len(), 2, "rules that do not fit are pending");
    tokio::time::advance(Duration::from_secs(120)).await;
    assert_eq!(world.controller.next_retry(), None, "no retry before the next full read");
    world.close(unit, "1").await;
    world.pass_for(Key::Unit(unit)).await;
    let ports = |world: &World| -> Vec<u16> {
        world.provider.actual(MachineNumber::new(0)).unwrap().owned.iter().map(|r| r.ports.from()).collect()
    };
    assert_eq!(ports(&world), [3, 5, 7], "the free slot is used");
}
