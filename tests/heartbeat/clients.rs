//! Parameters, names, events and unreadable records, as clients of the HTTP API and operators see
//! them.

use std::time::Duration;

use portcullis::heartbeat::core::record::bucket_of;
use portcullis::store::ZkTree;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Tree, Write};
use serde_json::{Value, json};

use crate::harness::{Store, wait_for};
use crate::process::{Client, Site, Tracker};

const DEADLINE: Duration = Duration::from_secs(60);

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

/// The first events about a component.
fn events(tracker: &Tracker, query: &str, name: &str, count: usize) -> Vec<Value> {
    let path = format!("/hmi/v1/events{query}");
    let lines = Client::connect(tracker.addr).unwrap().stream(&path);
    let data = lines.filter_map(|line| line.strip_prefix("data: ").map(str::to_owned));
    let documents = data.map(|data| serde_json::from_str::<Value>(&data).unwrap());
    documents.filter(|document| document["component"] == name).take(count).collect()
}

#[test]
fn events_since_zero_are_all_kept_changes_with_timestamps() {
    let (_site, tracker, mut client) = begin(OPEN);
    let update = [("OK", "12:00"), ("stopping", "12:01"), ("OK", "12:02"), ("stopping", "12:03")];
    for (status, timestamp) in update {
        assert_eq!(send(&mut client, "x1", status, timestamp), 200);
        wait_for("the event of this beat", DEADLINE, || {
            let newest = events(&tracker, "", "x1", 1);
            (newest[0]["timestamp"] == timestamp).then_some(())
        });
    }
    let all = events(&tracker, "?since=0", "x1", 4);
    let stamps: Vec<&str> = all.iter().map(|event| event["timestamp"].as_str().unwrap()).collect();
    assert_eq!(stamps, ["12:00", "12:01", "12:02", "12:03"]);
    assert_eq!(events(&tracker, "", "x1", 1)[0]["timestamp"], "12:03", "the newest alone without a number");
    tracker.end();
}

/// With the operator's rights. None deletes the znode.
fn overwrite(site: &Site, path: &NodePath, data: Option<&[u8]>) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = site.store.addr().to_string().parse().unwrap();
        let tree = ZkTree::connect(&address, Some(&site.operator())).await.unwrap();
        let node = tree.get(path).await.unwrap();
        let (path, version) = (path.clone(), node.version);
        let write = match data {
            Some(data) => Write::SetIfVersion { path, data: data.to_vec(), version },
            None => Write::Delete { path },
        };
        tree.write(vec![write]).await.unwrap();
        node.data
    })
}

fn listed(site: &Site, name: &str) -> Option<String> {
    let (_, out, _) = site.output_of(&["heartbeat", "list", "--format", "json"]);
    let list: Value = serde_json::from_str(&out).ok()?;
    let found = list.as_array()?.iter().find(|component| component["component"] == name)?;
    found["health"].as_str().map(str::to_owned)
}

fn metric(tracker: &Tracker, name: &str) -> Option<u64> {
    let text = tracker.get("/metrics").1;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("portcullis_heartbeat_{name} ")))?;
    line.parse().ok()
}

#[test]
fn component_of_an_unreadable_bucket_is_shown_and_notified_again() {
    let (site, tracker, mut client) = begin(OPEN);
    assert_eq!(send(&mut client, "x2", "OK", "1"), 200);
    wait_for("a component in the store", DEADLINE, || (listed(&site, "x2")? == "ok").then_some(()));
    tracker.end();
    let bucket = paths::heartbeat_bucket(bucket_of("x2"));
    let good = overwrite(&site, &bucket, Some(b"garbage"));

    let tracker = site.tracker(OPEN);
    let mut client = Client::connect(tracker.addr).unwrap();
    assert_eq!(send(&mut client, "x2", "stopping", "2"), 200);
    wait_for("the component in a metric", DEADLINE, || {
        (metric(&tracker, "components_unreadable")? == 1).then_some(())
    });
    wait_for("the component in the list", DEADLINE, || (listed(&site, "x2")? == "unreadable").then_some(()));
    // The component stopped while its record was unreadable; after the repair that change is
    // reported.
    overwrite(&site, &bucket, Some(&good));
    wait_for("the change that was not written", DEADLINE, || {
        (listed(&site, "x2")? == "stopped").then_some(())
    });
    // The metric follows the write.
    wait_for("no unreadable component", DEADLINE, || {
        (metric(&tracker, "components_unreadable")? == 0).then_some(())
    });

    overwrite(&site, &bucket, Some(b"garbage again"));
    wait_for("the component in a metric", DEADLINE, || {
        // A change makes the tracker read the bucket.
        send(&mut client, "x2", "OK", "3");
        (metric(&tracker, "components_unreadable")? == 1).then_some(())
    });
    overwrite(&site, &bucket, None);
    wait_for("the component, written again", DEADLINE, || (listed(&site, "x2")? == "ok").then_some(()));
    wait_for("no unreadable component", DEADLINE, || {
        (metric(&tracker, "components_unreadable")? == 0).then_some(())
    });
    tracker.end();
}
