//! Components that the state manager refuses, and a state manager or webhook that refuses everything: the first are set aside
//! and tried again, of the second nothing is lost.

use std::time::Duration;

use portcullis::heartbeat::corner;
use portcullis::heartbeat::name::Name;
use serde_json::json;

use crate::manager::{HOOK_URL, Mood};
use crate::simulate::{begin, seconds};
use crate::verdict::check_the_end;
use crate::world::World;

const BAD: &str = "x13c0s0b0n0";

async fn set_aside(world: &World) -> Vec<String> {
    let records = corner::overview(&world.tree()).await.expect("records").records;
    let refused = records.iter().filter(|record| record.told.as_str() == "refused");
    refused.map(|record| record.name.to_string()).collect()
}

/// A fleet that starts with a name in it which the manager refuses, or does not know.
async fn with_a_bad_name(seed: u64, unknown: bool) -> World {
    let mut world = World::new(seed, 40).await;
    {
        let mut book = world.manager.book();
        if unknown { &mut book.unknown } else { &mut book.refused }.insert(BAD.to_owned());
    }
    corner::ensure(&world.tree(), &world.roles).await.expect("a corner");
    let params = json!({"Sm_url": "http://sm", "Webhook_url": HOOK_URL, "Mass_share": "0"});
    corner::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    // The first beats come together.
    world.manager.book().mood = Mood::Down;
    world.start();
    world.pass(seconds(10)).await;
    world.manager.book().mood = Mood::Fine;
    world.pass(seconds(40)).await;
    world
}

fn forgive(world: &World) {
    let mut book = world.manager.book();
    book.refused.clear();
    book.unknown.clear();
}

#[tokio::test(start_paused = true)]
async fn one_refused_name_is_set_aside_and_tried_again() {
    for unknown in [false, true] {
        let mut world = with_a_bad_name(4, unknown).await;
        assert_eq!(world.manager.book().believes().len(), 39);
        assert_eq!(set_aside(&world).await, [BAD]);
        let (calls, failures) =
            (world.manager.book().calls, world.replicas[&0].ears.lock().condition.clone());
        assert_eq!(failures.manager_failures, 0, "one name is no outage");
        world.pass(seconds(120)).await;
        assert_eq!(world.manager.book().calls, calls, "not asked again for nothing");
        let writes = world.replicas[&0].ears.lock().condition.store_writes;
        world.pass(seconds(1_200)).await;
        let again = world.manager.book().calls - calls;
        assert!((1..=3).contains(&again), "{again} calls");
        let more = world.replicas[&0].ears.lock().condition.store_writes - writes;
        assert!(more <= 1_200 * 2 / 5 + 5, "{more} writes: nothing is new");
        assert_eq!(world.replicas[&0].ears.lock().condition.manager_failures, 0);
        assert_eq!(set_aside(&world).await, [BAD]);
        forgive(&world);
        world.pass(seconds(601)).await;
        assert!(set_aside(&world).await.is_empty());
        check_the_end(&mut world, 4).await;
        assert_eq!(world.manager.book().changes().len(), 40, "each once");
    }
}

/// Another address is another manager, which has refused nobody.
#[tokio::test(start_paused = true)]
async fn another_address_is_another_chance() {
    let mut world = with_a_bad_name(60, false).await;
    forgive(&world);
    world.pass(seconds(60)).await;
    assert_eq!(set_aside(&world).await, [BAD]);
    let params = json!({"Sm_url": "http://sm2"});
    corner::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
    world.pass(seconds(5)).await;
    assert!(set_aside(&world).await.is_empty());
    assert_eq!(world.manager.book().believes().len(), 40);
}

/// Nobody can tell one name that is not known from an address where nobody is; others need not wait for it.
#[tokio::test(start_paused = true)]
async fn a_lone_name_that_is_not_known_holds_up_nobody() {
    let mut world = begin(61, 1, 3).await;
    world.manager.book().unknown.insert("stranger".to_owned());
    let ears = std::sync::Arc::clone(&world.replicas[&0].ears);
    let beat = async |name: &str| {
        let name = Name::parse(name).expect("a name");
        ears.beat(&[(name, false)]).await.expect("room");
    };
    beat("stranger").await;
    world.pass(seconds(8)).await;
    assert!(set_aside(&world).await.is_empty(), "it may be the address");
    assert!(ears.lock().condition.manager_failures > 3);
    beat("friend").await;
    world.pass(Duration::from_millis(2_000)).await;
    assert!(world.manager.book().believes().contains_key("friend"));
    assert_eq!(set_aside(&world).await, ["stranger"]);
    assert_eq!(ears.lock().condition.manager_failures, 0);
}

/// Whatever a webhook answers, it hears of each change in its order once it takes them.
#[tokio::test(start_paused = true)]
async fn a_webhook_that_refuses_loses_nothing() {
    for status in [301, 400, 401, 404, 410, 413, 422, 429, 500] {
        let mut world = begin(62, 2, 10).await;
        let told = world.manager.book().hooked.len();
        world.manager.book().hook_mood = Mood::Answering(status);
        (0..5).for_each(|component| world.silence(component));
        world.pass(seconds(40)).await;
        (0..5).for_each(|component| world.revive(component));
        world.pass(seconds(20)).await;
        assert_eq!(world.manager.book().hooked.len(), told, "{status}");
        world.manager.book().hook_mood = Mood::Fine;
        world.pass(seconds(60)).await;
        assert_eq!(world.manager.book().hooked.len(), told + 15, "{status}: each of them");
        check_the_end(&mut world, 62).await;
    }
}
