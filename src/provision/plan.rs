//! Plans which instances to launch, adopt and terminate, and which groups to delete. Pure. Computes
//! steps from the records of machines and the provider's inventory. No other state is needed:
//! objects with our mark that belong to no machine are removed, even if the controller crashed in
//! between.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis_provider::provider::{Group, GroupId, Instance, InstanceId, InstanceState, Inventory, Origin};
use serde_json::Value;

use crate::model::{self, MachineId, UnitId};
use crate::mutant;
use crate::runtime::clock::Moment;
use crate::runtime::confirm::FirstRead;
use crate::store::paths;
use crate::store::records::{self, LOCAL_INSTANCE};

/// A read that would terminate more than half of all instances, and at least this many, removes
/// nothing else either until a second read confirms it.
pub const MASS_TERMINATION_MIN: usize = 3;

/// How long an instance must be missing before it is reported: a new one may not be listed at once.
const SETTLE: Duration = Duration::from_secs(5);

/// How long the inventory must be empty before it is reported as empty, for the same reason.
pub const EMPTY_FOR: Duration = SETTLE;

/// One step. Steps of different machines are independent; those of one machine run in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Launch(MachineId),
    Adopt(MachineId, InstanceId),
    /// The group that holds the machine's rules is missing, or its instance is not in it.
    EnsureGroup(MachineId, InstanceId),
    /// The machine's record differs from the instance.
    Record(MachineId, Box<Instance>),
    /// Closes the ports of a removed machine, because its termination may be refused or slow.
    RevokeAll(MachineId, GroupId),
    Terminate(MachineId, InstanceId),
    Release(MachineId, InstanceId),
    DeleteGroup(MachineId, GroupId),
    /// Deletes the group that all machines share, after the last machine is removed.
    DeleteSharedGroup(GroupId),
}

impl Step {
    /// Returns the machine; `None` if the step concerns no single machine.
    pub fn machine(&self) -> Option<MachineId> {
        match self {
            Self::Launch(machine)
            | Self::Adopt(machine, _)
            | Self::EnsureGroup(machine, _)
            | Self::Record(machine, _)
            | Self::RevokeAll(machine, _)
            | Self::Terminate(machine, _)
            | Self::Release(machine, _)
            | Self::DeleteGroup(machine, _) => Some(*machine),
            Self::DeleteSharedGroup(_) => None,
        }
    }

    /// Returns whether the machine's following steps run even if this one fails.
    pub fn is_independent(&self) -> bool {
        matches!(self, Self::RevokeAll(..))
    }

    /// Returns whether the step is part of removing a machine, which never waits for launches.
    pub fn is_removal(&self) -> bool {
        self.ends_instance()
            || matches!(self, Self::RevokeAll(..) | Self::DeleteGroup(..) | Self::DeleteSharedGroup(..))
    }

    /// Returns whether the step terminates or releases an instance.
    fn ends_instance(&self) -> bool {
        matches!(self, Self::Terminate(..) | Self::Release(..))
    }
}

/// The records of machines; a record that cannot be parsed is the error message.
pub type Records = BTreeMap<MachineId, Result<records::Machine, String>>;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Machines whose instance no longer exists. Only the operator can decide about them.
    pub missing_instances: BTreeMap<MachineId, String>,
    /// Steps that a second read has to confirm; they are not in `steps`.
    pub unconfirmed: Vec<Step>,
    /// Such steps that a second read has confirmed; they are in `steps`.
    pub confirmed: Vec<Step>,
    /// Whether an instance is pending, so that another read is needed.
    pub unfinished: bool,
}

/// Returns the machines that have objects in the inventory and no record.
pub fn without_record(machines: &Records, inventory: &Inventory) -> BTreeSet<MachineId> {
    let instances = inventory.instances.iter().filter(|instance| is_live(instance));
    let groups = inventory.groups.iter().filter_map(|group| group.machine);
    let all = instances.map(|instance| instance.machine).chain(groups).map(|n| MachineId::new(n.get()));
    all.filter(|machine| !machines.contains_key(machine)).collect()
}

/// Returns those of `machines` that units still name, with the reason to keep what belongs to them:
/// `juju` terminates no machine that has units, so the record was lost in another way. A unit
/// record that cannot be parsed names every machine whose id is in its data.
pub fn named_by_units(
    machines: &BTreeSet<MachineId>,
    units: &[(UnitId, Vec<u8>)],
) -> BTreeMap<MachineId, String> {
    let mut kept = BTreeMap::new();
    for (id, data) in units {
        let path = paths::unit(*id);
        let (unit, named) = match records::Unit::parse(&path, data) {
            Ok(unit) => (unit.name.to_string(), unit.machine.into_iter().collect()),
            Err(_) => {
                let text = String::from_utf8_lossy(data);
                let named = machines.iter().filter(|machine| text.contains(&machine.key())).copied();
                (path.to_string(), named.collect::<Vec<_>>())
            }
        };
        for machine in named.into_iter().filter(|machine| machines.contains(machine)) {
            let why = format!(
                "its record is missing from the store and unit {unit} names it: \
                 its instance is kept until the record is restored or the unit is removed"
            );
            kept.entry(machine).or_insert(why);
        }
    }
    kept
}

/// Plans the steps. `is_confirmed` returns whether an earlier read planned the same removals; it is
/// called for removals that one read does not suffice for.
pub fn provision(machines: &Records, inventory: &Inventory, is_confirmed: impl Fn(&[Step]) -> bool) -> Plan {
    let mut plan = Plan::default();
    let index = InventoryIndex::of(inventory);
    for (&machine, record) in machines {
        // If a record cannot be parsed, everything that belongs to the machine is kept.
        if let Ok(record) = record {
            for_machine(&mut plan, machine, record, &index);
        }
    }
    let removals = removals(machines, inventory, &index);
    let live = inventory.instances.iter().filter(|instance| is_live(instance));
    plan.unfinished = live.clone().any(|instance| instance.state == InstanceState::Pending);
    let ending: Vec<Step> = removals.iter().filter(|step| step.ends_instance()).cloned().collect();
    let most = ending.len() >= MASS_TERMINATION_MIN && 2 * ending.len() > live.count();
    // A store without a readable machine is more likely an incomplete read, and a deleted group is
    // as hard to restore as an instance. Machines that only units name count as unreadable.
    let bare = machines.values().all(Result::is_err);
    let lasting = || removals.iter().filter(|step| !step.is_independent()).cloned().collect();
    let doubtful = if bare { lasting() } else { ending };
    if !bare && doubtful.is_empty() || mutant!(MassTerminationNotConfirmed) {
        plan.steps.extend(removals);
    } else if is_confirmed(&doubtful) {
        plan.confirmed = doubtful;
        plan.steps.extend(removals);
    } else {
        // An instance cannot be restored, so every termination needs a second read. If only a few
        // are to end, the read is otherwise trusted: the ports of removed machines are closed at
        // once.
        if !most && !bare {
            let held: BTreeSet<Option<MachineId>> = doubtful.iter().map(Step::machine).collect();
            let waits = |step: &Step| !step.is_independent() && held.contains(&step.machine());
            plan.steps.extend(removals.into_iter().filter(|step| !waits(step)));
        }
        plan.unconfirmed = doubtful;
    }
    plan
}

fn is_live(instance: &Instance) -> bool {
    instance.state != InstanceState::Terminated
}

/// An index of the inventory by machine.
struct InventoryIndex<'a> {
    instances: BTreeMap<u32, Vec<&'a Instance>>,
    groups: BTreeMap<u32, Vec<&'a GroupId>>,
}

impl<'a> InventoryIndex<'a> {
    fn of(inventory: &'a Inventory) -> Self {
        let mut all = Self { instances: BTreeMap::new(), groups: BTreeMap::new() };
        for instance in &inventory.instances {
            all.instances.entry(instance.machine.get()).or_default().push(instance);
        }
        for group in &inventory.groups {
            if let Some(machine) = group.machine {
                all.groups.entry(machine.get()).or_default().push(&group.id);
            }
        }
        all
    }

    fn instances(&self, machine: u32) -> impl Iterator<Item = &'a Instance> {
        self.instances.get(&machine).into_iter().flatten().copied()
    }

    fn is_in_its_group(&self, instance: &Instance) -> bool {
        let mut groups = self.groups.get(&instance.machine.get()).into_iter().flatten();
        groups.any(|group| instance.groups.contains(*group))
    }
}

fn for_machine(plan: &mut Plan, machine: MachineId, record: &records::Machine, index: &InventoryIndex<'_>) {
    let mut own = index.instances(machine.number());
    let known = record.instance_id.as_ref().map(|id| id.as_str());
    let found = match known {
        // The local machine belongs to no provider.
        Some(LOCAL_INSTANCE) => return,
        Some(id) => own.find(|instance| instance.id.as_str() == id),
        None if mutant!(InterruptedLaunchRepeated) => None,
        None => own.filter(|instance| is_live(instance)).min_by(|a, b| a.id.cmp(&b.id)),
    };
    match (known, found) {
        // The operator gave the machine's address: it exists already.
        (None, None) if !record.addresses.is_empty() => {}
        (None, None) => plan.steps.push(Step::Launch(machine)),
        (Some(id), None) if record.adopted => plan.steps.push(Step::Adopt(machine, InstanceId::new(id))),
        (Some(id), None) => _ = plan.missing_instances.insert(machine, format!("instance {id} is gone")),
        (_, Some(found)) => {
            if !is_live(found) {
                plan.missing_instances.insert(machine, format!("instance {} has ended", found.id));
            } else if !index.is_in_its_group(found) {
                plan.steps.push(Step::EnsureGroup(machine, found.id.clone()));
            }
            if recorded(record, found).is_some_and(|now| now != *record) {
                plan.steps.push(Step::Record(machine, Box::new(found.clone())));
            }
        }
    }
}

/// Returns the machine's record with this instance; `None` if the provider's instance id is
/// invalid.
pub fn recorded(record: &records::Machine, instance: &Instance) -> Option<records::Machine> {
    let id: model::InstanceId = instance.id.as_str().parse().ok()?;
    let state = match instance.state {
        InstanceState::Pending => "pending",
        InstanceState::Running => "running",
        InstanceState::Stopped => "stopped",
        InstanceState::Terminated => "terminated",
    };
    let mut record = record.clone();
    record.instance_id = Some(id);
    // The public address comes first. Without any address, the last known ones are kept.
    let addresses = [&instance.public_address, &instance.private_address].into_iter().flatten().cloned();
    let addresses: Vec<String> = addresses.collect();
    if !addresses.is_empty() {
        record.addresses = addresses;
    }
    record.rest.insert("instance-state".to_owned(), Value::from(state));
    Some(record)
}

/// Returns the steps that remove objects without a machine, and surplus instances. They are sorted,
/// because providers list objects in any order and the steps of two reads are compared.
fn removals(machines: &Records, inventory: &Inventory, index: &InventoryIndex<'_>) -> Vec<Step> {
    let known: BTreeSet<u32> = machines.keys().map(|machine| machine.number()).collect();
    let mut groups: Vec<&Group> = inventory.groups.iter().collect();
    groups.sort_unstable_by_key(|group| &group.id);
    let left = |group: &&&Group| group.machine.is_some_and(|number| !known.contains(&number.get()));
    let mut steps: Vec<Step> = Vec::new();
    for group in
        groups.iter().filter(left).filter(|group| group.open && !mutant!(PortsOfRemovedMachineLeftOpen))
    {
        let machine = group.machine.map(|number| MachineId::new(number.get()));
        steps.extend(machine.map(|machine| Step::RevokeAll(machine, group.id.clone())));
    }
    let mut ending = BTreeSet::new();
    let mut instances: Vec<&Instance> =
        inventory.instances.iter().filter(|instance| is_live(instance)).collect();
    instances.sort_unstable_by_key(|instance| &instance.id);
    for instance in instances {
        let machine = MachineId::new(instance.machine.get());
        if known.contains(&instance.machine.get()) && !is_surplus(machines.get(&machine), instance, index) {
            continue;
        }
        steps.push(match instance.origin {
            Origin::Adopted if mutant!(AdoptedInstanceTerminated) => {
                Step::Terminate(machine, instance.id.clone())
            }
            Origin::Launched => {
                ending.insert(instance.machine);
                Step::Terminate(machine, instance.id.clone())
            }
            Origin::Adopted => Step::Release(machine, instance.id.clone()),
        });
    }
    for group in groups {
        if group.machine.is_none() && mutant!(SharedGroupDeletedTooEarly) {
            steps.push(Step::DeleteSharedGroup(group.id.clone()));
        }
        // A group cannot be deleted before its instance has ended.
        if let Some(number) =
            group.machine.filter(|number| !known.contains(&number.get()) && !ending.contains(number))
            && !mutant!(GroupsNotDeleted)
        {
            steps.push(Step::DeleteGroup(MachineId::new(number.get()), group.id.clone()));
        }
    }
    if is_unused(machines, inventory) && !mutant!(SharedGroupNotDeleted) {
        let shared = inventory.groups.iter().filter(|group| group.machine.is_none());
        let mut shared: Vec<&GroupId> = shared.map(|group| &group.id).collect();
        shared.sort_unstable();
        steps.extend(shared.into_iter().cloned().map(Step::DeleteSharedGroup));
    }
    steps
}

/// Returns whether no machine in the store or at the provider can use the shared group.
fn is_unused(machines: &Records, inventory: &Inventory) -> bool {
    let is_local = |record: &Result<records::Machine, String>| {
        let instance = record.as_ref().ok().and_then(|record| record.instance_id.as_ref());
        instance.is_some_and(|id| id.as_str() == LOCAL_INSTANCE)
    };
    machines.values().all(is_local)
        && inventory.groups.iter().all(|group| group.machine.is_none())
        && !inventory.instances.iter().any(is_live)
}

/// Returns whether the provider has no objects of this environment and none will be launched.
pub fn is_clear(machines: &Records, inventory: &Inventory) -> bool {
    is_unused(machines, inventory) && inventory.groups.is_empty()
}

/// Returns whether the machine's record names another live instance. Either the reply to a launch
/// was lost and the launch was repeated, or the store was restored from an older backup and the
/// machine number was assigned again.
fn is_surplus(
    record: Option<&Result<records::Machine, String>>,
    instance: &Instance,
    index: &InventoryIndex<'_>,
) -> bool {
    let Some(Ok(records::Machine { instance_id: Some(known), .. })) = record else { return false };
    if mutant!(DuplicateInstanceKept) {
        return false;
    }
    let has_recorded_instance = index
        .instances(instance.machine.get())
        .any(|other| is_live(other) && other.id.as_str() == known.as_str());
    instance.id.as_str() != known.as_str() && has_recorded_instance
}

/// Missing instances, and since when they are missing. `I` is a point in time.
#[derive(Debug)]
pub struct Missing<I> {
    /// The flag is set once the instance was reported as missing.
    since: BTreeMap<MachineId, (I, bool)>,
}

impl<I> Default for Missing<I> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<I: Moment> Missing<I> {
    /// Adds the result of a read, and returns the instances that have been missing for long enough.
    pub fn settled(&mut self, missing: &BTreeMap<MachineId, String>, now: I) -> BTreeMap<MachineId, String> {
        self.since.retain(|machine, _| missing.contains_key(machine));
        let mut reported = BTreeMap::new();
        for (&machine, reason) in missing {
            let (since, is_reported) = self.since.entry(machine).or_insert((now, false));
            *is_reported = *since + SETTLE <= now;
            if *is_reported {
                reported.insert(machine, reason.clone());
            }
        }
        reported
    }

    /// Returns the time at which the next instance counts as missing.
    pub fn next(&self) -> Option<I> {
        self.since.values().filter(|(_, is_reported)| !is_reported).map(|(since, _)| *since + SETTLE).min()
    }
}

/// Removals that a second read has to confirm. `I` is a point in time.
#[derive(Debug)]
pub struct Confirmation<I> {
    first: Option<FirstRead<Vec<Step>, I>>,
    /// Planned by at least two reads in a row. If they fail they are retried without another
    /// confirmation.
    confirmed: Vec<Step>,
}

impl<I> Default for Confirmation<I> {
    fn default() -> Self {
        Self { first: None, confirmed: Vec::new() }
    }
}

impl<I: Moment> Confirmation<I> {
    /// Returns whether an earlier read planned the same removals, long enough before `now`.
    pub fn confirms(&self, removals: &[Step], now: I) -> bool {
        let first = self.first.as_ref().and_then(|first| first.before(now));
        let again = first.is_some_and(|first| first == removals);
        again || (!removals.is_empty() && removals.iter().all(|step| self.confirmed.contains(step)))
    }

    /// Returns whether the last read planned this step as a confirmed one.
    pub fn has_confirmed(&self, step: &Step) -> bool {
        self.confirmed.contains(step)
    }

    /// Adds the result of a read.
    pub fn add(&mut self, plan: &Plan, now: I) {
        self.confirmed.clone_from(&plan.confirmed);
        match &self.first {
            _ if plan.unconfirmed.is_empty() => self.first = None,
            Some(first) if *first.value() == plan.unconfirmed => {}
            _ => self.first = Some(FirstRead::new(plan.unconfirmed.clone(), now)),
        }
    }

    /// Returns the time of the confirming read.
    pub fn next(&self) -> Option<I> {
        self.first.as_ref().map(FirstRead::confirm_at)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
