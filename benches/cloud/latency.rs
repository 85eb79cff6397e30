//! Measures the controller's own latency: the time from the return of `open-port` to the EC2
//! request that opens the port.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::controller::{self, Controller};
use crate::harness::{Store, wait_for};
use crate::ours::Bench;

/// Each round has a new controller, because a controller sends at most 50 such requests at once
/// before it limits their rate.
const ROUNDS: usize = 3;
const SAMPLES: usize = 40;

/// Sorted times of all samples.
pub(crate) struct Latency {
    pub(crate) added: Vec<Duration>,
    pub(crate) calls: Vec<Duration>,
}

pub(crate) fn measure(runtime: &Runtime, behind: SocketAddr) -> Latency {
    let store = Store::keeper();
    let bench = Bench::new(runtime, behind, &store, 1);
    bench.populate();
    bench.operator.does(&["expose", "bench"]);
    let exports = bench.operator.does(&["hook-env", "bench/0"]).stdout;
    let hook = |tool: &str| {
        let done = Command::new("sh").args(["-c", &format!("{exports}exec {tool}")]).status().unwrap();
        assert!(done.success());
        Instant::now()
    };
    let front = &bench.account.front;
    let call = |action: &str| {
        wait_for(action, Duration::from_secs(60), || {
            front.take_spans().into_iter().find(|span| span.action == action)
        })
    };
    let (mut added, mut calls) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let command = controller::command(&bench.operator, &bench.account, "ec2", &["--resync", "3600"]);
        let controller = Controller::start(command, &bench.operator, &format!("latency-{round}"));
        bench.is_quiet();
        for _ in 0..SAMPLES {
            front.take_spans();
            let returned = hook("open-port 5432");
            let span = call("AuthorizeSecurityGroupIngress");
            // If the request was sent before the tool ended, the delay is zero.
            added.push(span.received.saturating_duration_since(returned));
            calls.push(span.replied - span.received);
            hook("close-port 5432");
            call("RevokeSecurityGroupIngress");
        }
        controller.stop();
    }
    added.sort_unstable();
    calls.sort_unstable();
    Latency { added, calls }
}

/// The time that `percent` of the sorted times do not exceed.
pub(crate) fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() * percent).div_ceil(100) - 1]
}
