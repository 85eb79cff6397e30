//! Simulation of the firewall agent: the real agent runs on paused time over the in-memory store
//! and provider, with operators, hooks, third parties that edit rules, and faults in every call.
//! One seed determines the whole run, so a failure can be replayed, with a full log, by
//!
//!     PORTCULLIS_SEED=N cargo nextest run --no-default-features --cargo-profile simulate \
//!         --test simulate one_seed --no-capture
//!
//! Of the faults that specs/reliability.md lists for the agent, these are injected here, at every
//! kind of call or into the world as a whole (`faults`): crashes before and after a call's effect,
//! SIGTERM, connections lost before and after it, expired sessions, stale and empty reads, slow
//! calls, the provider's errors, denials, throttling, quotas and late timeouts, a process that is
//! frozen while another leads, changes during a call; events missed, duplicated and reordered; a
//! describe that lags, rules that are rewritten or split, batches refused as a whole; edits by
//! third parties; a clock that jumps, and a time of day that is set back and forth; corrupt,
//! truncated, huge and deeply nested data, records of other versions; reused names, restores,
//! floods. `scenarios` also injects crashes and SIGTERM at every single call of its scenarios. The
//! agent has no disk: full disks, EIO and torn files concern the keeper, and are tested in
//! `tests/disk`, `tests/crash` and `src/keeper/storage_tests.rs`.
//!
//! Invariants are checked at every call and after every event. At the end the faults stop, and the
//! open ports must become the wanted ports. `PORTCULLIS_SEEDS` sets the number of seeds.

mod actions;
mod agents;
mod checks;
mod damage;
mod disturbances;
mod faults;
mod firewall;
mod generator;
mod instances;
mod interceptor;
mod liveness;
#[cfg(feature = "mutants")]
mod mutants;
mod oracle;
mod planning;
mod port_bits;
mod random;
mod record;
mod regressions;
mod restored;
mod scenarios;
mod seeds;
mod tree;
mod world;

use faults::Coverage;
use seeds::{number, run_in_world};
use world::{Shape, World};

/// The default number of seeds: a smoke test that is fast enough for a debug build.
const SEEDS: u64 = 20;
const EVENTS: usize = 40;

/// Latencies of a slow provider.
pub(crate) const LATENCIES_MS: [u64; 6] = [300, 1_100, 3_500, 8_000, 14_000, 30_000];

/// Runs one seed to its end.
fn simulate(seed: u64, log: bool) -> (Coverage, String) {
    run_in_world(async {
        let (agents, provisions) = (1 + (seed % 2) as usize, seed % 3 == 2);
        let shape = if seed % 16 == 9 { Shape::large } else { Shape::small };
        let shape = shape(agents, provisions);
        let shape = Shape { ipv6: seed % 5 != 3, busy_calls: seed / 3 % 4, ..shape };
        let mut world = World::new(seed, shape, log).await;
        // Some worlds start without faults, and in some of those the provider is slow.
        let mut events_without_faults = world.random.below(12);
        if seed % 8 == 5 {
            events_without_faults += 12;
            let latency_ms = world.random.pick(&LATENCIES_MS);
            world.perform(actions::Action::Latency(latency_ms)).await;
        }
        for n in 0..EVENTS {
            let (action, pause) = if n < events_without_faults {
                world.choose_event_without_faults()
            } else {
                world.choose_event()
            };
            world.begin();
            world.perform(action).await;
            world.pause(pause).await;
            world.end();
            world.check().await;
        }
        world.settle().await;
        world.finish()
    })
}

#[test]
fn alone_many_seeds_converge_to_the_wanted_ports() {
    let seeds = number("PORTCULLIS_SEEDS").unwrap_or(SEEDS);
    let begun = std::time::Instant::now();
    // Each failure is printed once, below.
    std::panic::set_hook(Box::new(|_| {}));
    let (coverage, failed) =
        seeds::run_all(0..seeds, |seed| simulate(seed, false).0, |total: &mut Coverage, one| total.add(&one));
    drop(std::panic::take_hook());
    println!(
        "{seeds} seeds, {} events, {} checks of convergence, {} calls, {} simulated hours in {:.1?}\n{}",
        coverage.events,
        coverage.convergence_checks,
        coverage.calls,
        coverage.simulated_ms / 3_600_000,
        begun.elapsed(),
        coverage.table(),
    );
    for (seed, why) in &failed {
        println!("{why}\n    replay: {}", replay(*seed));
    }
    assert!(failed.is_empty(), "{} seeds failed", failed.len());
    assert!(coverage.convergence_checks > 4 * seeds, "convergence was rarely checked");
    if seeds >= 5_000 {
        assert_eq!(coverage.missing(), Vec::<String>::new(), "these never occurred");
    }
}

/// The command that replays a seed.
fn replay(seed: u64) -> String {
    format!(
        "PORTCULLIS_SEED={seed} cargo nextest run --no-default-features --cargo-profile simulate \
         --test simulate one_seed --no-capture"
    )
}

/// Prints the log of `PORTCULLIS_SEED`.
#[test]
fn one_seed() {
    let (_, log) = simulate(number("PORTCULLIS_SEED").unwrap_or(0), true);
    println!("{log}");
    assert!(log.contains("leads"));
}

#[test]
fn the_same_seed_produces_the_same_log() {
    // D1: the log depends on the seed alone.
    for seed in [1, 7, 42, 99].into_iter().chain(100..number("PORTCULLIS_SEEDS").unwrap_or(0).min(200)) {
        let (first, second) = (simulate(seed, true).1, simulate(seed, true).1);
        assert!(first.lines().count() > 500, "{first}");
        let differs = first.lines().zip(second.lines()).find(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(first, second, "seed {seed}");
    }
}
