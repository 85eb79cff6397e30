//! Orphans, crashes at any call, and a leader that was replaced.

use super::*;

#[tokio::test(start_paused = true)]
async fn orphans_are_removed_but_most_instances_only_after_a_second_read() {
    let mut world = World::started(MemorySettings::default()).await;
    let machines: Vec<_> =
        futures_util::future::join_all((0..4).map(|_| world.operator.add_machine(None))).await;
    let machines: Vec<MachineId> = machines.into_iter().map(Result::unwrap).collect();
    soon().await;
    world.crash();
    world.operator.terminate_machines(&machines[..3]).await.unwrap();
    world.start();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.provider.calls_of(CallName::Terminate), 0, "not on the word of one look");
    tokio::time::sleep(LONG).await;
    assert_eq!(world.provider.calls_of(CallName::Terminate), 3);
    assert_eq!(machines.iter().filter(|id| world.ports(**id).is_some()).count(), 1);
    assert!(world.provider.is_running(&world.instance(machines[3]).await.unwrap()));
}

/// Runs one scenario with a crash before or after the effect of each call in turn.
#[tokio::test(start_paused = true)]
async fn a_crash_at_any_call_is_harmless() {
    let mut crashes = 0;
    for after in [false, true] {
        for index in 1.. {
            let mut world =
                World::new(MemorySettings { busy_calls: 3, lag_calls: 2, ..MemorySettings::default() }).await;
            let fault = if after { Fault::After(Answer::Silence) } else { Fault::Before(Answer::Silence) };
            world.provider.fail_at(index, fault);
            world.provider.add_instance(&InstanceId::new("i-theirs"));
            world.start();
            let first = world.operator.add_machine(None).await.unwrap();
            let adopted = world.operator.add_machine(Some("i-theirs".parse().unwrap())).await.unwrap();
            world.expose_on("a", first).await;
            soon().await;
            world.operator.terminate_machines(&[adopted]).await.unwrap();
            let second = world.operator.add_machine(None).await.unwrap();
            soon().await;
            let reached = world.provider.calls() >= index;
            world.crash();
            world.start();
            tokio::time::sleep(LONG).await;
            crashes += 1;
            let mut instances = Vec::new();
            for machine in [first, second] {
                let instance = world.instance(machine).await.expect("an instance");
                assert!(world.provider.is_running(&instance), "call {index}, after: {after}");
                instances.push(instance);
            }
            let running = (1..20).map(|n| InstanceId::new(format!("i-{n}")));
            let running = running.filter(|id| world.provider.is_running(id)).count();
            assert_eq!(running, 2, "call {index}, after: {after}: none is left over");
            assert!(world.provider.is_running(&InstanceId::new("i-theirs")), "call {index}, after: {after}");
            assert_eq!(
                [world.ports(first), world.ports(adopted)],
                [Some(2), None],
                "call {index}, after: {after}"
            );
            if !reached {
                break;
            }
        }
    }
    assert!(crashes > 20, "{crashes} calls are too few to have tried anything");
}

#[tokio::test(start_paused = true)]
async fn a_replaced_leader_records_nothing() {
    let world = World::new(MemorySettings::default()).await;
    let roles = world.operator.info().roles.clone();
    let (old, new) =
        (world.store.connect(Some(&world.controller)), world.store.connect(Some(&world.controller)));
    let stale = Lease::acquire(&old, &LeaseKey::firewall(), &roles.controllers(), "old").await.unwrap();
    drop(old);
    let mut lease = Lease::acquire(&new, &LeaseKey::firewall(), &roles.controllers(), "new").await.unwrap();
    let machine = world.operator.add_machine(None).await.unwrap();
    let boot = BootConfig::new("test".parse().unwrap(), "zk:2181".parse().unwrap(), None, roles.clone());
    let runner = StepRunner { tree: &new, machines: &world.provider, boot: &boot, now_ms: 0 };
    let reads = PendingReads { everything: true, ..PendingReads::default() };
    let (pending_reads, (updates, _received)) = (watch::Sender::new(reads), mpsc::channel(1));
    let mut provisioner = Provisioner::new(new.clone(), world.provider.clone(), boot.clone(), || 0);
    provisioner.work(stale.clone(), &pending_reads, &updates).await.expect("it ends");
    assert_eq!(world.provider.calls(), 0, "it did not even look");
    // Simulates a lease that is lost between a read and a write.
    let launch = Launch { machine: MachineNumber::new(machine.number()), user_data: UserData::new("") };
    let launched = world.provider.launch(&launch).await.unwrap();
    let record = Step::Record(machine, Box::new(launched));
    let refused = runner.run(vec![record.clone()], &mut stale.clone()).await;
    assert!(matches!(refused, Err(Stop::Replaced)), "{refused:?}");
    assert_eq!(world.instance(machine).await, None);
    runner.run(vec![record], &mut lease).await.unwrap();
    assert!(world.instance(machine).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn launches_wait_for_a_confirming_read_under_every_lease() {
    let world = World::new(MemorySettings::default()).await;
    let roles = world.operator.info().roles.clone();
    let tree = world.store.connect(Some(&world.controller));
    world.operator.add_machine(None).await.unwrap();
    let removed = Launch { machine: MachineNumber::new(50), user_data: UserData::new("") };
    world.provider.launch(&removed).await.unwrap();
    let boot = BootConfig::new("test".parse().unwrap(), "zk:2181".parse().unwrap(), None, roles.clone());
    let mut provisioner = Provisioner::new(tree.clone(), world.provider.clone(), boot, || 0);
    for holder in ["first", "second"] {
        let lease = Lease::acquire(&tree, &LeaseKey::firewall(), &roles.controllers(), holder).await.unwrap();
        let reads = PendingReads { everything: true, ..PendingReads::default() };
        let (pending_reads, (updates, _received)) = (watch::Sender::new(reads), mpsc::channel(8));
        // The lease is lost before the confirming read.
        let work = provisioner.work(lease.clone(), &pending_reads, &updates);
        tokio::time::timeout(CONFIRM_AFTER / 2, work).await.unwrap_err();
        assert_eq!(world.provider.calls_of(CallName::Launch), 1, "no launch under the {holder} lease");
        lease.release(&tree).await;
        tokio::time::sleep(LONG).await;
    }
}
