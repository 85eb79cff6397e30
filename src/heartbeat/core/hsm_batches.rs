//! Splits a round into calls to the state manager (HSM), also when that is slow, down, or rejects
//! single names: which call comes next, and what an answer means for the components in it. Each
//! component is in one call, the one with its newest change. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::state::Notification;
use crate::mutant;
use crate::runtime::backoff::doubling;

/// Names in one call.
pub const MAX_IN_CALL: usize = 10_000;

/// Runs of consecutive numbers in one call, so that they fit into a header. Changes of one pass are
/// one run.
const MAX_RUNS: usize = 200;

/// If this many names are refused and none is accepted, the names are not the reason.
const REFUSES_ALL: usize = 8;

const FIRST_PAUSE_MS: u64 = 200;
const LONGEST_PAUSE_MS: u64 = 30_000;

/// One call: components with the same notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub notification: Notification,
    /// Each name with the number of its change, in the order of the numbers.
    pub entries: Vec<(Name, u64)>,
}

impl Call {
    /// The numbers of the changes, in the order of the names, for example `7-9,12`. A receiver
    /// recognises a repeated call by them: a judge that crashes after a call and before its result
    /// is stored leaves a call that the next judge repeats.
    pub fn sequences(&self) -> String {
        let run = |run: &[(Name, u64)]| match run {
            [] => String::new(),
            [(_, only)] => only.to_string(),
            [(_, first), .., (_, last)] => format!("{first}-{last}"),
        };
        let runs: Vec<String> = self.entries.chunk_by(is_next).map(run).collect();
        runs.join(",")
    }
}

fn is_next((_, number): &(Name, u64), (_, next): &(Name, u64)) -> bool {
    number + 1 == *next
}

/// Splits entries, which are in order, into as few calls as possible.
fn calls(notification: Notification, entries: &[(Name, u64)]) -> Vec<Call> {
    let (mut calls, mut entries_of_call, mut runs) = (Vec::new(), Vec::new(), 0);
    let pieces = entries.chunk_by(is_next).flat_map(|run| run.chunks(MAX_IN_CALL));
    for piece in pieces {
        if runs == MAX_RUNS || entries_of_call.len() + piece.len() > MAX_IN_CALL {
            calls.push(Call { notification, entries: std::mem::take(&mut entries_of_call) });
            runs = 0;
        }
        entries_of_call.extend_from_slice(piece);
        runs += 1;
    }
    if !entries_of_call.is_empty() {
        calls.push(Call { notification, entries: entries_of_call });
    }
    calls
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Accepted,
    /// The call contains a name that is not acceptable.
    Refused,
    /// A component is unknown, the call is too large, or the address is wrong, for example while a
    /// proxy starts. Whether other calls are accepted decides.
    Unclear,
    /// The result is unknown: the state manager is down, hanging, or failing.
    Failed,
}

impl Answer {
    /// The meaning of a status for the components of a call. Statuses about authentication, limits
    /// or failures of the server say nothing about them.
    pub fn of(status: u16) -> Self {
        match status {
            200 | 202 | 204 => Self::Accepted,
            400 | 409 | 422 => Self::Refused,
            404 | 410 | 413 => Self::Unclear,
            _ => Self::Failed,
        }
    }
}

/// The calls of a round that are not made yet, and the results of the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    calls: VecDeque<Call>,
    /// At least one call was accepted.
    any_accepted: bool,
    /// This many refused names without an accepted one end the round.
    max_refusals: usize,
    /// Components that were alone in a call with an unclear answer.
    unclear: Vec<(Name, u64)>,
    done: Outcome,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    pub accepted: Vec<(Name, u64)>,
    pub refused: Vec<(Name, u64)>,
    /// The state manager is down or accepts nothing: everything else is tried again later.
    pub failed: bool,
    /// The state manager answers, and the failure may be due to single components: new changes wait
    /// for a shorter time.
    pub all_unclear: bool,
}

impl Round {
    /// Makes calls for the newest of these changes of each component.
    pub fn of(changes: &[Change]) -> Self {
        let mut newest: Vec<&Change> = changes.iter().collect();
        newest.sort_unstable_by_key(|change| (change.name, std::cmp::Reverse(change.sequence)));
        newest.dedup_by_key(|change| change.name);
        let mut calls = VecDeque::new();
        for notification in Notification::ALL {
            let of_word = newest.iter().filter(|change| change.notification == Some(notification));
            let mut entries: Vec<(Name, u64)> =
                of_word.map(|change| (change.name, change.sequence)).collect();
            entries.sort_unstable_by_key(|(_, sequence)| *sequence);
            calls.extend(self::calls(notification, &entries));
        }
        let (unclear, done) = (Vec::new(), Outcome::default());
        Self { calls, any_accepted: false, max_refusals: REFUSES_ALL, unclear, done }
    }

    /// Like [`Round::of`], for components that were rejected before and are likely to be rejected
    /// again.
    pub fn retry(changes: &[Change]) -> Self {
        Self { max_refusals: usize::MAX, ..Self::of(changes) }
    }

    /// The next call, or `None` after the last one.
    pub fn next_call(&mut self) -> Option<Call> {
        self.calls.pop_front()
    }

    /// Applies the answer to a call of [`Round::next_call`].
    pub fn answered(&mut self, call: Call, answer: Answer) {
        match answer {
            Answer::Accepted => {
                self.any_accepted = true;
                self.done.accepted.extend(call.entries);
            }
            Answer::Failed => {
                self.unclear.clear();
                self.give_up();
            }
            Answer::Refused | Answer::Unclear => {
                let Call { notification, mut entries } = call;
                if entries.len() > 1 {
                    let right = entries.split_off(entries.len() / 2);
                    self.calls.push_front(Call { notification, entries: right });
                    self.calls.push_front(Call { notification, entries });
                    return;
                }
                let clear = answer == Answer::Refused;
                if clear { &mut self.done.refused } else { &mut self.unclear }.extend(entries);
                if !self.any_accepted && self.done.refused.len() + self.unclear.len() >= self.max_refusals {
                    self.done.refused.clear();
                    self.give_up();
                }
            }
        }
    }

    fn give_up(&mut self) {
        self.calls.clear();
        self.done.failed = true;
    }

    /// Components that were accepted since the last call of this function. They should be stored
    /// before the next call is made.
    pub fn take_accepted(&mut self) -> Vec<(Name, u64)> {
        std::mem::take(&mut self.done.accepted)
    }

    pub fn finish(mut self) -> Outcome {
        if self.any_accepted {
            // Other calls to the same address were accepted, so the reason is these components.
            self.done.refused.append(&mut self.unclear);
        } else if !self.unclear.is_empty() {
            (self.done.failed, self.done.all_unclear) = (true, true);
        }
        self.done
    }
}

/// Returns how long to wait after this many failures in a row; `random` spreads it by a quarter. At
/// most the audit interval passes between two calls, since a server that is back should get its
/// first call within that time.
pub fn pause_ms(failures: u32, random: u64, interval_ms: u64) -> u64 {
    let longest = if mutant!(ProbesSeldom) { LONGEST_PAUSE_MS } else { interval_ms.min(LONGEST_PAUSE_MS) };
    let (first, longest) = (Duration::from_millis(FIRST_PAUSE_MS), Duration::from_millis(longest));
    let pause = doubling(first, failures.saturating_sub(1), longest).as_millis() as u64;
    pause - random % (pause / 4 + 1)
}

/// The body of a call.
pub fn body(call: &Call) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct Info<'a> {
        #[serde(rename = "ID")]
        id: &'a str,
        #[serde(rename = "Message")]
        message: &'a str,
        #[serde(rename = "Flag")]
        flag: &'a str,
    }
    #[derive(serde::Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct Body<'a> {
        #[serde(rename = "ComponentIDs")]
        ids: Vec<&'a str>,
        state: &'a str,
        flag: &'a str,
        extended_info: Info<'a>,
    }
    let (state, flag) = call.notification.state_and_flag();
    let ids = call.entries.iter().map(|(name, _)| name.as_str()).collect();
    let info = Info { id: "", message: call.notification.message(), flag: "" };
    // Strings are always JSON.
    serde_json::to_vec(&Body { ids, state, flag, extended_info: info }).expect("strings")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::heartbeat::core::beat::Stamp;
    use crate::heartbeat::core::state::State;

    fn change(name: &str, sequence: u64, notification: Notification) -> Change {
        Change {
            name: Name::parse(name).unwrap(),
            state: State::Ok,
            notification: Some(notification),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    /// Plays a round against a state manager that refuses calls with any of `bad` in them; returns
    /// the calls.
    fn play(changes: &[Change], bad: &[&str]) -> (Vec<Call>, Outcome) {
        play_with(Round::of(changes), bad, Answer::Refused)
    }

    fn play_with(mut round: Round, bad: &[&str], answer: Answer) -> (Vec<Call>, Outcome) {
        let mut calls = Vec::new();
        while let Some(call) = round.next_call() {
            calls.push(call.clone());
            let refused = call.entries.iter().any(|(name, _)| bad.contains(&name.as_str()));
            round.answered(call, if refused { answer } else { Answer::Accepted });
        }
        (calls, round.finish())
    }

    #[test]
    fn status_is_about_names_or_about_the_state_manager() {
        for (answer, statuses) in [
            (Answer::Accepted, &[200, 202, 204][..]),
            (Answer::Refused, &[400, 409, 422]),
            (Answer::Unclear, &[404, 410, 413]),
            (Answer::Failed, &[201, 301, 302, 401, 403, 405, 407, 408, 429, 500, 502, 503, 504]),
        ] {
            for status in statuses {
                assert_eq!(Answer::of(*status), answer, "{status}");
            }
        }
    }

    #[test]
    fn unknown_component_is_rejected_if_others_are_accepted() {
        let names = ["a", "b", "c", "d", "e"];
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Notification::Started)).collect();
        let (_, outcome) = play_with(Round::of(&changes), &["b", "e"], Answer::Unclear);
        let refused: Vec<&str> = outcome.refused.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((refused, outcome.accepted.len(), outcome.failed), (vec!["b", "e"], 3, false));
        // If no call is accepted, the address may be wrong.
        for count in [1, 2, 5] {
            let (_, outcome) = play_with(Round::of(&changes[..count]), &names, Answer::Unclear);
            assert_eq!(outcome, Outcome { failed: true, all_unclear: true, ..Outcome::default() });
        }
        let many: Vec<String> = (0..10_000).map(|number| format!("n{number}")).collect();
        let all: Vec<&str> = many.iter().map(String::as_str).collect();
        let changes: Vec<Change> =
            all.iter().zip(1..).map(|(name, number)| change(name, number, Notification::Started)).collect();
        let (calls, outcome) = play_with(Round::of(&changes), &all, Answer::Unclear);
        assert!(outcome.failed && outcome.refused.is_empty() && calls.len() < 40, "{}", calls.len());
    }

    #[test]
    fn rejected_components_are_all_tried_again() {
        let names: Vec<String> = (0..100).map(|number| format!("n{number:02}")).collect();
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Notification::Started)).collect();
        let bad: Vec<&str> = names[..99].iter().map(String::as_str).collect();
        let (calls, outcome) = play_with(Round::retry(&changes), &bad, Answer::Refused);
        assert_eq!((outcome.accepted, outcome.failed), (vec![(Name::parse("n99").unwrap(), 100)], false));
        assert!(outcome.refused.len() == 99 && calls.len() < 200, "{}", calls.len());
    }

    #[test]
    fn only_the_newest_change_of_a_component_is_sent() {
        let changes = [
            change("a", 1, Notification::Started),
            change("b", 2, Notification::Started),
            change("a", 3, Notification::MightBeDead),
            change("a", 5, Notification::Restarted),
            change("a", 4, Notification::DeclaredDead),
        ];
        let (calls, outcome) = play(&changes, &[]);
        let accepted: Vec<(Notification, usize)> =
            calls.iter().map(|call| (call.notification, call.entries.len())).collect();
        assert_eq!(accepted, [(Notification::Started, 1), (Notification::Restarted, 1)]);
        assert_eq!(outcome.accepted.len(), 2);
    }

    #[test]
    fn one_bad_name_does_not_stop_others() {
        let names: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
        let changes: Vec<Change> = names
            .iter()
            .zip(1..)
            .map(|(name, number)| change(name, number, Notification::DeclaredDead))
            .collect();
        let (calls, outcome) = play(&changes, &["n37"]);
        assert_eq!(outcome.accepted.len(), 99);
        assert_eq!(outcome.refused, [(Name::parse("n37").unwrap(), 38)]);
        assert!(!outcome.failed && calls.len() < 20, "{} calls", calls.len());
    }

    #[test]
    fn state_manager_that_refuses_all_has_failed() {
        let names: Vec<String> = (0..1000).map(|number| format!("n{number}")).collect();
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Notification::Started)).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        let (calls, outcome) = play(&changes, &all);
        assert!(outcome.failed && outcome.refused.is_empty() && outcome.accepted.is_empty());
        assert!(calls.len() < 40, "{} calls", calls.len());
    }

    #[test]
    fn failure_ends_the_round_and_keeps_accepted_components() {
        let changes = [change("a", 1, Notification::Started), change("b", 2, Notification::DeclaredDead)];
        let mut round = Round::of(&changes);
        let first = round.next_call().unwrap();
        round.answered(first, Answer::Accepted);
        let second = round.next_call().unwrap();
        round.answered(second, Answer::Failed);
        assert_eq!(round.next_call(), None);
        let outcome = round.finish();
        assert!(outcome.failed);
        assert_eq!(outcome.accepted, [(Name::parse("a").unwrap(), 1)]);
    }

    #[test]
    fn calls_carry_the_numbers_of_their_changes() {
        let call = |numbers: &[u64]| Call {
            notification: Notification::Started,
            entries: numbers
                .iter()
                .map(|number| (Name::parse(&format!("n{number}")).unwrap(), *number))
                .collect(),
        };
        for (numbers, text) in
            [(&[7][..], "7"), (&[7, 8], "7-8"), (&[1, 2, 3, 5, 7, 8], "1-3,5,7-8"), (&[2, 4, 6], "2,4,6")]
        {
            assert_eq!(call(numbers).sequences(), text);
        }
        // In the order of the numbers, not of the names.
        let changes = [
            change("b", 1, Notification::Started),
            change("a", 2, Notification::Started),
            change("c", 3, Notification::Started),
        ];
        let first = Round::of(&changes).next_call().unwrap();
        assert_eq!(first.entries.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["b", "a", "c"]);
        assert_eq!(first.sequences(), "1-3");
    }

    #[test]
    fn scattered_numbers_fit_into_a_header() {
        let epoch = 1 << 40;
        for (step, calls) in [(1, 1), (2, 9_000_usize.div_ceil(MAX_RUNS))] {
            let changes: Vec<Change> = (0..9_000)
                .map(|number| {
                    change(&format!("n{number}"), epoch + number * step, Notification::DeclaredDead)
                })
                .collect();
            let (made, outcome) = play(&changes, &[]);
            assert_eq!((made.len(), outcome.accepted.len()), (calls, 9_000));
            assert!(made.iter().all(|call| call.sequences().len() < 8_000));
        }
        let changes: Vec<Change> = (0..25_000)
            .map(|number| change(&format!("n{number}"), number + 1, Notification::Started))
            .collect();
        let sizes: Vec<usize> = play(&changes, &[]).0.iter().map(|call| call.entries.len()).collect();
        assert_eq!(sizes, [10_000, 10_000, 5_000]);
    }

    #[test]
    fn body_has_the_format_of_the_state_manager() {
        let call = Call {
            notification: Notification::DeclaredDead,
            entries: vec![(Name::parse("x0c0s0b0n0").unwrap(), 9)],
        };
        assert_eq!(
            String::from_utf8(body(&call)).unwrap(),
            "{\"ComponentIDs\":[\"x0c0s0b0n0\"],\"State\":\"Standby\",\"Flag\":\"Alert\",\
             \"ExtendedInfo\":{\"ID\":\"\",\"Message\":\"Heartbeat stopped -- declared dead\",\"Flag\":\"\"}}"
        );
    }

    #[test]
    fn pauses_grow_up_to_the_audit_interval() {
        assert_eq!(pause_ms(1, 0, 5_000), 200);
        assert_eq!(pause_ms(2, 0, 5_000), 400);
        for (interval, longest) in [(1_000, 1_000), (5_000, 5_000), (3_600_000, LONGEST_PAUSE_MS)] {
            for failures in 9..200 {
                let pause = pause_ms(failures, u64::MAX, interval);
                assert!((longest * 3 / 4..=longest).contains(&pause), "{failures} failures: {pause} ms");
            }
        }
    }

    proptest! {
        /// Whichever names are refused: each component ends accepted or rejected, once, with its
        /// newest change.
        #[test]
        fn each_component_is_accepted_once_or_rejected(
            changes in proptest::collection::vec((0u8..40, 0usize..4), 0..200),
            bad in proptest::collection::btree_set(0u8..40, 0..6),
        ) {
            let changes: Vec<Change> = changes.iter().zip(1..)
                .map(|((name, notification), number)| {
                    change(&format!("n{name}"), number, Notification::ALL[*notification])
                })
                .collect();
            let mut newest = BTreeMap::new();
            for change in &changes {
                newest.insert(change.name, change.sequence);
            }
            let bad: Vec<String> = bad.iter().map(|name| format!("n{name}")).collect();
            let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
            let (_, outcome) = play(&changes, &bad);
            prop_assert!(!outcome.failed);
            let is_bad = |name: &Name| bad.contains(&name.as_str());
            let (wrong, right): (BTreeMap<_, _>, BTreeMap<_, _>) =
                newest.into_iter().partition(|(name, _)| is_bad(name));
            prop_assert_eq!(outcome.accepted.len(), right.len());
            prop_assert_eq!(outcome.accepted.into_iter().collect::<BTreeMap<_, _>>(), right);
            prop_assert_eq!(outcome.refused.into_iter().collect::<BTreeMap<_, _>>(), wrong);
        }
    }
}
