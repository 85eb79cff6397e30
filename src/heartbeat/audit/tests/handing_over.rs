//! What one judge leaves to the next: what was written stands, and what was not is judged again.

use super::*;
use crate::heartbeat::record::bucket_from_bytes;

/// Stops, returns, and judges in between do not make a second change of a start.
#[test]
fn a_start_is_told_under_one_number() {
    let mut bench = Bench::new();
    bench.beat("a");
    let started = bench.look().changes[0];
    bench.write_all();
    assert_eq!(bench.audit.pending(bench.at(), 10), [started]);
    // While the state manager thinks about it, the component says good-bye, and comes back.
    let mut newest = started.sequence;
    for going_away in [true, false, true] {
        bench.audit.beat(bench.now, &name("a"), going_away).unwrap();
        let change = bench.look().changes[0];
        assert!(change.word.is_none() && change.sequence > newest, "{change:?}");
        newest = change.sequence;
        bench.write_all();
        let pending = bench.audit.pending(bench.at(), 10);
        let told: Vec<(Option<Word>, u64)> = pending.iter().map(|c| (c.word, c.sequence)).collect();
        assert_eq!(told, [(Some(Word::Started), started.sequence)]);
        // Whoever follows the changes is not told of another start.
        assert_eq!(bench.audit.changes_since(started.sequence), [change]);
    }
    let bytes = bench.audit.bucket_bytes(bucket_of("a"), bench.at());
    let records = bucket_from_bytes(&bytes).unwrap();
    let mut next = Audit::new(0, &Params::default(), LIMIT);
    next.adopt(bucket_of("a"), &records, 0);
    let adopted = next.changes_since(0);
    assert_eq!(adopted.iter().map(|c| (c.word, c.sequence)).collect::<Vec<_>>(), [(None, newest)]);
    let again = next.pending(bench.at(), 10);
    assert_eq!((again[0].word, again[0].sequence), (Some(Word::Started), started.sequence));
    // The answer to the first call is the answer.
    for audit in [&mut bench.audit, &mut next] {
        audit.tell(&name("a"), started.sequence, Told::Yes);
        assert_eq!(audit.counts().untold, 0);
    }
}

#[test]
fn a_successor_goes_on_where_the_judge_was() {
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
    // A beat that came before it judged is news for it, too.
    next.beat(5, &name("b"), false).unwrap();
    next.take_office(10, Course::Quiet);
    let mut sequence = Sequence::of_epoch(2);
    let verdict = next.judge(Now { watched: 10, wall: 5 }, 10, &mut sequence);
    assert_eq!(verdict.changes.len(), 1);
    assert_eq!(verdict.changes[0].word, Some(Word::Restarted));
    assert!(verdict.changes[0].sequence > bench.sequence.last);
    // It gives everybody a whole window: a, which was warned, has one from when the judge began.
    let verdict = next.judge(Now { watched: 30_000, wall: 5 }, 30_000, &mut sequence);
    let names: Vec<(&str, Option<Word>)> =
        verdict.changes.iter().map(|c| (c.name.as_str(), c.word)).collect();
    assert_eq!(names, [("b", Some(Word::MightBeDead))]);
}

/// Whoever judges next damps what the one before called flapping, and calls it so no longer than it is.
#[test]
fn flapping_is_known_to_a_successor() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    for _ in 0..3 {
        bench.after(10_100);
        bench.beat("a");
        bench.after(0);
    }
    bench.write_all();
    bench.audit.leave_office();
    bench.audit.take_office(bench.now, Course::Quiet);
    assert_eq!(bench.audit.pending(bench.at(), 10), [], "damped");
    assert!(bench.audit.is_restless(bench.now, &name("a")));
    // The calendar has no say in it.
    let later = Now { wall: bench.at().wall + 3_600_000, ..bench.at() };
    assert_eq!(bench.audit.pending(later, 10), []);
    for _ in 0..12 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    bench.write_all();
    let earlier = Now { wall: 0, ..bench.at() };
    let told = bench.audit.pending(earlier, 10);
    assert_eq!((told.len(), told[0].flaps), (1, 3));
    assert!(!bench.audit.is_restless(bench.now, &name("a")));
    for _ in 0..50 {
        bench.now += 5_000;
        bench.beat("a");
        bench.look();
    }
    assert_eq!(bench.audit.newest_change(&name("a")).unwrap().flaps, 0, "quiet long enough");
}

/// What was judged and not written is as it was: one that nobody knows is started by whoever judges next, and one that the
/// store knows is what the store says.
#[test]
fn a_start_that_was_not_written_is_a_start_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    assert_eq!(bench.after(0), told("a", Word::Started));
    bench.write_all();
    let bucket = bucket_of("a");
    let a = bench.audit.table.record(bench.audit.table.find(&name("a")).unwrap(), bench.now, 0);
    let other = (0..).map(|n| format!("b{n}")).find(|other| bucket_of(other) == bucket).unwrap();
    bench.beat(&other);
    assert_eq!(bench.after(0), told(&other, Word::Started));
    bench.audit.leave_office();
    bench.audit.adopt(bucket, &[a], bench.now);
    assert_eq!((bench.audit.known(), bench.audit.counts().ok), (2, 1));
    bench.audit.take_office(bench.now, Course::Quiet);
    assert_eq!(bench.after(0), told(&other, Word::Started));
    // Now it is written, and gone from the store for a reason.
    bench.write_all();
    bench.audit.leave_office();
    bench.audit.adopt(bucket, &[a], bench.now);
    assert_eq!(bench.audit.known(), 1);
}

/// What one judge did not write is news for the next, until that one has judged it: not when the component is dead again, and
/// not for others that are kept in the same place.
#[test]
fn what_another_judged_is_no_news() {
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

    // A return, judged by the first and not written.
    bench.beat("a");
    other.beat("a");
    assert_eq!(bench.after(0), told("a", Word::Restarted));
    bench.audit.leave_office();
    let news =
        |bench: &Bench, who: &str| bench.audit.table.get(bench.audit.table.find(&name(who)).unwrap()).news;
    assert_eq!((news(&bench, "a"), news(&bench, &beside)), (true, false));
    bench.audit.adopt(bucket, &dead, bench.now);
    assert!(news(&bench, "a"), "it is dead as the store has it");
    bench.beat("a");

    // The second judges it, too; then it dies, and so does the other.
    other.sequence = Sequence::of_epoch(2);
    other.audit.take_office(other.now, Course::Quiet);
    assert_eq!(other.after(0), told("a", Word::Restarted));
    give(&other, &mut bench);
    assert!(!news(&bench, "a"));
    other.after(60_000);
    bench.now = other.now;
    give(&other, &mut bench);
    bench.audit.take_office(bench.now, Course::Quiet);
    assert_eq!(bench.after(0), [], "both are dead");
}

/// The same if the write was applied, and only its answer lost.
#[test]
fn what_was_written_after_all_is_no_news() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.write_all();
    bench.after(30_016);
    bench.write_all();
    bench.beat("a");
    assert_eq!(bench.after(0), told("a", Word::Restarted));
    let bucket = bucket_of("a");
    let mut record = bench.audit.table.record(bench.audit.table.find(&name("a")).unwrap(), bench.now, 0);
    bench.audit.leave_office();
    bench.audit.adopt(bucket, &[record], bench.now);
    // Another judge's word.
    bench.now += 60_000;
    (record.state, record.word, record.sequence) = (State::Dead, Some(Word::DeclaredDead), 99);
    bench.audit.adopt(bucket, &[record], bench.now);
    bench.audit.take_office(bench.now, Course::Quiet);
    assert_eq!(bench.after(0), []);
}
