//! Trackers beside other roles: in the controller. In `up` they are seen with the rest of it.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
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

/// A controller that hears heartbeats, and where.
fn controller(site: &Site) -> (Running, SocketAddr) {
    let mut child = site
        .command("portcullis")
        .args(["controller", "--provider", "memory", "--heartbeat", "127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let running = Running(child);
    let found = lines.find_map(|line| line.unwrap().strip_prefix("heartbeats on http://").map(str::to_owned));
    // What it says later is of no interest, but it must be able to say it.
    std::thread::spawn(move || lines.for_each(drop));
    (running, found.expect("an address").parse().unwrap())
}

fn machine(site: &Site) -> Value {
    let status: Value = serde_json::from_str(&site.juju(&["status", "--format", "json"])).unwrap();
    status["machines"]["0"].clone()
}

#[test]
fn a_controller_hears_machines_and_nobody_vouches_for_them_without_it() {
    let site = Site::new(Store::keeper());
    site.juju(&["add-machine", "--instance-id", "i-0"]);
    site.juju(&["heartbeat", "params", "Interval=1"]);
    let (controller, addr) = controller(&site);
    // Nobody tells the machine where to beat to but the tree.
    let agent = site.command("portcullis").args(["machine", "--id", "0"]).spawn().unwrap();
    let agent = Running(agent);
    wait_for("a machine that is heard", DEADLINE, || (machine(&site)["health"] == "ok").then_some(()));
    let seen = machine(&site);
    assert_eq!((&seen["agent-state"], &seen["flag"]), (&json!("running"), &json!("OK")));
    // The API says the same by the same rule.
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
    wait_for("nobody who vouches", DEADLINE, || (machine(&site)["agent-state"] == "down").then_some(()));
}
