//! `juju heartbeat`, `juju machine maintenance` and status, with the real programs.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use portcullis::heartbeat::core::record::bucket_of;
use portcullis::store::ZkTree;
use portcullis::store::paths::{self, NodePath};
use portcullis::store::tree::{Tree, Write};
use serde_json::{Value, json};

use crate::harness::{Store, wait_for};
use crate::process::{Client, Site, Tracker};

const DEADLINE: Duration = Duration::from_secs(30);

/// A running command, line by line; ended with the test.
struct Watching(Child);

impl Watching {
    fn new(site: &Site, args: &[&str]) -> (Self, Receiver<String>) {
        let mut child = site.command("juju").args(args).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, receiver) = mpsc::channel();
        // Ends with the program, or when the receiver is dropped.
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        (Self(child), receiver)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Writes with the operator's rights.
fn overwrite(site: &Site, path: &NodePath, data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = site.store.addr().to_string().parse().unwrap();
        let tree = ZkTree::connect(&address, Some(&site.operator())).await.unwrap();
        let (path, data) = (path.clone(), data.to_vec());
        let version = tree.get(&path).await.unwrap().version;
        tree.write(vec![Write::SetIfVersion { path, data, version }]).await.unwrap();
    });
}

fn health(site: &Site, name: &str) -> String {
    let list: Value = serde_json::from_str(&site.juju(&["heartbeat", "list", "--format", "json"])).unwrap();
    let found = list.as_array().unwrap().iter().find(|component| component["component"] == name);
    found.map_or(String::new(), |component| component["health"].as_str().unwrap().to_owned())
}

fn beat(name: &str) -> Value {
    json!({"Component": name, "Hostname": "h", "NID": "1", "Status": "OK", "Timestamp": "t"})
}

fn begin(params: &[&str]) -> (Site, Tracker, Client) {
    let site = Site::new(Store::keeper());
    site.juju(&[&["heartbeat", "params", "Interval=1"], params].concat());
    let tracker = site.tracker(&["--open"]);
    let client = Client::connect(tracker.addr).unwrap();
    (site, tracker, client)
}

#[test]
fn watch_prints_changes_as_they_happen() {
    let (site, tracker, mut client) = begin(&["Warntime=2", "Errtime=4", "Mass_share=0"]);
    client.beat("old").unwrap();
    wait_for("a component in the store", DEADLINE, || (health(&site, "old") == "ok").then_some(()));
    let (_watching, lines) = Watching::new(&site, &["heartbeat", "watch"]);
    let next_of = |name: &str, timeout: Duration| {
        let end = Instant::now() + timeout;
        loop {
            let line = lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok()?;
            if line.split("  ").nth(1) == Some(name) {
                return Some(line);
            }
        }
    };
    // The watch runs once it prints a change; later changes are printed in full. Every beat is
    // followed by a change: a restart at once, or else the warning.
    let first = wait_for("a change that is watched", DEADLINE, || {
        client.beat("old").unwrap();
        next_of("old", Duration::from_secs(6))
    });
    let words: Vec<&str> = first.split("  ").collect();
    assert!(words[0].ends_with('Z') && words.len() == 4, "{first}");
    client.beat("new").unwrap();
    for end in [
        "new  ok  Heartbeat started",
        "new  warned  Heartbeat stopped -- might be dead",
        "new  dead  Heartbeat stopped -- declared dead",
    ] {
        let line = next_of("new", DEADLINE).expect(end);
        assert!(line.ends_with(end), "{line}");
    }
    tracker.end();
}

/// Lines about one component, as JSON, from a watch that starts at `since`.
fn documents(site: &Site, since: u64, name: &str, count: usize) -> Vec<Value> {
    let (_watching, lines) =
        Watching::new(site, &["heartbeat", "watch", "--format", "json", "--since", &since.to_string()]);
    let documents = std::iter::from_fn(|| lines.recv_timeout(DEADLINE).ok());
    let documents = documents.map(|line| serde_json::from_str::<Value>(&line).unwrap());
    documents.filter(|document| document["component"] == name).take(count).collect()
}

/// A watch that was paused prints each change, and another one starts where it is told to.
#[test]
fn watch_misses_no_change() {
    let (site, tracker, mut client) = begin(&["Warntime=3000", "Errtime=3600"]);
    let (watching, lines) = Watching::new(&site, &["heartbeat", "watch"]);
    let mut number = 0;
    wait_for("a watch that has begun", DEADLINE, || {
        number += 1;
        client.beat(&format!("first{number}")).unwrap();
        lines.recv_timeout(Duration::from_secs(1)).ok()
    });
    let signal = |signal: &str| {
        let pid = watching.0.id().to_string();
        assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
    };
    signal("-STOP");
    for (status, state) in [("OK", "ok"), ("stopping", "stopped"), ("OK", "ok"), ("stopping", "stopped")] {
        let body = json!({"Status": status, "Timestamp": "t"}).to_string();
        let path = "/hmi/v1/heartbeat/quick";
        assert_eq!(client.ask("POST", path, &[], body.as_bytes()).unwrap().status, 200);
        wait_for("a change in the store", DEADLINE, || (health(&site, "quick") == state).then_some(()));
    }
    signal("-CONT");
    let quick = std::iter::from_fn(|| lines.recv_timeout(DEADLINE).ok())
        .filter(|line| line.split("  ").nth(1) == Some("quick"));
    let words: Vec<String> = quick.take(4).map(|line| line.split("  ").nth(3).unwrap().to_owned()).collect();
    assert_eq!(words, ["Heartbeat started", "planned stop", "back from a planned stop", "planned stop"]);

    let all = documents(&site, 0, "quick", 4);
    let healths: Vec<&str> = all.iter().map(|document| document["health"].as_str().unwrap()).collect();
    assert_eq!(healths, ["ok", "stopped", "ok", "stopped"]);
    let second = all[1]["sequence"].as_u64().unwrap();
    assert_eq!(documents(&site, second, "quick", 2), all[2..]);
    tracker.end();
}

#[test]
fn mass_outage_is_shown_and_can_be_released() {
    let (site, tracker, mut client) = begin(&["Warntime=2", "Errtime=3", "Mass_hold=3600"]);
    let (code, out, printed) = site.output_of(&["heartbeat", "release"]);
    assert_eq!((code, out.as_str(), printed.as_str()), (Some(0), "", "No deaths are held.\n"));
    // All at once: each first beat waits for the store, and the components should fall silent
    // together.
    let beats = json!(["a", "b", "c", "d"].map(beat)).to_string();
    assert_eq!(client.ask("POST", "/hmi/v1/heartbeats", &[], beats.as_bytes()).unwrap().status, 200);
    let held = "warning: 4 of 4 components are silent at once: their deaths are held\n\
                hint: `juju heartbeat release` confirms the outage and declares them dead\n";
    wait_for("an alarm", DEADLINE, || (site.output_of(&["heartbeat", "list"]).2 == held).then_some(()));
    assert_eq!(["a", "b", "c", "d"].map(|name| health(&site, name)), ["warned"; 4]);
    assert!(tracker.get("/hmi/v1/health").1.contains("4 of 4 are silent; deaths are held"));
    // Components that return are no longer counted.
    assert_eq!(client.beat("d").unwrap(), 200);
    wait_for("the numbers of now", DEADLINE, || {
        assert_eq!(client.beat("d").unwrap(), 200);
        (site.output_of(&["heartbeat", "list"]).2 == held.replace("4 of 4", "3 of 4")).then_some(())
    });
    let (code, out, printed) = site.output_of(&["heartbeat", "release"]);
    assert_eq!((code, out.as_str()), (Some(0), ""));
    assert_eq!(printed, "The held deaths will be declared.\n");
    wait_for("the deaths", DEADLINE, || {
        assert_eq!(client.beat("d").unwrap(), 200);
        ["a", "b", "c"].iter().all(|name| health(&site, name) == "dead").then_some(())
    });
    wait_for("the end of the alarm", DEADLINE, || {
        site.output_of(&["heartbeat", "list"]).2.is_empty().then_some(())
    });
    tracker.end();
}

/// The judge is killed in a mass outage, and there is no judge when the operator releases the
/// deaths.
#[test]
fn release_without_a_judge_is_for_the_next_one() {
    let (site, first, mut client) = begin(&["Warntime=2", "Errtime=3", "Mass_hold=3600"]);
    let second = site.tracker(&["--open"]);
    let beats = json!(["a", "b", "c", "d"].map(beat)).to_string();
    assert_eq!(client.ask("POST", "/hmi/v1/heartbeats", &[], beats.as_bytes()).unwrap().status, 200);
    let is_held = || site.output_of(&["heartbeat", "list"]).2.contains("their deaths are held");
    wait_for("an alarm", DEADLINE, || is_held().then_some(()));
    let (judge, other) = if first.is_judging() { (first, second) } else { (second, first) };
    judge.kill9();
    assert!(is_held() && !other.is_judging());
    let (code, _, printed) = site.output_of(&["heartbeat", "release"]);
    assert_eq!((code, printed.as_str()), (Some(0), "The held deaths will be declared.\n"));
    wait_for("the deaths", DEADLINE, || {
        ["a", "b", "c", "d"].iter().all(|name| health(&site, name) == "dead").then_some(())
    });
    other.end();
}

#[test]
fn component_in_maintenance_causes_no_warning() {
    let (site, tracker, mut client) = begin(&["Warntime=2", "Errtime=3600", "Mass_share=0"]);
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    let (code, out, printed) = site.output_of(&["machine", "maintenance", "quiet", "--for", "1h"]);
    assert_eq!((code, out.as_str()), (Some(0), ""));
    assert!(printed.starts_with("quiet is in maintenance until 2") && printed.ends_with("Z.\n"), "{printed}");
    for name in ["quiet", "other"] {
        assert_eq!(client.beat(name).unwrap(), 200);
    }
    // A component that is not in maintenance has been warned about by now.
    wait_for("a warning", DEADLINE, || (health(&site, "other") == "warned").then_some(()));
    assert_eq!(health(&site, "quiet"), "ok");
    assert!(site.juju(&["heartbeat", "show", "quiet"]).contains("maintenance-until: 2"));
    assert!(!site.juju(&["heartbeat", "show", "other"]).contains("maintenance-until"));
    let (code, _, printed) = site.output_of(&["machine", "maintenance", "quiet", "--end"]);
    assert_eq!((code, printed.as_str()), (Some(0), "quiet is no longer in maintenance.\n"));
    wait_for("a warning after the end", DEADLINE, || (health(&site, "quiet") == "warned").then_some(()));

    let (code, _, printed) = site.output_of(&["machine", "maintenance", "0"]);
    assert!(code == Some(0) && printed.starts_with("machine-0 is in maintenance until 2"), "{printed}");
    for (args, code, problem) in [
        (&["machine", "maintenance", "7"][..], 1, "error: Machine 7 was not found\n"),
        (&["machine", "maintenance", "a/b"], 2, "error: Invalid component name 'a/b'\n"),
        (
            &["machine", "maintenance", "0", "--for", "soon"],
            2,
            "error: 'soon' is not a time such as 90s, 30m, 2h or 1d\n",
        ),
        (
            &["heartbeat", "show", "nobody"],
            1,
            "error: Component 'nobody' was not found: it has never sent a heartbeat\n",
        ),
        (&["heartbeat", "params", "Warntime"], 2, "error: 'Warntime' is not NAME=VALUE\n"),
        (
            &["heartbeat", "params", "Warntime=0"],
            1,
            "error: Invalid Warntime: not a number of seconds from 1 to 86400\n",
        ),
    ] {
        let (exit_code, out, printed) = site.output_of(args);
        assert_eq!((exit_code, out.as_str()), (Some(code), ""), "{args:?}: {printed}");
        assert!(printed.starts_with(problem), "{args:?}: {printed}");
    }
    tracker.end();
}

#[test]
fn watch_ends_with_its_reader() {
    let (site, tracker, mut client) = begin(&[]);
    client.beat("a").unwrap();
    wait_for("a component in the store", DEADLINE, || (health(&site, "a") == "ok").then_some(()));
    let child = site.command("juju").args(["heartbeat", "watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut watching = Watching(child);
    // Like `head`, which closes its input; no change happens.
    drop(watching.0.stdout.take());
    let status = wait_for("its end", DEADLINE, || watching.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    tracker.end();
}

#[test]
fn unreadable_bucket_hides_only_its_own_components() {
    let (site, tracker, mut client) = begin(&[]);
    for name in ["a", "b"] {
        assert_eq!(client.beat(name).unwrap(), 200);
        wait_for("a component in the store", DEADLINE, || (health(&site, name) == "ok").then_some(()));
    }
    tracker.end();
    let bucket = paths::heartbeat_bucket(bucket_of("a"));
    assert_ne!(bucket, paths::heartbeat_bucket(bucket_of("b")));
    overwrite(&site, &bucket, b"garbage");
    let (code, out, printed) = site.output_of(&["heartbeat", "list"]);
    assert!(
        code == Some(1) && out.contains("\nb  ") && out.contains("\na          unreadable  -"),
        "{out}{printed}"
    );
    assert_eq!(printed, format!("error: some components cannot be shown: {bucket}: no JSON\n"));
    let (code, out, _) = site.output_of(&["heartbeat", "show", "b"]);
    assert!(code == Some(0) && out.starts_with("component: b\n"), "{out}");
    let (code, _, printed) = site.output_of(&["heartbeat", "show", "a"]);
    assert_eq!((code, printed), (Some(1), format!("error: {bucket}: no JSON\n")));
}

/// As for any other unreadable record.
#[test]
fn unreadable_bucket_is_an_error_of_its_machine() {
    let (site, tracker, mut client) = begin(&[]);
    for machine in ["0", "1"] {
        site.juju(&["add-machine", "--instance-id", &format!("i-{machine}")]);
    }
    let number = bucket_of("machine-0");
    assert_ne!(number, bucket_of("machine-1"));
    let neighbour = (0..).map(|number| format!("x{number}")).find(|name| bucket_of(name) == number).unwrap();
    assert_eq!(client.beat(&neighbour).unwrap(), 200);
    wait_for("a component in the store", DEADLINE, || (health(&site, &neighbour) == "ok").then_some(()));
    tracker.end();
    let (code, _, printed) = site.output_of(&["status"]);
    assert_eq!((code, printed.as_str()), (Some(0), ""));
    let bucket = paths::heartbeat_bucket(number);
    overwrite(&site, &bucket, b"garbage");
    let (code, out, printed) = site.output_of(&["status", "--format", "json"]);
    assert_eq!((code, printed), (Some(1), format!("error: {bucket}: no JSON\n")));
    let machines = serde_json::from_str::<Value>(&out).unwrap()["machines"].clone();
    assert_eq!(machines["0"]["error"], format!("{bucket}: no JSON"));
    assert_eq!(machines["0"]["instance-id"], "i-0", "readable machines are listed");
    assert_eq!((&machines["1"]["error"], &machines["1"]["instance-id"]), (&json!(null), &json!("i-1")));
}

#[test]
fn unreadable_alarm_hides_no_component() {
    let (site, tracker, mut client) = begin(&[]);
    assert_eq!(client.beat("a").unwrap(), 200);
    tracker.end();
    overwrite(&site, &paths::heartbeat_alarm(), b"garbage");
    let (code, out, printed) = site.output_of(&["heartbeat", "list"]);
    assert!(code == Some(0) && out.contains("a  "), "{out}{printed}");
    assert_eq!(printed, "warning: /controller/heartbeat/alarm: no alarm: are deaths held?\n");
}
