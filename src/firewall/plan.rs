//! What to do to each machine. Pure: from what is wanted, what is there, and what was granted when everything could last
//! be read, to the change of each machine. All decisions of the firewall are here and in `wanted`; `apply` carries
//! them out and makes none.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::{Change, Rule, RuleSet};

use super::policy::Policy;
use super::room::Room;
use super::wanted::Wanted;
use crate::model::UnitId;

/// A pass that would close more than this share of all rules, and at least [`MASS_CLOSE_MIN`], is not believed at
/// once: an empty view of the tree looks just like an operator who shut everything.
const MASS_CLOSE_SHARE: usize = 2;
const MASS_CLOSE_MIN: usize = 10;

/// What each unit of a machine had when it could last be read, as the machine's report keeps it.
pub type LastGranted = BTreeMap<UnitId, RuleSet>;

/// The change of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachinePlan {
    /// What can be done now. Its halves may fail independently: no close in it takes away what a failed open was to
    /// replace, unless there is no other room for that.
    pub change: Change,
    /// Closes that only re-spell what is wanted. They come up again, and are safe then, once the open has succeeded.
    pub deferred: BTreeSet<Rule>,
    /// Wanted, and more than there is room for. Known only once the provider has said so: its limit may be another than is
    /// commonly known.
    pub over: BTreeSet<Rule>,
    /// What the machine should have.
    pub target: RuleSet,
    /// Kept open only because a unit cannot be read.
    pub kept_for_frozen: RuleSet,
}

/// What the machine should have once frozen units are accounted for: what they had last stays if it is there, and so does
/// what is there and nobody is known to have had, since it was opened just before the memory of it was lost. If nothing is
/// known of a frozen unit, all that is there stays, because any of it may be its own. What `policy` forbids goes all the
/// same: that is known, whatever cannot be read.
pub fn target(
    wanted: &Wanted,
    owned: &BTreeSet<Rule>,
    last: &LastGranted,
    policy: &Policy,
) -> (RuleSet, RuleSet) {
    let rules = wanted.rules();
    let mut kept = RuleSet::new();
    if wanted.frozen.is_empty() {
        return (rules, kept);
    }
    let there: RuleSet = owned.iter().collect();
    let remembered: RuleSet = last.values().flat_map(RuleSet::rules).collect();
    let nobodys = there.minus(&remembered);
    for unit in wanted.frozen.keys() {
        let theirs = match last.get(unit) {
            Some(granted) if planted(Bug::ForgetsTheLastOpen) => intersection(granted, &there),
            Some(granted) => intersection(granted, &there).union(&nobodys),
            None if planted(Bug::NoMemoryIsNoPorts) => RuleSet::new(),
            None => there.clone(),
        };
        kept = kept.union(&theirs);
    }
    let kept = policy.permitted(&kept).minus(&rules);
    (rules.union(&kept), kept)
}

/// The change that brings `owned` to what is wanted, touching as few rules as there is `room` for. A rule that somebody else
/// made just so (`theirs`) is not made again: providers keep one of a kind.
pub fn plan_machine(
    wanted: &Wanted,
    owned: &BTreeSet<Rule>,
    theirs: &BTreeSet<Rule>,
    last: &LastGranted,
    policy: &Policy,
    room: Room,
) -> MachinePlan {
    let (target, kept_for_frozen) = target(wanted, owned, last, policy);
    let gentle = Change::between(owned, &target);
    let gentle_fits = gentle.open.is_empty() || room.holds(owned, &gentle.open);
    let Change { open, close } = if gentle_fits { gentle } else { Change::compacting(owned, &target) };
    let open = if theirs.is_empty() { open } else { &open - theirs };
    if close.is_empty() || room.at_once {
        let change = Change { open, close };
        return MachinePlan { change, target, kept_for_frozen, ..MachinePlan::default() };
    }
    let staying: RuleSet =
        (owned - &close).iter().chain(theirs.iter().filter(|_| !planted(Bug::WaitsForOthers))).collect();
    let (close, mut deferred) = close.into_iter().partition(|rule| {
        let wanted = intersection(&[*rule].into_iter().collect(), &target);
        wanted.minus(&staying).is_empty() || planted(Bug::ClosesBeforeItOpens)
    });
    let mut change = Change { open, close };
    room.make(owned, &kept_for_frozen, &mut change, &mut deferred);
    MachinePlan { change, deferred, target, kept_for_frozen, over: BTreeSet::new() }
}

impl MachinePlan {
    /// Leaves out what there is no room for.
    pub fn trim(&mut self, owned: &BTreeSet<Rule>, room: Room) {
        self.over = room.trim(owned, &mut self.change);
    }

    /// What is closed for good, and not only to be spelled anew.
    pub fn lost(&self) -> BTreeSet<Rule> {
        self.change.close.iter().filter(|rule| !self.target.covers(rule)).copied().collect()
    }
}

/// Whether a whole pass may be applied as it is, or must first be confirmed by a second look at the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confidence {
    Sure,
    /// It would close this many of that many rules.
    LookAgain {
        closing: usize,
        of: usize,
    },
}

/// Judges the closes of a pass together, against all rules there are. Rules that are only re-spelled do not count. Unless
/// the `whole` of what a view takes away is known, any close may be the first of very many.
pub fn confidence<'a>(plans: impl Iterator<Item = &'a MachinePlan>, of: usize, whole: bool) -> Confidence {
    let closing = plans.map(|plan| plan.lost().len()).sum();
    let most = closing >= MASS_CLOSE_MIN && closing * MASS_CLOSE_SHARE > of;
    if most || (!whole && closing > 0) { Confidence::LookAgain { closing, of } } else { Confidence::Sure }
}

pub(super) fn intersection(a: &RuleSet, b: &RuleSet) -> RuleSet {
    a.minus(&a.minus(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::wanted::{Claim, wanted};
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

    fn room(rules: usize) -> Room {
        Room::new(Some(rules), &[], false)
    }

    fn usual() -> Policy {
        Policy::with_own_ports([])
    }

    fn unit(n: u32) -> UnitId {
        UnitId::new(n)
    }

    fn asking(ports: &[(u16, u16)], frozen: bool) -> Wanted {
        let ports = ports.iter().map(|&(from, to)| rule(from, to).ports).collect();
        let mut claims = BTreeMap::from([(unit(0), Claim::Asks { ports, sources: vec![Cidr::WORLD_V4] })]);
        if frozen {
            claims.insert(unit(1), Claim::Frozen { reason: "garbage".into() });
        }
        wanted(&claims, &[Family::V4], &usual())
    }

    #[test]
    fn a_frozen_unit_keeps_what_it_had_and_gets_nothing_new() {
        let last = LastGranted::from([
            (unit(0), set(&[(80, 80), (81, 81)])),
            (unit(1), set(&[(443, 443), (444, 444)])),
        ]);
        let owned = rules(&[(80, 80), (81, 81), (443, 443)]);
        let plan =
            plan_machine(&asking(&[(80, 80)], true), &owned, &BTreeSet::new(), &last, &usual(), room(50));
        // 81 is given up by the unit that can be read; 443 stays; 444 is not opened for one that cannot.
        assert_eq!(plan.change, Change { open: BTreeSet::new(), close: rules(&[(81, 81)]) });
        assert_eq!(plan.kept_for_frozen, set(&[(443, 443)]));
    }

    #[test]
    fn what_was_opened_just_before_the_memory_of_it_was_lost_stays() {
        let last = LastGranted::from([(unit(0), set(&[(80, 80)])), (unit(1), set(&[(443, 443)]))]);
        let owned = rules(&[(80, 80), (443, 443), (444, 444)]);
        let plan = plan_machine(&asking(&[], true), &owned, &BTreeSet::new(), &last, &usual(), room(50));
        assert_eq!(plan.change, Change { open: BTreeSet::new(), close: rules(&[(80, 80)]) });
    }

    #[test]
    fn without_a_memory_of_a_frozen_unit_nothing_is_closed() {
        let owned = rules(&[(80, 80), (443, 443)]);
        let plan = plan_machine(
            &asking(&[(8080, 8080)], true),
            &owned,
            &BTreeSet::new(),
            &LastGranted::new(),
            &usual(),
            room(50),
        );
        assert_eq!(plan.change, Change { open: rules(&[(8080, 8080)]), close: BTreeSet::new() });
    }

    #[test]
    fn what_policy_forbids_is_closed_whoever_cannot_be_read() {
        let strict =
            Policy::parse("forbidden-ports: [440-443]\nforbidden-sources: ['2001:db8::/32']", []).unwrap();
        let inside = Rule::new(rule(80, 80).ports, "2001:db8:1::/48".parse().unwrap());
        let mut owned = rules(&[(443, 445), (9000, 9000)]);
        owned.insert(inside);
        let known = LastGranted::from([(unit(1), owned.iter().collect())]);
        for last in [known, LastGranted::new()] {
            let plan = plan_machine(&asking(&[], true), &owned, &BTreeSet::new(), &last, &strict, room(50));
            assert_eq!(plan.kept_for_frozen, set(&[(444, 445), (9000, 9000)]));
            assert_eq!(plan.change, Change { open: rules(&[(444, 445)]), close: BTreeSet::from([inside]) });
            assert_eq!(plan.deferred, rules(&[(443, 445)]), "the rest of it is kept, and spelled anew first");
        }
    }

    #[test]
    fn rules_are_merged_only_when_they_would_not_fit() {
        let owned = rules(&[(80, 80), (82, 82)]);
        let wanted = asking(&[(80, 80), (81, 81), (82, 82)], false);
        let gentle = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), room(3));
        assert_eq!(gentle.change, Change { open: rules(&[(81, 81)]), close: BTreeSet::new() });
        let compact = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), room(2));
        assert_eq!(compact.change, Change { open: rules(&[(80, 82)]), close: rules(&[(80, 80)]) });
        assert_eq!(compact.deferred, rules(&[(82, 82)]));
        let after = compact.change.applied_to(&owned);
        let then = plan_machine(&wanted, &after, &BTreeSet::new(), &LastGranted::new(), &usual(), room(2));
        assert!(then.change.is_empty(), "what is covered twice is as good, now that it fits");
    }

    #[test]
    fn a_close_that_only_respells_waits_for_its_open() {
        let wanted = asking(&[(80, 80)], false);
        let owned = rules(&[(80, 81), (443, 443)]);
        let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), room(50));
        assert_eq!(plan.change, Change { open: rules(&[(80, 80)]), close: rules(&[(443, 443)]) });
        assert_eq!(plan.deferred, rules(&[(80, 81)]));
        let after = plan.change.applied_to(&owned);
        let then = plan_machine(&wanted, &after, &BTreeSet::new(), &LastGranted::new(), &usual(), room(50));
        assert_eq!(then.change, Change { open: BTreeSet::new(), close: rules(&[(80, 81)]) });
    }

    /// One transaction takes the range away and gives back what is wanted of it; a firewall that merges would make nothing
    /// of an open that is already covered.
    #[test]
    fn what_is_changed_at_once_is_not_spelled_anew_in_two_steps() {
        let (wanted, owned) = (asking(&[(80, 80)], false), rules(&[(80, 81)]));
        let at_once = Room::new(None, &[], true);
        let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), at_once);
        assert_eq!(plan.change, Change { open: rules(&[(80, 80)]), close: owned });
        assert!(plan.deferred.is_empty());
    }

    #[test]
    fn in_a_full_group_the_narrowest_makes_room() {
        let plan = |asked: &[(u16, u16)], owned: &BTreeSet<Rule>| {
            let last = LastGranted::new();
            plan_machine(&asking(asked, false), owned, &BTreeSet::new(), &last, &usual(), room(4))
        };
        // Merged they fit, but there is no slot to begin with: one port makes room for the range that holds it.
        let singles = rules(&[(80, 80), (81, 81), (82, 82), (83, 83)]);
        let merged = plan(&[(80, 84)], &singles);
        assert_eq!(merged.change, Change { open: rules(&[(80, 84)]), close: rules(&[(80, 80)]) });
        assert_eq!(merged.deferred, rules(&[(81, 81), (82, 82), (83, 83)]));
        // What nobody wants is not kept for want of a slot.
        let full = rules(&[(10, 12), (80, 80), (90, 90), (100, 100)]);
        let narrowed = plan(&[(11, 11), (80, 80), (90, 90), (100, 100)], &full);
        assert_eq!(narrowed.change, Change { open: rules(&[(11, 11)]), close: rules(&[(10, 12)]) });
        assert!(narrowed.deferred.is_empty());
        // What is kept for who cannot be read is not risked.
        let last = LastGranted::from([(unit(1), set(&[(11, 11)]))]);
        let wanted = asking(&[(80, 80), (90, 90), (100, 100)], true);
        let frozen = plan_machine(&wanted, &full, &BTreeSet::new(), &last, &usual(), room(4));
        assert_eq!((frozen.change.close.len(), frozen.kept_for_frozen), (0, set(&[(10, 12)])));
        // Where nothing helps, nothing that is wanted is closed.
        let hopeless = plan(&[(10, 10), (12, 12), (80, 80), (90, 90), (100, 100)], &full);
        assert_eq!(hopeless.change.close, BTreeSet::new());
        assert_eq!(hopeless.deferred, rules(&[(10, 12)]));
    }

    #[test]
    fn who_has_what_it_should_changes_nothing_however_little_room_is_left() {
        let owned = rules(&[(80, 80), (81, 81), (82, 82)]);
        let wanted = asking(&[(80, 82)], false);
        let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &LastGranted::new(), &usual(), room(2));
        assert!(plan.change.is_empty() && plan.deferred.is_empty(), "{plan:?}");
    }

    #[test]
    fn what_somebody_else_keeps_open_need_not_be_respelled_first() {
        let owned = rules(&[(80, 82)]);
        let plan = plan_machine(
            &asking(&[(81, 81)], false),
            &owned,
            &rules(&[(81, 81)]),
            &LastGranted::new(),
            &usual(),
            room(50),
        );
        assert_eq!(plan.change, Change { open: BTreeSet::new(), close: owned });
    }

    #[test]
    fn closing_most_of_everything_asks_for_a_second_look() {
        let owned = |count: u16| -> BTreeSet<Rule> { (1..=count).map(|n| rule(2 * n, 2 * n)).collect() };
        let shut = |owned: &BTreeSet<Rule>, closing: usize| MachinePlan {
            change: Change { open: BTreeSet::new(), close: owned.iter().take(closing).copied().collect() },
            ..MachinePlan::default()
        };
        for (there, closing, expected) in [
            (9, 9, Confidence::Sure),
            (10, 10, Confidence::LookAgain { closing: 10, of: 10 }),
            (20, 10, Confidence::Sure),
            (20, 11, Confidence::LookAgain { closing: 11, of: 20 }),
        ] {
            let owned = owned(there);
            let plan = shut(&owned, closing);
            assert_eq!(confidence([&plan].into_iter(), owned.len(), true), expected, "{closing} of {there}");
        }
        let (some, none) = (shut(&owned(20), 1), shut(&owned(20), 0));
        let doubt = Confidence::LookAgain { closing: 1, of: 20 };
        assert_eq!(confidence([&some].into_iter(), 20, false), doubt, "there may be more to come");
        assert_eq!(confidence([&none].into_iter(), 20, false), Confidence::Sure);
    }

    fn any_ranges() -> impl Strategy<Value = Vec<(u16, u16)>> {
        proptest::collection::vec((1u16..40, 0u16..4).prop_map(|(from, more)| (from, from + more)), 0..8)
    }

    proptest! {
        /// Its own changes lead to what is wanted and then to silence. Even if only half of a change happens, what is
        /// wanted and was open stays open where there is room, nothing is opened that was not asked for, and nothing of others
        /// is closed. What is opened fits, unless nothing can make it fit, or only what is kept for a frozen unit.
        #[test]
        fn plans_end_in_what_is_wanted_and_then_are_silent(
            asked in any_ranges(), there in any_ranges(), frozen in any::<bool>(), had in any_ranges(), max in 1usize..20,
        ) {
            let wanted = asking(&asked, frozen);
            let mut owned = rules(&there);
            let last = LastGranted::from([(unit(1), set(&had))]);
            let first = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), room(max));
            for _ in 0..3 {
                let plan = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), room(max));
                prop_assert!(plan.change.close.is_subset(&owned) && plan.deferred.is_subset(&owned));
                let opened: RuleSet = plan.change.open.iter().collect();
                prop_assert!(opened.minus(&wanted.rules().union(&plan.kept_for_frozen)).is_empty());
                let there: RuleSet = owned.iter().collect();
                prop_assert!(plan.kept_for_frozen.minus(&there).is_empty());
                let before = intersection(&owned.iter().collect(), &plan.target);
                let only_closed: RuleSet = (&owned - &plan.change.close).iter().collect();
                let crowded = (&owned | &plan.change.open).len() > max;
                prop_assert!(before.minus(&only_closed).is_empty() || crowded);
                let after = plan.change.applied_to(&owned).len();
                prop_assert!(after <= max || frozen || plan.change.open.is_empty() || first.target.len() > max);
                owned = plan.change.applied_to(&owned);
            }
            prop_assert_eq!(owned.iter().collect::<RuleSet>(), first.target);
            let silent = plan_machine(&wanted, &owned, &BTreeSet::new(), &last, &usual(), room(max));
            prop_assert!(silent.change.is_empty() && silent.deferred.is_empty(), "{:?}", silent);
        }
    }
}
