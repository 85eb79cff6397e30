//! Reads are complete and current, or fail.

use super::{ONE, change, counts, seen, tcp};
use crate::cloud::front::Act;
use crate::cloud::{Account, STORE, launch, tags};
use crate::suite::in_time;
use aws_sdk_ec2::types::ResourceType;
use portcullis_provider::provider::{Firewall, InstanceId, MachineNumber, Machines, Seen};
use portcullis_provider::rule::{Change, RuleSet};
use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) async fn all_pages_are_read(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    for machine in 1..=5 {
        launch(&ec2, machine).await;
        let applied = ec2.apply(MachineNumber::new(machine), &change(&[80], &[]), in_time()).await;
        assert!(applied.is_ok());
    }
    account.front.page_size(2);
    account.front.take_counts();
    let all = (1..=5).map(MachineNumber::new).collect::<BTreeSet<_>>();
    let seen = ec2.observe(&all).await.unwrap();
    let open = |seen: &Seen| matches!(seen, Seen::Present(rules) if rules.owned == tcp(&[80]));
    assert!(seen.values().all(open), "{seen:?}");
    assert_eq!(account.front.take_counts()["DescribeSecurityGroups"], 3);
    let listed = ec2.list().await.unwrap();
    assert_eq!((listed.groups.len(), listed.instances.len()), (6, 5), "including the environment's group");
    assert_eq!(
        account.front.take_counts(),
        counts(&[("DescribeSecurityGroups", 3), ("DescribeInstances", 3)])
    );
    account.front.script("DescribeSecurityGroups", [Act::Pass, Act::Refuse(503, "RequestLimitExceeded")]);
    assert_eq!(ec2.observe(&all).await.unwrap(), seen);
    let calls = account.front.take_counts()["DescribeSecurityGroups"];
    assert_eq!(calls, 4, "only the refused page is requested again");
}

/// There are three VPCs on three pages; the last two have IPv6.
pub(crate) async fn all_pages_of_vpcs_are_read(account: Arc<Account>) {
    for machine in 1..=3 {
        let made = account.other.create_vpc().cidr_block(format!("10.{machine}.0.0/16"));
        let made = made.amazon_provided_ipv6_cidr_block(machine > 1).send().await.unwrap();
        let vpc = made.vpc.unwrap().vpc_id.unwrap();
        let group = account.other.create_security_group().group_name(format!("juju-prod-{machine}"));
        let group = group.description("d").vpc_id(vpc);
        let tagged =
            group.tag_specifications(tags(ResourceType::SecurityGroup, "group", ("prod", STORE), machine));
        tagged.send().await.unwrap();
    }
    account.front.page_size(1);
    let all = (1..=3).map(MachineNumber::new).collect::<BTreeSet<_>>();
    let nothing = "<DescribeVpcsResponse><vpcSet/></DescribeVpcsResponse>";
    account.front.script("DescribeVpcs", [Act::Answer(nothing.to_owned())]);
    let hidden = account.ec2("prod").observe(&all).await.unwrap_err();
    assert!(hidden.to_string().contains("EC2 does not show the VPC vpc-"), "{hidden}");
    account.front.take_counts();
    let seen = account.ec2("prod").observe(&all).await.unwrap();
    let ipv6 = |seen: &Seen| matches!(seen, Seen::Present(rules) if rules.ipv6);
    assert_eq!(seen.values().map(ipv6).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(account.front.take_counts()["DescribeVpcs"], 3);
}

pub(crate) async fn stale_reads_do_not_undo_our_writes(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80]));
    assert!(ec2.apply(ONE, &change(&[443], &[80]), in_time()).await.is_ok());
    account.front.script("DescribeSecurityGroups", [Act::Late, Act::Late]);
    account.front.take_counts();
    let wanted: RuleSet = tcp(&[443]).iter().collect();
    for _ in 0..2 {
        let late = seen(&ec2, ONE).await;
        assert_eq!(late.owned, tcp(&[443]));
        assert!(Change::between(&late.owned, &wanted).is_empty(), "no change is due");
    }
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[443]));
    assert_eq!(account.front.take_counts(), counts(&[("DescribeSecurityGroups", 3)]));
    account.front.script("DescribeSecurityGroups", [Act::Pass]);
    assert_eq!(seen(&account.ec2("prod"), ONE).await.owned, tcp(&[443]), "EC2 has the same rules");
}

pub(crate) async fn new_group_is_used_before_reads_show_it(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    let instance = InstanceId::new(account.make_instance().await);
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    let group = ec2.ensure_group(ONE, &instance).await.unwrap();
    account.front.script("DescribeSecurityGroups", [Act::Late]);
    let late = seen(&ec2, ONE).await;
    assert_eq!(late.group, group);
    account.front.take_counts();
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[("AuthorizeSecurityGroupIngress", 1)]));
}

pub(crate) async fn of_several_groups_the_one_in_use_is_read(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    for _ in 0..5 {
        account.copy_group("juju-prod-1").await;
    }
    account.front.take_counts();
    assert_eq!(seen(&ec2, ONE).await.group, group);
    let calls = account.front.take_counts();
    assert_eq!((calls["DescribeSecurityGroups"], calls["DescribeInstances"]), (1, 1));
    assert_eq!(ec2.list().await.unwrap().groups.len(), 7, "the list includes unused groups");
}

pub(crate) async fn failed_reads_are_errors_and_not_empty_results(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    for (act, kind) in [
        (Act::Refuse(500, "InternalError"), "unavailable"),
        (Act::Refuse(503, "RequestLimitExceeded"), "throttled"),
        (Act::Refuse(403, "UnauthorizedOperation"), "denied"),
        (Act::Refuse(418, "NeverHeardOf"), "unusable"),
        (Act::LoseAnswer, "unavailable"),
        (Act::Answer("<nonsense".to_owned()), "unavailable"),
    ] {
        account.front.always("DescribeSecurityGroups", act.clone());
        account.front.always("DescribeInstances", act.clone());
        let error = ec2.observe(&BTreeSet::from([ONE])).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{act:?}: {error}");
        assert_eq!(ec2.list().await.unwrap_err().kind(), kind, "{act:?}");
    }
    account.front.reset();
    assert!(seen(&ec2, ONE).await.owned.is_empty());
}

pub(crate) async fn ipv6_of_a_vpc_is_reported(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    assert!(!seen(&ec2, ONE).await.ipv6);
    let made = account.other.create_vpc().cidr_block("10.0.0.0/16").amazon_provided_ipv6_cidr_block(true);
    let vpc = made.send().await.unwrap().vpc.unwrap().vpc_id.unwrap();
    let made = account.other.create_subnet().vpc_id(&vpc).cidr_block("10.0.1.0/24").send().await.unwrap();
    let mut settings = account.settings("six");
    settings.launch.as_mut().unwrap().subnet = made.subnet.unwrap().subnet_id;
    let six = account.connect(settings);
    launch(&six, 1).await;
    assert!(seen(&six, ONE).await.ipv6);
    let shared = account.group("juju-six").await.unwrap();
    let ssh = shared.ip_permissions().iter().find(|permission| permission.from_port() == Some(22)).unwrap();
    assert_eq!(ssh.ipv6_ranges().len(), 1, "ssh is open for IPv6, too");
    assert_eq!(shared.vpc_id(), Some(vpc.as_str()));
}

pub(crate) async fn foreign_rules_are_reported(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    account.open(group.as_str(), 9000).await;
    let foreign = seen(&ec2, ONE).await.foreign;
    assert_eq!(foreign.len(), 1);
    assert_eq!(foreign[0].text, "9000/tcp from 0.0.0.0/0");
    assert_eq!(foreign[0].exact, tcp(&[9000]).first().copied());
}
