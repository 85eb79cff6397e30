//! What is lost on the way to the store and what is thrown away there: an answer loses nobody, and what nobody needs any more
//! does not stay.

use std::sync::Arc;

use portcullis::heartbeat::audit::Change;
use portcullis::heartbeat::corner;
use portcullis::heartbeat::journal::Journal;
use portcullis::heartbeat::name::Name;
use portcullis::heartbeat::record::bucket_of;
use portcullis::heartbeat::sent::Stamp;
use portcullis::heartbeat::state::{State, Word};
use portcullis::store::memory::Fault;
use portcullis::store::paths;
use portcullis::store::tree::{Tree, Write};
use serde_json::json;

use crate::manager::{HOOK_URL, Mood};
use crate::simulate::{begin, judge, seconds};
use crate::world::{SESSION, World};

/// Whether it was applied or not, a write without an answer loses nobody: neither one whose znode is not there yet, nor one
/// whose znode has others in it, though it never beats again.
#[tokio::test(start_paused = true)]
async fn a_first_beat_outlives_a_write_that_was_not_answered() {
    for loss in [Fault::LostBefore, Fault::LostAfter] {
        let mut world = begin(40, 1, 0).await;
        let name = |number: u32| Name::parse(&format!("n{number}")).expect("a name");
        let first = name(0);
        let same = |other: &Name| bucket_of(other.as_str()) == bucket_of(first.as_str());
        let second = (1..).map(name).find(same).expect("there are 4,096");
        for (name, known) in [(first, 1), (second, 2)] {
            world.lose_answer(paths::heartbeat_buckets(), loss);
            let ears = Arc::clone(&world.replicas[&0].ears);
            ears.beat(&[(name, false)]).await.expect("room");
            // Twice this is less than the warning window.
            world.pass(seconds(4)).await;
            let records = corner::overview(&world.tree()).await.expect("records").records;
            let states: Vec<&str> = records.iter().map(|record| record.state.as_str()).collect();
            assert_eq!(states, vec!["ok"; known], "{loss:?}: {records:?}");
            let told: Vec<String> =
                world.manager.book().told.iter().map(|told| told.message.clone()).collect();
            assert_eq!(told, vec!["Heartbeat started"; known], "{loss:?}");
            assert_eq!(world.shown.len(), known, "{loss:?}");
            assert_eq!(world.manager.book().hooked.len(), known, "{loss:?}");
        }
    }
}

/// A tracker clears away what it wrote, whatever becomes of answers: old beats would be heard by whoever comes next.
#[tokio::test(start_paused = true)]
async fn old_beats_are_cleared_away_though_answers_are_lost() {
    let mut world = begin(41, 1, 6).await;
    for loss in [Fault::LostAfter, Fault::LostBefore, Fault::LostAfter, Fault::LostAfter] {
        world.pass(seconds(30)).await;
        world.lose_answer(paths::heartbeat_batches(), loss);
    }
    world.pass(seconds(40)).await;
    let batches = world.tree().children(&paths::heartbeat_batches()).await.expect("batches");
    // One each two and a half seconds, of twenty, and what is being written.
    assert!(batches.len() <= 12, "{} batches", batches.len());
}

/// What a tracker heard before it lost the store is old when it finds it again: no sign of life, and no farewell.
#[tokio::test(start_paused = true)]
async fn beats_that_reach_the_store_late_are_old() {
    let mut world = begin(44, 2, 6).await;
    let judge = judge(&world);
    let late = 1 - judge;
    for (component, going_away) in [(0, false), (1, true)] {
        world.pass(seconds(10)).await;
        let (name, before) = (world.components[component].name, world.manager.book().told.len());
        world.silence(component);
        world.cut_off(late, true);
        let ears = Arc::clone(&world.replicas[&late].ears);
        let beat = tokio::spawn(async move { ears.beat(&[(name, going_away)]).await });
        // It tries to write that, and fails.
        world.replicas[&late].ears.urgent.notify_one();
        for second in 0..45 {
            world.pass(seconds(1)).await;
            if second == SESSION.as_secs() {
                world.expire(late);
            }
            if going_away {
                // It came back at once, to the other.
                let ears = Arc::clone(&world.replicas[&judge].ears);
                ears.beat(&[(name, false)]).await.expect("room");
            }
        }
        beat.await.expect("no panic").expect("room");
        world.cut_off(late, false);
        world.pass(seconds(5)).await;
        assert!(world.replicas[&late].ears.lock().condition.store, "it found the store again");
        let silent = ["Heartbeat stopped -- might be dead", "Heartbeat stopped -- declared dead"];
        let expected = if going_away { &silent[..0] } else { &silent };
        let told: Vec<String> = world.manager.book().told[before..]
            .iter()
            .filter(|told| told.name == name.as_str())
            .map(|told| told.message.clone())
            .collect();
        assert_eq!(told, expected, "{name}");
        let records = corner::overview(&world.tree()).await.expect("records").records;
        let state = records.iter().find(|record| record.name == name).expect("a record").state;
        assert_eq!(state, if going_away { State::Ok } else { State::Dead });
    }
}

/// Pages of the journal.
async fn pages(world: &World) -> Vec<u64> {
    let names = world.tree().children(&paths::heartbeat_journal()).await.expect("pages");
    names.iter().map(|name| name.parse().expect("a number")).collect()
}

/// Pages stay until the webhook has heard of what is on them, and then the newest for whoever was away for a moment.
#[tokio::test(start_paused = true)]
async fn the_journal_is_kept_as_long_as_it_is_needed() {
    const CHANGES: u64 = 9_000;
    let mut world = World::new(42, 3).await;
    let tree = world.tree();
    corner::ensure(&tree, &world.roles).await.expect("a corner");
    let params = json!({"Webhook_url": HOOK_URL, "Mass_share": "0"});
    corner::set_params(&tree, params.as_object().expect("a map")).await.expect("params");
    let change = |sequence| Change {
        name: Name::parse(&format!("a-component-with-quite-a-long-name-so-that-pages-fill-{}", sequence % 7))
            .expect("a name"),
        state: State::Ok,
        word: Some(Word::Restarted),
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
    assert_eq!(pages(&world).await[..written.len() - 1], written[..written.len() - 1], "not heard of yet");
    world.manager.book().hook_mood = Mood::Fine;
    let wanted = CHANGES as usize + 3;
    for _ in 0..60 {
        if world.manager.book().hooked.len() >= wanted {
            break;
        }
        world.pass(seconds(10)).await;
    }
    let heard: Vec<u64> = world.manager.book().hooked.iter().map(|told| told.sequence).collect();
    assert_eq!(heard.len(), wanted);
    assert_eq!(heard[..CHANGES as usize], (1..=CHANGES).collect::<Vec<_>>());
    world.pass(seconds(10)).await;
    let kept = pages(&world).await;
    assert_eq!(kept.len(), 12, "{kept:?}");
    let newest = *written.last().expect("pages");
    assert!(kept.contains(&newest) && kept.is_sorted(), "{kept:?}");
    // Nothing more happens to it, and it is written on.
    world.silence(0);
    world.pass(seconds(60)).await;
    assert_eq!(world.manager.book().hooked.len(), wanted + 2);
    assert_eq!(pages(&world).await, kept);
}

/// Changes that were written, and the judge gone before they were in a journal that had not begun.
#[tokio::test(start_paused = true)]
async fn a_journal_begins_with_what_there_is() {
    let mut world = begin(43, 1, 5).await;
    let before: Vec<u64> = world.shown.keys().copied().collect();
    world.stop(0).await;
    world.tree().write(vec![Write::Delete { path: paths::heartbeat_page(0) }]).await.expect("a write");
    world.start();
    world.pass(seconds(5)).await;
    let pages = corner::journal(&world.tree(), 0).await.expect("a journal");
    let changes = pages.iter().flat_map(|page| page.changes.as_deref().expect("changes"));
    assert_eq!(changes.map(|change| change.sequence).collect::<Vec<_>>(), before);
}
