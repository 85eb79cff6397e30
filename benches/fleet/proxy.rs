//! A unit that depends on a unit of another node, beside one that depends on a unit of its own
//! node.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::fleet::{Process, Site};
use crate::harness::{HANG, wait_for};
use crate::node::Node;
use crate::{Row, ms, spread};

const ROUNDS: usize = 100;
const SLEEP: &str = "[Service]\nExecStart=/bin/sleep infinity\n";
const HELPER: &str = env!("CARGO_BIN_EXE_hirte-proxy");

/// Measures from the start of a unit until it is active.
pub(crate) fn start() -> Vec<Row> {
    let nodes = [Node::start(), Node::start()];
    let site = Site::new(&["n1".to_owned(), "n2".to_owned()]);
    site.allow("n1", "n2");
    let (_manager, address) = site.manager("127.0.0.1:0");
    let state = tempfile::tempdir().unwrap();
    let agent = |(node, name): (&Node, &str)| {
        install(node);
        let identity = site.authority.issue(name);
        let (certificate, key) = (identity.certificates.to_str().unwrap(), identity.key.to_str().unwrap());
        let (ca, bus) = (site.authority.file(), node.address());
        let options = ["agent", "--name", name, "--manager", &address, "--bus", &bus];
        let tls = ["--tls-cert", certificate, "--tls-key", key, "--ca-file", ca.to_str().unwrap()];
        let state = ["--state-dir", state.path().to_str().unwrap()];
        Process::start(&[&options[..], &tls, &state].concat())
    };
    let _agents: Vec<Process> = nodes.iter().zip(["n1", "n2"]).map(agent).collect();
    for (unit, wanted) in [("near.service", "db.service"), ("far.service", "hirte-proxy@n2_db.service")] {
        write(&nodes[0], unit, &format!("[Unit]\nRequires={wanted}\nAfter={wanted}\n{SLEEP}"));
    }
    for node in &nodes {
        write(node, "db.service", &format!("[Unit]\nStopWhenUnneeded=yes\n{SLEEP}"));
        node.systemctl(&["daemon-reload"]);
    }
    wait_for("a first start", HANG, || {
        let started = nodes[0].command("systemctl").args(["--user", "start", "far.service"]).output();
        started.unwrap().status.success().then_some(())
    });
    stop(&nodes, "far.service");
    let round = |unit: &str| {
        let begun = Instant::now();
        nodes[0].systemctl(&["start", unit]);
        let took = begun.elapsed();
        stop(&nodes, unit);
        took
    };
    let (mut near, mut far): (Vec<Duration>, Vec<Duration>) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        near.push(round("near.service"));
        far.push(round("far.service"));
    }
    let ((near_least, near_median), (far_least, far_median)) = (spread(near), spread(far));
    let row = |what, near: Duration, far: Duration| {
        let over = ms(far) - ms(near);
        let ours = format!("{over:.1} ms ({:.1} - {:.1})", ms(far), ms(near));
        Row { what, ours, theirs: "", goal: "15 ms", met: over < 15.0 }
    };
    let (least, median) = helper();
    let ours = format!("{:.1} / {:.1} ms", ms(least), ms(median));
    let met = ms(median) < 5.0;
    vec![
        row("start with a dependency on another node, least", near_least, far_least),
        row("start with a dependency on another node, median", near_median, far_median),
        Row { what: "start-up of hirte-proxy, least / median", ours, theirs: "", goal: "5 ms", met },
    ]
}

/// Stops a unit, and waits until the target of its dependency has stopped, too.
fn stop(nodes: &[Node; 2], unit: &str) {
    nodes[0].systemctl(&["stop", unit]);
    for node in nodes {
        wait_for("an inactive target", HANG, || {
            (node.property("db.service", "ActiveState") == "inactive").then_some(())
        });
    }
}

/// The time from the start to the end of the helper without a call.
fn helper() -> (Duration, Duration) {
    let times = (0..ROUNDS).map(|_| {
        let mut command = Command::new(HELPER);
        command.arg("--help").stdout(Stdio::null());
        let begun = Instant::now();
        command.status().unwrap();
        begun.elapsed()
    });
    spread(times.collect())
}

fn install(node: &Node) {
    let mut install = Command::new(env!("CARGO_BIN_EXE_portcullis"));
    install.args(["install", "agent", "--user", "--directory"]).arg(node.file("units"));
    let output = install.env("HOME", node.file("")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn write(node: &Node, unit: &str, text: &str) {
    std::fs::write(node.file("units").join(unit), text).unwrap();
}
