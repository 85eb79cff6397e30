//! A change of the judge: stored decisions stay, others are made again.

use super::*;
use crate::heartbeat::core::record::bucket_from_bytes;

/// Stops, returns and new judges do not turn one start into two changes.
#[test]
fn start_has_one_number() {
    let mut bench = Bench::new();
    bench.beat("a");
    let started = bench.look().changes[0];
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10), [started]);
    // While the call to the state manager runs, the component stops as planned, and returns.
    let mut newest = started.sequence;
    for going_away in [true, false, true] {
        bench.audit.beat(bench.now, &name("a"), going_away).unwrap();
        let change = bench.look().changes[0];
        assert!(change.notification.is_none() && change.sequence > newest, "{change:?}");
        newest = change.sequence;
        bench.write_all();
        let pending = bench.audit.pending(bench.at(), 10);
        let notified: Vec<(Option<Notification>, u64)> =
            pending.iter().map(|c| (c.notification, c.sequence)).collect();
        assert_eq!(notified, [(Some(Notification::Started), started.sequence)]);
        // Readers of changes do not see another start.
        assert_eq!(bench.audit.changes_since(started.sequence), [change]);
    }
    let bytes = bench.audit.bucket_bytes(bucket_of("a"), bench.at());
    let records = bucket_from_bytes(&bytes).unwrap();
    let mut next = Audit::new(0, &Params::default(), LIMIT);
    next.adopt(bucket_of("a"), &records, 0);
    let adopted = next.changes_since(0);
    assert_eq!(adopted.iter().map(|c| (c.notification, c.sequence)).collect::<Vec<_>>(), [(None, newest)]);
    let again = next.pending(bench.at(), 10);
    assert_eq!((again[0].notification, again[0].sequence), (Some(Notification::Started), started.sequence));
    // The answer to the first call counts.
    for audit in [&mut bench.audit, &mut next] {
        audit.set_notified(&name("a"), started.sequence, NotifyStatus::Accepted);
        assert_eq!(audit.counts().unnotified, 0);
    }
}

#[test]
fn next_judge_continues_where_the_last_one_was() {
    let mut bench = Bench::new();
    for who in ["a", "b", "c"] {
        bench.beat(who);
    }
    bench.after(0);
    bench.now += 9_000;
    bench.beat("a");
    bench.after(22_000);
    let mut next = Audit::new(0, &Params { mass_share: 0, ..Params::default() }, LIMIT);
    for who in ["a", "b", "c"] {
        let bytes = bench.audit.bucket_bytes(bucket_of(who), bench.at());
        let records = bucket_from_bytes(&bytes).unwrap();
        next.adopt(bucket_of(who), &records, 0);
    }
    assert_eq!(next.counts(), bench.audit.counts());
    // A beat from before it was the judge counts as well.
    next.beat(5, &name("b"), false).unwrap();
    next.start_judging(10, HoldPhase::Quiet);
    let mut sequence = Sequence::above(2 << 32, 0);
    let decisions = next.judge(Now { awake: 10, wall: 5 }, 10, &mut sequence);
    assert_eq!(decisions.changes.len(), 1);
    assert_eq!(decisions.changes[0].notification, Some(Notification::Restarted));
    assert!(decisions.changes[0].sequence > bench.sequence.last);
    // All components get a whole window: `a`, which was warned about, from when the judge began.
    let decisions = next.judge(Now { awake: 30_000, wall: 5 }, 30_000, &mut sequence);
    let names: Vec<(&str, Option<Notification>)> =
        decisions.changes.iter().map(|c| (c.name.as_str(), c.notification)).collect();
    assert_eq!(names, [("b", Some(Notification::MightBeDead))]);
}

/// The next judge continues to damp a flapping component, and not longer than necessary.
#[test]
fn next_judge_continues_to_damp_flapping() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    for _ in 0..3 {
        bench.after(10_100);
        bench.beat("a");
        bench.after(0);
    }
    bench.write_all();
    bench.audit.stop_judging();
    bench.audit.start_judging(bench.now, HoldPhase::Quiet);
    assert_eq!(bench.audit.pending(bench.at(), 10), [], "damped");
    assert!(bench.audit.is_damped(bench.now, &name("a")));
    // The wall clock has no effect.
    let later = Now { wall: bench.at().wall + 3_600_000, ..bench.at() };
    assert_eq!(bench.audit.pending(later, 10), []);
    for _ in 0..12 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    bench.write_all();
    let earlier = Now { wall: 0, ..bench.at() };
    let notified = bench.audit.pending(earlier, 10);
    assert_eq!((notified.len(), notified[0].flaps), (1, 3));
    assert!(!bench.audit.is_damped(bench.now, &name("a")));
    for _ in 0..50 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    assert_eq!(bench.audit.newest_change(&name("a")).unwrap().flaps, 0, "quiet long enough");
}

/// A decision that was not stored is made again: an unknown component is started by the next judge,
/// a known one has its stored state.
#[test]
fn start_that_was_not_stored_is_decided_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    assert_eq!(bench.after(0), notified("a", Notification::Started));
    bench.write_all();
    let bucket = bucket_of("a");
    let a = bench.audit.table.record(bench.audit.table.find(&name("a")).unwrap(), bench.now, 0);
    let other = (0..).map(|n| format!("b{n}")).find(|other| bucket_of(other) == bucket).unwrap();
    bench.beat(&other);
    assert_eq!(bench.after(0), notified(&other, Notification::Started));
    bench.audit.stop_judging();
    bench.audit.adopt(bucket, &[a], bench.now);
    assert_eq!((bench.audit.known(), bench.audit.counts().ok), (2, 1));
    bench.audit.start_judging(bench.now, HoldPhase::Quiet);
    assert_eq!(bench.after(0), notified(&other, Notification::Started));
    // Now it is stored, and then removed from the store.
    bench.write_all();
    bench.audit.stop_judging();
    bench.audit.adopt(bucket, &[a], bench.now);
    assert_eq!(bench.audit.known(), 1);
}

/// A restart that one judge did not store is decided by the next, but only once: not when the
/// component is dead again, and not for others in the same bucket.
#[test]
fn restart_of_another_judge_is_not_repeated() {
    let mut bench = Bench::new();
    let bucket = bucket_of("a");
    let beside = (0..).map(|n| format!("b{n}")).find(|other| bucket_of(other) == bucket).unwrap();
    bench.beat("a");
    bench.beat(&beside);
    bench.after(0);
    bench.after(30_016);
    bench.beat(&beside);
    bench.after(0);
    bench.write_all();
    let mut other = Bench::new();
    let give = |from: &Bench, to: &mut Bench| {
        let bytes = from.audit.bucket_bytes(bucket, from.at());
        to.audit.adopt(bucket, &bucket_from_bytes(&bytes).unwrap(), to.now);
    };
    other.now = bench.now;
    give(&bench, &mut other);
    let dead = bucket_from_bytes(&bench.audit.bucket_bytes(bucket, bench.at())).unwrap();

    // A restart, decided by the first judge and not stored.
    bench.beat("a");
    other.beat("a");
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));
    bench.audit.stop_judging();
    let unjudged_beat = |bench: &Bench, who: &str| {
        bench.audit.table.get(bench.audit.table.find(&name(who)).unwrap()).unjudged_beat
    };
    assert_eq!((unjudged_beat(&bench, "a"), unjudged_beat(&bench, &beside)), (true, false));
    bench.audit.adopt(bucket, &dead, bench.now);
    assert!(unjudged_beat(&bench, "a"), "it is dead as the store has it");
    bench.beat("a");

    // The second judge decides it as well; then the component dies, and so does the other one.
    other.sequence = Sequence::above(2 << 32, 0);
    other.audit.start_judging(other.now, HoldPhase::Quiet);
    assert_eq!(other.after(0), notified("a", Notification::Restarted));
    give(&other, &mut bench);
    assert!(!unjudged_beat(&bench, "a"));
    other.after(60_000);
    bench.now = other.now;
    give(&other, &mut bench);
    bench.audit.start_judging(bench.now, HoldPhase::Quiet);
    assert_eq!(bench.after(0), [], "both are dead");
}

/// The same if the write was applied, and only its answer lost.
#[test]
fn restart_stored_without_an_answer_is_not_repeated() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.write_all();
    bench.after(30_016);
    bench.write_all();
    bench.beat("a");
    assert_eq!(bench.after(0), notified("a", Notification::Restarted));
    let bucket = bucket_of("a");
    let mut record = bench.audit.table.record(bench.audit.table.find(&name("a")).unwrap(), bench.now, 0);
    bench.audit.stop_judging();
    bench.audit.adopt(bucket, &[record], bench.now);
    // The record of another judge.
    bench.now += 60_000;
    (record.state, record.notification, record.sequence) =
        (State::Dead, Some(Notification::DeclaredDead), 99);
    bench.audit.adopt(bucket, &[record], bench.now);
    bench.audit.start_judging(bench.now, HoldPhase::Quiet);
    assert_eq!(bench.after(0), []);
}
