//! The contract of every firewall driver. A driver's own tests start its backend, pass it in as a
//! [`Bench`], and do not repeat these checks.

#![allow(clippy::unwrap_used, reason = "only tests call this")]

use portcullis_provider::provider::{Firewall, MachineNumber, MachineRules, Seen};
use portcullis_provider::rule::{Change, Cidr, PortRange, Protocol, Rule, RuleSet};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// A firewall to test, with a machine that has no rules of ours.
#[derive(Debug)]
pub(crate) struct Bench<F> {
    pub(crate) firewall: F,
    pub(crate) machine: MachineNumber,
    /// A machine that the firewall does not have.
    pub(crate) absent: MachineNumber,
    /// Whether changes take effect. If not, as in a dry run, nothing at all may change.
    pub(crate) keeps: bool,
}

/// Runs all checks, in an order that leaves no rules behind.
pub(crate) async fn holds<F: Firewall>(bench: &Bench<F>) {
    starts_without_rules(bench).await;
    observe_returns_every_requested_machine(bench).await;
    opens_and_closes(bench).await;
    no_change_begins_after_its_deadline(bench).await;
    repeated_changes_succeed(bench).await;
    ranges_shrink_and_grow(bench).await;
    sources_and_protocols_are_separate(bench).await;
    written_rules_are_read_back(bench).await;
}

pub(crate) fn rule(from: u16, to: u16, proto: Protocol, source: &str) -> Rule {
    Rule::new(PortRange::new(from, to, proto).unwrap(), source.parse().unwrap())
}

fn tcp(port: u16) -> Rule {
    rule(port, port, Protocol::Tcp, "0.0.0.0/0")
}

pub(crate) async fn seen<F: Firewall>(firewall: &F, machine: MachineNumber) -> MachineRules {
    let mut all = firewall.observe(&BTreeSet::from([machine])).await.unwrap();
    match all.remove(&machine) {
        Some(Seen::Present(rules)) => rules,
        other => panic!("machine {machine} should be there, got {other:?}"),
    }
}

/// Returns a deadline that is never reached.
pub(crate) fn in_time() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

impl<F: Firewall> Bench<F> {
    async fn owned(&self) -> RuleSet {
        seen(&self.firewall, self.machine).await.owned.iter().collect()
    }

    async fn apply(&self, open: &[Rule], close: &[Rule]) {
        let change = Change { open: open.iter().copied().collect(), close: close.iter().copied().collect() };
        self.carry_out(&change).await;
    }

    /// Applies a change, and checks that it reports success only if changes take effect.
    async fn carry_out(&self, change: &Change) {
        let applied = self.firewall.apply(self.machine, change, in_time()).await;
        for (half, rules) in [(applied.opened, &change.open), (applied.closed, &change.close)] {
            let refused = half.err().map(|error| error.kind());
            assert_eq!(refused, (!self.keeps && !rules.is_empty()).then_some("dry-run"));
        }
    }

    /// Reads, plans, applies and reads again, as an agent does.
    async fn reach(&self, wanted: &[Rule]) {
        let wanted: RuleSet = wanted.iter().collect();
        let before = seen(&self.firewall, self.machine).await;
        self.carry_out(&Change::between(&before.owned, &wanted)).await;
        let after = seen(&self.firewall, self.machine).await;
        if self.keeps {
            assert_eq!(after.owned.iter().collect::<RuleSet>(), wanted);
            assert!(Change::between(&after.owned, &wanted).is_empty(), "converged, so nothing to do");
            assert_eq!(after.drift, Vec::<String>::new());
        } else {
            assert_eq!(after, before);
        }
        assert_eq!(after.group, before.group);
        assert_eq!(after.foreign, before.foreign);
    }

    async fn assert_owned(&self, wanted: &[Rule]) {
        let wanted: RuleSet = if self.keeps { wanted.iter().collect() } else { RuleSet::new() };
        assert_eq!(self.owned().await, wanted);
    }
}

async fn starts_without_rules<F: Firewall>(bench: &Bench<F>) {
    assert!(bench.owned().await.is_empty());
}

async fn observe_returns_every_requested_machine<F: Firewall>(bench: &Bench<F>) {
    let all = bench.firewall.observe(&BTreeSet::from([bench.machine, bench.absent])).await.unwrap();
    assert_eq!(all.len(), 2);
    assert!(matches!(all[&bench.machine], Seen::Present(_)));
    assert_eq!(all[&bench.absent], Seen::Absent);
    assert!(bench.firewall.observe(&BTreeSet::new()).await.unwrap().is_empty());
    if bench.keeps {
        let change = Change { open: [tcp(80)].into(), close: [tcp(81)].into() };
        let applied = bench.firewall.apply(bench.absent, &change, in_time()).await;
        for half in [applied.opened, applied.closed] {
            assert_eq!(half.unwrap_err().kind(), "not-found");
        }
        assert!(bench.owned().await.is_empty(), "no other machine has these rules");
    }
}

async fn opens_and_closes<F: Firewall>(bench: &Bench<F>) {
    bench.apply(&[tcp(80), tcp(443)], &[]).await;
    bench.assert_owned(&[tcp(80), tcp(443)]).await;
    bench.apply(&[tcp(8080)], &[tcp(80)]).await;
    bench.assert_owned(&[tcp(443), tcp(8080)]).await;
    bench.apply(&[], &[tcp(443), tcp(8080)]).await;
    bench.assert_owned(&[]).await;
}

async fn no_change_begins_after_its_deadline<F: Firewall>(bench: &Bench<F>) {
    bench.apply(&[tcp(80)], &[]).await;
    if bench.keeps {
        let change = Change { open: [tcp(81)].into(), close: [tcp(80)].into() };
        let applied = bench.firewall.apply(bench.machine, &change, Instant::now()).await;
        for half in [applied.opened, applied.closed] {
            assert_eq!(half.unwrap_err().kind(), "not-begun");
        }
    }
    bench.assert_owned(&[tcp(80)]).await;
    bench.apply(&[], &[tcp(80)]).await;
    bench.assert_owned(&[]).await;
}

async fn repeated_changes_succeed<F: Firewall>(bench: &Bench<F>) {
    bench.apply(&[], &[tcp(80)]).await;
    bench.assert_owned(&[]).await;
    for _ in 0..2 {
        bench.apply(&[tcp(80)], &[]).await;
    }
    bench.assert_owned(&[tcp(80)]).await;
    bench.apply(&[tcp(80), tcp(82)], &[tcp(9)]).await;
    bench.assert_owned(&[tcp(80), tcp(82)]).await;
    bench.apply(&[], &[]).await;
    bench.assert_owned(&[tcp(80), tcp(82)]).await;
    bench.apply(&[], &[tcp(80), tcp(82), tcp(84)]).await;
    bench.assert_owned(&[]).await;
}

async fn ranges_shrink_and_grow<F: Firewall>(bench: &Bench<F>) {
    let range = |from, to| rule(from, to, Protocol::Tcp, "0.0.0.0/0");
    for wanted in [
        &[range(8000, 8080)][..],
        &[range(8000, 8000)],
        &[range(8000, 8001)],
        &[range(8001, 8003), range(1, 1)],
        &[range(1, 65535)],
        &[range(1, 21), range(23, 65535)],
        &[],
    ] {
        bench.reach(wanted).await;
    }
}

async fn sources_and_protocols_are_separate<F: Firewall>(bench: &Bench<F>) {
    use Protocol::{Tcp, Udp};
    let everything = [
        rule(53, 53, Tcp, "0.0.0.0/0"),
        rule(53, 53, Udp, "0.0.0.0/0"),
        rule(53, 53, Tcp, "::/0"),
        rule(53, 53, Udp, "::/0"),
        rule(53, 60, Tcp, "10.0.0.0/8"),
        rule(55, 70, Tcp, "10.1.0.0/16"),
        rule(53, 53, Tcp, "192.0.2.1/32"),
        rule(53, 53, Tcp, "2001:db8::/32"),
        rule(53, 53, Tcp, "::ffff:192.0.2.1/128"),
    ];
    bench.reach(&everything).await;
    for left_out in 0..everything.len() {
        let mut rest = everything.to_vec();
        rest.remove(left_out);
        bench.reach(&rest).await;
    }
    bench.reach(&[]).await;
}

async fn written_rules_are_read_back<F: Firewall>(bench: &Bench<F>) {
    let odd_ports: Vec<Rule> = (0..25).map(|n| tcp(1001 + 2 * n)).collect();
    bench.reach(&odd_ports).await;
    let worlds = [Cidr::WORLD_V4, Cidr::WORLD_V6];
    let touching: Vec<Rule> = (2000..2025)
        .flat_map(|port| {
            worlds.map(|world| Rule::new(PortRange::single(port, Protocol::Udp).unwrap(), world))
        })
        .collect();
    bench.reach(&touching).await;
    bench.reach(&[]).await;
}
