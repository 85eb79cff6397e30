//! Plans the change of each machine. Pure. Computes it from the wanted rules, the actual rules, and
//! the rules that were granted when all units were last readable. All decisions of the firewall are
//! here and in `wanted`; `apply` only carries them out.

use std::collections::{BTreeMap, BTreeSet};

use crate::mutant;
use portcullis_provider::dry_run::would;
use portcullis_provider::rule::{Change, Rule, RuleSet};

use super::capacity::Capacity;
use super::policy::Policy;
use super::refusals::{LimitAfterRefusal, LimitsAfterRefusal};
use super::wanted::Wanted;
use crate::model::UnitId;

/// A pass that would close more than one in this many of all rules, and at least
/// [`MASS_CLOSE_MIN`], needs confirmation: a tree that wrongly appears empty is indistinguishable
/// from one in which every service was unexposed.
const MASS_CLOSE_SHARE: usize = 2;
const MASS_CLOSE_MIN: usize = 10;

/// The rules of each unit of a machine when it was last readable, from the machine's report.
pub type LastGranted = BTreeMap<UnitId, RuleSet>;

/// The change of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachinePlan {
    /// The requests to send now. Its halves may fail independently: no close removes ports whose
    /// replacement may fail to open, unless the replacement does not fit otherwise.
    pub change: Change,
    /// Closes of rules whose wanted ports other rules are to cover. A later plan contains them
    /// again, once the open has succeeded.
    pub deferred: BTreeSet<Rule>,
    /// Wanted rules that exceed the provider's limit. Empty until the provider has refused a
    /// request for that reason, because its limit may differ from the documented one.
    pub over_capacity: BTreeSet<Rule>,
    /// Wanted rules that are left out because the provider refused them recently, or that are left
    /// for the next request.
    pub withheld_opens: BTreeSet<Rule>,
    /// Closes that are left out for the same reasons.
    pub withheld_closes: BTreeSet<Rule>,
    /// The request contains only a part of the change, and the next one may follow at once.
    pub divided: bool,
    /// The rules that the machine should have.
    pub target: RuleSet,
    /// Rules that stay open only because a unit cannot be read.
    pub kept_for_frozen: RuleSet,
}

/// Returns the rules that the machine should have, and those of them that are kept for frozen
/// units. A frozen unit keeps those of its last rules that still exist, and rules that no report
/// assigns to a unit: they were opened just before the report was lost. If no rules of a frozen
/// unit are recorded, all existing rules are kept, because any of them may belong to it. Rules that
/// `policy` forbids are closed in any case.
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
    let existing: RuleSet = owned.iter().collect();
    let reported: RuleSet = last.values().flat_map(RuleSet::rules).collect();
    let unassigned = existing.minus(&reported);
    for unit in wanted.frozen.keys() {
        let of_unit = match last.get(unit) {
            Some(granted) if mutant!(UnreportedOpenClosed) => intersection(granted, &existing),
            Some(granted) => intersection(granted, &existing).union(&unassigned),
            None if mutant!(UnknownLastRulesCountAsNone) => RuleSet::new(),
            None => existing.clone(),
        };
        kept = kept.union(&of_unit);
    }
    let kept = policy.permitted(&kept).minus(&rules);
    (rules.union(&kept), kept)
}

/// Plans the change from `owned` to the wanted rules, with as few changed rules as `capacity`
/// allows. A rule that exists identically outside the controller's control (`foreign`) is not
/// created again, because providers store no duplicates.
pub fn plan_machine(
    wanted: &Wanted,
    owned: &BTreeSet<Rule>,
    foreign: &BTreeSet<Rule>,
    last: &LastGranted,
    policy: &Policy,
    capacity: Capacity,
) -> MachinePlan {
    plan_machine_within(wanted, owned, foreign, last, policy, (capacity, &LimitsAfterRefusal::default()))
}

/// Like [`plan_machine`], without the requests that `limits` forbids for now.
pub fn plan_machine_within(
    wanted: &Wanted,
    owned: &BTreeSet<Rule>,
    foreign: &BTreeSet<Rule>,
    last: &LastGranted,
    policy: &Policy,
    (capacity, limits): (Capacity, &LimitsAfterRefusal),
) -> MachinePlan {
    let (target, kept_for_frozen) = target(wanted, owned, last, policy);
    let Change { open, close } = choose_change(owned, &target, capacity, limits);
    let open = if foreign.is_empty() { open } else { &open - foreign };
    let mut plan = MachinePlan { change: Change { open, close }, kept_for_frozen, ..MachinePlan::default() };
    if !plan.change.close.is_empty() && !capacity.is_atomic {
        let staying = owned - &plan.change.close;
        let foreign = foreign.iter().filter(|_| !mutant!(ForeignRuleBlocksClose));
        plan.defer(&staying.iter().chain(foreign).collect(), &target);
    }
    if !limits.is_empty() {
        plan.withhold(owned, foreign, &target, (capacity, limits));
    }
    if !plan.deferred.is_empty() {
        capacity.make(owned, (&target, &plan.kept_for_frozen), &mut plan.change, &mut plan.deferred);
    }
    plan.target = target;
    plan
}

/// Decides which rules to open and to close. An atomic change affects as few rules as possible.
/// Otherwise a new port is joined with its adjacent ports, and all adjacent ports are joined once
/// half of the limit is used: the wider rule must fit beside the narrower ones until those are
/// closed.
fn choose_change(
    owned: &BTreeSet<Rule>,
    target: &RuleSet,
    capacity: Capacity,
    limits: &LimitsAfterRefusal,
) -> Change {
    if capacity.is_atomic {
        return Change::between(owned, target);
    }
    if mutant!(PortsJoinedOnlyWhenFull) {
        let gentle = Change::between(owned, target);
        let fits = gentle.open.is_empty() || capacity.holds(owned, &gentle.open);
        return if fits { gentle } else { Change::compacting(owned, target.rules()) };
    }
    let spelled = || -> Box<dyn Iterator<Item = Rule>> {
        if limits.open.rules.is_empty() {
            Box::new(target.rules())
        } else {
            Box::new(limits.open.permitted_rules(target).into_iter())
        }
    };
    let joined = Change::joining(owned, target, spelled());
    if joined.open.is_empty() || capacity.half().holds(owned, &joined.open) {
        return joined;
    }
    Change::compacting(owned, spelled())
}

impl MachinePlan {
    /// Defers the closes of rules with wanted ports that no `staying` rule covers.
    fn defer(&mut self, staying: &RuleSet, target: &RuleSet) {
        let close = std::mem::take(&mut self.change.close);
        (self.change.close, self.deferred) = close.into_iter().partition(|rule| {
            let wanted = intersection(&[*rule].into_iter().collect(), target);
            wanted.minus(staying).is_empty() || mutant!(ReplacedRuleClosedFirst)
        });
    }

    /// Leaves out rules that the provider refused recently, and rules beyond the maximum of one
    /// request.
    fn withhold(
        &mut self,
        owned: &BTreeSet<Rule>,
        foreign: &BTreeSet<Rule>,
        target: &RuleSet,
        (capacity, limits): (Capacity, &LimitsAfterRefusal),
    ) {
        let LimitsAfterRefusal { open, close } = limits;
        // An atomic change is carried out completely or not at all.
        let (no_open, no_close) =
            if capacity.is_atomic { [open.all || close.all; 2].into() } else { (open.all, close.all) };
        let sent =
            |rules: &BTreeSet<Rule>, none: bool, limit: &LimitAfterRefusal| -> (BTreeSet<Rule>, bool) {
                let free = || rules.iter().filter(|rule| !none && !limit.rules.contains(rule));
                let most = limit.at_most.unwrap_or(usize::MAX);
                (free().take(most).copied().collect(), free().nth(most).is_some())
            };
        let (opened, more_to_open) = sent(&self.change.open, no_open, open);
        let (closed, more_to_close) = sent(&self.change.close, no_close, close);
        self.divided = more_to_open || more_to_close;
        self.withheld_closes = &self.change.close - &closed;
        self.change = Change { open: opened, close: closed };
        let open_rules: RuleSet = owned.iter().chain(foreign).chain(&self.change.open).collect();
        self.withheld_opens = target.minus(&open_rules).rules().collect();
    }

    /// Leaves out the rules that do not fit.
    pub fn trim(&mut self, owned: &BTreeSet<Rule>, capacity: Capacity) {
        self.over_capacity = capacity.trim(owned, &mut self.change);
    }

    /// The changes as text, for a dry run; empty if there are none.
    pub fn dry_run_text(&self) -> String {
        would(&self.change.open, &(&self.change.close | &self.deferred))
    }

    /// The rules that are closed without a replacement, whether the request is sent now or later.
    pub fn unreplaced_closes(&self) -> BTreeSet<Rule> {
        let closes = self.change.close.iter().chain(&self.withheld_closes);
        closes.filter(|rule| !self.target.covers(rule)).copied().collect()
    }
}

/// Whether a pass may be applied at once, or needs confirmation by a second read of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confidence {
    Sufficient,
    /// The pass would close `closing` of `of` rules.
    ReadAgain {
        closing: usize,
        of: usize,
    },
}

/// Compares all closes of a pass with the number of all rules. Rules that are only replaced do not
/// count. Unless the view is `whole`, so that all its closes are known, every close needs
/// confirmation.
pub fn confidence<'a>(plans: impl Iterator<Item = &'a MachinePlan>, of: usize, whole: bool) -> Confidence {
    let closing = plans.map(|plan| plan.unreplaced_closes().len()).sum();
    let most = closing >= MASS_CLOSE_MIN && closing * MASS_CLOSE_SHARE > of;
    if most || (!whole && closing > 0) {
        Confidence::ReadAgain { closing, of }
    } else {
        Confidence::Sufficient
    }
}

pub(super) fn intersection(a: &RuleSet, b: &RuleSet) -> RuleSet {
    a.minus(&a.minus(b))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
