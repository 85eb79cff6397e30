//! Deaths that are held back in a mass outage, and an operator's word about them, outlive whoever judges.

use std::time::Duration;

use portcullis::heartbeat::corner;
use portcullis::heartbeat::record::Hold;
use serde_json::json;
use tokio::time::Instant;

use crate::simulate::{begin, judge, seconds};
use crate::verdict::ERR;
use crate::world::{SESSION, World};

const FLEET: usize = 4;

async fn outage(seed: u64, replicas: u32, hold_seconds: u64) -> (World, Instant) {
    let mut world = begin(seed, replicas, FLEET).await;
    let since = fall_silent(&mut world, hold_seconds).await;
    (world, since)
}

/// All at once; when that is called an outage.
async fn fall_silent(world: &mut World, hold_seconds: u64) -> Instant {
    let params = json!({"Mass_share": "50", "Mass_hold": hold_seconds.to_string()});
    corner::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    (0..FLEET).for_each(|component| world.silence(component));
    until(world, "a hold", ERR + seconds(10), async |world| held(world).await).await
}

/// Deaths are held, as the store has it.
async fn held(world: &World) -> bool {
    matches!(corner::alarm(&world.tree()).await, Ok((Ok(Some(Hold::Held { .. })), _)))
}

fn dead(world: &World) -> usize {
    world.manager.book().told.iter().filter(|told| told.flag == "Alert").count()
}

/// When it is so; within a time.
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

/// It goes on while nobody judges, and ends when it would have: without the time in which nobody did.
#[tokio::test(start_paused = true)]
async fn a_hold_outlives_its_judges() {
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
    // And that is the end of it.
    until(&mut world, "no alarm", 3 * ERR, async |world| !held(world).await).await;
    assert_eq!(dead(&world), FLEET, "each once");
}

/// One who leaves in order leaves the hold to its successor.
#[tokio::test(start_paused = true)]
async fn a_hold_outlives_a_restart() {
    let (mut world, _) = outage(51, 1, 3600).await;
    world.stop(0).await;
    assert!(held(&world).await);
    world.start();
    world.pass(seconds(120)).await;
    assert!(held(&world).await && dead(&world) == 0);
}

#[tokio::test(start_paused = true)]
async fn a_release_while_nobody_judges_is_obeyed() {
    let (mut world, _) = outage(52, 2, 3600).await;
    let id = judge(&world);
    world.kill(id);
    corner::release(&world.tree()).await.expect("a write");
    world.pass(seconds(1)).await;
    assert_eq!(dead(&world), 0, "nobody judges");
    // A whole window again, since nobody knows what the dead judge heard.
    all_dead(&mut world, SESSION + ERR + seconds(5)).await;
}

/// The judge that obeyed is gone before the deaths are due, and so is the next.
#[tokio::test(start_paused = true)]
async fn a_release_outlives_who_obeyed_it() {
    let (mut world, _) = outage(53, 3, 3600).await;
    let id = judge(&world);
    world.kill(id);
    until(&mut world, "another judge", SESSION + seconds(5), async |world| judges(world) == 1).await;
    corner::release(&world.tree()).await.expect("a write");
    world.pass(seconds(2)).await;
    assert!(!held(&world).await && dead(&world) == 0);
    let id = judge(&world);
    world.kill(id);
    all_dead(&mut world, SESSION + ERR + seconds(5)).await;
    until(&mut world, "the end of it", 3 * ERR, async |world| {
        matches!(corner::alarm(&world.tree()).await, Ok((Ok(None), _)))
    })
    .await;
}

/// A word of long ago is not for the next outage.
#[tokio::test(start_paused = true)]
async fn a_release_without_a_hold_releases_nothing_later() {
    let mut world = begin(54, 2, FLEET).await;
    corner::release(&world.tree()).await.expect("a write");
    world.pass(seconds(2)).await;
    fall_silent(&mut world, 3600).await;
    let id = judge(&world);
    world.kill(id);
    world.pass(2 * ERR + SESSION).await;
    assert!(held(&world).await && dead(&world) == 0);
}

fn judges(world: &World) -> usize {
    world.replicas.values().filter(|r| r.ears.lock().condition.judging).count()
}
