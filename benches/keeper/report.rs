//! Prints the table: both servers side by side, the ratio, and whether the goal is met. Measures
//! nothing.

use std::io::{self, Write};
use std::time::Duration;

use crate::measure::{Figures, Latency, SESSIONS, ZNODES};

const CPU_RATIO: f64 = 8.0;
const IDLE_KB: u64 = 10 * 1024;
const FULL_KB: u64 = 60 * 1024;
const FIRST_ANSWER: Duration = Duration::from_millis(50);
const FIRST_ANSWER_FULL: Duration = Duration::from_millis(500);

pub(crate) fn print(
    out: &mut impl Write,
    zookeeper: &Figures,
    keeper: &Figures,
    latencies: &[Latency],
) -> io::Result<()> {
    let mut missed = 0;
    writeln!(out, "\n{:<28}{:>14}{:>14}{:>9}  goal", "", "ZooKeeper", "keeper", "ratio")?;
    writeln!(out, "operations per server CPU-second")?;
    for (theirs, ours) in zookeeper.throughput.iter().zip(&keeper.throughput) {
        let ratio = ours.per_cpu_second / theirs.per_cpu_second;
        let goal = (ours.in_flight > 1).then_some((ratio >= CPU_RATIO, format!("at least {CPU_RATIO}x")));
        let name = format!("  {} {} B, {} in flight", ours.op.name(), ours.bytes, ours.in_flight);
        let values = [theirs.per_cpu_second, ours.per_cpu_second].map(|value| format!("{value:.0}"));
        missed += row(out, &name, &values, ratio, goal)?;
    }
    writeln!(out, "operations per second")?;
    for (theirs, ours) in zookeeper.throughput.iter().zip(&keeper.throughput) {
        let name = format!("  {} {} B, {} in flight", ours.op.name(), ours.bytes, ours.in_flight);
        let values = [theirs.per_second, ours.per_second].map(|value| format!("{value:.0}"));
        missed += row(out, &name, &values, ours.per_second / theirs.per_second, None)?;
    }
    writeln!(out, "p50, one at a time")?;
    for p50 in latencies {
        let goal = Some((p50.keeper < p50.zookeeper, "lower".to_owned()));
        let name = format!("  {} {} B", p50.op.name(), p50.bytes);
        missed += row_of_times(out, &name, p50.zookeeper, p50.keeper, goal)?;
    }
    writeln!(out, "one write, {SESSIONS} watching sessions")?;
    missed += row_of_times(out, "  until the last event", zookeeper.fan_out, keeper.fan_out, None)?;
    missed += row_of_times(out, "  server CPU an event", zookeeper.fan_out_cpu, keeper.fan_out_cpu, None)?;
    writeln!(out, "resident memory")?;
    for (name, theirs, ours, limit) in [
        ("  idle", zookeeper.idle_kb, keeper.idle_kb, IDLE_KB),
        ("  full", zookeeper.full_kb, keeper.full_kb, FULL_KB),
    ] {
        let values = [theirs, ours].map(|kb| format!("{:.1} MB", kb as f64 / 1024.0));
        let goal = Some((ours <= limit, format!("{} MB", limit / 1024)));
        missed += row(out, name, &values, ours as f64 / theirs as f64, goal)?;
    }
    writeln!(out, "start to first answer")?;
    for (name, theirs, ours, limit) in [
        ("  empty", zookeeper.first_answer, keeper.first_answer, FIRST_ANSWER),
        ("  full, after a kill", zookeeper.first_answer_full, keeper.first_answer_full, FIRST_ANSWER_FULL),
    ] {
        missed += row_of_times(out, name, theirs, ours, Some((ours <= limit, format!("{limit:?}"))))?;
    }
    writeln!(out, "(full: {ZNODES} znodes of 100 B)\n{missed} goals missed")
}

fn row_of_times(
    out: &mut impl Write,
    name: &str,
    theirs: Duration,
    ours: Duration,
    goal: Option<(bool, String)>,
) -> io::Result<usize> {
    let values = [theirs, ours].map(|time| match time.as_secs_f64() * 1e6 {
        us if us < 10_000.0 => format!("{us:.1} us"),
        us => format!("{:.0} ms", us / 1e3),
    });
    row(out, name, &values, ours.as_secs_f64() / theirs.as_secs_f64(), goal)
}

/// Prints a row and returns 1 if its goal is missed, otherwise 0.
fn row(
    out: &mut impl Write,
    name: &str,
    values: &[String; 2],
    ratio: f64,
    goal: Option<(bool, String)>,
) -> io::Result<usize> {
    let verdict = match &goal {
        Some((true, goal)) => format!("{goal}: met"),
        Some((false, goal)) => format!("{goal}: MISSED"),
        None => String::new(),
    };
    writeln!(out, "{name:<28}{:>14}{:>14}{ratio:>9.2}  {verdict}", values[0], values[1])?;
    Ok(usize::from(goal.is_some_and(|(met, _)| !met)))
}
