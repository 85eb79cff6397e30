//! Rules by coverage instead of spelling: adjacent and overlapping ports of one protocol and source
//! are one range. Sources are not merged: a block inside another one is a separate source, so that
//! the operator's request can be recognised. Pure.

use super::{Cidr, Family, PortRange, Protocol, Rule};
use std::collections::BTreeMap;

/// A set of rules. Two sets are equal if they open the same ports to the same sources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet {
    /// Non-empty, sorted lists, with a gap of at least one port between ranges.
    lanes: BTreeMap<(Cidr, Protocol), Vec<Span>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    from: u16,
    to: u16,
}

impl RuleSet {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Returns the smallest number of rules with this coverage.
    pub fn len(&self) -> usize {
        self.lanes.values().map(Vec::len).sum()
    }

    /// As `len`, for one address family, because limits are per family.
    pub fn len_of(&self, family: Family) -> usize {
        let of_family = self.lanes.iter().filter(|((source, _), _)| source.family() == family);
        of_family.map(|(_, spans)| spans.len()).sum()
    }

    /// Iterates over the fewest rules that cover this set, in order.
    pub fn rules(&self) -> impl Iterator<Item = Rule> {
        self.lanes.iter().flat_map(|(&(source, proto), spans)| {
            spans.iter().filter_map(move |span| {
                PortRange::new(span.from, span.to, proto).ok().map(|ports| Rule::new(ports, source))
            })
        })
    }

    /// Iterates over all ports as single rules.
    pub fn single_ports(&self) -> impl Iterator<Item = Rule> {
        self.rules().flat_map(|rule| {
            (rule.ports.from()..=rule.ports.to()).filter_map(move |port| {
                let ports = PortRange::single(port, rule.ports.proto()).ok()?;
                Some(Rule::new(ports, rule.source))
            })
        })
    }

    pub fn contains(&self, port: u16, proto: Protocol, source: Cidr) -> bool {
        self.spans(source, proto).iter().any(|span| span.from <= port && port <= span.to)
    }

    /// Returns whether this set contains every port of `rule`, with the same source.
    pub fn covers(&self, rule: &Rule) -> bool {
        let wanted = rule.ports;
        self.spans(rule.source, wanted.proto())
            .iter()
            .any(|span| span.from <= wanted.from() && wanted.to() <= span.to)
    }

    /// Returns whether `rule` touches or overlaps a range of this set, so that adding it needs no
    /// further rule.
    pub fn meets(&self, rule: &Rule) -> bool {
        let (from, to) = (rule.ports.from(), rule.ports.to());
        let spans = self.spans(rule.source, rule.ports.proto());
        spans.iter().any(|span| span.from <= to.saturating_add(1) && from <= span.to.saturating_add(1))
    }

    pub fn insert(&mut self, rule: &Rule) {
        let spans = self.lanes.entry((rule.source, rule.ports.proto())).or_default();
        spans.push(Span { from: rule.ports.from(), to: rule.ports.to() });
        merge(spans);
    }

    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.rules().chain(other.rules()).collect()
    }

    /// Returns the ports that are in this set and not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut lanes = BTreeMap::new();
        for (&(source, proto), spans) in &self.lanes {
            let rest = subtract(spans, other.spans(source, proto));
            if !rest.is_empty() {
                lanes.insert((source, proto), rest);
            }
        }
        Self { lanes }
    }

    fn spans(&self, source: Cidr, proto: Protocol) -> &[Span] {
        self.lanes.get(&(source, proto)).map_or(&[], Vec::as_slice)
    }
}

impl FromIterator<Rule> for RuleSet {
    fn from_iter<I: IntoIterator<Item = Rule>>(rules: I) -> Self {
        let mut lanes: BTreeMap<_, Vec<Span>> = BTreeMap::new();
        for Rule { source, ports } in rules {
            let span = Span { from: ports.from(), to: ports.to() };
            lanes.entry((source, ports.proto())).or_default().push(span);
        }
        for spans in lanes.values_mut() {
            merge(spans);
        }
        Self { lanes }
    }
}

impl<'a> FromIterator<&'a Rule> for RuleSet {
    fn from_iter<I: IntoIterator<Item = &'a Rule>>(rules: I) -> Self {
        rules.into_iter().copied().collect()
    }
}

fn merge(spans: &mut Vec<Span>) {
    spans.sort_unstable_by_key(|span| span.from);
    spans.dedup_by(|next, kept| {
        let touches = next.from <= kept.to.saturating_add(1);
        if touches {
            kept.to = kept.to.max(next.to);
        }
        touches
    });
}

/// Subtracts `holes`. Both lists are sorted and without overlaps, and so is the result.
fn subtract(spans: &[Span], holes: &[Span]) -> Vec<Span> {
    let mut rest = Vec::new();
    for &Span { mut from, to } in spans {
        let mut used_up = false;
        for hole in holes.iter().filter(|hole| hole.from <= to) {
            if hole.to < from {
                continue;
            }
            if hole.from > from {
                rest.push(Span { from, to: hole.from - 1 });
            }
            if hole.to >= to {
                used_up = true;
                break;
            }
            from = hole.to + 1;
        }
        if !used_up {
            rest.push(Span { from, to });
        }
    }
    rest
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Few ports, so that runs touch and overlap often, with both ends of the port space among
    /// them.
    pub(in crate::rule) fn any_rule() -> impl Strategy<Value = Rule> {
        let port = prop_oneof![4 => 1u16..24, 1 => 65_520u16..=u16::MAX];
        let sources = ["0.0.0.0/0", "::/0", "10.0.0.0/8", "10.1.0.0/16"];
        (port, 0u16..6, any::<bool>(), 0..sources.len()).prop_map(move |(from, more, tcp, source)| {
            let proto = if tcp { Protocol::Tcp } else { Protocol::Udp };
            let ports = PortRange::new(from, from.saturating_add(more), proto).unwrap();
            Rule::new(ports, sources[source].parse().unwrap())
        })
    }

    pub(in crate::rule) fn any_rules() -> impl Strategy<Value = Vec<Rule>> {
        prop::collection::vec(any_rule(), 0..24)
    }

    /// The reference implementation for the property tests.
    pub(in crate::rule) fn points<'a>(
        rules: impl IntoIterator<Item = &'a Rule>,
    ) -> BTreeSet<(Cidr, Protocol, u16)> {
        let all = rules.into_iter().flat_map(|rule| {
            (rule.ports.from()..=rule.ports.to()).map(|port| (rule.source, rule.ports.proto(), port))
        });
        all.collect()
    }

    fn points_of(set: &RuleSet) -> BTreeSet<(Cidr, Protocol, u16)> {
        points(&set.rules().collect::<Vec<_>>())
    }

    fn shown(set: &RuleSet) -> Vec<String> {
        set.rules().map(|rule| rule.to_string()).collect()
    }

    fn world(from: u16, to: u16) -> Rule {
        Rule::new(PortRange::new(from, to, Protocol::Tcp).unwrap(), Cidr::WORLD_V4)
    }

    #[test]
    fn adjacent_ports_become_one_range() {
        let set: RuleSet =
            [world(81, 81), world(80, 80), world(90, 95), world(93, 99), world(101, 101)].iter().collect();
        let expected = ["80-81/tcp from 0.0.0.0/0", "90-99/tcp from 0.0.0.0/0", "101/tcp from 0.0.0.0/0"];
        assert_eq!(shown(&set), expected);
        let to_the_end: RuleSet = [world(65535, 65535), world(1, 65534)].iter().collect();
        assert_eq!(shown(&to_the_end), ["1-65535/tcp from 0.0.0.0/0"]);
    }

    #[test]
    fn hole_splits_a_range() {
        let wide: RuleSet = [world(1, 65535)].iter().collect();
        let holes: RuleSet = [world(1, 1), world(22, 22), world(65535, 65535)].iter().collect();
        assert_eq!(shown(&wide.minus(&holes)), ["2-21/tcp from 0.0.0.0/0", "23-65534/tcp from 0.0.0.0/0"]);
    }

    #[test]
    fn sources_are_not_merged() {
        let inner = Rule::new(world(80, 80).ports, "10.0.0.0/8".parse().unwrap());
        let set: RuleSet = [world(80, 80), inner].iter().collect();
        assert_eq!((set.len(), set.len_of(Family::V4), set.len_of(Family::V6)), (2, 2, 0));
        assert!(set.minus(&[world(80, 80)].iter().collect()).covers(&inner));
    }

    proptest! {
        #[test]
        fn merging_keeps_the_coverage(rules in any_rules()) {
            let set: RuleSet = rules.iter().collect();
            prop_assert_eq!(points_of(&set), points(&rules));
            let split: Vec<Rule> = set.single_ports().collect();
            prop_assert_eq!(split.len(), points(&rules).len());
            prop_assert_eq!(split.into_iter().collect::<RuleSet>(), set);
        }

        #[test]
        fn merging_is_minimal(rules in any_rules()) {
            let set: RuleSet = rules.iter().collect();
            let covered = points(&rules);
            let is_start =
                |(source, proto, port): &&(_, _, u16)| !covered.contains(&(*source, *proto, port - 1));
            let starts = covered.iter().filter(is_start);
            prop_assert_eq!(set.len(), starts.count());
            prop_assert_eq!(set.len(), set.rules().count());
            prop_assert_eq!(set.len(), set.len_of(Family::V4) + set.len_of(Family::V6));
        }

        #[test]
        fn order_and_repetition_do_not_matter(rules in any_rules(), turn in 0usize..24) {
            let set: RuleSet = rules.iter().collect();
            let mut turned = rules.clone();
            turned.reverse();
            turned.extend(rules.iter().copied());
            let places = turn % turned.len().max(1);
            turned.rotate_left(places);
            prop_assert_eq!(turned.into_iter().collect::<RuleSet>(), set);
        }

        #[test]
        fn union_and_difference_match_the_reference(a in any_rules(), b in any_rules()) {
            let (left, right): (RuleSet, RuleSet) = (a.iter().collect(), b.iter().collect());
            let (left_points, right_points) = (points(&a), points(&b));
            prop_assert_eq!(points_of(&left.minus(&right)), &left_points - &right_points);
            prop_assert_eq!(points_of(&left.union(&right)), &left_points | &right_points);
            prop_assert_eq!(left.minus(&right).is_empty(), left_points.is_subset(&right_points));
            for rule in &b {
                prop_assert_eq!(left.covers(rule), points([rule]).is_subset(&left_points));
            }
        }

        #[test]
        fn difference_is_in_canonical_form(a in any_rules(), b in any_rules()) {
            let rest = a.iter().collect::<RuleSet>().minus(&b.iter().collect());
            prop_assert_eq!(rest.rules().collect::<RuleSet>(), rest);
        }
    }
}
