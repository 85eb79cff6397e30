//! Finds, creates and deletes our groups. Tags decide about ownership; a group that only has our
//! name is never changed.

use super::Ec2;
use super::api::filter;
use super::error_codes::CallError;
use super::machines::is_live;
use super::naming::{GroupOwner, MACHINE, MARK, is_marked};
use super::permission::{Decoded, decode, environment_permissions};
use crate::error::{Error, Subject};
use crate::provider::{GroupId, MachineNumber, OtherGroup};
use crate::rule::Rule;
use aws_sdk_ec2::types::{Filter, SecurityGroup, VpcCidrBlockStateCode};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// EC2 accepts 200 filter values per request; three are the mark, the environment and the store.
pub(super) const MACHINES_PER_READ: usize = 197;
/// How long the IPv6 support of a VPC is cached.
const IPV6_KNOWN_FOR: Duration = Duration::from_secs(600);

/// A group of ours, as EC2 shows it.
#[derive(Debug, Clone)]
pub(super) struct OurGroup {
    pub(super) id: GroupId,
    pub(super) owner: GroupOwner,
    pub(super) vpc: String,
    pub(super) rules: Decoded,
}

impl CallError {
    /// Converts the error for calls where the special cases cannot occur or do not matter.
    pub(super) fn into_error(self, what: &Subject) -> Error {
        match self {
            Self::Error(error) => error,
            Self::RulesAlreadySo | Self::NameTaken => Error::Conflict { what: what.clone() },
        }
    }
}

impl Ec2 {
    /// Returns a filter for machines, in addition to those of [`Self::ours`].
    pub(super) fn of_machines<'a>(machines: impl IntoIterator<Item = &'a MachineNumber>) -> Filter {
        filter(format!("tag:{MACHINE}"), machines.into_iter().map(ToString::to_string))
    }

    /// Returns filters for objects with this environment's mark.
    pub(super) fn ours(&self, marks: &[&str]) -> Vec<Filter> {
        let mut filters = vec![filter(format!("tag:{MARK}"), marks.iter().map(|&mark| mark.to_owned()))];
        let whose = self.environment().whose();
        filters.extend(whose.map(|(key, value)| filter(format!("tag:{key}"), [value.to_owned()])));
        filters
    }

    /// Returns our groups among those that match `filters`. The filters only narrow the read;
    /// ownership is checked here.
    pub(super) async fn our_groups(
        &self,
        what: &Subject,
        filters: Vec<Filter>,
    ) -> Result<Vec<OurGroup>, Error> {
        let groups = self.api.groups(what, filters).await.map_err(|error| error.into_error(what))?;
        Ok(groups.iter().filter_map(|group| self.our_group(group)).collect())
    }

    fn our_group(&self, group: &SecurityGroup) -> Option<OurGroup> {
        let owner = self.environment().group_owner(group.tags())?;
        Some(OurGroup {
            id: GroupId::new(group.group_id()?),
            owner,
            vpc: group.vpc_id()?.to_owned(),
            rules: decode(group.ip_permissions()),
        })
    }

    /// Returns the group of a machine or of the environment in a VPC, and creates it if it is
    /// missing.
    pub(super) async fn ensure_group_in(
        &self,
        vpc: &str,
        machine: Option<MachineNumber>,
    ) -> Result<OurGroup, Error> {
        let what = machine.map_or(Subject::Provider, Subject::Machine);
        if let Some(found) = self.find_group(&what, vpc, machine).await? {
            return Ok(found);
        }
        let environment = self.environment();
        let (name, description) = (environment.group_name(machine), environment.group_description(machine));
        let made = self.api.create_group(&what, name, description, vpc, environment.group_tags(machine));
        let id = match made.await {
            Ok(id) => id,
            Err(CallError::NameTaken) => return self.group_by_name(&what, vpc, machine).await,
            Err(error) => return Err(error.into_error(&what)),
        };
        tracing::info!(group = %id, name = %environment.group_name(machine), "group created");
        if let Some(machine) = machine {
            self.memory().recent_writes.made(machine, &id, vpc, Instant::now().into_std());
        }
        let owner = machine.map_or(GroupOwner::Environment, GroupOwner::Machine);
        Ok(OurGroup { id, owner, vpc: vpc.to_owned(), rules: Decoded::default() })
    }

    async fn find_group(
        &self,
        what: &Subject,
        vpc: &str,
        machine: Option<MachineNumber>,
    ) -> Result<Option<OurGroup>, Error> {
        let mut filters = self.ours(&["group"]);
        filters.push(filter("vpc-id", [vpc.to_owned()]));
        filters.push(match &machine {
            Some(machine) => Self::of_machines([machine]),
            None => filter("group-name", [self.environment().group_name(None)]),
        });
        let found = self.our_groups(what, filters).await?;
        let mut found = found.into_iter().filter(|group| group.owner.machine() == machine);
        if let Some(group) = found.next() {
            return Ok(Some(group));
        }
        let memory = self.memory();
        let now = Instant::now().into_std();
        let made = machine.and_then(|machine| memory.recent_writes.made_for(machine, now));
        Ok(made.filter(|made| made.vpc == vpc).map(|made| OurGroup {
            id: made.group.clone(),
            owner: machine.map_or(GroupOwner::Environment, GroupOwner::Machine),
            vpc: vpc.to_owned(),
            rules: Decoded::default(),
        }))
    }

    /// Returns the group that has the name of a machine's group, if it is ours.
    async fn group_by_name(
        &self,
        what: &Subject,
        vpc: &str,
        machine: Option<MachineNumber>,
    ) -> Result<OurGroup, Error> {
        let name = self.environment().group_name(machine);
        let filters = vec![filter("group-name", [name.clone()]), filter("vpc-id", [vpc.to_owned()])];
        let groups = self.api.groups(what, filters).await.map_err(|error| error.into_error(what))?;
        let Some(group) = groups.iter().find(|group| group.group_name() == Some(&name)) else {
            // The name is in use, but the describe does not show the group yet.
            return Err(Error::NotFound { what: what.clone() });
        };
        match self.our_group(group).filter(|ours| ours.owner.machine() == machine) {
            Some(ours) => Ok(ours),
            None => Err(Error::Foreign {
                what: Subject::Group(GroupId::new(group.group_id().unwrap_or("without an id"))),
                reason: if is_marked(group.tags()) {
                    format!("its name is '{name}', and its tags are those of another environment or store")
                } else {
                    format!("its name is '{name}', but it lacks our tags")
                },
            }),
        }
    }

    /// Returns our rules in a group as a describe sent at `sent` shows them, with our recent
    /// writes.
    pub(super) fn owned_now(&self, group: &OurGroup, sent: Instant) -> BTreeSet<Rule> {
        let mut owned = group.rules.owned.clone();
        self.memory().recent_writes.overlay(&group.id, &mut owned, sent.into_std());
        owned
    }

    /// Returns a group of ours; `None` if the id does not exist. A foreign group is an error.
    pub(super) async fn group_by_id(&self, group: &GroupId) -> Result<Option<OurGroup>, Error> {
        let what = Subject::from(group);
        let filters = vec![filter("group-id", [group.as_str().to_owned()])];
        let found = self.api.groups(&what, filters).await.map_err(|error| error.into_error(&what))?;
        let Some(found) = found.iter().find(|found| found.group_id() == Some(group.as_str())) else {
            return Ok(None);
        };
        let lacking = || Error::Foreign { what, reason: "it lacks our tags".to_owned() };
        self.our_group(found).ok_or_else(lacking).map(Some)
    }

    /// Returns the environment's group, and adds its two rules if it has no rules at all. If it has
    /// some, the operator may have removed others on purpose.
    pub(super) async fn ensure_environment_group(&self, vpc: &str) -> Result<OurGroup, Error> {
        let group = self.ensure_group_in(vpc, None).await?;
        if group.rules.owned.is_empty() && group.rules.foreign.is_empty() {
            let ipv6 = self.ipv6_of([vpc].into()).await?.contains(vpc);
            let rules = environment_permissions(group.id.as_str(), ipv6);
            match self.api.authorize(&group.id, rules, None).await {
                Ok(()) | Err(CallError::RulesAlreadySo) => {}
                Err(error) => return Err(error.into_error(&Subject::from(&group.id))),
            }
        }
        Ok(group)
    }

    /// Deletes a group of ours whose tags were read before.
    pub(super) async fn drop_group(&self, group: &GroupId) -> Result<(), Error> {
        match self.api.delete_group(group).await {
            Ok(()) | Err(CallError::Error(Error::NotFound { .. })) => {}
            Err(error) => return Err(error.into_error(&group.into())),
        }
        let mut memory = self.memory();
        memory.recent_writes.forget(group);
        memory.groups.retain(|_, known| known != group);
        Ok(())
    }

    /// See [`crate::Machines::adopt_groups`].
    pub(super) async fn take_over_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        let what = Subject::Provider;
        let of_our_name = self.environment().of_our_name();
        let filters = of_our_name.map(|(key, value)| filter(format!("tag:{key}"), [value.to_owned()]));
        let found = self.api.groups(&what, filters.to_vec()).await;
        let found = found.map_err(|error| error.into_error(&what))?;
        let mut all = Vec::new();
        for group in &found {
            let (Some((owner, store)), Some(id)) =
                (self.environment().other_stores_group(group.tags()), group.group_id())
            else {
                continue;
            };
            let id = GroupId::new(id);
            let used_by = match owner {
                // All machines use it, and new ones need it.
                GroupOwner::Environment => None,
                GroupOwner::Machine(_) => self.instance_in(&id).await?,
            };
            if used_by.is_none() {
                let tagged = self.api.tag_group(&id, self.environment().store_tag()).await;
                tagged.map_err(|error| error.into_error(&Subject::from(&id)))?;
                tracing::info!(group = %id, %store, "group of another store adopted");
            }
            all.push(OtherGroup {
                name: group.group_name().unwrap_or_default().to_owned(),
                store: store.to_owned(),
                left: used_by.map(|instance| format!("instance {instance} is in it; terminate that first")),
                id,
            });
        }
        Ok(all)
    }

    /// Returns an instance that uses the group, ours or foreign.
    async fn instance_in(&self, group: &GroupId) -> Result<Option<String>, Error> {
        let filters = vec![filter("instance.group-id", [group.as_str().to_owned()])];
        let what = Subject::from(group);
        let shown = self.api.instances(&what, filters).await;
        let shown = shown.map_err(|error| error.into_error(&what))?;
        let mut using = shown.iter().filter(|shown| is_live(shown));
        Ok(using.find_map(|shown| shown.instance_id().map(str::to_owned)))
    }

    /// Returns those of `vpcs` that have IPv6.
    pub(super) async fn ipv6_of(&self, vpcs: BTreeSet<&str>) -> Result<BTreeSet<String>, Error> {
        let now = Instant::now();
        let unknown: Vec<String> = {
            let known = &self.memory().ipv6;
            let fresh = |vpc: &str| known.get(vpc).is_some_and(|(_, at)| now < *at + IPV6_KNOWN_FOR);
            vpcs.iter().filter(|vpc| !fresh(vpc)).map(|&vpc| vpc.to_owned()).collect()
        };
        if !unknown.is_empty() {
            let read = self.api.vpcs(vec![filter("vpc-id", unknown)]).await;
            let read = read.map_err(|error| error.into_error(&Subject::Provider))?;
            let known = &mut self.memory().ipv6;
            known.retain(|_, (_, at)| now < *at + IPV6_KNOWN_FOR);
            for vpc in &read {
                let mut blocks = vpc.ipv6_cidr_block_association_set().iter();
                let has = blocks.any(|block| {
                    let state = block.ipv6_cidr_block_state().and_then(|state| state.state());
                    state == Some(&VpcCidrBlockStateCode::Associated)
                });
                known.extend(vpc.vpc_id().map(|id| (id.to_owned(), (has, now))));
            }
        }
        let known = &self.memory().ipv6;
        // Treating an unknown VPC as one without IPv6 would close the IPv6 rules of its machines.
        if let Some(vpc) = vpcs.iter().find(|vpc| !known.contains_key(**vpc)) {
            let reason = format!("EC2 does not show the VPC {vpc}");
            return Err(Error::Unavailable { what: Subject::Provider, reason });
        }
        let reached = |vpc: &&str| known.get(*vpc).is_some_and(|(has, _)| *has);
        Ok(vpcs.into_iter().filter(reached).map(str::to_owned).collect())
    }
}
