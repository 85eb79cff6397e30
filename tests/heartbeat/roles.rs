//! Trackers inside the controller. Tests of `up` cover trackers there.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{STOP_DEADLINE, Store, wait_for};
use crate::process::{Client, Site};

const DEADLINE: Duration = Duration::from_secs(30);

/// A process that ends with the test.
struct Running(Child);

impl Running {
    fn ends(mut self) -> Option<i32> {
        let sent = Command::new("kill").arg(self.0.id().to_string()).status().unwrap();
        assert!(sent.success());
        wait_for("its end", STOP_DEADLINE, || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Starts a controller with a tracker; returns its address and its output.
fn controller(site: &Site) -> (Running, SocketAddr, Receiver<String>) {
    let mut child = site
        .command("portcullis")
        .args(["controller", "--provider", "memory", "--heartbeat", "127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let running = Running(child);
    let found = lines.find_map(|line| line.unwrap().strip_prefix("heartbeats on http://").map(str::to_owned));
    let (sender, printed) = mpsc::channel();
    // Its output must be read to the end, so that it does not block.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    (running, found.expect("an address").parse().unwrap(), printed)
}

fn machine(site: &Site) -> Value {
    let status: Value = serde_json::from_str(&site.juju(&["status", "--format", "json"])).unwrap();
    status["machines"]["0"].clone()
}

#[test]
fn controller_accepts_beats_of_machines() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    site.juju(&["heartbeat", "params", "Interval=1"]);
    let (controller, addr, _said) = controller(&site);
    // A tracker on loopback is not registered with an address.
    let tracker = format!("http://{addr}");
    let agent = site.command("portcullis").args(["machine", "--id", "0", "--beat-to", &tracker]).spawn();
    let agent = Running(agent.unwrap());
    wait_for("a machine that is heard", DEADLINE, || (machine(&site)["health"] == "ok").then_some(()));
    let seen = machine(&site);
    assert_eq!((&seen["agent-state"], &seen["flag"]), (&json!("running"), &json!("OK")));
    // The API applies the same rule.
    let mut client = Client::connect(addr).unwrap();
    let state = client.ask("GET", "/hmi/v1/hbstate/machine-0", &[], b"").unwrap();
    assert_eq!(state.body, r#"{"XName":"machine-0","Heartbeating":true}"#);
    assert_eq!(client.beat("x0c0").unwrap(), 401, "open mode must be asked for");
    let beat = seen["last-beat"].as_str().unwrap().to_owned();
    wait_for("a later beat", DEADLINE, || {
        (machine(&site)["last-beat"].as_str()? > beat.as_str()).then_some(())
    });

    assert_eq!(controller.ends(), Some(0));
    let seen = machine(&site);
    assert_eq!(
        (&seen["health"], &seen["agent-state"]),
        (&json!("unknown"), &json!("running")),
        "its session says so"
    );
    assert_eq!(agent.ends(), Some(0));
    wait_for("no agent of the machine", DEADLINE, || (machine(&site)["agent-state"] == "down").then_some(()));
}

#[test]
fn controller_with_a_tracker_waits_for_the_store() {
    let mut site = Site::new(Store::keeper());
    site.store.kill9();
    let (first, addr, printed) = controller(&site);
    let health = || Client::connect(addr).unwrap().ask("GET", "/hmi/v1/health", &[], b"").unwrap().body;
    assert!(health().contains("\"KvStore\":\"away\""), "{}", health());
    // Each role has tried once to reach the store, until its timeout.
    for _ in 0..2 {
        let warned = wait_for("a look in vain", DEADLINE, || printed.recv_timeout(DEADLINE).ok());
        assert!(warned.contains("store unreachable; retrying"), "{warned}");
    }
    assert!(health().contains("\"KvStore\":\"away\""), "beats are taken meanwhile");
    let (second, ..) = controller(&site);
    assert_eq!(second.ends(), Some(0), "also without a store it ends when it is asked to");
    site.store.restart();
    wait_for("a tracker with a store", DEADLINE, || {
        let ready = Client::connect(addr).ok()?.ask("GET", "/hmi/v1/readiness", &[], b"").ok()?;
        (ready.status == 204).then_some(())
    });
    assert_eq!(first.ends(), Some(0));
}
