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

pub(crate) async fn a_duplicate_in_a_batch(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidPermission.Duplicate")]);
    assert!(ec2.apply(ONE, &change(&[81, 82], &[]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 2), (READ, 1)]), "refused, read, the rest");
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]));
    account.front.take_counts();
    account.front.script(OPEN, [Act::Refuse(400, "InvalidPermission.Duplicate")]);
    assert!(ec2.apply(ONE, &change(&[81], &[]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 1), (READ, 1)]), "and no rest, no request");
    account.front.always(OPEN, Act::Refuse(400, "InvalidPermission.Duplicate"));
    let applied = ec2.apply(ONE, &change(&[90], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "conflict", "a reader that does not know of it yet");
    let text = applied.opened.unwrap_err().to_string();
    assert!(text.contains("group juju-prod-1 (sg-"), "{text}");
    account.front.behave();
    assert!(ec2.apply(ONE, &change(&[90], &[]), in_time()).await.is_ok());
}

pub(crate) async fn a_missing_rule_in_a_batch(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(CLOSE, [Act::Refuse(400, "InvalidPermission.NotFound")]);
    assert!(ec2.apply(ONE, &change(&[], &[80, 99]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(CLOSE, 2), (READ, 1)]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]));
}

pub(crate) async fn a_missing_rule_in_a_default_vpc(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(CLOSE, [Act::Answer(xml::revoked_nothing())]);
    assert!(ec2.apply(ONE, &change(&[], &[99]), in_time()).await.is_ok());
    assert_eq!(account.front.take_counts(), counts(&[(CLOSE, 1)]));
}

pub(crate) async fn the_same_permission_twice(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidParameterValue")]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("invalid", "ok"));
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 1), (CLOSE, 1)]), "never sent again as it is");
}

pub(crate) async fn a_group_that_is_not_there(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    let group = seen(&ec2, ONE).await.group;
    account.front.script(OPEN, [Act::Refuse(400, "InvalidGroup.NotFound")]);
    let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "not-found", "just made, it may be");
    assert!(ec2.apply(ONE, &change(&[82], &[]), in_time()).await.is_ok(), "and now it is there");
    account.other.delete_security_group().group_id(group.as_str()).send().await.unwrap();
    let applied = ec2.apply(ONE, &change(&[83], &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "not-found");
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap()[&ONE], Seen::Absent);
    assert_eq!(ec2.delete_group(&group).await, Ok(()), "gone is gone");
}

pub(crate) async fn a_name_that_is_taken(account: Arc<Account>) {
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
    assert_eq!(other.ensure_group(ONE, &instance).await.unwrap().as_str(), group, "taken by ourselves");
    let calls = counts(&[("DescribeInstances", 1), (READ, 2), ("CreateSecurityGroup", 1)]);
    assert_eq!(account.front.take_counts(), calls);
    account.front.script(READ, [Act::Answer(nothing.to_owned()), Act::Answer(nothing.to_owned())]);
    assert_eq!(other.ensure_group(ONE, &instance).await.unwrap_err().kind(), "not-found", "late: look again");
}

pub(crate) async fn too_many_rules(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(400, "RulesPerSecurityGroupLimitExceeded")]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("quota-exceeded", "ok"), "closes go on");
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81]));
    assert_eq!(ec2.rules_per_family(), Some(60));
    let many: Vec<u16> = (0..100).map(|n| 1001 + 2 * n).collect();
    let applied = ec2.apply(ONE, &change(&many, &[]), in_time()).await;
    assert_eq!(kind(&applied.opened), "quota-exceeded", "LocalStack's own words");
    let there = seen(&ec2, ONE).await.owned;
    assert!(there.len() <= 60 && there.contains(tcp(&[81]).first().unwrap()), "what is there is shown");
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

pub(crate) async fn nothing_is_sent_late_though_it_was_begun_in_time(account: Arc<Account>) {
    let had_at = Arc::new(Mutex::new(tokio::time::Instant::now()));
    let slow = Slow { account: account.number.clone(), had_at: Arc::clone(&had_at) };
    let ec2 = account.connect_as(account.settings("prod"), SharedCredentialsProvider::new(slow));
    launch(&ec2, 1).await;
    assert!(ec2.apply(ONE, &change(&[80], &[]), in_time()).await.is_ok(), "such credentials do");
    seen(&ec2, ONE).await;
    account.front.take_counts();
    let until = tokio::time::Instant::now() + Duration::from_millis(100);
    *had_at.lock().unwrap() = until;
    let applied = ec2.apply(ONE, &change(&[81], &[80]), until).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("not-begun", "not-begun"));
    assert_eq!(account.front.take_counts(), counts(&[]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80]));
}

pub(crate) async fn throttled_for_a_moment(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(503, "RequestLimitExceeded"), Act::Refuse(400, "Throttling")]);
    for expected in ["throttled", "throttled", "ok"] {
        let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
        assert_eq!(kind(&applied.opened), expected, "one request each, and nobody repeats it below us");
    }
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 3)]));
    assert!(ec2.pace() < 1.0, "and slower from now on");
    account.front.script(READ, [Act::Refuse(503, "RequestLimitExceeded"), Act::Refuse(500, "InternalError")]);
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]), "a look is taken again");
    assert_eq!(account.front.take_counts(), counts(&[(READ, 3)]));
}

pub(crate) async fn throttled_for_good(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    let two = launch(&ec2, 2).await.machine;
    assert!(ec2.apply(two, &change(&[80], &[]), in_time()).await.is_ok());
    account.front.take_counts();
    account.front.always(OPEN, Act::Refuse(503, "RequestLimitExceeded"));
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("throttled", "ok"), "closes go on");
    for _ in 0..2 {
        let applied = ec2.apply(ONE, &change(&[82], &[]), in_time()).await;
        assert_eq!(kind(&applied.opened), "throttled");
    }
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 3), (CLOSE, 1)]));
    assert!(ec2.pace() < 0.2, "{}", ec2.pace());
    account.front.behave();
    let late = ec2.apply(ONE, &change(&[82], &[]), soon()).await;
    assert_eq!(kind(&late.opened), "not-begun", "who may not wait for the budget sends nothing");
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
    assert_eq!(account.front.take_counts(), counts(&[(READ, 3)]), "looks have an end");
}

/// Returns a deadline before an action that was throttled has a token again.
fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_millis(100)
}

pub(crate) async fn trouble_inside(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::Refuse(500, "InternalError")]);
    account.front.always(CLOSE, Act::Refuse(503, "Unavailable"));
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("ambiguous", "unavailable"));
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 1), (CLOSE, 1)]), "once each");
    account.front.behave();
    assert!(ec2.apply(ONE, &change(&[82], &[]), in_time()).await.is_ok());
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[80, 81, 82]));
}

pub(crate) async fn denied(account: Arc<Account>) {
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
    assert_eq!((sent[OPEN], sent["RunInstances"]), (3, 3), "once each: asking again helps nobody");
}

pub(crate) async fn an_answer_that_got_lost(account: Arc<Account>) {
    let ec2 = ready(&account).await;
    account.front.script(OPEN, [Act::LoseAnswer]);
    account.front.script(CLOSE, [Act::LoseAnswer]);
    let applied = ec2.apply(ONE, &change(&[82], &[80]), in_time()).await;
    assert_eq!((kind(&applied.opened), kind(&applied.closed)), ("ambiguous", "ambiguous"));
    assert!(ec2.apply(ONE, &change(&[82], &[80]), in_time()).await.is_ok(), "said again, it was so already");
    assert_eq!(account.front.take_counts(), counts(&[(OPEN, 2), (CLOSE, 2), (READ, 2)]));
    assert_eq!(seen(&ec2, ONE).await.owned, tcp(&[81, 82]));
}

pub(crate) async fn no_answer_at_all(account: Arc<Account>) {
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
        assert!(Instant::now() < deadline, "both were done, sooner or later");
    }
    account.front.script(READ, [Act::Silence]);
    assert_eq!(ec2.observe(&BTreeSet::from([ONE])).await.unwrap_err().kind(), "unavailable");
}
