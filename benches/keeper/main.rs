//! `cargo bench-keeper`: the keeper compared with Apache ZooKeeper, under load from the same
//! client. Starts each in turn and prints the results, their ratio and the goal. Takes several
//! minutes; needs an otherwise idle machine, Java, and Debian's package `zookeeper`. `cargo
//! bench-keeper tls` measures both over TLS only.

#[path = "../../tests/harness/authority.rs"]
mod authority;
#[path = "../../tests/harness/mod.rs"]
mod harness;

mod load;
mod measure;
mod report;
mod tls;

use std::io::Write as _;

use harness::Kind;
use measure::Figures;

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let busy = load.split(' ').next().and_then(|minute| minute.parse::<f64>().ok()).unwrap_or(f64::MAX);
    if busy > 0.5 {
        // Observed: under load from other processes, a bare fdatasync takes a scheduler tick, 4 ms
        // instead of 0.2 ms.
        writeln!(out, "warning: the load is {busy} before we begin; latencies below tell of the neighbours")?;
    }
    writeln!(out, "measuring both over TLS ...")?;
    tls::print(&mut out)?;
    if std::env::args().any(|arg| arg == "tls") {
        return Ok(());
    }
    writeln!(out, "measuring Apache ZooKeeper ...")?;
    let zookeeper: Figures = measure::all(Kind::ZooKeeper);
    writeln!(out, "measuring the keeper ...")?;
    let keeper: Figures = measure::all(Kind::Keeper);
    writeln!(out, "measuring both by turns ...")?;
    report::print(&mut out, &zookeeper, &keeper, &measure::latencies())
}
