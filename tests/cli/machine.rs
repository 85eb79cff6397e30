//! `portcullis machine` on a real kernel: two network namespaces joined by a veth pair, the real
//! programs, and real connections. Needs root, `ip` and `nft`.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::controller::open_port;
use crate::faults::as_operator;
use crate::harness::scenario::{Site, on_both_stores};
use crate::harness::{Kind, Store, golden, wait_for};
use crate::netns::{Attempt, Net, SERVER};
use crate::operator::{Operator, fixture_charm, output_of};

/// Longer than the session timeout of a killed agent.
const DEADLINE: Duration = Duration::from_secs(60);

on_both_stores![
    machines_open_the_ports_of_exposed_units,
    closing_one_of_two_adjacent_ports_keeps_the_other,
    a_machine_has_one_agent,
    a_machine_without_valid_credentials_is_refused,
    a_missing_nft_program_is_reported,
];

/// A machine in a network namespace, with an operator.
struct World<'a> {
    site: &'a Site,
    operator: Operator,
    net: Net,
    /// PATH with an `nft` that works on this machine.
    path: String,
}

/// A running agent, killed if the test ends before it does.
pub(crate) struct Agent {
    pub(crate) child: Child,
    pub(crate) log: PathBuf,
}

impl<'a> World<'a> {
    fn new(site: &'a Site) -> Self {
        let operator = Operator::bootstrapped(site);
        operator.does(&["add-machine", "--instance-id", "metal"]);
        let net = Net::new();
        let path = nft_of(&operator, &net);
        Self { site, operator, net, path }
    }

    fn deploy(&self, name: &str) {
        self.operator.does(&["deploy", &fixture_charm("wordpress"), name, "--to", "0"]);
    }

    fn machine(&self, name: &str, more: &[&str]) -> Agent {
        let log = self.operator.home().join(name);
        let child = self
            .operator
            .command("portcullis")
            .env("PATH", &self.path)
            .args(["--log-level", "info", "machine", "--id", "0", "--firewall", "nftables", "--resync", "2"])
            .args(more)
            .stdout(Stdio::null())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("portcullis starts");
        Agent { child, log }
    }

    fn listen(&self) -> (TcpListener, SocketAddr) {
        let listener = self.net.listen(SERVER);
        let taken = listener.try_clone().expect("a second handle");
        // Accepts every connection: a full queue would look like a firewall. Ends with the test's
        // process.
        std::thread::spawn(move || taken.incoming().for_each(drop));
        let to = listener.local_addr().expect("an address");
        (listener, to)
    }

    #[track_caller]
    fn wait_for_connect(&self, to: SocketAddr, wanted: Attempt) {
        wait_for(&format!("{wanted:?} at {to}"), DEADLINE, || (self.net.attempt(to) == wanted).then_some(()));
    }

    /// Waits until `firewall explain` contains the text, and returns it. Rules change before the
    /// report.
    #[track_caller]
    fn wait_for_explanation(&self, text: &str) -> String {
        wait_for(text, DEADLINE, || {
            Some(self.operator.does(&["firewall", "explain", "0"]).stdout)
                .filter(|printed| printed.contains(text))
        })
    }

    fn open(&self, unit: (&str, u32), to: SocketAddr) {
        open_port(&self.operator, self.site, unit, &to.port().to_string());
    }
}

/// Returns a PATH whose `nft` works in the machine's network namespace.
fn nft_of(operator: &Operator, net: &Net) -> String {
    let path = std::env::var("PATH").expect("a PATH");
    let nft = std::env::split_paths(&path).map(|dir| dir.join("nft")).find(|nft| nft.is_file()).expect("nft");
    let inside = net.nft_command();
    let directory = operator.home().join("bin");
    fs::create_dir_all(&directory).expect("a directory");
    let script =
        format!("#!/bin/sh\nexec {} {} \"$@\"\n", inside[..inside.len() - 1].join(" "), nft.display());
    fs::write(directory.join("nft"), script).expect("a script");
    fs::set_permissions(directory.join("nft"), fs::Permissions::from_mode(0o755)).expect("executable");
    format!("{}:{path}", directory.display())
}

impl Agent {
    fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    /// Adds its error to the golden file of this test.
    pub(crate) fn record(&self, code: Option<i32>) {
        let printed = self.log();
        let is_error = |line: &&str| line.starts_with("error: ") || line.starts_with("hint: ");
        let error: String = printed.lines().filter(is_error).map(|line| format!("{line}\n")).collect();
        golden::record("portcullis machine --id 0", "", &error, code.expect("an exit code"));
    }

    #[track_caller]
    fn wait_for_log(&self, text: &str) {
        wait_for(text, DEADLINE, || self.log().contains(text).then_some(()));
    }

    fn kill9(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    fn stop(mut self, signal: &str) -> Option<i32> {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        self.end()
    }

    pub(crate) fn end(&mut self) -> Option<i32> {
        wait_for("end of the agent", DEADLINE, || self.child.try_wait().expect("wait")).code()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the agent:\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        }
        // The process has ended already, unless the test failed.
        let _ = (self.child.kill(), self.child.wait());
    }
}

fn machines_open_the_ports_of_exposed_units(site: &Site) {
    let world = World::new(site);
    let (operator, net) = (&world.operator, &world.net);
    world.deploy("wordpress");
    world.deploy("mysql");
    let (_web, web) = world.listen();
    let (_sql, sql) = world.listen();
    let (_spare, spare) = world.listen();
    let (_way_in, way_in) = world.listen();
    let protect = ["--protect", &way_in.port().to_string()];
    let mut agent = world.machine("first.log", &protect);
    agent.wait_for_log("holding the machine");
    world.wait_for_connect(web, Attempt::Refused);
    assert_eq!(net.attempt(way_in), Attempt::Connected, "the way in stays open");

    // A port opens only if it is requested and its service is exposed.
    world.open(("wordpress/0", 0), web);
    operator.does(&["expose", "mysql"]);
    world.open(("mysql/0", 1), sql);
    world.wait_for_connect(sql, Attempt::Connected);
    assert_eq!(net.attempt(web), Attempt::Refused, "asked for, and not exposed");
    operator.does(&["expose", "wordpress"]);
    world.wait_for_connect(web, Attempt::Connected);
    let wait_for_explanation = world.wait_for_explanation(&format!("{}/tcp  open  wordpress/0", web.port()));
    assert!(
        wait_for_explanation.starts_with("firewall: nftables on the machine itself\n"),
        "{wait_for_explanation}"
    );
    assert_eq!(operator.juju(&["firewall", "plan"]).code, 0);
    assert_eq!(operator.status()["machines"]["0"]["agent-state"], "running");

    // Other sources are rejected.
    operator.does(&["expose", "wordpress", "--to", "192.0.2.0/24"]);
    world.wait_for_connect(web, Attempt::Refused);
    operator.does(&["expose", "wordpress"]);
    world.wait_for_connect(web, Attempt::Connected);

    unreadable_ports_stay_open(&world, site, (web, sql));
    let log = operator.does(&["firewall", "log", "--unit", "wordpress/0"]).stdout;
    let opened = format!("machine 0  open {}/tcp to 0.0.0.0/0, ::/0 for wordpress/0: done", web.port());
    assert!(log.lines().any(|line| line.ends_with(&opened)), "{log}");
    // Both units open the same port, maybe in one step, which then names both units.
    let is_its_own = |line: &str| line.contains("wordpress/0") || line.contains("  service wordpress  ");
    assert!(log.lines().all(is_its_own), "{log}");

    // The agent is killed, the tree changes, and the nftables table is lost, as after a reboot.
    agent.kill9();
    operator.does(&["expose", "mysql"]);
    operator.does(&["unexpose", "wordpress"]);
    net.nft(&["delete table inet portcullis-local"]);
    assert_eq!(net.attempt(spare), Attempt::Connected, "no agent holds the machine");
    let agent = world.machine("second.log", &protect);
    world.wait_for_connect(spare, Attempt::Refused);
    assert_eq!((net.attempt(web), net.attempt(sql)), (Attempt::Refused, Attempt::Connected));
    assert_eq!(net.attempt(way_in), Attempt::Connected);

    // After a graceful stop, open ports stay open, and the tree reports that the agent is down.
    assert_eq!(agent.stop("-TERM"), Some(0));
    assert_eq!((net.attempt(web), net.attempt(sql)), (Attempt::Refused, Attempt::Connected));
    world.wait_for_explanation("problem: the machine's agent is down");
}

/// Makes the ports of wordpress unreadable: they stay open, and those of mysql close.
fn unreadable_ports_stay_open(world: &World, site: &Site, (web, sql): (SocketAddr, SocketAddr)) {
    let (operator, net) = (&world.operator, &world.net);
    let ports = site.path("/units/unit-0000000000/ports");
    let mut client = as_operator(operator, site);
    let (whole, _) = client.get(&ports).expect("ports");
    client.set_if_version(&ports, b"{garbage", -1).expect("written");
    operator.does(&["unexpose", "mysql"]);
    world.wait_for_connect(sql, Attempt::Refused);
    assert_eq!(net.attempt(web), Attempt::Connected, "frozen as it was");
    let wait_for_explanation = world.wait_for_explanation("frozen");
    assert!(wait_for_explanation.contains("unit-0000000000/ports: "), "{wait_for_explanation}");
    let frozen = operator.juju(&["status", "--format", "json"]);
    assert_eq!(frozen.code, 1, "{frozen:?}");
    let frozen: serde_json::Value = serde_json::from_str(&frozen.stdout).expect("JSON");
    let unit = &frozen["services"]["wordpress"]["units"]["wordpress/0"];
    assert_eq!(unit["firewall"], "pending", "{unit}");
    client.set_if_version(&ports, &whole, -1).expect("written");
}

/// The kernel lists adjacent ports as one range. Closing one of them keeps the other open, although
/// the unit that requested it cannot be read.
fn closing_one_of_two_adjacent_ports_keeps_the_other(site: &Site) {
    let world = World::new(site);
    world.deploy("wordpress");
    world.deploy("mysql");
    let (_web, web) = world.listen();
    let neighbour =
        SocketAddr::new(web.ip(), if web.port() == u16::MAX { web.port() - 1 } else { web.port() + 1 });
    world.open(("wordpress/0", 0), web);
    world.open(("mysql/0", 1), neighbour);
    world.operator.does(&["expose", "wordpress"]);
    world.operator.does(&["expose", "mysql"]);
    let agent = world.machine("agent.log", &[]);
    world.wait_for_connect(web, Attempt::Connected);
    world.wait_for_explanation(&format!("{}/tcp  open  mysql/0", neighbour.port()));

    let ports = site.path("/units/unit-0000000000/ports");
    as_operator(&world.operator, site).set_if_version(&ports, b"{garbage", -1).expect("written");
    world.wait_for_explanation("frozen");
    world.operator.does(&["unexpose", "mysql"]);
    wait_for("a close", DEADLINE, || {
        let log = world.operator.does(&["firewall", "log"]).stdout;
        log.lines().any(|line| line.contains("close ") && line.ends_with(": done")).then_some(())
    });
    assert_eq!(world.net.attempt(web), Attempt::Connected, "frozen as it was");
    assert_eq!(agent.stop("-TERM"), Some(0));
}

/// Without `nft`, the agent reports the problem, continues, and applies the rules once `nft`
/// exists.
fn a_missing_nft_program_is_reported(site: &Site) {
    let mut world = World::new(site);
    world.deploy("wordpress");
    let (_web, web) = world.listen();
    let (_spare, spare) = world.listen();
    world.open(("wordpress/0", 0), web);
    world.operator.does(&["expose", "wordpress"]);
    let (nft, aside) = (world.operator.home().join("bin/nft"), world.operator.home().join("bin/aside"));
    fs::rename(&nft, &aside).unwrap();
    let whole = std::mem::replace(&mut world.path, world.operator.home().join("bin").display().to_string());
    let agent = world.machine("agent.log", &[]);
    let problem = "machine 0 cannot be used: the program 'nft' was not found; is nftables installed?";
    world.wait_for_explanation(&format!("problem: {problem}"));
    let status = world.operator.status();
    assert_eq!(status["machines"]["0"]["problem"], problem);
    assert_eq!(status["machines"]["0"]["agent-state"], "running", "it goes on");
    let unit = &status["services"]["wordpress"]["units"]["wordpress/0"];
    assert_eq!(unit["firewall"], "pending", "{unit}");
    assert!(unit["firewall-info"][0].as_str().is_some_and(|why| why.ends_with(problem)), "{unit}");
    let plan = world.operator.juju(&["firewall", "plan"]);
    assert!(plan.code == 2 && plan.stdout.contains(problem), "{plan:?}");
    // The script needs the rest of the path; the agent found its program by name.
    let script = fs::read_to_string(&aside).unwrap().replacen(
        "exec ",
        &format!("PATH={whole}; export PATH; exec "),
        1,
    );
    fs::write(&nft, script).unwrap();
    fs::set_permissions(&nft, fs::Permissions::from_mode(0o755)).unwrap();
    world.wait_for_connect(spare, Attempt::Refused);
    assert_eq!(world.net.attempt(web), Attempt::Connected);
    wait_for("an end of the problem", DEADLINE, || {
        world.operator.status()["machines"]["0"].get("problem").is_none().then_some(())
    });
    assert_eq!(agent.stop("-TERM"), Some(0));
}

fn a_machine_has_one_agent(site: &Site) {
    let world = World::new(site);
    let first = world.machine("first.log", &[]);
    first.wait_for_log("holding the machine");
    let mut second = world.machine("second.log", &[]);
    second.wait_for_log("waiting for the machine");
    assert_eq!(second.end(), Some(1));
    let process = format!("machine 0 already has an agent: process {} on ", first.child.id());
    assert!(second.log().contains(&process), "{}", second.log());
    // The host name and a random token follow.
    let printed = second.log();
    let holder = printed
        .split_once("already has an agent: ")
        .and_then(|(_, rest)| rest.split_once(')'))
        .expect("a holder");
    golden::placeholder(holder.0, "process PID on HOST (TOKEN");
    second.record(Some(1));
    assert_eq!(first.stop("-TERM"), Some(0));
    let third = world.machine("third.log", &[]);
    third.wait_for_log("holding the machine");
    // The agent of a terminated machine removes the table and ends.
    world.operator.does(&["terminate-machine", "0"]);
    let mut third = third;
    assert_eq!(third.end(), Some(3));
    assert!(third.log().contains("error: machine 0 was terminated"), "{}", third.log());
    third.record(Some(3));
    let tables = world.net.nft(&["list tables"]);
    assert!(!tables.contains("portcullis-local"), "{tables}");
    golden::refusals("machine_ends");
}

fn a_machine_without_valid_credentials_is_refused(site: &Site) {
    let operator = Operator::bootstrapped(site);
    operator.does(&["add-machine"]);
    operator.does(&["add-machine"]);
    let machine = |args: &[&str]| output_of(operator.command("portcullis").arg("machine").args(args));
    machine(&["--id", "7"]).is_refusal(1, "Machine 7 was not found");
    machine(&["--id", "x"]).is_refusal(2, "'x' is not a machine");
    machine(&["--id", "0", "--protect", "eighty"]).is_refusal(2, "Invalid port, must be an integer");
    machine(&["--id", "0", "--firewall", "nftables", "--policy", "none"])
        .is_refusal(1, "policy file none does not exist");
    let stranger = Operator::at(site);
    let alone = |args: &[&str]| output_of(stranger.command("portcullis").arg("machine").args(args));
    alone(&["--id", "0"]).is_refusal(3, "no credentials for machine 0: ");
    // Created on the operator's host and copied from there.
    let made = operator.config("local-machines/machine-0000000000.json");
    assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o777, 0o600);
    let copy = stranger.home().join("machine.json");
    fs::copy(&made, &copy).unwrap();
    let wrong = copy.to_str().unwrap();
    alone(&["--id", "1", "--credentials", wrong]).is_refusal(1, "does not allow this with these credentials");
    let text = fs::read_to_string(&copy).unwrap();
    fs::write(&copy, text.replace("auth", "htua")).unwrap();
    alone(&["--id", "0", "--credentials", wrong]).is_refusal(1, "is not a machine file");
    golden::refusals("machine");
}

/// While the store is unreachable, open ports stay open; later changes are applied when it returns.
fn an_unreachable_store_closes_no_ports(kind: Kind) {
    let mut store = Store::start(kind, crate::harness::Options::default());
    let site = Site { kind, addr: store.addr(), chroot: String::new() };
    let world = World::new(&site);
    world.deploy("wordpress");
    let (_web, web) = world.listen();
    world.open(("wordpress/0", 0), web);
    world.operator.does(&["expose", "wordpress"]);
    let (_spare, spare) = world.listen();
    let agent = world.machine("agent.log", &[]);
    world.wait_for_connect(spare, Attempt::Refused);
    world.wait_for_connect(web, Attempt::Connected);
    store.kill9();
    agent.wait_for_log("store lost");
    assert_eq!((world.net.attempt(web), world.net.attempt(spare)), (Attempt::Connected, Attempt::Refused));
    store.restart();
    world.operator.does(&["unexpose", "wordpress"]);
    world.wait_for_connect(web, Attempt::Refused);
    store.kill9();
    assert_eq!(agent.stop("-TERM"), Some(0), "an unreachable store does not prevent a clean exit");
}

#[test]
fn an_unreachable_keeper_closes_no_ports() {
    an_unreachable_store_closes_no_ports(Kind::Keeper);
}

#[test]
fn an_unreachable_zookeeper_closes_no_ports() {
    an_unreachable_store_closes_no_ports(Kind::ZooKeeper);
}

/// An agent whose last pass hangs is stopped, and the next agent does not wait for its session.
#[test]
fn a_hanging_last_pass_releases_the_machine() {
    let store = Store::keeper();
    let site = Site { kind: store.kind(), addr: store.addr(), chroot: String::new() };
    let world = World::new(&site);
    let (nft, begun) = (world.operator.home().join("bin/nft"), world.operator.home().join("begun"));
    let quick = fs::read_to_string(&nft).unwrap();
    // Each call ends in time, but the two calls of a pass together do not.
    let slow = format!("touch {}; sleep 9; exec ", begun.display());
    fs::write(&nft, quick.replacen("exec ", &slow, 1)).unwrap();
    let first = world.machine("first.log", &[]);
    wait_for("a pass", DEADLINE, || begun.exists().then_some(()));
    assert_eq!(first.stop("-TERM"), Some(1));
    let printed = fs::read_to_string(world.operator.home().join("first.log")).unwrap();
    assert!(printed.contains("error: the last pass does not end"), "{printed}");
    fs::write(&nft, quick).unwrap();
    let second = world.machine("second.log", &[]);
    second.wait_for_log("holding the machine");
    assert!(!second.log().contains("waiting for the machine"), "{}", second.log());
    assert_eq!(second.stop("-TERM"), Some(0));
}

/// A charm whose hooks all fail; the start hook requests a port first.
fn failing_charm(operator: &Operator, port: u16) -> String {
    let charm = operator.charm("frail", "name: frail\nsummary: s\ndescription: d\n");
    let hooks = std::path::Path::new(&charm).join("hooks");
    fs::create_dir_all(&hooks).unwrap();
    for (hook, body) in [("start", format!("open-port {port}")), ("exposed", String::new())] {
        fs::write(hooks.join(hook), format!("#!/bin/sh\n{body}\nexit 3\n")).unwrap();
        fs::set_permissions(hooks.join(hook), fs::Permissions::from_mode(0o755)).unwrap();
    }
    charm
}

/// Ports that a hook opened before it failed stay requested, and a failed exposed hook neither
/// opens nor closes a port.
#[test]
fn a_failed_hook_does_not_change_the_firewall() {
    let store = Store::keeper();
    let site = Site { kind: store.kind(), addr: store.addr(), chroot: String::new() };
    let world = World::new(&site);
    let operator = &world.operator;
    let (_web, web) = world.listen();
    let agent = world.machine("agent.log", &[]);
    let state = |wanted: &str| {
        wait_for(wanted, DEADLINE, || {
            let unit = operator.status()["services"]["frail"]["units"]["frail/0"].clone();
            (unit["agent-state"] == wanted).then_some(())
        });
    };
    operator.does(&["deploy", &failing_charm(operator, web.port()), "--to", "0"]);
    state("start-error");
    world.wait_for_connect(web, Attempt::Refused);
    operator.does(&["expose", "frail"]);
    world.wait_for_connect(web, Attempt::Connected);
    operator.does(&["resolved", "frail/0"]);
    state("exposed-error");
    // After a complete pass of the agent.
    world.wait_for_connect(web, Attempt::Connected);
    world.wait_for_explanation(&format!("{}/tcp  open  frail/0", web.port()));
    operator.does(&["unexpose", "frail"]);
    world.wait_for_connect(web, Attempt::Refused);
    state("exposed-error");
    assert_eq!(agent.stop("-TERM"), Some(0));
}
