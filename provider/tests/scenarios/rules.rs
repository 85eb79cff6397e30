//! Opening and closing ports while EC2 works without errors.

use super::{ONE, change, counts, seen, tcp};
use crate::cloud::{Account, launch};
use crate::suite::{Bench, holds, in_time};
use portcullis_provider::provider::{Applied, Firewall, MachineNumber};
use portcullis_provider::rule::{Change, RuleSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longer than the consistency window of a write.
const HANG: Duration = Duration::from_secs(60);

pub(crate) async fn ec2_fulfils_the_contract(account: Arc<Account>) {
    let firewall = account.ec2("prod");
    launch(&firewall, 1).await;
    holds(&Bench { firewall, machine: ONE, absent: MachineNumber::new(2), keeps: true }).await;
}

pub(crate) async fn change_is_one_request_to_open_and_one_to_close(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    seen(&ec2, ONE).await;
    account.front.take_counts();
    assert!(ec2.apply(ONE, &change(&[80, 443, 8080], &[]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[("AuthorizeSecurityGroupIngress", 1)]));
    assert!(ec2.apply(ONE, &change(&[81, 82], &[443, 8080]), in_time()).await.is_ok());
    let both = [("AuthorizeSecurityGroupIngress", 1), ("RevokeSecurityGroupIngress", 1)];
    assert_eq!(account.front.take_counts(), counts(&both));
    assert_eq!(ec2.apply(ONE, &change(&[], &[]), in_time()).await, Applied::as_one(Ok(())));
    assert_eq!(account.front.take_counts(), counts(&[]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]));
    let after_restart = account.ec2("prod");
    assert_eq!(seen(&after_restart, ONE).await.owned, tcp(&[80, 81, 82]));
}

pub(crate) async fn foreign_rules_stay(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    account.open(group.as_str(), 80).await;
    account.open(group.as_str(), 9000).await;
    assert!(
        ec2.apply(ONE, &change(&[80, 81], &[]), in_time()).await.is_ok(),
        "opening an open port succeeds"
    );
    let rules = seen(&ec2, ONE).await;
    assert_eq!(rules.owned, tcp(&[81]));
    assert_eq!(rules.foreign.len(), 2);
    let shut = Change::between(&rules.owned, &RuleSet::new());
    assert!(ec2.apply(ONE, &shut, in_time()).await.is_ok());
    let rules = seen(&ec2, ONE).await;
    assert!(rules.owned.is_empty());
    assert_eq!(rules.foreign.len(), 2, "unchanged");
}

pub(crate) async fn removed_rule_is_reported(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80, 81], &[]), in_time()).await.is_ok());
    let rules = seen(&ec2, ONE).await;
    account.close(rules.group.as_str(), 80).await;
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]), "earlier reads are not cached");
}

/// Another client revokes a rule before any describe has shown it.
pub(crate) async fn removed_rule_is_reported_without_a_read_before(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    let group = seen(&ec2, ONE).await.group;
    assert!(ec2.apply(ONE, &change(&[80, 81], &[]), in_time()).await.is_ok());
    account.close(group.as_str(), 80).await;
    // A describe within the consistency window of the write may lag behind it, so the rule counts
    // as open until the window is over.
    let begun = Instant::now();
    while seen(&ec2, ONE).await.owned != tcp(&[81]) {
        assert!(begun.elapsed() < HANG, "our own write hides the revoke");
    }
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]), "the revoke stays visible");
}
