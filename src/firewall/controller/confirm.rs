//! Decides whether the closes that a read of the tree leads to are sent at once. A tree that
//! wrongly appears empty is indistinguishable from one in which every service was unexposed. A view
//! is therefore checked as a whole: against all rules that it would close on all machines, even if
//! few machines can be read at a time. Otherwise a close is sent only if two consecutive reads ask
//! for it. The thresholds are in `plan`. A close also waits if the exposed flag that allowed the
//! port was not removed by `juju unexpose`: a client that deletes a service, or all of them,
//! removes its flag first.

use std::collections::{BTreeMap, BTreeSet};

use crate::mutant;
use portcullis_provider::Firewall;
use portcullis_provider::rule::{Rule, RuleSet};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{FirewallController, Planned};
use crate::firewall::observe::{Exposure, View};
use crate::firewall::plan::{Confidence, MachinePlan, confidence};
use crate::model::MachineId;
use crate::runtime::confirm::FirstRead;
use crate::store::tree::Tree;

/// Whether the present view suffices to close rules, or needs confirmation. Closes that are
/// confirmed are in the state of their machine.
#[derive(Debug, Default)]
pub(super) struct Confirmation {
    /// An earlier view that needs confirmation.
    first: Option<FirstRead<View, Instant>>,
    /// When the full read of the present view began, and when the last read that updated the view
    /// ended.
    read: Option<(Instant, Instant)>,
    /// The present view leads to closes that need confirmation.
    is_awaited: bool,
}

impl Confirmation {
    /// Starts a new view, whose closes are not confirmed. Its read began at `begun`.
    pub(super) fn start_view(&mut self, begun: Instant, now: Instant) {
        self.read = Some((begun, now));
        self.is_awaited = false;
    }

    /// Records that a part of the present view was read again.
    pub(super) fn view_updated(&mut self, now: Instant) {
        self.read = self.read.map(|(begun, _)| (begun, now));
    }

    /// Ends a view. The next view must confirm its closes, unless the rules of all machines were
    /// read and no close awaits confirmation.
    pub(super) fn end_view(&mut self, view: Option<View>, all_read: bool) {
        let (Some(view), Some((_, ended))) = (view, self.read) else { return };
        if !self.is_awaited && all_read {
            self.first = None;
        } else if self.first.is_none() || self.first_view().is_some() {
            self.first = Some(FirstRead::new(view, ended));
        }
    }

    /// The earlier view, if the present view can confirm it.
    fn first_view(&self) -> Option<&View> {
        let (begun, _) = self.read?;
        self.first.as_ref()?.before(begun)
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited
    }
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Removes closes from the plans that need confirmation by another read, and returns the
    /// affected machines. Opens are not delayed.
    pub(super) fn hold_unconfirmed(&mut self, planned: &mut Planned) -> BTreeSet<MachineId> {
        if let Some(reason) = self.view.as_ref().and_then(View::why_no_closes) {
            return self.hold_all_closes(planned, &reason);
        }
        self.drop_outdated_confirmations(planned);
        // An unreadable tree looks like one without units, so even a few closes need confirmation.
        let no_units = self.view.as_ref().is_none_or(|view| view.units.is_empty());
        let no_units = no_units && !mutant!(EmptyReadNotConfirmed);
        let by_pass = mutant!(MassCloseCheckedPerPass);
        let whole = !self.machines.any_unread() || by_pass;
        let total = self.machines.owned_rules();
        let (closing, of) = match confidence(planned.plans.values(), total, whole && (!no_units || by_pass)) {
            Confidence::ReadAgain { closing, of } if !mutant!(MassCloseNotConfirmed) => (closing, of),
            Confidence::Sufficient if !whole => return BTreeSet::new(),
            _ => return self.hold_lost_flags(planned, total),
        };
        let (unconfirmed, newly_confirmed) = self.compare_reads(planned);
        if unconfirmed.is_empty() {
            // Without a complete view every close needs two reads, so their agreement is not worth
            // a warning.
            if whole && newly_confirmed > 0 {
                warn!(closing, of, "closing rules after a second read confirmed it");
                self.confirmation.first = None;
            } else {
                debug!(closing, of, "closing rules that two reads ask to close");
            }
            return BTreeSet::new();
        }
        warn!(closing, of, whole, "closes need confirmation; reading again first");
        let why = format!("closing {closing} of {of} rules waits for a second read");
        self.await_confirmation(&unconfirmed, planned, &why)
    }

    fn await_confirmation(
        &mut self,
        unconfirmed: &BTreeMap<MachineId, BTreeSet<Rule>>,
        planned: &mut Planned,
        why: &str,
    ) -> BTreeSet<MachineId> {
        for (&id, rules) in unconfirmed {
            self.hold_closes(id, rules, planned, why);
        }
        self.confirmation.is_awaited = true;
        unconfirmed.keys().copied().collect()
    }

    /// Removes closes from the plans for flags that `juju unexpose` did not remove, until a second
    /// read confirms them. Until then, a client that deletes the whole service has removed its
    /// record, too, and the units keep their ports.
    fn hold_lost_flags(&mut self, planned: &mut Planned, of: usize) -> BTreeSet<MachineId> {
        let lost = planned.plans.iter().map(|(id, plan)| (*id, self.closes_of_lost_flags(*id, plan)));
        let mut lost: BTreeMap<MachineId, BTreeSet<Rule>> =
            lost.filter(|(_, rules)| !rules.is_empty() && !mutant!(LostFlagNotConfirmed)).collect();
        if !lost.is_empty() {
            let (unconfirmed, _) = self.compare_reads(planned);
            let open =
                |id: &MachineId, rule: &Rule| unconfirmed.get(id).is_some_and(|all| all.contains(rule));
            lost.iter_mut().for_each(|(id, rules)| rules.retain(|rule| open(id, rule)));
            lost.retain(|_, rules| !rules.is_empty());
        }
        if lost.is_empty() {
            self.confirmation.first = None;
            return BTreeSet::new();
        }
        let closing: usize = lost.values().map(BTreeSet::len).sum();
        warn!(closing, of, "exposed flag removed without `juju unexpose`; reading again before closing");
        let why = format!(
            "closing {closing} of {of} rules waits for a second read: \
             an exposed flag is gone, and `juju unexpose` did not remove it"
        );
        self.await_confirmation(&lost, planned, &why)
    }

    /// The rules that the plan would close for services whose flag `juju unexpose` did not remove.
    /// Rules that no report assigns to a unit may belong to those services.
    fn closes_of_lost_flags(&self, machine: MachineId, plan: &MachinePlan) -> BTreeSet<Rule> {
        let mut closes = plan.unreplaced_closes();
        let Some(view) = self.view.as_ref().filter(|_| !closes.is_empty()) else { return closes };
        let last = self.reports.granted(machine);
        let reported: RuleSet = last.values().flat_map(RuleSet::rules).collect();
        let mut lost = view.units_without_flag(machine).peekable();
        if lost.peek().is_none() {
            return BTreeSet::new();
        }
        let had: RuleSet = lost.filter_map(|unit| last.get(&unit)).flat_map(RuleSet::rules).collect();
        closes.retain(|rule| had.meets(rule) || !reported.covers(rule));
        closes
    }

    /// Ends the confirmations of rules that the plans of their machines do not close.
    fn drop_outdated_confirmations(&mut self, planned: &Planned) {
        for (id, plan) in &planned.plans {
            let confirmed = &mut self.machines.entry(*id).confirmed_closes;
            if !confirmed.is_empty() {
                let lost = plan.unreplaced_closes();
                confirmed.retain(|rule| lost.contains(rule));
            }
        }
    }

    /// Confirms the closes that two reads ask for. Returns the other closes, and how many of the
    /// confirmed ones are new.
    fn compare_reads(&mut self, planned: &Planned) -> (BTreeMap<MachineId, BTreeSet<Rule>>, usize) {
        let (mut unconfirmed, mut newly_confirmed) = (BTreeMap::new(), 0);
        let vanish = self.services_vanish() && !mutant!(LostFlagNotConfirmed);
        for (&id, plan) in &planned.plans {
            let lost = plan.unreplaced_closes();
            let mut lost_before = self.lost_in_first_view(id);
            if vanish && !lost_before.is_empty() {
                let doubted = self.closes_of_lost_flags(id, plan);
                lost_before.retain(|rule| !doubted.contains(rule));
            }
            let known = &mut self.machines.entry(id).confirmed_closes;
            let new: BTreeSet<Rule> =
                lost.intersection(&lost_before).copied().filter(|rule| !known.contains(rule)).collect();
            let rest: BTreeSet<Rule> = &(&lost - known) - &new;
            newly_confirmed += new.len();
            if !mutant!(ConfirmationsNotKept) {
                known.extend(new);
            }
            if !rest.is_empty() {
                unconfirmed.insert(id, rest);
            }
        }
        (unconfirmed, newly_confirmed)
    }

    /// The rules that the earlier view would close on the machine as it is now.
    fn lost_in_first_view(&self, machine: MachineId) -> BTreeSet<Rule> {
        match (self.confirmation.first_view(), self.machines.rules(machine)) {
            (Some(view), Some(rules)) => self.plan(view, machine, rules).1.unreplaced_closes(),
            _ => BTreeSet::new(),
        }
    }

    /// Whether flags or services have vanished since the earlier view: a client may still be
    /// deleting all services, and reaches the record of this one later.
    fn services_vanish(&self) -> bool {
        let (Some(first), Some(view)) = (self.confirmation.first_view(), &self.view) else { return false };
        view.lost_flags.iter().any(|id| matches!(first.services.get(id), Some(Exposure::To(_))))
            || first.services.keys().any(|id| !view.services.contains_key(id))
    }

    /// Removes every close from the plans, because the view does not show which ports are still
    /// wanted.
    fn hold_all_closes(&mut self, planned: &mut Planned, reason: &str) -> BTreeSet<MachineId> {
        let lost = planned.plans.iter().map(|(id, plan)| (*id, plan.unreplaced_closes()));
        let lost: BTreeMap<MachineId, BTreeSet<Rule>> = lost.filter(|(_, rules)| !rules.is_empty()).collect();
        if !lost.is_empty() {
            warn!(reason, machines = lost.len(), "no port is closed");
        }
        for (id, rules) in &lost {
            self.hold_closes(*id, rules, planned, reason);
        }
        lost.into_keys().collect()
    }

    /// Removes these closes from the plan of one machine, and reports the reason.
    fn hold_closes(&mut self, id: MachineId, rules: &BTreeSet<Rule>, planned: &mut Planned, why: &str) {
        let state = self.machines.entry(id);
        state.noticed_at.get_or_insert(self.pass_since);
        // All machines wait for the same next read; an earlier read of one would show the same
        // data.
        state.retry = None;
        if let Some(plan) = planned.plans.get_mut(&id) {
            plan.change.close.retain(|rule| !rules.contains(rule));
            plan.deferred.clear();
        }
        if let Some(report) = planned.reports.get_mut(&id) {
            report.problem = Some(why.to_owned());
            self.copy_last_rules(id, rules, report);
        }
    }
}
