//! Mutation tests of the simulator: each bug of a fixed list is switched on, and one of the
//! regression scenarios or of the first worlds must fail because of it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use portcullis::mutants::{Mutant, activate};

use crate::regressions::SCENARIOS;
use crate::seeds::{first_line, run_in_world};
use crate::simulate;

/// The number of worlds within which a bug must be found.
const WORLDS: u64 = 3000;

/// Returns the first scenario or world that fails because of the bug, and its message.
fn find_failure(bug: Mutant) -> Option<(String, String)> {
    activate(Some(bug));
    let in_scenarios = SCENARIOS.iter().find_map(|(name, scenario)| {
        let outcome = std::panic::catch_unwind(|| run_in_world(scenario()));
        outcome.err().map(|panic| ((*name).to_owned(), first_line(&*panic)))
    });
    let found = in_scenarios.or_else(|| {
        (0..WORLDS).find_map(|seed| {
            let outcome = std::panic::catch_unwind(|| simulate(seed, false));
            outcome.err().map(|panic| (format!("seed {seed}"), first_line(&*panic)))
        })
    });
    activate(None);
    found
}

#[test]
fn alone_every_mutant_is_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // The other bugs are for other simulators.
    let is_ours = |bug: &Mutant| !Mutant::HEARTBEAT.contains(bug) && !Mutant::FLEET.contains(bug);
    let bugs: Vec<Mutant> = Mutant::ALL.iter().copied().filter(is_ours).collect();
    let work = || {
        while let Some(&bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = find_failure(bug);
            results.lock().expect("a lock").push((bug, found));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    drop(std::panic::take_hook());
    let results = results.into_inner().expect("a lock");
    for (bug, found) in &results {
        match found {
            Some((world, how)) => {
                println!("{bug:?}: {world}: {}", how.chars().take(120).collect::<String>());
            }
            None => println!("{bug:?}: NOT FOUND. {}", bug.why()),
        }
    }
    let missed: Vec<Mutant> =
        results.iter().filter(|(_, found)| found.is_none()).map(|(bug, _)| *bug).collect();
    assert_eq!(missed, Vec::<Mutant>::new(), "not found by any test");
    assert!(bugs.len() >= 20);
}
