//! `cargo bench-units`: the cost of units on a machine. Starts the real programs on an embedded
//! keeper and prints each result next to its goal. Takes a minute; needs an otherwise idle machine.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/harness/authority.rs"]
mod authority;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod hook_tools;
mod machine;
#[allow(dead_code)]
#[path = "../../tests/cli/operator.rs"]
mod operator;

use std::io::Write as _;
use std::time::{Duration, Instant};

use machine::Machine;

const ROUNDS: usize = 30;
const UNITS: usize = 200;
const IDLE: Duration = Duration::from_secs(20);

/// A line of the report: the name, the result, the goal, and whether it is met.
type Row = (&'static str, String, &'static str, bool);

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    writeln!(out, "load before we begin: {}", load.trim())?;
    let mut rows = Vec::new();
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    for (name, measure) in [
        ("tools", hook_tools::measure as fn() -> Vec<Row>),
        ("deploy", deploys),
        ("expose", exposes),
        ("many", many),
        ("many that print", many_that_print),
    ] {
        if wanted.as_deref().is_none_or(|wanted| wanted == name) {
            writeln!(out, "measuring {name} ...")?;
            rows.extend(measure());
        }
    }
    for (what, ours, goal, met) in rows {
        writeln!(out, "{what:<58} {ours:>30} {goal:>12}{}", if met { "" } else { "  MISSED" })?;
    }
    Ok(())
}

fn spread(mut times: Vec<Duration>) -> (Duration, String) {
    times.sort_unstable();
    let (middle, worst) = (times[times.len() / 2], times[times.len() - 1]);
    (middle, format!("p50 {:.0} ms, max {:.0} ms", middle.as_secs_f64() * 1e3, worst.as_secs_f64() * 1e3))
}

/// Measures from the start of `juju deploy` to `started` in the tree. The charm has no hooks, so
/// their duration is not included.
fn deploys() -> Vec<Row> {
    let machine = Machine::new();
    let _agent = machine.agent();
    let charm = machine.charm("plain", &[]);
    let once = |round: usize| {
        let begin = Instant::now();
        machine.juju(&["deploy", &charm, &format!("plain-{}", name(round)), "--to", "0"]);
        machine.waits_until_started(round);
        begin.elapsed()
    };
    let (middle, told) = spread((0..ROUNDS).map(once).collect());
    vec![("juju deploy to started, without hooks", told, "100 ms", middle < Duration::from_millis(100))]
}

/// Measures from the start of `juju expose` to the first line of the hook.
fn exposes() -> Vec<Row> {
    let machine = Machine::new();
    let _agent = machine.agent();
    let charm = machine.charm("heard", &[("exposed", "date +%s%N >>times"), ("unexposed", "echo >>ends")]);
    machine.juju(&["deploy", &charm, "--to", "0"]);
    machine.waits_until_started(0);
    let once = |round: usize| {
        let begin = machine::wall();
        machine.juju(&["expose", "heard"]);
        let heard = Duration::from_nanos(machine.line("times", round).parse().unwrap());
        machine.juju(&["unexpose", "heard"]);
        machine.line("ends", round);
        heard.saturating_sub(begin)
    };
    let (middle, told) = spread((0..ROUNDS).map(once).collect());
    vec![("juju expose to the start of the exposed hook", told, "50 ms", middle < Duration::from_millis(50))]
}

/// Measures two hundred units at rest, and an agent that is killed and started again.
fn many() -> Vec<Row> {
    let machine = Machine::new();
    let mut agent = machine.agent();
    let charm = machine.charm("many", &[("start", ":")]);
    let begin = Instant::now();
    machine.juju(&["deploy", &charm, "-n", &UNITS.to_string(), "--to", "0"]);
    (0..UNITS).for_each(|unit| machine.waits_until_started(unit));
    let all = begin.elapsed();
    let (ran, memory) = (agent.hooks_run(), agent.memory_mb());
    let idle = agent.cpu_share(IDLE);
    agent.kill9();
    let begin = Instant::now();
    let mut agent = machine.agent();
    (0..UNITS).for_each(|unit| machine.waits_until_tended(unit));
    let back = begin.elapsed();
    let again = agent.hooks_run() - ran;
    agent.kill9();
    vec![
        ("200 units deployed to started, with a hook each", format!("{:.1} s", all.as_secs_f64()), "", true),
        ("memory of the agent with 200 units", format!("{memory:.0} MB"), "100 MB", memory < 100.0),
        ("CPU of the agent with 200 units at rest", format!("{idle:.2} %"), "1 %", idle < 1.0),
        ("hooks run by an agent that was killed and started", again.to_string(), "0", again == 0),
        (
            "until all are tended again, the dead session included",
            format!("{:.1} s", back.as_secs_f64()),
            "",
            true,
        ),
    ]
}

/// Measures two hundred units, each with a service that its hook leaves running and that may print
/// at any time.
fn many_that_print() -> Vec<Row> {
    let machine = Machine::new();
    let mut agent = machine.agent();
    let charm = machine.charm("printing", &[("start", "setsid sh -c 'echo up; exec sleep 100000' &")]);
    machine.juju(&["deploy", &charm, "-n", &UNITS.to_string(), "--to", "0"]);
    (0..UNITS).for_each(|unit| machine.waits_until_started(unit));
    let (own, (readers, theirs)) = (agent.share_mb(), machine.readers_mb());
    let idle = agent.cpu_share(IDLE);
    let ran = agent.hooks_run();
    agent.kill9();
    let mut agent = machine.agent();
    (0..UNITS).for_each(|unit| machine.waits_until_tended(unit));
    let again = agent.hooks_run() - ran;
    agent.kill9();
    let told = format!("{own:.0} + {theirs:.0} MB, {readers} readers");
    vec![
        (
            "with a service each that prints: agent and readers (PSS)",
            told,
            "100 MB",
            readers == UNITS && own + theirs < 100.0,
        ),
        ("the same: CPU of the agent at rest", format!("{idle:.2} %"), "1 %", idle < 1.0),
        ("the same: hooks run by an agent killed and started", again.to_string(), "0", again == 0),
    ]
}

/// Writes a number in letters, because a service name must have a letter after each dash.
fn name(number: usize) -> String {
    number.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect()
}
