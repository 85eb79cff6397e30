//! What to do to a machine's rules to get from one state to another. Rules to close are named as the firewall spells
//! them, since that is the only name under which it gives them up.

use super::{Rule, RuleSet};
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

    /// With the fewest rules left at the end: for when they would not all fit otherwise.
    pub fn compacting(owned: &BTreeSet<Rule>, wanted: &RuleSet) -> Self {
        let wanted: BTreeSet<Rule> = wanted.rules().collect();
        Self { open: &wanted - owned, close: owned - &wanted }
    }

    /// The rules of a machine that had `owned`, once this is done.
    #[must_use]
    pub fn applied_to(&self, owned: &BTreeSet<Rule>) -> BTreeSet<Rule> {
        &(owned - &self.close) | &self.open
    }
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
            assert_eq!(Change::compacting(&owned, &wanted), compact);
        }
    }

    proptest! {
        #[test]
        fn both_ways_end_in_what_is_wanted(owned in any_rules(), wanted in any_rules()) {
            let owned: BTreeSet<Rule> = owned.into_iter().collect();
            let target: RuleSet = wanted.iter().collect();
            for change in [Change::between(&owned, &target), Change::compacting(&owned, &target)] {
                let after = change.applied_to(&owned);
                prop_assert_eq!(after.iter().collect::<RuleSet>(), target.clone());
                prop_assert!(change.close.is_subset(&owned));
                prop_assert!(change.open.is_disjoint(&owned));
                prop_assert!(points(&change.open).is_subset(&points(&wanted)));
                prop_assert!(Change::between(&after, &target).is_empty());
            }
            let compact = Change::compacting(&owned, &target).applied_to(&owned);
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
