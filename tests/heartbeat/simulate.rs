//! Invariants under all faults: a component is called silent only if it was, and in the end the
//! state manager has the true state of every component. Seeds that once failed are kept.

use std::collections::BTreeSet;
use std::time::Duration;

use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::core::sequence::Sequence;
use portcullis::heartbeat::store;
use portcullis::store::memory::Fault;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Tree, Write};
use serde_json::json;
use tokio::time::Instant;

use crate::invariants::{ERR, WARN, check_no_false_alarms, check_the_end};
use crate::manager::{HOOK_URL, Mood};
use crate::oracle::Reader;
use crate::world::World;

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// How long deaths are held for components that may be beating to an unreachable tracker.
pub(crate) const HOLD: Duration = Duration::from_secs(100);

pub(crate) async fn begin(seed: u64, replicas: u32, components: usize) -> World {
    let mut world = World::new(seed, components).await;
    store::ensure(&world.tree(), &world.roles).await.expect("heartbeat znodes");
    let params = json!({
        "Sm_url": "http://sm",
        "Webhook_url": HOOK_URL,
        "Mass_share": "0",
        "Mass_hold": HOLD.as_secs().to_string(),
    });
    store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    for _ in 0..replicas {
        world.start();
    }
    world.pass(seconds(8)).await;
    world
}

/// The replica that is the judge.
pub(crate) fn judge(world: &World) -> u32 {
    *world.replicas.iter().find(|(_, r)| r.shared.lock().stats.judging).expect("a judge").0
}

#[tokio::test(start_paused = true)]
async fn each_change_is_sent_once() {
    for replicas in 1..=3 {
        let mut world = begin(1, replicas, 50).await;
        world.pass(seconds(60)).await;
        world.silence(7);
        let silent = world.components[7].last.expect("it beat");
        world.pass(seconds(60)).await;
        check_no_false_alarms(&world, 0);
        let book = world.manager.book();
        let of_7: Vec<(&str, Duration)> = book
            .updates
            .iter()
            .filter(|update| update.name == "x7c0s0b0n0")
            .map(|update| (update.message.as_str(), update.at.saturating_duration_since(silent)))
            .collect();
        let words: Vec<&str> = of_7.iter().map(|(word, _)| *word).collect();
        assert_eq!(
            words,
            ["Heartbeat started", "Heartbeat stopped -- might be dead", "Heartbeat stopped -- declared dead"]
        );
        // A deadline is kept closely although all replicas are asked for their beats.
        for ((_, at), window) in of_7[1..].iter().zip([WARN, ERR]) {
            assert!(*at >= window && *at < window + Duration::from_millis(300), "{replicas}: {at:?}");
        }
        assert_eq!(book.updates.len(), 50 + 2);
    }
}

#[tokio::test(start_paused = true)]
async fn beats_cause_few_store_writes() {
    let mut world = begin(1, 1, 200).await;
    let writes = |world: &World| world.replicas[&0].shared.lock().stats.store_writes;
    let (before, beats) = (writes(&world), world.replicas[&0].shared.lock().stats.beats);
    world.pass(seconds(100)).await;
    let beats = world.replicas[&0].shared.lock().stats.beats - beats;
    assert!(beats > 5_000, "{beats}");
    let writes = writes(&world) - before;
    assert!(writes <= 41, "{writes} writes for {beats} beats");
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_only_the_newest_states_are_sent() {
    let answering = [404, 401, 403, 405, 408, 413, 429].map(Mood::Answering);
    for mood in [Mood::Down, Mood::Hanging, Mood::Failing].into_iter().chain(answering) {
        let mut world = begin(3, 2, 30).await;
        world.manager.book().mood = mood;
        for component in 0..10 {
            world.silence(component);
        }
        world.pass(seconds(40)).await;
        for component in 0..5 {
            world.revive(component);
        }
        world.pass(seconds(30)).await;
        let update = world.manager.book().updates.len();
        assert_eq!(update, 30, "only the starts");
        world.manager.book().mood = Mood::Fine;
        world.pass(seconds(45)).await;
        let later: Vec<(String, String)> = world.manager.book().updates[update..]
            .iter()
            .map(|update| (update.name.clone(), update.message.clone()))
            .collect();
        let once: BTreeSet<&(String, String)> = later.iter().collect();
        assert_eq!(once.len(), 10, "{mood:?}: {later:?}");
        // Calls that time out may be applied late, so their components are sent again when the
        // calls end.
        assert!(mood == Mood::Hanging || later.len() == 10, "{mood:?}: each in one call: {later:?}");
        check_the_end(&mut world, 3).await;
    }
}

#[tokio::test(start_paused = true)]
async fn crash_of_the_judge_delays_warnings_only_shortly() {
    let mut world = begin(5, 2, 40).await;
    let judge = judge(&world);
    world.kill(judge);
    world.silence(3);
    let silent = Instant::now();
    // Its newest beat may have gone to the unreachable tracker.
    world.pass(seconds(70) + HOLD).await;
    check_no_false_alarms(&world, 5);
    let book = world.manager.book();
    let warned = book.updates.iter().find(|update| update.flag == "Warning").expect("a warning");
    assert_eq!(warned.name, "x3c0s0b0n0");
    let blind = warned.at.duration_since(silent).saturating_sub(WARN);
    assert!(blind <= crate::world::SESSION + seconds(1), "{blind:?}");
    assert_eq!(book.updates.len(), 40 + 2, "all others were sent once: {:?}", &book.updates[40..]);
}

/// A round has many calls if one name is refused. Each result is stored after its call, not at the
/// end of the round.
#[tokio::test(start_paused = true)]
async fn accepted_calls_are_not_repeated_after_a_crash_of_the_judge() {
    let mut world = begin(9, 2, 40).await;
    world.manager.book().mood = Mood::Down;
    (0..20).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let starts = world.manager.book().updates.len();
    {
        let mut book = world.manager.book();
        book.mood = Mood::Slow;
        book.refused.insert("x13c0s0b0n0".to_owned());
    }
    let deaths = |world: &World| world.manager.book().updates.len() - starts;
    for _ in 0..600 {
        if deaths(&world) > 0 {
            break;
        }
        world.pass(Duration::from_millis(100)).await;
    }
    // The next call is running.
    world.pass(seconds(1)).await;
    assert!((1..19).contains(&deaths(&world)), "{} deaths told", deaths(&world));
    let judge = judge(&world);
    world.kill(judge);
    world.manager.book().mood = Mood::Fine;
    world.pass(seconds(60)).await;
    let book = world.manager.book();
    let mut dead: Vec<&str> = book.updates[starts..].iter().map(|update| update.name.as_str()).collect();
    dead.sort_unstable();
    let mut expected: Vec<&str> = world.components[..20].iter().map(|c| c.name.as_str()).collect();
    expected.retain(|name| *name != "x13c0s0b0n0");
    expected.sort_unstable();
    assert_eq!(dead, expected, "each once");
}

/// A judge that was replaced and has not noticed it writes nothing: its successor makes the same
/// decision.
#[tokio::test(start_paused = true)]
async fn replaced_judge_writes_nothing() {
    for seed in 30..33 {
        let mut world = begin(seed, 2, 4).await;
        let judging = |world: &World| -> Vec<u32> {
            let judges = world.replicas.iter().filter(|(_, r)| r.shared.lock().stats.judging);
            judges.map(|(id, _)| *id).collect()
        };
        let old = judging(&world)[0];
        let (tree, replaced) = (world.tree(), world.wall());
        tree.write(vec![Write::Delete { path: paths::heartbeat_leader() }]).await.expect("a write");
        for _ in 0..100 {
            if judging(&world).len() == 2 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(judging(&world).len(), 2, "seed {seed}: the old one has not noticed it");
        let shared = std::sync::Arc::clone(&world.replicas[&old].shared);
        let name = Name::parse("late").expect("a name");
        shared.beat(&[(name, false)]).await.expect("room");
        world.pass(seconds(5)).await;
        let records = store::overview(&tree).await.expect("records").records;
        let late = records.iter().find(|record| record.name == name).expect("it was heard");
        assert_eq!(late.state.as_str(), "ok", "seed {seed}: {late:?}");
        assert!(late.sequence > Sequence::lowest_at(replaced), "seed {seed}: {late:?}");
        assert_eq!(judging(&world).len(), 1);
    }
}

/// The next call is made when the result of the previous one is stored: if the store fails with a
/// call, the result of only one call is unknown.
#[tokio::test(start_paused = true)]
async fn no_call_is_made_before_the_last_result_is_stored() {
    let mut world = begin(14, 2, 40).await;
    world.manager.book().mood = Mood::Down;
    (0..20).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let starts = world.manager.book().updates.len();
    world.manager.book().refused.insert("x13c0s0b0n0".to_owned());
    world.manager.book().mood = Mood::Fine;
    world.lose_store_with_a_call();
    world.pass(seconds(40)).await;
    let taken = world.manager.book().updates.len();
    assert!((starts + 1..starts + 19).contains(&taken), "{} deaths told", taken - starts);
    let calls: BTreeSet<usize> =
        world.manager.book().updates[starts..].iter().map(|update| update.call).collect();
    assert_eq!(calls.len(), 1);
    world.set_store(true);
    world.pass(seconds(60)).await;
    let book = world.manager.book();
    let again: Vec<&str> = book.updates[taken..].iter().map(|update| update.name.as_str()).collect();
    assert!(again.len() == 19, "those and all others: {again:?}");
}

/// A webhook gets every change, also when judges crash, and at most the running one a second time.
#[tokio::test(start_paused = true)]
async fn webhook_gets_each_change_although_judges_crash() {
    let mut world = begin(11, 2, 40).await;
    world.manager.book().hook_mood = Mood::Down;
    (0..20).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let starts = world.manager.book().hooked.len();
    assert_eq!(starts, 40);
    world.manager.book().hook_mood = Mood::Slow;
    for update in 1..4 {
        for _ in 0..600 {
            if world.manager.book().hooked.len() >= starts + update * 5 {
                break;
            }
            world.pass(Duration::from_millis(100)).await;
        }
        let judge = judge(&world);
        world.kill(judge);
        world.start();
        world.pass(seconds(20)).await;
    }
    world.manager.book().hook_mood = Mood::Fine;
    world.pass(seconds(10)).await;
    let hooked: Vec<(String, u64)> = world.manager.book().hooked[starts..]
        .iter()
        .map(|update| (update.health.clone(), update.sequence))
        .collect();
    assert!(hooked.is_sorted_by_key(|(_, sequence)| sequence), "{hooked:?}");
    let once: BTreeSet<&(String, u64)> = hooked.iter().collect();
    for health in ["warned", "dead"] {
        assert_eq!(once.iter().filter(|(update, _)| update == health).count(), 20, "{health}: {hooked:?}");
    }
    assert!(hooked.len() <= once.len() + 3, "one for each judge that crashed: {hooked:?}");
    check_the_end(&mut world, 11).await;
}

/// Whichever replica is the judge, planned silence causes no warning and no alert; after a
/// maintenance a whole window starts.
#[tokio::test(start_paused = true)]
async fn planned_silence_causes_no_warning() {
    let mut world = begin(12, 2, 10).await;
    world.leave(0);
    world.maintain(1, seconds(90)).await;
    world.silence(1);
    world.silence(2);
    let begun = world.wall();
    world.pass(seconds(100) - Duration::from_millis(500)).await;
    let judge = judge(&world);
    let missed = |world: &World| -> Vec<(String, u64)> {
        let book = world.manager.book();
        let update = book.updates.iter().filter(|update| update.flag != "OK");
        update.map(|update| (update.name.clone(), update.sequence)).collect()
    };
    let names = |world: &World| missed(world).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(&world), ["x2c0s0b0n0"; 2]);
    // The next judge knows the end of the maintenance.
    world.stop(judge).await;
    world.pass(seconds(40)).await;
    assert_eq!(names(&world), ["x2c0s0b0n0", "x2c0s0b0n0", "x1c0s0b0n0", "x1c0s0b0n0"]);
    let warned = world.shown[&missed(&world)[2].1].at - begun;
    assert!((99_500..102_000).contains(&warned), "{warned} ms");
    check_the_end(&mut world, 12).await;
}

/// A change that the store does not accept is undone: it must not be published.
#[tokio::test(start_paused = true)]
async fn changes_that_are_not_stored_are_not_published() {
    for seed in 20..26 {
        let mut world = begin(seed, 1, 4).await;
        world.silence(0);
        let late = world.components[0].last.expect("it beat") + WARN;
        world.pass(late.duration_since(Instant::now()) - Duration::from_millis(150)).await;
        let shown = world.shown.len();
        world.set_store(false);
        world.pass(seconds(3)).await;
        assert_eq!(world.shown.len(), shown, "seed {seed}");
        check_the_end(&mut world, seed).await;
    }
}

/// A tracker that is not the judge publishes changes in order, whatever bucket they come from.
#[tokio::test(start_paused = true)]
async fn tracker_that_is_not_the_judge_publishes_in_order() {
    let mut world = begin(10, 2, 40).await;
    (0..30).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let follower = world.replicas.values().find(|r| !r.shared.lock().stats.judging).expect("a follower");
    let (shared, mut reader) = (std::sync::Arc::clone(&follower.shared), Reader::new());
    reader.read(&shared).await;
    (0..30).for_each(|component| world.revive(component));
    world.pass(seconds(10)).await;
    let numbers: Vec<u64> = reader.read(&shared).await.iter().map(|change| change.sequence).collect();
    assert_eq!(numbers.len(), 30, "{numbers:?}");
    assert!(numbers.is_sorted(), "{numbers:?}");
}

#[tokio::test(start_paused = true)]
async fn rolling_restart_causes_no_change() {
    let mut world = begin(6, 3, 40).await;
    let update = world.manager.book().updates.len();
    for round in 0..6 {
        let oldest = *world.replicas.keys().next().expect("a replica");
        world.stop(oldest).await;
        world.pass(seconds(2 + round)).await;
        world.start();
        world.pass(seconds(3)).await;
    }
    assert_eq!(world.manager.book().updates.len(), update, "no change");
    check_the_end(&mut world, 6).await;
}

#[tokio::test(start_paused = true)]
async fn accepted_first_beat_survives_restarts_of_all_trackers() {
    let mut world = begin(7, 1, 0).await;
    let shared = std::sync::Arc::clone(&world.replicas[&0].shared);
    let name = Name::parse("lonely").expect("a name");
    shared.beat(&[(name, false)]).await.expect("room");
    world.kill(0);
    world.pass(seconds(15)).await;
    world.start();
    world.pass(seconds(120)).await;
    let words: Vec<String> = world.manager.book().updates.iter().map(|update| update.flag.clone()).collect();
    assert_eq!(words.first().map(String::as_str), Some("OK"), "{words:?}");
    assert_eq!(words.last().map(String::as_str), Some("Alert"), "{words:?}");
}

const MOODS: [Mood; 6] =
    [Mood::Fine, Mood::Down, Mood::Hanging, Mood::Failing, Mood::Slow, Mood::Answering(404)];

/// One random simulation.
async fn run_random_faults(seed: u64) {
    let replicas = 1 + (seed % 3) as u32;
    let mut world = begin(seed, replicas, 24).await;
    for _ in 0..40 {
        let component = world.below(24) as usize;
        let ids: Vec<u32> = world.replicas.keys().copied().collect();
        let some = (!ids.is_empty()).then(|| ids[world.below(ids.len() as u64) as usize]);
        let time = seconds(1 + world.below(20));
        match (world.below(21), some) {
            (0..=2, _) => world.silence(component),
            (3..=5, _) => world.revive(component),
            (6, Some(id)) if world.replicas.len() > 1 => world.kill(id),
            (7, Some(id)) => world.stop(id).await,
            (8, Some(id)) => world.freeze(id, time),
            (9, _) if world.replicas.len() < 3 => drop(world.start()),
            (10, _) => {
                world.set_store(false);
                world.pass(time).await;
                if time > crate::world::SESSION {
                    world.expire_all();
                }
                world.set_store(true);
            }
            (11, _) => {
                world.manager.book().mood = MOODS[world.below(6) as usize];
            }
            (12, _) => {
                let step = world.below(7_200_000) as i64 - 3_600_000;
                world.step_calendar(step);
            }
            (13, _) => {
                world.manager.book().hook_mood = MOODS[world.below(6) as usize];
            }
            (14..=15, _) => world.leave(component),
            (16, _) => {
                world.maintain(component, time * 4).await;
                if world.below(2) == 0 {
                    world.silence(component);
                }
            }
            (18..=19, _) => {
                for _ in 0..=world.below(3) {
                    let loss = [Fault::LostBefore, Fault::LostAfter][world.below(2) as usize];
                    world.lose_answer(paths::heartbeat(), loss);
                }
            }
            _ => {}
        }
        if world.replicas.is_empty() {
            world.start();
        }
        world.pass(time).await;
    }
    world.pass(seconds(25)).await;
    check_the_end(&mut world, seed).await;
}

#[tokio::test(start_paused = true)]
async fn random_faults_end_with_true_states() {
    let first = std::env::var("HEARTBEAT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let count = std::env::var("HEARTBEAT_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(12);
    for seed in first..first + count {
        run_random_faults(seed).await;
    }
}

async fn spoil(tree: &impl Tree, nodes: &[NodePath]) {
    for path in nodes {
        let version = tree.get(path).await.expect("a znode").version;
        let write = Write::SetIfVersion { path: path.clone(), data: b"\xff{garbage".to_vec(), version };
        tree.write(vec![write]).await.expect("a write");
    }
}

#[tokio::test(start_paused = true)]
async fn corrupt_data_in_the_store_stops_no_tracker() {
    let mut world = begin(7, 2, 4).await;
    let tree = world.tree();
    let batch = tree.children(&paths::heartbeat_batches()).await.expect("batches").pop().expect("a batch");
    let (replica, number) = paths::heartbeat_batch_of(&batch).expect("a name");
    let batch = paths::heartbeat_batch(replica, number);
    let kept = [
        paths::heartbeat_alarm(),
        paths::heartbeat_question(),
        paths::heartbeat_webhook(),
        paths::heartbeat_page(0),
    ];
    spoil(&tree, &kept).await;
    // The webhook's progress is lost: changes are sent twice rather than not at all.
    world.upsets.extend(std::iter::repeat_n(Instant::now(), 4));
    spoil(&tree, std::slice::from_ref(&batch)).await;
    world.pass(seconds(5)).await;
    // Running trackers continue, and a new one becomes the judge with the corrupt data.
    for id in [0, 1] {
        world.start();
        world.stop(id).await;
    }
    world.pass(seconds(5)).await;
    spoil(&tree, &[paths::heartbeat_params(), paths::heartbeat_maintenance()]).await;
    world.silence(0);
    check_the_end(&mut world, 7).await;
    assert!(matches!(store::alarm(&tree).await, Ok((Ok(None), _))), "overwritten");
    let question = store::flush_request(&tree).await;
    assert!(matches!(question, Ok((Ok(1..), _))), "{question:?}");
    assert_eq!(tree.exists(&batch).await, Ok(false), "cleared away");
    for id in [2, 3] {
        world.stop(id).await;
    }
}
