//! How changes are told to a state manager that is slow, down, or refuses one name among thousands. Pure: which call comes
//! next, and what an answer means for the components in it. Each component is in one call, that of its newest change.

use std::collections::VecDeque;

use super::audit::Change;
use super::name::Name;
use super::state::Word;
use crate::model::planted::{Bug, planted};

/// Names in one call.
pub const MAX_IN_CALL: usize = 10_000;

/// Runs of numbers in one call, so that they fit into a header. Changes of one moment are one run.
const MAX_RUNS: usize = 200;

/// So many names refused and not one accepted: it is not about the names.
const REFUSES_ALL: usize = 8;

const FIRST_PAUSE_MS: u64 = 200;
const LONGEST_PAUSE_MS: u64 = 30_000;

/// One call: these components, this word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub word: Word,
    /// Each with the number of its change, in the order of those.
    pub entries: Vec<(Name, u64)>,
}

impl Call {
    /// The numbers of its changes, in the order of the names: `7-9,12`. Whoever is told tells by them whether it was told the
    /// same before: a judge that dies between a call and the note that it was made leaves a call to be made again.
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

/// In as few calls as may be; the entries are in order.
fn calls(word: Word, entries: &[(Name, u64)]) -> Vec<Call> {
    let (mut calls, mut entries_of_call, mut runs) = (Vec::new(), Vec::new(), 0);
    let pieces = entries.chunk_by(is_next).flat_map(|run| run.chunks(MAX_IN_CALL));
    for piece in pieces {
        if runs == MAX_RUNS || entries_of_call.len() + piece.len() > MAX_IN_CALL {
            calls.push(Call { word, entries: std::mem::take(&mut entries_of_call) });
            runs = 0;
        }
        entries_of_call.extend_from_slice(piece);
        runs += 1;
    }
    if !entries_of_call.is_empty() {
        calls.push(Call { word, entries: entries_of_call });
    }
    calls
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Accepted,
    /// Something in this call is not acceptable.
    Refused,
    /// A component in it is not known there, or the call is too large; or it is nobody's at this address, where a proxy is
    /// being started, say. What is accepted beside it tells.
    Unclear,
    /// Nothing is known about this call: down, hanging, or failing.
    Failed,
}

impl Answer {
    /// What a status means for the components of a call. Who is not let in, not served or served badly has a trouble that
    /// is not about them.
    pub fn of(status: u16) -> Self {
        match status {
            200 | 202 | 204 => Self::Accepted,
            400 | 409 | 422 => Self::Refused,
            404 | 410 | 413 => Self::Unclear,
            _ => Self::Failed,
        }
    }
}

/// A round of calls under way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delivery {
    calls: VecDeque<Call>,
    /// At least one call was taken.
    accepted: bool,
    /// So many refused and not one accepted end the round.
    patience: usize,
    /// Alone in a call of which it is not clear what was wrong with it.
    unclear: Vec<(Name, u64)>,
    done: Outcome,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    pub told: Vec<(Name, u64)>,
    pub refused: Vec<(Name, u64)>,
    /// The state manager is not there, or wants none of it: try everything else again later.
    pub failed: bool,
    /// It is there, and it may be about single components: what is new need not wait as long.
    pub in_doubt: bool,
}

impl Delivery {
    /// Calls for these changes. The newest change of each component, by its number, is the one that counts.
    pub fn of(changes: &[Change]) -> Self {
        let mut newest: Vec<&Change> = changes.iter().collect();
        newest.sort_unstable_by_key(|change| (change.name, std::cmp::Reverse(change.sequence)));
        newest.dedup_by_key(|change| change.name);
        let mut calls = VecDeque::new();
        for word in Word::ALL {
            let of_word = newest.iter().filter(|change| change.word == Some(word));
            let mut entries: Vec<(Name, u64)> =
                of_word.map(|change| (change.name, change.sequence)).collect();
            entries.sort_unstable_by_key(|(_, sequence)| *sequence);
            calls.extend(self::calls(word, &entries));
        }
        let (unclear, done) = (Vec::new(), Outcome::default());
        Self { calls, accepted: false, patience: REFUSES_ALL, unclear, done }
    }

    /// The same for those that were refused before, and are likely to be once more.
    pub fn again(changes: &[Change]) -> Self {
        Self { patience: usize::MAX, ..Self::of(changes) }
    }

    /// The call to make now, until none is left.
    pub fn next_call(&mut self) -> Option<Call> {
        self.calls.pop_front()
    }

    /// Takes in the answer to a call that [`Delivery::next_call`] gave.
    pub fn answered(&mut self, call: Call, answer: Answer) {
        match answer {
            Answer::Accepted => {
                self.accepted = true;
                self.done.told.extend(call.entries);
            }
            Answer::Failed => {
                self.unclear.clear();
                self.give_up();
            }
            Answer::Refused | Answer::Unclear => {
                let Call { word, mut entries } = call;
                if entries.len() > 1 {
                    let right = entries.split_off(entries.len() / 2);
                    self.calls.push_front(Call { word, entries: right });
                    self.calls.push_front(Call { word, entries });
                    return;
                }
                let clear = answer == Answer::Refused;
                if clear { &mut self.done.refused } else { &mut self.unclear }.extend(entries);
                if !self.accepted && self.done.refused.len() + self.unclear.len() >= self.patience {
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

    /// Who was told since this was last asked: worth being written down before the next call is made.
    pub fn take_told(&mut self) -> Vec<(Name, u64)> {
        std::mem::take(&mut self.done.told)
    }

    pub fn finish(mut self) -> Outcome {
        if self.accepted {
            // Others were taken at the same address: it was about these.
            self.done.refused.append(&mut self.unclear);
        } else if !self.unclear.is_empty() {
            (self.done.failed, self.done.in_doubt) = (true, true);
        }
        self.done
    }
}

/// Returns how long to wait after this many failures in a row; `random` spreads it by a quarter. At most the audit interval
/// passes between two calls, since a server that is back should get its first call within that time.
pub fn pause_ms(failures: u32, random: u64, interval_ms: u64) -> u64 {
    let doubled = FIRST_PAUSE_MS << failures.saturating_sub(1).min(16);
    let longest =
        if planted(Bug::ProbesSeldom) { LONGEST_PAUSE_MS } else { interval_ms.min(LONGEST_PAUSE_MS) };
    let pause = doubled.min(longest);
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
    let (state, flag) = call.word.state_and_flag();
    let ids = call.entries.iter().map(|(name, _)| name.as_str()).collect();
    let info = Info { id: "", message: call.word.message(), flag: "" };
    // Strings are always JSON.
    serde_json::to_vec(&Body { ids, state, flag, extended_info: info }).expect("strings")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::heartbeat::sent::Stamp;
    use crate::heartbeat::state::State;

    fn change(name: &str, sequence: u64, word: Word) -> Change {
        Change {
            name: Name::parse(name).unwrap(),
            state: State::Ok,
            word: Some(word),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    /// Plays a round against a manager that refuses calls with any of `bad` in them; returns the calls made.
    fn play(changes: &[Change], bad: &[&str]) -> (Vec<Call>, Outcome) {
        play_with(Delivery::of(changes), bad, Answer::Refused)
    }

    fn play_with(mut delivery: Delivery, bad: &[&str], answer: Answer) -> (Vec<Call>, Outcome) {
        let mut calls = Vec::new();
        while let Some(call) = delivery.next_call() {
            calls.push(call.clone());
            let refused = call.entries.iter().any(|(name, _)| bad.contains(&name.as_str()));
            delivery.answered(call, if refused { answer } else { Answer::Accepted });
        }
        (calls, delivery.finish())
    }

    #[test]
    fn a_status_is_about_names_or_about_the_manager() {
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
    fn who_is_not_known_is_set_aside_if_others_are() {
        let names = ["a", "b", "c", "d", "e"];
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Word::Started)).collect();
        let (_, outcome) = play_with(Delivery::of(&changes), &["b", "e"], Answer::Unclear);
        let refused: Vec<&str> = outcome.refused.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((refused, outcome.told.len(), outcome.failed), (vec!["b", "e"], 3, false));
        // Where nobody is accepted, the address may be wrong.
        for count in [1, 2, 5] {
            let (_, outcome) = play_with(Delivery::of(&changes[..count]), &names, Answer::Unclear);
            assert_eq!(outcome, Outcome { failed: true, in_doubt: true, ..Outcome::default() });
        }
        let many: Vec<String> = (0..10_000).map(|number| format!("n{number}")).collect();
        let all: Vec<&str> = many.iter().map(String::as_str).collect();
        let changes: Vec<Change> =
            all.iter().zip(1..).map(|(name, number)| change(name, number, Word::Started)).collect();
        let (calls, outcome) = play_with(Delivery::of(&changes), &all, Answer::Unclear);
        assert!(outcome.failed && outcome.refused.is_empty() && calls.len() < 40, "{}", calls.len());
    }

    #[test]
    fn those_that_were_refused_are_all_tried_again() {
        let names: Vec<String> = (0..100).map(|number| format!("n{number:02}")).collect();
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Word::Started)).collect();
        let bad: Vec<&str> = names[..99].iter().map(String::as_str).collect();
        let (calls, outcome) = play_with(Delivery::again(&changes), &bad, Answer::Refused);
        assert_eq!((outcome.told, outcome.failed), (vec![(Name::parse("n99").unwrap(), 100)], false));
        assert!(outcome.refused.len() == 99 && calls.len() < 200, "{}", calls.len());
    }

    #[test]
    fn only_the_newest_change_of_a_component_is_told() {
        let changes = [
            change("a", 1, Word::Started),
            change("b", 2, Word::Started),
            change("a", 3, Word::MightBeDead),
            change("a", 5, Word::Restarted),
            change("a", 4, Word::DeclaredDead),
        ];
        let (calls, outcome) = play(&changes, &[]);
        let told: Vec<(Word, usize)> = calls.iter().map(|call| (call.word, call.entries.len())).collect();
        assert_eq!(told, [(Word::Started, 1), (Word::Restarted, 1)]);
        assert_eq!(outcome.told.len(), 2);
    }

    #[test]
    fn one_bad_name_stops_nobody_else() {
        let names: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Word::DeclaredDead)).collect();
        let (calls, outcome) = play(&changes, &["n37"]);
        assert_eq!(outcome.told.len(), 99);
        assert_eq!(outcome.refused, [(Name::parse("n37").unwrap(), 38)]);
        assert!(!outcome.failed && calls.len() < 20, "{} calls", calls.len());
    }

    #[test]
    fn who_refuses_everybody_has_a_trouble_of_its_own() {
        let names: Vec<String> = (0..1000).map(|number| format!("n{number}")).collect();
        let changes: Vec<Change> =
            names.iter().zip(1..).map(|(name, number)| change(name, number, Word::Started)).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).collect();
        let (calls, outcome) = play(&changes, &all);
        assert!(outcome.failed && outcome.refused.is_empty() && outcome.told.is_empty());
        assert!(calls.len() < 40, "{} calls", calls.len());
    }

    #[test]
    fn a_failure_ends_the_round_and_keeps_what_was_told() {
        let changes = [change("a", 1, Word::Started), change("b", 2, Word::DeclaredDead)];
        let mut delivery = Delivery::of(&changes);
        let first = delivery.next_call().unwrap();
        delivery.answered(first, Answer::Accepted);
        let second = delivery.next_call().unwrap();
        delivery.answered(second, Answer::Failed);
        assert_eq!(delivery.next_call(), None);
        let outcome = delivery.finish();
        assert!(outcome.failed);
        assert_eq!(outcome.told, [(Name::parse("a").unwrap(), 1)]);
    }

    #[test]
    fn calls_carry_the_numbers_of_their_changes() {
        let call = |numbers: &[u64]| Call {
            word: Word::Started,
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
        // Whatever their names are: in the order of the numbers.
        let changes =
            [change("b", 1, Word::Started), change("a", 2, Word::Started), change("c", 3, Word::Started)];
        let first = Delivery::of(&changes).next_call().unwrap();
        assert_eq!(first.entries.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["b", "a", "c"]);
        assert_eq!(first.sequences(), "1-3");
    }

    #[test]
    fn numbers_fit_into_a_header_however_scattered() {
        let epoch = 1 << 40;
        for (step, calls) in [(1, 1), (2, 9_000_usize.div_ceil(MAX_RUNS))] {
            let changes: Vec<Change> = (0..9_000)
                .map(|number| change(&format!("n{number}"), epoch + number * step, Word::DeclaredDead))
                .collect();
            let (made, outcome) = play(&changes, &[]);
            assert_eq!((made.len(), outcome.told.len()), (calls, 9_000));
            assert!(made.iter().all(|call| call.sequences().len() < 8_000));
        }
        let changes: Vec<Change> =
            (0..25_000).map(|number| change(&format!("n{number}"), number + 1, Word::Started)).collect();
        let sizes: Vec<usize> = play(&changes, &[]).0.iter().map(|call| call.entries.len()).collect();
        assert_eq!(sizes, [10_000, 10_000, 5_000]);
    }

    #[test]
    fn the_body_is_the_state_managers() {
        let call = Call { word: Word::DeclaredDead, entries: vec![(Name::parse("x0c0s0b0n0").unwrap(), 9)] };
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
        /// Whatever is refused: each component ends told or set aside, once, with its newest change.
        #[test]
        fn everybody_is_told_once_or_set_aside(
            changes in proptest::collection::vec((0u8..40, 0usize..4), 0..200),
            bad in proptest::collection::btree_set(0u8..40, 0..6),
        ) {
            let changes: Vec<Change> = changes.iter().zip(1..)
                .map(|((name, word), number)| change(&format!("n{name}"), number, Word::ALL[*word])).collect();
            let mut newest = BTreeMap::new();
            for change in &changes {
                newest.insert(change.name, change.sequence);
            }
            let bad: Vec<String> = bad.iter().map(|name| format!("n{name}")).collect();
            let bad: Vec<&str> = bad.iter().map(String::as_str).collect();
            let (_, outcome) = play(&changes, &bad);
            prop_assert!(!outcome.failed);
            let is_bad = |name: &Name| bad.contains(&name.as_str());
            let (wrong, right): (BTreeMap<_, _>, BTreeMap<_, _>) = newest.into_iter().partition(|(name, _)| is_bad(name));
            prop_assert_eq!(outcome.told.len(), right.len());
            prop_assert_eq!(outcome.told.into_iter().collect::<BTreeMap<_, _>>(), right);
            prop_assert_eq!(outcome.refused.into_iter().collect::<BTreeMap<_, _>>(), wrong);
        }
    }
}
