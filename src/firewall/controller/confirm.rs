//! Decides whether the closes that a read of the tree leads to are sent at once. A tree that
//! wrongly appears empty is indistinguishable from one in which every service was unexposed. A view
//! is therefore checked as a whole: against all rules that it would close on all machines, even if
//! few machines can be read at a time. Otherwise a close is sent only if two consecutive reads ask
//! for it. The thresholds are in `plan`.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::Firewall;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::Rule;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::FirewallController;
use crate::firewall::observe::View;
use crate::firewall::plan::{Confidence, MachinePlan, confidence};
use crate::firewall::report::Report;
use crate::model::MachineId;
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::store::tree::Tree;

/// Whether the present view suffices to close rules, or needs confirmation.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Machines whose rules were not read since the view was made. Until this is empty, the total
    /// number of closes is unknown.
    unjudged: BTreeSet<MachineId>,
    /// An earlier view that needs confirmation, and when the last read that it was made from ended.
    before: Option<(View, Instant)>,
    /// Closes that two reads of the tree asked for. A confirmation does not expire: it ends when a
    /// plan for the machine no longer closes the rule. With a slow provider the close may be sent
    /// only several passes later.
    confirmed: BTreeMap<MachineId, BTreeSet<Rule>>,
    /// When the full read of the present view began, and when the last read that updated the view
    /// ended.
    read: Option<(Instant, Instant)>,
    /// The present view leads to closes that need confirmation.
    doubted: bool,
}

impl Trust {
    /// Starts a new view of everything, whose closes are not confirmed. Its read began at `begun`.
    pub(super) fn begin(&mut self, view: &View, begun: Instant, now: Instant) {
        self.unjudged = view.machines.keys().copied().collect();
        self.confirmed.retain(|machine, _| view.machines.contains_key(machine));
        self.read = Some((begun, now));
        self.doubted = false;
    }

    /// Records that a part of the present view was read again.
    pub(super) fn refreshed(&mut self, now: Instant) {
        self.read = self.read.map(|(begun, _)| (begun, now));
    }

    /// Records that the rules of these machines are known, or cannot be changed.
    pub(super) fn judged<'a>(&mut self, machines: impl Iterator<Item = &'a MachineId>) {
        machines.for_each(|machine| _ = self.unjudged.remove(machine));
    }

    /// Ends a view. The next view must confirm its closes, unless the rules of all machines were
    /// known and no close was in doubt.
    pub(super) fn end(&mut self, view: Option<View>) {
        let (Some(view), Some((_, ended))) = (view, self.read) else { return };
        if !self.doubted && self.unjudged.is_empty() {
            self.before = None;
        } else if self.before.is_none() || self.is_second_read() {
            self.before = Some((view, ended));
        }
    }

    /// Whether the present view comes from a read that began long enough after the previous view:
    /// two reads at nearly the same time may both show the same error. The duration of this pass
    /// does not matter.
    fn is_second_read(&self) -> bool {
        match (&self.before, self.read) {
            (Some((_, before)), Some((begun, _))) => begun >= *before + CONFIRM_AFTER,
            _ => false,
        }
    }

    /// Ends the confirmations of rules that the plans of their machines do not close.
    fn drop_outdated(&mut self, plans: &BTreeMap<MachineId, MachinePlan>) {
        self.confirmed.retain(|machine, rules| {
            if let Some(plan) = plans.get(machine) {
                let lost = plan.lost();
                rules.retain(|rule| lost.contains(rule));
            }
            !rules.is_empty()
        });
    }

    /// Notes closes that two reads asked for, and returns how many of them are new.
    fn confirm(&mut self, machine: MachineId, rules: BTreeSet<Rule>) -> usize {
        if rules.is_empty() {
            return 0;
        }
        let known = self.confirmed.entry(machine).or_default();
        let new = rules.difference(known).count();
        if !planted(Bug::ForgetsConfirmations) {
            known.extend(rules);
        }
        new
    }

    pub(super) fn in_doubt(&self) -> bool {
        self.doubted
    }
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Removes closes from `plans` that need confirmation by another read, and returns the affected
    /// machines. Opens are not delayed.
    pub(super) fn hold_if_in_doubt(
        &mut self,
        plans: &mut BTreeMap<MachineId, MachinePlan>,
        reports: &mut BTreeMap<MachineId, Report>,
    ) -> BTreeSet<MachineId> {
        if let Some(reason) = self.view.as_ref().and_then(View::closes_nothing) {
            return self.hold_all(plans, reports, &reason);
        }
        let total = self.seen.values().map(|rules| rules.owned.len()).sum();
        self.trust.drop_outdated(plans);
        // An unreadable tree looks like one without units, so even a few closes need confirmation.
        let bare = self.view.as_ref().is_none_or(|view| view.units.is_empty());
        let bare = bare && !planted(Bug::BelievesNothing);
        let by_pass = planted(Bug::JudgesByPass);
        let whole = self.trust.unjudged.is_empty() || by_pass;
        let (closing, of) = match confidence(plans.values(), total, whole && (!bare || by_pass)) {
            Confidence::LookAgain { closing, of } if !planted(Bug::NoSecondLook) => (closing, of),
            Confidence::Sure if !whole => return BTreeSet::new(),
            _ => {
                self.trust.before = None;
                return BTreeSet::new();
            }
        };
        let mut disputed: BTreeMap<MachineId, BTreeSet<Rule>> = BTreeMap::new();
        let mut confirmed = 0;
        for (&id, plan) in plans.iter() {
            let lost = plan.lost();
            let known = self.trust.confirmed.get(&id).cloned().unwrap_or_default();
            let open: BTreeSet<Rule> = &(&lost - &known) - &self.lost_before(id);
            confirmed += self.trust.confirm(id, &lost - &open);
            if !open.is_empty() {
                disputed.insert(id, open);
            }
        }
        if disputed.is_empty() {
            // Without a complete view every close needs two reads, so their agreement is not worth
            // a warning.
            if whole && confirmed > 0 {
                warn!(closing, of, "closing what a second look confirms");
                self.trust.before = None;
            } else {
                debug!(closing, of, "closing what two looks ask for");
            }
            return BTreeSet::new();
        }
        warn!(closing, of, whole, "would close too much; looking again first");
        let why = format!("closing {closing} of {of} rules waits for a second look");
        for (&id, rules) in &disputed {
            self.hold(id, rules, plans, reports, &why);
        }
        self.trust.doubted = true;
        disputed.into_keys().collect()
    }

    /// Removes every close from `plans`, because the view does not show which ports are still
    /// wanted.
    fn hold_all(
        &mut self,
        plans: &mut BTreeMap<MachineId, MachinePlan>,
        reports: &mut BTreeMap<MachineId, Report>,
        reason: &str,
    ) -> BTreeSet<MachineId> {
        let lost = plans.iter().map(|(id, plan)| (*id, plan.lost()));
        let lost: BTreeMap<MachineId, BTreeSet<Rule>> = lost.filter(|(_, rules)| !rules.is_empty()).collect();
        if !lost.is_empty() {
            warn!(reason, machines = lost.len(), "no port is closed");
        }
        for (id, rules) in &lost {
            self.hold(*id, rules, plans, reports, reason);
        }
        lost.into_keys().collect()
    }

    /// Removes these closes from the plan of one machine, and reports the reason.
    fn hold(
        &mut self,
        id: MachineId,
        rules: &BTreeSet<Rule>,
        plans: &mut BTreeMap<MachineId, MachinePlan>,
        reports: &mut BTreeMap<MachineId, Report>,
        why: &str,
    ) {
        self.noticed.entry(id).or_insert(self.since);
        // All machines wait for the same next read; an earlier read of one would show the same
        // data.
        self.retries.succeeded(id);
        if let Some(plan) = plans.get_mut(&id) {
            plan.change.close.retain(|rule| !rules.contains(rule));
            plan.deferred.clear();
        }
        if let Some(report) = reports.get_mut(&id) {
            report.problem = Some(why.to_owned());
            self.keep_granted(id, rules, report);
        }
    }

    /// The rules that the previous view would close on the machine as it is now.
    fn lost_before(&self, machine: MachineId) -> BTreeSet<Rule> {
        let before = self.trust.before.as_ref().filter(|_| self.trust.is_second_read());
        match (before, self.seen.get(&machine)) {
            (Some((before, _)), Some(rules)) => self.plan(before, machine, rules).1.lost(),
            _ => BTreeSet::new(),
        }
    }
}
