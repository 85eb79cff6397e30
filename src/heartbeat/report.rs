//! What a tracker says about itself: its health as a document, and its numbers for whoever collects them. Pure.

use std::fmt::Write as _;

use serde_json::json;

use super::audit::Counts;
use super::ears::Condition;
use super::params::Params;

/// Failing for longer than the retries that were set is an outage.
pub fn health(condition: &Condition, counts: &Counts, params: &Params) -> Vec<u8> {
    let store = if condition.store { "connected" } else { "away" };
    let manager = match condition.manager_failures {
        _ if params.no_state_manager || params.sm_url.is_empty() => "not set".to_owned(),
        0 => "responsive".to_owned(),
        failures if failures <= params.sm_retries => format!("retrying after {failures} failures"),
        failures => format!("not responsive, {failures} failures"),
    };
    let alarm =
        condition.alarm.map(|(silent, alive)| format!("{silent} of {alive} are silent; deaths are held"));
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
        gauge("store_connected", "Whether the store answers", condition.store.into()),
        gauge("judging", "Whether this replica judges", condition.judging.into()),
        gauge("alarm", "Whether deaths are held because of a mass outage", condition.alarm.is_some().into()),
        gauge(
            "components_untold",
            "Components whose newest change the state manager does not know",
            count(counts.untold),
        ),
        gauge("components_refused", "Components that the state manager refused", count(counts.refused)),
        gauge("components_held", "Components that are due to die and held", count(counts.held)),
    ];
    let mut text = String::new();
    for (name, kind, help, value) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "# HELP portcullis_heartbeat_{name} {help}\n# TYPE portcullis_heartbeat_{name} {kind}"
        );
        let _ = writeln!(text, "portcullis_heartbeat_{name} {value}");
    }
    let name = "portcullis_heartbeat_components";
    let _ = writeln!(text, "# HELP {name} Components by health\n# TYPE {name} gauge");
    for (health, value) in
        [("ok", counts.ok), ("warned", counts.warned), ("dead", counts.dead), ("stopped", counts.stopped)]
    {
        let _ = writeln!(text, "{name}{{health=\"{health}\"}} {value}");
    }
    text
}

/// A calendar time in milliseconds, as people read it.
pub fn utc(ms: u64) -> String {
    let (days, seconds) = (ms / 86_400_000, ms / 1000 % 86_400);
    // Years are counted from March, so that the leap day is a year's last.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_readable() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399_999, "2000-02-28T23:59:59Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_709_251_199_000, "2024-02-29T23:59:59Z"),
            (1_767_225_599_000, "2025-12-31T23:59:59Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(ms), text);
        }
    }

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
