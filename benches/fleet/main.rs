//! `cargo bench-fleet`: the cost of the manager and the agent of a fleet. Starts the real programs
//! on a private bus and on real systemd nodes, and prints each result next to BlueChi's and the
//! goal. Takes two minutes; needs root and an otherwise idle machine.

#![allow(clippy::unwrap_used)]

mod fleet;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod many;
#[allow(dead_code, clippy::print_stderr)]
#[path = "../../tests/fleet/node.rs"]
mod node;
mod one;
mod proxy;
#[allow(dead_code)]
#[path = "../../tests/manager/world.rs"]
mod world;

use std::io::Write as _;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};

/// A line of the report: the name, the result, that of BlueChi, the goal, and whether it is met.
pub(crate) struct Row {
    pub(crate) what: &'static str,
    pub(crate) ours: String,
    pub(crate) theirs: &'static str,
    pub(crate) goal: &'static str,
    pub(crate) met: bool,
}

type Measure = fn() -> Vec<Row>;

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The least and the median of some times.
pub(crate) fn spread(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[0], times[times.len() / 2])
}

fn main() -> std::io::Result<()> {
    if std::env::var_os(many::SERVE).is_some() {
        many::serve();
        return Ok(());
    }
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    let mut out = std::io::stdout().lock();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    writeln!(out, "load before we begin: {}", load.trim())?;
    let measures: [(&str, Measure); 5] = [
        ("overhead", one::overhead),
        ("memory", memory),
        ("list", many::list),
        ("storm", many::storm),
        ("proxy", proxy::start),
    ];
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let mut rows = Vec::new();
    for (name, measure) in measures {
        if wanted.as_deref().is_none_or(|wanted| wanted == name) {
            writeln!(out, "measuring {name} ...")?;
            rows.extend(measure());
        }
    }
    writeln!(out, "\n{:<58} {:>22} {:>10} {:>10}", "", "portcullis", "BlueChi", "goal")?;
    for Row { what, ours, theirs, goal, met } in rows {
        let met = if met { "" } else { "  MISSED" };
        writeln!(out, "{what:<58} {ours:>22} {theirs:>10} {goal:>10}{met}")?;
    }
    Ok(())
}

fn memory() -> Vec<Row> {
    one::memory().into_iter().chain(many::memory()).collect()
}
