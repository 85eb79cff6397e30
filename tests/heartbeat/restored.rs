//! A store that loses heartbeat records, or is restored with old ones, while trackers run: all
//! records are written again, and no number is used for two changes (which `World::listen` checks).

use std::collections::BTreeSet;

use portcullis::heartbeat::store;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Tree, Write};
use serde_json::json;
use tokio::time::Instant;

use crate::invariants::{ERR, WARN, check_the_end};
use crate::manager::HOOK_URL;
use crate::simulate::{begin, judge, seconds};
use crate::world::World;

const FLEET: usize = 12;

async fn delete(tree: &impl Tree, nodes: impl IntoIterator<Item = NodePath>) {
    for path in nodes {
        tree.write(vec![Write::Delete { path }]).await.expect("a znode to delete");
    }
}

async fn delete_components(tree: &impl Tree) {
    let buckets = tree.children(&paths::heartbeat_buckets()).await.expect("buckets");
    delete(tree, buckets.iter().map(|name| paths::heartbeat_bucket(name.parse().expect("a number")))).await;
    delete(tree, [paths::heartbeat_buckets()]).await;
}

async fn delete_journal(tree: &impl Tree) {
    let pages = tree.children(&paths::heartbeat_journal()).await.expect("pages");
    delete(tree, pages.iter().map(|name| paths::heartbeat_page(name.parse().expect("a number")))).await;
    delete(tree, [paths::heartbeat_journal()]).await;
}

/// Deletes all heartbeat records, as an operator's tool can.
async fn delete_all(tree: &impl Tree) {
    delete_components(tree).await;
    delete_journal(tree).await;
    let batches = tree.children(&paths::heartbeat_batches()).await.expect("batches");
    let batch = |name: &String| {
        let (replica, number) = paths::heartbeat_batch_of(name).expect("a batch");
        paths::heartbeat_batch(replica, number)
    };
    delete(tree, batches.iter().map(batch)).await;
    let replicas = tree.children(&paths::heartbeat_replicas()).await.expect("trackers");
    delete(tree, replicas.iter().map(|id| paths::heartbeat_replica(id))).await;
    let nodes = [
        paths::heartbeat_batches(),
        paths::heartbeat_replicas(),
        paths::heartbeat_leader(),
        paths::heartbeat_epoch(),
        paths::heartbeat_params(),
        paths::heartbeat_maintenance(),
        paths::heartbeat_release(),
        paths::heartbeat_alarm(),
        paths::heartbeat_question(),
        paths::heartbeat_webhook(),
        paths::heartbeat_trackers(),
        paths::heartbeat(),
    ];
    delete(tree, nodes).await;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// All heartbeat records in the store.
    Everything,
    Components,
    Journal,
    /// A copy from before the last changes is restored.
    OldCopy,
    /// A copy from before the first tracker ran is restored.
    FirstCopy,
}

async fn lose(world: &mut World, loss: Loss, backups: &[portcullis::store::memory::Backup; 2]) {
    // The webhook may receive a change of each component again.
    world.upsets.extend(std::iter::repeat_n(Instant::now(), 4 * FLEET));
    match loss {
        Loss::Everything => delete_all(&world.tree()).await,
        Loss::Components => delete_components(&world.tree()).await,
        Loss::Journal => delete_journal(&world.tree()).await,
        Loss::FirstCopy => world.store.restore(&backups[0]),
        Loss::OldCopy => world.store.restore(&backups[1]),
    }
}

pub(crate) async fn records_deleted() {
    records_lost(&[(100, Loss::Everything), (101, Loss::Components), (102, Loss::Journal)]).await;
}

async fn records_lost(losses: &[(u64, Loss)]) {
    for (seed, loss) in losses.iter().copied() {
        let mut world = World::new(seed, FLEET).await;
        let first = world.store.backup();
        store::ensure(&world.tree(), &world.roles).await.expect("records");
        let params =
            json!({"Sm_url": "http://sm", "Webhook_url": HOOK_URL, "Mass_share": "0", "Mass_hold": "70"});
        store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
        for _ in 0..1 + seed % 3 {
            world.start();
        }
        world.pass(seconds(8)).await;
        // Several elections raise the epoch.
        for _ in 0..2 {
            let id = judge(&world);
            world.start();
            world.pass(seconds(1)).await;
            world.stop(id).await;
            world.pass(seconds(3)).await;
        }
        let old = world.store.backup();
        (0..3).for_each(|component| world.silence(component));
        world.pass(ERR + WARN).await;
        (1..3).for_each(|component| world.revive(component));
        world.pass(seconds(5)).await;
        let before: BTreeSet<u64> = world.shown.keys().copied().collect();
        lose(&mut world, loss, &[first, old]).await;
        // Long enough to notice, and too short for a component to change.
        world.pass(seconds(9)).await;
        let records = store::overview(&world.tree()).await.expect("records").records;
        let found: Vec<(&str, &str)> =
            records.iter().map(|record| (record.name.as_str(), record.state.as_str())).collect();
        assert_eq!(found.len(), FLEET, "seed {seed}, {loss:?}: all are written again: {found:?}");
        assert_eq!(found[0], ("x0c0s0b0n0", "dead"), "seed {seed}, {loss:?}");
        let (params, _) = store::params(&world.tree()).await.expect("params");
        assert_eq!(params.mass_hold_ms, 70_000, "seed {seed}, {loss:?}: so are the parameters");
        world.silence(5);
        world.pass(ERR + seconds(10)).await;
        let new: Vec<u64> = world.shown.keys().copied().filter(|number| !before.contains(number)).collect();
        let highest = before.last().copied().unwrap_or(0);
        assert!(new.len() >= 2, "seed {seed}, {loss:?}: {new:?}");
        assert!(new.iter().all(|number| *number > highest), "seed {seed}, {loss:?}: {new:?} after {highest}");
        check_the_end(&mut world, seed).await;
    }
}

/// Starts trackers, and lets components fail and return.
async fn with_changes(seed: u64) -> World {
    let mut world = begin(seed, 2, FLEET).await;
    (0..3).for_each(|component| world.silence(component));
    world.pass(ERR + WARN).await;
    (1..3).for_each(|component| world.revive(component));
    world.pass(seconds(5)).await;
    world
}

/// Lets a component fail, and checks that the numbers of its changes are higher than all before.
async fn check_new_numbers(mut world: World, seed: u64) {
    let highest = *world.shown.last_key_value().expect("changes").0;
    world.silence(5);
    world.pass(ERR + seconds(30)).await;
    let new = world.shown.range(highest + 1..).filter(|(_, change)| change.name.as_str() == "x5c0s0b0n0");
    // Whether the alert is held depends on the number of silent components.
    assert!(new.count() >= 1, "seed {seed}: a warning above {highest}: {:?}", world.shown);
    check_the_end(&mut world, seed).await;
}

pub(crate) async fn restored_while_stopped() {
    for seed in 110..113 {
        let mut world = with_changes(seed).await;
        let backup = world.store.backup();
        (6..9).for_each(|component| world.silence(component));
        world.pass(ERR + WARN).await;
        let running: Vec<u32> = world.replicas.keys().copied().collect();
        for id in running {
            world.stop(id).await;
        }
        // The webhook may receive a change of each component again.
        world.upsets.extend(std::iter::repeat_n(Instant::now(), 4 * FLEET));
        world.store.restore(&backup);
        for _ in 0..2 {
            world.start();
        }
        check_new_numbers(world, seed).await;
    }
}

pub(crate) async fn clock_set_back() {
    let mut world = with_changes(120).await;
    world.step_calendar(-3_600_000);
    let id = judge(&world);
    world.stop(id).await;
    world.start();
    check_new_numbers(world, 120).await;
}

#[tokio::test(start_paused = true)]
async fn numbers_are_not_repeated_if_the_store_is_restored_while_no_tracker_runs() {
    restored_while_stopped().await;
}

#[tokio::test(start_paused = true)]
async fn numbers_are_not_repeated_if_the_clock_is_set_back() {
    clock_set_back().await;
}

#[tokio::test(start_paused = true)]
async fn records_that_were_deleted_are_written_again() {
    records_deleted().await;
}

#[tokio::test(start_paused = true)]
async fn records_of_a_restored_store_are_written_again() {
    records_lost(&[(103, Loss::OldCopy), (104, Loss::FirstCopy)]).await;
}
