//! A state manager that is slow or was unreachable: how soon it is called again, and which state it
//! has in the end.

use std::time::Duration;

use tokio::time::Instant;

use crate::invariants::{WARN, check_the_end};
use crate::manager::Mood;
use crate::simulate::{begin, seconds};

/// The default audit interval, plus the time for a read and a call.
const PROBED_WITHIN: Duration = Duration::from_millis(5_500);

/// However long the state manager was away, its first call comes within the audit interval.
pub(crate) async fn delivery_after_an_outage() {
    for (away, mood) in [(20, Mood::Down), (130, Mood::Failing), (400, Mood::Down)] {
        let mut world = begin(70, 2, 10).await;
        world.manager.book().mood = mood;
        (0..5).for_each(|component| world.silence(component));
        world.pass(WARN + seconds(away)).await;
        let update = world.manager.book().updates.len();
        world.manager.book().mood = Mood::Fine;
        let back = Instant::now();
        while world.manager.book().updates.len() == update {
            let since = back.elapsed();
            assert!(since <= PROBED_WITHIN, "away for {away} s: no call {since:?} after it is back");
            world.pass(Duration::from_millis(100)).await;
        }
    }
}

/// A call that timed out is applied after newer ones. In the end the state manager has the newest
/// state of each component.
pub(crate) async fn call_applied_late() {
    for (seed, late) in [(71, 15), (72, 30), (73, 80)] {
        let mut world = begin(seed, 1 + (seed % 2) as u32, 10).await;
        world.manager.book().mood = Mood::Late(seconds(late));
        (0..3).for_each(|component| world.silence(component));
        // The call with the warning is in progress.
        while world.manager.book().arrived == 0 {
            world.pass(Duration::from_millis(100)).await;
        }
        world.manager.book().mood = Mood::Fine;
        (0..2).for_each(|component| world.revive(component));
        world.pass(seconds(late + 20)).await;
        let believed = world.manager.book().newest_states();
        for component in 0..2 {
            let name = world.components[component].name.as_str();
            let (state, flag) = &believed[name];
            assert_eq!((state.as_str(), flag.as_str()), ("Ready", "OK"), "seed {seed}: {name} beats");
        }
        check_the_end(&mut world, seed).await;
    }
}

#[tokio::test(start_paused = true)]
async fn newest_state_is_sent_again_after_a_late_call() {
    call_applied_late().await;
}

#[tokio::test(start_paused = true)]
async fn delivery_begins_within_the_audit_interval() {
    delivery_after_an_outage().await;
}
