//! Parameters, names, events and unreadable records, as clients of the HTTP API and operators see
//! them.

use serde_json::{Value, json};

use crate::harness::Store;
use crate::process::{Client, Site, Tracker};

const PARAMS: &str = "/hmi/v1/params";

/// Both kinds of requests without credentials.
const OPEN: &[&str] = &["--open", "--open-params"];

fn begin(flags: &[&str]) -> (Site, Tracker, Client) {
    let site = Site::new(Store::keeper());
    site.juju(&["heartbeat", "params", "Interval=1", "Warntime=3000", "Errtime=3600"]);
    let tracker = site.tracker(flags);
    let client = Client::connect(tracker.addr).unwrap();
    (site, tracker, client)
}

fn patch(client: &mut Client, change: &Value) -> (u16, Value) {
    let answer = client.ask("PATCH", PARAMS, &[], change.to_string().as_bytes()).unwrap();
    (answer.status, answer.json())
}

fn send(client: &mut Client, name: &str, status: &str, timestamp: &str) -> u16 {
    let body = json!({"Status": status, "Timestamp": timestamp}).to_string();
    let path = format!("/hmi/v1/heartbeat/{name}");
    client.ask("POST", &path, &[], body.as_bytes()).unwrap().status
}

#[test]
fn changed_parameters_are_seen_by_the_next_request() {
    let (_site, tracker, mut client) = begin(OPEN);
    for round in 0..20 {
        let (warn, err) = (100 + 10 * round, 105 + 10 * round);
        // Each change is valid only after the one before.
        for change in [json!({"Errtime": err.to_string()}), json!({"Warntime": warn.to_string()})] {
            let change = if round == 0 {
                json!({"Warntime": warn.to_string(), "Errtime": err.to_string()})
            } else {
                change
            };
            let (status, answer) = patch(&mut client, &change);
            assert_eq!(status, 200, "{change}: {answer}");
            let shown = client.ask("GET", PARAMS, &[], b"").unwrap().json();
            assert_eq!(shown, answer, "{change}");
        }
    }
    tracker.end();
}

#[test]
fn changing_parameters_over_http_needs_its_own_flag() {
    let (_site, tracker, mut client) = begin(&["--open"]);
    assert_eq!(client.beat("x0").unwrap(), 200);
    let (status, answer) = patch(&mut client, &json!({"Sm_url": "http://evil.example"}));
    assert_eq!(status, 403, "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains("juju heartbeat params"), "{answer}");
    assert_eq!(client.ask("GET", PARAMS, &[], b"").unwrap().json()["Sm_url"], "");
    tracker.end();
}

#[test]
fn parameters_of_hms_hbtd_that_have_no_use_here_are_accepted() {
    let (_site, tracker, mut client) = begin(OPEN);
    let change = json!({
        "Use_telemetry": "1", "Telemetry_host": "bus:9092:hb", "Kv_url": "http://etcd:2379", "Nosm": "yes",
        "Warntime": "7"
    });
    let (status, answer) = patch(&mut client, &change);
    assert_eq!((status, &answer["Nosm"], &answer["Warntime"]), (200, &json!("1"), &json!("7")), "{answer}");
    let (status, answer) = patch(&mut client, &json!({"Nosm": "no"}));
    assert_eq!((status, &answer["Nosm"]), (200, &json!("0")), "{answer}");
    let (status, answer) = patch(&mut client, &json!({"Nosm": "perhaps", "Use_telemetry": 1}));
    assert_eq!(status, 400, "{answer}");
    tracker.end();
}

#[test]
fn a_path_may_end_in_a_slash_and_reserved_names_are_refused() {
    let (_site, tracker, mut client) = begin(OPEN);
    assert_eq!(send(&mut client, "x0c0s0b0n0/", "OK", "t"), 200);
    let state = client.ask("GET", "/hmi/v1/hbstate/x0c0s0b0n0/", &[], b"").unwrap().json();
    assert_eq!(state, json!({"XName": "x0c0s0b0n0", "Heartbeating": true}));
    for name in ["params", "judge", "Params"] {
        assert_eq!(send(&mut client, name, "OK", "t"), 400, "{name}");
        assert_eq!(client.beat(name).unwrap(), 400, "{name}");
    }
    tracker.end();
}
