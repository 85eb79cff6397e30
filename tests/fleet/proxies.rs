//! Proxy services between real nodes: dependencies of systemd units on units of other nodes, the
//! restarts of everything between them, and the messages for everything that cannot work.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::harness::{HANG, binary, ports, wait_for};
use crate::node::Node;
use crate::page::Page;

/// The units of a source. `Wants=` and its stronger relatives differ in the tests.
const PROXY: &str = "hirte-proxy@bar_db.service";
const DEP: &str = "hirte-dep@db.service";
const SLEEP: &str = "[Service]\nExecStart=/bin/sleep infinity\n";

/// Nodes, with an agent each, and one manager. Every process can be killed and started again.
struct Fleet {
    nodes: BTreeMap<&'static str, Node>,
    running: BTreeMap<&'static str, Child>,
    dir: tempfile::TempDir,
    port: u16,
}

impl Fleet {
    /// Starts the nodes foo, bar and baz. foo and baz may depend on bar, and bar on foo.
    fn start() -> Self {
        Self::with_rules(
            "[node foo]\nAllowDependenciesOn=bar\n[node baz]\nAllowDependenciesOn=bar\n\
                          [node bar]\nAllowDependenciesOn=foo\n",
        )
    }

    fn with_rules(rules: &str) -> Self {
        let nodes: BTreeMap<_, _> = ["foo", "bar", "baz"].map(|name| (name, Node::start())).into();
        let dir = tempfile::tempdir().unwrap();
        binary("hirte-proxy");
        let (running, port) = (BTreeMap::new(), ports::free());
        let mut fleet = Self { nodes, running, dir, port };
        let names = "[hirte]\nAllowedNodeNames=foo,bar,baz,absent\n";
        fs::write(fleet.dir.path().join("manager.conf"), format!("{names}{rules}")).unwrap();
        for name in ["foo", "bar", "baz"] {
            fleet.install_templates(name);
            fleet.write_unit(name, "db.service", SLEEP);
        }
        fleet.start_manager();
        ["foo", "bar", "baz"].into_iter().for_each(|name| fleet.start_agent(name));
        fleet.wait_until_online();
        fleet
    }

    fn install_templates(&self, name: &str) {
        let units = self.nodes[name].file("units");
        let mut install = Command::new(binary("portcullis"));
        install.args(["install", "agent", "--user", "--directory"]).arg(units);
        let output = install.env("HOME", self.dir.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        // These nodes have no journal.
        let drop_in = self.nodes[name].file("units/hirte-proxy@.service.d");
        fs::create_dir(&drop_in).unwrap();
        let to_file = "[Service]\nStandardError=append:/run/node/helper.log\n";
        fs::write(drop_in.join("log.conf"), to_file).unwrap();
    }

    /// The messages of the helper on a node.
    fn helper_log(&self, name: &str) -> String {
        fs::read_to_string(self.nodes[name].file("helper.log")).unwrap_or_default()
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary(program));
        command.args(arguments).env("HOME", self.dir.path()).stdin(Stdio::null());
        command
    }

    fn spawn(&mut self, name: &'static str, arguments: &[&str]) {
        let log = File::options().create(true).append(true).open(self.dir.path().join(format!("{name}.log")));
        let log = log.unwrap();
        let mut command = self.command("portcullis", arguments);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.running.insert(name, command.spawn().unwrap());
    }

    /// Starts the manager on the bus of foo.
    fn start_manager(&mut self) {
        let config = self.dir.path().join("manager.conf").display().to_string();
        let (listen, bus) = (format!("127.0.0.1:{}", self.port), self.nodes["foo"].address());
        let fixed = ["manager", "--config", &config, "--listen", &listen, "--bus", &bus];
        self.spawn("manager", &[&fixed[..], &["--proxy-grace", "60s"]].concat());
    }

    fn start_agent(&mut self, name: &'static str) {
        let state = self.dir.path().join(name).display().to_string();
        let (manager, bus) = (format!("127.0.0.1:{}", self.port), self.nodes[name].address());
        let fixed = ["agent", "--name", name, "--manager", &manager, "--bus", &bus];
        self.spawn(name, &[&fixed[..], &["--state-dir", &state]].concat());
    }

    /// Ends a process with SIGKILL.
    fn kill(&mut self, name: &str) {
        let mut child = self.running.remove(name).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn hirtectl(&self, arguments: &[&str]) -> Option<Value> {
        let bus = self.nodes["foo"].address();
        let output = self.command("hirtectl", &["--bus", &bus]).args(arguments).arg("--json").output();
        let output = output.unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        // The manager may have been killed.
        assert!(output.status.success() || errors.contains("manager"), "{arguments:?}: {errors}");
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    fn wait_until_online(&self) {
        wait_for("online nodes", HANG, || {
            let nodes = self.hirtectl(&["list-nodes"])?;
            let is_online = |node: &&Value| node["status"] == "online";
            (nodes.as_array()?.iter().filter(is_online).count() == 3).then_some(())
        });
    }

    /// Writes a unit file, and has systemd read it.
    fn write_unit(&self, node: &str, unit: &str, text: &str) {
        fs::write(self.nodes[node].file("units").join(unit), text).unwrap();
        self.nodes[node].systemctl(&["daemon-reload"]);
    }

    /// Writes `need-db.service` on a node, with this relation to the proxy.
    fn write_source(&self, node: &str, relation: &str) {
        self.write_unit(
            node,
            "need-db.service",
            &format!("[Unit]\n{relation}={PROXY}\nAfter={PROXY}\n{SLEEP}"),
        );
    }

    fn systemctl(&self, node: &str, arguments: &[&str]) {
        self.nodes[node].systemctl(arguments);
    }

    /// Starts a unit, whether it succeeds or not. Returns whether it did.
    fn start_unit(&self, node: &str, unit: &str) -> bool {
        let mut command = self.nodes[node].command("systemctl");
        command.args(["--user", "start", unit]).output().unwrap().status.success()
    }

    fn state(&self, node: &str, unit: &str) -> String {
        self.nodes[node].property(unit, "ActiveState")
    }

    #[track_caller]
    fn assert_states(&self, expected: &[(&str, &str, &str)]) {
        for (node, unit, state) in expected {
            assert_eq!(self.state(node, unit), *state, "{unit} on {node}");
        }
    }

    /// Waits until units have these states.
    #[track_caller]
    fn wait_for_states(&self, expected: &[(&str, &str, &str)]) {
        for (node, unit, state) in expected {
            wait_for(&format!("{unit} on {node} to be {state}"), HANG, || {
                (self.state(node, unit) == *state).then_some(())
            });
        }
    }

    fn pid(&self, node: &str, unit: &str) -> String {
        let pid = self.nodes[node].property(unit, "MainPID");
        assert_ne!(pid, "0", "{unit} on {node} does not run");
        pid
    }

    /// The list of the proxies as text, for a search.
    fn deps(&self) -> String {
        self.hirtectl(&["deps"]).map_or_else(String::new, |deps| deps.to_string())
    }

    /// Waits until every connected node has announced its proxies, so that a stop of a target is
    /// passed on.
    fn wait_for_active_proxies(&self, count: usize) {
        wait_for("active proxies", HANG, || {
            let listed = self.deps().matches("\"state\":\"active\"").count();
            (listed == count).then_some(())
        });
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            let _ = (child.kill(), child.wait());
        }
        if std::thread::panicking() {
            for name in ["manager", "foo", "bar", "baz"] {
                let log = fs::read_to_string(self.dir.path().join(format!("{name}.log")));
                eprintln!("log of {name}:\n{}", log.unwrap_or_default());
            }
        }
    }
}

const ALL_ACTIVE: &[(&str, &str, &str)] = &[
    ("foo", "need-db.service", "active"),
    ("foo", PROXY, "active"),
    ("bar", DEP, "active"),
    ("bar", "db.service", "active"),
];

#[test]
fn a_source_starts_its_target_and_the_last_one_releases_it() {
    let fleet = Fleet::start();
    fleet.write_source("foo", "Wants");
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.assert_states(ALL_ACTIVE);
    // A second source on the same node uses the same proxy, one on another node has its own.
    fleet.write_unit("foo", "other.service", &format!("[Unit]\nWants={PROXY}\nAfter={PROXY}\n{SLEEP}"));
    fleet.write_source("baz", "Wants");
    let pid = fleet.pid("bar", "db.service");
    fleet.systemctl("foo", &["start", "other.service"]);
    fleet.systemctl("baz", &["start", "need-db.service"]);
    fleet.assert_states(&[("baz", PROXY, "active")]);
    fleet.systemctl("foo", &["stop", "need-db.service"]);
    fleet.assert_states(&[("foo", PROXY, "active")]);
    fleet.systemctl("foo", &["stop", "other.service"]);
    fleet.wait_for_states(&[("foo", PROXY, "inactive")]);
    fleet.assert_states(&[("bar", DEP, "active")]);
    fleet.systemctl("baz", &["stop", "need-db.service"]);
    fleet.wait_for_states(&[("baz", PROXY, "inactive"), ("bar", DEP, "inactive")]);
    assert_eq!(fleet.pid("bar", "db.service"), pid, "the target runs on");
    assert_eq!(fleet.hirtectl(&["deps"]).unwrap(), Value::Array(Vec::new()));
    // With StopWhenUnneeded= the target stops, too.
    fleet.systemctl("bar", &["stop", "db.service"]);
    fleet.write_unit("bar", "db.service", &format!("[Unit]\nStopWhenUnneeded=yes\n{SLEEP}"));
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.assert_states(ALL_ACTIVE);
    fleet.systemctl("foo", &["stop", "need-db.service"]);
    fleet.wait_for_states(&[("bar", "db.service", "inactive")]);
}

#[test]
fn the_units_of_the_tutorial_work() {
    let page = Page::read("docs/tutorials/proxy-services.md");
    let units: Vec<_> = page.blocks.iter().filter(|block| block.text.contains("[Service]")).collect();
    let rules = page.blocks.iter().find(|block| block.text.starts_with("[hirte]")).unwrap();
    let rules = rules.text.split_once("[node foo]").unwrap().1;
    let fleet = Fleet::with_rules(&format!("[node foo]{rules}\n"));
    for (node, unit, block) in [("foo", "need-db.service", 0), ("bar", "db.service", 1)] {
        fleet.write_unit(node, unit, &units[block].text);
    }
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.assert_states(ALL_ACTIVE);
    fleet.systemctl("foo", &["stop", "need-db.service"]);
    fleet.wait_for_states(&[
        ("foo", PROXY, "inactive"),
        ("bar", DEP, "inactive"),
        ("bar", "db.service", "active"),
    ]);
}

#[test]
fn a_target_that_stops_ends_its_proxies() {
    let fleet = Fleet::start();
    for (relation, stop, source) in [
        ("Wants", &["stop", "db.service"][..], "active"),
        ("Requires", &["stop", "db.service"], "inactive"),
        ("BindsTo", &["stop", "db.service"], "inactive"),
        ("BindsTo", &["kill", "--signal=KILL", "db.service"], "inactive"),
    ] {
        fleet.write_source("foo", relation);
        fleet.systemctl("bar", &["reset-failed"]);
        fleet.systemctl("foo", &["start", "need-db.service"]);
        fleet.assert_states(ALL_ACTIVE);
        fleet.systemctl("bar", stop);
        fleet.wait_for_states(&[("foo", PROXY, "inactive"), ("foo", "need-db.service", source)]);
        fleet.wait_for_states(&[("bar", DEP, "inactive")]);
        fleet.systemctl("foo", &["stop", "need-db.service"]);
    }
    // A restart of the target is no end of it.
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.systemctl("bar", &["restart", "db.service"]);
    fleet.systemctl("bar", &["stop", DEP]);
    fleet.wait_for_states(&[("bar", DEP, "active")]);
    fleet.assert_states(ALL_ACTIVE);
}

#[test]
fn restarts_of_manager_and_agents_change_nothing() {
    let mut fleet = Fleet::start();
    fleet.write_unit("bar", "db.service", &format!("[Unit]\nStopWhenUnneeded=yes\n{SLEEP}"));
    fleet.write_source("foo", "BindsTo");
    fleet.systemctl("foo", &["start", "need-db.service"]);
    let pids = (fleet.pid("bar", "db.service"), fleet.pid("foo", "need-db.service"));
    for killed in [&["manager"][..], &["foo"], &["bar"], &["manager", "foo", "bar"]] {
        killed.iter().for_each(|name| fleet.kill(name));
        for name in killed {
            match *name {
                "manager" => fleet.start_manager(),
                "foo" => fleet.start_agent("foo"),
                _ => fleet.start_agent("bar"),
            }
        }
        fleet.wait_until_online();
        fleet.wait_for_active_proxies(1);
        fleet.assert_states(ALL_ACTIVE);
    }
    assert_eq!((fleet.pid("bar", "db.service"), fleet.pid("foo", "need-db.service")), pids);
    fleet.systemctl("bar", &["stop", "db.service"]);
    fleet.wait_for_states(&[("foo", PROXY, "inactive"), ("foo", "need-db.service", "inactive")]);
    // A target that stops while the agent of its source does not run.
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.kill("foo");
    fleet.systemctl("bar", &["stop", "db.service"]);
    fleet.start_agent("foo");
    fleet.wait_for_states(&[("foo", PROXY, "inactive"), ("foo", "need-db.service", "inactive")]);
    // A source that stops meanwhile.
    fleet.systemctl("foo", &["start", "need-db.service"]);
    fleet.kill("foo");
    fleet.systemctl("foo", &["stop", "need-db.service", PROXY]);
    fleet.start_agent("foo");
    fleet.wait_for_states(&[("bar", DEP, "inactive"), ("bar", "db.service", "inactive")]);
}

#[test]
fn failures_have_their_reasons() {
    let mut fleet = Fleet::start();
    let started = |fleet: &Fleet, proxy: &str| {
        fleet.write_unit(
            "foo",
            "source.service",
            &format!("[Unit]\nRequires={proxy}\nAfter={proxy}\n{SLEEP}"),
        );
        assert!(!fleet.start_unit("foo", "source.service"), "{proxy}");
        fleet.assert_states(&[("foo", proxy, "failed"), ("foo", "source.service", "inactive")]);
    };
    fleet.write_unit("bar", "typo.service", "[Service]\nExecStrat=/bin/true\n");
    fleet.write_unit("bar", "failing.service", "[Service]\nType=oneshot\nExecStart=/bin/false\n");
    for (proxy, reason) in [
        ("hirte-proxy@nowhere_db.service", "the manager has no node 'nowhere'"),
        (
            "hirte-proxy@baz_db.service",
            "node 'foo' may not depend on node 'baz'; allow it with `juju node allow",
        ),
        ("hirte-proxy@bar_missing.service", "Unit missing.service not found"),
        ("hirte-proxy@bar_typo.service", "Unit typo.service has a bad unit file setting"),
        ("hirte-proxy@bar_failing.service", "failing.service on node bar did not start"),
        (
            "hirte-proxy@bardb.service",
            "the name of a proxy service has the form hirte-proxy@NODE_UNIT.service",
        ),
    ] {
        started(&fleet, proxy);
        let deps = fleet.deps();
        assert!(deps.contains(reason), "{proxy}: {deps}");
        let log = fleet.helper_log("foo");
        assert!(log.contains("error: ") && log.contains(reason), "{proxy}: {log}");
    }
    fleet.kill("manager");
    started(&fleet, PROXY);
    let log = fleet.helper_log("foo");
    assert!(log.contains("error: the manager cannot be reached"), "{log}");
    fleet.start_manager();
    fleet.wait_until_online();
    wait_for("the failure", HANG, || fleet.deps().contains("the manager cannot be reached").then_some(()));
    fleet.assert_states(&[("bar", "db.service", "inactive")]);
}

#[test]
fn a_cancelled_start_is_no_failure() {
    let fleet = Fleet::start();
    let slow = fs::read_to_string(fleet.nodes["bar"].file("units/slow.service")).unwrap();
    fleet.write_unit("bar", "db.service", &slow);
    fleet.write_source("foo", "Wants");
    fleet.systemctl("foo", &["start", "--no-block", "need-db.service"]);
    fleet.wait_for_states(&[("bar", "db.service", "activating")]);
    assert!(fleet.deps().contains("\"state\":\"waiting\""), "{}", fleet.deps());
    fleet.systemctl("foo", &["stop", PROXY]);
    fleet.assert_states(&[("foo", PROXY, "inactive")]);
    // The dep service is not needed any more; its job ends with the target's start.
    fleet.nodes["bar"].let_slow_start();
    fleet.wait_for_states(&[("bar", DEP, "inactive")]);
    wait_for("no proxies", HANG, || (!fleet.deps().contains("waiting")).then_some(()));
}

#[test]
fn units_that_wait_for_each_other_are_refused() {
    let fleet = Fleet::start();
    let (to_bar, to_foo) = ("hirte-proxy@bar_b.service", "hirte-proxy@foo_a.service");
    fleet.write_unit("foo", "a.service", &format!("[Unit]\nRequires={to_bar}\nAfter={to_bar}\n{SLEEP}"));
    fleet.write_unit("bar", "b.service", &format!("[Unit]\nRequires={to_foo}\nAfter={to_foo}\n{SLEEP}"));
    assert!(!fleet.start_unit("foo", "a.service"));
    let path = "bar/b.service -> foo/a.service -> bar/b.service";
    assert!(fleet.deps().contains(&format!("the units wait for each other: {path}")), "{}", fleet.deps());
    fleet.wait_for_states(&[
        ("bar", "hirte-dep@b.service", "inactive"),
        ("foo", "hirte-dep@a.service", "inactive"),
    ]);
}

#[test]
fn names_of_targets_are_taken_as_they_are() {
    let fleet = Fleet::start();
    fleet.write_unit("bar", "db@.service", SLEEP);
    for unit in ["my-db.service", "my_db.service", "my.db.service", "my\\x2ddb.service"] {
        fleet.write_unit("bar", unit, SLEEP);
    }
    for (instance, target) in [
        ("bar_my-db", "my-db.service"),
        ("bar_my_db", "my_db.service"),
        ("bar_my.db", "my.db.service"),
        ("bar_my\\x2ddb", "my\\x2ddb.service"),
        ("bar_db\\x40x", "db@x.service"),
        ("bar_db@y", "db@y.service"),
    ] {
        // A proxy without a source stops at once.
        let proxy = format!("hirte-proxy@{instance}.service");
        let relation = format!("[Unit]\nWants={proxy}\nAfter={proxy}\n{SLEEP}");
        fleet.write_unit("foo", "source.service", &relation);
        fleet.systemctl("foo", &["restart", "source.service"]);
        fleet.assert_states(&[("bar", target, "active"), ("bar", &format!("hirte-dep@{target}"), "active")]);
    }
}
