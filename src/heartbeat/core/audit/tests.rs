//! The audit with a clock of the tests: the table of states, holds and flapping, and random steps
//! against a simple model.

mod handing_over;
mod slow;
mod unfreeze;
mod unreachable;

use proptest::prelude::*;

use super::*;
use crate::heartbeat::core::record::{Record, bucket_of};
use crate::heartbeat::core::sequence::Sequence;

const LIMIT: usize = 10_000;

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

impl Change {
    pub(crate) fn started(name: &str, sequence: u64) -> Self {
        let (name, stamp) = (Name::parse(name).unwrap(), Stamp::default());
        let notification = Some(Notification::Started);
        Self { name, state: State::Ok, notification, sequence, at: 0, flaps: 0, stamp }
    }

    /// The record of a component after this change.
    pub(crate) fn record(self, notified: NotifyStatus) -> Record {
        let Self { name, state, notification, sequence, at: changed_at, flaps, .. } = self;
        let notification_sequence = sequence;
        let (beat_at, interval) = (0, 0);
        Record {
            name,
            state,
            notification,
            sequence,
            notification_sequence,
            notified,
            changed_at,
            beat_at,
            flaps,
            interval,
        }
    }
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
        audit.start_judging(1000, HoldPhase::Quiet);
        Self { audit, sequence: Sequence::above(1 << 32, 0), now: 1000 }
    }

    fn beat(&mut self, who: &str) -> BeatEffect {
        self.audit.beat(self.now, &name(who), false).unwrap()
    }

    /// Lets time pass, then decides.
    fn after(&mut self, ms: u64) -> Vec<(String, Notification)> {
        self.now += ms;
        self.look().changes.iter().filter_map(|c| Some((c.name.to_string(), c.notification?))).collect()
    }

    fn look(&mut self) -> Decisions {
        let now = self.at();
        self.audit.judge(now, now.awake, &mut self.sequence)
    }

    fn at(&self) -> Now {
        Now { awake: self.now, wall: 1_000_000 + self.now }
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

fn notified(who: &str, notification: Notification) -> Vec<(String, Notification)> {
    vec![(who.to_owned(), notification)]
}

#[test]
fn states_follow_the_table() {
    let mut bench = Bench::new();
    assert!(!bench.is_alive("a"));
    assert_eq!(bench.beat("a"), BeatEffect::Changes);
    assert_eq!(bench.after(0), notified("a", Notification::Started));
    assert_eq!(bench.beat("a"), BeatEffect::Unchanged);
    assert_eq!(bench.after(9_999), []);
    assert_eq!(bench.after(1 + 16), notified("a", Notification::MightBeDead));
    assert_eq!(bench.after(10_000), [], "warned once");
    assert!(bench.is_alive("a"), "late, but not dead");
    assert_eq!(bench.after(10_000), notified("a", Notification::DeclaredDead));
    assert!(!bench.is_alive("a"));
    assert_eq!(bench.after(500_000), [], "dead once");
    assert_eq!(bench.beat("a"), BeatEffect::Changes);
    assert!(bench.is_alive("a"), "before anybody judged");
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));
    assert_eq!(bench.after(10_016), notified("a", Notification::MightBeDead));
    bench.beat("a");
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));
}

#[test]
fn death_without_a_warning_causes_one_change() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.after(60_000), notified("a", Notification::DeclaredDead));
}

#[test]
fn silence_counts_only_up_to_the_last_flush() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.now += 20_000;
    let now = bench.at();
    assert!(bench.audit.has_due(now.awake));
    assert_eq!(bench.audit.judge(now, 5_000, &mut bench.sequence), Decisions::default());
    // Another replica received a beat seven seconds ago.
    let beat =
        Beat { name: name("a"), age_ms: 7_000, going_away: false, interval: 0, stamp: Stamp::default() };
    assert_eq!(bench.audit.beat_from_replica(bench.now, &beat, 1), Ok(BeatEffect::Unchanged));
    assert_eq!(bench.after(0), []);
    assert_eq!(bench.after(2_999), []);
    assert_eq!(
        bench.after(20),
        notified("a", Notification::MightBeDead),
        "seventeen seconds later counts from that beat"
    );
}

#[test]
fn old_beat_from_another_replica_has_no_effect() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.after(60_000);
    let old =
        Beat { name: name("a"), age_ms: 40_000, going_away: false, interval: 0, stamp: Stamp::default() };
    bench.audit.beat_from_replica(bench.now, &old, 1).unwrap();
    assert_eq!(bench.after(0), [], "still dead");
    let fresh = Beat { age_ms: 100, ..old };
    assert_eq!(bench.audit.beat_from_replica(bench.now, &fresh, 1), Ok(BeatEffect::Changes));
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));
}

#[test]
fn windows_restart_after_a_gap() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.now += 100_000;
    bench.audit.restart_windows(bench.now);
    assert_eq!(bench.after(0), []);
    assert!(bench.is_alive("a"));
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), notified("a", Notification::MightBeDead));
}

#[test]
fn planned_stop_causes_no_warning() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.audit.beat(bench.now, &name("a"), true), Ok(BeatEffect::Changes));
    assert_eq!(bench.after(0), []);
    assert_eq!(bench.after(500_000), []);
    assert!(!bench.is_alive("a"));
    bench.beat("a");
    assert_eq!(bench.after(0), [], "nothing was told that would have to be taken back");
    assert_eq!(bench.after(10_016), notified("a", Notification::MightBeDead));

    bench.audit.beat(bench.now, &name("new"), true).unwrap();
    assert_eq!(bench.after(0), []);
    bench.beat("new");
    assert_eq!(bench.after(0), notified("new", Notification::Started));
}

#[test]
fn maintenance_causes_no_changes_and_ends_with_a_whole_window() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let until = bench.at().wall + 3_600_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("a"), until)]));
    for _ in 0..360 {
        assert_eq!(bench.after(10_000), []);
    }
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), notified("a", Notification::MightBeDead));
    bench.beat("a");
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));

    // A maintenance that ends early.
    let until = bench.at().wall + 3_600_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("a"), until)]));
    assert_eq!(bench.after(60_000), []);
    bench.audit.set_maintenance(bench.at(), HashMap::new());
    assert_eq!(bench.after(9_990), []);
    assert_eq!(bench.after(30), notified("a", Notification::MightBeDead));
}

#[test]
fn mass_outage_is_held_until_it_is_released() {
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
        let decisions = bench.look();
        warnings += decisions.changes.len();
        assert!(
            decisions.changes.iter().all(|change| change.notification == Some(Notification::MightBeDead))
        );
        if bench.now >= 31_000 + 500 {
            assert_eq!(decisions.is_new_hold, bench.now < 32_500, "it begins once");
        }
    }
    assert_eq!((warnings, bench.audit.counts().held), (50, 50));
    assert_eq!(bench.audit.alarm(), Some((50, 100)));
    assert!(!bench.is_alive("n77"), "held is not alive");

    // Ten components return, then the operator releases the deaths of the others.
    for number in 50..60 {
        bench.beat(&format!("n{number}"));
    }
    bench.now += 1000;
    keep(&mut bench);
    assert_eq!(bench.look().changes.len(), 10);
    assert_eq!(bench.audit.alarm(), Some((40, 100)), "as it is now");
    bench.audit.release(bench.now);
    assert_eq!(bench.audit.alarm(), None);
    // Not before the beats of all replicas up to now are known.
    let (asked, now) = (bench.now - 1, bench.at());
    assert_eq!(bench.audit.judge(now, asked, &mut bench.sequence), Decisions::default());
    assert!(bench.audit.has_due(bench.now + 16));
    let dead = bench.after(16);
    assert_eq!(dead.len(), 40);
    assert!(dead.iter().all(|(_, notification)| *notification == Notification::DeclaredDead));
    assert_eq!(bench.audit.counts().held, 0);
}

/// Ten components whose deaths are held.
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
fn held_deaths_survive_a_restart_of_windows() {
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
        assert!(dead.iter().all(|(_, notification)| *notification == Notification::DeclaredDead));
        assert_eq!(bench.audit.counts().held, 0);
    }
}

#[test]
fn maintenance_applies_to_held_deaths() {
    let mut bench = held();
    let until = bench.at().wall + 60_000;
    bench.audit.set_maintenance(bench.at(), HashMap::from([(name("n3"), until)]));
    bench.audit.release(bench.now);
    let dead = bench.after(16);
    assert!(dead.len() == 9 && dead.iter().all(|(who, _)| who != "n3"), "{dead:?}");
    assert_eq!(bench.after(89_900), []);
    assert_eq!(bench.after(200), notified("n3", Notification::DeclaredDead), "a whole window after it");
}

#[test]
fn flapping_component_is_pending_when_it_is_stable() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    for _ in 0..4 {
        bench.after(10_100);
        bench.beat("a");
        bench.after(0);
    }
    bench.write_all();
    assert_eq!(bench.audit.counts().unnotified, 1);
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
    let notified = bench.audit.pending(bench.at(), 10);
    assert_eq!(notified[0].notification, Some(Notification::Restarted));
    let bucket = bucket_of("a");
    let feed = |bench: &Bench| {
        super::super::record::bucket_from_bytes(&bench.audit.bucket_bytes(bucket, bench.at()))
    };
    assert_eq!(feed(&bench).unwrap()[0].flaps, 4);
    for _ in 0..80 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    assert_eq!(feed(&bench).unwrap()[0].flaps, 0, "quiet long enough");
}

#[test]
fn only_stored_and_newest_changes_are_pending() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    assert_eq!(bench.audit.pending(bench.at(), 10), [], "not safe in the store yet");
    bench.write_all();
    let first = bench.audit.pending(bench.at(), 10);
    assert_eq!(first.len(), 1);
    // While the call to the state manager runs, the state changes again.
    bench.after(10_016);
    bench.audit.set_notified(&first[0].name, first[0].sequence, NotifyStatus::Accepted);
    bench.write_all();
    let second = bench.audit.pending(bench.at(), 10);
    assert_eq!(second[0].notification, Some(Notification::MightBeDead));
    bench.audit.set_notified(&second[0].name, second[0].sequence, NotifyStatus::Refused);
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10), []);
    assert_eq!(bench.audit.counts().refused, 1);
    bench.beat("a");
    bench.after(0);
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10).len(), 1, "another change is another chance");
}

#[test]
fn forgotten_component_is_removed() {
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
fn shorter_windows_apply_to_running_deadlines() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.after(3_000);
    let params = Params { warn_ms: 2_000, err_ms: 6_000, mass_share: 0, ..Params::default() };
    bench.audit.configure(bench.now, &params);
    assert_eq!(bench.after(20), notified("a", Notification::MightBeDead));
}

#[test]
fn batches_contain_each_name_once_with_its_age() {
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
    assert!(bench.audit.take_unflushed(bench.now, |_| 0).is_empty());
}

#[test]
fn cost_of_a_pass_depends_on_due_components() {
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

/// A simple model of a component.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Model {
    last: u64,
    state: State,
}

proptest! {
    /// Beats, passes and time in any order: the audit decides by the table, not earlier and at most
    /// one step late.
    #[test]
    fn random_steps_follow_the_table(steps in proptest::collection::vec((0usize..6, 0u64..8_000), 1..120)) {
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
                    let (state, notification) = known.state.on_beat(false);
                    Some((state, notification.unwrap()))
                } else {
                    // The wheel rounds deadlines up to its step.
                    let window = if known.state == State::Ok { 10_000 } else { 30_000 };
                    let out = bench.now / 16 > (known.last + window) / 16;
                    known.state.on_silence(bench.now - known.last, 10_000, 30_000).filter(|_| out)
                };
                if let Some((state, notification)) = step {
                    known.state = state;
                    expected.push((format!("n{who}"), notification));
                }
            }
            let mut found = bench.after(0);
            found.sort();
            prop_assert_eq!(found, expected, "at {}", bench.now);
        }
    }
}
