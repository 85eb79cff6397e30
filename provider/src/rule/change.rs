//! What to do to a machine's rules to get from one state to another. Rules to close are named as the firewall spells
//! them, since that is the only name under which it gives them up.

use super::{Rule, RuleSet};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Afterwards a machine has what it had, less `close`, and with `open`. Drivers close before they open, or do both at once:
/// who plans a change sees to it that what is covered before and after stays open in between.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Change {
    pub open: BTreeSet<Rule>,
    pub close: BTreeSet<Rule>,
}

impl Change {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.close.is_empty()
    }

    /// With the fewest rules touched: what is there and wanted stays as it is spelled, so opening one more port is one
    /// new rule and nothing taken away.
    pub fn between(owned: &BTreeSet<Rule>, wanted: &RuleSet) -> Self {
        // So with nearly every machine, nearly always.
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

    /// Opens missing ports as the whole of the `spelled` rule that holds them, and closes rules that another one covers: an
    /// adjacent port widens a rule in place of adding one. Where nothing is missing, rules stay as they are spelled. The
    /// spelled rules are part of what is `wanted`, and none covers another.
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

    /// With the fewest rules left at the end: for when they would not all fit otherwise.
    pub fn compacting(owned: &BTreeSet<Rule>, spelled: impl Iterator<Item = Rule>) -> Self {
        let spelled: BTreeSet<Rule> = spelled.collect();
        Self { open: &spelled - owned, close: owned - &spelled }
    }

    /// The rules of a machine that had `owned`, once this is done.
    #[must_use]
    pub fn applied_to(&self, owned: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        &(owned - &self.close) | &self.open
    }
}

/// The rules that a single other one covers.
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

    /// owned, wanted, opened and closed with the fewest touched, opened and closed with the fewest left
    type Case<'a> = [&'a [(u16, u16)]; 6];

    #[test]
    fn touches_little_or_leaves_little() {
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
    fn an_adjacent_port_widens_a_rule() {
        for (owned, wanted, open, close) in [
            (&[][..], &[(80, 81)][..], &[(80, 81)][..], &[][..]),
            (&[(80, 80)], &[(80, 81)], &[(80, 81)], &[(80, 80)]),
            (&[(80, 80), (80, 81)], &[(80, 81)], &[], &[(80, 80)]),
            (&[(80, 80), (82, 82), (90, 90)], &[(80, 82), (90, 90)], &[(80, 82)], &[(80, 80), (82, 82)]),
            // Covered, if only by two: it stays as it is spelled.
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
        fn both_ways_end_in_what_is_wanted(owned in any_rules(), wanted in any_rules()) {
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
        fn nothing_to_do_is_nothing(owned in any_rules()) {
            let owned: BTreeSet<Rule> = owned.into_iter().collect();
            let target: RuleSet = owned.iter().collect();
            prop_assert!(Change::between(&owned, &target).is_empty());
        }
    }
}
