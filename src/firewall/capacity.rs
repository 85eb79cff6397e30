//! Limits of rules per machine, and how slots are freed when a limit is reached. Pure.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::mutant;
use portcullis_provider::provider::Foreign;
use portcullis_provider::rule::{Change, Family, Rule, RuleSet};

use super::plan::intersection;

/// The number of own rules that a machine's firewall can hold, and how it is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    v4: usize,
    v6: usize,
    /// A change is one transaction, so that replacing a rule needs no second step.
    pub(super) is_atomic: bool,
}

impl Capacity {
    /// Subtracts the foreign rules from `limit` per family. A foreign rule without a family counts
    /// in both.
    pub fn new(limit: Option<usize>, foreign: &[Foreign], is_atomic: bool) -> Self {
        let limit = limit.unwrap_or(usize::MAX);
        let taken = |family| {
            let theirs = |rule: &&Foreign| rule.family().is_none_or(|theirs| theirs == family);
            foreign.iter().filter(theirs).count()
        };
        let left = |family| limit.saturating_sub(taken(family)).max(1);
        Self { v4: left(Family::V4), v6: left(Family::V6), is_atomic }
    }

    fn of(&self, family: Family) -> usize {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }

    /// Half of the limit, so that joined rules fit beside the rules that they replace.
    pub(super) fn half(&self) -> Self {
        let half = |rules: usize| rules.div_ceil(2);
        Self { v4: half(self.v4), v6: half(self.v6), ..*self }
    }

    pub(super) fn holds(&self, owned: &BTreeSet<Rule>, open: &BTreeSet<Rule>) -> bool {
        if owned.len() + open.len() <= self.v4.min(self.v6) {
            return true;
        }
        let all = owned | open;
        [Family::V4, Family::V6].into_iter().all(|family| count(&all, family) <= self.of(family))
    }

    /// Removes the opens from `change` that do not fit, the last of each family, and returns them.
    /// A provider refuses a whole request if it exceeds the limit.
    pub(super) fn trim(&self, owned: &BTreeSet<Rule>, change: &mut Change) -> BTreeSet<Rule> {
        let staying = owned - &change.close;
        let mut over = BTreeSet::new();
        for family in [Family::V4, Family::V6] {
            let left = self.of(family).saturating_sub(count(&staying, family));
            let of_family = change.open.iter().filter(|rule| rule.source.family() == family);
            let mut opened: Vec<Rule> = of_family.copied().collect();
            // Rules that allow others to be closed come first, because that frees slots for the
            // rest.
            let one = |rule: &Rule| -> RuleSet { [*rule].into_iter().collect() };
            opened.sort_by_cached_key(|rule| {
                let wide = one(rule);
                Reverse(staying.iter().filter(|old| wide.covers(old)).count())
            });
            over.extend(opened.into_iter().skip(left));
        }
        change.open.retain(|rule| !over.contains(rule));
        over
    }

    /// If there is no free slot for the rules that replace them, closes some of the deferred rules
    /// first, beginning with the narrowest: their wanted ports are closed for a moment, so that no
    /// port stays open that no unit requested. A rule whose ports are all wanted is never closed
    /// for that, because it would only be joined. Rules are closed only if that suffices for both
    /// families, which are opened together, and never if they contain ports `kept` for an
    /// unreadable unit: if the open failed, those ports could not be opened again.
    pub(super) fn make(
        &self,
        owned: &BTreeSet<Rule>,
        (target, kept): (&RuleSet, &RuleSet),
        change: &mut Change,
        deferred: &mut BTreeSet<Rule>,
    ) {
        if change.open.is_empty() {
            return;
        }
        let mut first = BTreeSet::new();
        let opened: RuleSet = change.open.iter().collect();
        for family in [Family::V4, Family::V6] {
            let is_free = |rule: &&Rule| {
                let one: RuleSet = [**rule].into_iter().collect();
                let replaced = intersection(&one, target).minus(&opened).is_empty();
                let is_join = target.covers(rule) && !mutant!(PortsJoinedOnlyWhenFull);
                let risked = !intersection(&one, kept).is_empty();
                rule.source.family() == family && replaced && !is_join && !risked
            };
            let mut free: Vec<Rule> = deferred.iter().filter(is_free).copied().collect();
            free.sort_by_key(|rule| rule.ports.to() - rule.ports.from());
            let peak = count(&change.applied_to(owned), family);
            let missing = peak.saturating_sub(self.of(family));
            if missing > free.len() {
                return;
            }
            first.extend(free.into_iter().take(missing));
        }
        deferred.retain(|rule| !first.contains(rule));
        change.close.append(&mut first);
    }
}

fn count(rules: &BTreeSet<Rule>, family: Family) -> usize {
    rules.iter().filter(|rule| rule.source.family() == family).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::rule::{Cidr, PortRange, Protocol, WirePorts};

    /// One request opens both rules and would be refused, so no rule is closed for it.
    #[test]
    fn no_rule_is_closed_while_the_other_family_has_no_capacity() {
        let tcp = |from, to| PortRange::new(from, to, Protocol::Tcp).unwrap();
        let (old, new) = (tcp(80, 82), tcp(81, 81));
        let owned = BTreeSet::from([Rule::new(old, Cidr::WORLD_V4)]);
        for (v6, moved) in [(1, true), (0, false)] {
            let capacity = Capacity { v4: 1, v6, is_atomic: false };
            let open = [Cidr::WORLD_V4, Cidr::WORLD_V6].map(|source| Rule::new(new, source));
            let mut change = Change { open: open.into(), close: BTreeSet::new() };
            let mut deferred = owned.clone();
            let target: RuleSet = change.open.iter().collect();
            capacity.make(&owned, (&target, &RuleSet::new()), &mut change, &mut deferred);
            assert_eq!((change.close == owned, deferred.is_empty()), (moved, moved), "{v6}");
        }
    }

    #[test]
    fn rules_above_the_capacity_are_omitted_for_each_family() {
        let rule = |port, source| Rule::new(PortRange::single(port, Protocol::Tcp).unwrap(), source);
        let (v4, v6) = (Cidr::WORLD_V4, Cidr::WORLD_V6);
        let owned = BTreeSet::from([rule(1, v4), rule(2, v4), rule(1, v6)]);
        let open = BTreeSet::from([rule(80, v4), rule(81, v4), rule(80, v6), rule(81, v6), rule(82, v6)]);
        for (limit, fits) in [
            (0, vec![]),
            (1, vec![]),
            (2, vec![rule(80, v4), rule(80, v6)]),
            (3, vec![rule(80, v4), rule(81, v4), rule(80, v6), rule(81, v6)]),
            (9, open.iter().copied().collect()),
        ] {
            let capacity = Capacity { v4: limit, v6: limit, is_atomic: false };
            let mut change = Change { open: open.clone(), close: [rule(2, v4)].into() };
            let over = capacity.trim(&owned, &mut change);
            assert_eq!(change.open, fits.into_iter().collect(), "{limit}");
            assert_eq!(&change.open | &over, open);
        }
    }

    #[test]
    fn families_have_separate_capacities() {
        let everything = WirePorts { proto: "-1", from: None, to: None };
        let v6 = Foreign::from_wire(everything, Cidr::WORLD_V6);
        let of_a_group = Foreign { text: "sg-1".to_owned(), exact: None, covers: Vec::new() };
        assert_eq!(
            Capacity::new(Some(60), &[v6.clone(), v6, of_a_group], false),
            Capacity { v4: 59, v6: 57, is_atomic: false }
        );
        assert_eq!(Capacity::new(None, &[], false).v4, usize::MAX);
    }
}
