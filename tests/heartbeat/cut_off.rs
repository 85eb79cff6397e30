//! A tracker that has lost its connection to the store and still accepts beats: after a while it
//! answers 503, senders move to another tracker, and a component that knows no other tracker is not
//! declared dead because of it.

use std::time::Duration;

use portcullis::heartbeat::store;
use portcullis::heartbeat::tracker::shared_state::Readiness;

use crate::invariants::{ERR, WARN, check_the_end};
use crate::simulate::{HOLD, begin, judge, seconds};
use crate::world::{SESSION, World};

const FLEET: usize = 12;

/// Components from this number on know one tracker only.
const FAITHFUL: usize = 4;

fn update(world: &World, flag: &str) -> Vec<String> {
    let book = world.manager.book();
    book.updates.iter().filter(|update| update.flag == flag).map(|update| update.name.clone()).collect()
}

fn not_the_judge(world: &World) -> u32 {
    let judge = judge(world);
    *world.replicas.keys().find(|id| **id != judge).expect("another tracker")
}

/// Some components have beaten only to `id` for a while; then the store loses that tracker.
async fn cut(world: &mut World, id: u32) {
    for component in FAITHFUL..FLEET {
        world.components[component].only = Some(id);
    }
    world.pass(WARN).await;
    world.cut_off(id, true);
    world.pass(SESSION).await;
    world.expire(id);
}

/// One tracker, the judge or another, cannot reach the store for less time than deaths are held.
pub(crate) async fn short_cut() {
    for (seed, cut_for) in [(80, 30), (81, 60), (82, 95), (83, 60)] {
        let mut world = begin(seed, 2 + (seed % 2) as u32, FLEET).await;
        let id = if seed % 2 == 0 { not_the_judge(&world) } else { judge(&world) };
        cut(&mut world, id).await;
        // The death of a silent component of another tracker is not held.
        let healthy = *world.replicas.keys().find(|other| **other != id).expect("another");
        world.components[0].only = Some(healthy);
        world.pass(seconds(cut_for / 2)).await;
        world.silence(0);
        world.pass(seconds(cut_for - cut_for / 2)).await;
        world.cut_off(id, false);
        world.pass(WARN + ERR).await;
        assert_eq!(update(&world, "Alert"), ["x0c0s0b0n0"], "seed {seed}");
        check_the_end(&mut world, seed).await;
    }
}

/// Another tracker becomes the judge meanwhile: a running one, or one that starts and knows only
/// the data in the store.
pub(crate) async fn cut_with_new_judge() {
    for (seed, replicas) in [(84, 3), (85, 2)] {
        let mut world = begin(seed, replicas, FLEET).await;
        let id = not_the_judge(&world);
        cut(&mut world, id).await;
        world.pass(seconds(15)).await;
        let first = judge(&world);
        if replicas == 2 {
            world.start();
            world.pass(seconds(1)).await;
            world.stop(first).await;
        } else {
            world.kill(first);
        }
        world.pass(seconds(60)).await;
        assert_ne!(judge(&world), first, "seed {seed}");
        world.cut_off(id, false);
        world.pass(WARN + ERR).await;
        assert_eq!(update(&world, "Alert"), Vec::<String>::new(), "seed {seed}");
        check_the_end(&mut world, seed).await;
    }
}

/// Components that know another tracker move in time, and get no warning.
pub(crate) async fn senders_move() {
    for seed in 86..89 {
        let mut world = begin(seed, 2, FLEET).await;
        let id = not_the_judge(&world);
        // They stay with the tracker that accepts their beats.
        for component in 0..FLEET {
            world.components[component].only = Some(id);
        }
        world.pass(WARN).await;
        world.cut_off(id, true);
        let readiness = |world: &World| world.replicas[&id].shared.readiness();
        world.pass(seconds(4)).await;
        assert_eq!(readiness(&world), Readiness::Ready, "seed {seed}: the store may be slow");
        world.pass(seconds(4)).await;
        assert_eq!(readiness(&world), Readiness::NotReady, "seed {seed}");
        world.pass(SESSION - seconds(8)).await;
        world.expire(id);
        // A session may last a little longer than its timeout, and a request as well.
        world.pass(seconds(3)).await;
        assert_eq!(readiness(&world), Readiness::Stranded, "seed {seed}");
        for component in 0..FLEET {
            world.components[component].only = None;
        }
        world.pass(2 * ERR).await;
        assert_eq!(update(&world, "Warning"), Vec::<String>::new(), "seed {seed}");
        world.cut_off(id, false);
        world.pass(seconds(5)).await;
        assert_eq!(readiness(&world), Readiness::Ready, "seed {seed}: it reaches the store again");
        check_the_end(&mut world, seed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn component_of_a_tracker_without_the_store_is_not_declared_dead() {
    short_cut().await;
}

#[tokio::test(start_paused = true)]
async fn new_judge_reads_components_of_a_lost_tracker() {
    cut_with_new_judge().await;
}

#[tokio::test(start_paused = true)]
async fn senders_move_away_from_a_tracker_without_the_store() {
    senders_move().await;
}

/// A tracker never returns: the deaths of its components are held for a time, and then declared.
#[tokio::test(start_paused = true)]
async fn held_deaths_of_a_lost_tracker_are_declared_in_the_end() {
    let mut world = begin(89, 2, FLEET).await;
    let id = not_the_judge(&world);
    cut(&mut world, id).await;
    world.pass(HOLD - seconds(5)).await;
    assert_eq!(update(&world, "Alert"), Vec::<String>::new());
    assert_eq!(update(&world, "Warning").len(), FLEET - FAITHFUL, "warnings are not held");
    let lost = store::overview(&world.tree()).await.expect("records").lost_trackers;
    assert_eq!(lost, 1, "operators can see it");
    world.pass(seconds(10)).await;
    assert_eq!(update(&world, "Alert").len(), FLEET - FAITHFUL);
    world.pass(Duration::from_secs(60)).await;
    let lost = store::overview(&world.tree()).await.expect("records").lost_trackers;
    assert_eq!(lost, 0, "its batches are deleted");
}

/// An operator's release ends the hold.
#[tokio::test(start_paused = true)]
async fn release_declares_held_deaths_of_a_lost_tracker() {
    let mut world = begin(90, 2, FLEET).await;
    let id = not_the_judge(&world);
    cut(&mut world, id).await;
    world.pass(ERR + seconds(5)).await;
    assert_eq!(update(&world, "Alert"), Vec::<String>::new());
    store::release(&world.tree()).await.expect("a write");
    world.pass(seconds(5)).await;
    assert_eq!(update(&world, "Alert").len(), FLEET - FAITHFUL);
}
