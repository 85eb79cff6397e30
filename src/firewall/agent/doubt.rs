//! Whether what a look at the tree takes away is believed. A tree that wrongly shows nothing looks just like an operator who
//! shut everything, so a view is judged as a whole: by all that it would close on all machines, however few of them answer
//! at a time. What cannot be judged so is closed only if two looks in a row ask for it. How much is too much is in `plan`.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::Firewall;
use portcullis_provider::planted::{Bug, planted};
use portcullis_provider::rule::Rule;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::Agent;
use crate::firewall::observe::View;
use crate::firewall::plan::{Confidence, MachinePlan, confidence};
use crate::firewall::report::Report;
use crate::model::MachineId;
use crate::runtime::reconcile::DOUBT;
use crate::store::tree::Tree;

/// How far the present view is trusted with closing what is open.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Machines whose rules nobody could look at since the view was made: what it takes away as a whole is not known.
    unjudged: BTreeSet<MachineId>,
    /// A look before the present one, if that was not trusted, and when it was.
    before: Option<(View, Instant)>,
    /// The look at everything that the view came from showed no unit at all; nothing has shown one since, and no second
    /// look has confirmed it. A tree of which nothing is shown looks like this, however little there is to close.
    bare: bool,
    /// The present view would close what is not to be closed on its word alone.
    doubted: bool,
}

impl Trust {
    /// A view of everything is new, and nothing is known of what it takes away.
    pub(super) fn begin(&mut self, view: &View) {
        self.unjudged = view.machines.keys().copied().collect();
        self.bare = view.units.is_empty() && !planted(Bug::BelievesNothing);
        self.doubted = false;
    }

    /// What these machines have is known, or that it cannot be changed.
    pub(super) fn judged<'a>(&mut self, machines: impl Iterator<Item = &'a MachineId>) {
        machines.for_each(|machine| _ = self.unjudged.remove(machine));
    }

    /// A view is given up. The next one must agree with it, unless it was found to be good.
    pub(super) fn end(&mut self, view: Option<View>, now: Instant) {
        let Some(view) = view else { return };
        if !self.doubted && self.unjudged.is_empty() {
            self.before = None;
        } else if self.before.is_none() || self.is_ripe(now) {
            self.before = Some((view, now));
        }
    }

    /// Whether the look before is old enough to confirm anything: two in a moment are one look at the same mistake.
    fn is_ripe(&self, now: Instant) -> bool {
        self.before.as_ref().is_some_and(|(_, at)| now.duration_since(*at) >= DOUBT)
    }

    pub(super) fn in_doubt(&self) -> bool {
        self.doubted
    }
}

impl<T: Tree, F: Firewall> Agent<T, F> {
    /// Takes closes out of `plans` that need another look first, and says of which machines. Opens are not held up.
    pub(super) fn hold_if_in_doubt(
        &mut self,
        plans: &mut BTreeMap<MachineId, MachinePlan>,
        reports: &mut BTreeMap<MachineId, Report>,
    ) -> BTreeSet<MachineId> {
        let total = self.seen.values().map(|rules| rules.owned.len()).sum();
        self.trust.bare &= self.view.as_ref().is_some_and(|view| view.units.is_empty());
        let by_pass = planted(Bug::JudgesByPass);
        let whole = self.trust.unjudged.is_empty() || by_pass;
        let (closing, of) = match confidence(plans.values(), total, whole && (!self.trust.bare || by_pass)) {
            Confidence::LookAgain { closing, of } if !planted(Bug::NoSecondLook) => (closing, of),
            Confidence::Sure if !whole => return BTreeSet::new(),
            _ => {
                self.trust.before = None;
                return BTreeSet::new();
            }
        };
        let disputed: BTreeMap<MachineId, BTreeSet<Rule>> = plans
            .iter()
            .map(|(id, plan)| (*id, &plan.lost() - &self.lost_before(*id)))
            .filter(|(_, rules)| !rules.is_empty())
            .collect();
        if disputed.is_empty() {
            // If not all of what is taken away is known, even a single rule was looked at twice; that is no news.
            if whole {
                warn!(closing, of, "closing what a second look confirms");
                self.trust.before = None;
                self.trust.bare = false;
            } else {
                debug!(closing, of, "closing what two looks ask for");
            }
            return BTreeSet::new();
        }
        warn!(closing, of, whole, "would close too much; looking again first");
        for (&id, rules) in &disputed {
            self.noticed.entry(id).or_insert(self.since);
            // The next look comes for all of them; one that were due before would only see the same again.
            self.retries.succeeded(id);
            if let Some(plan) = plans.get_mut(&id) {
                plan.change.close.retain(|rule| !rules.contains(rule));
                plan.deferred.clear();
            }
            if let Some(report) = reports.get_mut(&id) {
                report.problem = Some(format!("closing {closing} of {of} rules waits for a second look"));
                self.keep_granted(id, rules, report);
            }
        }
        self.trust.doubted = true;
        disputed.into_keys().collect()
    }

    /// What the look before would take from the machine as it is now.
    fn lost_before(&self, machine: MachineId) -> BTreeSet<Rule> {
        let before = self.trust.before.as_ref().filter(|_| self.trust.is_ripe(Instant::now()));
        match (before, self.seen.get(&machine)) {
            (Some((before, _)), Some(rules)) => self.plan(before, machine, rules).1.lost(),
            _ => BTreeSet::new(),
        }
    }
}
