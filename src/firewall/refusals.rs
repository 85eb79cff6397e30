//! Requests for one machine that the provider refused, and when they may be sent again. Pure. The
//! time is an argument.
//!
//! A denied request is not sent again within a minute. If a request may have been refused for a
//! part of its rules, smaller requests find that part at once: it is left out for a minute, and the
//! rest is carried out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::mutant;
use portcullis_provider::Error;
use portcullis_provider::rule::{PortRange, Rule, RuleSet};

use crate::runtime::clock::Moment;

/// The minimum time between a refused request and the next one of its kind.
const PAUSE: Duration = Duration::from_secs(60);

/// The maximum random addition to the pause, which spreads the requests for many machines.
const SPREAD_MS: u64 = 15_000;

/// The maximum number of refusals per machine and pause. After that all of its requests wait,
/// because the refusals do not concern a part only.
const MAX_REFUSALS: u32 = 64;

/// The maximum number of rules that a problem lists.
const NAMED_MAX: usize = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Request {
    Read,
    Open,
    Close,
    /// Restores the group or table itself; no rule is opened or closed.
    Repair,
}

/// Requests that must not be sent for now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitAfterRefusal {
    /// No request may be sent.
    pub all: bool,
    /// Rules that were refused individually. No rule that covers one of them is sent.
    pub rules: BTreeSet<Rule>,
    /// The maximum number of rules in one request.
    pub at_most: Option<usize>,
}

/// The limits of both halves of a machine's change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LimitsAfterRefusal {
    pub open: LimitAfterRefusal,
    pub close: LimitAfterRefusal,
}

impl LimitsAfterRefusal {
    pub fn is_empty(&self) -> bool {
        let free =
            |limit: &LimitAfterRefusal| !limit.all && limit.rules.is_empty() && limit.at_most.is_none();
        free(&self.open) && free(&self.close)
    }
}

impl LimitAfterRefusal {
    /// The widest rules that represent `wanted` and cover none of the refused ones. A refused port
    /// is left out; a refused range is split in the middle. A port that was refused for one source
    /// is likely to be refused for others, so it becomes a separate rule for them.
    pub fn permitted_rules(&self, wanted: &RuleSet) -> Vec<Rule> {
        let mut permitted = Vec::new();
        for rule in wanted.rules() {
            self.cut(rule, &mut permitted);
        }
        permitted
    }

    /// Adds the parts of `rule` that cover no refused rule.
    fn cut(&self, rule: Rule, permitted: &mut Vec<Rule>) {
        let cuts = |refused: &&Rule| {
            covers(rule, Rule::new(refused.ports, rule.source))
                && (refused.source == rule.source || is_one_port(refused) && !is_one_port(&rule))
        };
        let width = |rule: &&Rule| rule.ports.to() - rule.ports.from();
        let Some(refused) = self.rules.iter().filter(cuts).min_by_key(width) else {
            permitted.push(rule);
            return;
        };
        let (from, to) = (refused.ports.from(), refused.ports.to());
        let middle = from + (to - from) / 2;
        let part = |from, to| PortRange::new(from, to, rule.ports.proto()).ok();
        let after = |port: u16, to| port.checked_add(1).and_then(|next| part(next, to));
        // A refused port is left out, unless it was refused for another source.
        let first = part(from, middle).filter(|_| from < to || refused.source != rule.source);
        let (left, second) = (part(rule.ports.from(), from - 1), after(middle, to));
        for ports in [left, first, second, after(to, rule.ports.to())].into_iter().flatten() {
            self.cut(Rule::new(ports, rule.source), permitted);
        }
    }
}

fn covers(outer: Rule, inner: Rule) -> bool {
    let same = outer.source == inner.source && outer.ports.proto() == inner.ports.proto();
    same && outer.ports.from() <= inner.ports.from() && inner.ports.to() <= outer.ports.to()
}

/// When a refused request may be sent again, and the provider's reason.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Refused<I> {
    until: I,
    reason: String,
}

/// The refusals of one kind of request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KindRefusals<I> {
    all: Option<Refused<I>>,
    rules: BTreeMap<Rule, Refused<I>>,
    /// The maximum number of rules in one request, and until when. Without an end, the limit would
    /// still divide later requests when the refused rules are no longer wanted.
    at_most: Option<(usize, I)>,
    /// The number of refusals since the last time without a limit.
    count: u32,
}

impl<I> Default for KindRefusals<I> {
    fn default() -> Self {
        Self { all: None, rules: BTreeMap::new(), at_most: None, count: 0 }
    }
}

impl<I> KindRefusals<I> {
    fn is_idle(&self) -> bool {
        self.all.is_none() && self.rules.is_empty() && self.at_most.is_none()
    }
}

/// The refusals of one machine. `I` is a point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusals<I> {
    kinds: BTreeMap<Request, KindRefusals<I>>,
}

impl<I> Default for Refusals<I> {
    fn default() -> Self {
        Self { kinds: BTreeMap::new() }
    }
}

impl<I: Moment> Refusals<I> {
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Records a denied request: no request of its kind is sent before the pause ends. Returns
    /// false for other errors, which have their own retry schedule.
    pub fn denied(&mut self, request: Request, error: &Error, now: I, random: u64) -> bool {
        if !matches!(error, Error::Denied { .. }) || mutant!(DeniedRequestRepeated) {
            return false;
        }
        self.kinds.entry(request).or_default().all = Some(refused(error, now, random));
        true
    }

    /// Records that a request for these rules was refused, possibly because of some of them only.
    /// Returns whether the next request may be sent at once: it has fewer rules, or leaves out the
    /// refused one.
    pub fn divided(
        &mut self,
        request: Request,
        rules: &BTreeSet<Rule>,
        error: &Error,
        now: I,
        random: u64,
    ) -> bool {
        let full = matches!(error, Error::QuotaExceeded { .. });
        if !(error.may_concern_a_part() || full && rules.len() > 1) || mutant!(RefusedPortBlocksOthers) {
            return false;
        }
        let kind = self.kinds.entry(request).or_default();
        kind.count += 1;
        if kind.count > MAX_REFUSALS {
            (kind.all, kind.at_most) = (Some(refused(error, now, random)), None);
            return false;
        }
        match rules.first().filter(|_| rules.len() == 1) {
            Some(rule) => {
                kind.rules.retain(|other, _| !covers(*other, *rule));
                kind.rules.insert(*rule, refused(error, now, random));
                // The halves of a range are sent one by one; once the port is found, the rest is
                // sent at once.
                kind.at_most = (!is_one_port(rule)).then_some((1, now + PAUSE));
            }
            None => kind.at_most = Some((rules.len().div_ceil(2), now + PAUSE)),
        }
        true
    }

    /// Records a successful request; `more` if it contained only a part of the rules.
    pub fn accepted(&mut self, request: Request, more: bool) {
        if let Some(kind) = self.kinds.get_mut(&request) {
            kind.all = None;
            kind.at_most = kind.at_most.filter(|_| more);
            if kind.is_idle() {
                self.kinds.remove(&request);
            }
        }
    }

    /// Keeps only refusals, and no limits on the size of requests. Used for a machine that is
    /// missing from the view, possibly only temporarily.
    pub fn drop_limits(&mut self) {
        self.kinds.retain(|_, kind| kind.all.is_some() || !kind.rules.is_empty());
    }

    /// Removes expired limits, and returns whether there were any.
    pub fn expire(&mut self, now: I) -> bool {
        let mut expired = false;
        for kind in self.kinds.values_mut() {
            let before = (kind.all.is_some(), kind.rules.len());
            kind.all = kind.all.take().filter(|refused| now < refused.until);
            kind.rules.retain(|_, refused| now < refused.until);
            kind.at_most = kind.at_most.filter(|(_, until)| now < *until);
            if before != (kind.all.is_some(), kind.rules.len()) {
                expired = true;
                kind.count = 0;
            }
        }
        self.kinds.retain(|_, kind| !kind.is_idle());
        expired
    }

    /// When the next limit expires.
    pub fn next(&self) -> Option<I> {
        let untils = |kind: &KindRefusals<I>| -> Option<I> {
            kind.all.iter().chain(kind.rules.values()).map(|refused| refused.until).min()
        };
        self.kinds.values().filter_map(untils).min()
    }

    /// Why no request of this kind may be sent for now.
    pub fn denial(&self, request: Request) -> Option<&str> {
        self.kinds.get(&request)?.all.as_ref().map(|refused| refused.reason.as_str())
    }

    pub fn limits(&self) -> LimitsAfterRefusal {
        let limit = |request| {
            self.kinds.get(&request).map_or_else(LimitAfterRefusal::default, |kind| LimitAfterRefusal {
                all: kind.all.is_some(),
                rules: kind.rules.keys().copied().collect(),
                at_most: kind.at_most.map(|(most, _)| most),
            })
        };
        LimitsAfterRefusal { open: limit(Request::Open), close: limit(Request::Close) }
    }

    /// Why changes of the machine are held, one text per reason, with the affected rules.
    pub fn problems(&self) -> Vec<String> {
        let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for request in [Request::Open, Request::Close, Request::Repair] {
            let Some(kind) = self.kinds.get(&request) else { continue };
            if let Some(refused) = &kind.all {
                reasons.entry(&refused.reason).or_default();
            }
            // A range is only an intermediate result in the search for the refused port.
            let final_ones =
                kind.rules.iter().filter(|(rule, _)| request == Request::Close || is_one_port(rule));
            for (rule, refused) in final_ones {
                reasons.entry(&refused.reason).or_default().push(rule.to_string());
            }
        }
        reasons.into_iter().map(|(reason, rules)| named(reason, &rules)).collect()
    }
}

fn refused<I: Moment>(error: &Error, now: I, random: u64) -> Refused<I> {
    let pause = if mutant!(RetryPauseOfAnHour) { 60 * PAUSE } else { PAUSE };
    let until = now + pause + Duration::from_millis(random % SPREAD_MS);
    Refused { until, reason: error.to_string() }
}

fn is_one_port(rule: &Rule) -> bool {
    rule.ports.from() == rule.ports.to()
}

fn named(reason: &str, rules: &[String]) -> String {
    match rules.len() {
        0 => reason.to_owned(),
        count if count > NAMED_MAX => {
            format!("{} and {} more: {reason}", rules[..NAMED_MAX].join(", "), count - NAMED_MAX)
        }
        _ => format!("{}: {reason}", rules.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::Subject;
    use portcullis_provider::rule::{Cidr, Protocol};
    use std::time::Instant;

    fn rule(from: u16, to: u16) -> Rule {
        Rule::new(PortRange::new(from, to, Protocol::Tcp).unwrap(), Cidr::WORLD_V4)
    }

    fn rules(ranges: &[(u16, u16)]) -> BTreeSet<Rule> {
        ranges.iter().map(|&(from, to)| rule(from, to)).collect()
    }

    fn invalid() -> Error {
        Error::Invalid { what: Subject::Provider, reason: "no".into() }
    }

    fn denied() -> Error {
        Error::Denied { what: Subject::Provider, reason: "no".into() }
    }

    #[test]
    fn rules_are_cut_around_refused_ports_and_in_the_middle_of_refused_ranges() {
        for (refused, wanted, permitted) in [
            (&[][..], &[(80, 90)][..], &[(80, 90)][..]),
            (&[(85, 85)], &[(80, 90)], &[(80, 84), (86, 90)]),
            (&[(80, 80), (90, 90)], &[(80, 90)], &[(81, 89)]),
            (&[(80, 90)], &[(80, 90)], &[(80, 85), (86, 90)]),
            (&[(80, 83)], &[(80, 90)], &[(80, 81), (82, 83), (84, 90)]),
            (&[(80, 90)], &[(81, 90)], &[(81, 90)]),
            (&[(1, 1), (65_535, 65_535)], &[(1, 65_535)], &[(2, 65_534)]),
            (&[(80, 80)], &[(80, 80)], &[]),
        ] {
            let limit = LimitAfterRefusal { rules: rules(refused), ..LimitAfterRefusal::default() };
            let wanted: RuleSet = rules(wanted).iter().collect();
            let expected: Vec<Rule> = permitted.iter().map(|&(from, to)| rule(from, to)).collect();
            assert_eq!(limit.permitted_rules(&wanted), expected, "{refused:?}");
        }
    }

    #[test]
    fn a_port_that_was_refused_for_one_source_is_a_separate_rule_for_others() {
        let of_v6 = |from, to| Rule::new(rule(from, to).ports, Cidr::WORLD_V6);
        let limit = LimitAfterRefusal { rules: rules(&[(85, 85), (90, 95)]), ..LimitAfterRefusal::default() };
        let wanted: RuleSet = [of_v6(80, 99)].iter().collect();
        assert_eq!(limit.permitted_rules(&wanted), [of_v6(80, 84), of_v6(85, 85), of_v6(86, 99)]);
    }

    /// Sends requests as a machine's plan would until none is left, to a provider that refuses some
    /// ports.
    fn requests_until_done(wanted: &[(u16, u16)], refuses: impl Fn(u16) -> bool) -> (usize, RuleSet) {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let wanted: RuleSet = rules(wanted).iter().collect();
        let (mut open, mut sent) = (RuleSet::new(), 0);
        loop {
            let limit = refusals.limits().open;
            let missing: Vec<Rule> =
                limit.permitted_rules(&wanted).into_iter().filter(|rule| !open.covers(rule)).collect();
            let request: BTreeSet<Rule> =
                missing.iter().take(limit.at_most.unwrap_or(usize::MAX)).copied().collect();
            if request.is_empty() || limit.all {
                return (sent, open);
            }
            sent += 1;
            if request.iter().any(|rule| (rule.ports.from()..=rule.ports.to()).any(&refuses)) {
                refusals.divided(Request::Open, &request, &invalid(), now, 0);
            } else {
                refusals.accepted(Request::Open, request.len() < missing.len());
                request.iter().for_each(|rule| open.insert(rule));
            }
        }
    }

    #[test]
    fn all_ports_but_the_refused_ones_open_with_few_requests() {
        let singles: Vec<(u16, u16)> = (0..50).map(|n| (1000 + 2 * n, 1000 + 2 * n)).collect();
        for (wanted, refused, most) in [
            (&singles[..], &[1000][..], 12),
            (&singles[..], &[1098], 14),
            (&singles[..], &[1040, 1060], 28),
            (&[(1, 65_535)], &[4242], 40),
            (&[(80, 82), (443, 443)], &[81], 8),
        ] {
            let (sent, open) = requests_until_done(wanted, |port| refused.contains(&port));
            let all: RuleSet = rules(wanted).iter().collect();
            let without: RuleSet = refused.iter().map(|&port| rule(port, port)).collect();
            assert_eq!(open, all.minus(&without), "{refused:?}");
            assert!(sent <= most, "{sent} requests for {refused:?}");
        }
    }

    #[test]
    fn a_provider_that_refuses_everything_gets_a_bounded_number_of_requests() {
        let (sent, open) = requests_until_done(&[(1, 65_535)], |_| true);
        assert_eq!((sent, open.is_empty()), (MAX_REFUSALS as usize + 1, true));
    }

    #[test]
    fn a_limit_on_the_size_of_requests_ends_after_a_minute() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        assert!(refusals.divided(Request::Open, &rules(&[(80, 80), (90, 90)]), &invalid(), now, 0));
        assert_eq!(refusals.limits().open.at_most, Some(1));
        refusals.expire(now + PAUSE - Duration::from_millis(1));
        assert_eq!(refusals.limits().open.at_most, Some(1));
        refusals.expire(now + PAUSE);
        assert_eq!(refusals.limits(), LimitsAfterRefusal::default());
    }

    #[test]
    fn a_denied_request_waits_for_a_minute_and_other_requests_do_not() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        assert!(refusals.denied(Request::Open, &denied(), now, 0));
        assert!(!refusals.denied(Request::Close, &invalid(), now, 0));
        let limits = refusals.limits();
        assert_eq!((limits.open.all, limits.close.all, refusals.denial(Request::Read)), (true, false, None));
        assert_eq!(refusals.problems(), [denied().to_string()]);
        assert_eq!(refusals.next(), Some(now + PAUSE));
        assert!(!refusals.expire(now + PAUSE - Duration::from_millis(1)));
        assert!(refusals.expire(now + PAUSE));
        assert_eq!((refusals.limits(), refusals.next()), (LimitsAfterRefusal::default(), None));
    }
}
