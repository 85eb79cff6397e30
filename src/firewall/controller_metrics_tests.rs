//! Tests of the controller's metrics, change log and logs.

use super::*;
use crate::firewall::leader_loop::tests::took;

/// Whether a change of the first machine is unfinished.
fn is_changing(world: &World) -> bool {
    world.controller.machines.get(MachineId::new(0)).is_some_and(|state| state.changing_since.is_some())
}

#[tokio::test(start_paused = true)]
async fn an_unfinished_change_is_dropped_with_its_machine() {
    for recorded in [true, false] {
        let mut world = World::new().await;
        let unit = world.deploy("a").await;
        world.open(unit, "80").await;
        world.expose("a").await;
        let throttled = ProviderError::Throttled { what: Subject::Provider };
        world.provider.fail_at(2, Fault::Before(Failure::Error(throttled)));
        world.pass().await;
        assert!(is_changing(&world));
        world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
        world.operator.terminate_machines(&[MachineId::new(0)]).await.unwrap();
        if recorded {
            world.pass_for(Key::Machine(MachineId::new(0))).await;
        } else {
            world.pass().await;
        }
        assert!(!is_changing(&world), "recorded: {recorded}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_change_includes_failed_reads_of_the_provider() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    let throttled = ProviderError::Throttled { what: Subject::Provider };
    world.provider.fail_at(1, Fault::Before(Failure::Error(throttled)));
    world.pass().await;
    tokio::time::advance(Duration::from_secs(7)).await;
    world.lease.confirm(world.operator.tree()).await.unwrap();
    world.controller.pass(&Dirty::default(), &world.lease).await.unwrap();
    assert_eq!(took(&world.controller.metrics()), (1, 70));
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_close_includes_the_wait_for_confirmation() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    for port in 0..6 {
        world.open(unit, &(8000 + 2 * port).to_string()).await;
    }
    world.expose("a").await;
    world.pass().await;
    assert_eq!(took(&world.controller.metrics()), (1, 0));
    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Service(ServiceId::new(0))).await;
    assert!(world.controller.awaits_confirmation());
    tokio::time::advance(CONFIRM_AFTER).await;
    world.pass().await;
    assert_eq!(world.rules(0), Vec::<String>::new());
    assert_eq!(took(&world.controller.metrics()), (2, 20));
}

#[tokio::test(start_paused = true)]
async fn a_failed_read_counts_as_a_failure() {
    let mut world = World::new().await;
    world.deploy("a").await;
    let throttled = ProviderError::Throttled { what: Subject::Provider };
    world.provider.fail_at(1, Fault::Before(Failure::Error(throttled)));
    assert_eq!(world.pass().await.failures, BTreeMap::from([("throttled", 1)]));
    assert_eq!(world.pass().await.failures, BTreeMap::new());
}

#[tokio::test(start_paused = true)]
async fn a_change_is_counted_and_logged_when_the_store_refuses_its_report() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.pass().await;
    // A concurrent write to the report causes a conflict.
    let report = paths::firewall_report(MachineId::new(0));
    world.overwrite(report, b"{}").await;
    world.expose("a").await;
    let mut dirty = Dirty::default();
    dirty.add(&Event::Changed(paths::exposed(ServiceId::new(0))), Instant::now());
    let refused = world.controller.pass(&dirty, &world.lease).await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(world.rules(0), ["80/tcp"], "the port is open");
    let counted = world.controller.metrics().render(&crate::firewall::leader_loop::Progress::default());
    assert!(counted.contains("changes_total{what=\"open\"} 2"), "{counted}");
    world.pass().await;
    let log = world.operator.tree().get(&paths::firewall_log(MachineId::new(0))).await.unwrap();
    let change_log = ChangeLog::parse(&log.data).unwrap();
    assert_eq!(change_log.entries().len(), 1, "recorded once: {change_log:?}");
    world.pass().await;
    let log = world.operator.tree().get(&paths::firewall_log(MachineId::new(0))).await.unwrap();
    assert_eq!(ChangeLog::parse(&log.data).unwrap(), change_log);
}

/// Captures all further log output of this thread.
#[derive(Clone, Default)]
struct CapturedLog(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for CapturedLog {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn the_confirmation_of_one_close_is_not_logged_as_a_mass_close() {
    let mut world = World::new().await;
    for name in ["a", "b"] {
        let unit = world.deploy(name).await;
        world.open(unit, "80").await;
        world.expose(name).await;
    }
    world.pass().await;
    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    let captured = CapturedLog::default();
    let writer = captured.clone();
    let logged = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    let _subscriber = tracing::subscriber::set_default(logged);
    // The tree is read twice, and each time only one of the machines can be read.
    for rules in [vec!["80/tcp"], vec![]] {
        let throttled = ProviderError::Throttled { what: Subject::Provider };
        world.provider.fail_at(world.provider.calls() + 1, Fault::Before(Failure::Error(throttled)));
        world.pass().await;
        world.pass_for(Key::Machine(MachineId::new(0))).await;
        assert_eq!(world.rules(0), rules);
        tokio::time::advance(Duration::from_secs(3)).await;
    }
    let logged = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
    assert!(logged.contains("closes need confirmation") && !logged.contains("most rules"), "{logged}");
}

#[tokio::test(start_paused = true)]
async fn closes_for_a_removed_unit_are_logged_with_its_name() {
    for of_service in [false, true] {
        let mut world = World::new().await;
        let unit = world.deploy("a").await;
        // Without this unit the tree would have none, and each close would need two reads.
        world.deploy("b").await;
        world.open(unit, "80").await;
        world.expose("a").await;
        world.pass().await;
        if of_service {
            world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
        } else {
            world.operator.remove_unit(&"a/0".parse().unwrap()).await.unwrap();
        }
        // A controller that was just started has the name as well.
        world.controller.drop_caches();
        world.pass_for(Key::Unit(unit)).await;
        assert_eq!(world.rules(0), Vec::<String>::new());
        let log = world.operator.tree().get(&paths::firewall_log(MachineId::new(0))).await.unwrap();
        let change_log = ChangeLog::parse(&log.data).unwrap();
        let last = change_log.entries().last().unwrap();
        assert_eq!(last.items[0].units, ["a/0"], "{last:?}");
    }
}

/// A dry run is a separate state: neither a failure nor pending.
#[tokio::test(start_paused = true)]
async fn a_dry_run_is_neither_a_problem_nor_pending() {
    let world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    let dry = portcullis_provider::DryRun::new(world.provider.clone());
    let policy = Policy::with_own_ports([2181]);
    let roles = world.operator.info().roles.clone();
    let mut controller = FirewallController::new(world.controller.tree.clone(), dry, policy, roles, || 0);
    for _ in 0..2 {
        let pass = controller.pass(&everything(), &world.lease).await.unwrap();
        assert_eq!((pass.pending, pass.failures), (0, BTreeMap::new()));
        let report = controller.reports.get(MachineId::new(0)).unwrap();
        assert!(!report.is_pending() && report.problem.is_none(), "{report:?}");
        assert_eq!(controller.next_retry(), None);
    }
}
