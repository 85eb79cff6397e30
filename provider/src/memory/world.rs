//! What the requests to the provider in memory do: a pure state machine over groups and instances. No locks, no faults.

use super::lagging::Lagging;
use crate::error::{Error, Subject};
use crate::provider::{
    Foreign, Group, GroupId, Instance, InstanceId, InstanceState, Inventory, MachineNumber, MachineRules,
    Origin, OtherGroup, Seen,
};
use crate::rule::{Cidr, Family, PortRange, Rule, WirePorts};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// How the provider behaves when nothing is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Readers learn of a write this many calls late.
    pub lag_calls: u64,
    pub rewrite: Rewrite,
    /// What one group can hold, counted with the rules of others.
    pub rules_per_family: usize,
    /// A group counts as in use for this many calls after its instance was terminated.
    pub busy_calls: u64,
    pub ipv6: bool,
    /// A launch knows nothing of those before it, so one whose answer was lost is made again.
    pub forgets_launches: bool,
}

impl Default for Settings {
    /// EC2's limit, and otherwise no surprises.
    fn default() -> Self {
        Self {
            lag_calls: 0,
            rewrite: Rewrite::Nothing,
            rules_per_family: 60,
            busy_calls: 0,
            ipv6: true,
            forgets_launches: false,
        }
    }
}

/// What the provider makes of the rules it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewrite {
    Nothing,
    /// Shows them with protocol numbers and the longest spelling of their sources.
    Spelling,
    /// Keeps a range as two, which cover the same.
    Halves,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) settings: Settings,
    pub(super) calls: u64,
    groups: BTreeMap<MachineNumber, Lagging<Option<MachineRules>>>,
    instances: BTreeMap<InstanceId, Lagging<Held>>,
    /// Groups of others that have the name of a machine's, and not our mark: nobody is shown them.
    squatters: BTreeMap<MachineNumber, GroupId>,
    /// The group that all machines share, if somebody made it.
    pub(super) environment: Option<GroupId>,
    /// The same with the id of a store that is lost.
    pub(super) lost: Option<(GroupId, String)>,
    made: u64,
}

/// An instance, ours or not.
#[derive(Debug, Clone)]
struct Held {
    running: bool,
    owner: Option<(MachineNumber, Origin)>,
    /// Whose group it is in, and until which call that lasts if it has ended.
    group_of: Option<MachineNumber>,
    ended_at: u64,
}

impl World {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            settings,
            calls: 0,
            groups: BTreeMap::new(),
            instances: BTreeMap::new(),
            squatters: BTreeMap::new(),
            environment: None,
            lost: None,
            made: 0,
        }
    }

    pub(super) fn rules(&self, machine: MachineNumber) -> Option<&MachineRules> {
        self.groups.get(&machine)?.latest()?.as_ref()
    }

    fn set_rules(&mut self, machine: MachineNumber, rules: Option<MachineRules>) {
        let (at, horizon) = (self.calls, self.next_horizon());
        match self.groups.get_mut(&machine) {
            Some(lagging) => lagging.set(at, rules, horizon),
            None => _ = self.groups.insert(machine, Lagging::new(at, rules)),
        }
    }

    /// The last call whose effects the present one is shown.
    fn horizon(&self) -> u64 {
        self.calls.saturating_sub(1 + self.settings.lag_calls)
    }

    fn next_horizon(&self) -> u64 {
        self.calls.saturating_sub(self.settings.lag_calls)
    }

    pub(super) fn observe(&self, machine: MachineNumber) -> Result<Seen, Error> {
        let rules = self.groups.get(&machine).and_then(|lagging| lagging.as_of(self.horizon())?.as_ref());
        let Some(rules) = rules else { return Ok(Seen::Absent) };
        let mut shown = rules.clone();
        if self.settings.rewrite == Rewrite::Spelling {
            shown.owned = rules.owned.iter().map(respell).collect::<Result<_, _>>()?;
        }
        Ok(Seen::Present(shown))
    }

    pub(super) fn open(&mut self, machine: MachineNumber, open: &BTreeSet<Rule>) -> Result<(), Error> {
        let mut rules = self.existing(machine)?;
        for rule in open {
            if rules.foreign.iter().any(|foreign| foreign.exact == Some(*rule)) {
                continue;
            }
            rules.owned.extend(self.settings.rewrite.kept_as(rule));
        }
        for family in [Family::V4, Family::V6] {
            if count(&rules, family) > self.settings.rules_per_family {
                let limit = u32::try_from(self.settings.rules_per_family).ok();
                return Err(Error::QuotaExceeded { what: Subject::Group(rules.group), limit });
            }
        }
        rules.amiss.clear();
        self.set_rules(machine, Some(rules));
        Ok(())
    }

    pub(super) fn close(&mut self, machine: MachineNumber, close: &BTreeSet<Rule>) -> Result<(), Error> {
        let mut rules = self.existing(machine)?;
        rules.owned.retain(|rule| !close.contains(rule));
        rules.amiss.clear();
        self.set_rules(machine, Some(rules));
        Ok(())
    }

    pub(super) fn mend(&mut self, machine: MachineNumber) -> Result<(), Error> {
        self.close(machine, &BTreeSet::new())
    }

    fn existing(&self, machine: MachineNumber) -> Result<MachineRules, Error> {
        self.rules(machine).cloned().ok_or(Error::NotFound { what: Subject::Machine(machine) })
    }

    pub(super) fn add_group(&mut self, machine: MachineNumber) -> GroupId {
        if let Some(rules) = self.rules(machine) {
            return rules.group.clone();
        }
        let group = GroupId::new(format!("sg-{}", self.next_number()));
        self.set_rules(machine, Some(empty(group.clone(), self.settings.ipv6)));
        group
    }

    pub(super) fn squat(&mut self, machine: MachineNumber) {
        let group = GroupId::new(format!("sg-{}", self.next_number()));
        self.squatters.insert(machine, group);
    }

    pub(super) fn squatted(&self) -> BTreeSet<MachineNumber> {
        self.squatters.keys().copied().collect()
    }

    pub(super) fn end_squatting(&mut self) {
        self.squatters.clear();
    }

    /// The machine's group, unless somebody else has one of its name.
    fn make_group(&mut self, machine: MachineNumber) -> Result<GroupId, Error> {
        match self.squatters.get(&machine).filter(|_| self.rules(machine).is_none()) {
            Some(theirs) => {
                let reason = "it has our name, and not our mark".to_owned();
                Err(Error::Foreign { what: Subject::from(theirs), reason })
            }
            None => Ok(self.add_group(machine)),
        }
    }

    pub(super) fn tamper(&mut self, machine: MachineNumber, change: impl FnOnce(&mut MachineRules)) -> bool {
        let Some(mut rules) = self.rules(machine).cloned() else { return false };
        change(&mut rules);
        self.set_rules(machine, Some(rules));
        true
    }

    pub(super) fn remove_group(&mut self, machine: MachineNumber) {
        if self.rules(machine).is_some() {
            self.set_rules(machine, None);
        }
    }

    fn next_number(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    fn held(&self, instance: &InstanceId) -> Result<&Held, Error> {
        let held = self.instances.get(instance).and_then(Lagging::latest).filter(|held| held.running);
        held.ok_or_else(|| Error::NotFound { what: Subject::from(instance) })
    }

    fn hold(&mut self, instance: &InstanceId, held: Held) {
        let (at, horizon) = (self.calls, self.next_horizon());
        match self.instances.get_mut(instance) {
            Some(lagging) => lagging.set(at, held, horizon),
            None => _ = self.instances.insert(instance.clone(), Lagging::new(at, held)),
        }
    }

    pub(super) fn add_instance(&mut self, instance: &InstanceId) {
        self.hold(instance, Held { running: true, owner: None, group_of: None, ended_at: 0 });
    }

    pub(super) fn lose_instance(&mut self, instance: &InstanceId) {
        if let Ok(held) = self.held(instance) {
            let lost = Held { running: false, ended_at: self.calls, ..held.clone() };
            self.hold(instance, lost);
        }
    }

    pub(super) fn is_running(&self, instance: &InstanceId) -> bool {
        self.held(instance).is_ok()
    }

    pub(super) fn inventory(&self) -> Inventory {
        self.inventory_as_of(self.horizon())
    }

    pub(super) fn inventory_as_of(&self, horizon: u64) -> Inventory {
        let instances =
            self.instances.iter().filter_map(|(id, lagging)| self.shown(id, lagging.as_of(horizon)?));
        let groups = self.groups.iter().filter_map(|(&machine, lagging)| {
            let rules = lagging.as_of(horizon)?.as_ref()?;
            let open = !rules.owned.is_empty();
            Some(Group { id: rules.group.clone(), machine: Some(machine), open })
        });
        let environment =
            self.environment.iter().map(|id| Group { id: id.clone(), machine: None, open: false });
        Inventory { instances: instances.collect(), groups: groups.chain(environment).collect() }
    }

    pub(super) fn launch(&mut self, machine: MachineNumber) -> Result<Instance, Error> {
        let running = self.instances.iter().find_map(|(id, lagging)| {
            let held = lagging.latest().filter(|held| held.running)?;
            self.shown(id, held).filter(|instance| instance.machine == machine)
        });
        if let Some(instance) = running.filter(|_| !self.settings.forgets_launches) {
            return Ok(instance);
        }
        if let Some((group, store)) = &self.lost {
            let reason = format!("its tags are those of the store {store}");
            return Err(Error::Foreign { what: Subject::from(group), reason });
        }
        self.environment.get_or_insert_with(|| GroupId::new("sg-environment"));
        self.make_group(machine)?;
        self.tamper(machine, |rules| rules.owned.clear());
        let id = InstanceId::new(format!("i-{}", self.next_number()));
        let owner = (machine, Origin::Launched);
        self.hold(&id, Held { running: true, owner: Some(owner), group_of: Some(machine), ended_at: 0 });
        Ok(self.instance(&id, owner, InstanceState::Running))
    }

    pub(super) fn adopt(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<Instance, Error> {
        let mut held = self.held(id)?.clone();
        let owner = *held.owner.get_or_insert((machine, Origin::Adopted));
        if owner.0 != machine {
            let reason = format!("it is machine {}", owner.0);
            return Err(Error::Foreign { what: Subject::from(id), reason });
        }
        self.hold(id, held);
        self.ensure_group(machine, id)?;
        Ok(self.instance(id, owner, InstanceState::Running))
    }

    pub(super) fn ensure_group(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<GroupId, Error> {
        let held = self.held(id)?.clone();
        let group = self.make_group(machine)?;
        self.hold(id, Held { group_of: Some(machine), ..held });
        Ok(group)
    }

    pub(super) fn release(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Ok(held) = self.held(id).cloned() else { return Ok(()) };
        match held.owner {
            Some((owner, Origin::Adopted)) if owner == machine => {
                self.hold(id, Held { owner: None, group_of: None, ..held });
                Ok(())
            }
            Some(_) => Err(not_this_machines(machine, id)),
            None => Ok(()),
        }
    }

    pub(super) fn terminate(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Ok(held) = self.held(id) else { return Ok(()) };
        if held.owner != Some((machine, Origin::Launched)) {
            return Err(not_this_machines(machine, id));
        }
        self.lose_instance(id);
        Ok(())
    }

    pub(super) fn shut(&mut self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        match self.rules(machine) {
            Some(rules) if rules.group == *group => {
                self.tamper(machine, |rules| rules.owned.clear());
                Ok(())
            }
            _ if self
                .groups
                .values()
                .filter_map(Lagging::latest)
                .flatten()
                .all(|rules| rules.group != *group) =>
            {
                Ok(())
            }
            _ => {
                let reason = format!("it is not the group of machine {machine}");
                Err(Error::Foreign { what: Subject::from(group), reason })
            }
        }
    }

    pub(super) fn delete_group(&mut self, group: &GroupId) -> Result<(), Error> {
        // Nobody is asked whose they are: it is for the caller to leave them alone.
        self.squatters.retain(|_, theirs| theirs != group);
        self.environment = self.environment.take().filter(|shared| shared != group);
        let mut groups = self.groups.iter();
        let owner = groups.find_map(|(&machine, lagging)| {
            lagging.latest()?.as_ref().filter(|rules| rules.group == *group).map(|_| machine)
        });
        let Some(machine) = owner else { return Ok(()) };
        let in_use = self.instances.values().filter_map(Lagging::latest).any(|held| {
            let holds_on = held.running || self.calls <= held.ended_at + self.settings.busy_calls;
            held.group_of == Some(machine) && holds_on
        });
        if in_use {
            return Err(Error::StillInUse { what: Subject::from(group) });
        }
        self.set_rules(machine, None);
        Ok(())
    }

    pub(super) fn adopt_groups(&mut self) -> Vec<OtherGroup> {
        let lost = self.lost.take();
        self.environment = lost.as_ref().map(|(group, _)| group.clone()).or(self.environment.take());
        let adopted = |(id, store)| OtherGroup { id, name: "juju-environment".to_owned(), store, left: None };
        lost.map(adopted).into_iter().collect()
    }

    /// Only instances with our mark are shown.
    fn shown(&self, id: &InstanceId, held: &Held) -> Option<Instance> {
        let state = if held.running { InstanceState::Running } else { InstanceState::Terminated };
        held.owner.map(|owner| self.instance(id, owner, state))
    }

    fn instance(
        &self,
        id: &InstanceId,
        (machine, origin): (MachineNumber, Origin),
        state: InstanceState,
    ) -> Instance {
        let address = |kind: &str| Some(format!("{id}.{kind}.example.com"));
        let (public_address, private_address) = (address("public"), address("private"));
        let held = self.instances.get(id).and_then(Lagging::latest);
        let group = held.and_then(|held| self.rules(held.group_of?)).map(|rules| rules.group.clone());
        let groups = group.into_iter().collect();
        Instance { id: id.clone(), machine, origin, state, public_address, private_address, groups }
    }
}

fn empty(group: GroupId, ipv6: bool) -> MachineRules {
    MachineRules { group, owned: BTreeSet::new(), foreign: Vec::new(), ipv6, amiss: Vec::new() }
}

fn not_this_machines(machine: MachineNumber, id: &InstanceId) -> Error {
    Error::Foreign {
        what: Subject::from(id),
        reason: format!("not launched or adopted for machine {machine}"),
    }
}

fn count(rules: &MachineRules, family: Family) -> usize {
    let owned = rules.owned.iter().filter(|rule| rule.source.family() == family).count();
    let theirs =
        |foreign: &&Foreign| foreign.covers.first().is_some_and(|rule| rule.source.family() == family);
    owned + rules.foreign.iter().filter(theirs).count()
}

impl Rewrite {
    fn kept_as(self, rule: &Rule) -> Vec<Rule> {
        let (from, to, proto) = (rule.ports.from(), rule.ports.to(), rule.ports.proto());
        if self != Self::Halves || from == to {
            return vec![*rule];
        }
        let middle = from.midpoint(to);
        let halves = [(from, middle), (middle + 1, to)];
        let ranges = halves.into_iter().filter_map(|(from, to)| PortRange::new(from, to, proto).ok());
        ranges.map(|ports| Rule::new(ports, rule.source)).collect()
    }
}

/// Through the spelling of a provider that has its own ideas, and back the way a driver would read it.
fn respell(rule: &Rule) -> Result<Rule, Error> {
    let number = match rule.ports.proto() {
        crate::rule::Protocol::Tcp => "6",
        crate::rule::Protocol::Udp => "17",
    };
    let (from, to) = (Some(i32::from(rule.ports.from())), Some(i32::from(rule.ports.to())));
    let source = match rule.source.network() {
        IpAddr::V4(v4) => format!("{v4}/{}", rule.source.prefix_len()),
        IpAddr::V6(v6) => {
            let groups = v6.segments().map(|segment| format!("{segment:04X}"));
            format!("{}/{}", groups.join(":"), rule.source.prefix_len())
        }
    };
    let unreadable = |reason: String| Error::Invalid { what: Subject::Provider, reason };
    let ports = WirePorts { proto: number, from, to }.exact();
    let ports = ports.ok_or_else(|| unreadable(format!("no ports in '{rule}'")))?;
    let source: Cidr = source.parse().map_err(|error| unreadable(format!("{error}")))?;
    Ok(Rule::new(ports, source))
}
