//! The health of a tracker as a JSON document, and its metrics. Pure.

use serde_json::json;

use crate::heartbeat::core::audit::Counts;
use crate::heartbeat::core::params::Params;
use crate::heartbeat::tracker::shared_state::TrackerStats;
use crate::runtime::metrics::Exposition;

/// More failures than `Sm_retries` are an outage.
pub fn health(stats: &TrackerStats, counts: &Counts, params: &Params) -> Vec<u8> {
    let store = if stats.store { "connected" } else { "away" };
    let manager = match stats.manager_failures {
        _ if params.no_state_manager || params.sm_url.is_empty() => "not set".to_owned(),
        0 => "responsive".to_owned(),
        failures if failures <= params.sm_retries => format!("retrying after {failures} failures"),
        failures => format!("not responsive, {failures} failures"),
    };
    let mass = |(silent, alive)| format!("{silent} of {alive} are silent; deaths are held");
    let held_for_tracker = (counts.held_for_tracker > 0).then(|| {
        format!("{} last beat to an unreachable tracker; their deaths are held", counts.held_for_tracker)
    });
    let alarm = stats.alarm.map(mass).or(held_for_tracker);
    json!({
        "KvStore": store,
        "HsmStatus": manager,
        "Judging": stats.judging,
        "Untold": counts.unnotified,
        "Refused": counts.refused,
        "Alarm": alarm,
    })
    .to_string()
    .into_bytes()
}

/// The metrics in Prometheus' text format.
pub fn metrics(stats: &TrackerStats, counts: &Counts) -> String {
    let gauge = |name, help, value: u64| (name, "gauge", help, value);
    let counter = |name, help, value: u64| (name, "counter", help, value);
    let count = |count: usize| count as u64;
    let rows = [
        counter("beats_total", "Beats taken", stats.beats),
        counter("beats_refused_total", "Beats of components that there was no room for", stats.refused_beats),
        counter(
            "beats_stranded_total",
            "Beats answered with 503 because the store is unreachable",
            stats.stranded_beats,
        ),
        counter("store_writes_total", "Writes to the store", stats.store_writes),
        counter("calls_total", "Calls to the state manager", stats.calls),
        counter("unwatched_milliseconds_total", "Time in which the process did not run", stats.lost_ms),
        gauge(
            "manager_failures",
            "Failed rounds of calls to the state manager, in a row",
            stats.manager_failures.into(),
        ),
        gauge(
            "webhook_failures",
            "Failed rounds of calls to the webhook, in a row",
            stats.webhook_failures.into(),
        ),
        counter(
            "webhook_events_collapsed_total",
            "Events not sent to the webhook because a newer one of the same component replaced them",
            stats.webhook_collapsed,
        ),
        gauge("store_connected", "Whether the store answers", stats.store.into()),
        gauge("judging", "Whether this replica judges", stats.judging.into()),
        gauge("alarm", "Whether deaths are held because of a mass outage", stats.alarm.is_some().into()),
        gauge(
            "components_unnotified",
            "Components whose newest change the state manager has not accepted",
            count(counts.unnotified),
        ),
        gauge("components_refused", "Components that the state manager refused", count(counts.refused)),
        gauge(
            "components_unreadable",
            "Components whose records in the store cannot be read",
            count(counts.unreadable),
        ),
        gauge(
            "components_held",
            "Components whose deaths are held",
            count(counts.held + counts.held_for_tracker),
        ),
    ];
    let mut exposition = Exposition::of("heartbeat");
    for (name, kind, help, value) in rows {
        exposition.one(name, kind, help, value);
    }
    exposition.head("components", "gauge", "Components by health");
    for (health, value) in
        [("ok", counts.ok), ("warned", counts.warned), ("dead", counts.dead), ("stopped", counts.stopped)]
    {
        exposition.line(&format!("components{{health=\"{health}\"}}"), value);
    }
    exposition.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_names_the_problems() {
        let text = |stats: &TrackerStats, params: &Params| {
            String::from_utf8(health(stats, &Counts::default(), params)).unwrap()
        };
        let params = Params { sm_url: "http://sm".to_owned(), ..Params::default() };
        let good = TrackerStats { store: true, judging: true, ..TrackerStats::default() };
        assert_eq!(
            text(&good, &params),
            "{\"KvStore\":\"connected\",\"HsmStatus\":\"responsive\",\"Judging\":true,\"Untold\":0,\
             \"Refused\":0,\"Alarm\":null}"
        );
        let bad = TrackerStats { manager_failures: 4, alarm: Some((5, 9)), ..TrackerStats::default() };
        let raw = text(&bad, &params);
        for part in ["\"away\"", "not responsive, 4 failures", "5 of 9 are silent; deaths are held"] {
            assert!(raw.contains(part), "{raw}");
        }
        assert!(text(&bad, &Params::default()).contains("\"HsmStatus\":\"not set\""));
        let held_for_tracker = Counts { held_for_tracker: 7, ..Counts::default() };
        let raw = String::from_utf8(health(&good, &held_for_tracker, &params)).unwrap();
        assert!(raw.contains("7 last beat to an unreachable tracker; their deaths are held"), "{raw}");
    }

    #[test]
    fn every_metric_has_a_type() {
        let stats = TrackerStats { beats: 7, ..TrackerStats::default() };
        let text = metrics(&stats, &Counts { ok: 3, ..Counts::default() });
        assert!(text.contains(
            "# TYPE portcullis_heartbeat_beats_total counter\nportcullis_heartbeat_beats_total 7\n"
        ));
        assert!(text.contains("portcullis_heartbeat_components{health=\"ok\"} 3\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.split(' ').nth(1).unwrap().parse::<u64>().is_ok(), "{line}");
        }
    }
}
