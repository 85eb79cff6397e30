//! The number of calls that operations need.

use super::{change, counts, tcp};
use crate::cloud::{Account, STORE, tags};
use crate::suite::in_time;
use aws_sdk_ec2::types::ResourceType;
use portcullis_provider::ec2::Ec2;
use portcullis_provider::provider::{Firewall, MachineNumber, Machines, Seen};
use portcullis_provider::rule::Change;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Creates groups with our tags, as if a driver had created them long ago.
async fn make_groups(account: &Arc<Account>, numbers: std::ops::Range<u32>) {
    let vpc = account.default_vpc().await;
    let mut making = tokio::task::JoinSet::new();
    for number in numbers {
        let (account, vpc) = (Arc::clone(account), vpc.clone());
        making.spawn(async move {
            let name = format!("juju-prod-{number}");
            let request = account.other.create_security_group().group_name(name).description("d").vpc_id(vpc);
            request
                .tag_specifications(tags(ResourceType::SecurityGroup, "group", ("prod", STORE), number))
                .send()
                .await
                .unwrap();
        });
        if making.len() >= 8 {
            making.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(made) = making.join_next().await {
        made.unwrap();
    }
}

async fn apply_all(ec2: &Arc<Ec2>, machines: &BTreeSet<MachineNumber>, change: &Change) {
    let mut applying = tokio::task::JoinSet::new();
    for &machine in machines {
        let (ec2, change) = (Arc::clone(ec2), change.clone());
        applying.spawn(async move { assert!(ec2.apply(machine, &change, in_time()).await.is_ok()) });
        if applying.len() >= 8 {
            applying.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(applied) = applying.join_next().await {
        applied.unwrap();
    }
}

pub(crate) async fn fifty_groups_need_one_call_per_change(account: Arc<Account>) {
    make_groups(&account, 0..50).await;
    let machines: BTreeSet<MachineNumber> = (0..50).map(MachineNumber::new).collect();
    let ec2 = Arc::new(account.ec2("prod"));
    let (describe, vpcs) = (("DescribeSecurityGroups", 1), ("DescribeVpcs", 1));
    let (open, close) = (("AuthorizeSecurityGroupIngress", 50), ("RevokeSecurityGroupIngress", 50));

    let began = Instant::now();
    ec2.observe(&machines).await.unwrap();
    apply_all(&ec2, &machines, &change(&[80, 443, 8080], &[])).await;
    println!("50 groups, 3 ports each, opened in {:?}", began.elapsed());
    assert_eq!(account.front.take_counts(), counts(&[describe, vpcs, open]));

    let began = Instant::now();
    let seen = ec2.observe(&machines).await.unwrap();
    println!("50 groups, nothing to do: {:?}", began.elapsed());
    let open_ports =
        |seen: &Seen| matches!(seen, Seen::Present(rules) if rules.owned == tcp(&[80, 443, 8080]));
    assert!(seen.len() == 50 && seen.values().all(open_ports));
    assert_eq!(account.front.take_counts(), counts(&[describe]));

    let ec2 = Arc::new(account.ec2("prod"));
    let began = Instant::now();
    ec2.observe(&machines).await.unwrap();
    apply_all(&ec2, &machines, &change(&[8081], &[8080])).await;
    println!("50 groups, one port swapped on each, after a restart: {:?}", began.elapsed());
    assert_eq!(account.front.take_counts(), counts(&[describe, vpcs, open, close]));
    assert_eq!(ec2.requests().values().sum::<u64>(), 102, "the driver counts the same number");
}

pub(crate) async fn many_machines_are_read_with_few_calls(account: Arc<Account>) {
    make_groups(&account, 0..250).await;
    let ec2 = account.ec2("prod");
    let ask = |count| (0..count).map(MachineNumber::new).collect::<BTreeSet<_>>();
    for asked in [198, 199, 250] {
        let seen = ec2.observe(&ask(asked)).await.unwrap();
        assert_eq!(seen.len(), usize::try_from(asked).unwrap());
        assert!(seen.values().all(|seen| matches!(seen, Seen::Present(_))));
        assert_eq!(account.front.take_counts().get("DescribeSecurityGroups"), Some(&1), "for {asked}");
    }
    let seen = ec2.observe(&ask(260)).await.unwrap();
    assert_eq!(seen.values().filter(|seen| **seen == Seen::Absent).count(), 10);
    assert_eq!(ec2.list().await.unwrap().groups.len(), 250);
}
