//! `cargo bench-planning`: the cost of a plan for very many machines in a release build, as the
//! best of several runs.

#![allow(clippy::print_stdout)]

#[path = "../tests/simulate/planning.rs"]
mod planning;

use std::time::Duration;

use planning::{Case, MACHINES, Measured, measure};

const TIMES: usize = 9;
const GOAL: Duration = Duration::from_millis(20);
const GOAL_BYTES: u64 = 50 << 20;

fn main() {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{MACHINES} machines with 3 ports each, planned from a whole view; the load is {}", load.trim());
    for (case, what) in [(Case::Converged, "all open already"), (Case::NothingOpen, "nothing open yet")] {
        // Memory is taken from the first run, and only in the first case: later runs reuse freed
        // memory.
        let Measured { mut all, bytes, mut one, for_one } = measure(case);
        for _ in 1..TIMES {
            let again = measure(case);
            (all, one) = (all.min(again.all), one.min(again.one));
        }
        let verdict = |met: bool| if met { "met" } else { "MISSED" };
        println!("{what}");
        println!("  time    {all:>10.1?}   goal {GOAL:?}: {}", verdict(all < GOAL));
        if case == Case::Converged {
            let (megabytes, most) = (bytes >> 20, GOAL_BYTES >> 20);
            println!("  memory  {megabytes:>7} MB   goal {most} MB: {}", verdict(bytes < GOAL_BYTES));
        }
        println!("  one changed unit {one:.1?}, for {for_one:?} reads and plans");
    }
}
