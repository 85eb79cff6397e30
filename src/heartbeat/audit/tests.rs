//! The audit on a clock of the tests' own: the table of states, the guards, and a random life against a plain model.

mod handing_over;
mod lost;
mod slow;
mod thawing;

use proptest::prelude::*;

use super::*;
use crate::heartbeat::record::bucket_of;

const LIMIT: usize = 10_000;

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

struct Bench {
    audit: Audit,
    sequence: Sequence,
    now: u64,
}

impl Bench {
    fn new() -> Self {
        Self::with(&Params { mass_share: 0, ..Params::default() })
    }

    fn with(params: &Params) -> Self {
        let mut audit = Audit::new(1000, params, LIMIT);
        audit.take_office(1000, Course::Quiet);
        Self { audit, sequence: Sequence::of_epoch(1), now: 1000 }
    }

    fn beat(&mut self, who: &str) -> Heard {
        self.audit.beat(self.now, &name(who), false).unwrap()
    }

    /// Time passes; then somebody looks.
    fn after(&mut self, ms: u64) -> Vec<(String, Word)> {
        self.now += ms;
        self.look().changes.iter().filter_map(|c| Some((c.name.to_string(), c.word?))).collect()
    }

    fn look(&mut self) -> Verdict {
        let now = self.at();
        self.audit.judge(now, now.watched, &mut self.sequence)
    }

    fn at(&self) -> Now {
        Now { watched: self.now, wall: 1_000_000 + self.now }
    }

    fn is_alive(&self, who: &str) -> bool {
        self.audit.heartbeating(self.now, &name(who), 0)
    }

    fn write_all(&mut self) {
        for bucket in self.audit.dirty().clone() {
            self.audit.written(bucket);
        }
    }
}

fn told(who: &str, word: Word) -> Vec<(String, Word)> {
    vec![(who.to_owned(), word)]
}

#[test]
fn a_life_by_the_table() {
    let mut bench = Bench::new();
    assert!(!bench.is_alive("a"));
    assert_eq!(bench.beat("a"), Heard::News);
    assert_eq!(bench.after(0), told("a", Word::Started));
    assert_eq!(bench.beat("a"), Heard::Steady);
    assert_eq!(bench.after(9_999), []);
    assert_eq!(bench.after(1 + 16), told("a", Word::MightBeDead));
    assert_eq!(bench.after(10_000), [], "warned once");
    assert!(bench.is_alive("a"), "late, but not dead");
    assert_eq!(bench.after(10_000), told("a", Word::DeclaredDead));
    assert!(!bench.is_alive("a"));
    assert_eq!(bench.after(500_000), [], "dead once");
    assert_eq!(bench.beat("a"), Heard::News);
    assert!(bench.is_alive("a"), "before anybody judged");
    assert_eq!(bench.after(0), told("a", Word::Restarted));
    assert_eq!(bench.after(10_016), told("a", Word::MightBeDead));
    bench.beat("a");
    assert_eq!(bench.after(0), told("a", Word::Restarted));
}

#[test]
fn a_death_whose_warning_was_never_seen_is_told_alone() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.after(60_000), told("a", Word::DeclaredDead));
}

#[test]
fn silence_is_judged_only_as_far_as_all_was_heard() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.now += 20_000;
    let now = bench.at();
    assert!(bench.audit.has_due(now.watched));
    assert_eq!(bench.audit.judge(now, 5_000, &mut bench.sequence), Verdict::default());
    // Another replica heard it seven seconds ago.
    let beat =
        Beat { name: name("a"), age_ms: 7_000, going_away: false, interval: 0, stamp: Stamp::default() };
    assert_eq!(bench.audit.beat_elsewhere(bench.now, &beat, 1), Ok(Heard::Steady));
    assert_eq!(bench.after(0), []);
    assert_eq!(bench.after(2_999), []);
    assert_eq!(
        bench.after(20),
        told("a", Word::MightBeDead),
        "seventeen seconds later counts from that beat"
    );
}

#[test]
fn an_old_beat_from_elsewhere_changes_nothing() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.after(60_000);
    let old =
        Beat { name: name("a"), age_ms: 40_000, going_away: false, interval: 0, stamp: Stamp::default() };
    bench.audit.beat_elsewhere(bench.now, &old, 1).unwrap();
    assert_eq!(bench.after(0), [], "still dead");
    let fresh = Beat { age_ms: 100, ..old };
    assert_eq!(bench.audit.beat_elsewhere(bench.now, &fresh, 1), Ok(Heard::News));
    assert_eq!(bench.after(0), told("a", Word::Restarted));
}

#[test]
fn a_gap_in_watching_starts_the_windows_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.now += 100_000;
    bench.audit.restart_windows(bench.now);
    assert_eq!(bench.after(0), []);
    assert!(bench.is_alive("a"));
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), told("a", Word::MightBeDead));
}

#[test]
fn who_says_good_bye_is_not_missed() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.audit.beat(bench.now, &name("a"), true), Ok(Heard::News));
    assert_eq!(bench.after(0), []);
    assert_eq!(bench.after(500_000), []);
    assert!(!bench.is_alive("a"));
    bench.beat("a");
    assert_eq!(bench.after(0), [], "nothing was told that would have to be taken back");
    assert_eq!(bench.after(10_016), told("a", Word::MightBeDead));

    bench.audit.beat(bench.now, &name("new"), true).unwrap();
    assert_eq!(bench.after(0), []);
    bench.beat("new");
    assert_eq!(bench.after(0), told("new", Word::Started));
}

#[test]
fn maintenance_is_quiet_and_ends_with_a_whole_window() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let until = bench.at().wall + 3_600_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("a"), until)]));
    for _ in 0..360 {
        assert_eq!(bench.after(10_000), []);
    }
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), told("a", Word::MightBeDead));
    bench.beat("a");
    assert_eq!(bench.after(0), told("a", Word::Restarted));

    // One that is called off early.
    let until = bench.at().wall + 3_600_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("a"), until)]));
    assert_eq!(bench.after(60_000), []);
    bench.audit.set_maintenance(bench.at(), HashMap::new());
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), told("a", Word::MightBeDead));
}

#[test]
fn a_mass_outage_is_held_until_it_is_believed() {
    let params = Params { mass_share: 30, mass_hold_ms: 300_000, ..Params::default() };
    let mut bench = Bench::with(&params);
    for number in 0..100 {
        bench.beat(&format!("n{number}"));
    }
    bench.after(0);
    for number in 0..50 {
        bench.now += 10;
        bench.beat(&format!("n{number}"));
    }
    let keep = |bench: &mut Bench| {
        for number in 0..50 {
            bench.beat(&format!("n{number}"));
        }
    };
    let mut warnings = 0;
    for _ in 0..30 {
        bench.now += 1000;
        keep(&mut bench);
        let verdict = bench.look();
        warnings += verdict.changes.len();
        assert!(verdict.changes.iter().all(|change| change.word == Some(Word::MightBeDead)));
        if bench.now >= 31_000 + 500 {
            assert_eq!(verdict.raised, bench.now < 32_500, "raised once");
        }
    }
    assert_eq!((warnings, bench.audit.counts().held), (50, 50));
    assert_eq!(bench.audit.alarm(), Some((50, 100)));
    assert!(!bench.is_alive("n77"), "held is not alive");

    // Ten come back, then the operator says that the others are gone.
    for number in 50..60 {
        bench.beat(&format!("n{number}"));
    }
    bench.now += 1000;
    keep(&mut bench);
    assert_eq!(bench.look().changes.len(), 10);
    assert_eq!(bench.audit.alarm(), Some((40, 100)), "as it is now");
    bench.audit.release(bench.now);
    assert_eq!(bench.audit.alarm(), None);
    // Not before everybody has said what they heard up to now.
    let (asked, now) = (bench.now - 1, bench.at());
    assert_eq!(bench.audit.judge(now, asked, &mut bench.sequence), Verdict::default());
    assert!(bench.audit.has_due(bench.now + 16));
    let dead = bench.after(16);
    assert_eq!(dead.len(), 40);
    assert!(dead.iter().all(|(_, word)| *word == Word::DeclaredDead));
    assert_eq!(bench.audit.counts().held, 0);
}

/// Ten components, silent for so long that their deaths are held.
fn held() -> Bench {
    let mut bench = Bench::with(&Params { mass_share: 30, mass_hold_ms: 300_000, ..Params::default() });
    for number in 0..10 {
        bench.beat(&format!("n{number}"));
    }
    bench.after(0);
    bench.after(10_016);
    assert_eq!(bench.after(20_016), []);
    assert_eq!(bench.audit.counts().held, 10);
    bench
}

#[test]
fn held_deaths_outlive_a_gap_in_watching() {
    for gap_first in [true, false] {
        let mut bench = held();
        if gap_first {
            bench.audit.restart_windows(bench.now);
            bench.audit.release(bench.now);
        } else {
            bench.audit.release(bench.now);
            bench.audit.restart_windows(bench.now);
        }
        assert_eq!(bench.after(100), [], "a whole window");
        assert_eq!(bench.after(29_800), []);
        let dead = bench.after(200);
        assert_eq!(dead.len(), 10, "{gap_first}");
        assert!(dead.iter().all(|(_, word)| *word == Word::DeclaredDead));
        assert_eq!(bench.audit.counts().held, 0);
    }
}

#[test]
fn a_maintenance_counts_for_deaths_that_are_held() {
    let mut bench = held();
    let until = bench.at().wall + 60_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("n3"), until)]));
    bench.audit.release(bench.now);
    let dead = bench.after(16);
    assert!(dead.len() == 9 && dead.iter().all(|(who, _)| who != "n3"), "{dead:?}");
    assert_eq!(bench.after(89_900), []);
    assert_eq!(bench.after(200), told("n3", Word::DeclaredDead), "a whole window after it");
}

#[test]
fn flapping_is_counted_and_told_when_it_is_over() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    for _ in 0..4 {
        bench.after(10_100);
        bench.beat("a");
        bench.after(0);
    }
    bench.write_all();
    assert_eq!(bench.audit.counts().untold, 1);
    assert_eq!(bench.audit.pending(bench.at(), 10), [], "damped");
    let mut quiet = 0;
    while bench.audit.pending(bench.at(), 10).is_empty() {
        bench.now += 5_000;
        quiet += 5_000;
        bench.beat("a");
        bench.look();
        bench.write_all();
        assert!(quiet <= 65_000);
    }
    let told = bench.audit.pending(bench.at(), 10);
    assert_eq!(told[0].word, Some(Word::Restarted));
    let bucket = bucket_of("a");
    let shown = |bench: &Bench| {
        super::super::record::bucket_from_bytes(&bench.audit.bucket_bytes(bucket, bench.at()))
    };
    assert_eq!(shown(&bench).unwrap()[0].flaps, 4);
    for _ in 0..80 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    assert_eq!(shown(&bench).unwrap()[0].flaps, 0, "quiet long enough");
}

#[test]
fn what_is_told_is_what_is_written_and_newest() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.audit.pending(bench.at(), 10), [], "not safe in the store yet");
    bench.write_all();
    let first = bench.audit.pending(bench.at(), 10);
    assert_eq!(first.len(), 1);
    // While the state manager thinks about it, more happens.
    bench.after(10_016);
    bench.audit.tell(&first[0].name, first[0].sequence, Told::Yes);
    bench.write_all();
    let second = bench.audit.pending(bench.at(), 10);
    assert_eq!(second[0].word, Some(Word::MightBeDead));
    bench.audit.tell(&second[0].name, second[0].sequence, Told::Refused);
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10), []);
    assert_eq!(bench.audit.counts().refused, 1);
    bench.beat("a");
    bench.after(0);
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10).len(), 1, "another change is another chance");
}

#[test]
fn forgotten_means_gone() {
    let mut bench = Bench::new();
    bench.beat("machine-3");
    bench.after(0);
    assert_eq!(bench.audit.machines(), [name("machine-3")]);
    assert!(bench.audit.forget(&name("machine-3")));
    assert!(!bench.audit.forget(&name("machine-3")));
    assert_eq!(bench.after(100_000), []);
    assert_eq!(bench.audit.counts(), Counts::default());
    assert_eq!(bench.audit.dirty().len(), 1, "the store must forget, too");
}

#[test]
fn shorter_windows_apply_to_those_who_wait() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.after(3_000);
    let params = Params { warn_ms: 2_000, err_ms: 6_000, mass_share: 0, ..Params::default() };
    bench.audit.configure(bench.now, &params);
    assert_eq!(bench.after(20), told("a", Word::MightBeDead));
}

#[test]
fn batches_hold_each_name_once_with_its_age() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.now += 300;
    bench.beat("b");
    bench.now += 200;
    bench.beat("a");
    bench.now += 50;
    let heard_b = bench.now - 250;
    let missed = |heard| if heard <= heard_b { 7_000 } else { 0 };
    let batches = bench.audit.take_unflushed(bench.now, missed);
    let ages: Vec<(&str, u64)> = batches[0].iter().map(|beat| (beat.name.as_str(), beat.age_ms)).collect();
    assert_eq!(ages, [("a", 50), ("b", 7_250)], "for others, who listened meanwhile");
    assert!(!bench.audit.has_unflushed() && bench.audit.take_unflushed(bench.now, |_| 0).is_empty());
}

#[test]
fn a_tick_costs_what_is_due() {
    let mut bench = Bench::new();
    for number in 0..LIMIT {
        bench.beat(&format!("n{number}"));
    }
    bench.after(0);
    let mut due = Vec::new();
    for _ in 0..2_000 {
        bench.now += 50;
        if bench.now.is_multiple_of(5_000) {
            for number in 0..LIMIT - 1 {
                bench.beat(&format!("n{number}"));
            }
        }
        due.clear();
        bench.audit.wheel.clone().take_due(bench.now, &mut due);
        assert!(due.len() <= 1, "{} looked at", due.len());
        bench.look();
    }
}

/// A component as a child would write it down.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Model {
    last: u64,
    state: State,
}

proptest! {
    /// Beats, looks and time in any order: the audit says what the table says, no earlier and at most a step late.
    #[test]
    fn any_life_is_judged_by_the_table(steps in proptest::collection::vec((0usize..6, 0u64..8_000), 1..120)) {
        let mut bench = Bench::new();
        let mut model: Vec<Option<Model>> = vec![None; 5];
        for (who, passed) in steps {
            bench.now += passed;
            if let Some(slot) = model.get_mut(who) {
                bench.beat(&format!("n{who}"));
                let state = slot.map_or(State::New, |model| model.state);
                *slot = Some(Model { last: bench.now, state });
            }
            let mut expected = Vec::new();
            for (who, slot) in model.iter_mut().enumerate() {
                let Some(known) = slot else { continue };
                let fresh = known.last == bench.now;
                let step = if fresh && known.state != State::Ok {
                    let (state, word) = known.state.on_beat(false);
                    Some((state, word.unwrap()))
                } else {
                    // The wheel rounds deadlines up to its step.
                    let window = if known.state == State::Ok { 10_000 } else { 30_000 };
                    let out = bench.now / 16 > (known.last + window) / 16;
                    known.state.on_silence(bench.now - known.last, 10_000, 30_000).filter(|_| out)
                };
                if let Some((state, word)) = step {
                    known.state = state;
                    expected.push((format!("n{who}"), word));
                }
            }
            let mut found = bench.after(0);
            found.sort();
            prop_assert_eq!(found, expected, "at {}", bench.now);
        }
    }
}
