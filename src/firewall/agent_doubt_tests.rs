//! What is not closed on the word of a single look.

use super::*;
use crate::model::ServiceId;
use crate::runtime::reconcile::DOUBT;

#[tokio::test(start_paused = true)]
async fn closing_most_of_everything_takes_two_looks() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    for port in 0..12 {
        world.open(unit, &(8000 + 2 * port).to_string()).await;
    }
    world.expose("a").await;
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12);
    world.operator.unexpose(&"a".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12, "not on the word of one look");
    assert!(world.agent.in_doubt() && world.problem(0).unwrap().contains("second look"));
    world.pass().await;
    assert_eq!(world.rules(0).len(), 12, "nor on that of two in the same moment");
    tokio::time::advance(DOUBT).await;
    world.pass().await;
    assert_eq!((world.rules(0).len(), world.agent.in_doubt(), world.problem(0)), (0, false, None));
}

/// However little there is to close: a tree of which nothing is shown is no empty environment.
#[tokio::test(start_paused = true)]
async fn a_look_that_shows_no_unit_is_not_believed_alone() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.pass().await;
    assert_eq!(world.rules(0), ["80/tcp"]);
    assert!(world.agent.in_doubt() && world.problem(0).unwrap().contains("second look"));
    tokio::time::advance(DOUBT).await;
    world.pass().await;
    assert_eq!((world.rules(0).len(), world.agent.in_doubt(), world.problem(0)), (0, false, None));
}

/// An environment that was empty when it was first looked at is so no longer.
#[tokio::test(start_paused = true)]
async fn what_came_after_the_first_look_needs_no_second_one() {
    let mut world = World::new().await;
    world.pass().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    for key in [Key::Machine(MachineId::new(0)), Key::Service(ServiceId::new(0)), Key::Unit(unit)] {
        world.pass_for(key).await;
    }
    assert_eq!(world.rules(0), ["80/tcp"]);
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Unit(unit)).await;
    assert_eq!((world.rules(0).len(), world.agent.in_doubt()), (0, false));
}

/// Who saw the unit go knows that it is gone.
#[tokio::test(start_paused = true)]
async fn the_last_unit_that_was_seen_to_go_is_believed() {
    let mut world = World::new().await;
    let unit = world.deploy("a").await;
    world.open(unit, "80").await;
    world.expose("a").await;
    world.pass().await;
    world.operator.destroy_service(&"a".parse().unwrap()).await.unwrap();
    world.pass_for(Key::Unit(unit)).await;
    assert_eq!((world.rules(0).len(), world.agent.in_doubt()), (0, false));
}
