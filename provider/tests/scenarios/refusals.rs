//! EC2's errors and missing replies, one by one.

use super::{ONE, change, counts, seen, tcp};
use crate::cloud::front::Act;
use crate::cloud::{Account, launch, request, xml};
use crate::suite::in_time;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_sdk_ec2::config::Credentials;
use portcullis_provider::Error;
use portcullis_provider::ec2::{Ec2, Timeouts};
use portcullis_provider::provider::{Firewall, Machines, Seen};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const OPEN: &str = "AuthorizeSecurityGroupIngress";
const CLOSE: &str = "RevokeSecurityGroupIngress";
const READ: &str = "DescribeSecurityGroups";

/// Returns a driver with a machine whose ports 80 and 81 are open, and resets the counters.
async fn ready(account: &Account) -> Ec2 {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80, 81], &[]), in_time()).await.is_ok());
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81]));
    account.front.take_counts();
    ec2
}

fn kind(result: &Result<(), Error>) -> &'static str {
    result.as_ref().map_or_else(Error::kind, |()| "ok")
}

pub(crate) async fn duplicate_rule_in_a_batch_is_skipped(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidPermission.Duplicate")]);
    assert!(ec2.apply(ONE, &change(&[81, 82], &[]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 2), (READ, 1)]), "refused, read, the rest");
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]));
    account.front.take_counts();
    account.front.script(OPEN, [Act::Refuse(400, "InvalidPermission.Duplicate")]);
    assert!(ec2.apply(ONE, &change(&[81], &[]), in_time()).await.is_ok());
    assert_eq!(
        account.front.take_counts(),
        counts(&[(OPEN, 1), (READ, 1)]),
        "no rule is left, so no second request"
    );
    account.front.always(OPEN, Act::Refuse(400, "InvalidPermission.Duplicate"));
    let applied = ec2.apply(ONE, &change(&[90], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "conflict", "the read does not show the rule yet");
    let text = applied.opened.unwrap_err().to_string();
    assert!(text.contains("group juju-prod-1 (sg-"), "{text}");
    account.front.reset();
    assert!(ec2.apply(ONE, &change(&[90], &[]), in_time()).await.is_ok());
}

pub(crate) async fn missing_rule_in_a_batch_is_skipped(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(CLOSE, [Act::Refuse(400, "InvalidPermission.NotFound")]);
    assert!(ec2.apply(ONE, &change(&[], &[80, 99]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(CLOSE, 2), (READ, 1)]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]));
}

pub(crate) async fn missing_rule_in_a_default_vpc_counts_as_closed(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(CLOSE, [Act::Answer(xml::revoked_nothing())]);
    assert!(ec2.apply(ONE, &change(&[], &[99]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(CLOSE, 1)]));
}

pub(crate) async fn invalid_request_is_not_repeated(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidParameterValue")]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("invalid", "ok"));
    assert_eq!(
        account.front.take_counts(),
        counts(&[(OPEN, 1), (CLOSE, 1)]),
        "the same request is not repeated"
    );
}

pub(crate) async fn missing_group_is_reported(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    let group = seen(&ec2, ONE).await.group;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidGroup.NotFound")]);
    let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "not-found", "the group may be new");
    assert!(ec2.apply(ONE, &change(&[82], &[]), in_time()).await.is_ok(), "the group exists now");
    account.other.delete_security_group().group_id(group.as_str()).send().await.unwrap();
    let applied = ec2.apply(ONE, &change(&[83], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "not-found");
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    assert_eq!(ec2.delete_group(&group).await, Ok(()), "deleting a missing group succeeds");
}

pub(crate) async fn existing_group_with_our_tags_is_used(account: Arc<Account>) {
    let ec2 = account.ec2("prod");
    launch(&ec2, 1).await;
    let group = account.group("juju-prod-1").await.unwrap().group_id.unwrap();
    let other = account.ec2("prod");
    let instance = ec2.list().await.unwrap().instances.remove(0).id;
    // The first read does not show the group yet; the second one, by name, does.
    let nothing = "<DescribeSecurityGroupsResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\">\
                   <securityGroupInfo/></DescribeSecurityGroupsResponse>";
    account.front.script(READ, [Act::Answer(nothing.to_owned())]);
    account.front.take_counts();
    assert_eq!(
        other.ensure_group(ONE, &instance).await.unwrap().as_str(),
        group,
        "the existing group has our tags"
    );
    let calls = counts(&[("DescribeInstances", 1), (READ, 2), ("CreateSecurityGroup", 1)]);
    assert_eq!(account.front.take_counts(), calls);
    account.front.script(READ, [Act::Answer(nothing.to_owned()), Act::Answer(nothing.to_owned())]);
    assert_eq!(
        other.ensure_group(ONE, &instance).await.unwrap_err().kind(),
        "not-found",
        "reads are stale: retry later"
    );
}

pub(crate) async fn rule_limit_is_reported_and_closes_continue(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "RulesPerSecurityGroupLimitExceeded")]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("quota-exceeded", "ok"), "closes continue");
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]));
    assert_eq!(ec2.rules_per_family(), Some(60));
    let many: Vec<u16> = (0..100).map(|n| 1001 + 2 * n).collect();
    let applied = ec2.apply(ONE, &change(&many, &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "quota-exceeded", "LocalStack's own error code");
    let there = seen(&ec2, ONE).await.owned;
    assert!(there.len() <= 60 && there.contains(tcp(&[81]).first().unwrap()), "existing rules are reported");
}

/// Credentials that expire after one request and are available only from a given time on.
#[derive(Debug, Clone)]
struct Slow {
    account: String,
    had_at: Arc<Mutex<tokio::time::Instant>>,
}

impl ProvideCredentials for Slow {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let had_at = *self.had_at.lock().unwrap();
        let expired = Some(std::time::SystemTime::now());
        let credentials = Credentials::new(self.account.clone(), "secret", None, expired, "test");
        future::ProvideCredentials::new(async move {
            tokio::time::sleep_until(had_at).await;
            Ok(credentials)
        })
    }
}

pub(crate) async fn request_is_not_sent_after_its_deadline(account: Arc<Account>) {
    let had_at = Arc::new(Mutex::new(tokio::time::Instant::now()));
    let slow = Slow { account: account.number.clone(), had_at: Arc::clone(&had_at) };
    let ec2 = account.connect_as(account.settings("prod"), SharedCredentialsProvider::new(slow));
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok(), "slow credentials are accepted");
    seen(&ec2, ONE).await;
    account.front.take_counts();
    let until = tokio::time::Instant::now() + Duration::from_millis(100);
    *had_at.lock().unwrap() = until;
    let applied = ec2.apply(ONE, &change(&[81], &[80]), until).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("not-begun", "not-begun"));
    assert_eq!(account.front.take_counts(), counts(&[]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80]));
}

pub(crate) async fn throttled_reads_are_repeated_and_writes_are_not(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(503, "RequestLimitExceeded"), Act::Refuse(400, "Throttling")]);
    for expected in ["throttled", "throttled", "ok"] {
        let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
        assert_eq!(kind(&applied.opened), expected, "one request each, without retries in the SDK");
    }
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 3)]));
    assert!(ec2.pace() < 1.0, "later calls are slower");
    account.front.script(READ, [Act::Refuse(503, "RequestLimitExceeded"), Act::Refuse(500, "InternalError")]);
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]), "reads are repeated");
    assert_eq!(account.front.take_counts(), counts(&[(READ, 3)]));
}

pub(crate) async fn throttled_opens_do_not_delay_closes(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    let two = launch(&ec2, 2).await.machine;
    assert!(ec2.apply(two, &change(&[80], &[]), in_time()).await.is_ok());
    account.front.take_counts();
    account.front.always(OPEN, Act::Refuse(503, "RequestLimitExceeded"));
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("throttled", "ok"), "closes continue");
    for _ in 0..2 {
        let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
        assert_eq!(kind(&applied.opened), "throttled");
    }
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 3), (CLOSE, 1)]));
    assert!(ec2.pace() < 0.2, "{}", ec2.pace());
    account.front.reset();
    let late = ec2.apply(ONE, &change(&[82], &[]), soon()).await;
    assert_eq!(kind(&late.opened), "not-begun", "a call that cannot wait for a token is not sent");
    assert_eq!(account.front.take_counts(), counts(&[]));
    let done = async |machine, change| {
        assert!(ec2.apply(machine, &change, in_time()).await.is_ok());
        Instant::now()
    };
    let (opened, closed) = tokio::join!(done(ONE, change(&[82], &[])), done(two, change(&[], &[80])));
    assert!(closed < opened, "opens wait for the budget, and closes do not wait for opens");
    account.front.always(READ, Act::Refuse(503, "RequestLimitExceeded"));
    account.front.take_counts();
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap_err().kind(), "throttled");
    assert_eq!(account.front.take_counts(), counts(&[(READ, 3)]), "retries of reads are limited");
}

/// Returns a deadline before an action that was throttled has a token again.
fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_millis(100)
}

pub(crate) async fn server_errors_are_ambiguous_or_unavailable(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(500, "InternalError")]);
    account.front.always(CLOSE, Act::Refuse(503, "Unavailable"));
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("ambiguous", "unavailable"));
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 1), (CLOSE, 1)]), "once each");
    account.front.reset();
    assert!(ec2.apply(ONE, &change(&[82], &[]), in_time()).await.is_ok());
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]));
}

pub(crate) async fn missing_permission_is_reported(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    for (status, code) in [(403, "UnauthorizedOperation"), (401, "AuthFailure"), (400, "ExpiredToken")] {
        account.front.always(OPEN, Act::Refuse(status, code));
        account.front.always("RunInstances", Act::Refuse(status, code));
        let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
        let error = applied.opened.unwrap_err();
        assert_eq!(error.kind(), "denied");
        assert!(error.to_string().ends_with(&format!("{code}: as scripted")), "{error}");
        assert_eq!(ec2.launch(&request(2)).await.unwrap_err().kind(), "denied");
    }
    let sent = account.front.take_counts();
    assert_eq!((sent[OPEN], sent["RunInstances"]), (3, 3), "once each, without retries");
}

pub(crate) async fn repeated_change_succeeds_after_a_lost_reply(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::LoseAnswer]);
    account.front.script(CLOSE, [Act::LoseAnswer]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("ambiguous", "ambiguous"));
    assert!(
        ec2.apply(ONE, &change(&[82], &[80]), in_time()).await.is_ok(),
        "the repeated change had been applied"
    );
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 2), (CLOSE, 2), (READ, 2)]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81, 82]));
}

pub(crate) async fn missing_reply_is_ambiguous(account: Arc<Account>) {
    let patient = ready(&account).await;
    let mut settings = account.settings("prod");
    let short = Duration::from_secs(2);
    settings.timeouts = Timeouts { request: short, read: short, reads: 1, ..settings.timeouts };
    let ec2 = account.connect(settings);
    let deadline = Instant::now() + Duration::from_secs(60);
    while ec2.observe(&BTreeSet::from([ONE])).await.is_err() {
        assert!(Instant::now() < deadline, "LocalStack never answers within 2 s");
    }
    account.front.script(OPEN, [Act::Silence]);
    account.front.script(CLOSE, [Act::Silence]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("ambiguous", "ambiguous"));
    while seen(&patient, ONE).await.owned != tcp(&[81, 82]) {
        assert!(Instant::now() < deadline, "both changes were applied");
    }
    account.front.script(READ, [Act::Silence]);
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap_err().kind(), "unavailable");
}
