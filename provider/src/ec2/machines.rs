//! Instances and their groups. Each function can be repeated after a crash at any point: it reads
//! first, and new objects are tagged in the call that creates them, so that none is ever without
//! our mark.

use super::api::filter;
use super::groups::OurGroup;
use super::naming::{GroupOwner, is_marked, launch_token};
use super::{Ec2, LaunchSettings, unusable};
use crate::error::{Error, Subject};
use crate::provider::{
    Group, GroupId, Instance, InstanceId, InstanceState, Inventory, Launch, MachineNumber, Machines, Origin,
    OtherGroup, UserData,
};
use aws_sdk_ec2::types::{
    Filter, GroupIdentifier, HttpTokensState, Instance as Shown, InstanceMetadataOptionsRequest,
    InstanceNetworkInterface, InstanceStateName, InstanceType, Tag,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::collections::BTreeSet;
use tokio::time::Instant;

/// EC2's limit of user data before encoding.
const USER_DATA_MAX: usize = 16 * 1024;
/// Attempts of a launch whose idempotency token returns a terminated instance.
const LAUNCHES_MAX: usize = 5;

impl Machines for Ec2 {
    async fn list(&self) -> Result<Inventory, Error> {
        let shown = self.shown(&Subject::Provider, self.ours(&["launched", "adopted"])).await?;
        let instances = shown.iter().filter_map(|shown| self.our_instance(shown)).collect();
        let sent = Instant::now();
        let groups = self.our_groups(&Subject::Provider, self.ours(&["group"])).await?;
        let groups = groups.into_iter().map(|group| Group {
            machine: group.owner.machine(),
            open: !self.owned_now(&group, sent).is_empty(),
            id: group.id,
        });
        Ok(Inventory { instances, groups: groups.collect() })
    }

    async fn launch(&self, launch: &Launch) -> Result<Instance, Error> {
        let machine = launch.machine;
        let all = self.instances_of(machine).await?;
        if let Some(live) = all.iter().find(|instance| instance.state != InstanceState::Terminated) {
            return Ok(live.clone());
        }
        let settings = self.settings.launch.as_ref();
        let settings =
            settings.ok_or_else(|| unusable("no image and instance type to launch machines with"))?;
        let user_data = encoded(machine, &launch.user_data)?;
        let vpc = self.home(settings).await?;
        let shared = self.ensure_environment_group(&vpc).await?;
        let own = self.ensure_group_in(&vpc, Some(machine)).await?;
        let own = self.emptied(machine, own).await?;
        self.run(machine, settings, &user_data, [&shared.id, &own], all.len()).await
    }

    async fn adopt(&self, machine: MachineNumber, id: &InstanceId) -> Result<Instance, Error> {
        let shown = self.live(id).await?.ok_or_else(|| Error::NotFound { what: id.into() })?;
        let owner = self.environment().instance_owner(shown.tags());
        match owner {
            Some((owner, _)) if owner == machine => {}
            Some((owner, _)) => return Err(foreign(id, &format!("it is machine {owner}"))),
            None if is_marked(shown.tags()) => {
                return Err(foreign(id, "it bears the mark of another environment or store"));
            }
            None => {
                let tags = self.environment().instance_tags(machine, Origin::Adopted);
                let tagged = self.api.create_tags(id, tags).await;
                tagged.map_err(|error| error.into_error(&id.into()))?;
            }
        }
        let group = self.attach(machine, id, &shown).await?;
        let origin = owner.map_or(Origin::Adopted, |(_, origin)| origin);
        let mut adopted = instance(id.clone(), machine, origin, &shown);
        // The describe was sent before the group was attached.
        adopted.groups.insert(group);
        Ok(adopted)
    }

    async fn ensure_group(&self, machine: MachineNumber, id: &InstanceId) -> Result<GroupId, Error> {
        let shown = self.live(id).await?.ok_or_else(|| Error::NotFound { what: id.into() })?;
        self.attach(machine, id, &shown).await
    }

    async fn release(&self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Some(shown) = self.live(id).await? else { return Ok(()) };
        match self.environment().instance_owner(shown.tags()) {
            Some((owner, Origin::Adopted)) if owner == machine => {}
            Some(_) => return Err(not_this_machines(machine, id)),
            None => return Ok(()),
        }
        // The mark is removed last, so that an interrupted release is visible as unfinished.
        self.detach(machine, id, &shown).await?;
        let untagged =
            self.api.delete_tags(id, self.environment().instance_tags(machine, Origin::Adopted)).await;
        untagged.map_err(|error| error.into_error(&id.into()))
    }

    async fn terminate(&self, machine: MachineNumber, id: &InstanceId) -> Result<(), Error> {
        let Some(shown) = self.live(id).await? else { return Ok(()) };
        if self.environment().instance_owner(shown.tags()) != Some((machine, Origin::Launched)) {
            return Err(not_this_machines(machine, id));
        }
        match self.api.terminate(id).await.map_err(|error| error.into_error(&id.into())) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn revoke_all(&self, machine: MachineNumber, group: &GroupId) -> Result<(), Error> {
        let sent = Instant::now();
        let Some(found) = self.group_by_id(group).await? else { return Ok(()) };
        if found.owner != GroupOwner::Machine(machine) {
            let reason = format!("it is not the group of machine {machine}");
            return Err(Error::Foreign { what: group.into(), reason });
        }
        self.send_close(machine, group, &self.owned_now(&found, sent)).await
    }

    async fn delete_group(&self, group: &GroupId) -> Result<(), Error> {
        match self.group_by_id(group).await? {
            Some(found) => {
                let name = self.environment().group_name(found.owner.machine());
                self.drop_group(group).await.map_err(|error| error.with_group_name(&name))
            }
            None => Ok(()),
        }
    }

    async fn adopt_groups(&self) -> Result<Vec<OtherGroup>, Error> {
        self.take_over_groups().await
    }
}

impl Ec2 {
    async fn shown(&self, what: &Subject, filters: Vec<Filter>) -> Result<Vec<Shown>, Error> {
        self.api.instances(what, filters).await.map_err(|error| error.into_error(what))
    }

    async fn shown_of(&self, machine: MachineNumber) -> Result<Vec<Shown>, Error> {
        let mut filters = self.ours(&["launched", "adopted"]);
        filters.push(Self::of_machines([&machine]));
        self.shown(&Subject::Machine(machine), filters).await
    }

    /// Returns the machine's instances, including terminated ones that EC2 still shows.
    async fn instances_of(&self, machine: MachineNumber) -> Result<Vec<Instance>, Error> {
        let shown = self.shown_of(machine).await?;
        let ours = shown.iter().filter_map(|shown| self.our_instance(shown));
        Ok(ours.filter(|instance| instance.machine == machine).collect())
    }

    pub(super) async fn attached_groups(&self, machine: MachineNumber) -> Result<BTreeSet<GroupId>, Error> {
        let shown = self.shown_of(machine).await?;
        let live = shown.iter().filter(|shown| state(shown) != InstanceState::Terminated);
        let interfaces = live.flat_map(|shown| shown.network_interfaces());
        Ok(interfaces.flat_map(|interface| ids(interface.groups())).map(GroupId::new).collect())
    }

    /// Returns an instance by its id, ours or foreign; `None` after it was terminated.
    async fn live(&self, id: &InstanceId) -> Result<Option<Shown>, Error> {
        let filters = vec![filter("instance-id", [id.as_str().to_owned()])];
        let shown = self.shown(&id.into(), filters).await?;
        let mut live = shown.into_iter().filter(|shown| state(shown) != InstanceState::Terminated);
        Ok(live.find(|shown| shown.instance_id() == Some(id.as_str())))
    }

    fn our_instance(&self, shown: &Shown) -> Option<Instance> {
        let (machine, origin) = self.environment().instance_owner(shown.tags())?;
        Some(instance(InstanceId::new(shown.instance_id()?), machine, origin, shown))
    }

    /// Returns the VPC of new instances.
    async fn home(&self, settings: &LaunchSettings) -> Result<String, Error> {
        let known = self.memory().home.clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let home = match &settings.subnet {
            Some(subnet) => {
                let read = self.api.subnets(vec![filter("subnet-id", [subnet.clone()])]).await;
                let read = read.map_err(|error| error.into_error(&Subject::Provider))?;
                let vpc = read.first().and_then(|subnet| subnet.vpc_id()).map(str::to_owned);
                vpc.ok_or_else(|| unusable(&format!("there is no subnet {subnet}")))?
            }
            None => {
                let read = self.api.vpcs(vec![filter("is-default", ["true".to_owned()])]).await;
                let read = read.map_err(|error| error.into_error(&Subject::Provider))?;
                let vpc = read.first().and_then(|vpc| vpc.vpc_id()).map(str::to_owned);
                vpc.ok_or_else(|| unusable("there is no default VPC, and no subnet was named"))?
            }
        };
        self.memory().home = Some(home.clone());
        Ok(home)
    }

    /// Empties an old group, which must not open ports on a new instance. Our rules are removed; a
    /// group with rules of others is replaced, unless it is in use.
    async fn emptied(&self, machine: MachineNumber, group: OurGroup) -> Result<GroupId, Error> {
        if !group.rules.foreign.is_empty() {
            match self.drop_group(&group.id).await {
                Ok(()) => return Ok(self.ensure_group_in(&group.vpc, Some(machine)).await?.id),
                Err(Error::StillInUse { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        self.send_close(machine, &group.id, &group.rules.owned).await?;
        Ok(group.id)
    }

    async fn run(
        &self,
        machine: MachineNumber,
        settings: &LaunchSettings,
        user_data: &str,
        groups: [&GroupId; 2],
        ended: usize,
    ) -> Result<Instance, Error> {
        let what = Subject::Machine(machine);
        let mut tags = self.environment().instance_tags(machine, Origin::Launched);
        tags.push(Tag::builder().key("Name").value(self.environment().group_name(Some(machine))).build());
        for attempt in ended..ended + LAUNCHES_MAX {
            let token = launch_token(groups[1].as_str(), attempt);
            // User data can hold credentials, so reading it requires a session token (IMDSv2).
            let tokens = InstanceMetadataOptionsRequest::builder().http_tokens(HttpTokensState::Required);
            let run = self.api.run(&what, tags.clone(), |request| {
                request
                    .image_id(&settings.image)
                    .instance_type(InstanceType::from(settings.instance_type.as_str()))
                    .set_subnet_id(settings.subnet.clone())
                    .set_key_name(settings.key.clone())
                    .set_security_group_ids(Some(groups.map(ToString::to_string).to_vec()))
                    .user_data(user_data)
                    .metadata_options(tokens.build())
                    .client_token(token)
            });
            let shown = run.await.map_err(|error| error.into_error(&what))?;
            let id = shown.instance_id().ok_or_else(|| Error::Ambiguous {
                what: what.clone(),
                reason: "EC2 answered with an instance without an id".to_owned(),
            })?;
            let launched = instance(InstanceId::new(id), machine, Origin::Launched, &shown);
            if launched.state != InstanceState::Terminated {
                tracing::info!(%machine, instance = %launched.id, "instance launched");
                return Ok(launched);
            }
        }
        Err(Error::Conflict { what })
    }

    /// Adds the machine's group to the instance's groups.
    async fn attach(&self, machine: MachineNumber, id: &InstanceId, shown: &Shown) -> Result<GroupId, Error> {
        let vpc = shown.vpc_id().ok_or_else(|| Error::NotFound { what: id.into() })?;
        let group = self.ensure_group_in(vpc, Some(machine)).await?.id;
        let interface = first_interface(id, shown)?;
        let mut groups = ids(interface.groups());
        if !groups.iter().any(|there| there == group.as_str()) {
            groups.push(group.as_str().to_owned());
            self.set_groups(id, interface, groups).await?;
        }
        Ok(group)
    }

    async fn detach(&self, machine: MachineNumber, id: &InstanceId, shown: &Shown) -> Result<(), Error> {
        let interface = first_interface(id, shown)?;
        let mut filters = self.ours(&["group"]);
        filters.push(Self::of_machines([&machine]));
        let ours = self.our_groups(&id.into(), filters).await?;
        let ours = ours.iter().filter(|group| group.owner == GroupOwner::Machine(machine));
        let ours: BTreeSet<&str> = ours.map(|group| group.id.as_str()).collect();
        let there = ids(interface.groups());
        let rest: Vec<String> = there.iter().filter(|id| !ours.contains(id.as_str())).cloned().collect();
        if rest.is_empty() && !there.is_empty() {
            let reason = "our group is its only one: give it another one first".to_owned();
            return Err(Error::Unusable { what: id.into(), reason });
        }
        if rest.len() < there.len() {
            self.set_groups(id, interface, rest).await?;
        }
        Ok(())
    }

    async fn set_groups(
        &self,
        id: &InstanceId,
        interface: &InstanceNetworkInterface,
        groups: Vec<String>,
    ) -> Result<(), Error> {
        let name = interface.network_interface_id().ok_or_else(|| Error::NotFound { what: id.into() })?;
        let set = self.api.set_groups(id, name, groups).await;
        set.map_err(|error| error.into_error(&id.into()))
    }
}

/// Returns whether an instance may still run.
pub(super) fn is_live(shown: &Shown) -> bool {
    state(shown) != InstanceState::Terminated
}

/// Returns the interface that receives public traffic.
fn first_interface<'a>(id: &InstanceId, shown: &'a Shown) -> Result<&'a InstanceNetworkInterface, Error> {
    let place =
        |one: &&InstanceNetworkInterface| one.attachment().and_then(|attachment| attachment.device_index());
    let first = shown.network_interfaces().iter().min_by_key(|one| place(one).unwrap_or(i32::MAX));
    first.ok_or_else(|| Error::NotFound { what: id.into() })
}

fn ids(groups: &[GroupIdentifier]) -> Vec<String> {
    groups.iter().filter_map(|group| group.group_id().map(str::to_owned)).collect()
}

fn encoded(machine: MachineNumber, user_data: &UserData) -> Result<String, Error> {
    let bytes = user_data.reveal().len();
    if bytes > USER_DATA_MAX {
        let reason = format!("user data of {bytes} bytes, and EC2 takes {USER_DATA_MAX}");
        return Err(Error::Invalid { what: Subject::Machine(machine), reason });
    }
    Ok(STANDARD.encode(user_data.reveal()))
}

fn instance(id: InstanceId, machine: MachineNumber, origin: Origin, shown: &Shown) -> Instance {
    let given = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
    let public = given(shown.public_dns_name()).or_else(|| given(shown.public_ip_address()));
    let private_address = given(shown.private_ip_address());
    let groups = shown.network_interfaces().iter().flat_map(|one| ids(one.groups()));
    let groups = groups.map(GroupId::new).collect();
    Instance { id, machine, origin, state: state(shown), public_address: public, private_address, groups }
}

fn state(shown: &Shown) -> InstanceState {
    match shown.state().and_then(|state| state.name()) {
        Some(InstanceStateName::Running) => InstanceState::Running,
        Some(InstanceStateName::Stopped | InstanceStateName::Stopping) => InstanceState::Stopped,
        Some(InstanceStateName::Terminated | InstanceStateName::ShuttingDown) => InstanceState::Terminated,
        _ => InstanceState::Pending,
    }
}

fn foreign(id: &InstanceId, reason: &str) -> Error {
    Error::Foreign { what: id.into(), reason: reason.to_owned() }
}

fn not_this_machines(machine: MachineNumber, id: &InstanceId) -> Error {
    foreign(id, &format!("not launched or adopted for machine {machine}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_sdk_ec2::types::InstanceState as ShownState;

    fn shown(name: Option<InstanceStateName>) -> Shown {
        let state = name.map(|name| ShownState::builder().name(name).build());
        Shown::builder().set_state(state).public_dns_name("").public_ip_address("192.0.2.1").build()
    }

    #[test]
    fn ec2_states_are_mapped() {
        use InstanceStateName as Name;
        for (name, expected) in [
            (Some(Name::Pending), InstanceState::Pending),
            (Some(Name::Running), InstanceState::Running),
            (Some(Name::Stopping), InstanceState::Stopped),
            (Some(Name::Stopped), InstanceState::Stopped),
            (Some(Name::ShuttingDown), InstanceState::Terminated),
            (Some(Name::Terminated), InstanceState::Terminated),
            (Some(Name::from("asleep")), InstanceState::Pending),
            (None, InstanceState::Pending),
        ] {
            assert_eq!(state(&shown(name.clone())), expected, "{name:?}");
        }
    }

    #[test]
    fn empty_dns_name_is_not_an_address() {
        let one = instance(InstanceId::new("i-1"), MachineNumber::new(1), Origin::Launched, &shown(None));
        assert_eq!(one.public_address.as_deref(), Some("192.0.2.1"));
        assert_eq!(one.private_address, None);
    }

    #[test]
    fn user_data_is_limited_and_not_printed() {
        let machine = MachineNumber::new(1);
        assert_eq!(encoded(machine, &UserData::new("hi")), Ok("aGk=".to_owned()));
        let error = encoded(machine, &UserData::new("secret".repeat(4000))).unwrap_err();
        assert_eq!(error.kind(), "invalid");
        assert!(!error.to_string().contains("secret"));
    }
}
