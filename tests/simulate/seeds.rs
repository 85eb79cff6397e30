//! Runs a simulator with many seeds, on all cores. The meaning of a seed does not belong in here.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// After this many failures the other seeds are not run.
const FAILURES: usize = 8;

/// Returns the number in an environment variable.
pub(crate) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Runs a future on a runtime of its own with a paused clock.
pub(crate) fn run_in_world<V>(world: impl Future<Output = V>) -> V {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(world)
}

/// Returns the first line of a panic message.
pub(crate) fn first_line(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.and_then(|text| text.lines().next()).unwrap_or("a panic without a message").to_owned()
}

/// Runs all seeds, one for each core at a time, and adds their results. Returns the sum, and the
/// first few failures.
pub(crate) fn run_all<T: Default + Send, R>(
    seeds: Range<u64>,
    run: impl Fn(u64) -> R + Sync,
    add: impl Fn(&mut T, R) + Sync,
) -> (T, Vec<(u64, String)>) {
    let run = std::panic::AssertUnwindSafe(run);
    let (next, total) = (AtomicU64::new(seeds.start), Mutex::new((T::default(), Vec::new())));
    let enough = || total.lock().is_ok_and(|total| total.1.len() >= FAILURES);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || enough() {
                break;
            }
            let outcome = std::panic::catch_unwind(|| (*run)(seed));
            let mut total = total.lock().expect("a lock");
            match outcome {
                Ok(result) => add(&mut total.0, result),
                Err(panic) => total.1.push((seed, first_line(&*panic))),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    total.into_inner().expect("no worker failed")
}
