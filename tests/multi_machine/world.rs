//! An environment with three machines: the operator, the agents, and the controllers.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::ensemble::Ensemble;
use crate::harness::{binary, wait_for};
use crate::net::{Attempt, MACHINES, Net, address};
use crate::operator::{Operator, Output, fixture_charm, output_of};

/// Longer than the session of a killed process lasts on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// So long that no resync happens: every change in these tests is the result of a watch.
const RESYNC: &str = "3600";

pub(crate) struct World<'a> {
    pub(crate) net: &'a Net,
    operator: Operator,
}

/// A running agent or controller; dropping it kills the process.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl<'a> World<'a> {
    pub(crate) fn new(net: &'a Net) -> Self {
        // Built with the programs; the agents look for it in their own directory.
        binary("open-port");
        let world = Self { net, operator: Operator::with_store(&Ensemble::hosts()) };
        world.does(&["bootstrap"]);
        for n in 0..MACHINES {
            world.does(&["add-machine", "--instance-id", &format!("metal-{n}")]);
        }
        world
    }

    fn juju(&self, args: &[&str]) -> Output {
        let mut command = self.operator.command("juju");
        output_of(self.net.on_hub(command.args(args)).stdin(Stdio::null()))
    }

    #[track_caller]
    pub(crate) fn does(&self, args: &[&str]) -> Output {
        let output = self.juju(args);
        assert_eq!(output.code, 0, "juju {args:?}: {output:?}");
        output
    }

    /// Retries a command until it succeeds: the store may be unavailable for a while.
    #[track_caller]
    pub(crate) fn does_in_the_end(&self, args: &[&str]) {
        wait_for(&format!("juju {args:?}"), DEADLINE, || (self.juju(args).code == 0).then_some(()));
    }

    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.does(&["status", "--format", "json"]).stdout).expect("JSON")
    }

    /// Deploys one unit on each machine, in the order of the machines.
    pub(crate) fn deploy_everywhere(&self, charm: &str) {
        self.does(&["deploy", &fixture_charm(charm), "--to", "0"]);
        for n in 1..MACHINES {
            self.does(&["add-unit", charm, "--to", &n.to_string()]);
        }
    }

    fn spawn(&self, name: &str, wrap: impl Fn(&Command) -> Command, args: &[&str]) -> Daemon {
        let log = self.operator.home().join(name);
        let mut command = self.operator.command("portcullis");
        command.args(["--log-level", "info"]).args(args).args(["--resync", RESYNC]);
        let mut command = wrap(&command);
        let output = File::options().create(true).append(true).open(&log).expect("a log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        Daemon { child: command.spawn().expect("portcullis starts"), log }
    }

    pub(crate) fn controller(&self, name: &str) -> Daemon {
        self.spawn(name, |command| self.net.on_hub(command), &["controller", "--provider", "memory"])
    }

    pub(crate) fn agent(&self, machine: usize) -> Daemon {
        let (id, units) = (machine.to_string(), self.units_dir(machine).display().to_string());
        let args = ["machine", "--id", &id, "--firewall", "nftables", "--units-dir", &units];
        self.spawn(&format!("machine-{machine}"), |command| self.net.on_machine(machine, command), &args)
    }

    fn units_dir(&self, machine: usize) -> PathBuf {
        self.operator.home().join(format!("units-{machine}"))
    }

    /// Returns the directory of a unit's charm, if the machine has files of the unit.
    pub(crate) fn charm_dir(&self, service: &str, machine: usize) -> Option<PathBuf> {
        let (units, name) = (self.units_dir(machine), format!("{service}/{machine}"));
        let mut runs = fs::read_dir(units.join("runs")).ok()?.filter_map(Result::ok);
        let found =
            runs.find(|entry| fs::read_to_string(entry.path().join("name")).is_ok_and(|found| found == name));
        Some(units.join("units").join(found?.file_name()).join("charm"))
    }

    /// Returns the address of a unit's port for connections from other machines.
    pub(crate) fn port_addr(&self, service: &str, machine: usize) -> SocketAddr {
        let port = wait_for(&format!("a port of {service}/{machine}"), DEADLINE, || {
            fs::read_to_string(self.charm_dir(service, machine)?.join("port")).ok()?.parse().ok()
        });
        SocketAddr::new(address(machine).parse().unwrap(), port)
    }

    #[track_caller]
    pub(crate) fn becomes(&self, to: SocketAddr, wanted: Attempt) {
        wait_for(&format!("{wanted:?} at {to}"), DEADLINE, || (self.net.attempt(to) == wanted).then_some(()));
    }

    /// Waits until a unit of `hello` serves this page.
    #[track_caller]
    pub(crate) fn page(&self, from: Option<usize>, addr: SocketAddr, wanted: &str) {
        let get = || {
            let mut stream = TcpStream::connect_timeout(&addr, Duration::from_secs(1)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
            stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            answer.ends_with(wanted).then_some(())
        };
        wait_for(&format!("{wanted:?} at {addr}"), DEADLINE, || match from {
            Some(machine) => self.net.machine(machine).enter(get),
            None => self.net.hub().enter(get),
        });
    }

    /// Waits until no change is pending and all machines and units are up.
    #[track_caller]
    pub(crate) fn is_calm(&self) {
        wait_for("a calm status", DEADLINE, || {
            let status = self.status();
            let machines = status["machines"].as_object()?;
            let up = machines
                .values()
                .all(|machine| machine["agent-state"] == "running" && machine.get("problem").is_none());
            let services = status["services"].as_object()?;
            let mut units = services.values().filter_map(|service| service["units"].as_object()).flatten();
            let settled =
                units.all(|(_, unit)| unit["agent-state"] == "started" && unit.get("firewall").is_none());
            (up && settled && machines.len() == MACHINES).then_some(())
        });
    }

    /// Returns the nftables rules of a machine.
    pub(crate) fn rules(&self, machine: usize) -> String {
        let mut nft = Command::new("nft");
        nft.args(["list", "ruleset"]).env("PATH", std::env::var_os("PATH").unwrap());
        output_of(&mut self.net.on_machine(machine, &nft)).stdout
    }
}

impl Daemon {
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    #[track_caller]
    pub(crate) fn says(&self, text: &str) {
        wait_for(text, DEADLINE, || self.has_said(text).then_some(()));
    }

    pub(crate) fn has_said(&self, text: &str) -> bool {
        self.said().lines().any(|line| line.ends_with(text))
    }

    /// Returns the hooks of one unit that this agent ran, in order.
    pub(crate) fn hooks(&self, unit: &str) -> Vec<String> {
        let mark = format!("running hook unit={unit} hook=");
        let said = self.said();
        said.lines().filter_map(|line| Some(line.split_once(&mark)?.1.trim().to_owned())).collect()
    }

    pub(crate) fn kill9(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("gone");
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_none()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("{} said:\n{said}", self.log.display());
        }
        // The process may have ended already.
        let _ = (self.child.kill(), self.child.wait());
    }
}
