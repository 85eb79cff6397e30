//! Settles the result of a machine's change: what it changes in the machine's state and report, and
//! when the machine is due again. Pure. The controller logs, counts and writes the rest.

use std::collections::BTreeSet;

use crate::mutant;
use portcullis_provider::rule::{Change, Rule};
use portcullis_provider::{Applied, Error};

use super::state::MachineState;
use crate::firewall::plan::MachinePlan;
use crate::firewall::refusals::Request;
use crate::firewall::report::Report;
use crate::machine::retry::Pace;
use crate::runtime::clock::Moment;

/// Why a part of a plan was not to be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CloseHold {
    None,
    /// A dry run, or closes that a restored store does not allow.
    KeptOpen,
    /// Closes that wait for a second read.
    Unconfirmed,
}

/// A machine's plan, and the result of applying it. `I` is a point in time.
#[derive(Debug)]
pub(crate) struct Attempt<'a, I> {
    pub(crate) plan: &'a MachinePlan,
    /// `None` if no request was necessary or allowed.
    pub(crate) applied: Option<&'a Applied>,
    pub(crate) hold: CloseHold,
    /// The firewall applies a change as one transaction.
    pub(crate) is_atomic: bool,
    /// The problem in the machine's last report.
    pub(crate) last_problem: Option<&'a str>,
    /// Since when the change had been postponed before this attempt.
    pub(crate) postponed_since: Option<I>,
    /// When the pass began to read changes.
    pub(crate) pass_since: I,
}

/// The effects of an attempt other than those on the machine's state and report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Settled<I> {
    /// The number of rules that were opened and closed.
    pub(crate) opened: usize,
    pub(crate) closed: usize,
    /// The kinds of the errors.
    pub(crate) failures: Vec<&'static str>,
    /// The number of rules that were opened and closed, to be logged.
    pub(crate) logged_change: Option<(usize, usize)>,
    /// A problem to be logged. A repeated problem is not logged again: the report shows it for as
    /// long as it lasts.
    pub(crate) new_problem: Option<String>,
    /// Rules that should have been closed and are still open. The report assigns them to the units
    /// that had them.
    pub(crate) still_open: BTreeSet<Rule>,
    /// When the change was noticed that is complete now.
    pub(crate) completed_since: Option<I>,
    /// The next request of a divided change may be sent at once.
    pub(crate) continues: bool,
}

impl<I> Default for Settled<I> {
    fn default() -> Self {
        Self {
            opened: 0,
            closed: 0,
            failures: Vec::new(),
            logged_change: None,
            new_problem: None,
            still_open: BTreeSet::new(),
            completed_since: None,
            continues: false,
        }
    }
}

/// Settles an attempt at `now`. `random` spreads retries.
pub(crate) fn settle<I: Moment>(
    state: &mut MachineState<I>,
    report: &mut Report,
    attempt: &Attempt<'_, I>,
    now: I,
    random: &mut dyn FnMut() -> u64,
) -> Settled<I> {
    let mut settled = Settled::default();
    let plan = attempt.plan;
    if let Some(applied) = attempt.applied {
        record_result(state, report, attempt, applied, &mut settled);
        if applied.errors().next().is_some() {
            let first_full = matches!(applied.opened, Err(Error::QuotaExceeded { .. }))
                && state.full_since.replace(now).is_none();
            schedule_retry(state, attempt, applied, first_full, now, random);
        } else if applied.is_cut_short() && !mutant!(UnsentChangeCountsAsApplied) {
            // The lease ended during the pass: the next pass begins with this machine, under a
            // renewed lease. After a failure, the retry includes the requests that were not sent.
            state.postponed_since = Some(attempt.postponed_since.unwrap_or(now));
        }
    }
    let is_postponed = state.postponed_since.is_some();
    if is_postponed || report.problem.is_some() {
        settled.still_open.extend(&plan.deferred);
    }
    if is_postponed || attempt.hold == CloseHold::Unconfirmed {
        return settled;
    }
    let failed = attempt.applied.is_some_and(|applied| applied.errors().next().is_some());
    if attempt.hold == CloseHold::None {
        settled.completed_since = completed_since(state, plan, attempt.pass_since);
        // Replaced rules are closed only after a read shows the new ones: the provider may have
        // merged an old rule into them. Outdated reads are retried with growing pauses.
        if !failed && !plan.deferred.is_empty() && !plan.change.is_empty() {
            state.rules = None;
            state.retry_after(Pace::ReadAgain, now, random());
            return settled;
        }
        // If nothing was sent, an immediate second pass would plan the same.
        settled.continues = !failed && plan.divided && !plan.change.is_empty();
    }
    if !failed {
        state.retry = None;
    }
    settled
}

/// Each half of a change with its result.
fn halves<'a>(
    change: &'a Change,
    applied: &'a Applied,
) -> [(Request, &'a BTreeSet<Rule>, &'a Result<(), Error>); 2] {
    [(Request::Open, &change.open, &applied.opened), (Request::Close, &change.close, &applied.closed)]
}

/// Updates the cached rules, the refusals and the report.
fn record_result<I: Moment>(
    state: &mut MachineState<I>,
    report: &mut Report,
    attempt: &Attempt<'_, I>,
    applied: &Applied,
    settled: &mut Settled<I>,
) {
    let change = &attempt.plan.change;
    for (request, rules, result) in halves(change, applied) {
        if result.is_ok() && !rules.is_empty() {
            state.refusals.accepted(request, attempt.plan.divided);
        }
    }
    if applied.is_ok() {
        state.refusals.accepted(Request::Repair, false);
    }
    if applied.opened.is_ok() {
        settled.opened = change.open.len();
        report.pending.retain(|rule| !change.open.contains(rule));
    }
    if applied.closed.is_ok() {
        settled.closed = change.close.len();
    } else {
        settled.still_open.extend(&change.close);
    }
    let problems: Vec<String> = applied.errors().map(ToString::to_string).collect();
    if problems.is_empty() {
        let done = applied.begun_of(change);
        if !done.is_empty() || applied.is_ok() {
            settled.logged_change = Some((done.open.len(), done.close.len()));
        }
        if let Some(rules) = state.rules.as_mut().filter(|_| !mutant!(AppliedChangeNotCached)) {
            rules.owned = done.applied_to(&rules.owned);
            if applied.is_ok() {
                rules.drift.clear();
            }
        }
        return;
    }
    // The rules of the machine are unknown now: they are read again before the next plan.
    if !mutant!(StaleRulesUsedAfterFailure) {
        state.rules = None;
    }
    settled.failures = applied.errors().map(Error::kind).collect();
    let problem = problems.join("; ");
    settled.new_problem = (attempt.last_problem != Some(&problem)).then(|| problem.clone());
    report.problem = Some(problem);
}

/// Decides when a machine with a failed request is due again. A request that `refusals` holds back
/// is due when its hold ends. `first_full` if the machine's firewall was not known to be full.
fn schedule_retry<I: Moment>(
    state: &mut MachineState<I>,
    attempt: &Attempt<'_, I>,
    applied: &Applied,
    first_full: bool,
    now: I,
    random: &mut dyn FnMut() -> u64,
) {
    let change = &attempt.plan.change;
    if change.is_empty() {
        let Some(error) = applied.errors().next() else { return };
        if !state.deny(Request::Repair, error, now, random()) {
            let slowest = applied.errors().map(Pace::after).max().unwrap_or(Pace::ReadAgain);
            state.retry_after(slowest, now, random());
        }
        return;
    }
    let mut pace = None;
    let mut at_once = false;
    for (request, rules, result) in halves(change, applied) {
        let Err(error) = result else { continue };
        if rules.is_empty() || matches!(error, Error::NotBegun { .. }) {
            continue;
        }
        let random = random();
        // The first time that a machine is full, the next request contains only the rules that fit.
        let is_full = first_full && request == Request::Open;
        let is_divisible = !(attempt.is_atomic || is_full);
        if is_divisible && state.refusals.divided(request, rules, error, now, random) {
            at_once = true;
        } else if is_full && applied.closed.is_ok() {
            pace = pace.max(Some(Pace::ReadAgain));
        } else if !state.refusals.denied(request, error, now, random) {
            pace = pace.max(Some(Pace::after(error)));
        }
    }
    match pace {
        Some(pace) => state.retry_after(pace, now, random()),
        None if at_once => state.postponed_since = Some(now),
        None => state.retry = None,
    }
}

/// Returns since when the change was in progress, if it is complete. Includes all retries, and the
/// time before the change was planned.
fn completed_since<I: Moment>(state: &mut MachineState<I>, plan: &MachinePlan, pass_since: I) -> Option<I> {
    let since = state.noticed_at.take().unwrap_or(pass_since);
    if !plan.change.is_empty() {
        state.changing_since.get_or_insert(since);
    }
    let is_complete = state.rules.is_some() && plan.deferred.is_empty();
    state.changing_since.take_if(|_| is_complete)
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::Subject;
    use portcullis_provider::provider::{GroupId, MachineRules};
    use portcullis_provider::rule::{Cidr, PortRange, Protocol};
    use std::time::Duration;

    const NOW: Duration = Duration::from_secs(100);
    const NOTICED: Duration = Duration::from_secs(90);

    fn rules(ports: &[u16]) -> BTreeSet<Rule> {
        let rule = |port: &u16| Rule::new(PortRange::single(*port, Protocol::Tcp).unwrap(), Cidr::WORLD_V4);
        ports.iter().map(rule).collect()
    }

    fn plan(open: &[u16], close: &[u16], deferred: &[u16]) -> MachinePlan {
        let change = Change { open: rules(open), close: rules(close) };
        MachinePlan { change, deferred: rules(deferred), ..MachinePlan::default() }
    }

    /// A machine with ports 80 and 90 open, and the report about a plan.
    fn machine(plan: &MachinePlan) -> (MachineState<Duration>, Report) {
        let owned = rules(&[80, 90]);
        let group = GroupId::new("sg-1");
        let rules = MachineRules { group, owned, foreign: Vec::new(), ipv6: false, drift: Vec::new() };
        let state = MachineState { rules: Some(rules), noticed_at: Some(NOTICED), ..MachineState::default() };
        (state, Report { pending: plan.change.open.iter().copied().collect(), ..Report::default() })
    }

    fn attempt<'a>(plan: &'a MachinePlan, applied: Option<&'a Applied>) -> Attempt<'a, Duration> {
        Attempt {
            plan,
            applied,
            hold: CloseHold::None,
            is_atomic: false,
            last_problem: None,
            postponed_since: None,
            pass_since: NOW,
        }
    }

    fn settled(attempt: &Attempt<'_, Duration>) -> (MachineState<Duration>, Report, Settled<Duration>) {
        let (mut state, mut report) = machine(attempt.plan);
        let settled = settle(&mut state, &mut report, attempt, NOW, &mut || 0);
        (state, report, settled)
    }

    fn failed(error: impl Fn(Subject) -> Error) -> Applied {
        Applied { opened: Err(error(Subject::Provider)), closed: Ok(()) }
    }

    #[test]
    fn a_successful_change_updates_the_cached_rules_and_is_complete() {
        let (plan, applied) = (plan(&[443], &[90], &[]), Applied::as_one(Ok(())));
        let (state, report, settled) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!(state.rules.unwrap().owned, rules(&[80, 443]));
        assert!(report.pending.is_empty() && report.problem.is_none());
        assert_eq!((settled.opened, settled.closed, settled.logged_change), (1, 1, Some((1, 1))));
        assert_eq!((settled.completed_since, state.retry), (Some(NOTICED), None));
    }

    #[test]
    fn a_failed_change_is_read_again_reported_and_retried() {
        let plan = plan(&[443], &[90], &[]);
        let throttled = |what| Error::Throttled { what };
        let applied = Applied { opened: Ok(()), closed: Err(throttled(Subject::Provider)) };
        let (state, report, settled) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!((state.rules, state.changing_since), (None, Some(NOTICED)));
        assert!(state.retry.unwrap().at() > NOW);
        assert_eq!(settled.failures, ["throttled"]);
        assert_eq!((settled.still_open, settled.completed_since), (rules(&[90]), None));
        assert_eq!(settled.new_problem, report.problem);
        let again = Attempt { last_problem: report.problem.as_deref(), ..attempt(&plan, Some(&applied)) };
        assert_eq!(self::settled(&again).2.new_problem, None, "logged once");
    }

    #[test]
    fn a_denied_request_waits_for_its_hold_and_not_for_a_retry() {
        let plan = plan(&[443], &[], &[]);
        let applied = failed(|what| Error::Denied { what, reason: "no".into() });
        let (state, ..) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!((state.retry, state.refusals.next()), (None, Some(NOW + Duration::from_secs(60))));
    }

    #[test]
    fn a_refused_request_continues_at_once_with_fewer_rules() {
        let plan = plan(&[443, 8080], &[], &[]);
        let applied = failed(|what| Error::Invalid { what, reason: "no".into() });
        let (state, ..) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!((state.postponed_since, state.refusals.limits().open.at_most), (Some(NOW), Some(1)));
        let atomic = Attempt { is_atomic: true, ..attempt(&plan, Some(&applied)) };
        let (state, ..) = settled(&atomic);
        assert_eq!((state.postponed_since, state.refusals.limits().open.at_most), (None, None));
    }

    #[test]
    fn a_full_firewall_is_read_again_at_once() {
        let plan = plan(&[443, 8080], &[], &[]);
        let applied = failed(|what| Error::QuotaExceeded { what, limit: None });
        let (state, ..) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!((state.full_since, state.retry.unwrap().at()), (Some(NOW), NOW));
    }

    #[test]
    fn a_change_that_the_lease_cut_short_keeps_its_place() {
        let plan = plan(&[443], &[90], &[]);
        let not_begun = Error::NotBegun { what: Subject::Provider };
        let applied = Applied { opened: Err(not_begun), closed: Ok(()) };
        for (before, after) in [(None, NOW), (Some(NOTICED), NOTICED)] {
            let attempt = Attempt { postponed_since: before, ..attempt(&plan, Some(&applied)) };
            let (state, report, settled) = settled(&attempt);
            assert_eq!((state.postponed_since, settled.completed_since), (Some(after), None));
            assert_eq!(state.rules.unwrap().owned, rules(&[80]));
            assert!(report.problem.is_none() && !report.pending.is_empty());
        }
    }

    #[test]
    fn replaced_rules_are_closed_after_a_read_that_shows_the_new_ones() {
        let (plan, applied) = (plan(&[443], &[], &[90]), Applied::as_one(Ok(())));
        let (state, _, settled) = settled(&attempt(&plan, Some(&applied)));
        assert_eq!((state.rules, state.retry.unwrap().at()), (None, NOW));
        assert_eq!((settled.completed_since, settled.still_open), (None, BTreeSet::new()));
    }

    #[test]
    fn a_held_plan_counts_as_no_change() {
        let plan = plan(&[], &[], &[]);
        for (hold, noticed) in [
            (CloseHold::None, None),
            (CloseHold::KeptOpen, Some(NOTICED)),
            (CloseHold::Unconfirmed, Some(NOTICED)),
        ] {
            let (state, _, settled) = settled(&Attempt { hold, ..attempt(&plan, None) });
            assert_eq!((state.noticed_at, settled), (noticed, Settled::default()), "{hold:?}");
        }
    }
}
