//! Invariants of the simulation, during a run and at its end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::store;

use crate::manager::Mood;
use crate::simulate::seconds;
use crate::world::World;

pub(crate) const WARN: Duration = Duration::from_secs(10);
pub(crate) const ERR: Duration = Duration::from_secs(30);

/// Tolerance of windows: beats and passes are milliseconds apart.
const SLACK: Duration = Duration::from_millis(300);

/// Checks that every warning and alert follows a silence that is long enough.
pub(crate) fn check_no_false_alarms(world: &World, seed: u64) {
    let book = world.manager.book();
    assert!(book.changes().len() <= book.updates.len(), "the same number is the same change");
    for update in &book.updates {
        let truth = world.components.iter().find(|c| c.name.as_str() == update.name).expect("ours");
        let silent = truth.last.map_or(Duration::MAX, |last| update.at.duration_since(last.min(update.at)));
        let gap = truth.longest_gap.max(silent);
        let needed = match update.flag.as_str() {
            "Warning" => WARN,
            "Alert" => ERR,
            _ => continue,
        };
        assert!(gap + SLACK >= needed, "seed {seed}: {update:?} after a silence of {gap:?}");
    }
}

/// Ends all faults, waits, and checks that the state manager, the store and the webhook have the
/// true states.
pub(crate) async fn check_the_end(world: &mut World, seed: u64) {
    world.manager.book().mood = Mood::Fine;
    world.manager.book().hook_mood = Mood::Fine;
    world.set_store(true);
    world.end_maintenance().await;
    if world.replicas.is_empty() {
        world.start();
    }
    world.pass(seconds(200)).await;
    check_no_false_alarms(world, seed);
    let believed = world.manager.book().newest_states();
    let records = store::overview(&world.tree()).await.expect("records").records;
    for (at, component) in world.components.iter().enumerate() {
        let name = component.name.as_str();
        let (expected, health) = match (component.beats, component.last, world.left_in_order(at)) {
            (true, ..) => (Some(("Ready", "OK")), "ok"),
            (false, Some(_), None) => (Some(("Standby", "Alert")), "dead"),
            // A component that was called silent returned for its planned stop.
            (false, Some(_), Some(true)) => (Some(("Ready", "OK")), "stopped"),
            (false, None, Some(true)) => (None, "stopped"),
            (false, None, None) => (None, ""),
            (false, _, Some(false)) => continue,
        };
        let found = believed.get(name).map(|(state, flag)| (state.as_str(), flag.as_str()));
        assert_eq!(found, expected, "seed {seed}: {name}");
        let found = records.iter().find(|record| record.name == component.name);
        assert_eq!(found.map_or("", |record| record.state.as_str()), health, "seed {seed}: {name}");
    }
    for record in records {
        assert_eq!(record.notified.as_str(), "yes", "seed {seed}: {record:?}");
    }
    check_the_webhook(world, seed);
    let judges = world.replicas.values().filter(|r| r.shared.lock().stats.judging).count();
    assert_eq!(judges, 1, "seed {seed}");
}

/// Checks that the webhook got every published change in order, except those of flapping
/// components, and nothing else; and a second time only what was being sent during a fault.
fn check_the_webhook(world: &World, seed: u64) {
    let book = world.manager.book();
    let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
    let mut again = 0;
    for update in &book.hooked {
        let shown = world.shown.get(&update.sequence).expect("only changes that are in the journal");
        assert_eq!(
            (shown.name.as_str(), shown.state.as_str()),
            (update.name.as_str(), update.health.as_str())
        );
        let before = newest.insert(&update.name, update.sequence).unwrap_or(0);
        assert!(before <= update.sequence, "seed {seed}: {update:?} after {before}");
        again += usize::from(before == update.sequence);
    }
    assert!(again <= world.upsets.len(), "seed {seed}: {again} sent again, {} upsets", world.upsets.len());
    let update: BTreeSet<u64> = book.hooked.iter().map(|update| update.sequence).collect();
    let restless: BTreeSet<Name> = world.shown.values().filter(|c| c.flaps > 0).map(|c| c.name).collect();
    let last: BTreeMap<Name, u64> = world.shown.values().map(|c| (c.name, c.sequence)).collect();
    for change in world.shown.values() {
        let wanted = !restless.contains(&change.name) || last[&change.name] == change.sequence;
        assert!(!wanted || update.contains(&change.sequence), "seed {seed}: {change:?} was not sent");
    }
}
