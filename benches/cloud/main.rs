//! `cargo bench-cloud`: the controller compared with common alternatives, on the same moto server
//! and the same machine. The three tasks are: open three ports in each of a number of empty groups,
//! find that there is nothing to do, and replace one port. A proxy in front of moto counts the
//! calls. The first run installs moto, boto3 and Ansible into `target/venv-bench`; Ansible takes
//! minutes. `BENCH_GROUPS=10` makes the run shorter, `BENCH_ANSIBLE=no` leaves out Ansible.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says where")]

#[path = "../../provider/tests/cloud/mod.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod cloud;
#[path = "../../tests/cloud/controller.rs"]
#[allow(dead_code, clippy::print_stdout, reason = "tests use the rest")]
mod controller;
#[path = "../../tests/harness/mod.rs"]
mod harness;
mod latency;
#[path = "../../tests/cli/operator.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod operator;
mod ours;
mod theirs;

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use cloud::front::Front;
use theirs::Moto;

/// The cost of one of the three tasks with one tool.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figure {
    pub(crate) calls: usize,
    pub(crate) seconds: f64,
}

/// Ports opened, nothing to do, one port replaced in each group.
pub(crate) type Figures = [Figure; 3];

pub(crate) const PORTS: [u16; 3] = [80, 443, 8080];
pub(crate) const SWAPPED: [u16; 3] = [80, 443, 8081];

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let groups = std::env::var("BENCH_GROUPS").ok().and_then(|text| text.parse().ok()).unwrap_or(50_u32);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let load = std::fs::read_to_string("/proc/loadavg")?;
    writeln!(
        out,
        "{groups} groups with {} ports each; the load is {} before we begin",
        PORTS.len(),
        &load[..4]
    )?;
    theirs::install();
    let mut rows: Vec<(&str, Figures)> = Vec::new();
    let moto = Moto::start();
    let measured = |name: &'static str, measure: &dyn Fn(SocketAddr, &Front) -> Figures| {
        moto.forget();
        let front = runtime.block_on(Front::start(moto.address));
        (name, measure(moto.address, &front))
    };
    writeln!(out, "measuring the controller ...")?;
    rows.push(measured("portcullis controller", &|behind, _| ours::measure(&runtime, behind, groups)));
    writeln!(out, "measuring boto3, port by port ...")?;
    rows.push(measured("boto3, port by port", &|behind, front| {
        runtime.block_on(ours::make_groups(behind, groups));
        theirs::boto3(front, groups)
    }));
    if std::env::var("BENCH_ANSIBLE").as_deref() != Ok("no") {
        writeln!(out, "measuring Ansible's amazon.aws.ec2_security_group ...")?;
        rows.push(measured("ansible, ec2_security_group", &|behind, front| {
            let vpc = runtime.block_on(ours::make_groups(behind, groups));
            theirs::ansible(front, groups, &vpc)
        }));
    }
    print(&mut out, &rows)?;
    writeln!(out, "\nmeasuring open-port to EC2's call ...")?;
    moto.forget();
    let latency = latency::measure(&runtime, moto.address);
    for (what, times) in [("added by the controller", &latency.added), ("moto's own call", &latency.calls)] {
        let [p50, p99] = [50, 99].map(|percent| latency::percentile(times, percent));
        writeln!(out, "  {what:<28} p50 {p50:.1?}, p99 {p99:.1?}")?;
    }
    Ok(())
}

fn print(out: &mut impl std::io::Write, rows: &[(&str, Figures)]) -> std::io::Result<()> {
    let ours = rows[0].1;
    for (what, at) in [("opened", 0), ("no change is due", 1), ("one port swapped on each", 2)] {
        writeln!(out, "\n{what}")?;
        for (name, figures) in rows {
            let (own, base) = (figures[at], ours[at]);
            let ratio = |a: f64, b: f64| if b > 0.0 { format!("{:.1}x", a / b) } else { "-".to_owned() };
            writeln!(
                out,
                "  {name:<28} {:>5} calls {:>7}   {:>8.2} s {:>7}",
                own.calls,
                ratio(own.calls as f64, base.calls as f64),
                own.seconds,
                ratio(own.seconds, base.seconds)
            )?;
        }
    }
    Ok(())
}

/// Returns the number of calls since the last call of this function, with the given duration.
pub(crate) fn figure(front: &Front, took: Duration) -> Figure {
    Figure { calls: front.take_counts().values().sum(), seconds: took.as_secs_f64() }
}
