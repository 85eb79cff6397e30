//! Instances for machines: what to launch, adopt, end and delete. Pure: from the machines of the tree and the provider's
//! inventory to steps. The inventory is the memory: what is marked as ours and belongs to no machine is on its way out,
//! however often the controller was killed in between.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::provider::{GroupId, Instance, InstanceId, InstanceState, Inventory, Origin};

use crate::model::MachineId;
use crate::store::records;

/// Ending more than half of all instances, and at least this many, takes a second look at the tree.
const MASS_END_MIN: usize = 3;

/// One thing to do. Steps for different machines are independent; those for one come in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Launch(MachineId),
    Adopt(MachineId, InstanceId),
    /// The group is missing that holds the machine's rules.
    EnsureGroup(MachineId, InstanceId),
    /// The tree does not know yet what the provider has.
    Record(MachineId, Box<Instance>),
    Terminate(MachineId, InstanceId),
    Release(MachineId, InstanceId),
    DeleteGroup(GroupId),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Provisioning {
    pub steps: Vec<Step>,
    /// Machines whose instance is gone: nobody but the operator can say what should become of them.
    pub vanished: BTreeMap<MachineId, String>,
    /// So much would end that the tree is looked at again first; none of it is in `steps`.
    pub doubted: usize,
}

/// `confirmed` says that an earlier look asked for the same ends.
pub fn provision(
    machines: &BTreeMap<MachineId, Result<records::Machine, String>>,
    inventory: &Inventory,
    confirmed: bool,
) -> Provisioning {
    let mut plan = Provisioning::default();
    let alive = |instance: &&Instance| instance.state != InstanceState::Terminated;
    let of = |machine: MachineId| {
        inventory.instances.iter().filter(alive).find(move |i| i.machine.get() == machine.number())
    };
    for (&machine, record) in machines {
        // A record that cannot be read is kept as it is, with all that belongs to it.
        if let Ok(record) = record {
            for_machine(&mut plan, machine, record, of(machine), inventory);
        }
    }
    let ends = ends(machines, inventory);
    let all = inventory.instances.iter().filter(alive).count();
    let ending = ends.iter().filter(|step| !matches!(step, Step::DeleteGroup(_))).count();
    if ending >= MASS_END_MIN && 2 * ending > all && !confirmed {
        plan.doubted = ending;
    } else {
        plan.steps.extend(ends);
    }
    plan
}

fn for_machine(
    plan: &mut Provisioning,
    machine: MachineId,
    record: &records::Machine,
    instance: Option<&Instance>,
    inventory: &Inventory,
) {
    let known = record.instance_id.as_ref().map(|id| InstanceId::new(id.as_str()));
    match (known, instance) {
        (None, None) => plan.steps.push(Step::Launch(machine)),
        (Some(id), None) if record.adopted => plan.steps.push(Step::Adopt(machine, id)),
        (Some(id), None) => {
            plan.vanished.insert(machine, format!("instance {id} is gone"));
        }
        (Some(id), Some(found)) if id != found.id => {
            plan.vanished.insert(machine, format!("instance {id} is gone; the provider has {}", found.id));
        }
        (known, Some(found)) => {
            let has_group = inventory.groups.iter().any(|g| g.machine.is_some_and(|n| n == found.machine));
            if !has_group {
                plan.steps.push(Step::EnsureGroup(machine, found.id.clone()));
            }
            if known.is_none() || record.addresses != addresses(found) {
                plan.steps.push(Step::Record(machine, Box::new(found.clone())));
            }
        }
    }
}

/// The addresses of an instance as the tree keeps them: the public one first.
pub fn addresses(instance: &Instance) -> Vec<String> {
    [&instance.public_address, &instance.private_address].into_iter().flatten().cloned().collect()
}

/// What is ours and belongs to no machine of the tree.
fn ends(
    machines: &BTreeMap<MachineId, Result<records::Machine, String>>,
    inventory: &Inventory,
) -> Vec<Step> {
    let known: BTreeSet<u32> = machines.keys().map(|machine| machine.number()).collect();
    let mut steps = Vec::new();
    for instance in &inventory.instances {
        if known.contains(&instance.machine.get()) || instance.state == InstanceState::Terminated {
            continue;
        }
        let machine = MachineId::new(instance.machine.get());
        steps.push(match instance.origin {
            Origin::Launched => Step::Terminate(machine, instance.id.clone()),
            Origin::Adopted => Step::Release(machine, instance.id.clone()),
        });
    }
    for group in &inventory.groups {
        if group.machine.is_some_and(|machine| !known.contains(&machine.get())) {
            steps.push(Step::DeleteGroup(group.id.clone()));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::provider::{Group, MachineNumber};

    fn record(instance: Option<&str>, adopted: bool) -> Result<records::Machine, String> {
        Ok(records::Machine {
            instance_id: instance.map(|id| id.parse().unwrap()),
            addresses: Vec::new(),
            adopted,
            rest: serde_json::Map::new(),
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
        }
    }

    fn group(id: &str, machine: Option<u32>) -> Group {
        Group { id: GroupId::new(id), machine: machine.map(MachineNumber::new) }
    }

    fn steps(records: Vec<Result<records::Machine, String>>, inventory: &Inventory) -> Provisioning {
        let machines = records.into_iter().enumerate().map(|(n, r)| (MachineId::new(n as u32), r)).collect();
        provision(&machines, inventory, false)
    }

    const M0: MachineId = MachineId::new(0);

    #[test]
    fn a_machine_gets_one_instance_and_a_crash_in_between_finds_it_again() {
        assert_eq!(steps(vec![record(None, false)], &Inventory::default()).steps, [Step::Launch(M0)]);
        let launched = instance("i-1", 0, Origin::Launched, InstanceState::Pending);
        let inventory = Inventory { instances: vec![launched.clone()], groups: vec![group("sg-1", Some(0))] };
        assert_eq!(
            steps(vec![record(None, false)], &inventory).steps,
            [Step::Record(M0, Box::new(launched))]
        );
        assert_eq!(steps(vec![record(Some("i-1"), false)], &inventory), Provisioning::default());
    }

    #[test]
    fn an_adopted_instance_is_taken_in_and_let_go_but_never_ended() {
        let adopt = steps(vec![record(Some("i-9"), true)], &Inventory::default());
        assert_eq!(adopt.steps, [Step::Adopt(M0, InstanceId::new("i-9"))]);
        let held = instance("i-9", 7, Origin::Adopted, InstanceState::Running);
        let inventory =
            Inventory { instances: vec![held], groups: vec![group("sg-7", Some(7)), group("env", None)] };
        let gone = steps(vec![], &inventory).steps;
        let released = Step::Release(MachineId::new(7), InstanceId::new("i-9"));
        assert_eq!(gone, [released, Step::DeleteGroup(GroupId::new("sg-7"))]);
    }

    #[test]
    fn what_vanished_is_reported_and_not_made_again() {
        let plan = steps(vec![record(Some("i-1"), false)], &Inventory::default());
        assert_eq!((plan.steps.len(), plan.vanished[&M0].as_str()), (0, "instance i-1 is gone"));
        let dead = instance("i-1", 0, Origin::Launched, InstanceState::Terminated);
        let plan =
            steps(vec![record(Some("i-1"), false)], &Inventory { instances: vec![dead], groups: vec![] });
        assert_eq!(plan.vanished.len(), 1);
    }

    #[test]
    fn a_record_that_cannot_be_read_ends_nothing() {
        let running = instance("i-1", 0, Origin::Launched, InstanceState::Running);
        let inventory = Inventory { instances: vec![running], groups: vec![group("sg-1", Some(0))] };
        assert_eq!(steps(vec![Err("garbage".into())], &inventory), Provisioning::default());
    }

    #[test]
    fn ending_most_of_everything_takes_a_second_look() {
        let instances =
            (0..4).map(|n| instance(&format!("i-{n}"), n, Origin::Launched, InstanceState::Running));
        let inventory = Inventory { instances: instances.collect(), groups: vec![] };
        let plan = steps(vec![], &inventory);
        assert_eq!((plan.steps.len(), plan.doubted), (0, 4));
        assert_eq!(provision(&BTreeMap::new(), &inventory, true).steps.len(), 4);
        let few: Vec<_> = (0..3).map(|n| record(Some(&format!("i-{n}")), false)).collect();
        let ends =
            steps(few, &inventory).steps.into_iter().filter(|step| matches!(step, Step::Terminate(..)));
        assert_eq!(ends.count(), 1, "one of four is no mass");
    }
}
