//! Tests of the order of machines with a provider that is slow, hangs or refuses, and of requests
//! that were postponed.

use super::*;
use crate::firewall::leader_loop::tests::{CHANGE, Slow};

impl World {
    /// Creates machines with groups, and one exposed unit on each that has these ports open.
    async fn with_machines(count: usize, ports: &[&str]) -> (World, Vec<UnitId>) {
        let mut world = World::new().await;
        let mut units = Vec::new();
        for n in 0..count {
            let name = format!("s{n}");
            let unit = world.deploy(&name).await;
            for port in ports {
                world.open(unit, port).await;
            }
            world.expose(&name).await;
            units.push(unit);
        }
        world.pass().await;
        (world, units)
    }

    /// Creates another agent for the same tree and provider, whose every request takes [`CHANGE`].
    fn slow_controller(&self) -> FirewallController<MemoryTree, Slow> {
        let (tree, roles) = (self.controller.tree.clone(), self.operator.info().roles.clone());
        let policy = Policy::with_own_ports([2181]);
        FirewallController::new(tree, Slow(self.provider.clone()), policy, roles, || 0)
    }

    async fn slow_pass(
        &mut self,
        controller: &mut FirewallController<MemoryTree, Slow>,
        dirty: &Dirty,
    ) -> Pass {
        self.lease.confirm(self.operator.tree()).await.unwrap();
        controller.pass(dirty, &self.lease).await.unwrap()
    }

    /// Machines that have this port open.
    fn having(&self, port: &str) -> Vec<u32> {
        let machines = 0..u32::try_from(self.controller.reports.len()).unwrap();
        machines.filter(|machine| self.rules(*machine).iter().any(|rule| rule == port)).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn closes_on_a_hundred_machines_do_not_wait_for_hanging_opens() {
    let (mut world, units) = World::with_machines(100, &["80", "443", "8080"]).await;
    // In turn, machines only close, only open, and do both.
    for (n, unit) in units.iter().enumerate() {
        if n % 3 != 1 {
            world.close(*unit, "80").await;
        }
        if n % 3 != 0 {
            world.open(*unit, "9000").await;
        }
    }
    world
        .provider
        .set_script(|call| (call.name == CallName::Open).then_some(Fault::Before(Failure::Silence)));
    world.lease.confirm(world.operator.tree()).await.unwrap();
    let dirty = everything();
    let pass = world.controller.pass(&dirty, &world.lease);
    assert!(tokio::time::timeout(Duration::from_secs(1), pass).await.is_err(), "the opens must hang");
    assert_eq!(world.having("80/tcp"), (0..100).filter(|n| n % 3 == 1).collect::<Vec<_>>());
    assert_eq!(world.having("443/tcp").len(), 100, "no other port was closed");
}

#[tokio::test(start_paused = true)]
async fn the_rest_of_a_change_follows_after_the_lease_is_renewed() {
    let (mut world, units) = World::with_machines(1, &["80"]).await;
    let mut controller = world.slow_controller();
    world.close(units[0], "80").await;
    world.open(units[0], "443").await;
    let pass = world.slow_pass(&mut controller, &everything()).await;
    assert_eq!(
        (pass.opened, pass.closed, pass.pending),
        (0, 2, 1),
        "{CHANGE:?} each, and a lease of three seconds"
    );
    assert_eq!(pass.failures, BTreeMap::new(), "no failures");
    assert_eq!(world.rules(0), Vec::<String>::new());
    assert_eq!(controller.next_retry(), Some(Instant::now()), "the rest is due at once");
    let report = controller.reports.get(MachineId::new(0)).unwrap();
    assert!(!report.pending.is_empty() && report.problem.is_none(), "{report:?}");
    let recorded = change_log(&world).await.pop().unwrap().1;
    assert_eq!(recorded, ["close 80/tcp from 0.0.0.0/0, ::/0 [\"s0/0\"]"], "only the part that was sent");

    let pass = world.slow_pass(&mut controller, &Dirty::default()).await;
    assert_eq!((pass.opened, pass.closed, pass.pending, controller.next_retry()), (2, 0, 0, None));
    assert_eq!(world.rules(0), ["443/tcp"]);
    let calls = |name| world.provider.calls_of(name);
    assert_eq!((calls(CallName::Close), calls(CallName::Open)), (1, 2), "each request was sent once");
}

#[tokio::test(start_paused = true)]
async fn postponed_machines_come_before_new_changes() {
    let (mut world, units) = World::with_machines(20, &["80"]).await;
    let mut controller = world.slow_controller();
    for unit in &units {
        world.open(*unit, "443").await;
    }
    world.slow_pass(&mut controller, &everything()).await;
    assert_eq!(world.having("443/tcp"), (0..8).collect::<Vec<_>>(), "eight changes fit into one lease");
    for unit in &units[..8] {
        world.open(*unit, "8082").await;
    }
    world.slow_pass(&mut controller, &everything()).await;
    assert_eq!(world.having("443/tcp"), (0..16).collect::<Vec<_>>());
    assert_eq!(world.having("8082/tcp"), Vec::<u32>::new());
    for unit in &units[8..12] {
        world.open(*unit, "9083").await;
    }
    world.slow_pass(&mut controller, &everything()).await;
    assert_eq!(world.having("443/tcp").len(), 20, "the longest wait comes first");
    assert_eq!((world.having("8082/tcp").len(), world.having("9083/tcp").len()), (4, 0));
}

#[tokio::test(start_paused = true)]
async fn a_denied_machine_delays_no_other_and_is_retried_slowly() {
    let (mut world, units) = World::with_machines(3, &["80"]).await;
    let denied =
        || ProviderError::Denied { what: Subject::Provider, reason: "UnauthorizedOperation: no".into() };
    world.provider.set_script(move |call| {
        let theirs = call.name.is_write() && call.machine == Some(MachineNumber::new(1));
        theirs.then(|| Fault::Before(Failure::Error(denied())))
    });
    for unit in &units {
        world.close(*unit, "80").await;
        world.open(*unit, "81").await;
    }
    world.pass().await;
    assert_eq!([world.rules(0), world.rules(1), world.rules(2)], [["81/tcp"], ["80/tcp"], ["81/tcp"]]);
    assert_eq!(world.problem(1).as_deref(), Some("not allowed for the provider: UnauthorizedOperation: no"));
    assert_eq!((world.problem(0), world.problem(2)), (None, None));
    let (calls, start) = (world.provider.writes(), Instant::now());
    while start.elapsed() < Duration::from_secs(600) {
        tokio::time::sleep_until(world.controller.next_retry().unwrap()).await;
        world.lease.confirm(world.operator.tree()).await.unwrap();
        world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    }
    let tries = (world.provider.writes() - calls) / 2;
    assert!((10..=20).contains(&tries), "{tries} in ten minutes");
    world.provider.clear_script();
    tokio::time::sleep_until(world.controller.next_retry().unwrap()).await;
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(
        (world.rules(1), world.problem(1)),
        (vec!["81/tcp".to_owned()], None),
        "permission was granted"
    );
}

/// A rule that loses a part of its ports is closed only once the remaining ports are open, and not
/// by a second request.
#[tokio::test(start_paused = true)]
async fn a_pass_opens_once_and_closes_once() {
    let (mut world, units) = World::with_machines(1, &["8000-8010", "443"]).await;
    assert_eq!(world.rules(0), ["443/tcp", "8000-8010/tcp"]);
    world.close(units[0], "8000-8010").await;
    world.close(units[0], "443").await;
    world.open(units[0], "8005").await;
    let requests =
        |world: &World| (world.provider.calls_of(CallName::Open), world.provider.calls_of(CallName::Close));
    let before = requests(&world);
    world.pass_for(Key::Unit(units[0])).await;
    assert_eq!(world.rules(0), ["8000-8010/tcp", "8005/tcp"]);
    assert_eq!(requests(&world), (before.0 + 1, before.1 + 1));
    assert_eq!(world.controller.next_retry(), Some(Instant::now()), "the rest is due at once");
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(world.rules(0), ["8005/tcp"]);
    assert_eq!(requests(&world), (before.0 + 1, before.1 + 2));
    assert_eq!((world.controller.next_retry(), world.problem(0)), (None, None));
}
