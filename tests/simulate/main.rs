//! The firewall agent in a simulated world: the real agent on paused time over the store and the provider in memory, with
//! operators, hooks and somebody else at the rules, and faults at every seam. One seed decides everything that happens,
//! so a failure is replayed with
//!
//!     PORTCULLIS_SEED=N cargo nextest run --test simulate one_seed --no-capture
//!
//! Invariants are looked at after every event; at the end the faults stop, and what is open must become what is wanted.

mod actions;
mod oracle;
mod world;

use world::World;

/// Seeds in a run of the suite. `PORTCULLIS_SEEDS` asks for more.
const SEEDS: u64 = 100;
const EVENTS: usize = 40;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Runs one seed to its end and returns its log.
fn simulate(seed: u64) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let mut world = World::new(seed).await;
        for _ in 0..EVENTS {
            let action = world.act().await;
            world.log(&action);
            world.check();
        }
        world.settle().await;
        world.finish()
    })
}

#[test]
fn many_seeds_end_in_what_is_wanted() {
    let seeds = number("PORTCULLIS_SEEDS").unwrap_or(SEEDS);
    let start = std::time::Instant::now();
    let workers = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for worker in 0..workers {
            scope.spawn(move || {
                for seed in (worker..seeds).step_by(workers as usize) {
                    let outcome = std::panic::catch_unwind(|| simulate(seed));
                    assert!(outcome.is_ok(), "replay: PORTCULLIS_SEED={seed}");
                }
            });
        }
    });
    println!("{seeds} seeds in {:?}", start.elapsed());
}

#[test]
fn one_seed() {
    println!("{}", simulate(number("PORTCULLIS_SEED").unwrap_or(0)));
}

#[test]
fn the_same_seed_is_the_same_story() {
    for seed in [1, 7, 42] {
        assert_eq!(simulate(seed), simulate(seed), "seed {seed}");
    }
}
