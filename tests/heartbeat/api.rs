//! The HTTP API as clients of hms-hbtd use it, and misbehaving clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use portcullis::heartbeat::core::token;
use portcullis::model::MachineId;
use serde_json::{Value, json};

use crate::harness::{Store, wait_for};
use crate::manager::{Manager, Mood};
use crate::process::{Client, Got, Site, field, serve, serve_manager};

const DEADLINE: Duration = Duration::from_secs(30);

#[test]
fn clients_of_hms_hbtd_get_the_same_answers() {
    let site = Site::new(Store::keeper());
    let tracker = site.tracker(&["--open", "--open-params"]);
    let mut client = Client::connect(tracker.addr).unwrap();
    let mut ask = |method: &str, path: &str, body: &str| {
        let answer = client.ask(method, path, &[], body.as_bytes()).unwrap();
        (answer.status, answer.body, field(&answer.head, "content-type").map(str::to_owned), answer.head)
    };
    let beat = r#"{"Component":"x0c0s0b0n0","Hostname":"n","NID":"1","Status":"OK","Timestamp":"t"}"#;
    let (status, body, ..) = ask("POST", "/hmi/v1/heartbeat", beat);
    assert_eq!((status, body.as_str()), (200, ""));
    let (status, body, ..) =
        ask("POST", "/hmi/v1/heartbeat/x0c0s0b0n1", r#"{"Status":"OK","Timestamp":"t"}"#);
    assert_eq!((status, body.as_str()), (200, ""));

    let (status, body, kind, _) = ask("POST", "/hmi/v1/heartbeat", r#"{"Component":"a"}"#);
    assert_eq!((status, kind.as_deref()), (400, Some("application/problem+json")));
    assert_eq!(
        body,
        "{\"type\":\"about:blank\",\"title\":\"Invalid Request\",\"detail\":\"Missing Hostname field\",\
         \"instance\":\"/hmi/v1/heartbeat\",\"status\":400}"
    );
    let (status, _, kind, head) = ask("GET", "/hmi/v1/heartbeat", "");
    assert_eq!((status, kind.as_deref()), (405, Some("application/problem+json")));
    assert_eq!(field(&head, "allow"), Some("POST"));

    let asked = r#"{"XNames":["nobody","x0c0s0b0n1","x0c0s0b0n0"]}"#;
    let (status, body, kind, _) = ask("POST", "/hmi/v1/hbstates", asked);
    assert_eq!((status, kind.as_deref()), (200, Some("application/json")));
    assert_eq!(
        body,
        concat!(
            r#"{"HBStates":[{"XName":"nobody","Heartbeating":false},"#,
            r#"{"XName":"x0c0s0b0n1","Heartbeating":true},{"XName":"x0c0s0b0n0","Heartbeating":true}]}"#
        )
    );
    let (status, body, ..) = ask("GET", "/hmi/v1/hbstate/nobody", "");
    assert_eq!((status, body.as_str()), (200, r#"{"XName":"nobody","Heartbeating":false}"#));

    let (status, body, ..) =
        ask("PATCH", "/hmi/v1/params", r#"{"Warntime":"12","Errtime":"x","Color":"red"}"#);
    assert_eq!(status, 400);
    assert!(body.contains("Invalid Errtime") && body.contains("Unknown parameter Color"), "{body}");
    let (status, body, ..) = ask("PATCH", "/hmi/v1/params", r#"{"Warntime":"12"}"#);
    assert!(status == 200 && body.contains("\"Warntime\":\"12\""), "{body}");
    wait_for("the change at the tracker", DEADLINE, || {
        ask("GET", "/hmi/v1/params", "").1.contains("\"Warntime\":\"12\"").then_some(())
    });
    assert!(site.juju(&["heartbeat", "params"]).contains("Warntime=12\n"));
    assert_eq!(ask("GET", "/hmi/v1/liveness", "").0, 204);
    let (status, body, ..) = ask("GET", "/hmi/v1/health", "");
    assert!(status == 200 && body.contains("\"KvStore\":\"connected\""), "{body}");
    assert!(ask("GET", "/metrics", "").1.contains("portcullis_heartbeat_beats_total 2\n"));
    assert_eq!(ask("GET", "/hmi/v1/nothing", "").0, 404);
    tracker.end();
}

#[test]
fn requests_beyond_the_limits_are_refused_and_others_served() {
    let site = Site::new(Store::keeper());
    let tracker = site.tracker(&["--open", "--max-components", "100"]);
    // Half a request, then nothing.
    let mut slow = TcpStream::connect(tracker.addr).unwrap();
    slow.write_all(b"POST /hmi/v1/heartbeat HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"Comp")
        .unwrap();

    let mut large = Client::connect(tracker.addr).unwrap();
    let answer = large.ask("POST", "/hmi/v1/heartbeat", &[], &vec![b' '; 1_000_000]).unwrap();
    assert_eq!((answer.status, answer.json()["status"].clone()), (413, json!(413)));

    let mut flood = Client::connect(tracker.addr).unwrap();
    let statuses: Vec<u16> = (0..200).map(|number| flood.beat(&format!("n{number}")).unwrap()).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 100);
    assert!(statuses[100..].iter().all(|status| *status == 503));
    assert_eq!(flood.beat("n7").unwrap(), 200, "known components are still accepted");

    for body in ["[]", "\u{0}", "{\"Component\":{}}", "nul", &"[".repeat(60_000)] {
        let mut client = Client::connect(tracker.addr).unwrap();
        let answer = client.ask("POST", "/hmi/v1/heartbeat", &[], body.as_bytes()).unwrap();
        assert_eq!(answer.status, 400, "{}", &body[..body.len().min(20)]);
    }
    // The slow client gets an answer in the end.
    slow.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    slow.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    tracker.end();
}

#[test]
fn many_names_of_one_client_do_not_affect_others() {
    const CALLS: usize = 200;
    const IN_A_CALL: usize = 5_000;
    let site = Site::new(Store::keeper());
    // Only the healthy client sends a second beat.
    site.juju(&["heartbeat", "params", "Warntime=3000", "Errtime=3600"]);
    let tracker = site.tracker(&["--open", "--max-components", "2000"]);
    let mut healthy = Client::connect(tracker.addr).unwrap();
    assert_eq!(healthy.beat("healthy").unwrap(), 200);
    // The last name of each call is known.
    let list = |call: usize| {
        let beat = |number: usize| {
            let name = if number == IN_A_CALL - 1 {
                "healthy".to_owned()
            } else {
                format!("flood-{}", call * IN_A_CALL + number)
            };
            format!(
                "{{\"Component\":\"{name}\",\"Hostname\":\"h\",\"NID\":\"1\",\"Status\":\"OK\",\
                 \"Timestamp\":\"t\"}}"
            )
        };
        format!("[{}]", (0..IN_A_CALL).map(beat).collect::<Vec<_>>().join(",")).into_bytes()
    };
    let mut flood = Client::connect(tracker.addr).unwrap();
    let mut send = |call: usize| flood.ask("POST", "/hmi/v1/heartbeats", &[], &list(call)).unwrap();
    send(0);
    let memory = rss_bytes(tracker.pid());
    for call in 1..CALLS {
        let answer = send(call);
        assert_eq!((answer.status, answer.json_detail().as_str()), (503, "Too many components"));
        assert_eq!(healthy.beat("healthy").unwrap(), 200);
    }
    let more = rss_bytes(tracker.pid()).saturating_sub(memory);
    assert!(more < 8 << 20, "{more} bytes for names that were refused");
    let (_, metrics) = tracker.get("/metrics");
    assert!(metrics.contains("portcullis_heartbeat_components{health=\"ok\"} 2000\n"), "{metrics}");
    // Known components are accepted, also in a call with unknown ones.
    let heard = 2000 + CALLS - 1 + CALLS;
    assert!(metrics.contains(&format!("portcullis_heartbeat_beats_total {heard}\n")), "{metrics}");
    tracker.end();
}

#[test]
fn memory_for_large_bodies_is_limited() {
    const SENDERS: usize = 200;
    let site = Site::new(Store::keeper());
    let tracker = site.tracker(&["--open"]);
    assert_eq!(Client::connect(tracker.addr).unwrap().beat("healthy").unwrap(), 200);
    let memory = rss_bytes(tracker.pid());
    // Each client sends most of a large body, and waits.
    let head = format!("POST /hmi/v1/heartbeats HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 1 << 20);
    let body = vec![b' '; (1 << 20) - 1];
    let senders: Vec<_> = (0..SENDERS)
        .map(|_| {
            let (mut stream, head, body) =
                (TcpStream::connect(tracker.addr).unwrap(), head.clone(), body.clone());
            std::thread::spawn(move || {
                // A refused client may get the answer before the end.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                let mut answer = String::new();
                let _ = stream.read_to_string(&mut answer);
                answer.get(9..12).unwrap_or_default().to_owned()
            })
        })
        .collect();
    let mut most = 0;
    let mut healthy = Client::connect(tracker.addr).unwrap();
    while !senders.iter().all(JoinHandle::is_finished) {
        assert_eq!(healthy.beat("healthy").unwrap(), 200);
        most = most.max(rss_bytes(tracker.pid()));
    }
    let printed: Vec<String> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
    let count = |status: &str| printed.iter().filter(|printed| *printed == status).count();
    assert!(count("503") > SENDERS / 2 && count("408") > 0, "{printed:?}");
    // Half of 64 MiB for one address, and the buffers of each connection.
    let more = most.saturating_sub(memory);
    assert!(more < 100 << 20, "{more} bytes for {SENDERS} large bodies");
    tracker.end();
}

fn rss_bytes(pid: u32) -> usize {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn machine_can_send_beats_only_for_itself() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    site.juju(&["add-machine", "--instance-id", "i-1"]);
    let tracker = site.tracker(&[]);
    let credential = |machine: u32| machine_credential(&site, machine);
    let mine = token::authorization(MachineId::new(0), &credential(0));
    let mut client = Client::connect(tracker.addr).unwrap();
    let mut beat = |name: &str, token: Option<&str>| {
        let headers: Vec<(&str, &str)> = token.iter().map(|token| ("authorization", *token)).collect();
        let body = br#"{"Status":"OK","Timestamp":"t"}"#;
        let answer = client.ask("POST", &format!("/hmi/v1/heartbeat/{name}"), &headers, body).unwrap();
        (answer.status, answer.json_detail())
    };
    assert_eq!(beat("machine-0", Some(&mine)), (200, String::new()));
    assert_eq!(beat("machine-0000000000", Some(&mine)), (200, String::new()), "the same name");
    assert_eq!(beat("machine-0", None), (401, "No token".to_owned()));
    assert_eq!(beat("machine-1", Some(&mine)), (403, "machine-0 cannot beat for machine-1".to_owned()));
    assert_eq!(beat("x0c0", Some(&mine)), (403, "machine-0 cannot beat for x0c0".to_owned()));
    assert_eq!(beat("x0c0", None), (401, "No token".to_owned()), "open mode must be asked for");
    let forged = mine.replace("machine-0.", "machine-1.");
    assert_eq!(beat("machine-1", Some(&forged)), (401, "Not this machine's token".to_owned()));

    // Guessing causes no reads: a credential that was read a moment ago is cached.
    for _ in 0..300 {
        assert_eq!(beat("machine-1", Some(&forged)), (401, "Not this machine's token".to_owned()));
    }
    assert_eq!(beat("machine-0", Some(&mine)), (200, String::new()));

    // Status shows the beats.
    wait_for("a beat in status", DEADLINE, || {
        let status: Value = serde_json::from_str(&site.juju(&["status", "--format", "json"])).unwrap();
        let machine = &status["machines"]["0"];
        (machine["health"] == "ok" && machine["flag"] == "OK" && machine["agent-state"] == "running")
            .then_some(())
    });
    let shown = site.juju(&["heartbeat", "show", "0"]);
    assert!(shown.contains("component: machine-0\nhealth: ok\n"), "{shown}");
    // A removed machine is not missed.
    site.juju(&["terminate-machine", "0"]);
    wait_for("a machine that is forgotten", DEADLINE, || {
        (!site.juju(&["heartbeat", "list"]).contains("machine-0")).then_some(())
    });
    tracker.end();

    let open = site.tracker(&["--open"]);
    let mut client = Client::connect(open.addr).unwrap();
    assert_eq!(client.beat("x0c0").unwrap(), 200);
    assert_eq!(client.beat("machine-1").unwrap(), 401, "refused on this tracker, too");
    open.end();
}

impl crate::process::Answer {
    pub(crate) fn json_detail(&self) -> String {
        if self.body.is_empty() { String::new() } else { self.json()["detail"].as_str().unwrap().to_owned() }
    }
}

/// The machine's credential in the store.
pub(crate) fn machine_credential(site: &Site, machine: u32) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let operator = site.operator();
        let address = site.store.addr().to_string().parse().unwrap();
        let tree = portcullis::store::ZkTree::connect(&address, Some(&operator)).await.unwrap();
        let environment = portcullis::store::Environment::open(tree).await.unwrap();
        environment.machine_credential(MachineId::new(machine)).await.unwrap().expose()
    })
}

#[test]
fn changes_reach_webhook_and_readers() {
    let site = Site::new(Store::keeper());
    let manager = Manager::default();
    let hooked: Arc<Mutex<Vec<Got>>> = Arc::default();
    let hook = {
        let hooked = Arc::clone(&hooked);
        serve(move |got| {
            hooked.lock().unwrap().push(got.clone());
            Some(204)
        })
    };
    let sm = format!("Sm_url={}", serve_manager(&manager));
    let hook = format!("Webhook_url=http://{hook}/told");
    site.juju(&["heartbeat", "params", &sm, &hook, "Warntime=3", "Errtime=8", "Interval=1", "Mass_share=0"]);
    let tracker = site.tracker(&["--open"]);
    let mut events = Client::connect(tracker.addr).unwrap().stream("/hmi/v1/events");
    let mut client = Client::connect(tracker.addr).unwrap();
    let words = ["started", "might be dead", "declared dead"];
    assert_eq!(client.beat("x1c0").unwrap(), 200);
    let mut numbers = Vec::new();
    for word in words {
        let id =
            events.find_map(|line| line.strip_prefix("id: ").map(|id| id.parse::<u64>().unwrap())).unwrap();
        let data = events.find_map(|line| line.strip_prefix("data: ").map(str::to_owned)).unwrap();
        assert!(data.contains(word) && data.contains("\"component\":\"x1c0\""), "{data}");
        numbers.push(id);
    }
    assert!(numbers.is_sorted());
    let update = wait_for("three calls", DEADLINE, || {
        let book = manager.book();
        (book.updates.len() >= 3)
            .then(|| book.updates.iter().map(|update| update.flag.clone()).collect::<Vec<_>>())
    });
    assert_eq!(update, ["OK", "Warning", "Alert"]);
    let got = wait_for("three documents", DEADLINE, || {
        let hooked = hooked.lock().unwrap();
        (hooked.len() >= 3).then(|| hooked.clone())
    });
    for (got, number) in got.iter().zip(&numbers) {
        let signature = field(&got.head, "x-portcullis-signature").unwrap();
        assert_eq!(signature, format!("sha256={}", token::signature(b"hush", &got.body)));
        let document: Value = serde_json::from_slice(&got.body).unwrap();
        assert_eq!(document["sequence"], json!(number));
        assert_eq!(field(&got.head, "x-portcullis-sequences"), Some(number.to_string().as_str()));
    }
    // A reader that reconnects gets the events that it missed.
    let resumed = format!("/hmi/v1/events?since={}", numbers[0]);
    let mut events = Client::connect(tracker.addr).unwrap().stream(&resumed);
    for number in &numbers[1..] {
        let next = events.find_map(|line| line.strip_prefix("id: ").map(|id| id.parse::<u64>().unwrap()));
        assert_eq!(next, Some(*number), "each that was missed");
    }
    tracker.end();
}

#[test]
fn beats_are_accepted_while_store_and_state_manager_are_down() {
    let mut site = Site::new(Store::keeper());
    let manager = Manager::default();
    manager.book().mood = Mood::Down;
    let sm = format!("Sm_url={}", serve_manager(&manager));
    site.juju(&["heartbeat", "params", &sm]);
    let tracker = site.tracker(&["--open"]);
    let mut client = Client::connect(tracker.addr).unwrap();
    assert_eq!(client.beat("a").unwrap(), 200);
    site.store.kill9();
    wait_for("a tracker that misses its store", DEADLINE, || {
        tracker.get("/hmi/v1/health").1.contains("\"KvStore\":\"away\"").then_some(())
    });
    for name in ["a", "b"] {
        // The store may have been unreachable for so long that the tracker answers beats with 503.
        assert!(matches!(client.beat(name), Ok(200 | 503)));
        assert!(tracker.get(&format!("/hmi/v1/hbstate/{name}")).1.contains("true"));
    }
    // The status tells senders and load balancers to use another tracker.
    wait_for("a tracker that is not ready", DEADLINE, || {
        (tracker.get("/hmi/v1/readiness").0 == 503).then_some(())
    });
    let body = br#"{"Status":"OK","Timestamp":"t"}"#;
    wait_for("a beat that is answered with an error", DEADLINE, || {
        let answer = client.ask("POST", "/hmi/v1/heartbeat/a", &[], body).unwrap();
        let update = answer.head.to_ascii_lowercase().contains("retry-after: ");
        assert!(answer.status == 200 || answer.status == 503 && update, "{answer:?}");
        (answer.status == 503).then_some(())
    });
    assert!(
        tracker.get("/hmi/v1/hbstate/a").1.contains("true"),
        "the tracker keeps the beats that it cannot pass on"
    );
    manager.book().mood = Mood::Fine;
    site.store.restart();
    wait_for("everybody told", Duration::from_secs(60), || {
        // The components continue to send beats.
        let beats = [client.beat("a"), client.beat("b")];
        assert!(beats.iter().all(|beat| matches!(beat, Ok(200 | 503))), "{beats:?}");
        (manager.book().newest_states().len() == 2).then_some(())
    });
    wait_for("a tracker that is ready again", DEADLINE, || {
        (tracker.get("/hmi/v1/readiness").0 == 204).then_some(())
    });
    assert_eq!(client.beat("a").unwrap(), 200);
    tracker.end();
}

#[test]
fn machine_agent_sends_beats_and_announces_its_stop() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    site.juju(&["heartbeat", "params", "Warntime=4", "Errtime=8", "Interval=1"]);
    let tracker = site.tracker(&["--open"]);
    let url = format!("http://{}", tracker.addr);
    let mut agent = site
        .command("portcullis")
        .args(["machine", "--id", "0", "--beat-to", "http://127.0.0.1:1", "--beat-to", &url])
        .spawn()
        .unwrap();
    let health = || {
        let status: Value = serde_json::from_str(&site.juju(&["status", "--format", "json"])).unwrap();
        let machine = &status["machines"]["0"];
        (machine["health"].clone(), machine["agent-state"].clone())
    };
    wait_for("a machine that is heard", DEADLINE, || {
        (health() == (json!("ok"), json!("running"))).then_some(())
    });
    let done = std::process::Command::new("kill").arg(agent.id().to_string()).status().unwrap();
    assert!(done.success());
    assert!(agent.wait().unwrap().success());
    wait_for("a machine that stopped", DEADLINE, || (health().0 == "stopped").then_some(()));
    // A component that stops without announcing it is dead in the end; the machine is not even
    // warned about.
    assert_eq!(Client::connect(tracker.addr).unwrap().beat("witness").unwrap(), 200);
    wait_for("the death of another", DEADLINE, || {
        assert_eq!(health().0, "stopped");
        site.juju(&["heartbeat", "list"])
            .lines()
            .any(|line| line.starts_with("witness    dead"))
            .then_some(())
    });
    tracker.end();
}
