//! Components that send an `Interval`, and have longer windows.

use super::*;
use crate::heartbeat::core::record::{bucket_from_bytes, bucket_of};

fn beat_every(bench: &mut Bench, who: &str, interval: u16) -> BeatEffect {
    let details = BeatDetails { interval, ..BeatDetails::default() };
    bench.audit.beat_with(bench.now, &IncomingBeat { name: name(who), details }).unwrap()
}

#[test]
fn slow_component_has_three_intervals() {
    let mut bench = Bench::new();
    beat_every(&mut bench, "slow", 60);
    bench.beat("quick");
    bench.after(0);
    // A deadline is noticed 16 ms late at most.
    assert_eq!(bench.after(10_016), notified("quick", Notification::MightBeDead));
    assert_eq!(bench.after(20_000), notified("quick", Notification::DeclaredDead));
    assert_eq!(bench.after(89_983), []);
    assert!(bench.audit.heartbeating(bench.now, &name("slow"), 0));
    assert_eq!(bench.after(17), notified("slow", Notification::MightBeDead), "after two of its intervals");
    assert_eq!(bench.after(59_983), []);
    assert_eq!(bench.after(17), notified("slow", Notification::DeclaredDead), "after three");
    assert!(!bench.audit.heartbeating(bench.now, &name("slow"), 0));
    assert_eq!(beat_every(&mut bench, "slow", 60), BeatEffect::Changes);
    assert_eq!(bench.after(0), notified("slow", Notification::Restarted));
}

#[test]
fn newest_beat_decides_the_interval() {
    let mut bench = Bench::new();
    beat_every(&mut bench, "a", 60);
    bench.after(0);
    assert_eq!(beat_every(&mut bench, "a", 5), BeatEffect::Unchanged, "no shorter than all others");
    assert_eq!(bench.after(10_016), notified("a", Notification::MightBeDead));
    beat_every(&mut bench, "a", 60);
    bench.after(0);
    assert_eq!(bench.after(100_000), []);
    bench.beat("a");
    assert_eq!(
        bench.after(10_016),
        notified("a", Notification::MightBeDead),
        "one without an interval has that of all"
    );
}

#[test]
fn interval_survives_a_change_of_the_judge() {
    let mut bench = Bench::new();
    beat_every(&mut bench, "a", 60);
    bench.after(0);
    let bucket = bucket_of("a");
    let wall = Now { awake: bench.now, wall: bench.now };
    let records = bucket_from_bytes(&bench.audit.bucket_bytes(bucket, wall)).unwrap();
    bench.audit.written(bucket);
    // A changed interval alone is stored as well.
    beat_every(&mut bench, "a", 90);
    assert!(bench.audit.dirty().contains(&bucket));
    beat_every(&mut bench, "a", 90);

    // A new judge that never received a beat of the component.
    let mut next = Bench::new();
    next.audit.adopt(bucket, &records, next.now);
    assert_eq!(next.after(119_999), []);
    assert_eq!(next.after(17), notified("a", Notification::MightBeDead));
    assert_eq!(next.after(60_000), notified("a", Notification::DeclaredDead));

    // A new judge that gets the beat from another replica.
    let mut other = Bench::new();
    other.now += 500_000;
    let beats = bench.audit.take_unflushed(bench.now, |_| 0).concat();
    assert_eq!(beats[0].interval, 90);
    other.audit.beat_from_replica(other.now, &Beat { age_ms: 100_000, ..beats[0] }, 1).unwrap();
    other.after(0);
    assert_eq!(other.after(79_999), []);
    assert_eq!(other.after(17), notified("a", Notification::MightBeDead));
}

#[test]
fn hold_lasts_for_the_window_of_a_slow_component() {
    let mut bench = Bench::with(&Params { mass_share: 30, mass_hold_ms: 1_000_000, ..Params::default() });
    let beat_quick = |bench: &mut Bench| {
        for number in 0..10 {
            bench.beat(&format!("n{number}"));
        }
    };
    let is_dead = |(_, notification): &(String, Notification)| *notification == Notification::DeclaredDead;
    beat_quick(&mut bench);
    beat_every(&mut bench, "slow", 60);
    bench.after(0);
    // Longer than the slow component's own window, so that its death is held like all others.
    for second in 0..200 {
        assert!(!bench.after(1_000).iter().any(is_dead), "{second}");
    }
    // The quick components return; the slow one beats within its interval.
    for second in 200..245 {
        beat_quick(&mut bench);
        assert!(!bench.after(1_000).iter().any(is_dead), "{second}");
    }
    assert_eq!(beat_every(&mut bench, "slow", 60), BeatEffect::Changes);
    assert_eq!(bench.after(0), notified("slow", Notification::Restarted));
}
