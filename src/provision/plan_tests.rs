//! Tests of the plans for instances.

use std::time::Instant;

use portcullis_provider::provider::{Group, MachineNumber};
use proptest::prelude::*;

use super::*;
use crate::runtime::confirm::CONFIRM_AFTER;

fn record(instance: Option<&str>, adopted: bool) -> Result<records::Machine, String> {
    let mut rest = serde_json::Map::new();
    if instance.is_some() {
        rest.insert("instance-state".to_owned(), Value::from("running"));
    }
    Ok(records::Machine {
        instance_id: instance.map(|id| id.parse().unwrap()),
        name: None,
        addresses: Vec::new(),
        adopted,
        rest,
    })
}

fn instance(id: &str, machine: u32, origin: Origin, state: InstanceState) -> Instance {
    Instance {
        id: InstanceId::new(id),
        machine: MachineNumber::new(machine),
        origin,
        state,
        public_address: None,
        private_address: None,
        groups: [GroupId::new(format!("sg-{machine}"))].into(),
    }
}

fn running(id: &str, machine: u32) -> Instance {
    instance(id, machine, Origin::Launched, InstanceState::Running)
}

fn group(id: &str, machine: Option<u32>) -> Group {
    Group { id: GroupId::new(id), machine: machine.map(MachineNumber::new), open: false }
}

fn tree(records: Vec<Result<records::Machine, String>>) -> Records {
    records.into_iter().enumerate().map(|(n, r)| (MachineId::new(n as u32), r)).collect()
}

fn plan(records: Vec<Result<records::Machine, String>>, inventory: &Inventory) -> Plan {
    provision(&tree(records), inventory, |_| false)
}

/// The plan of a second read that shows the same.
fn confirmed_plan(records: Vec<Result<records::Machine, String>>, inventory: &Inventory) -> Plan {
    provision(&tree(records), inventory, |_| true)
}

/// A machine that needs no steps.
fn other() -> Result<records::Machine, String> {
    record(Some(LOCAL_INSTANCE), true)
}

const M0: MachineId = MachineId::new(0);

#[test]
fn a_machine_gets_one_instance_even_after_a_crash() {
    assert_eq!(plan(vec![record(None, false)], &Inventory::default()).steps, [Step::Launch(M0)]);
    let launched = instance("i-1", 0, Origin::Launched, InstanceState::Pending);
    let inventory = Inventory { instances: vec![launched.clone()], groups: vec![group("sg-0", Some(0))] };
    let found = plan(vec![record(None, false)], &inventory);
    assert_eq!((found.steps, found.unfinished), (vec![Step::Record(M0, Box::new(launched))], true));
    let inventory = Inventory { instances: vec![running("i-1", 0)], ..inventory };
    assert_eq!(plan(vec![record(Some("i-1"), false)], &inventory), Plan::default());
}

#[test]
fn a_change_of_an_instance_is_recorded_once() {
    let mut shown = running("i-1", 0);
    shown.public_address = Some("public.example.com".to_owned());
    shown.private_address = Some("10.0.0.1".to_owned());
    let inventory = Inventory { instances: vec![shown.clone()], groups: vec![group("sg-0", Some(0))] };
    let old = record(Some("i-1"), false).unwrap();
    let new = recorded(&old, &shown).unwrap();
    assert_eq!(new.addresses, ["public.example.com", "10.0.0.1"]);
    assert_eq!(plan(vec![Ok(old)], &inventory).steps, [Step::Record(M0, Box::new(shown.clone()))]);
    assert_eq!(plan(vec![Ok(new.clone())], &inventory).steps, []);
    let stopped =
        Instance { state: InstanceState::Stopped, public_address: None, private_address: None, ..shown };
    let then = recorded(&new, &stopped).unwrap();
    assert_eq!((then.addresses, &then.rest["instance-state"]), (new.addresses, &Value::from("stopped")));
}

#[test]
fn a_missing_or_detached_group_is_ensured() {
    let ensure = [Step::EnsureGroup(M0, InstanceId::new("i-1"))];
    let mut inventory = Inventory { instances: vec![running("i-1", 0)], groups: vec![] };
    assert_eq!(plan(vec![record(Some("i-1"), false)], &inventory).steps, ensure);
    inventory.groups.push(group("sg-0", Some(0)));
    assert_eq!(plan(vec![record(Some("i-1"), false)], &inventory).steps, []);
    inventory.instances[0].groups = [GroupId::new("sg-other")].into();
    assert_eq!(plan(vec![record(Some("i-1"), false)], &inventory).steps, ensure);
}

#[test]
fn an_adopted_instance_is_adopted_and_released_but_never_terminated() {
    let adopt = plan(vec![record(Some("i-9"), true)], &Inventory::default());
    assert_eq!(adopt.steps, [Step::Adopt(M0, InstanceId::new("i-9"))]);
    let held = instance("i-9", 7, Origin::Adopted, InstanceState::Running);
    let inventory =
        Inventory { instances: vec![held], groups: vec![group("sg-7", Some(7)), group("env", None)] };
    let m7 = MachineId::new(7);
    let released = Step::Release(m7, InstanceId::new("i-9"));
    assert_eq!(
        confirmed_plan(vec![other()], &inventory).steps,
        [released, Step::DeleteGroup(m7, GroupId::new("sg-7"))]
    );
}

#[test]
fn ports_of_a_removed_machine_close_before_its_termination() {
    let open = |id, machine| Group { open: true, ..group(id, Some(machine)) };
    let (m7, sg7) = (MachineId::new(7), GroupId::new("sg-7"));
    let shut = Step::RevokeAll(m7, sg7.clone());
    let mut inventory =
        Inventory { instances: vec![running("i-7", 7)], groups: vec![open("sg-0", 0), open("sg-7", 7)] };
    let terminate = Step::Terminate(m7, InstanceId::new("i-7"));
    assert_eq!(
        plan(vec![other()], &inventory).steps,
        std::slice::from_ref(&shut),
        "and no port of another machine"
    );
    assert_eq!(confirmed_plan(vec![other()], &inventory).steps, [shut.clone(), terminate]);
    inventory.instances = vec![instance("i-7", 7, Origin::Adopted, InstanceState::Running)];
    let [release, delete] = [Step::Release(m7, InstanceId::new("i-7")), Step::DeleteGroup(m7, sg7)];
    assert_eq!(
        plan(vec![other()], &inventory).steps,
        std::slice::from_ref(&shut),
        "the group is in use until then"
    );
    assert_eq!(confirmed_plan(vec![other()], &inventory).steps, [shut.clone(), release, delete.clone()]);
    assert!(shut.is_independent() && !delete.is_independent());
    // A read without any machines needs confirmation for this step, too.
    let nothing = plan(vec![], &inventory);
    assert_eq!(nothing.steps, []);
    let confirmed = provision(&Records::new(), &inventory, |ends| ends == nothing.unconfirmed);
    assert!(confirmed.steps.contains(&shut) && !confirmed.confirmed.contains(&shut), "nor told as an end");
}

#[test]
fn a_group_is_deleted_once_its_instance_has_ended() {
    let groups = vec![group("sg-7", Some(7))];
    let (m7, i7) = (MachineId::new(7), InstanceId::new("i-7"));
    let ending = Inventory { instances: vec![running("i-7", 7)], groups: groups.clone() };
    assert_eq!(confirmed_plan(vec![other()], &ending).steps, [Step::Terminate(m7, i7)]);
    let ended = instance("i-7", 7, Origin::Launched, InstanceState::Terminated);
    let ended = Inventory { instances: vec![ended], groups };
    assert_eq!(plan(vec![other()], &ended).steps, [Step::DeleteGroup(m7, GroupId::new("sg-7"))]);
}

#[test]
fn the_local_machine_is_not_provisioned() {
    assert_eq!(plan(vec![record(Some("local"), true)], &Inventory::default()), Plan::default());
}

#[test]
fn a_machine_with_an_address_exists_already_and_is_not_launched() {
    let mut plain = record(None, false);
    plain.as_mut().unwrap().addresses.push("192.0.2.7".to_owned());
    assert_eq!(plan(vec![plain, other()], &Inventory::default()).steps, []);
    assert_eq!(plan(vec![record(None, false)], &Inventory::default()).steps, [Step::Launch(M0)]);
}

#[test]
fn a_missing_instance_is_reported_and_not_launched_again() {
    let gone = plan(vec![record(Some("i-1"), false)], &Inventory::default());
    assert_eq!((gone.steps.len(), gone.missing_instances[&M0].as_str()), (0, "instance i-1 is gone"));
    let dead = instance("i-1", 0, Origin::Launched, InstanceState::Terminated);
    let inventory = Inventory { instances: vec![dead.clone()], groups: vec![] };
    let ended = plan(vec![record(Some("i-1"), false)], &inventory);
    assert_eq!(ended.steps, [Step::Record(M0, Box::new(dead))], "status shows that it has ended");
    assert_eq!(ended.missing_instances[&M0], "instance i-1 has ended");
    let another = Inventory { instances: vec![running("i-2", 0)], groups: vec![] };
    let replaced = plan(vec![record(Some("i-1"), false)], &another);
    assert_eq!((replaced.steps.len(), replaced.missing_instances.len()), (0, 1), "it may still come back");
}

#[test]
fn a_second_instance_of_a_machine_is_terminated() {
    let groups = vec![group("sg-0", Some(0))];
    let adopted = instance("i-3", 0, Origin::Adopted, InstanceState::Running);
    let inventory = Inventory { instances: vec![running("i-1", 0), running("i-2", 0), adopted], groups };
    let steps = confirmed_plan(vec![record(Some("i-1"), false)], &inventory).steps;
    let released = Step::Release(M0, InstanceId::new("i-3"));
    assert_eq!(steps, [Step::Terminate(M0, InstanceId::new("i-2")), released]);
    let steps = plan(vec![record(None, false)], &inventory).steps;
    assert_eq!(steps, [Step::Record(M0, Box::new(running("i-1", 0)))], "first it is said which one is it");
}

#[test]
fn an_unreadable_record_terminates_nothing() {
    let inventory = Inventory { instances: vec![running("i-1", 0)], groups: vec![group("sg-0", Some(0))] };
    assert_eq!(plan(vec![Err("garbage".into())], &inventory), Plan::default());
}

#[test]
fn terminating_most_instances_takes_a_second_read() {
    let instances = (0..4).map(|n| running(&format!("i-{n}"), n)).collect();
    let inventory = Inventory { instances, groups: vec![] };
    let first = plan(vec![], &inventory);
    assert_eq!((first.steps.len(), first.unconfirmed.len()), (0, 4));
    let second = provision(&Records::new(), &inventory, |ends| ends == first.unconfirmed);
    assert_eq!((second.steps, second.unconfirmed.len()), (first.unconfirmed.clone(), 0));
    let one = tree(vec![record(Some("i-0"), false)]);
    let other = provision(&one, &inventory, |ends| ends == first.unconfirmed);
    assert_eq!(other.unconfirmed.len(), 3, "another answer is no confirmation");
}

#[test]
fn every_termination_takes_a_second_read_and_delays_nothing_else() {
    let instances = (0..4).map(|n| running(&format!("i-{n}"), n)).collect();
    let inventory = Inventory { instances, groups: vec![group("sg-7", Some(7))] };
    let few: Vec<_> = (0..3).map(|n| record(Some(&format!("i-{n}")), false)).collect();
    let end = [Step::Terminate(MachineId::new(3), InstanceId::new("i-3"))];
    let first = plan(few.clone(), &inventory);
    let delete = Step::DeleteGroup(MachineId::new(7), GroupId::new("sg-7"));
    assert_eq!(first.unconfirmed, end);
    assert!(first.steps.contains(&delete) && !first.steps.iter().any(Step::ends_instance), "{first:?}");
    let second = provision(&tree(few), &inventory, |ends| ends == end);
    assert_eq!((second.confirmed.as_slice(), second.unconfirmed.len()), (&end[..], 0));
    assert!(second.steps.contains(&end[0]) && second.steps.contains(&delete), "{second:?}");
}

#[test]
fn the_order_of_the_inventory_does_not_matter() {
    let instances = (0..4).map(|n| running(&format!("i-{n}"), n)).collect();
    let groups = (4..7).map(|n| group(&format!("sg-{n}"), Some(n))).collect();
    let mut inventory = Inventory { instances, groups };
    let first = plan(vec![], &inventory);
    assert_eq!((first.steps.len(), first.unconfirmed.len()), (0, 7));
    inventory.instances.reverse();
    inventory.groups.reverse();
    let second = provision(&Records::new(), &inventory, |ends| ends == first.unconfirmed);
    assert_eq!((second.steps, second.unconfirmed.len()), (first.unconfirmed, 0));
}

#[test]
fn an_empty_list_of_machines_takes_a_second_read() {
    let inventory = Inventory { instances: vec![], groups: vec![group("sg-7", Some(7))] };
    let first = plan(vec![], &inventory);
    assert_eq!(first.unconfirmed, [Step::DeleteGroup(MachineId::new(7), GroupId::new("sg-7"))]);
    assert_eq!(first.steps, []);
    let second = provision(&Records::new(), &inventory, |ends| ends == first.unconfirmed);
    assert_eq!((&second.steps, &second.confirmed), (&first.unconfirmed, &first.unconfirmed));
}

#[test]
fn the_shared_group_is_deleted_after_the_last_machine() {
    let delete = Step::DeleteSharedGroup(GroupId::new("env"));
    assert_eq!((delete.machine(), delete.is_removal(), delete.is_independent()), (None, true, false));
    let shared = || vec![group("env", None)];
    let empty = Inventory { instances: vec![], groups: shared() };
    assert_eq!(
        plan(vec![other()], &empty).steps,
        std::slice::from_ref(&delete),
        "only the host itself is left"
    );
    let first = plan(vec![], &empty);
    assert_eq!((first.steps.len(), first.unconfirmed.as_slice()), (0, std::slice::from_ref(&delete)));
    let second = provision(&Records::new(), &empty, |ends| ends == first.unconfirmed);
    assert_eq!(second.steps, std::slice::from_ref(&delete), "as with all else, on a second look");
    let launching = plan(vec![record(None, false)], &empty);
    assert_eq!(launching.steps, [Step::Launch(M0)]);
    assert_eq!(plan(vec![Err("garbage".into())], &empty).steps, []);
    let vanished = plan(vec![record(Some("i-1"), false)], &empty);
    assert!(!vanished.steps.contains(&delete), "a machine without its instance is still one");
    let ending = Inventory { instances: vec![running("i-7", 7)], groups: shared() };
    let own_group = Inventory { instances: vec![], groups: vec![group("env", None), group("sg-7", Some(7))] };
    for inventory in [ending, own_group] {
        assert!(!plan(vec![other()], &inventory).steps.contains(&delete), "{inventory:?}");
        assert!(!is_clear(&tree(vec![other()]), &inventory));
    }
    assert!(is_clear(&Records::new(), &Inventory::default()));
    assert!(
        !is_clear(&Records::new(), &empty)
            && !is_clear(&tree(vec![record(None, false)]), &Inventory::default())
    );
}

#[test]
fn an_instance_that_is_not_listed_yet_is_not_reported_as_missing() {
    let (mut missing, start) = (Missing::default(), Instant::now());
    let gone = BTreeMap::from([(M0, "instance i-1 is gone".to_owned())]);
    assert_eq!(missing.settled(&gone, start), BTreeMap::new());
    assert_eq!(missing.next(), Some(start + SETTLE), "also when that time has come");
    assert_eq!(missing.settled(&gone, start + SETTLE), gone);
    assert_eq!(missing.next(), None, "all is said");
    assert_eq!(missing.settled(&BTreeMap::new(), start + SETTLE), BTreeMap::new());
    assert_eq!(missing.settled(&gone, start + SETTLE), BTreeMap::new(), "missing again");
}

#[test]
fn a_second_read_confirms_removals_and_other_removals_need_their_own() {
    let (mut confirmation, start) = (Confirmation::default(), Instant::now());
    let ends = |n: u32| -> Vec<Step> {
        (0..n).map(|n| Step::Terminate(M0, InstanceId::new(format!("i-{n}")))).collect()
    };
    let unconfirmed = |n| Plan { unconfirmed: ends(n), ..Plan::default() };
    let confirming = |n| Plan { confirmed: ends(n), ..Plan::default() };
    confirmation.add(&unconfirmed(3), start);
    assert!(!confirmation.confirms(&ends(3), start));
    assert_eq!(confirmation.next(), Some(start + CONFIRM_AFTER));
    confirmation.add(&unconfirmed(3), start + CONFIRM_AFTER / 2);
    let later = start + CONFIRM_AFTER;
    assert!(
        confirmation.confirms(&ends(3), later) && !confirmation.confirms(&ends(2), later),
        "a different read confirms nothing"
    );
    confirmation.add(&confirming(3), later);
    assert_eq!(confirmation.next(), None);
    assert!(
        confirmation.confirms(&ends(2), later) && !confirmation.confirms(&ends(4), later),
        "the remaining steps stay confirmed"
    );
    confirmation.add(&unconfirmed(4), later);
    assert!(!confirmation.confirms(&ends(4), later) && !confirmation.confirms(&ends(2), later));
    confirmation.add(&Plan::default(), later);
    assert_eq!(confirmation.next(), None);
}

/// Small environments and inventories, with machines 0 to 3.
fn worlds() -> impl Strategy<Value = (Records, Inventory)> {
    let id = (0..6_u32).prop_map(|n| format!("i-{n}"));
    let machine = (proptest::option::of(id), any::<bool>(), 0..8_u8).prop_map(|(id, adopted, broken)| {
        if broken == 0 { Err("garbage".to_owned()) } else { record(id.as_deref(), adopted && id.is_some()) }
    });
    let state = prop_oneof![
        Just(InstanceState::Pending),
        Just(InstanceState::Running),
        Just(InstanceState::Stopped),
        Just(InstanceState::Terminated)
    ];
    let origin = prop_oneof![Just(Origin::Launched), Just(Origin::Adopted)];
    let held =
        (0..6_u32, 0..4_u32, origin, state).prop_map(|(id, m, o, s)| instance(&format!("i-{id}"), m, o, s));
    let machines = proptest::collection::btree_map((0..4_u32).prop_map(MachineId::new), machine, 0..4);
    let instances = proptest::collection::vec(held, 0..6).prop_map(|mut all| {
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all.dedup_by(|a, b| a.id == b.id);
        all
    });
    let groups = proptest::collection::btree_map(0..4_u32, any::<bool>(), 0..4).prop_map(|groups| {
        let shown = |(n, open)| Group { open, ..group(&format!("sg-{n}"), Some(n)) };
        groups.into_iter().map(shown).collect()
    });
    (machines, instances, groups)
        .prop_map(|(machines, instances, groups)| (machines, Inventory { instances, groups }))
}

proptest! {
    #[test]
    fn no_wanted_or_foreign_instance_is_terminated((machines, inventory) in worlds()) {
        let plan = provision(&machines, &inventory, |_| false);
        for step in plan.steps.iter().chain(&plan.unconfirmed) {
            let shown = |id: &InstanceId| inventory.instances.iter().find(|i| i.id == *id).unwrap();
            let record = step.machine().and_then(|machine| machines.get(&machine));
            let recorded = match record {
                Some(Ok(record)) => record.instance_id.as_ref().map(|id| id.as_str()),
                _ => None,
            };
            match step {
                Step::Terminate(_, id) => {
                    prop_assert_eq!(shown(id).origin, Origin::Launched);
                    prop_assert!(record.is_none() || recorded.is_some_and(|known| known != id.as_str()));
                    prop_assert!(!matches!(record, Some(Err(_))));
                }
                Step::Release(_, id) => {
                    prop_assert_eq!(shown(id).origin, Origin::Adopted);
                    prop_assert!(record.is_none() || recorded.is_some_and(|known| known != id.as_str()));
                }
                Step::RevokeAll(..) | Step::DeleteGroup(..) => prop_assert!(record.is_none()),
                Step::DeleteSharedGroup(_) => prop_assert!(machines.is_empty()),
                Step::Launch(_) => prop_assert!(recorded.is_none() && record.is_some()),
                Step::Adopt(_, id) => prop_assert_eq!(recorded, Some(id.as_str())),
                Step::EnsureGroup(_, id) => prop_assert!(is_live(shown(id))),
                Step::Record(..) => prop_assert!(matches!(record, Some(Ok(_)))),
            }
        }
    }

    #[test]
    fn one_machine_is_never_launched_twice((machines, inventory) in worlds()) {
        let steps = provision(&machines, &inventory, |_| false).steps;
        for id in machines.keys() {
            let launches = steps.iter().filter(|step| **step == Step::Launch(*id)).count();
            let live = inventory.instances.iter().any(|i| is_live(i) && i.machine.get() == id.number());
            prop_assert!(launches <= usize::from(!live));
        }
    }
}

#[test]
fn a_unit_names_its_machine_even_if_its_record_is_invalid() {
    let [one, two, three] = [1, 2, 3].map(MachineId::new);
    let units: Vec<(UnitId, Vec<u8>)> = [
        r#"{"name": "a/0", "service": "service-0000000000", "machine": "machine-0000000001"}"#,
        r#"{"name": "b/0", "service": "service-0000000000", "machine": null}"#,
        r#"{"name": "c/0", "machine": "machine-0000000002""#,
    ]
    .into_iter()
    .zip(0..)
    .map(|(text, number)| (UnitId::new(number), text.as_bytes().to_vec()))
    .collect();
    let kept = named_by_units(&[one, two, three].into(), &units);
    assert_eq!(kept.keys().copied().collect::<Vec<_>>(), [one, two]);
    assert!(kept[&one].contains("unit a/0 names it") && kept[&two].contains("/units/unit-0000000002"));
    assert_eq!(named_by_units(&[three].into(), &units), BTreeMap::new());
}
