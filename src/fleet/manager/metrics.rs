//! The metrics of a manager.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::fleet::dbus::values::JobResult;
use crate::runtime::metrics::Exposition;

/// Upper bounds of the histogram of job times, in milliseconds.
const BUCKETS_MS: [u64; 10] = [1, 5, 20, 100, 500, 1_000, 5_000, 30_000, 90_000, 300_000];

#[derive(Debug, Default)]
struct Counts {
    results: BTreeMap<JobResult, u64>,
    buckets: [u64; BUCKETS_MS.len()],
    jobs: u64,
    job_time: Duration,
    /// By interface and method. Only known methods are counted.
    calls: BTreeMap<(&'static str, &'static str), u64>,
}

#[derive(Debug, Default)]
pub struct Metrics(Mutex<Counts>);

impl Metrics {
    pub(super) fn job_ended(&self, result: JobResult, took: Duration) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.results.entry(result).or_default() += 1;
        counts.jobs += 1;
        counts.job_time += took;
        for (at, bound) in BUCKETS_MS.iter().enumerate() {
            counts.buckets[at] += u64::from(took <= Duration::from_millis(*bound));
        }
    }

    pub(super) fn call(&self, interface: &'static str, method: &'static str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.calls.entry((interface, method)).or_default() += 1;
    }

    /// Returns all metrics, with the number of nodes and of those that are online.
    pub(super) fn render(&self, nodes: usize, online: usize) -> String {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Exposition::of("fleet");
        out.one("nodes", "gauge", "Configured nodes.", nodes);
        out.one("nodes_online", "gauge", "Nodes whose agent is connected.", online);
        out.head("jobs_total", "counter", "Jobs that ended, by result.");
        for result in JobResult::ALL {
            let count = counts.results.get(result).copied().unwrap_or_default();
            out.line(&format!("jobs_total{{result=\"{result}\"}}"), count);
        }
        out.head("job_seconds", "histogram", "Time from the submission of a job to its end.");
        for (bound, count) in BUCKETS_MS.iter().zip(counts.buckets) {
            let seconds = Duration::from_millis(*bound).as_secs_f64();
            out.line(&format!("job_seconds_bucket{{le=\"{seconds}\"}}"), count);
        }
        out.line("job_seconds_bucket{le=\"+Inf\"}", counts.jobs);
        out.line("job_seconds_sum", counts.job_time.as_secs_f64());
        out.line("job_seconds_count", counts.jobs);
        out.head("calls_total", "counter", "Calls of the public API, by interface and method.");
        for ((interface, method), count) in &counts.calls {
            let interface = interface.rsplit('.').next().unwrap_or(interface);
            out.line(&format!("calls_total{{method=\"{interface}.{method}\"}}"), count);
        }
        out.into_text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_and_calls_are_counted() {
        let metrics = Metrics::default();
        metrics.job_ended(JobResult::Done, Duration::from_millis(3));
        metrics.job_ended(JobResult::Failed, Duration::from_secs(600));
        metrics.call("org.containers.hirte.Node", "StartUnit");
        let text = metrics.render(3, 2);
        for line in [
            "portcullis_fleet_nodes 3",
            "portcullis_fleet_nodes_online 2",
            "portcullis_fleet_jobs_total{result=\"done\"} 1",
            "portcullis_fleet_jobs_total{result=\"timeout\"} 0",
            "portcullis_fleet_job_seconds_bucket{le=\"0.001\"} 0",
            "portcullis_fleet_job_seconds_bucket{le=\"0.005\"} 1",
            "portcullis_fleet_job_seconds_bucket{le=\"300\"} 1",
            "portcullis_fleet_job_seconds_bucket{le=\"+Inf\"} 2",
            "portcullis_fleet_job_seconds_count 2",
            "portcullis_fleet_calls_total{method=\"Node.StartUnit\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }
}
