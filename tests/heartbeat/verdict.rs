//! What must hold in a simulated world, whatever happened in it: while it lives, and when all is quiet again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portcullis::heartbeat::corner;
use portcullis::heartbeat::name::Name;

use crate::manager::Mood;
use crate::simulate::seconds;
use crate::world::World;

pub(crate) const WARN: Duration = Duration::from_secs(10);
pub(crate) const ERR: Duration = Duration::from_secs(30);

/// A little less than a window: beats and looks are milliseconds apart.
const SLACK: Duration = Duration::from_millis(300);

/// No warning without a silence that deserves it.
pub(crate) fn check_nobody_was_slandered(world: &World, seed: u64) {
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
pub(crate) async fn check_the_end(world: &mut World, seed: u64) {
    world.manager.book().mood = Mood::Fine;
    world.manager.book().hook_mood = Mood::Fine;
    world.set_store(true);
    world.end_maintenance().await;
    if world.replicas.is_empty() {
        world.start();
    }
    world.pass(seconds(200)).await;
    check_nobody_was_slandered(world, seed);
    let believed = world.manager.book().believes();
    let records = corner::overview(&world.tree()).await.expect("records").records;
    for (at, component) in world.components.iter().enumerate() {
        let name = component.name.as_str();
        let (expected, health) = match (component.beats, component.last, world.left_in_order(at)) {
            (true, ..) => (Some(("Ready", "OK")), "ok"),
            (false, Some(_), None) => (Some(("Standby", "Alert")), "dead"),
            // Whoever was called silent before came back to say good-bye.
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
        assert_eq!(record.told.as_str(), "yes", "seed {seed}: {record:?}");
    }
    check_the_webhook(world, seed);
    let judges = world.replicas.values().filter(|r| r.ears.lock().condition.judging).count();
    assert_eq!(judges, 1, "seed {seed}");
}

/// The webhook heard of every change that was shown to anybody, but of those who come and go; of nothing else; in order; and again only
/// what was on its way when something happened.
fn check_the_webhook(world: &World, seed: u64) {
    let book = world.manager.book();
    let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
    let mut again = 0;
    for told in &book.hooked {
        let shown = world.shown.get(&told.sequence).expect("told of what is in the journal");
        assert_eq!((shown.name.as_str(), shown.state.as_str()), (told.name.as_str(), told.health.as_str()));
        let before = newest.insert(&told.name, told.sequence).unwrap_or(0);
        assert!(before <= told.sequence, "seed {seed}: {told:?} after {before}");
        again += usize::from(before == told.sequence);
    }
    assert!(again <= world.upsets.len(), "seed {seed}: {again} told again, {} upsets", world.upsets.len());
    let told: BTreeSet<u64> = book.hooked.iter().map(|told| told.sequence).collect();
    let restless: BTreeSet<Name> = world.shown.values().filter(|c| c.flaps > 0).map(|c| c.name).collect();
    let last: BTreeMap<Name, u64> = world.shown.values().map(|c| (c.name, c.sequence)).collect();
    for change in world.shown.values() {
        let wanted = !restless.contains(&change.name) || last[&change.name] == change.sequence;
        assert!(!wanted || told.contains(&change.sequence), "seed {seed}: {change:?} was not told");
    }
}
