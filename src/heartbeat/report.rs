//! What a tracker says about itself: its health as a document, and its numbers for whoever collects them. Pure.

use serde_json::json;

use super::audit::Counts;
use super::ears::Condition;
use super::params::Params;
use crate::runtime::prometheus::Numbers;

/// Failing for longer than the retries that were set is an outage.
pub fn health(condition: &Condition, counts: &Counts, params: &Params) -> Vec<u8> {
    let store = if condition.store { "connected" } else { "away" };
    let manager = match condition.manager_failures {
        _ if params.no_state_manager || params.sm_url.is_empty() => "not set".to_owned(),
        0 => "responsive".to_owned(),
        failures if failures <= params.sm_retries => format!("retrying after {failures} failures"),
        failures => format!("not responsive, {failures} failures"),
    };
    let mass = |(silent, alive)| format!("{silent} of {alive} are silent; deaths are held");
    let sheltered = (counts.sheltered > 0)
        .then(|| format!("{} last beat to an unreachable tracker; their deaths are held", counts.sheltered));
    let alarm = condition.alarm.map(mass).or(sheltered);
    json!({
        "KvStore": store,
        "HsmStatus": manager,
        "Judging": condition.judging,
        "Untold": counts.untold,
        "Refused": counts.refused,
        "Alarm": alarm,
    })
    .to_string()
    .into_bytes()
}

/// In Prometheus' text format.
pub fn metrics(condition: &Condition, counts: &Counts) -> String {
    let gauge = |name, help, value: u64| (name, "gauge", help, value);
    let counter = |name, help, value: u64| (name, "counter", help, value);
    let count = |count: usize| count as u64;
    let rows = [
        counter("beats_total", "Beats taken", condition.beats),
        counter(
            "beats_refused_total",
            "Beats of components that there was no room for",
            condition.refused_beats,
        ),
        counter(
            "beats_stranded_total",
            "Beats answered with 503 because the store is unreachable",
            condition.stranded_beats,
        ),
        counter("store_writes_total", "Writes to the store", condition.store_writes),
        counter("calls_total", "Calls to the state manager", condition.calls),
        counter("unwatched_milliseconds_total", "Time in which the process did not run", condition.lost_ms),
        gauge(
            "manager_failures",
            "Failed rounds of calls to the state manager, in a row",
            condition.manager_failures.into(),
        ),
        gauge(
            "webhook_failures",
            "Failed rounds of calls to the webhook, in a row",
            condition.webhook_failures.into(),
        ),
        counter(
            "webhook_events_collapsed_total",
            "Events not sent to the webhook because a newer one of the same component replaced them",
            condition.webhook_collapsed,
        ),
        gauge("store_connected", "Whether the store answers", condition.store.into()),
        gauge("judging", "Whether this replica judges", condition.judging.into()),
        gauge("alarm", "Whether deaths are held because of a mass outage", condition.alarm.is_some().into()),
        gauge(
            "components_untold",
            "Components whose newest change the state manager does not know",
            count(counts.untold),
        ),
        gauge("components_refused", "Components that the state manager refused", count(counts.refused)),
        gauge(
            "components_unreadable",
            "Components whose records in the store cannot be read",
            count(counts.unreadable),
        ),
        gauge("components_held", "Components whose deaths are held", count(counts.held + counts.sheltered)),
    ];
    let mut numbers = Numbers::of("heartbeat");
    for (name, kind, help, value) in rows {
        numbers.one(name, kind, help, value);
    }
    numbers.head("components", "gauge", "Components by health");
    for (health, value) in
        [("ok", counts.ok), ("warned", counts.warned), ("dead", counts.dead), ("stopped", counts.stopped)]
    {
        numbers.line(&format!("components{{health=\"{health}\"}}"), value);
    }
    numbers.into_text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_says_what_is_wrong() {
        let text = |condition: &Condition, params: &Params| {
            String::from_utf8(health(condition, &Counts::default(), params)).unwrap()
        };
        let params = Params { sm_url: "http://sm".to_owned(), ..Params::default() };
        let good = Condition { store: true, judging: true, ..Condition::default() };
        assert_eq!(
            text(&good, &params),
            "{\"KvStore\":\"connected\",\"HsmStatus\":\"responsive\",\"Judging\":true,\"Untold\":0,\"Refused\":0,\
             \"Alarm\":null}"
        );
        let bad = Condition { manager_failures: 4, alarm: Some((5, 9)), ..Condition::default() };
        let said = text(&bad, &params);
        for part in ["\"away\"", "not responsive, 4 failures", "5 of 9 are silent; deaths are held"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(text(&bad, &Params::default()).contains("\"HsmStatus\":\"not set\""));
        let sheltered = Counts { sheltered: 7, ..Counts::default() };
        let said = String::from_utf8(health(&good, &sheltered, &params)).unwrap();
        assert!(said.contains("7 last beat to an unreachable tracker; their deaths are held"), "{said}");
    }

    #[test]
    fn every_number_has_its_kind() {
        let condition = Condition { beats: 7, ..Condition::default() };
        let text = metrics(&condition, &Counts { ok: 3, ..Counts::default() });
        assert!(text.contains(
            "# TYPE portcullis_heartbeat_beats_total counter\nportcullis_heartbeat_beats_total 7\n"
        ));
        assert!(text.contains("portcullis_heartbeat_components{health=\"ok\"} 3\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.split(' ').nth(1).unwrap().parse::<u64>().is_ok(), "{line}");
        }
    }
}
