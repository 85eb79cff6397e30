//! Tests of plans, with tables and with properties.

use super::*;
use crate::firewall::wanted::{PortRequest, wanted};
use portcullis_provider::rule::{Cidr, Family, PortRange, Protocol};
use proptest::prelude::*;

fn rule(from: u16, to: u16) -> Rule {
    Rule::new(PortRange::new(from, to, Protocol::Tcp).unwrap(), Cidr::WORLD_V4)
}

fn rules(ranges: &[(u16, u16)]) -> BTreeSet<Rule> {
    ranges.iter().map(|&(from, to)| rule(from, to)).collect()
}

fn set(ranges: &[(u16, u16)]) -> RuleSet {
    rules(ranges).iter().collect()
}

fn capacity(rules: usize) -> Capacity {
    Capacity::new(Some(rules), &[], false)
}

fn usual() -> Policy {
    Policy::with_own_ports([])
}

fn unit(n: u32) -> UnitId {
    UnitId::new(n)
}

fn asking(ports: &[(u16, u16)], frozen: bool) -> Wanted {
    let ports = ports.iter().map(|&(from, to)| rule(from, to).ports).collect();
    let mut requests =
        BTreeMap::from([(unit(0), PortRequest::Exposed { ports, sources: vec![Cidr::WORLD_V4] })]);
    if frozen {
        requests.insert(unit(1), PortRequest::Frozen { reason: "garbage".into() });
    }
    wanted(&requests, &[Family::V4], &usual())
}

#[test]
fn a_frozen_unit_keeps_its_open_ports_and_gets_no_others() {
    let last =
        LastGranted::from([(unit(0), set(&[(80, 80), (81, 81)])), (unit(1), set(&[(443, 443), (444, 444)]))]);
    let owned = rules(&[(80, 80), (81, 81), (443, 443)]);
    let plan =
        plan_machine(&asking(&[(80, 80)], true), &owned, &BTreeSet::new(), &last, &usual(), capacity(50));
    // The readable unit closes 81; 443 stays; 444 is not opened for the unreadable unit.
    assert_eq!(plan.change, Change { open: BTreeSet::new(), close: rules(&[(81, 81)]) });
    assert_eq!(plan.kept_for_frozen, set(&[(443, 443)]));
}

#[test]
fn a_port_opened_before_the_report_was_lost_stays_open() {
    let last = LastGranted::from([(unit(0), set(&[(80, 80)])), (unit(1), set(&[(443, 443)]))]);
    let owned = rules(&[(80, 80), (443, 443), (444, 444)]);
    let plan = plan_machine(&asking(&[], true), &owned, &BTreeSet::new(), &last, &usual(), capacity(50));
    assert_eq!(plan.change, Change { open: BTreeSet::new(), close: rules(&[(80, 80)]) });
}

#[test]
fn without_a_report_about_a_frozen_unit_no_port_is_closed() {
    let owned = rules(&[(80, 80), (443, 443)]);
    let plan = plan_machine(
        &asking(&[(8080, 8080)], true),
        &owned,
        &BTreeSet::new(),
        &LastGranted::new(),
        &usual(),
        capacity(50),
    );
    assert_eq!(plan.change, Change { open: rules(&[(8080, 8080)]), close: BTreeSet::new() });
}

#[test]
fn forbidden_ports_are_closed_although_a_unit_is_unreadable() {
    let strict =
        Policy::parse("forbidden-ports: [440-443]\nforbidden-sources: ['2001:db8::/32']", []).unwrap();
    let inside = Rule::new(rule(80, 80).ports, "2001:db8:1::/48".parse().unwrap());
    let mut owned = rules(&[(443, 445), (9000, 9000)]);
    owned.insert(inside);
    let known = LastGranted::from([(unit(1), owned.iter().collect())]);
    for last in [known, LastGranted::new()] {
        let plan = plan_machine(&asking(&[], true), &owned, &BTreeSet::new(), &last, &strict, capacity(50));
        assert_eq!(plan.kept_for_frozen, set(&[(444, 445), (9000, 9000)]));
        assert_eq!(plan.change, Change { open: rules(&[(444, 445)]), close: BTreeSet::from([inside]) });
        assert_eq!(plan.deferred, rules(&[(443, 445)]), "the rest of it is kept, and spelled anew first");
    }
}

#[test]
fn adjacent_ports_are_joined_before_replaced_rules_are_closed() {
    let plan = |owned: &BTreeSet<Rule>, rules: usize| {
        let wanted = asking(&[(80, 80), (81, 81), (82, 82)], false);
        plan_machine(&wanted, owned, &BTreeSet::new(), &LastGranted::new(), &usual(), capacity(rules))
    };
    let owned = rules(&[(80, 80), (82, 82)]);
    // No wanted port is closed for a join, even if few rules are free.
    for capacity in [60, 3, 2] {
        let joined = plan(&owned, capacity);
        assert_eq!(joined.change, Change { open: rules(&[(80, 82)]), close: BTreeSet::new() });
        assert_eq!(joined.deferred, owned);
        let after = joined.change.applied_to(&owned);
        let then = plan(&after, capacity);
        assert_eq!(then.change, Change { open: BTreeSet::new(), close: owned.clone() });
        assert!(plan(&then.change.applied_to(&after), capacity).change.is_empty());
    }
}

#[test]
fn ports_are_joined_when_half_of_the_capacity_is_used() {
    // Pairs that an older version left, and one new port.
    let owned = rules(&[(10, 10), (11, 11), (20, 20), (21, 21), (30, 30)]);
    let asked = [(10, 11), (20, 21), (30, 30), (40, 40)];
    let plan = |rules: usize| {
        let wanted = asking(&asked, false);
        plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), capacity(rules))
    };
    assert_eq!(plan(60).change, Change { open: rules(&[(40, 40)]), close: BTreeSet::new() });
    assert_eq!(plan(10).change.open, rules(&[(10, 11), (20, 21), (40, 40)]));
}

#[test]
fn refused_rules_are_left_out_and_the_rest_is_sent() {
    let (owned, last) = (rules(&[(1, 1), (3, 3)]), LastGranted::new());
    let plan = |limits: &LimitsAfterRefusal| {
        let wanted = asking(&[(80, 82), (90, 90), (95, 95)], false);
        plan_machine_within(&wanted, &owned, &BTreeSet::new(), &last, &usual(), (capacity(50), limits))
    };
    let limit =
        |all, refused: &[(u16, u16)], at_most| LimitAfterRefusal { all, rules: rules(refused), at_most };
    let whole = plan(&LimitsAfterRefusal::default()).change;
    for (open, sent, withheld_opens, divided) in [
        (limit(true, &[], None), &[][..], &[(80, 82), (90, 90), (95, 95)][..], false),
        (limit(false, &[(90, 90)], None), &[(80, 82), (95, 95)], &[(90, 90)], false),
        (limit(false, &[(81, 81)], None), &[(80, 80), (82, 82), (90, 90), (95, 95)], &[(81, 81)], false),
        (limit(false, &[], Some(2)), &[(80, 82), (90, 90)], &[(95, 95)], true),
        (limit(false, &[(80, 82)], Some(1)), &[(80, 81)], &[(82, 82), (90, 90), (95, 95)], true),
    ] {
        let plan = plan(&LimitsAfterRefusal { open, close: LimitAfterRefusal::default() });
        assert_eq!(plan.change, Change { open: rules(sent), close: whole.close.clone() });
        assert_eq!((plan.withheld_opens, plan.divided), (rules(withheld_opens), divided));
    }
    let held = plan(&LimitsAfterRefusal {
        open: LimitAfterRefusal::default(),
        close: limit(false, &[(1, 1)], None),
    });
    assert_eq!(held.change, Change { open: whole.open, close: rules(&[(3, 3)]) });
    assert_eq!((held.withheld_closes.clone(), held.unreplaced_closes()), (rules(&[(1, 1)]), owned.clone()));
}

/// A close that must come first is not sent while its replacement is refused.
#[test]
fn no_rule_is_closed_to_fit_a_withheld_rule() {
    let full = rules(&[(10, 12), (80, 80)]);
    let wanted = asking(&[(11, 11), (80, 80)], false);
    let limits = LimitsAfterRefusal {
        open: LimitAfterRefusal { all: true, ..LimitAfterRefusal::default() },
        close: LimitAfterRefusal::default(),
    };
    let last = LastGranted::new();
    let plan = plan_machine_within(&wanted, &full, &BTreeSet::new(), &last, &usual(), (capacity(2), &limits));
    assert_eq!((plan.change, plan.deferred), (Change::default(), rules(&[(10, 12)])));
}

#[test]
fn a_replaced_rule_is_closed_after_its_replacement_is_open() {
    let wanted = asking(&[(80, 80)], false);
    let owned = rules(&[(80, 81), (443, 443)]);
    let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), capacity(50));
    assert_eq!(plan.change, Change { open: rules(&[(80, 80)]), close: rules(&[(443, 443)]) });
    assert_eq!(plan.deferred, rules(&[(80, 81)]));
    let after = plan.change.applied_to(&owned);
    let then = plan_machine(&wanted, &after, &BTreeSet::new(), &LastGranted::new(), &usual(), capacity(50));
    assert_eq!(then.change, Change { open: BTreeSet::new(), close: rules(&[(80, 81)]) });
}

/// One transaction closes the range and opens its wanted part again; a firewall that merges rules
/// would ignore an open that is already covered.
#[test]
fn an_atomic_provider_replaces_rules_in_one_step() {
    let (wanted, owned) = (asking(&[(80, 80)], false), rules(&[(80, 81)]));
    let at_once = Capacity::new(None, &[], true);
    let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), at_once);
    assert_eq!(plan.change, Change { open: rules(&[(80, 80)]), close: owned });
    assert!(plan.deferred.is_empty());
}

#[test]
fn a_full_group_closes_only_rules_that_free_enough_slots() {
    let plan = |asked: &[(u16, u16)], owned: &BTreeSet<Rule>| {
        let last = LastGranted::new();
        plan_machine(&asking(asked, false), owned, &BTreeSet::new(), &last, &usual(), capacity(4))
    };
    // As one rule the ports would fit, but no wanted port is closed for a join.
    let singles = rules(&[(80, 80), (81, 81), (82, 82), (83, 83)]);
    let joined = plan(&[(80, 84)], &singles);
    assert_eq!(joined.change, Change { open: rules(&[(80, 84)]), close: BTreeSet::new() });
    assert_eq!(joined.deferred, singles);
    // A port that no unit wants is closed although there is no free slot.
    let full = rules(&[(10, 12), (80, 80), (90, 90), (100, 100)]);
    let narrowed = plan(&[(11, 11), (80, 80), (90, 90), (100, 100)], &full);
    assert_eq!(narrowed.change, Change { open: rules(&[(11, 11)]), close: rules(&[(10, 12)]) });
    assert!(narrowed.deferred.is_empty());
    // A rule with ports that are kept for an unreadable unit is not closed to free a slot.
    let last = LastGranted::from([(unit(1), set(&[(11, 11)]))]);
    let wanted = asking(&[(80, 80), (90, 90), (100, 100)], true);
    let frozen = plan_machine(&wanted, &full, &BTreeSet::new(), &last, &usual(), capacity(4));
    assert_eq!((frozen.change.close.len(), frozen.kept_for_frozen), (0, set(&[(10, 12)])));
    // If closing rules would not free enough slots, no rule with wanted ports is closed.
    let hopeless = plan(&[(10, 10), (12, 12), (80, 80), (90, 90), (100, 100)], &full);
    assert_eq!(hopeless.change.close, BTreeSet::new());
    assert_eq!(hopeless.deferred, rules(&[(10, 12)]));
}

#[test]
fn a_converged_group_is_unchanged_at_any_capacity() {
    let owned = rules(&[(80, 80), (81, 81), (82, 82)]);
    let wanted = asking(&[(80, 82)], false);
    let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), capacity(2));
    assert!(plan.change.is_empty() && plan.deferred.is_empty(), "{plan:?}");
}

#[test]
fn a_rule_covered_by_a_foreign_rule_is_replaced_directly() {
    let owned = rules(&[(80, 82)]);
    let plan = plan_machine(
        &asking(&[(81, 81)], false),
        &owned,
        &rules(&[(81, 81)]),
        &LastGranted::new(),
        &usual(),
        capacity(50),
    );
    assert_eq!(plan.change, Change { open: BTreeSet::new(), close: owned });
}

#[test]
fn closing_most_rules_needs_a_second_read() {
    let owned = |count: u16| -> BTreeSet<Rule> { (1..=count).map(|n| rule(2 * n, 2 * n)).collect() };
    let shut = |owned: &BTreeSet<Rule>, closing: usize| MachinePlan {
        change: Change { open: BTreeSet::new(), close: owned.iter().take(closing).copied().collect() },
        ..MachinePlan::default()
    };
    for (there, closing, expected) in [
        (9, 9, Confidence::Sufficient),
        (10, 10, Confidence::ReadAgain { closing: 10, of: 10 }),
        (20, 10, Confidence::Sufficient),
        (20, 11, Confidence::ReadAgain { closing: 11, of: 20 }),
    ] {
        let owned = owned(there);
        let plan = shut(&owned, closing);
        assert_eq!(confidence([&plan].into_iter(), owned.len(), true), expected, "{closing} of {there}");
    }
    let (some, none) = (shut(&owned(20), 1), shut(&owned(20), 0));
    let unconfirmed = Confidence::ReadAgain { closing: 1, of: 20 };
    assert_eq!(confidence([&some].into_iter(), 20, false), unconfirmed, "there may be more to come");
    assert_eq!(confidence([&none].into_iter(), 20, false), Confidence::Sufficient);
}

fn any_ranges() -> impl Strategy<Value = Vec<(u16, u16)>> {
    proptest::collection::vec((1u16..40, 0u16..4).prop_map(|(from, more)| (from, from + more)), 0..8)
}

proptest! {
    /// The changes of a plan lead to the wanted rules, and the next plan is empty. Even if only
    /// half of a change is carried out, wanted ports stay open if there are free slots, no port is
    /// opened that no unit requested, and no foreign rule is closed. A rule whose ports are all
    /// wanted is never closed to free a slot.
    #[test]
    fn applied_plans_reach_the_wanted_rules_and_then_are_empty(
        asked in any_ranges(), there in any_ranges(), frozen in any::<bool>(), had in any_ranges(),
        max in 1usize..20,
    ) {
        let wanted = asking(&asked, frozen);
        let mut owned = rules(&there);
        let last = LastGranted::from([(unit(1), set(&had))]);
        let first = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), capacity(max));
        for _ in 0..3 {
            let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), capacity(max));
            prop_assert!(plan.change.close.is_subset(&owned) && plan.deferred.is_subset(&owned));
            let opened: RuleSet = plan.change.open.iter().collect();
            prop_assert!(opened.minus(&wanted.rules().union(&plan.kept_for_frozen)).is_empty());
            let there: RuleSet = owned.iter().collect();
            prop_assert!(plan.kept_for_frozen.minus(&there).is_empty());
            let before = intersection(&owned.iter().collect(), &plan.target);
            let only_closed: RuleSet = (&owned - &plan.change.close).iter().collect();
            let crowded = (&owned | &plan.change.open).len() > max;
            let shut = before.minus(&only_closed);
            prop_assert!(shut.is_empty() || crowded);
            // A rule whose ports are all wanted is never closed to free a slot.
            let joined = plan.change.close.iter().filter(|rule| plan.target.covers(rule));
            prop_assert!(shut.minus(&shut.minus(&joined.collect())).is_empty());
            owned = plan.change.applied_to(&owned);
        }
        prop_assert_eq!(owned.iter().collect::<RuleSet>(), first.target);
        let silent = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), capacity(max));
        prop_assert!(silent.change.is_empty() && silent.deferred.is_empty(), "{:?}", silent);
    }
}
