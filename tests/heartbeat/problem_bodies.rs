//! Every error response of a tracker, byte for byte.

use std::time::Duration;

use portcullis::heartbeat::core::token;
use portcullis::model::MachineId;
use serde_json::json;

use crate::harness::{Store, wait_for};
use crate::process::{Answer, Client, Site, Tracker, field};

const DEADLINE: Duration = Duration::from_secs(30);

const BEAT: &[u8] = br#"{"Status":"OK","Timestamp":"t"}"#;

/// The limit of event readers from one address, and the number of addresses that reach the total
/// limit.
const READERS: usize = 64;
const ADDRESSES: u8 = 4;

fn ask(tracker: &Tracker, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    Client::connect(tracker.addr).and_then(|mut client| client.ask(method, path, headers, body)).unwrap()
}

/// Checks the whole document; `instance` is the path, or the part before the name in it.
fn check(answer: &Answer, status: u16, title: &str, detail: &str, instance: &str) {
    assert_eq!(field(&answer.head, "content-type"), Some("application/problem+json"));
    assert_eq!(answer.status, status, "{}", answer.body);
    let expected = json!({
        "type": "about:blank", "title": title, "detail": detail, "instance": instance, "status": status,
    });
    assert_eq!(answer.json(), expected);
}

#[test]
fn error_responses_are_exact() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    let tracker = site.tracker(&[]);
    let beat = "/hmi/v1/heartbeat/machine-0";
    let refused = ask(&tracker, "POST", beat, &[], BEAT);
    check(&refused, 401, "Unauthorized", "No token", beat);
    assert_eq!(field(&refused.head, "www-authenticate"), Some("Bearer"));
    let refused = ask(&tracker, "POST", beat, &[("authorization", "Bearer nonsense")], BEAT);
    check(&refused, 401, "Unauthorized", "Not a machine's token", beat);
    let forged = token::authorization(MachineId::new(0), "machine-0000000000:guessed");
    let refused = ask(&tracker, "POST", beat, &[("authorization", &forged)], BEAT);
    check(&refused, 401, "Unauthorized", "Not this machine's token", beat);
    let params = "/hmi/v1/params";
    let refused = ask(&tracker, "PATCH", params, &[], br#"{"Warntime":"12"}"#);
    let detail = "Parameters are set with `juju heartbeat params`; a tracker that runs with \
                  --open-params also takes \
                  them here";
    check(&refused, 403, "Forbidden", detail, params);
    assert!(ask(&tracker, "GET", params, &[], b"").body.contains("\"Warntime\":\"10\""));

    let refused = ask(&tracker, "GET", "/hmi/v1/nothing", &[], b"");
    check(&refused, 404, "Not Found", "No such path", "/hmi/v1/nothing");
    let refused = ask(&tracker, "PUT", "/hmi/v1/params", &[], b"");
    check(&refused, 405, "Invalid Request", "Only GET and PATCH operations supported", params);
    assert_eq!(field(&refused.head, "allow"), Some("GET, PATCH"));
    let refused = ask(&tracker, "POST", "/hmi/v1/heartbeat", &[], &[b' '; 64 * 1024 + 1]);
    check(&refused, 413, "Payload Too Large", "The body is too large", "/hmi/v1/heartbeat");
    let refused = ask(&tracker, "GET", "/hmi/v1/events?since=yesterday", &[], b"");
    check(&refused, 400, "Invalid Request", "Invalid sequence", "/hmi/v1/events");

    let head = b"GET /hmi/v1/events HTTP/1.1\r\nhost: x\r\n\r\n";
    let from = |last: u8| Client::connect_from([127, 0, 0, last].into(), tracker.addr).unwrap();
    let refused_from = |last: u8, detail: &str| {
        let refused = from(last).ask("GET", "/hmi/v1/events", &[], b"").unwrap();
        check(&refused, 503, "Service Unavailable", detail, "/hmi/v1/events");
        assert_eq!(field(&refused.head, "retry-after"), Some("5"));
    };
    let mut readers: Vec<Client> = Vec::new();
    for last in 1..=ADDRESSES {
        for _ in 0..READERS {
            let mut reader = from(last);
            let head = reader.open(head).unwrap();
            assert_eq!(field(&head, "content-type"), Some("text/event-stream"));
            assert_eq!(field(&head, "cache-control"), Some("no-store"));
            readers.push(reader);
        }
        refused_from(last, "Too many readers of events from this address");
    }
    refused_from(ADDRESSES + 1, "Too many readers of events");
    drop(readers);
    wait_for("room for a reader", DEADLINE, || {
        let head = Client::connect(tracker.addr).and_then(|mut reader| reader.open(head)).unwrap();
        head.starts_with("HTTP/1.1 200 ").then_some(())
    });
    tracker.end();
}

#[test]
fn requests_that_need_the_store_get_503_without_it() {
    let mut site = Site::new(Store::keeper());
    site.store.kill9();
    let tracker = site.tracker_without_store(&["--open", "--open-params"]);
    let refused = ask(&tracker, "GET", "/hmi/v1/readiness", &[], b"");
    check(&refused, 503, "Service Unavailable", "The store was not found yet", "/hmi/v1/readiness");
    let refused = ask(&tracker, "PATCH", "/hmi/v1/params", &[], br#"{"Warntime":"12"}"#);
    check(&refused, 503, "Service Unavailable", "The store is away", "/hmi/v1/params");
    let refused = ask(&tracker, "PATCH", "/hmi/v1/params", &[], br#"{"Warntime":"x","Interval":"y"}"#);
    let detail = "Invalid Warntime: not a number of seconds from 1 to 86400; \
                  Invalid Interval: not a number of seconds from 1 to 86400";
    check(&refused, 400, "Invalid Request", detail, "/hmi/v1/params");
    let (beat, token) =
        ("/hmi/v1/heartbeat/machine-0", token::authorization(MachineId::new(0), "machine-0000000000:x"));
    let refused = ask(&tracker, "POST", beat, &[("authorization", &token)], BEAT);
    check(&refused, 503, "Service Unavailable", "Tokens cannot be checked now", beat);
    // Components that need no credential are accepted all the same.
    assert_eq!(ask(&tracker, "POST", "/hmi/v1/heartbeat/x0c0", &[], BEAT).status, 200);
    let known = ask(&tracker, "GET", "/hmi/v1/hbstate/x0c0", &[], b"");
    assert_eq!(known.body, r#"{"XName":"x0c0","Heartbeating":true}"#);
    site.store.restart();
    wait_for("a tracker that has found its store", DEADLINE, || {
        (tracker.get("/hmi/v1/readiness").0 == 204).then_some(())
    });
    tracker.end();
}
