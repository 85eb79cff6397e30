//! Lost answers of the store lose no component, and data that is no longer needed is deleted.

use std::sync::Arc;

use portcullis::heartbeat::core::audit::Change;
use portcullis::heartbeat::core::beat::Stamp;
use portcullis::heartbeat::core::journal::Journal;
use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::core::record::bucket_of;
use portcullis::heartbeat::core::state::{Notification, State};
use portcullis::heartbeat::store;
use portcullis::store::memory::Fault;
use portcullis::store::paths;
use portcullis::store::tree::{Tree, Write};
use serde_json::json;

use crate::manager::{HOOK_URL, Mood};
use crate::simulate::{begin, judge, seconds};
use crate::world::{SESSION, World};

/// A write without an answer loses no component, whether it was applied or not: neither a component
/// in a new bucket nor one in an existing bucket, even if it never sends another beat.
#[tokio::test(start_paused = true)]
async fn first_beat_survives_a_write_without_an_answer() {
    for loss in [Fault::LostBefore, Fault::LostAfter] {
        let mut world = begin(40, 1, 0).await;
        let name = |number: u32| Name::parse(&format!("n{number}")).expect("a name");
        let first = name(0);
        let same = |other: &Name| bucket_of(other.as_str()) == bucket_of(first.as_str());
        let second = (1..).map(name).find(same).expect("there are 4,096");
        for (name, known) in [(first, 1), (second, 2)] {
            world.lose_answer(paths::heartbeat_buckets(), loss);
            let shared = Arc::clone(&world.replicas[&0].shared);
            shared.beat(&[(name, false)]).await.expect("room");
            // Twice this time is less than the warning window.
            world.pass(seconds(4)).await;
            let records = store::overview(&world.tree()).await.expect("records").records;
            let states: Vec<&str> = records.iter().map(|record| record.state.as_str()).collect();
            assert_eq!(states, vec!["ok"; known], "{loss:?}: {records:?}");
            let update: Vec<String> =
                world.manager.book().updates.iter().map(|update| update.message.clone()).collect();
            assert_eq!(update, vec!["Heartbeat started"; known], "{loss:?}");
            assert_eq!(world.shown.len(), known, "{loss:?}");
            assert_eq!(world.manager.book().hooked.len(), known, "{loss:?}");
        }
    }
}

/// A tracker deletes its old batches also when answers are lost: otherwise the next tracker would
/// apply old beats.
#[tokio::test(start_paused = true)]
async fn old_batches_are_deleted_although_answers_are_lost() {
    let mut world = begin(41, 1, 6).await;
    for loss in [Fault::LostAfter, Fault::LostBefore, Fault::LostAfter, Fault::LostAfter] {
        world.pass(seconds(30)).await;
        world.lose_answer(paths::heartbeat_batches(), loss);
    }
    world.pass(seconds(40)).await;
    let batches = world.tree().children(&paths::heartbeat_batches()).await.expect("batches");
    // One batch every two and a half seconds, of twenty seconds, and the one that is being written.
    assert!(batches.len() <= 12, "{} batches", batches.len());
}

/// Beats that a tracker received before it lost the store are old when it reaches it again: they
/// are no sign of life, and no planned stop.
#[tokio::test(start_paused = true)]
async fn beats_that_reach_the_store_late_are_old() {
    let mut world = begin(44, 2, 6).await;
    let judge = judge(&world);
    let late = 1 - judge;
    for (component, going_away) in [(0, false), (1, true)] {
        world.pass(seconds(10)).await;
        let (name, before) = (world.components[component].name, world.manager.book().updates.len());
        world.silence(component);
        world.cut_off(late, true);
        let shared = Arc::clone(&world.replicas[&late].shared);
        let beat = tokio::spawn(async move { shared.beat(&[(name, going_away)]).await });
        // The tracker tries to write them, and fails.
        world.replicas[&late].shared.urgent.notify_one();
        for second in 0..45 {
            world.pass(seconds(1)).await;
            if second == SESSION.as_secs() {
                world.expire(late);
            }
            if going_away {
                // The component returned at once, to the other tracker.
                let shared = Arc::clone(&world.replicas[&judge].shared);
                shared.beat(&[(name, false)]).await.expect("room");
            }
        }
        beat.await.expect("no panic").expect("room");
        world.cut_off(late, false);
        world.pass(seconds(5)).await;
        assert!(world.replicas[&late].shared.lock().stats.store, "it found the store again");
        let silent = ["Heartbeat stopped -- might be dead", "Heartbeat stopped -- declared dead"];
        let expected = if going_away { &silent[..0] } else { &silent };
        let update: Vec<String> = world.manager.book().updates[before..]
            .iter()
            .filter(|update| update.name == name.as_str())
            .map(|update| update.message.clone())
            .collect();
        assert_eq!(update, expected, "{name}");
        let records = store::overview(&world.tree()).await.expect("records").records;
        let state = records.iter().find(|record| record.name == name).expect("a record").state;
        assert_eq!(state, if going_away { State::Ok } else { State::Dead });
    }
}

/// The pages of the journal.
async fn pages(world: &World) -> Vec<u64> {
    let names = world.tree().children(&paths::heartbeat_journal()).await.expect("pages");
    names.iter().map(|name| name.parse().expect("a number")).collect()
}

/// Pages are kept until the webhook has got their changes, and the newest ones for readers that
/// were disconnected.
#[tokio::test(start_paused = true)]
async fn journal_is_kept_as_long_as_it_is_needed() {
    const CHANGES: u64 = 9_000;
    let mut world = World::new(42, 3).await;
    let tree = world.tree();
    store::ensure(&tree, &world.roles).await.expect("heartbeat znodes");
    let params = json!({"Webhook_url": HOOK_URL, "Mass_share": "0"});
    store::set_params(&tree, params.as_object().expect("a map")).await.expect("params");
    let change = |sequence| Change {
        name: Name::parse(&format!("a-component-with-quite-a-long-name-so-that-pages-fill-{}", sequence % 7))
            .expect("a name"),
        state: State::Ok,
        notification: Some(Notification::Restarted),
        sequence,
        at: 1,
        flaps: 0,
        stamp: Stamp::default(),
    };
    let changes: Vec<Change> = (1..=CHANGES).map(change).collect();
    let acl = world.roles.controllers();
    for draft in Journal::default().with(&changes) {
        let page = Write::create(paths::heartbeat_page(draft.number), draft.data, acl.clone());
        tree.write(vec![page]).await.expect("a write");
    }
    let written = pages(&world).await;
    assert!(written.len() > 20, "{written:?}");

    world.manager.book().hook_mood = Mood::Down;
    world.start();
    world.pass(seconds(60)).await;
    assert_eq!(pages(&world).await[..written.len() - 1], written[..written.len() - 1], "not published yet");
    world.manager.book().hook_mood = Mood::Fine;
    let wanted = CHANGES as usize + 3;
    for _ in 0..60 {
        if world.manager.book().hooked.len() >= wanted {
            break;
        }
        world.pass(seconds(10)).await;
    }
    let heard: Vec<u64> = world.manager.book().hooked.iter().map(|update| update.sequence).collect();
    assert_eq!(heard.len(), wanted);
    assert_eq!(heard[..CHANGES as usize], (1..=CHANGES).collect::<Vec<_>>());
    world.pass(seconds(10)).await;
    let kept = pages(&world).await;
    assert_eq!(kept.len(), 12, "{kept:?}");
    let newest = *written.last().expect("pages");
    assert!(kept.contains(&newest) && kept.is_sorted(), "{kept:?}");
    // The page stays as it is, and a new one is written.
    world.silence(0);
    world.pass(seconds(60)).await;
    assert_eq!(world.manager.book().hooked.len(), wanted + 2);
    assert_eq!(pages(&world).await, kept);
}

/// Changes are stored, and the judge crashes before the first page of the journal exists.
#[tokio::test(start_paused = true)]
async fn new_journal_begins_with_stored_changes() {
    let mut world = begin(43, 1, 5).await;
    let before: Vec<u64> = world.shown.keys().copied().collect();
    world.stop(0).await;
    world.tree().write(vec![Write::Delete { path: paths::heartbeat_page(0) }]).await.expect("a write");
    world.start();
    world.pass(seconds(5)).await;
    let pages = store::journal(&world.tree(), 0).await.expect("a journal");
    let changes = pages.iter().flat_map(|page| page.changes.as_deref().expect("changes"));
    assert_eq!(changes.map(|change| change.sequence).collect::<Vec<_>>(), before);
}
