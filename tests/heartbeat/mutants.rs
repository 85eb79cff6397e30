//! Checks that the heartbeat simulator finds bugs: each bug of a list is switched on, and a
//! scenario has to fail because of it. The scenarios are also tests, which pass without a bug.

use std::future::Future;
use std::pin::Pin;

use portcullis::mutants::{Mutant, activate};

use crate::{cut_off, late, recovery, restored};

type Scenario = fn() -> Pin<Box<dyn Future<Output = ()>>>;

/// Runs a scenario with a bug switched on; it has to fail. It runs on one thread, because the
/// switch is per thread.
fn find(bug: Mutant, scenario: Scenario) {
    activate(Some(bug));
    let outcome = std::panic::catch_unwind(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(scenario());
    });
    activate(None);
    assert!(outcome.is_err(), "{bug:?} was not found: {}", bug.why());
}

macro_rules! finds {
    ($($test:ident: $bug:ident by $scenario:path;)+) => {
        $(
            #[test]
            fn $test() {
                find(Mutant::$bug, || Box::pin($scenario()));
            }
        )+

        #[test]
        fn every_heartbeat_bug_has_a_scenario() {
            assert_eq!(Mutant::HEARTBEAT, [$(Mutant::$bug),+]);
        }
    };
}

finds! {
    hold_that_ends_too_early_is_found: HoldEndsWithTheShare by recovery::staggered_return;
    seldom_probes_are_found: ProbesSeldom by late::delivery_after_an_outage;
    forgotten_lost_trackers_are_found: ForgetsLostTrackers by cut_off::short_cut;
    beats_that_are_taken_for_ever_are_found: TakesBeatsForEver by cut_off::senders_move;
    records_that_are_not_written_again_are_found: TrustsAnEmptyStore by restored::records_deleted;
    numbers_of_a_slow_clock_are_found: RepeatsNumbers by restored::clock_set_back;
    numbers_of_a_restored_store_are_found: NumbersFromStoreOnly by restored::restored_while_stopped;
    forgotten_late_calls_are_found: ForgetsLateCalls by late::call_applied_late;
}
