//! Deaths that are held in a mass outage, and their release by an operator, survive a change of the
//! judge.

use std::time::Duration;

use portcullis::heartbeat::core::record::Hold;
use portcullis::heartbeat::store;
use serde_json::json;
use tokio::time::Instant;

use crate::invariants::ERR;
use crate::simulate::{begin, judge, seconds};
use crate::world::{SESSION, World};

const FLEET: usize = 4;

async fn outage(seed: u64, replicas: u32, hold_seconds: u64) -> (World, Instant) {
    let mut world = begin(seed, replicas, FLEET).await;
    let since = fall_silent(&mut world, hold_seconds).await;
    (world, since)
}

/// Silences all components; returns when the outage begins.
async fn fall_silent(world: &mut World, hold_seconds: u64) -> Instant {
    let params = json!({"Mass_share": "50", "Mass_hold": hold_seconds.to_string()});
    store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    (0..FLEET).for_each(|component| world.silence(component));
    until(world, "a hold", ERR + seconds(10), async |world| held(world).await).await
}

/// Whether deaths are held, according to the store.
async fn held(world: &World) -> bool {
    matches!(store::alarm(&world.tree()).await, Ok((Ok(Some(Hold::Held { .. })), _)))
}

fn dead(world: &World) -> usize {
    world.manager.book().updates.iter().filter(|update| update.flag == "Alert").count()
}

/// Waits for a condition, with a limit.
async fn until(
    world: &mut World,
    what: &str,
    limit: Duration,
    is_so: impl AsyncFn(&World) -> bool,
) -> Instant {
    let end = Instant::now() + limit;
    while !is_so(world).await {
        assert!(Instant::now() < end, "{what} within {limit:?}");
        world.pass(Duration::from_millis(200)).await;
    }
    Instant::now()
}

async fn all_dead(world: &mut World, limit: Duration) -> Instant {
    until(world, "every death", limit, async |world| dead(world) == FLEET).await
}

/// A hold continues without a judge, and lasts longer by the time without one.
#[tokio::test(start_paused = true)]
async fn hold_survives_crashes_of_judges() {
    let (mut world, since) = outage(50, 3, 150).await;
    for killed in 1..=2 {
        world.pass(seconds(35)).await;
        let id = judge(&world);
        world.kill(id);
        world.pass(seconds(1)).await;
        assert!(held(&world).await && dead(&world) == 0, "{killed}");
    }
    let blind = 2 * (SESSION + seconds(10));
    let end = all_dead(&mut world, seconds(150)).await - since;
    assert!(end >= seconds(149) && end <= seconds(152) + blind, "{end:?}");
    // The hold is over.
    until(&mut world, "no alarm", 3 * ERR, async |world| !held(world).await).await;
    assert_eq!(dead(&world), FLEET, "each once");
}

/// A judge that stops as planned leaves the hold to its successor.
#[tokio::test(start_paused = true)]
async fn hold_survives_a_restart() {
    let (mut world, _) = outage(51, 1, 3600).await;
    world.stop(0).await;
    assert!(held(&world).await);
    world.start();
    world.pass(seconds(120)).await;
    assert!(held(&world).await && dead(&world) == 0);
}

#[tokio::test(start_paused = true)]
async fn release_without_a_judge_is_applied_by_the_next() {
    let (mut world, _) = outage(52, 2, 3600).await;
    let id = judge(&world);
    world.kill(id);
    store::release(&world.tree()).await.expect("a write");
    world.pass(seconds(1)).await;
    assert_eq!(dead(&world), 0, "no tracker is the judge");
    // A whole window again, because the beats of the crashed judge are not known.
    all_dead(&mut world, SESSION + ERR + seconds(5)).await;
}

/// The judge that applied the release crashes before the deaths are due, and so does the next.
#[tokio::test(start_paused = true)]
async fn release_survives_a_crash_of_the_judge() {
    let (mut world, _) = outage(53, 3, 3600).await;
    let id = judge(&world);
    world.kill(id);
    until(&mut world, "another judge", SESSION + seconds(5), async |world| judges(world) == 1).await;
    store::release(&world.tree()).await.expect("a write");
    world.pass(seconds(2)).await;
    assert!(!held(&world).await && dead(&world) == 0);
    let id = judge(&world);
    world.kill(id);
    all_dead(&mut world, SESSION + ERR + seconds(5)).await;
    until(&mut world, "the end of it", 3 * ERR, async |world| {
        matches!(store::alarm(&world.tree()).await, Ok((Ok(None), _)))
    })
    .await;
}

/// An old release has no effect on the next outage.
#[tokio::test(start_paused = true)]
async fn release_without_a_hold_has_no_later_effect() {
    let mut world = begin(54, 2, FLEET).await;
    store::release(&world.tree()).await.expect("a write");
    world.pass(seconds(2)).await;
    fall_silent(&mut world, 3600).await;
    let id = judge(&world);
    world.kill(id);
    world.pass(2 * ERR + SESSION).await;
    assert!(held(&world).await && dead(&world) == 0);
}

fn judges(world: &World) -> usize {
    world.replicas.values().filter(|r| r.shared.lock().stats.judging).count()
}
