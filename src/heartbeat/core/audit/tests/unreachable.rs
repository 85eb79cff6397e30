//! Unreachable trackers, and stores that have lost records.

use super::*;
use crate::heartbeat::core::record::Record;

const OTHER: TrackerIndex = 7;
const HOLD: u64 = 100_000;

/// `a` beat to another tracker, `b` here.
fn begun() -> Bench {
    let mut bench = Bench::new();
    let beat = Beat { name: name("a"), age_ms: 0, going_away: false, interval: 0, stamp: Stamp::default() };
    bench.audit.beat_from_replica(bench.now, &beat, OTHER).unwrap();
    bench.beat("b");
    bench.after(0);
    assert_eq!(bench.audit.mark_unreachable(OTHER, bench.now + HOLD), 1);
    bench
}

#[test]
fn deaths_of_components_of_a_lost_tracker_are_held() {
    let mut bench = begun();
    let mut both = notified("a", Notification::MightBeDead);
    both.extend(notified("b", Notification::MightBeDead));
    assert_eq!(bench.after(10_020), both, "warnings are not held");
    assert_eq!(bench.after(20_000), notified("b", Notification::DeclaredDead));
    assert_eq!(bench.audit.counts().held_for_tracker, 1);
    assert_eq!(bench.after(HOLD - 31_000), []);
    assert_eq!(bench.after(2_000), notified("a", Notification::DeclaredDead), "the time is over");
    assert_eq!(bench.audit.counts().held_for_tracker, 0);
}

#[test]
fn hold_ends_with_the_trackers_return_a_release_or_a_beat() {
    for end in ["return", "release", "beat"] {
        let mut bench = begun();
        bench.after(60_000);
        assert_eq!(bench.audit.counts().held_for_tracker, 1, "{end}");
        let expected = match end {
            "return" => {
                bench.audit.mark_reachable(OTHER);
                notified("a", Notification::DeclaredDead)
            }
            "release" => {
                bench.audit.release(bench.now);
                notified("a", Notification::DeclaredDead)
            }
            _ => {
                bench.beat("a");
                notified("a", Notification::Restarted)
            }
        };
        assert_eq!(bench.after(20), expected, "{end}");
        assert_eq!(bench.audit.counts().held_for_tracker, 0, "{end}");
    }
}

#[test]
fn component_that_beat_here_since_is_not_held() {
    let mut bench = begun();
    bench.beat("a");
    bench.after(0);
    let mut both = notified("a", Notification::DeclaredDead);
    both.extend(notified("b", Notification::DeclaredDead));
    assert_eq!(bench.after(40_000), both);
}

/// Only a batch that is older than this tracker shows which tracker received the component's beats.
#[test]
fn old_batch_shows_the_tracker_of_a_component() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let now = bench.at();
    let record = bench.audit.table.record(bench.audit.table.find(&name("a")).unwrap(), now.awake, now.wall);
    let mut next = Bench::new();
    next.audit.adopt(bucket_of("a"), &[record], next.now);
    next.audit.set_last_tracker(&name("a"), OTHER);
    next.audit.mark_unreachable(OTHER, next.now + HOLD);
    next.after(40_000);
    assert_eq!(next.after(20_000), []);
    assert_eq!(next.audit.counts().held_for_tracker, 1);
}

#[test]
fn memory_wins_over_an_older_record_and_is_written_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let now = bench.at();
    let entry = bench.audit.table.find(&name("a")).unwrap();
    let old = bench.audit.table.record(entry, now.awake, now.wall);
    assert_eq!(bench.after(10_020), notified("a", Notification::MightBeDead));
    bench.write_all();
    bench.audit.adopt_after_rollback(bucket_of("a"), &[old], bench.now);
    assert_eq!(bench.audit.table.get(entry).state, State::Warned);
    assert_eq!(bench.audit.write_again(|_| true), 1);
    assert!(bench.audit.dirty().contains(&bucket_of("a")));
    // A newer record is adopted, and a component without one stays.
    let newer = Record { sequence: old.sequence + 100, ..old };
    bench.audit.adopt_after_rollback(bucket_of("a"), &[newer], bench.now);
    assert_eq!(bench.audit.table.get(entry).state, State::Ok);
    bench.audit.adopt_after_rollback(bucket_of("a"), &[], bench.now);
    assert_eq!(bench.audit.known(), 1);
    assert_eq!(bench.audit.highest_number(), newer.sequence);
}
