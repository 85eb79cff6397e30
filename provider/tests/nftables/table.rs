//! Tests of the table itself: beside other tables, after a restart, changed by hand, or foreign.

use super::netns::{Attempt, MACHINE, Net, SERVER};
use super::suite::{in_time, rule, seen};
use super::{WORLD, address, apply, change, tcp};
use portcullis_provider::nftables::Mode;
use portcullis_provider::provider::{Applied, Firewall};
use portcullis_provider::rule::Protocol;
use std::collections::BTreeSet;

#[tokio::test]
async fn other_tables_are_unchanged_and_effective() {
    let net = Net::new();
    let [ours, dropped, elsewhere] = [SERVER; 3].map(|address| net.listen(address));
    let [ours, dropped, elsewhere] = [&ours, &dropped, &elsewhere].map(address);
    net.nft(&["add table inet other"]);
    net.nft(&["add chain inet other input { type filter hook input priority -5; policy accept; }"]);
    net.nft(&[&format!("add rule inet other input tcp dport {} drop", dropped.port())]);
    net.nft(&[&format!("add rule inet other input tcp dport {} accept", elsewhere.port())]);
    net.nft(&["add table ip portcullis-test"]);
    let before = ["inet other", "ip portcullis-test"].map(|table| net.nft(&["-a", "list table", table]));

    let firewall = net.firewall(Mode::Enforce, &[]);
    apply(&firewall, &[tcp(ours.port()), tcp(dropped.port())], &[]).await;
    assert_eq!(net.attempt(ours), Attempt::Connected);
    assert_eq!(net.attempt(dropped), Attempt::TimedOut, "another table's drop wins over our accept");
    assert_eq!(
        net.attempt(elsewhere),
        Attempt::Refused,
        "another table's accept does not open what we reject"
    );
    apply(&firewall, &[], &[tcp(ours.port())]).await;
    let after = ["inet other", "ip portcullis-test"].map(|table| net.nft(&["-a", "list table", table]));
    assert_eq!(after, before);
}

#[tokio::test]
async fn accept_mode_closes_nothing() {
    let net = Net::new();
    let [open, shut] = [SERVER; 2].map(|address| net.listen(address));
    let [open, shut] = [&open, &shut].map(address);
    let looking = net.firewall(Mode::AcceptOnly, &[]);
    apply(&looking, &[tcp(open.port())], &[]).await;
    assert_eq!([net.attempt(open), net.attempt(shut)], [Attempt::Connected, Attempt::Connected]);

    let enforcing = net.firewall(Mode::Enforce, &[]);
    let found = seen(&enforcing, MACHINE).await;
    assert_eq!(found.owned, [tcp(open.port())].into());
    assert_eq!(found.drift, ["its rules are not as we made them", "its policy is not to drop what comes in"]);
    apply(&enforcing, &[], &[]).await;
    assert_eq!(seen(&enforcing, MACHINE).await.drift, Vec::<String>::new());
    assert_eq!([net.attempt(open), net.attempt(shut)], [Attempt::Connected, Attempt::Refused]);
}

#[tokio::test]
async fn correct_table_is_not_rewritten_after_a_restart() {
    let net = Net::new();
    let rules = [
        rule(80, 80, Protocol::Tcp, WORLD),
        rule(8000, 8080, Protocol::Udp, "::/0"),
        rule(5432, 5432, Protocol::Tcp, "10.0.0.0/8"),
        rule(5400, 5500, Protocol::Tcp, "10.1.0.0/16"),
        rule(443, 443, Protocol::Tcp, "2001:db8::/32"),
    ];
    apply(&net.firewall(Mode::Enforce, &[22]), &rules, &[]).await;
    let second = net.firewall(Mode::Enforce, &[22]);
    let found = seen(&second, MACHINE).await;
    assert_eq!((found.owned, found.drift), (BTreeSet::from(rules), vec![]));
    assert_eq!(found.group.as_str(), "inet portcullis-test");

    // Every replacement gives the rules new handles.
    let before = net.nft(&["-a", "list table inet portcullis-test"]);
    apply(&second, &rules, &[tcp(9999)]).await;
    apply(&second, &[], &[]).await;
    assert_eq!(net.nft(&["-a", "list table inet portcullis-test"]), before);
    apply(&second, &[tcp(9999)], &[]).await;
    assert_ne!(net.nft(&["-a", "list table inet portcullis-test"]), before);
}

#[tokio::test]
async fn changes_by_hand_are_reported_and_reverted() {
    let net = Net::new();
    let listener = net.listen(SERVER);
    let to = address(&listener);
    let firewall = net.firewall(Mode::Enforce, &[22]);
    let table = "inet portcullis-test";
    let wanted = tcp(to.port());
    for edit in [
        format!("delete table {table}"),
        format!("flush chain {table} input"),
        format!("insert rule {table} input drop"),
        format!("add chain {table} more {{ type filter hook input priority -1; policy drop; }}"),
        format!("add rule {table} protected_tcp th dport 23 accept"),
        format!("flush chain {table} protected_tcp"),
        format!("add chain {table} more"),
        format!("add map {table} more {{ type inet_service : verdict; }}"),
        format!("add chain {table} input {{ policy accept; }}"),
    ] {
        apply(&firewall, &[wanted], &[]).await;
        assert_eq!(net.attempt(to), Attempt::Connected);
        let whole = seen(&firewall, MACHINE).await;
        assert_eq!(whole.drift, Vec::<String>::new());
        net.nft(&[&edit]);
        let found = seen(&firewall, MACHINE).await;
        assert_ne!(found.drift, Vec::<String>::new(), "{edit}");
        apply(&firewall, &[wanted], &[]).await;
        assert_eq!(seen(&firewall, MACHINE).await, whole, "{edit}");
        assert_eq!(net.attempt(to), Attempt::Connected, "{edit}");
    }
    net.nft(&[&format!("flush chain {table} tcp_from_0.0.0.0/0")]);
    assert_eq!(
        seen(&firewall, MACHINE).await.owned,
        BTreeSet::new(),
        "a port that an edit has closed is not reported as open"
    );
    assert_eq!(net.attempt(to), Attempt::Refused);
}

#[tokio::test]
async fn foreign_table_with_our_name_is_unchanged() {
    let net = Net::new();
    net.nft(&["add table inet portcullis-test"]);
    net.nft(&["add chain inet portcullis-test mine { type filter hook input priority 0; }"]);
    net.nft(&["add rule inet portcullis-test mine accept"]);
    let before = net.nft(&["-a", "list ruleset"]);
    let firewall = net.firewall(Mode::Enforce, &[]);
    let refused = firewall.observe(&BTreeSet::from([MACHINE])).await.unwrap_err();
    let words = "group inet portcullis-test was not made by us: none of the rules in it has our \
                 mark; it is left alone";
    assert_eq!(refused.to_string(), words);
    assert_eq!(
        firewall.apply(MACHINE, &change(&[tcp(80)], &[]), in_time()).await,
        Applied::as_one(Err(refused))
    );
    assert_eq!(net.nft(&["-a", "list ruleset"]), before);
}

#[tokio::test]
async fn removing_the_table_opens_what_it_rejected_and_leaves_other_tables() {
    let net = Net::new();
    let listener = net.listen(SERVER);
    let closed = address(&listener);
    net.nft(&["add table inet other"]);
    let firewall = net.firewall(Mode::Enforce, &[]);
    assert_eq!(firewall.remove_table().await, Ok(false), "there is none yet");
    apply(&firewall, &[tcp(1)], &[]).await;
    assert_eq!(net.attempt(closed), Attempt::Refused);
    assert_eq!(firewall.remove_table().await, Ok(true));
    assert_eq!(net.attempt(closed), Attempt::Connected);
    assert_eq!(firewall.remove_table().await, Ok(false));
    assert!(net.nft(&["list tables"]).contains("table inet other"));

    net.nft(&["add table inet portcullis-test"]);
    net.nft(&["add chain inet portcullis-test theirs"]);
    net.nft(&["add rule inet portcullis-test theirs accept"]);
    assert!(firewall.remove_table().await.is_err(), "a table that another program made");
    assert!(net.nft(&["list tables"]).contains("table inet portcullis-test"));
}
