//! Changes of a machine's rules. Rules to close are in the firewall's spelling, because it removes
//! them only in that spelling. Pure.

use super::{Rule, RuleSet};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Removes the rules of `close` and adds those of `open`. Drivers close before they open, or do
/// both atomically; a plan must ensure that ports that are open before and after stay open in
/// between.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Change {
    pub open: BTreeSet<Rule>,
    pub close: BTreeSet<Rule>,
}

impl Change {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.close.is_empty()
    }

    /// Returns the change that touches the fewest rules: existing wanted rules keep their spelling,
    /// so that opening one more port only adds one rule.
    pub fn between(owned: &BTreeSet<Rule>, wanted: &RuleSet) -> Self {
        // Fast path: nothing to change.
        if owned.iter().copied().eq(wanted.rules()) {
            return Self::default();
        }
        let (kept, close): (BTreeSet<Rule>, BTreeSet<Rule>) =
            owned.iter().partition(|rule| wanted.covers(rule));
        let open = if kept.is_empty() {
            wanted.rules().collect()
        } else {
            wanted.minus(&kept.iter().collect()).rules().collect()
        };
        Self { open, close }
    }

    /// Opens missing ports as the whole `spelled` rule that contains them, and closes rules that
    /// another one covers: an adjacent port widens a rule instead of adding one. Without missing
    /// ports the rules keep their spelling. The spelled rules are part of `wanted`, and none covers
    /// another.
    pub fn joining(owned: &BTreeSet<Rule>, wanted: &RuleSet, spelled: impl Iterator<Item = Rule>) -> Self {
        // Fast path: nothing to change.
        if owned.iter().copied().eq(wanted.rules()) {
            return Self::default();
        }
        let (kept, mut close): (BTreeSet<Rule>, BTreeSet<Rule>) =
            owned.iter().partition(|rule| wanted.covers(rule));
        let there: RuleSet = kept.iter().collect();
        let open: BTreeSet<Rule> = spelled.filter(|rule| !there.covers(rule)).collect();
        close.extend(redundant(kept.union(&open)).into_iter().filter(|rule| kept.contains(rule)));
        Self { open, close }
    }

    /// Returns the change that leaves the fewest rules, for groups that would exceed their limit.
    pub fn compacting(owned: &BTreeSet<Rule>, spelled: impl Iterator<Item = Rule>) -> Self {
        let spelled: BTreeSet<Rule> = spelled.collect();
        Self { open: &spelled - owned, close: owned - &spelled }
    }

    /// Returns the rules after applying this change to `owned`.
    #[must_use]
    pub fn applied_to(&self, owned: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        &(owned - &self.close) | &self.open
    }
}

/// Returns the rules that another single rule covers.
fn redundant<'a>(rules: impl Iterator<Item = &'a Rule>) -> Vec<Rule> {
    let mut rules: Vec<Rule> = rules.copied().collect();
    let lane = |rule: &Rule| (rule.source, rule.ports.proto());
    rules.sort_unstable_by_key(|rule| (lane(rule), rule.ports.from(), Reverse(rule.ports.to())));
    let mut widest: Option<Rule> = None;
    rules.retain(|rule| {
        let covered = widest.is_some_and(|w| lane(&w) == lane(rule) && rule.ports.to() <= w.ports.to());
        if !covered {
            widest = Some(*rule);
        }
        covered
    });
    rules
}

#[cfg(test)]
mod tests {
    use super::super::set::tests::{any_rules, points};
    use super::super::{Cidr, PortRange, Protocol};
    use super::*;
    use proptest::prelude::*;

    fn rules(ranges: &[(u16, u16)]) -> BTreeSet<Rule> {
        let rule = |&(from, to)| Rule::new(PortRange::new(from, to, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        ranges.iter().map(rule).collect()
    }

    /// owned, wanted, opened and closed with the fewest touched, opened and closed with the fewest
    /// left
    type Case<'a> = [&'a [(u16, u16)]; 6];

    #[test]
    fn changes_touch_or_leave_the_fewest_rules() {
        let cases: &[Case<'_>] = &[
            [&[], &[(80, 80)], &[(80, 80)], &[], &[(80, 80)], &[]],
            [&[(80, 80)], &[], &[], &[(80, 80)], &[], &[(80, 80)]],
            [&[(80, 80)], &[(80, 81)], &[(81, 81)], &[], &[(80, 81)], &[(80, 80)]],
            [&[(80, 81)], &[(80, 80)], &[(80, 80)], &[(80, 81)], &[(80, 80)], &[(80, 81)]],
            [&[(80, 80), (81, 81)], &[(80, 81)], &[], &[], &[(80, 81)], &[(80, 80), (81, 81)]],
        ];
        for [owned, wanted, open, close, compact_open, compact_close] in cases {
            let owned = rules(owned);
            let wanted: RuleSet = rules(wanted).iter().collect();
            let little = Change { open: rules(open), close: rules(close) };
            assert_eq!(Change::between(&owned, &wanted), little);
            let compact = Change { open: rules(compact_open), close: rules(compact_close) };
            assert_eq!(Change::compacting(&owned, wanted.rules()), compact);
        }
    }

    #[test]
    fn adjacent_port_widens_a_rule() {
        for (owned, wanted, open, close) in [
            (&[][..], &[(80, 81)][..], &[(80, 81)][..], &[][..]),
            (&[(80, 80)], &[(80, 81)], &[(80, 81)], &[(80, 80)]),
            (&[(80, 80), (80, 81)], &[(80, 81)], &[], &[(80, 80)]),
            (&[(80, 80), (82, 82), (90, 90)], &[(80, 82), (90, 90)], &[(80, 82)], &[(80, 80), (82, 82)]),
            // Covered only by two rules together: it keeps its spelling.
            (&[(80, 80), (81, 81)], &[(80, 81)], &[], &[]),
            (&[(80, 82), (81, 83), (82, 84)], &[(80, 84)], &[], &[]),
            (&[(80, 81)], &[(80, 80)], &[(80, 80)], &[(80, 81)]),
            (&[(80, 82), (80, 80)], &[(80, 80), (82, 82)], &[(82, 82)], &[(80, 82)]),
        ] {
            let wanted: RuleSet = rules(wanted).iter().collect();
            let change = Change::joining(&rules(owned), &wanted, wanted.rules());
            assert_eq!(change, Change { open: rules(open), close: rules(close) }, "{owned:?}");
        }
    }

    proptest! {
        #[test]
        fn all_changes_lead_to_the_wanted_rules(owned in any_rules(), wanted in any_rules()) {
            let owned: BTreeSet<Rule> = owned.into_iter().collect();
            let target: RuleSet = wanted.iter().collect();
            let joined = Change::joining(&owned, &target, target.rules());
            let after = joined.applied_to(&owned);
            prop_assert!(Change::joining(&after, &target, target.rules()).is_empty());
            let compacted = Change::compacting(&owned, target.rules());
            for change in [Change::between(&owned, &target), compacted, joined] {
                let after = change.applied_to(&owned);
                prop_assert_eq!(after.iter().collect::<RuleSet>(), target.clone());
                prop_assert!(change.close.is_subset(&owned));
                prop_assert!(change.open.is_disjoint(&owned));
                prop_assert!(points(&change.open).is_subset(&points(&wanted)));
                prop_assert!(Change::between(&after, &target).is_empty());
            }
            let compact = Change::compacting(&owned, target.rules()).applied_to(&owned);
            prop_assert_eq!(compact.len(), target.len());
        }

        #[test]
        fn wanted_state_needs_no_change(owned in any_rules()) {
            let owned: BTreeSet<Rule> = owned.into_iter().collect();
            let target: RuleSet = owned.iter().collect();
            prop_assert!(Change::between(&owned, &target).is_empty());
        }
    }
}
