//! `cargo bench-heartbeat`: the cost of a heartbeat tracker. Starts the real program on an embedded
//! keeper and prints each result next to that of hms-hbtd and the goal. Takes several minutes;
//! needs an otherwise idle machine.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/harness/authority.rs"]
mod authority;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod load;
#[allow(dead_code)]
#[path = "../../tests/heartbeat/manager.rs"]
mod manager;
mod measure;
mod paced;
#[allow(dead_code)]
#[path = "../../tests/heartbeat/process.rs"]
mod process;

use std::io::Write as _;

use rustix::process::{Resource, getrlimit, setrlimit};

/// A line of the report: the name, the result, that of hms-hbtd, the goal, and whether it is met.
struct Row {
    what: &'static str,
    ours: String,
    theirs: &'static str,
    goal: &'static str,
    met: bool,
}

type Measure = fn() -> Vec<Row>;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let busy = load.split(' ').next().and_then(|minute| minute.parse::<f64>().ok()).unwrap_or(f64::MAX);
    if busy > 0.5 {
        writeln!(
            out,
            "warning: the load is {busy} before we begin; what follows tells of the neighbours, too"
        )?;
    }
    let measures: [(&str, Measure); 9] = [
        ("tls", paced::tls),
        ("beats", measure::beats),
        ("memory", measure::memory),
        ("process", measure::process),
        ("states", measure::states),
        ("deaths", measure::deaths),
        ("webhook", measure::webhook),
        ("deadlines", measure::deadlines),
        ("failover", measure::failover),
    ];
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let mut rows = Vec::new();
    for (name, measure) in measures {
        if wanted.as_deref().is_none_or(|wanted| wanted == name) {
            writeln!(out, "measuring {name} ...")?;
            rows.extend(measure());
        }
    }
    writeln!(out, "\n{:<46} {:>22} {:>22} {:>14}", "", "portcullis", "hms-hbtd", "goal")?;
    for row in rows {
        let met = if row.met { "" } else { "  MISSED" };
        writeln!(out, "{:<46} {:>22} {:>22} {:>14}{met}", row.what, row.ours, row.theirs, row.goal)?;
    }
    writeln!(
        out,
        "\nhms-hbtd's figures are those of its own code on the same kind of machine, beside its etcd."
    )
}
