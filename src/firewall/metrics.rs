//! Metrics of the controller, for Prometheus. Counts and renders; the controller decides what to
//! count, and no decision depends on the counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::controller::Pass;
use super::leader_loop::Progress;
use crate::runtime::metrics::{Exposition, Readiness, escaped};

/// Upper bounds of the histogram's buckets in seconds: a change in the kernel, a call to a cloud, a
/// few retries, an outage.
const BUCKETS: [f64; 13] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

/// Counters that a controller increments and other tasks read. Clones share the same counters.
#[derive(Debug, Clone, Default)]
pub struct Metrics(Arc<Mutex<Counts>>);

#[derive(Debug, Clone, Default, PartialEq)]
struct Counts {
    passes: u64,
    failed_passes: u64,
    opened: u64,
    closed: u64,
    failures: BTreeMap<&'static str, u64>,
    /// Requests to the provider, as counted by the provider itself.
    requests: BTreeMap<String, u64>,
    machines: usize,
    pending: usize,
    /// The number of changes per bucket of duration.
    took: [u64; BUCKETS.len()],
    took_count: u64,
    took_seconds: f64,
}

impl Counts {
    fn add(&mut self, pass: &Pass) {
        self.opened += pass.opened as u64;
        self.closed += pass.closed as u64;
        for (kind, times) in &pass.failures {
            *self.failures.entry(kind).or_default() += *times as u64;
        }
    }
}

impl Metrics {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn passed(&self, pass: &Pass, machines: usize, requests: BTreeMap<String, u64>) {
        let mut counts = self.counts();
        counts.passes += 1;
        counts.add(pass);
        (counts.machines, counts.pending, counts.requests) = (machines, pass.pending, requests);
    }

    /// Counts a pass that a failure of the store ended, including the changes that it had made.
    pub(super) fn failed(&self, pass: &Pass, requests: BTreeMap<String, u64>) {
        let mut counts = self.counts();
        counts.failed_passes += 1;
        counts.add(pass);
        counts.requests = requests;
    }

    /// Counts a failure to read instances, or of a step for one instance.
    pub(super) fn not_provisioned(&self, kind: &'static str) {
        *self.counts().failures.entry(kind).or_default() += 1;
    }

    /// Counts a completed change of a machine, and the time since the change was noticed.
    pub(super) fn changed(&self, took: Duration) {
        let mut counts = self.counts();
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|most| seconds <= *most) {
            counts.took[bucket] += 1;
        }
        counts.took_count += 1;
        counts.took_seconds += seconds;
    }

    /// Renders Prometheus' text format.
    pub fn render(&self, progress: &Progress) -> String {
        let counts = self.counts().clone();
        let mut text = Exposition::of("firewall");
        text.one("passes_total", "counter", "Completed passes over wanted and actual rules", counts.passes);
        text.one(
            "failed_passes_total",
            "counter",
            "Passes that a failure of the store ended",
            counts.failed_passes,
        );
        text.head("changes_total", "counter", "Rules that were opened and closed");
        text.line("changes_total{what=\"open\"}", counts.opened);
        text.line("changes_total{what=\"close\"}", counts.closed);
        text.head(
            "failures_total",
            "counter",
            "Looks at the provider and changes of rules and instances that failed, by kind",
        );
        for (kind, times) in counts.failures {
            text.line(&format!("failures_total{{kind=\"{kind}\"}}"), times);
        }
        text.head("provider_requests_total", "counter", "Requests that went to the provider, by name");
        for (name, times) in counts.requests {
            text.line(&format!("provider_requests_total{{name=\"{}\"}}", escaped(&name)), times);
        }
        text.head(
            "change_seconds",
            "histogram",
            "From a change seen in the store to the machine being as wanted",
        );
        let mut so_far = 0;
        for (most, times) in BUCKETS.iter().zip(counts.took) {
            so_far += times;
            text.line(&format!("change_seconds_bucket{{le=\"{most}\"}}"), so_far);
        }
        text.line("change_seconds_bucket{le=\"+Inf\"}", counts.took_count);
        text.line("change_seconds_sum", counts.took_seconds);
        text.line("change_seconds_count", counts.took_count);
        text.one("machines", "gauge", "Machines that were looked at", counts.machines);
        text.one("machines_pending", "gauge", "Machines that are not yet as they should be", counts.pending);
        text.one("leading", "gauge", "Whether this agent is the one that acts", u8::from(progress.leading));
        text.one("store_failures_total", "counter", "Times that the store was lost", progress.store_failures);
        text.into_text()
    }
}

/// Ready if the controller leads and has completed a full read, or if it is on standby. Not ready
/// while the connection to the store is lost.
pub fn ready(progress: &Progress) -> Readiness {
    match (progress.leading, progress.passes) {
        (true, 0) => Err("the first full read is not complete"),
        (true, _) => Ok("leading"),
        (false, _) if progress.store_lost => Err("the store was lost"),
        (false, _) => Ok("standing by"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_written_as_prometheus_reads_them() {
        let metrics = Metrics::default();
        let pass = Pass {
            opened: 2,
            closed: 1,
            failures: BTreeMap::from([("throttled", 3)]),
            pending: 1,
            ..Pass::default()
        };
        let requests = BTreeMap::from([("Describe\"Groups".to_owned(), 7)]);
        metrics.passed(&pass, 5, requests.clone());
        metrics.passed(&pass, 6, requests);
        metrics.failed(
            &Pass { opened: 1, ..Pass::default() },
            BTreeMap::from([("Describe\"Groups".to_owned(), 7)]),
        );
        for ms in [3, 20, 21, 700_000] {
            metrics.changed(Duration::from_millis(ms));
        }
        let text = metrics.render(&Progress { leading: true, store_failures: 2, ..Progress::default() });
        for line in [
            "passes_total 2",
            "failed_passes_total 1",
            "changes_total{what=\"open\"} 5",
            "changes_total{what=\"close\"} 2",
            "failures_total{kind=\"throttled\"} 6",
            "provider_requests_total{name=\"Describe\\\"Groups\"} 7",
            "change_seconds_bucket{le=\"0.005\"} 1",
            "change_seconds_bucket{le=\"0.02\"} 2",
            "change_seconds_bucket{le=\"0.05\"} 3",
            "change_seconds_bucket{le=\"600\"} 3",
            "change_seconds_bucket{le=\"+Inf\"} 4",
            "change_seconds_sum 700.044",
            "change_seconds_count 4",
            "machines 6",
            "machines_pending 1",
            "leading 1",
            "store_failures_total 2",
        ] {
            let line = format!("portcullis_firewall_{line}");
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        for line in text.lines() {
            assert!(
                line.starts_with("# ") || line.rsplit_once(' ').unwrap().1.parse::<f64>().is_ok(),
                "{line}"
            );
        }
    }

    #[test]
    fn readiness_names_the_role_or_the_reason() {
        let mut progress = Progress::default();
        assert_eq!(ready(&progress), Ok("standing by"));
        progress.store_failed();
        assert_eq!(ready(&progress), Err("the store was lost"));
        progress.became_leader();
        assert_eq!(ready(&progress), Err("the first full read is not complete"));
        progress.passes += 1;
        assert_eq!(ready(&progress), Ok("leading"));
        progress.leading = false;
        assert_eq!(ready(&progress), Ok("standing by"), "an earlier failure does not count");
        progress.became_leader();
        assert_eq!(
            ready(&progress),
            Err("the first full read is not complete"),
            "a new lease starts with a full read"
        );
    }
}
