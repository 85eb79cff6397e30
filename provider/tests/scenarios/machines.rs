//! Instances and groups: launched, adopted, left over, conflicting, deleted.

use super::{ONE, change, counts, seen, tcp};
use crate::cloud::front::Act;
use crate::cloud::{Account, STORE, launch, request, xml};
use crate::suite::in_time;
use aws_sdk_ec2::types::{SecurityGroup, Tag};
use portcullis_provider::ec2::LaunchSettings;
use portcullis_provider::provider::{
    Firewall, GroupId, InstanceId, InstanceState, Inventory, MachineNumber, Machines, Origin, Seen,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn tags(tags: &[Tag]) -> BTreeMap<&str, &str> {
    tags.iter().map(|tag| (tag.key().unwrap(), tag.value().unwrap())).collect()
}

fn ports(group: &SecurityGroup) -> Vec<i32> {
    group.ip_permissions().iter().filter_map(|permission| permission.from_port()).collect()
}

pub(crate) async fn launch_creates_both_groups_and_is_idempotent(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let launched = launch(&ec2, 2).await;
    let calls = [
        ("AuthorizeSecurityGroupIngress", 1),
        ("CreateSecurityGroup", 2),
        ("DescribeInstances", 1),
        ("DescribeSecurityGroups", 2),
        ("DescribeVpcs", 2),
        ("RunInstances", 1),
    ];
    assert_eq!(account.front.take_counts(), counts(&calls));
    assert_eq!((launched.machine, launched.origin), (MachineNumber::new(2), Origin::Launched));

    let shared = account.group("juju-prod").await.unwrap();
    assert_eq!(shared.description(), Some("juju group for prod"));
    let marks = [("portcullis", "group"), ("portcullis:environment", "prod"), ("portcullis:store", STORE)];
    assert_eq!(tags(shared.tags()), BTreeMap::from(marks));
    assert_eq!(shared.ip_permissions().len(), 2);
    assert_eq!(ports(&shared), [22]);
    let own = shared.ip_permissions().iter().find(|one| one.ip_protocol() == Some("-1")).unwrap();
    assert_eq!(own.user_id_group_pairs()[0].group_id(), shared.group_id());

    let group = account.group("juju-prod-2").await.unwrap();
    assert_eq!(group.description(), Some("juju group for prod machine 2"));
    let marks = [marks[0], marks[1], marks[2], ("portcullis:machine", "2")];
    assert_eq!(tags(group.tags()), BTreeMap::from(marks));
    assert!(group.ip_permissions().is_empty());
    assert_eq!(account.groups_of(launched.id.as_str()).await, ["juju-prod", "juju-prod-2"]);

    for ec2 in [&ec2, &account.ec2("prod")] {
        assert_eq!(ec2.launch(&request(2)).await.unwrap().id, launched.id);
        assert_eq!(account.front.take_counts(), counts(&[("DescribeInstances", 1)]));
    }
    launch(&ec2, 3).await;
    let calls = [
        ("CreateSecurityGroup", 1),
        ("DescribeInstances", 1),
        ("DescribeSecurityGroups", 2),
        ("RunInstances", 1),
    ];
    assert_eq!(account.front.take_counts(), counts(&calls), "the second launch needs fewer calls");
}

pub(crate) async fn launch_after_a_lost_reply_is_idempotent(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    account.front.script("CreateSecurityGroup", [Act::LoseAnswer, Act::LoseAnswer]);
    account.front.script("RunInstances", [Act::LoseAnswer]);
    for lost in ["the group of all", "its own group", "the launch"] {
        assert_eq!(ec2.launch(&request(1)).await.unwrap_err().kind(), "ambiguous", "{lost}");
    }
    // The read does not show the instance yet, so EC2 has to recognise the launch by its token.
    account.front.script("DescribeInstances", [Act::Late]);
    let launched = launch(&ec2, 1).await;
    let sent = account.front.take_counts();
    assert_eq!((sent["CreateSecurityGroup"], sent["RunInstances"]), (2, 2));
    let inventory = ec2.list().await.unwrap();
    assert_eq!(inventory.instances.len(), 1);
    assert_eq!(inventory.instances[0].id, launched.id);
    assert_eq!(inventory.groups.len(), 2);
}

pub(crate) async fn terminated_launch_is_repeated_with_a_new_token(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    account.front.script("RunInstances", [Act::Answer(xml::launched_and_ended())]);
    let launched = launch(&ec2, 1).await;
    assert_ne!(launched.id.as_str(), "i-0ended");
    assert_eq!(account.front.take_counts()["RunInstances"], 2);
    account.front.always("RunInstances", Act::Answer(xml::launched_and_ended()));
    assert_eq!(ec2.launch(&request(2)).await.unwrap_err().kind(), "conflict", "retries are limited");
    assert_eq!(account.front.take_counts()["RunInstances"], 5);
}

pub(crate) async fn launch_without_a_usable_subnet_is_refused(account: Arc<Account>) {
    let mut settings = account.settings("prod");
    settings.launch = None;
    let error = account.connect(settings.clone()).launch(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), "unusable");
    let nowhere = Some("subnet-00000000".to_owned());
    settings.launch =
        account.settings("prod").launch.map(|launch| LaunchSettings { subnet: nowhere, ..launch });
    let error = account.connect(settings).launch(&request(1)).await.unwrap_err();
    assert_eq!(error.to_string(), "the provider cannot be used: there is no subnet subnet-00000000");
    let full = account.ec2("prod");
    account.front.always("RunInstances", Act::Refuse(400, "InsufficientInstanceCapacity"));
    assert_eq!(full.launch(&request(1)).await.unwrap_err().kind(), "unavailable");
    account.front.always("RunInstances", Act::Refuse(400, "VcpuLimitExceeded"));
    assert_eq!(full.launch(&request(1)).await.unwrap_err().kind(), "quota-exceeded");
    account.front.always("RunInstances", Act::Refuse(400, "InvalidAMIID.NotFound"));
    assert_eq!(full.launch(&request(1)).await.unwrap_err().kind(), "unusable");
    account.front.reset();
    launch(&full, 1).await;
    assert_eq!(full.list().await.unwrap().groups.len(), 2, "failed launches leave no groups");
}

pub(crate) async fn leftover_group_is_emptied_or_replaced(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    for (foreign, replaced) in [(false, false), (true, true)] {
        let first = launch(&ec2, 1).await;
        assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());
        let left = seen(&ec2, ONE).await.group;
        if foreign {
            account.open(left.as_str(), 9000).await;
        }
        ec2.terminate(ONE, &first.id).await.unwrap();
        let second = account.ec2("prod").launch(&request(1)).await.unwrap();
        assert_ne!(second.id, first.id, "the first instance is terminated");
        let rules = seen(&account.ec2("prod"), ONE).await;
        assert!(rules.owned.is_empty() && rules.foreign.is_empty(), "{rules:?}");
        assert_eq!(rules.group != left, replaced);
        ec2.terminate(ONE, &second.id).await.unwrap();
    }
    launch(&ec2, 2).await;
    let used = account.group("juju-prod-2").await.unwrap().group_id.unwrap();
    account.open(&used, 9000).await;
    let instance =
        ec2.list().await.unwrap().instances.into_iter().find(|one| one.machine.get() == 2).unwrap();
    ec2.terminate(MachineNumber::new(2), &instance.id).await.unwrap();
    account.front.script("DeleteSecurityGroup", [Act::Refuse(400, "DependencyViolation")]);
    launch(&ec2, 2).await;
    let group = account.group("juju-prod-2").await.unwrap();
    assert_eq!(
        (group.group_id(), ports(&group)),
        (Some(used.as_str()), vec![9000]),
        "a group in use keeps foreign rules"
    );
}

pub(crate) async fn foreign_group_with_our_name_is_reported(account: Arc<Account>) {
    let vpc = account.default_vpc().await;
    let theirs = account.make_group("juju-prod-1", &vpc).await;
    account.open(&theirs, 9000).await;
    let ec2 = account.ec2("prod");
    let error = ec2.launch(&request(1)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("group {theirs} was not made by us: its name is 'juju-prod-1', but it lacks our tags")
    );
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    assert_eq!(ec2.delete_group(&GroupId::new(theirs)).await.unwrap_err().kind(), "foreign");
    assert_eq!(ports(&account.group("juju-prod-1").await.unwrap()), [9000], "unchanged");
    assert!(ec2.list().await.unwrap().instances.is_empty());
}

pub(crate) async fn environments_with_similar_names_are_separate(account: Arc<Account>) {
    let (prod, prod_2) = (account.ec2("prod"), account.ec2("prod-2"));
    launch(&prod_2, 7).await;
    let error = prod.launch(&request(2)).await.unwrap_err();
    assert_eq!(error.kind(), "foreign", "juju-prod-2 is the group of an environment");
    launch(&prod, 7).await;
    let seven = MachineNumber::new(7);
    assert!(prod.apply(seven, &change(&[80], &[]), in_time()).await.is_ok());
    assert_eq!(seen(&prod, seven).await.owned, tcp(&[80]));
    assert!(seen(&prod_2, seven).await.owned.is_empty(), "machine 7 of another environment");
    let (ours, theirs) = (prod.list().await.unwrap(), prod_2.list().await.unwrap());
    assert_eq!((ours.instances.len(), theirs.instances.len()), (1, 1));
    let error = prod.delete_group(&theirs.groups[0].id).await.unwrap_err();
    assert_eq!(error.kind(), "foreign");
    assert_eq!(prod.terminate(seven, &theirs.instances[0].id).await.unwrap_err().kind(), "foreign");
    assert_eq!(prod.adopt(seven, &theirs.instances[0].id).await.unwrap_err().kind(), "foreign");
}

pub(crate) async fn stores_with_one_environment_name_are_separate(account: Arc<Account>) {
    let (ours, theirs) =
        (account.ec2("prod"), account.connect(account.settings_of("prod", "fedcba9876543210")));
    let launched = launch(&theirs, 1).await;
    assert!(theirs.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());
    assert_eq!(ours.list().await.unwrap(), Inventory::default(), "objects of the other store are not listed");
    assert_eq!(ours.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    assert_eq!(ours.terminate(ONE, &launched.id).await.unwrap_err().kind(), "foreign");
    let error = ours.launch(&request(2)).await.unwrap_err();
    assert!(error.to_string().ends_with("are those of another environment or store"), "{error}");
    assert_eq!(theirs.list().await.unwrap().instances.len(), 1);
    assert_eq!(seen(&theirs, ONE).await.owned, tcp(&[80]));
}

pub(crate) async fn groups_of_a_lost_store_are_adopted(account: Arc<Account>) {
    const LOST: &str = "fedcba9876543210";
    let (ours, lost) = (account.ec2("prod"), account.connect(account.settings_of("prod", LOST)));
    let elsewhere = account.connect(account.settings_of("prod-9", LOST));
    let (running, ended) = (launch(&lost, 1).await, launch(&lost, 2).await);
    launch(&elsewhere, 3).await;
    lost.terminate(MachineNumber::new(2), &ended.id).await.unwrap();
    assert_eq!(ours.launch(&request(1)).await.unwrap_err().kind(), "foreign");

    let mut found = ours.adopt_groups().await.unwrap();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let shown: Vec<(&str, &str, bool)> =
        found.iter().map(|group| (group.name.as_str(), group.store.as_str(), group.left.is_none())).collect();
    assert_eq!(shown, [("juju-prod", LOST, true), ("juju-prod-1", LOST, false), ("juju-prod-2", LOST, true)]);
    let why = format!("instance {} is in it; terminate that first", running.id);
    assert_eq!(found[1].left.as_deref(), Some(why.as_str()));
    let shared = account.group("juju-prod").await.unwrap();
    assert_eq!(tags(shared.tags())["portcullis:store"], STORE);

    launch(&ours, 2).await;
    assert_eq!(ours.launch(&request(1)).await.unwrap_err().kind(), "foreign", "its group is in use");
    lost.terminate(ONE, &running.id).await.unwrap();
    let again: Vec<String> = ours.adopt_groups().await.unwrap().into_iter().map(|group| group.name).collect();
    assert_eq!(again, ["juju-prod-1"], "groups of this store are not listed");
    launch(&ours, 1).await;
    assert_eq!(ours.adopt_groups().await.unwrap(), []);
    assert_eq!(
        elsewhere.list().await.unwrap().groups.len(),
        2,
        "groups of another environment are unchanged"
    );
}

pub(crate) async fn adopted_instance_is_released_and_not_terminated(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let instance = InstanceId::new(account.make_instance().await);
    let before = account.groups_of(instance.as_str()).await;
    account.front.take_counts();
    let adopted = ec2.adopt(ONE, &instance).await.unwrap();
    assert_eq!(
        (adopted.origin, adopted.machine, adopted.id.clone()),
        (Origin::Adopted, ONE, instance.clone())
    );
    let calls = [
        ("CreateSecurityGroup", 1),
        ("CreateTags", 1),
        ("DescribeInstances", 1),
        ("DescribeSecurityGroups", 1),
        ("ModifyNetworkInterfaceAttribute", 1),
    ];
    assert_eq!(account.front.take_counts(), counts(&calls));
    let mut groups = before.clone();
    groups.push("juju-prod-1".to_owned());
    assert_eq!(account.groups_of(instance.as_str()).await, groups, "added to the existing groups");

    assert_eq!(ec2.adopt(ONE, &instance).await.unwrap(), adopted, "adopting again changes nothing");
    assert_eq!(
        account.front.take_counts(),
        counts(&[("DescribeInstances", 1), ("DescribeSecurityGroups", 1)])
    );
    assert_eq!(ec2.adopt(MachineNumber::new(2), &instance).await.unwrap_err().kind(), "foreign");
    assert_eq!(ec2.launch(&request(1)).await.unwrap().id, instance, "the machine has an instance");
    assert_eq!(ec2.terminate(ONE, &instance).await.unwrap_err().kind(), "foreign");
    assert_eq!(ec2.release(MachineNumber::new(2), &instance).await.unwrap_err().kind(), "foreign");
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());

    ec2.release(ONE, &instance).await.unwrap();
    assert_eq!(account.groups_of(instance.as_str()).await, before);
    assert!(ec2.list().await.unwrap().instances.is_empty());
    account.front.take_counts();
    ec2.release(ONE, &instance).await.unwrap();
    assert_eq!(account.front.take_counts(), counts(&[("DescribeInstances", 1)]));
    ec2.adopt(ONE, &instance).await.unwrap();
    account.leave_only("juju-prod-1", instance.as_str()).await;
    let error = ec2.release(ONE, &instance).await.unwrap_err();
    assert!(error.to_string().ends_with("our group is its only one: give it another one first"), "{error}");
    let gone = InstanceId::new("i-0123456789abcdef0");
    assert_eq!(ec2.adopt(ONE, &gone).await.unwrap_err().kind(), "not-found");
    assert_eq!((ec2.release(ONE, &gone).await, ec2.terminate(ONE, &gone).await), (Ok(()), Ok(())));
}

pub(crate) async fn deleted_group_is_created_again(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let launched = launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    account.other.delete_security_group().group_id(group.as_str()).send().await.unwrap();
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    let made = ec2.ensure_group(ONE, &launched.id).await.unwrap();
    assert_ne!(made, group);
    assert_eq!(ec2.ensure_group(ONE, &launched.id).await.unwrap(), made);
    assert!(account.groups_of(launched.id.as_str()).await.contains(&"juju-prod-1".to_owned()));
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());
    account.front.always(
        "ModifyNetworkInterfaceAttribute",
        Act::Refuse(400, "SecurityGroupsPerInterfaceLimitExceeded"),
    );
    let theirs = InstanceId::new(account.make_instance().await);
    let error = ec2.adopt(MachineNumber::new(9), &theirs).await.unwrap_err();
    assert_eq!(error.to_string(), format!("instance {theirs} is full: its limit of 5 is reached"));
}

pub(crate) async fn revoke_all_keeps_foreign_rules(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80, 443], &[]), in_time()).await.is_ok());
    let group = seen(&ec2, ONE).await.group;
    account.open(group.as_str(), 9000).await;
    let shown = |inventory: Inventory| inventory.groups.into_iter().find(|one| one.machine == Some(ONE));
    assert_eq!(shown(ec2.list().await.unwrap()).map(|group| group.open), Some(true));
    let other = MachineNumber::new(2);
    assert_eq!(
        ec2.revoke_all(other, &group).await.unwrap_err().kind(),
        "foreign",
        "the group of another machine"
    );
    account.front.take_counts();
    ec2.revoke_all(ONE, &group).await.unwrap();
    let calls = counts(&[("DescribeSecurityGroups", 1), ("RevokeSecurityGroupIngress", 1)]);
    assert_eq!(account.front.take_counts(), calls);
    assert_eq!(ports(&account.group("juju-prod-1").await.unwrap()), [9000]);
    assert_eq!(shown(ec2.list().await.unwrap()).map(|group| group.open), Some(false));
    account.front.take_counts();
    ec2.revoke_all(ONE, &group).await.unwrap();
    assert_eq!(account.front.take_counts(), counts(&[("DescribeSecurityGroups", 1)]), "already done");
    ec2.revoke_all(ONE, &GroupId::new("sg-0123456789abcdef0")).await.unwrap();
}

pub(crate) async fn unused_group_is_deleted(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let launched = launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    assert_eq!(ec2.terminate(MachineNumber::new(2), &launched.id).await.unwrap_err().kind(), "foreign");
    ec2.terminate(ONE, &launched.id).await.unwrap();
    ec2.terminate(ONE, &launched.id).await.unwrap();
    let shown = ec2.list().await.unwrap().instances;
    assert!(shown.iter().all(|instance| instance.state == InstanceState::Terminated));
    account.front.script("DeleteSecurityGroup", [Act::Refuse(400, "DependencyViolation")]);
    assert_eq!(ec2.delete_group(&group).await.unwrap_err().kind(), "still-in-use");
    assert!(account.group("juju-prod-1").await.is_some());
    account.front.script("DeleteSecurityGroup", [Act::LoseAnswer]);
    account.front.take_counts();
    assert_eq!(ec2.delete_group(&group).await.unwrap_err().kind(), "ambiguous");
    ec2.delete_group(&group).await.unwrap();
    assert_eq!(
        account.front.take_counts(),
        counts(&[("DeleteSecurityGroup", 1), ("DescribeSecurityGroups", 2)])
    );
    assert!(account.group("juju-prod-1").await.is_none());
    ec2.delete_group(&group).await.unwrap();
}

pub(crate) async fn list_contains_exactly_our_objects(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let (one, two) = (launch(&ec2, 1).await, launch(&ec2, 2).await);
    account.make_instance().await;
    account.make_group("theirs", &account.default_vpc().await).await;
    account.front.take_counts();
    let inventory = ec2.list().await.unwrap();
    assert_eq!(
        account.front.take_counts(),
        counts(&[("DescribeInstances", 1), ("DescribeSecurityGroups", 1)])
    );
    let ids: BTreeSet<&InstanceId> = inventory.instances.iter().map(|instance| &instance.id).collect();
    assert_eq!(ids, BTreeSet::from([&one.id, &two.id]));
    let mut machines: Vec<Option<u32>> =
        inventory.groups.iter().map(|group| group.machine.map(MachineNumber::get)).collect();
    machines.sort();
    assert_eq!(machines, [None, Some(1), Some(2)]);
    assert!(inventory.instances.iter().all(|one| one.private_address.is_some()));
}
