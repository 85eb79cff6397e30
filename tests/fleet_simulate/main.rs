//! Simulation of a fleet: the real manager and the real agents on paused time, each agent with a
//! systemd in memory, over links that are delayed, held and cut. Agents and the manager are killed
//! and stopped, nodes reboot, systemd hangs, nodes are removed and added, and clients come and go.
//! One seed determines the whole run, so a failure can be replayed by
//!
//!     PORTCULLIS_SEED=N cargo nextest run --no-default-features --features fleet \
//!         --cargo-profile simulate --test fleet_simulate one_seed --no-capture
//!
//! Each call has to be answered in bounded time, and each job is announced once and ends once. In
//! the end the faults stop; then all nodes are online, no job is left, monitors have the last
//! states, no monitor or subscription is left, and no unit was touched by anything but a call.
//! `PORTCULLIS_SEEDS` sets the number of seeds.

mod client;
mod events;
#[cfg(feature = "mutants")]
mod mutants;
mod network;
#[allow(dead_code)]
#[path = "../simulate/random.rs"]
mod random;
#[path = "../simulate/seeds.rs"]
mod seeds;
mod world;

use seeds::{number, run_in_world};
use world::{Coverage, World};

/// The default number of seeds: a smoke test that is fast enough for a debug build.
const SEEDS: u64 = 50;
const EVENTS: usize = 30;

/// Runs one seed to its end.
fn simulate(seed: u64, log: bool) -> Coverage {
    run_in_world(async {
        let mut world = World::new(seed, log).await;
        for _ in 0..EVENTS {
            world.event().await;
            let pause = [0, 3, 50, 1_000][world.random.below(4)];
            tokio::time::sleep(world::MS * pause).await;
        }
        world.settle().await;
        std::mem::take(&mut world.coverage)
    })
}

#[test]
fn alone_many_seeds_keep_the_promises_of_a_fleet() {
    let seeds = number("PORTCULLIS_SEEDS").unwrap_or(SEEDS);
    let begun = std::time::Instant::now();
    // Each failure is printed once, below.
    std::panic::set_hook(Box::new(|_| {}));
    let (coverage, failed) = seeds::run_all(0..seeds, |seed| simulate(seed, false), Coverage::add_to);
    drop(std::panic::take_hook());
    println!(
        "{seeds} seeds, {} jobs, {} lost nodes, {} simulated hours in {:.1?}\n{:#?}",
        coverage.jobs,
        coverage.lost_nodes,
        coverage.simulated_ms / 3_600_000,
        begun.elapsed(),
        coverage.events,
    );
    for (seed, why) in &failed {
        println!(
            "{why}\n    replay: PORTCULLIS_SEED={seed} cargo nextest run --no-default-features \
             --features fleet --cargo-profile simulate --test fleet_simulate one_seed --no-capture"
        );
    }
    assert!(failed.is_empty(), "{} seeds failed", failed.len());
    assert!(coverage.jobs as u64 > seeds && coverage.lost_nodes as u64 > seeds / 10, "{coverage:?}");
    assert!(coverage.events.len() > 15, "{:?}", coverage.events);
}

/// Prints the events of `PORTCULLIS_SEED`.
#[test]
fn one_seed() {
    println!("{:#?}", simulate(number("PORTCULLIS_SEED").unwrap_or(0), true));
}

#[test]
fn the_same_seed_has_the_same_course() {
    for seed in 0..3 {
        assert_eq!(simulate(seed, false), simulate(seed, false), "seed {seed}");
    }
}
