//! Components that the state manager rejects are tried again later; a state manager or webhook that
//! refuses everything loses nothing.

use std::time::Duration;

use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::store;
use serde_json::json;

use crate::invariants::check_the_end;
use crate::manager::{HOOK_URL, Mood};
use crate::simulate::{begin, seconds};
use crate::world::World;

const BAD: &str = "x13c0s0b0n0";

async fn rejected(world: &World) -> Vec<String> {
    let records = store::overview(&world.tree()).await.expect("records").records;
    let refused = records.iter().filter(|record| record.notified.as_str() == "refused");
    refused.map(|record| record.name.to_string()).collect()
}

/// A fleet with one name that the state manager rejects or does not know.
async fn with_a_bad_name(seed: u64, unknown: bool) -> World {
    let mut world = World::new(seed, 40).await;
    {
        let mut book = world.manager.book();
        if unknown { &mut book.unknown } else { &mut book.refused }.insert(BAD.to_owned());
    }
    store::ensure(&world.tree(), &world.roles).await.expect("heartbeat znodes");
    let params = json!({"Sm_url": "http://sm", "Webhook_url": HOOK_URL, "Mass_share": "0"});
    store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    // The first changes are sent in one round.
    world.manager.book().mood = Mood::Down;
    world.start();
    world.pass(seconds(10)).await;
    world.manager.book().mood = Mood::Fine;
    world.pass(seconds(40)).await;
    world
}

fn accept_all(world: &World) {
    let mut book = world.manager.book();
    book.refused.clear();
    book.unknown.clear();
}

#[tokio::test(start_paused = true)]
async fn rejected_name_is_tried_again_later() {
    for unknown in [false, true] {
        let mut world = with_a_bad_name(4, unknown).await;
        assert_eq!(world.manager.book().newest_states().len(), 39);
        assert_eq!(rejected(&world).await, [BAD]);
        let (calls, failures) = (world.manager.book().calls, world.replicas[&0].shared.lock().stats.clone());
        assert_eq!(failures.manager_failures, 0, "one name is no outage");
        world.pass(seconds(120)).await;
        assert_eq!(world.manager.book().calls, calls, "not called again without need");
        let writes = world.replicas[&0].shared.lock().stats.store_writes;
        world.pass(seconds(1_200)).await;
        let again = world.manager.book().calls - calls;
        assert!((1..=3).contains(&again), "{again} calls");
        let more = world.replicas[&0].shared.lock().stats.store_writes - writes;
        assert!(more <= 1_200 * 2 / 5 + 5, "{more} writes: no state has changed");
        assert_eq!(world.replicas[&0].shared.lock().stats.manager_failures, 0);
        assert_eq!(rejected(&world).await, [BAD]);
        accept_all(&world);
        world.pass(seconds(601)).await;
        assert!(rejected(&world).await.is_empty());
        check_the_end(&mut world, 4).await;
        assert_eq!(world.manager.book().changes().len(), 40, "each once");
    }
}

/// A state manager at another address has rejected nothing.
#[tokio::test(start_paused = true)]
async fn another_address_gets_rejected_components_again() {
    let mut world = with_a_bad_name(60, false).await;
    accept_all(&world);
    world.pass(seconds(60)).await;
    assert_eq!(rejected(&world).await, [BAD]);
    let params = json!({"Sm_url": "http://sm2"});
    store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    world.pass(seconds(5)).await;
    assert!(rejected(&world).await.is_empty());
    assert_eq!(world.manager.book().newest_states().len(), 40);
}

/// An unknown name alone in a round cannot be told from a wrong address; other components do not
/// wait for it.
#[tokio::test(start_paused = true)]
async fn unknown_name_does_not_delay_others() {
    let mut world = begin(61, 1, 3).await;
    world.manager.book().unknown.insert("stranger".to_owned());
    let shared = std::sync::Arc::clone(&world.replicas[&0].shared);
    let beat = async |name: &str| {
        let name = Name::parse(name).expect("a name");
        shared.beat(&[(name, false)]).await.expect("room");
    };
    beat("stranger").await;
    world.pass(seconds(8)).await;
    assert!(rejected(&world).await.is_empty(), "it may be the address");
    assert!(shared.lock().stats.manager_failures > 3);
    beat("friend").await;
    world.pass(Duration::from_millis(2_000)).await;
    assert!(world.manager.book().newest_states().contains_key("friend"));
    assert_eq!(rejected(&world).await, ["stranger"]);
    assert_eq!(shared.lock().stats.manager_failures, 0);
}

/// A webhook gets each change in order once it accepts them, whatever it replied before.
#[tokio::test(start_paused = true)]
async fn webhook_that_refuses_loses_no_change() {
    for status in [301, 400, 401, 404, 410, 413, 422, 429, 500] {
        let mut world = begin(62, 2, 10).await;
        let update = world.manager.book().hooked.len();
        world.manager.book().hook_mood = Mood::Answering(status);
        (0..5).for_each(|component| world.silence(component));
        world.pass(seconds(40)).await;
        (0..5).for_each(|component| world.revive(component));
        world.pass(seconds(20)).await;
        assert_eq!(world.manager.book().hooked.len(), update, "{status}");
        world.manager.book().hook_mood = Mood::Fine;
        world.pass(seconds(60)).await;
        assert_eq!(world.manager.book().hooked.len(), update + 15, "{status}: each of them");
        check_the_end(&mut world, 62).await;
    }
}
