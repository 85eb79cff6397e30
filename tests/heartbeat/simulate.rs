//! What must hold whatever happens: nobody is called silent who was not, and when all is quiet again, the last thing that
//! was told about every component is true. The seeds that once broke something stay.

use std::time::Duration;

use portcullis::heartbeat::corner;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Tree, Write};
use serde_json::json;
use tokio::time::Instant;

use crate::manager::Mood;
use crate::world::World;

const WARN: Duration = Duration::from_secs(10);
const ERR: Duration = Duration::from_secs(30);

/// A little less than a window: beats and looks are milliseconds apart.
const SLACK: Duration = Duration::from_millis(300);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

async fn begin(seed: u64, replicas: u32, components: usize) -> World {
    let mut world = World::new(seed, components).await;
    corner::ensure(&world.tree(), &world.roles).await.expect("a corner");
    let params = json!({"Sm_url": "http://sm", "Mass_share": "0"});
    corner::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    for _ in 0..replicas {
        world.start();
    }
    world.pass(seconds(8)).await;
    world
}

/// No warning without a silence that deserves it.
fn check_nobody_was_slandered(world: &World, seed: u64) {
    let book = world.manager.book();
    assert!(book.changes().len() <= book.told.len(), "the same number is the same change");
    for told in &book.told {
        let truth = world.components.iter().find(|c| c.name.as_str() == told.name).expect("ours");
        let silent = truth.last.map_or(Duration::MAX, |last| told.at.duration_since(last.min(told.at)));
        let gap = truth.longest_gap.max(silent);
        let needed = match told.flag.as_str() {
            "Warning" => WARN,
            "Alert" => ERR,
            _ => continue,
        };
        assert!(gap + SLACK >= needed, "seed {seed}: {told:?} after a silence of {gap:?}");
    }
}

/// When all is well again and time has passed, everybody knows the truth.
async fn check_the_end(world: &mut World, seed: u64) {
    world.manager.book().mood = Mood::Fine;
    world.set_store(true);
    if world.replicas.is_empty() {
        world.start();
    }
    world.pass(seconds(200)).await;
    check_nobody_was_slandered(world, seed);
    let believed = world.manager.book().believes();
    for component in &world.components {
        let name = component.name.as_str();
        let expected = match (component.beats, component.last) {
            (true, _) => Some(("Ready", "OK")),
            (false, Some(_)) => Some(("Standby", "Alert")),
            (false, None) => None,
        };
        let found = believed.get(name).map(|(state, flag)| (state.as_str(), flag.as_str()));
        assert_eq!(found, expected, "seed {seed}: {name}");
    }
    let records = corner::overview(&world.tree()).await.expect("records").records;
    for record in records {
        assert_eq!(record.told.as_str(), "yes", "seed {seed}: {record:?}");
    }
    let judges = world.replicas.values().filter(|r| r.ears.lock().condition.judging).count();
    assert_eq!(judges, 1, "seed {seed}");
}

#[tokio::test(start_paused = true)]
async fn a_quiet_life_is_told_once() {
    for replicas in 1..=3 {
        let mut world = begin(1, replicas, 50).await;
        world.pass(seconds(60)).await;
        world.silence(7);
        let silent = world.components[7].last.expect("it beat");
        world.pass(seconds(60)).await;
        check_nobody_was_slandered(&world, 0);
        let book = world.manager.book();
        let of_7: Vec<(&str, Duration)> = book
            .told
            .iter()
            .filter(|told| told.name == "x7c0s0b0n0")
            .map(|told| (told.message.as_str(), told.at.saturating_duration_since(silent)))
            .collect();
        let words: Vec<&str> = of_7.iter().map(|(word, _)| *word).collect();
        assert_eq!(
            words,
            ["Heartbeat started", "Heartbeat stopped -- might be dead", "Heartbeat stopped -- declared dead"]
        );
        // With every replica asked, a deadline is still kept within moments.
        for ((_, at), window) in of_7[1..].iter().zip([WARN, ERR]) {
            assert!(*at >= window && *at < window + Duration::from_millis(300), "{replicas}: {at:?}");
        }
        assert_eq!(book.told.len(), 50 + 2);
    }
}

#[tokio::test(start_paused = true)]
async fn beats_are_no_store_writes() {
    let mut world = begin(1, 1, 200).await;
    let writes = |world: &World| world.replicas[&0].ears.lock().condition.store_writes;
    let (before, beats) = (writes(&world), world.replicas[&0].ears.lock().condition.beats);
    world.pass(seconds(100)).await;
    let beats = world.replicas[&0].ears.lock().condition.beats - beats;
    assert!(beats > 5_000, "{beats}");
    let writes = writes(&world) - before;
    assert!(writes <= 41, "{writes} writes for {beats} beats");
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_the_manager_is_collapsed() {
    for mood in [Mood::Down, Mood::Hanging, Mood::Failing] {
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
        let told = world.manager.book().told.len();
        assert_eq!(told, 30, "nothing but the starts");
        world.manager.book().mood = Mood::Fine;
        world.pass(seconds(45)).await;
        let later: Vec<(String, String)> = world.manager.book().told[told..]
            .iter()
            .map(|told| (told.name.clone(), told.message.clone()))
            .collect();
        assert_eq!(later.len(), 10, "{mood:?}: each in one call: {later:?}");
        check_the_end(&mut world, 3).await;
    }
}

#[tokio::test(start_paused = true)]
async fn one_refused_name_is_set_aside() {
    let mut world = World::new(4, 40).await;
    world.manager.book().refused.insert("x13c0s0b0n0".to_owned());
    corner::ensure(&world.tree(), &world.roles).await.expect("a corner");
    let params = json!({"Sm_url": "http://sm"});
    corner::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    world.start();
    world.pass(seconds(20)).await;
    assert_eq!(world.manager.book().believes().len(), 39);
    let records = corner::overview(&world.tree()).await.expect("records").records;
    let refused: Vec<&str> =
        records.iter().filter(|r| r.told.as_str() == "refused").map(|r| r.name.as_str()).collect();
    assert_eq!(refused, ["x13c0s0b0n0"]);
    let calls = world.manager.book().calls;
    world.pass(seconds(60)).await;
    assert_eq!(world.manager.book().calls, calls, "not asked again for nothing");
}

#[tokio::test(start_paused = true)]
async fn a_judge_that_dies_blinds_nobody_for_long() {
    let mut world = begin(5, 2, 40).await;
    let judge = *world.replicas.iter().find(|(_, r)| r.ears.lock().condition.judging).expect("a judge").0;
    world.kill(judge);
    world.silence(3);
    let silent = Instant::now();
    world.pass(seconds(70)).await;
    check_nobody_was_slandered(&world, 5);
    let book = world.manager.book();
    let warned = book.told.iter().find(|told| told.flag == "Warning").expect("a warning");
    assert_eq!(warned.name, "x3c0s0b0n0");
    let blind = warned.at.duration_since(silent).saturating_sub(WARN);
    assert!(blind <= crate::world::SESSION + seconds(1), "{blind:?}");
    assert_eq!(book.told.len(), 40 + 2, "everything else was told once: {:?}", &book.told[40..]);
}

/// A round is many calls if one name is refused. Each is written down when it was taken, not all of them at the end.
#[tokio::test(start_paused = true)]
async fn a_judge_that_dies_amid_a_round_repeats_no_call_that_was_taken() {
    let mut world = begin(9, 2, 40).await;
    world.manager.book().mood = Mood::Down;
    (0..20).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let starts = world.manager.book().told.len();
    {
        let mut book = world.manager.book();
        book.mood = Mood::Slow;
        book.refused.insert("x13c0s0b0n0".to_owned());
    }
    let deaths = |world: &World| world.manager.book().told.len() - starts;
    for _ in 0..600 {
        if deaths(&world) > 0 {
            break;
        }
        world.pass(Duration::from_millis(100)).await;
    }
    // The next call is on its way.
    world.pass(seconds(1)).await;
    assert!((1..19).contains(&deaths(&world)), "{} deaths told", deaths(&world));
    let judge = *world.replicas.iter().find(|(_, r)| r.ears.lock().condition.judging).expect("a judge").0;
    world.kill(judge);
    world.manager.book().mood = Mood::Fine;
    world.pass(seconds(60)).await;
    let book = world.manager.book();
    let mut dead: Vec<&str> = book.told[starts..].iter().map(|told| told.name.as_str()).collect();
    dead.sort_unstable();
    let mut expected: Vec<&str> = world.components[..20].iter().map(|c| c.name.as_str()).collect();
    expected.retain(|name| *name != "x13c0s0b0n0");
    expected.sort_unstable();
    assert_eq!(dead, expected, "each once");
}

/// Whoever reads events of a tracker that does not judge gets them in their order, whatever znodes they come from.
#[tokio::test(start_paused = true)]
async fn who_only_follows_publishes_in_order() {
    let mut world = begin(10, 2, 40).await;
    (0..30).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let follower = world.replicas.values().find(|r| !r.ears.lock().condition.judging).expect("a follower");
    let (_, mut later) = follower.ears.events(0);
    (0..30).for_each(|component| world.revive(component));
    world.pass(seconds(10)).await;
    let numbers: Vec<u64> =
        std::iter::from_fn(|| later.try_recv().ok()).map(|change| change.sequence).collect();
    assert_eq!(numbers.len(), 30, "{numbers:?}");
    assert!(numbers.is_sorted(), "{numbers:?}");
}

#[tokio::test(start_paused = true)]
async fn a_rolling_restart_is_not_noticed() {
    let mut world = begin(6, 3, 40).await;
    let told = world.manager.book().told.len();
    for round in 0..6 {
        let oldest = *world.replicas.keys().next().expect("a replica");
        world.stop(oldest).await;
        world.pass(seconds(2 + round)).await;
        world.start();
        world.pass(seconds(3)).await;
    }
    assert_eq!(world.manager.book().told.len(), told, "nothing happened");
    check_the_end(&mut world, 6).await;
}

#[tokio::test(start_paused = true)]
async fn a_first_beat_that_was_answered_survives_everybody() {
    let mut world = begin(7, 1, 0).await;
    let ears = std::sync::Arc::clone(&world.replicas[&0].ears);
    let name = portcullis::heartbeat::name::Name::parse("lonely").expect("a name");
    ears.beat(&[(name, false)]).await.expect("room");
    world.kill(0);
    world.pass(seconds(15)).await;
    world.start();
    world.pass(seconds(120)).await;
    let words: Vec<String> = world.manager.book().told.iter().map(|told| told.flag.clone()).collect();
    assert_eq!(words.first().map(String::as_str), Some("OK"), "{words:?}");
    assert_eq!(words.last().map(String::as_str), Some("Alert"), "{words:?}");
}

/// One random life.
async fn live(seed: u64) {
    let replicas = 1 + (seed % 3) as u32;
    let mut world = begin(seed, replicas, 24).await;
    for _ in 0..40 {
        let component = world.below(24) as usize;
        let ids: Vec<u32> = world.replicas.keys().copied().collect();
        let some = (!ids.is_empty()).then(|| ids[world.below(ids.len() as u64) as usize]);
        let time = seconds(1 + world.below(20));
        match (world.below(14), some) {
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
                let moods = [Mood::Fine, Mood::Down, Mood::Hanging, Mood::Failing, Mood::Slow];
                world.manager.book().mood = moods[world.below(5) as usize];
            }
            (12, _) => {
                let step = world.below(7_200_000) as i64 - 3_600_000;
                world.step_calendar(step);
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
async fn any_life_ends_in_the_truth() {
    let first = std::env::var("HEARTBEAT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let count = std::env::var("HEARTBEAT_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(12);
    for seed in first..first + count {
        live(seed).await;
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
async fn garbage_in_the_store_ends_no_tracker() {
    let mut world = begin(7, 2, 4).await;
    let tree = world.tree();
    let batch = tree.children(&paths::heartbeat_batches()).await.expect("batches").pop().expect("a batch");
    let (replica, number) = paths::heartbeat_batch_of(&batch).expect("a name");
    let batch = paths::heartbeat_batch(replica, number);
    let kept = [paths::heartbeat_alarm(), paths::heartbeat_question(), paths::heartbeat_webhook()];
    spoil(&tree, &kept).await;
    spoil(&tree, std::slice::from_ref(&batch)).await;
    world.pass(seconds(5)).await;
    // Those that were there go on, and so does whoever takes office among it.
    for id in [0, 1] {
        world.start();
        world.stop(id).await;
    }
    world.pass(seconds(5)).await;
    spoil(&tree, &[paths::heartbeat_params(), paths::heartbeat_maintenance()]).await;
    world.silence(0);
    check_the_end(&mut world, 7).await;
    assert!(matches!(corner::alarm(&tree).await, Ok((Ok(None), _))), "overwritten");
    let question = corner::number(&tree, &paths::heartbeat_question()).await;
    assert!(matches!(question, Ok((Ok(1..), _))), "{question:?}");
    assert_eq!(tree.exists(&batch).await, Ok(false), "cleared away");
    for id in [2, 3] {
        world.stop(id).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_alarm_ends_with_who_holds_deaths_back() {
    let mut world = begin(8, 1, 4).await;
    let tree = world.tree();
    let params = json!({"Mass_share": "50", "Mass_hold": "3600"});
    corner::set_params(&tree, params.as_object().expect("a map")).await.expect("params");
    (0..4).for_each(|component| world.silence(component));
    world.pass(ERR + seconds(10)).await;
    let alarm = corner::alarm(&tree).await;
    assert!(matches!(alarm, Ok((Ok(Some((1.., 4))), _))), "{alarm:?}");
    world.stop(0).await;
    assert!(matches!(corner::alarm(&tree).await, Ok((Ok(None), _))));
}
