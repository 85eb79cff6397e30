//! Instances for machines: what to launch, adopt, end and delete. Pure: from the machines of the tree and the provider's
//! inventory to steps. The inventory is the memory: what is marked as ours and belongs to no machine is on its way out,
//! however often the controller was killed in between.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use portcullis_provider::provider::{Group, GroupId, Instance, InstanceId, InstanceState, Inventory, Origin};
use serde_json::Value;

use crate::model::planted::{Bug, planted};
use crate::model::{self, MachineId};
use crate::store::records::{self, LOCAL_INSTANCE};

/// Ending more than half of all instances, and at least this many, takes a second look at the tree.
const MASS_END_MIN: usize = 3;

/// How long the end of most instances waits for the look that confirms it.
const DOUBT: Duration = Duration::from_secs(2);

/// How long an instance must be missing before it is said to be: what was just launched is not always shown at once.
const SETTLE: Duration = Duration::from_secs(5);

/// How long the provider must show nothing of the environment before it is said to have nothing, for the same reason.
pub const CLEAR_FOR: Duration = SETTLE;

/// One thing to do. Steps for different machines are independent; those for one come in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Launch(MachineId),
    Adopt(MachineId, InstanceId),
    /// The group that holds the machine's rules is missing, or its instance is not in it.
    EnsureGroup(MachineId, InstanceId),
    /// The tree does not know yet what the provider has.
    Record(MachineId, Box<Instance>),
    /// The machine has left the tree and its group still lets somebody in. Its end may be refused, or take its time.
    Shut(MachineId, GroupId),
    Terminate(MachineId, InstanceId),
    Release(MachineId, InstanceId),
    DeleteGroup(MachineId, GroupId),
    /// The group that all machines share goes after the last of them.
    DeleteSharedGroup(GroupId),
}

impl Step {
    /// `None` for what concerns no single machine.
    pub fn machine(&self) -> Option<MachineId> {
        match self {
            Self::Launch(machine)
            | Self::Adopt(machine, _)
            | Self::EnsureGroup(machine, _)
            | Self::Record(machine, _)
            | Self::Shut(machine, _)
            | Self::Terminate(machine, _)
            | Self::Release(machine, _)
            | Self::DeleteGroup(machine, _) => Some(*machine),
            Self::DeleteSharedGroup(_) => None,
        }
    }

    /// The steps that follow for the machine are worth doing even if this one failed.
    pub fn stands_alone(&self) -> bool {
        matches!(self, Self::Shut(..))
    }

    /// Belongs to the end of a machine, which waits for no launch.
    pub fn is_farewell(&self) -> bool {
        self.is_end() || matches!(self, Self::Shut(..) | Self::DeleteGroup(..) | Self::DeleteSharedGroup(..))
    }

    /// Takes an instance away from us.
    fn is_end(&self) -> bool {
        matches!(self, Self::Terminate(..) | Self::Release(..))
    }
}

/// Machines as the tree has them; a record that cannot be understood is there as its reason.
pub type Records = BTreeMap<MachineId, Result<records::Machine, String>>;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Provisioning {
    pub steps: Vec<Step>,
    /// Machines whose instance is gone: nobody but the operator can say what should become of them.
    pub vanished: BTreeMap<MachineId, String>,
    /// So much would end that the tree is looked at again first; none of it is in `steps`.
    pub doubted: Vec<Step>,
    /// The same, in `steps` since another look asked for it, too.
    pub confirmed: Vec<Step>,
    /// An instance is still on its way, so a later look will say more.
    pub unfinished: bool,
}

/// `is_confirmed` says of ends that one look alone is not trusted with whether another asked for them, too.
pub fn provision(
    machines: &Records,
    inventory: &Inventory,
    is_confirmed: impl Fn(&[Step]) -> bool,
) -> Provisioning {
    let mut plan = Provisioning::default();
    let belongings = Belongings::of(inventory);
    for (&machine, record) in machines {
        // A record that cannot be read is kept as it is, with all that belongs to it.
        if let Ok(record) = record {
            for_machine(&mut plan, machine, record, &belongings);
        }
    }
    let ends = ends(machines, inventory, &belongings);
    let live = inventory.instances.iter().filter(|instance| is_live(instance));
    plan.unfinished = live.clone().any(|instance| instance.state == InstanceState::Pending);
    let ending: Vec<Step> = ends.iter().filter(|step| step.is_end()).cloned().collect();
    let most = ending.len() >= MASS_END_MIN && 2 * ending.len() > live.count();
    // A tree without machines is more likely one that cannot be seen, and groups are as hard to bring back as instances.
    let lasting = || ends.iter().filter(|step| !step.stands_alone()).cloned().collect();
    let doubtful = if machines.is_empty() { lasting() } else { ending };
    if !most && !machines.is_empty() || planted(Bug::EndsAtOnce) {
        plan.steps.extend(ends);
    } else if is_confirmed(&doubtful) {
        plan.confirmed = doubtful;
        plan.steps.extend(ends);
    } else {
        plan.doubted = doubtful;
    }
    plan
}

fn is_live(instance: &Instance) -> bool {
    instance.state != InstanceState::Terminated
}

/// What the inventory has for each machine. It lists all of them in no order, and every machine would search all.
struct Belongings<'a> {
    instances: BTreeMap<u32, Vec<&'a Instance>>,
    groups: BTreeMap<u32, Vec<&'a GroupId>>,
}

impl<'a> Belongings<'a> {
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

    fn has_in_its_group(&self, instance: &Instance) -> bool {
        let mut groups = self.groups.get(&instance.machine.get()).into_iter().flatten();
        groups.any(|group| instance.groups.contains(*group))
    }
}

fn for_machine(
    plan: &mut Provisioning,
    machine: MachineId,
    record: &records::Machine,
    belongings: &Belongings<'_>,
) {
    let mut own = belongings.instances(machine.number());
    let known = record.instance_id.as_ref().map(|id| id.as_str());
    let found = match known {
        // No provider has it, and nobody needs to.
        Some(LOCAL_INSTANCE) => return,
        Some(id) => own.find(|instance| instance.id.as_str() == id),
        None if planted(Bug::LaunchesBlindly) => None,
        None => own.filter(|instance| is_live(instance)).min_by(|a, b| a.id.cmp(&b.id)),
    };
    match (known, found) {
        (None, None) => plan.steps.push(Step::Launch(machine)),
        (Some(id), None) if record.adopted => plan.steps.push(Step::Adopt(machine, InstanceId::new(id))),
        (Some(id), None) => _ = plan.vanished.insert(machine, format!("instance {id} is gone")),
        (_, Some(found)) => {
            if !is_live(found) {
                plan.vanished.insert(machine, format!("instance {} has ended", found.id));
            } else if !belongings.has_in_its_group(found) {
                plan.steps.push(Step::EnsureGroup(machine, found.id.clone()));
            }
            if recorded(record, found).is_some_and(|now| now != *record) {
                plan.steps.push(Step::Record(machine, Box::new(found.clone())));
            }
        }
    }
}

/// The record of a machine that has this instance; `None` if the provider's name for it is none that we could keep.
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
    // The public one first. Where an instance has been is better known than nothing.
    let addresses = [&instance.public_address, &instance.private_address].into_iter().flatten().cloned();
    let addresses: Vec<String> = addresses.collect();
    if !addresses.is_empty() {
        record.addresses = addresses;
    }
    record.rest.insert("instance-state".to_owned(), Value::from(state));
    Some(record)
}

/// What is ours and belongs to no machine of the tree, or is a second instance of one. In an order of its own: providers
/// list things as they please, and what two looks agree on is told by comparing.
fn ends(machines: &Records, inventory: &Inventory, belongings: &Belongings<'_>) -> Vec<Step> {
    let known: BTreeSet<u32> = machines.keys().map(|machine| machine.number()).collect();
    let mut groups: Vec<&Group> = inventory.groups.iter().collect();
    groups.sort_unstable_by_key(|group| &group.id);
    let left = |group: &&&Group| group.machine.is_some_and(|number| !known.contains(&number.get()));
    let mut steps: Vec<Step> = Vec::new();
    for group in groups.iter().filter(left).filter(|group| group.open && !planted(Bug::LeavesPortsOpen)) {
        let machine = group.machine.map(|number| MachineId::new(number.get()));
        steps.extend(machine.map(|machine| Step::Shut(machine, group.id.clone())));
    }
    let mut ending = BTreeSet::new();
    let mut instances: Vec<&Instance> =
        inventory.instances.iter().filter(|instance| is_live(instance)).collect();
    instances.sort_unstable_by_key(|instance| &instance.id);
    for instance in instances {
        let machine = MachineId::new(instance.machine.get());
        if known.contains(&instance.machine.get())
            && !is_surplus(machines.get(&machine), instance, belongings)
        {
            continue;
        }
        steps.push(match instance.origin {
            Origin::Adopted if planted(Bug::EndsWhatItAdopted) => {
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
        if group.machine.is_none() && planted(Bug::SweepsTheShared) {
            steps.push(Step::DeleteSharedGroup(group.id.clone()));
        }
        // While its instance ends, a group is in use for certain.
        if let Some(number) =
            group.machine.filter(|number| !known.contains(&number.get()) && !ending.contains(number))
            && !planted(Bug::LeavesGroups)
        {
            steps.push(Step::DeleteGroup(MachineId::new(number.get()), group.id.clone()));
        }
    }
    if is_unused(machines, inventory) && !planted(Bug::LeavesTheShared) {
        let shared = inventory.groups.iter().filter(|group| group.machine.is_none());
        let mut shared: Vec<&GroupId> = shared.map(|group| &group.id).collect();
        shared.sort_unstable();
        steps.extend(shared.into_iter().cloned().map(Step::DeleteSharedGroup));
    }
    steps
}

/// Neither the tree nor the provider has a machine that could be in the group that all share.
fn is_unused(machines: &Records, inventory: &Inventory) -> bool {
    let is_local = |record: &Result<records::Machine, String>| {
        let instance = record.as_ref().ok().and_then(|record| record.instance_id.as_ref());
        instance.is_some_and(|id| id.as_str() == LOCAL_INSTANCE)
    };
    machines.values().all(is_local)
        && inventory.groups.iter().all(|group| group.machine.is_none())
        && !inventory.instances.iter().any(is_live)
}

/// The provider has nothing of this environment any more, and nothing will be launched.
pub fn is_clear(machines: &Records, inventory: &Inventory) -> bool {
    is_unused(machines, inventory) && inventory.groups.is_empty()
}

/// Launched for a machine that has another one: the answer to a launch was lost, and the provider forgot that it gave it.
fn is_surplus(
    record: Option<&Result<records::Machine, String>>,
    instance: &Instance,
    belongings: &Belongings<'_>,
) -> bool {
    let Some(Ok(records::Machine { instance_id: Some(known), .. })) = record else { return false };
    if planted(Bug::KeepsTheSurplus) {
        return false;
    }
    let has_its_own = belongings
        .instances(instance.machine.get())
        .any(|other| is_live(other) && other.id.as_str() == known.as_str());
    instance.origin == Origin::Launched && instance.id.as_str() != known.as_str() && has_its_own
}

/// Instances that are missing, and since when. `I` is a point in time.
#[derive(Debug)]
pub struct Missing<I> {
    /// With whether it was said so.
    since: BTreeMap<MachineId, (I, bool)>,
}

impl<I> Default for Missing<I> {
    fn default() -> Self {
        Self { since: BTreeMap::new() }
    }
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Missing<I> {
    /// Takes in what a look found, and returns what has been missing for long enough to say so.
    pub fn settled(&mut self, vanished: &BTreeMap<MachineId, String>, now: I) -> BTreeMap<MachineId, String> {
        self.since.retain(|machine, _| vanished.contains_key(machine));
        let mut told = BTreeMap::new();
        for (&machine, reason) in vanished {
            let (since, said) = self.since.entry(machine).or_insert((now, false));
            *said = *since + SETTLE <= now;
            if *said {
                told.insert(machine, reason.clone());
            }
        }
        told
    }

    /// When more can be said.
    pub fn next(&self) -> Option<I> {
        self.since.values().filter(|(_, said)| !said).map(|(since, _)| *since + SETTLE).min()
    }
}

/// Ends that one look was not trusted with. `I` is a point in time.
#[derive(Debug)]
pub struct Doubt<I> {
    held: Option<(Vec<Step>, I)>,
    /// Asked for by two looks, and by every one since: what fails is tried again at its own pace, and not doubted anew.
    confirmed: Vec<Step>,
}

impl<I> Default for Doubt<I> {
    fn default() -> Self {
        Self { held: None, confirmed: Vec::new() }
    }
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Doubt<I> {
    /// Whether a look at `now` that asks for these ends is not the first to do so.
    pub fn confirms(&self, ends: &[Step], now: I) -> bool {
        let again = matches!(&self.held, Some((held, at)) if *at <= now && held == ends);
        again || (!ends.is_empty() && ends.iter().all(|step| self.confirmed.contains(step)))
    }

    /// Takes in what a look asked for.
    pub fn hold(&mut self, plan: &Provisioning, now: I) {
        self.confirmed.clone_from(&plan.confirmed);
        match &self.held {
            _ if plan.doubted.is_empty() => self.held = None,
            Some((held, _)) if *held == plan.doubted => {}
            _ => self.held = Some((plan.doubted.clone(), now + DOUBT)),
        }
    }

    /// When to look again.
    pub fn next(&self) -> Option<I> {
        self.held.as_ref().map(|(_, at)| *at)
    }
}

#[cfg(test)]
#[path = "provision_tests.rs"]
mod tests;
