//! What to do to each machine. Pure: from what is wanted, what is there, and what was granted when everything could last
//! be read, to the change of each machine. All decisions of the firewall are here and in `wanted`; `apply` carries
//! them out and makes none.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::dry_run::would;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::{Change, Rule, RuleSet};

use super::policy::Policy;
use super::refusals::{Hold, Holds};
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
    /// Wanted, and left out because the provider refused it lately, or left for the next request.
    pub withheld: BTreeSet<Rule>,
    /// Closes that are left out for the same reasons.
    pub withheld_closes: BTreeSet<Rule>,
    /// A smaller request than all of it is sent, and the next one may follow at once.
    pub divided: bool,
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
    plan_machine_within(wanted, owned, theirs, last, policy, (room, &Holds::default()))
}

/// The same, without what must not be sent for now.
pub fn plan_machine_within(
    wanted: &Wanted,
    owned: &BTreeSet<Rule>,
    theirs: &BTreeSet<Rule>,
    last: &LastGranted,
    policy: &Policy,
    (room, holds): (Room, &Holds),
) -> MachinePlan {
    let (target, kept_for_frozen) = target(wanted, owned, last, policy);
    let Change { open, close } = respell(owned, &target, room, holds);
    let open = if theirs.is_empty() { open } else { &open - theirs };
    let mut plan = MachinePlan { change: Change { open, close }, kept_for_frozen, ..MachinePlan::default() };
    if !plan.change.close.is_empty() && !room.at_once {
        let staying = owned - &plan.change.close;
        let theirs = theirs.iter().filter(|_| !planted(Bug::WaitsForOthers));
        plan.defer(&staying.iter().chain(theirs).collect(), &target);
    }
    if !holds.is_empty() {
        plan.withhold(owned, theirs, &target, (room, holds));
    }
    if !plan.deferred.is_empty() {
        room.make(owned, (&target, &plan.kept_for_frozen), &mut plan.change, &mut plan.deferred);
    }
    plan.target = target;
    plan
}

/// Which rules to open and to close. A change that is one step touches as few rules as it can. Otherwise adjacent ports are
/// joined with the next one of them, and all that are adjacent once half of the room is taken: the wider rule must fit
/// beside the narrower ones until those are closed.
fn respell(owned: &BTreeSet<Rule>, target: &RuleSet, room: Room, holds: &Holds) -> Change {
    if room.at_once {
        return Change::between(owned, target);
    }
    if planted(Bug::JoinsWhenFull) {
        let gentle = Change::between(owned, target);
        let fits = gentle.open.is_empty() || room.holds(owned, &gentle.open);
        return if fits { gentle } else { Change::compacting(owned, target.rules()) };
    }
    let spelled = || -> Box<dyn Iterator<Item = Rule>> {
        if holds.open.rules.is_empty() {
            Box::new(target.rules())
        } else {
            Box::new(holds.open.spell(target).into_iter())
        }
    };
    let joined = Change::joining(owned, target, spelled());
    if joined.open.is_empty() || room.half().holds(owned, &joined.open) {
        return joined;
    }
    Change::compacting(owned, spelled())
}

impl MachinePlan {
    /// Puts off the closes that would take away something wanted that no `staying` rule covers.
    fn defer(&mut self, staying: &RuleSet, target: &RuleSet) {
        let close = std::mem::take(&mut self.change.close);
        (self.change.close, self.deferred) = close.into_iter().partition(|rule| {
            let wanted = intersection(&[*rule].into_iter().collect(), target);
            wanted.minus(staying).is_empty() || planted(Bug::ClosesBeforeItOpens)
        });
    }

    /// Leaves out what the provider refused lately, and what makes a request larger than it may be.
    fn withhold(
        &mut self,
        owned: &BTreeSet<Rule>,
        theirs: &BTreeSet<Rule>,
        target: &RuleSet,
        (room, holds): (Room, &Holds),
    ) {
        let Holds { open, close } = holds;
        // One step is carried out as a whole or not at all.
        let (no_open, no_close) =
            if room.at_once { [open.all || close.all; 2].into() } else { (open.all, close.all) };
        let sent = |rules: &BTreeSet<Rule>, none: bool, hold: &Hold| -> (BTreeSet<Rule>, bool) {
            let free = || rules.iter().filter(|rule| !none && !hold.rules.contains(rule));
            let most = hold.at_most.unwrap_or(usize::MAX);
            (free().take(most).copied().collect(), free().nth(most).is_some())
        };
        let (opened, more_to_open) = sent(&self.change.open, no_open, open);
        let (closed, more_to_close) = sent(&self.change.close, no_close, close);
        self.divided = more_to_open || more_to_close;
        self.withheld_closes = &self.change.close - &closed;
        self.change = Change { open: opened, close: closed };
        let there: RuleSet = owned.iter().chain(theirs).chain(&self.change.open).collect();
        self.withheld = target.minus(&there).rules().collect();
    }

    /// Leaves out what there is no room for.
    pub fn trim(&mut self, owned: &BTreeSet<Rule>, room: Room) {
        self.over = room.trim(owned, &mut self.change);
    }

    /// The changes in words, for a dry run; empty if there are none.
    pub fn would(&self) -> String {
        would(&self.change.open, &(&self.change.close | &self.deferred))
    }

    /// The rules that are closed for good, and not only to be replaced, whether the request is sent now or later.
    pub fn lost(&self) -> BTreeSet<Rule> {
        let closes = self.change.close.iter().chain(&self.withheld_closes);
        closes.filter(|rule| !self.target.covers(rule)).copied().collect()
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
#[path = "plan_tests.rs"]
mod tests;
