//! Buckets that could not be read for a while, and timestamps of beats.

use super::*;
use crate::heartbeat::core::record::{Record, bucket_from_bytes, bucket_of};

fn records(bench: &Bench, who: &str) -> Vec<Record> {
    let now = Now { awake: bench.now, wall: bench.now };
    bucket_from_bytes(&bench.audit.bucket_bytes(bucket_of(who), now)).unwrap()
}

fn unfreeze(bench: &mut Bench, who: &str, records: &[Record]) -> Vec<(State, Option<Notification>)> {
    let now = Now { awake: bench.now, wall: bench.now };
    let last = bench.sequence;
    let changes = bench.audit.unfreeze(bucket_of(who), records, now, &mut bench.sequence);
    assert!(changes.iter().all(|change| change.sequence > last.last && change.name == name(who)));
    changes.iter().map(|change| (change.state, change.notification)).collect()
}

#[test]
fn component_that_differs_from_its_record_is_notified_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let ok = records(&bench, "a");
    // An unchanged state causes no change, whatever the numbers are.
    assert_eq!(unfreeze(&mut bench, "a", &ok), []);
    bench.after(10_016);
    assert_eq!(unfreeze(&mut bench, "a", &ok), [(State::Warned, Some(Notification::MightBeDead))]);
    bench.after(20_000);
    let dead = records(&bench, "a");
    assert_eq!(unfreeze(&mut bench, "a", &ok), [(State::Dead, Some(Notification::DeclaredDead))]);
    bench.beat("a");
    bench.after(0);
    assert_eq!(unfreeze(&mut bench, "a", &dead), [(State::Ok, Some(Notification::Restarted))]);
    let pending = bench.audit.pending(Now { awake: bench.now, wall: bench.now }, 9);
    assert!(pending.is_empty(), "not before it is written");
    bench.audit.written(bucket_of("a"));
    let pending = bench.audit.pending(Now { awake: bench.now, wall: bench.now }, 9);
    assert_eq!(pending[0].sequence, bench.sequence.last);
}

#[test]
fn components_of_a_removed_bucket_are_notified_again() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    bench.audit.written(bucket_of("a"));
    assert_eq!(unfreeze(&mut bench, "a", &[]), [(State::Ok, Some(Notification::Started))]);
    assert!(bench.audit.dirty().contains(&bucket_of("a")), "and written again");
    bench.audit.beat(bench.now, &name("a"), true).unwrap();
    bench.after(0);
    assert_eq!(unfreeze(&mut bench, "a", &[]), [(State::Stopped, None)]);
}

#[test]
fn record_newer_than_memory_is_adopted() {
    let mut bench = Bench::new();
    bench.beat("a");
    bench.after(0);
    let record = Record { state: State::Dead, sequence: u64::MAX, ..records(&bench, "a")[0] };
    assert_eq!(unfreeze(&mut bench, "a", &[record]), []);
    assert_eq!(bench.audit.counts().dead, 1);
    let unknown = Record { name: name("b"), ..record };
    assert_eq!(
        bench.audit.unfreeze(bucket_of("b"), &[unknown], Now { awake: 1, wall: 1 }, &mut bench.sequence),
        []
    );
    assert_eq!(bench.audit.counts().dead, 2);
}

#[test]
fn timestamp_of_a_beat_is_in_the_change_that_it_causes() {
    let mut bench = Bench::new();
    let send = |bench: &mut Bench, status: bool, stamp: &str| {
        let details = BeatDetails { going_away: status, interval: 0, stamp: Stamp::of(stamp) };
        bench.audit.beat_with(bench.now, &IncomingBeat { name: name("a"), details }).unwrap();
        let beats = bench.audit.take_unflushed(bench.now, |_| 0).concat();
        let now = Now { awake: bench.now, wall: bench.now };
        let decisions = bench.audit.judge(now, bench.now, &mut bench.sequence);
        let stamp = decisions.changes.first().map(|change| change.stamp.as_str().to_owned());
        (beats[0].stamp.as_str().to_owned(), stamp)
    };
    let both = |stamp: &str| (stamp.to_owned(), Some(stamp.to_owned()));
    assert_eq!(send(&mut bench, false, "noon"), both("noon"));
    assert_eq!(send(&mut bench, false, "later"), (String::new(), None), "nothing has changed");
    assert_eq!(send(&mut bench, true, "evening"), both("evening"));
    assert_eq!(send(&mut bench, false, ""), both(""));
    bench.now += 60_000;
    let now = Now { awake: bench.now, wall: bench.now };
    let decisions = bench.audit.judge(now, bench.now, &mut bench.sequence);
    assert!(decisions.changes.iter().all(|change| change.stamp.is_empty()), "silence has no timestamp");
}
