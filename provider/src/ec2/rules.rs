//! Reads the rules of machines in batches, and changes them with one request to close and one to
//! open. EC2's form of a rule belongs in `permission`.

use super::Ec2;
use super::api::filter;
use super::error_codes::CallError;
use super::groups::{MACHINES_PER_READ, OurGroup};
use super::naming::GroupOwner;
use super::permission::{Decoded, decode, encode};
use crate::error::{Error, Subject};
use crate::provider::{Applied, Firewall, GroupId, MachineNumber, MachineRules, Seen};
use crate::rule::{Change, Rule};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// The direction of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    Close,
}

impl Way {
    /// Returns those of `rules` that still have to be changed in a group with the rules `there`.
    fn rest(self, rules: &BTreeSet<Rule>, there: &Decoded) -> BTreeSet<Rule> {
        let needed = |rule: &&Rule| match self {
            Self::Open => !there.has(rule),
            Self::Close => there.owned.contains(rule),
        };
        rules.iter().filter(needed).copied().collect()
    }
}

impl Firewall for Ec2 {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        if machines.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut filters = self.ours(&["group"]);
        // A few machines are filtered by number. Many are read faster with all others, 1,000 per
        // page.
        if machines.len() <= MACHINES_PER_READ {
            filters.push(Self::of_machines(machines));
        }
        let sent = Instant::now();
        let groups = self.our_groups(&Subject::Provider, filters).await?;
        let mut by_machine: BTreeMap<MachineNumber, Vec<OurGroup>> = BTreeMap::new();
        for group in groups {
            if let Some(machine) = group.owner.machine().filter(|machine| machines.contains(machine)) {
                by_machine.entry(machine).or_default().push(group);
            }
        }
        let mut chosen = BTreeMap::new();
        for (machine, groups) in by_machine {
            chosen.extend(self.choose(machine, groups).await?.map(|group| (machine, group)));
        }
        let made: Vec<String> = self.just_made(machines, &mut chosen);
        let vpcs = chosen.values().map(|group| group.vpc.as_str()).chain(made.iter().map(String::as_str));
        let ipv6 = self.ipv6_of(vpcs.collect()).await?;
        Ok(machines
            .iter()
            .map(|&machine| (machine, self.seen(machine, chosen.remove(&machine), &ipv6, sent)))
            .collect())
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        if change.is_empty() {
            return Applied::as_one(Ok(()));
        }
        let group = match self.group_of(machine).await {
            Ok(group) => group,
            Err(error) => return Applied::as_one(Err(error)),
        };
        let closed = self.send(Way::Close, machine, &group, &change.close, Some(until)).await;
        let opened = self.send(Way::Open, machine, &group, &change.open, Some(until)).await;
        Applied { opened, closed }
    }

    fn rules_per_family(&self) -> Option<usize> {
        Some(self.settings.rules_per_family)
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        Ec2::requests(self)
    }
}

impl Ec2 {
    /// Selects the group of a machine. A machine that was moved may have a group in each of two
    /// VPCs; the one of its instance counts.
    async fn choose(
        &self,
        machine: MachineNumber,
        mut groups: Vec<OurGroup>,
    ) -> Result<Option<OurGroup>, Error> {
        groups.sort_by(|a, b| a.id.cmp(&b.id));
        if groups.len() > 1 {
            let attached = self.attached_groups(machine).await?;
            groups.sort_by_key(|group| !attached.contains(&group.id));
        }
        Ok(groups.into_iter().next())
    }

    /// Adds new groups that EC2 does not show yet. Returns their VPCs.
    fn just_made(
        &self,
        machines: &BTreeSet<MachineNumber>,
        chosen: &mut BTreeMap<MachineNumber, OurGroup>,
    ) -> Vec<String> {
        let mut memory = self.memory();
        let now = Instant::now().into_std();
        let mut vpcs = Vec::new();
        for &machine in machines {
            let Entry::Vacant(place) = chosen.entry(machine) else {
                memory.recent_writes.is_shown(machine);
                continue;
            };
            if let Some(made) = memory.recent_writes.made_for(machine, now) {
                let (id, vpc) = (made.group.clone(), made.vpc.clone());
                vpcs.push(vpc.clone());
                let owner = GroupOwner::Machine(machine);
                place.insert(OurGroup { id, owner, vpc, rules: Decoded::default() });
            }
        }
        vpcs
    }

    /// Returns the machine's rules as a describe sent at `sent` shows them, with our recent writes.
    fn seen(
        &self,
        machine: MachineNumber,
        group: Option<OurGroup>,
        ipv6: &BTreeSet<String>,
        sent: Instant,
    ) -> Seen {
        let mut memory = self.memory();
        let Some(group) = group else {
            memory.groups.remove(&machine);
            return Seen::Absent;
        };
        memory.groups.insert(machine, group.id.clone());
        let Decoded { mut owned, foreign } = group.rules;
        memory.recent_writes.overlay(&group.id, &mut owned, sent.into_std());
        // An identical foreign rule is foreign, even if we opened it recently.
        owned.retain(|rule| !foreign.iter().any(|foreign| foreign.exact == Some(*rule)));
        let ipv6 = ipv6.contains(&group.vpc);
        Seen::Present(MachineRules { group: group.id, owned, foreign, ipv6, drift: Vec::new() })
    }

    async fn group_of(&self, machine: MachineNumber) -> Result<GroupId, Error> {
        let known = self.memory().groups.get(&machine).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        match self.observe(&BTreeSet::from([machine])).await?.remove(&machine) {
            Some(Seen::Present(rules)) => Ok(rules.group),
            Some(Seen::Absent) | None => Err(Error::NotFound { what: Subject::Machine(machine) }),
        }
    }

    /// Sends one request. If EC2 refuses it because some of the rules are in the wanted state
    /// already, the group is read again and the rest is sent once.
    async fn send(
        &self,
        way: Way,
        machine: MachineNumber,
        group: &GroupId,
        rules: &BTreeSet<Rule>,
        until: Option<Instant>,
    ) -> Result<(), Error> {
        if rules.is_empty() {
            return Ok(());
        }
        let mut sent = self.send_once(way, group, rules, until).await;
        if sent == Err(CallError::RulesAlreadySo) {
            self.memory().recent_writes.discard(group);
            let read = self.read_rules(group).await;
            let named = |error: Error| error.with_group_name(&self.environment().group_name(Some(machine)));
            let rest = way.rest(rules, &read.map_err(named)?);
            sent = if rest.is_empty() { Ok(()) } else { self.send_once(way, group, &rest, until).await };
        }
        let name = self.environment().group_name(Some(machine));
        let result = sent.map_err(|error| error.into_error(&group.into()).with_group_name(&name));
        let none = BTreeSet::new();
        let mut memory = self.memory();
        match (&result, way) {
            (Ok(()), Way::Open) => memory.recent_writes.wrote(group, rules, &none, Instant::now().into_std()),
            (Ok(()), Way::Close) => {
                memory.recent_writes.wrote(group, &none, rules, Instant::now().into_std());
            }
            (Err(Error::NotBegun { .. }), _) => {}
            (Err(error), _) => {
                memory.recent_writes.discard(group);
                if matches!(error, Error::NotFound { .. }) {
                    memory.groups.remove(&machine);
                }
            }
        }
        drop(memory);
        result
    }

    pub(super) async fn send_close(
        &self,
        machine: MachineNumber,
        group: &GroupId,
        rules: &BTreeSet<Rule>,
    ) -> Result<(), Error> {
        self.send(Way::Close, machine, group, rules, None).await
    }

    async fn send_once(
        &self,
        way: Way,
        group: &GroupId,
        rules: &BTreeSet<Rule>,
        until: Option<Instant>,
    ) -> Result<(), CallError> {
        match way {
            Way::Open => self.api.authorize(group, encode(rules), until).await,
            Way::Close => self.api.revoke(group, encode(rules), until).await,
        }
    }

    /// Reads the rules as EC2 shows them, without our recent writes.
    async fn read_rules(&self, group: &GroupId) -> Result<Decoded, Error> {
        let what = Subject::from(group);
        let filters = vec![filter("group-id", [group.as_str().to_owned()])];
        let groups = self.api.groups(&what, filters).await.map_err(|error| error.into_error(&what))?;
        let found = groups.iter().find(|found| found.group_id() == Some(group.as_str()));
        found.map(|found| decode(found.ip_permissions())).ok_or(Error::NotFound { what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::Foreign;
    use crate::rule::{Cidr, PortRange, Protocol, WirePorts};

    #[test]
    fn rest_omits_rules_in_the_wanted_state() {
        let rules = |ports: &[u16]| -> BTreeSet<Rule> {
            let rule = |&port| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
            ports.iter().map(rule).collect()
        };
        let theirs = WirePorts { proto: "tcp", from: Some(443), to: Some(443) };
        let there =
            Decoded { owned: rules(&[80]), foreign: vec![Foreign::from_wire(theirs, Cidr::WORLD_V4)] };
        assert_eq!(Way::Open.rest(&rules(&[80, 81, 443]), &there), rules(&[81]));
        assert_eq!(Way::Close.rest(&rules(&[80, 81, 443]), &there), rules(&[80]), "never theirs");
    }
}
