//! Checks that the simulator finds bugs: each bug of a fixed list is switched on, and one of the
//! first worlds has to fail because of it.

use portcullis::mutants::{Mutant, activate};

use crate::seeds::first_line;
use crate::simulate;

/// The number of worlds within which a bug must be found.
const WORLDS: u64 = 1_000;

#[test]
fn alone_every_mutant_is_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    let mut found = Vec::new();
    for &bug in Mutant::FLEET {
        activate(Some(bug));
        let failure = (0..WORLDS).find_map(|seed| {
            let outcome = std::panic::catch_unwind(|| simulate(seed, false));
            outcome.err().map(|panic| format!("{bug:?}: seed {seed}: {}", first_line(&*panic)))
        });
        activate(None);
        match failure {
            Some(failure) => found.push(failure),
            None => missed.push((bug, bug.why())),
        }
    }
    drop(std::panic::take_hook());
    println!("{}", found.join("\n"));
    assert!(missed.is_empty(), "not found: {missed:#?}");
}
