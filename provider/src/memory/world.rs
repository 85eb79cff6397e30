//! The state machine of the in-memory provider: groups and instances. Locks and faults belong in
//! `memory`. Pure.

use super::stale_reads::Versioned;
use crate::error::{Error, Subject};
use crate::provider::{
    Foreign, Group, GroupId, Instance, InstanceId, InstanceState, Inventory, MachineNumber, MachineRules,
    Origin, OtherGroup, Seen,
};
use crate::rule::{Cidr, Family, PortRange, Rule, WirePorts};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// The behaviour of the provider without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySettings {
    /// Reads lag behind writes by this many calls.
    pub lag_calls: u64,
    pub rewrite: Rewrite,
    /// Limit of rules of a group, ours and others'.
    pub rules_per_family: usize,
    /// A group counts as in use for this many calls after its instance was terminated.
    pub busy_calls: u64,
    pub ipv6: bool,
    /// Whether launches are not idempotent, so that a launch whose reply was lost is repeated.
    pub forgets_launches: bool,
}

impl Default for MemorySettings {
    /// EC2's limit, without lag or rewriting.
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

/// How the provider rewrites rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewrite {
    Nothing,
    /// Returns protocol numbers and the longest spelling of sources.
    Spelling,
    /// Stores a range as two halves.
    Halves,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) settings: MemorySettings,
    pub(super) calls: u64,
    groups: BTreeMap<MachineNumber, Versioned<Option<MachineRules>>>,
    instances: BTreeMap<InstanceId, Versioned<InstanceRecord>>,
    /// Foreign groups with the names of machines' groups. They are never listed.
    squatters: BTreeMap<MachineNumber, GroupId>,
    /// The group that all machines share, if it exists.
    pub(super) environment: Option<GroupId>,
    /// The group that all machines share, with the id of a lost store.
    pub(super) lost: Option<(GroupId, String)>,
    made: u64,
}

/// An instance, ours or foreign.
#[derive(Debug, Clone)]
struct InstanceRecord {
    running: bool,
    owner: Option<(MachineNumber, Origin)>,
    /// The machine whose group it uses; after `ended_at` only for `busy_calls` more calls.
    group_of: Option<MachineNumber>,
    ended_at: u64,
}

impl World {
    pub(super) fn new(settings: MemorySettings) -> Self {
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
            Some(versions) => versions.set(at, rules, horizon),
            None => _ = self.groups.insert(machine, Versioned::new(at, rules)),
        }
    }

    /// Returns the last call whose effects the current one sees.
    fn horizon(&self) -> u64 {
        self.calls.saturating_sub(1 + self.settings.lag_calls)
    }

    fn next_horizon(&self) -> u64 {
        self.calls.saturating_sub(self.settings.lag_calls)
    }

    pub(super) fn observe(&self, machine: MachineNumber) -> Result<Seen, Error> {
        let rules = self.groups.get(&machine).and_then(|versions| versions.as_of(self.horizon())?.as_ref());
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
        rules.drift.clear();
        self.set_rules(machine, Some(rules));
        Ok(())
    }

    pub(super) fn close(&mut self, machine: MachineNumber, close: &BTreeSet<Rule>) -> Result<(), Error> {
        let mut rules = self.existing(machine)?;
        rules.owned.retain(|rule| !close.contains(rule));
        rules.drift.clear();
        self.set_rules(machine, Some(rules));
        Ok(())
    }

    pub(super) fn repair(&mut self, machine: MachineNumber) -> Result<(), Error> {
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

    /// Creates the machine's group, unless a foreign group has its name.
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

    /// Returns an id that no instance has; tests choose the ids of foreign ones.
    fn new_instance_id(&mut self) -> InstanceId {
        loop {
            let id = InstanceId::new(format!("i-{}", self.next_number()));
            if !self.instances.contains_key(&id) {
                return id;
            }
        }
    }

    fn record(&self, instance: &InstanceId) -> Result<&InstanceRecord, Error> {
        let record = self.instances.get(instance).and_then(Versioned::latest).filter(|record| record.running);
        record.ok_or_else(|| Error::NotFound { what: Subject::from(instance) })
    }

    fn set_record(&mut self, instance: &InstanceId, record: InstanceRecord) {
        let (at, horizon) = (self.calls, self.next_horizon());
        match self.instances.get_mut(instance) {
            Some(versions) => versions.set(at, record, horizon),
            None => _ = self.instances.insert(instance.clone(), Versioned::new(at, record)),
        }
    }

    pub(super) fn add_instance(&mut self, instance: &InstanceId) {
        self.set_record(instance, InstanceRecord { running: true, owner: None, group_of: None, ended_at: 0 });
    }

    pub(super) fn lose_instance(&mut self, instance: &InstanceId) {
        if let Ok(record) = self.record(instance) {
            let lost = InstanceRecord { running: false, ended_at: self.calls, ..record.clone() };
            self.set_record(instance, lost);
        }
    }

    pub(super) fn is_running(&self, instance: &InstanceId) -> bool {
        self.record(instance).is_ok()
    }

    pub(super) fn inventory(&self) -> Inventory {
        self.inventory_as_of(self.horizon())
    }

    pub(super) fn inventory_as_of(&self, horizon: u64) -> Inventory {
        let instances =
            self.instances.iter().filter_map(|(id, versions)| self.shown(id, versions.as_of(horizon)?));
        let groups = self.groups.iter().filter_map(|(&machine, versions)| {
            let rules = versions.as_of(horizon)?.as_ref()?;
            let open = !rules.owned.is_empty();
            Some(Group { id: rules.group.clone(), machine: Some(machine), open })
        });
        let environment =
            self.environment.iter().map(|id| Group { id: id.clone(), machine: None, open: false });
        Inventory { instances: instances.collect(), groups: groups.chain(environment).collect() }
    }

    pub(super) fn launch(&mut self, machine: MachineNumber) -> Result<Instance, Error> {
        let running = self.instances.iter().find_map(|(id, versions)| {
            let record = versions.latest().filter(|record| record.running)?;
            self.shown(id, record).filter(|instance| instance.machine == machine)
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
        let id = self.new_instance_id();
        let owner = (machine, Origin::Launched);
        self.set_record(
            &id,
            InstanceRecord { running: true, owner: Some(owner), group_of: Some(machine), ended_at: 0 },
        );
        Ok(self.instance(&id, owner, InstanceState::Running))
    }

    pub(super) fn adopt(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<Instance, Error> {
        let mut record = self.record(id)?.clone();
        let owner = *record.owner.get_or_insert((machine, Origin::Adopted));
        if owner.0 != machine {
            let reason = format!("it is machine {}", owner.0);
            return Err(Error::Foreign { what: Subject::from(id), reason });
        }
        self.set_record(id, record);
        self.ensure_group(machine, id)?;
        Ok(self.instance(id, owner, InstanceState::Running))
    }

    pub(super) fn ensure_group(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<GroupId, Error> {
        let record = self.record(id)?.clone();
        let group = self.make_group(machine)?;
        self.set_record(id, InstanceRecord { group_of: Some(machine), ..record });
        Ok(group)
    }

    pub(super) fn release(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Ok(record) = self.record(id).cloned() else { return Ok(()) };
        match record.owner {
            Some((owner, Origin::Adopted)) if owner == machine => {
                self.set_record(id, InstanceRecord { owner: None, group_of: None, ..record });
                Ok(())
            }
            Some(_) => Err(not_this_machines(machine, id)),
            None => Ok(()),
        }
    }

    pub(super) fn terminate(&mut self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Ok(record) = self.record(id) else { return Ok(()) };
        if record.owner != Some((machine, Origin::Launched)) {
            return Err(not_this_machines(machine, id));
        }
        self.lose_instance(id);
        Ok(())
    }

    pub(super) fn revoke_all(&mut self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        match self.rules(machine) {
            Some(rules) if rules.group == *group => {
                self.tamper(machine, |rules| rules.owned.clear());
                Ok(())
            }
            _ if self
                .groups
                .values()
                .filter_map(Versioned::latest)
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
        // Ownership of foreign rules is not checked here.
        self.squatters.retain(|_, theirs| theirs != group);
        self.environment = self.environment.take().filter(|shared| shared != group);
        let mut groups = self.groups.iter();
        let owner = groups.find_map(|(&machine, versions)| {
            versions.latest()?.as_ref().filter(|rules| rules.group == *group).map(|_| machine)
        });
        let Some(machine) = owner else { return Ok(()) };
        let in_use = self.instances.values().filter_map(Versioned::latest).any(|record| {
            let holds_on = record.running || self.calls <= record.ended_at + self.settings.busy_calls;
            record.group_of == Some(machine) && holds_on
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

    /// Returns the listed form of an instance; `None` without our mark.
    fn shown(&self, id: &InstanceId, record: &InstanceRecord) -> Option<Instance> {
        let state = if record.running { InstanceState::Running } else { InstanceState::Terminated };
        record.owner.map(|owner| self.instance(id, owner, state))
    }

    fn instance(
        &self,
        id: &InstanceId,
        (machine, origin): (MachineNumber, Origin),
        state: InstanceState,
    ) -> Instance {
        let address = |kind: &str| Some(format!("{id}.{kind}.example.com"));
        let (public_address, private_address) = (address("public"), address("private"));
        let record = self.instances.get(id).and_then(Versioned::latest);
        let group = record.and_then(|record| self.rules(record.group_of?)).map(|rules| rules.group.clone());
        let groups = group.into_iter().collect();
        Instance { id: id.clone(), machine, origin, state, public_address, private_address, groups }
    }
}

fn empty(group: GroupId, ipv6: bool) -> MachineRules {
    MachineRules { group, owned: BTreeSet::new(), foreign: Vec::new(), ipv6, drift: Vec::new() }
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

/// Converts a rule to another spelling and reads it back as a driver would.
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
