//! The in-memory provider fails exactly as scripted.

#![allow(clippy::unwrap_used, reason = "only tests call this")]

use portcullis_provider::memory::{Call, CallName, Failure, Fault, Memory, MemorySettings};
use portcullis_provider::provider::{
    Firewall, Foreign, InstanceId, InstanceState, Launch, MachineNumber, Machines, Origin, Seen, UserData,
};
use portcullis_provider::rule::{Change, Cidr, PortRange, Protocol, Rule, WirePorts};
use portcullis_provider::{Error, Subject};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

const MACHINE: MachineNumber = MachineNumber::new(1);

fn rule(port: u16) -> Rule {
    Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4)
}

fn opening(ports: impl IntoIterator<Item = u16>) -> Change {
    Change { open: ports.into_iter().map(rule).collect(), close: BTreeSet::new() }
}

fn closing(ports: impl IntoIterator<Item = u16>) -> Change {
    Change { open: BTreeSet::new(), close: ports.into_iter().map(rule).collect() }
}

fn in_time() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

fn throttled() -> Error {
    Error::Throttled { what: Subject::Machine(MACHINE) }
}

fn memory(settings: MemorySettings) -> Memory {
    let memory = Memory::new(settings);
    memory.add_group(MACHINE);
    memory
}

async fn shown(memory: &Memory) -> Option<BTreeSet<Rule>> {
    match memory.observe(&BTreeSet::from([MACHINE])).await.unwrap().remove(&MACHINE) {
        Some(Seen::Present(rules)) => Some(rules.owned),
        Some(Seen::Absent) => None,
        None => panic!("no answer for the machine"),
    }
}

fn actual(memory: &Memory) -> BTreeSet<Rule> {
    memory.actual(MACHINE).unwrap().owned
}

#[tokio::test]
async fn faults_happen_before_or_after_the_effect() {
    for (fault, took_effect) in [
        (Fault::Before(Failure::Error(throttled())), false),
        (Fault::After(Failure::Error(throttled())), true),
    ] {
        let memory = memory(MemorySettings::default());
        memory.fail_at(1, fault);
        let applied = memory.apply(MACHINE, &opening([80]), in_time()).await;
        assert_eq!(applied.opened, Err(throttled()));
        assert_eq!(actual(&memory).contains(&rule(80)), took_effect);
        assert_eq!(memory.journal()[0].applied, took_effect);
        assert!(memory.apply(MACHINE, &opening([80]), in_time()).await.is_ok(), "only once");
    }
}

#[tokio::test]
async fn failed_open_does_not_prevent_a_close() {
    let memory = memory(MemorySettings::default());
    assert!(memory.apply(MACHINE, &opening([80]), in_time()).await.is_ok());
    memory.fail_at(3, Fault::Before(Failure::Error(throttled())));
    let change = Change { open: [rule(81)].into(), close: [rule(80)].into() };
    let applied = memory.apply(MACHINE, &change, in_time()).await;
    assert_eq!((applied.opened, applied.closed), (Err(throttled()), Ok(())));
    assert!(actual(&memory).is_empty());
}

#[tokio::test]
async fn hanging_call_ends_with_its_caller() {
    for (fault, took_effect) in
        [(Fault::Before(Failure::Silence), false), (Fault::After(Failure::Silence), true)]
    {
        let memory = memory(MemorySettings::default());
        memory.fail_at(1, fault);
        let change = opening([80]);
        let waiting =
            tokio::time::timeout(Duration::from_millis(1), memory.apply(MACHINE, &change, in_time()));
        assert!(waiting.await.is_err());
        assert_eq!(actual(&memory).contains(&rule(80)), took_effect);
        assert_eq!(memory.journal()[0].answer, None);
        assert!(memory.apply(MACHINE, &closing([80]), in_time()).await.is_ok());
    }
}

#[tokio::test]
async fn script_receives_every_call() {
    let memory = memory(MemorySettings::default());
    memory.set_script(|call: &Call| {
        let denied = Error::Denied { what: Subject::Provider, reason: "no rights".to_owned() };
        call.name.is_write().then_some(Fault::Before(Failure::Error(denied)))
    });
    assert_eq!(shown(&memory).await, Some(BTreeSet::new()));
    assert_eq!(memory.apply(MACHINE, &opening([80]), in_time()).await.opened.unwrap_err().kind(), "denied");
    memory.clear_script();
    assert!(memory.apply(MACHINE, &opening([80]), in_time()).await.is_ok());
    let names: Vec<_> = memory.journal().into_iter().map(|entry| entry.call.name).collect();
    assert_eq!(names, [CallName::Observe, CallName::Open, CallName::Open]);
    assert_eq!((memory.calls(), memory.writes(), memory.calls_of(CallName::Open)), (3, 2, 2));
}

#[tokio::test]
async fn reads_are_stale_for_a_while() {
    let memory = memory(MemorySettings { lag_calls: 2, ..MemorySettings::default() });
    assert!(memory.apply(MACHINE, &opening([80]), in_time()).await.is_ok());
    assert_eq!(shown(&memory).await, Some(BTreeSet::new()));
    assert_eq!(shown(&memory).await, Some(BTreeSet::new()));
    assert_eq!(shown(&memory).await, Some([rule(80)].into()));
    assert!(memory.apply(MACHINE, &closing([80]), in_time()).await.is_ok());
    assert_eq!(shown(&memory).await, Some([rule(80)].into()));
    assert!(actual(&memory).is_empty());
    memory.configure(|settings| settings.lag_calls = 0);
    assert_eq!(shown(&memory).await, Some(BTreeSet::new()));
}

#[tokio::test]
async fn full_group_refuses_the_whole_batch() {
    let memory = memory(MemorySettings::default());
    let foreign = Foreign::from_wire(WirePorts { proto: "6", from: Some(9), to: Some(9) }, Cidr::WORLD_V4);
    assert!(memory.tamper(MACHINE, |rules| rules.foreign.push(foreign)));
    let full = memory.apply(MACHINE, &opening((0..60).map(|n| 100 + 2 * n)), in_time()).await;
    let group = memory.actual(MACHINE).unwrap().group;
    assert_eq!(full.opened, Err(Error::QuotaExceeded { what: Subject::Group(group), limit: Some(60) }));
    assert!(actual(&memory).is_empty());
    assert!(memory.apply(MACHINE, &opening((0..59).map(|n| 100 + 2 * n)), in_time()).await.is_ok());
    let other_family = Rule::new(rule(80).ports, Cidr::WORLD_V6);
    let change = Change { open: [other_family].into(), close: BTreeSet::new() };
    assert!(memory.apply(MACHINE, &change, in_time()).await.is_ok(), "families are counted apart");
}

#[tokio::test]
async fn foreign_rules_are_unchanged() {
    let memory = memory(MemorySettings::default());
    assert!(memory.apply(MACHINE, &opening([80, 81]), in_time()).await.is_ok());
    let theirs = Foreign::from_wire(WirePorts { proto: "6", from: Some(443), to: Some(443) }, Cidr::WORLD_V4);
    memory.tamper(MACHINE, |rules| {
        rules.owned.remove(&rule(80));
        rules.foreign.push(theirs.clone());
        rules.drift.push("its tag was changed".to_owned());
    });
    assert_eq!(shown(&memory).await, Some([rule(81)].into()));
    assert!(memory.apply(MACHINE, &opening([443]), in_time()).await.is_ok(), "already done");
    assert!(memory.apply(MACHINE, &closing([443]), in_time()).await.is_ok());
    let rules = memory.actual(MACHINE).unwrap();
    assert_eq!((rules.owned, rules.foreign, rules.drift), ([rule(81)].into(), vec![theirs], vec![]));
    memory.remove_group(MACHINE);
    assert_eq!(shown(&memory).await, None);
    assert_eq!(
        memory.apply(MACHINE, &opening([80]), in_time()).await.opened.unwrap_err().kind(),
        "not-found"
    );
}

#[tokio::test]
async fn empty_change_reverts_drift() {
    let memory = memory(MemorySettings::default());
    memory.tamper(MACHINE, |rules| rules.drift.push("its tag was changed".to_owned()));
    assert!(memory.apply(MACHINE, &Change::default(), in_time()).await.is_ok());
    assert_eq!(memory.actual(MACHINE).unwrap().drift, Vec::<String>::new());
    assert_eq!(memory.calls_of(CallName::Repair), 1);
}

fn launch(machine: MachineNumber) -> Launch {
    Launch { machine, user_data: UserData::new("#!/bin/sh") }
}

#[tokio::test]
async fn machine_has_one_instance_and_keeps_its_group() {
    let memory = Memory::new(MemorySettings { busy_calls: 1, ..MemorySettings::default() });
    let instance = memory.launch(&launch(MACHINE)).await.unwrap();
    assert_eq!((instance.machine, instance.origin), (MACHINE, Origin::Launched));
    assert_eq!(
        memory.launch(&launch(MACHINE)).await,
        Ok(instance.clone()),
        "asked again after a lost answer"
    );
    let inventory = memory.list().await.unwrap();
    assert_eq!(inventory.instances, std::slice::from_ref(&instance));
    let group = inventory.groups[0].id.clone();
    assert_eq!(inventory.groups[0].machine, Some(MACHINE));
    let in_use = Err(Error::StillInUse { what: Subject::from(&group) });
    assert_eq!(memory.delete_group(&group).await, in_use);
    for _ in 0..2 {
        assert_eq!(memory.terminate(MACHINE, &instance.id).await, Ok(()));
    }
    assert!(!memory.is_running(&instance.id));
    assert_eq!(memory.list().await.unwrap().instances[0].state, InstanceState::Terminated);
    for _ in 0..2 {
        assert_eq!(memory.delete_group(&group).await, Ok(()));
    }
    let left = memory.list().await.unwrap().groups;
    assert!(
        left.iter().all(|group| group.machine.is_none()),
        "only the environment's group is left: {left:?}"
    );
}

#[tokio::test]
async fn group_of_a_terminated_instance_stays_in_use() {
    let memory = Memory::new(MemorySettings { busy_calls: 2, ..MemorySettings::default() });
    let instance = memory.launch(&launch(MACHINE)).await.unwrap();
    let group = memory.actual(MACHINE).unwrap().group;
    assert_eq!(memory.terminate(MACHINE, &instance.id).await, Ok(()));
    let in_use = Err(Error::StillInUse { what: Subject::from(&group) });
    assert_eq!(memory.delete_group(&group).await, in_use);
    assert_eq!(memory.delete_group(&group).await, in_use);
    assert_eq!(memory.delete_group(&group).await, Ok(()));
}

#[tokio::test]
async fn adopted_instance_is_never_terminated() {
    let memory = Memory::new(MemorySettings::default());
    let theirs = InstanceId::new("i-theirs");
    assert_eq!(memory.adopt(MACHINE, &theirs).await.unwrap_err().kind(), "not-found");
    memory.add_instance(&theirs);
    assert_eq!(memory.list().await.unwrap().instances, [], "the instance is not adopted yet");
    assert_eq!(memory.adopt(MACHINE, &theirs).await.unwrap().origin, Origin::Adopted);
    assert_eq!(memory.adopt(MachineNumber::new(9), &theirs).await.unwrap_err().kind(), "foreign");
    assert_eq!(memory.terminate(MACHINE, &theirs).await.unwrap_err().kind(), "foreign");
    let group = memory.actual(MACHINE).unwrap().group;
    assert_eq!(memory.ensure_group(MACHINE, &theirs).await, Ok(group.clone()));
    for _ in 0..2 {
        assert_eq!(memory.release(MACHINE, &theirs).await, Ok(()));
    }
    assert!(memory.is_running(&theirs));
    assert_eq!(memory.delete_group(&group).await, Ok(()));
    assert_eq!(memory.list().await.unwrap(), Default::default());
}

#[tokio::test]
async fn launching_again_empties_a_stale_group() {
    let memory = memory(MemorySettings::default());
    assert!(memory.apply(MACHINE, &opening([80]), in_time()).await.is_ok());
    let instance = memory.launch(&launch(MACHINE)).await.unwrap();
    assert!(actual(&memory).is_empty());
    memory.lose_instance(&instance.id);
    let next = memory.launch(&launch(MACHINE)).await.unwrap();
    assert_ne!(next.id, instance.id);
}
