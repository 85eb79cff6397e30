//! Mass outages that end: components return one after the other, and none of them is declared dead
//! meanwhile.

use std::time::Duration;

use portcullis::heartbeat::core::record::Hold;
use portcullis::heartbeat::store;
use serde_json::json;
use tokio::time::Instant;

use crate::invariants::ERR;
use crate::simulate::{begin, seconds};
use crate::world::World;

const FLEET: usize = 20;

/// Components that do not return, fewer than the limit of a mass outage.
const GONE: usize = 4;

/// The time over which the others return: less than a window, more than any period of beats.
const SPREAD: Duration = Duration::from_secs(22);

const HOLD: Duration = Duration::from_secs(180);

async fn is_held(world: &World) -> bool {
    matches!(store::alarm(&world.tree()).await, Ok((Ok(Some(Hold::Held { .. })), _)))
}

/// Names of the components that were declared dead.
fn dead(world: &World) -> Vec<String> {
    let book = world.manager.book();
    let dead = book.updates.iter().filter(|update| update.flag == "Alert");
    dead.map(|update| update.name.clone()).collect()
}

/// All components fall silent, the deaths are held, and most components return one by one.
pub(crate) async fn staggered_return() {
    for seed in 60..64 {
        let mut world = begin(seed, 1 + (seed % 3) as u32, FLEET).await;
        let params = json!({"Mass_share": "30", "Mass_hold": HOLD.as_secs().to_string()});
        store::set_params(&world.tree(), params.as_object().expect("a map")).await.expect("params");
        (0..FLEET).for_each(|component| world.silence(component));
        let end = Instant::now() + ERR + seconds(15);
        while !is_held(&world).await {
            assert!(Instant::now() < end, "seed {seed}: deaths are held");
            world.pass(Duration::from_millis(200)).await;
        }
        let pause = seconds(world.below(30));
        world.pass(pause).await;
        let mut returns: Vec<(u64, usize)> =
            (GONE..FLEET).map(|component| (world.below(SPREAD.as_millis() as u64), component)).collect();
        returns.sort_unstable();
        let begun = Instant::now();
        for (after, component) in returns {
            let wait = (begun + Duration::from_millis(after)).saturating_duration_since(Instant::now());
            world.pass(wait).await;
            world.revive(component);
            assert_eq!(
                dead(&world),
                Vec::<String>::new(),
                "seed {seed}: {:?} after the first",
                begun.elapsed()
            );
        }
        let window = (begun + ERR).saturating_duration_since(Instant::now());
        world.pass(window).await;
        assert_eq!(dead(&world), Vec::<String>::new(), "seed {seed}: a window since beats began to return");
        // Those that are gone are declared dead, and the hold is over.
        world.pass(SPREAD + seconds(8)).await;
        let mut dead = dead(&world);
        dead.sort_unstable();
        let gone: Vec<&str> = world.components[..GONE].iter().map(|c| c.name.as_str()).collect();
        assert_eq!(dead, gone, "seed {seed}");
        assert!(!is_held(&world).await, "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_returning_component_is_declared_dead() {
    staggered_return().await;
}
