//! An environment in the keeper, an account in LocalStack, and controllers that use both.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use aws_sdk_ec2::types::{IpPermission, SecurityGroup};
use serde_json::Value;
use tokio::runtime::Handle;

use crate::cloud::{Account, IMAGE};
use crate::controller::{self, Controller, DEADLINE};
use crate::harness::scenario::Site;
use crate::harness::wire::Client;
use crate::harness::{Store, wait_for};
use crate::operator::{Operator, Output, fixture_charm, output_of};

pub(crate) struct World {
    pub(crate) account: Account,
    pub(crate) operator: Operator,
    pub(crate) site: Site,
    runtime: Handle,
}

impl World {
    pub(crate) fn new(store: &Store, name: &str, runtime: Handle, localstack: SocketAddr) -> Self {
        let site = Site { kind: store.kind(), addr: store.addr(), chroot: format!("/{name}") };
        let account = runtime.block_on(Account::new(localstack));
        Self { account, operator: Operator::bootstrapped(&site), site, runtime }
    }

    /// Blocks on a future, for example a request to EC2.
    pub(crate) fn wait<R>(&self, work: impl Future<Output = R>) -> R {
        self.runtime.block_on(work)
    }

    /// Returns `portcullis controller` with the region and credentials of this account.
    pub(crate) fn controller_command(&self, provider: &str, args: &[&str]) -> Command {
        controller::command(&self.operator, &self.account, provider, args)
    }

    /// Returns a controller that launches machines, with a resync every `resync` seconds.
    pub(crate) fn launching_command(&self, resync: u32) -> Command {
        self.command_with(resync, "")
    }

    /// As [`Self::launching_command`], with one more line of settings.
    fn command_with(&self, resync: u32, setting: &str) -> Command {
        let settings = self.operator.home().join("ec2.yaml");
        fs::write(&settings, format!("image: {IMAGE}\ninstance-type: t3.micro\n{setting}\n")).unwrap();
        let (settings, resync) = (settings.display().to_string(), resync.to_string());
        let args = ["--resync", &resync, "--ec2-settings", &settings, "--ec2-zookeeper", "zk.example.com"];
        self.controller_command("ec2", &args)
    }

    pub(crate) fn controller(&self, name: &str, resync: u32) -> Controller {
        let controller = Controller::start(self.launching_command(resync), &self.operator, name);
        controller.wait_for_log("controller ready");
        controller
    }

    /// As [`Self::controller`], with a launched machine and a service on it whose port is open.
    pub(crate) fn exposed(&self, name: &str, resync: u32) -> (Controller, String) {
        let controller = self.controller(name, resync);
        self.operator.does(&["add-machine"]);
        let instance = self.instance(0);
        self.deploy("wordpress", 0);
        self.hook("wordpress/0", "open-port 80");
        self.operator.does(&["expose", "wordpress"]);
        self.has_ports(0, &[80]);
        (controller, instance)
    }

    /// As [`Self::controller`], launching into this subnet.
    pub(crate) fn controller_in(&self, subnet: &str, name: &str) -> Controller {
        let command = self.command_with(3600, &format!("subnet: {subnet}"));
        let controller = Controller::start(command, &self.operator, name);
        controller.wait_for_log("controller ready");
        controller
    }

    pub(crate) fn deploy(&self, service: &str, machine: u32) {
        let (charm, machine) = (fixture_charm("wordpress"), machine.to_string());
        self.operator.does(&["deploy", &charm, service, "--to", &machine]);
    }

    /// Runs a hook tool in the environment of a unit's hook.
    pub(crate) fn hook(&self, unit: &str, tool: &str) {
        let exports = self.operator.does(&["hook-env", unit]).stdout;
        let output = output_of(Command::new("sh").args(["-c", &format!("{exports}{tool}")]));
        assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{tool}: {output:?}");
    }

    /// Returns a machine from `juju status`.
    pub(crate) fn machine(&self, number: u32) -> Value {
        self.operator.status()["machines"][number.to_string()].clone()
    }

    /// Waits until the machine has an instance, and returns its id.
    #[track_caller]
    pub(crate) fn instance(&self, machine: u32) -> String {
        wait_for("instance", DEADLINE, || {
            let found = self.machine(machine);
            let id = found["instance-id"].as_str().filter(|id| id.starts_with("i-"))?;
            found["dns-name"].is_string().then(|| id.to_owned())
        })
    }

    pub(crate) fn instance_state(&self, id: &str) -> String {
        let request = self.account.other.describe_instances().instance_ids(id);
        let shown = self.wait(request.send()).unwrap();
        let state = shown.reservations()[0].instances()[0].state().unwrap();
        state.name().unwrap().as_str().to_owned()
    }

    pub(crate) fn group(&self, machine: u32) -> Option<SecurityGroup> {
        self.wait(self.account.group(&format!("juju-local-{machine}")))
    }

    pub(crate) fn shared_group(&self) -> Option<SecurityGroup> {
        self.wait(self.account.group("juju-local"))
    }

    /// Returns the ports of a machine that are open to the world.
    pub(crate) fn ports(&self, machine: u32) -> Option<BTreeSet<i32>> {
        let group = self.group(machine)?;
        let world = |permission: &&IpPermission| {
            permission.ip_ranges().iter().any(|range| range.cidr_ip() == Some("0.0.0.0/0"))
        };
        Some(group.ip_permissions().iter().filter(world).filter_map(|p| p.from_port()).collect())
    }

    #[track_caller]
    pub(crate) fn has_ports(&self, machine: u32, ports: &[i32]) {
        let wanted: BTreeSet<i32> = ports.iter().copied().collect();
        let mut last = None;
        wait_for(&format!("machine {machine} with ports {ports:?}"), DEADLINE, || {
            last = self.ports(machine);
            (last.as_ref() == Some(&wanted)).then_some(())
        });
    }

    /// Waits until the output of `juju firewall explain` contains `text`.
    #[track_caller]
    pub(crate) fn wait_for_explanation(&self, machine: u32, text: &str) -> Output {
        wait_for(&format!("explanation with {text:?}"), DEADLINE, || {
            let output = self.operator.juju(&["firewall", "explain", &machine.to_string()]);
            (output.stdout.contains(text) || output.stderr.contains(text)).then_some(output)
        })
    }

    /// Waits until the machine's problem in `juju status` contains `text`.
    #[track_caller]
    pub(crate) fn wait_for_problem(&self, machine: u32, text: &str) {
        wait_for(&format!("status of machine {machine} with {text:?}"), DEADLINE, || {
            let found = self.machine(machine);
            found["problem"].as_str().is_some_and(|problem| problem.contains(text)).then_some(())
        });
    }

    /// Returns the problem in the agent's report on a machine.
    pub(crate) fn problem(&self, machine: u32) -> Option<String> {
        let (data, _) = self.as_operator().get(&self.site.path(&report(machine))).ok()?;
        let report: Value = serde_json::from_slice(&data).unwrap();
        report["problem"].as_str().map(str::to_owned)
    }

    #[track_caller]
    pub(crate) fn has_problem(&self, machine: u32, text: &str) {
        wait_for(&format!("report of machine {machine} with {text:?}"), DEADLINE, || {
            self.problem(machine).filter(|problem| problem.contains(text))
        });
    }

    fn as_operator(&self) -> Client {
        use crate::harness::wire::{Put, op};
        let file = fs::read_to_string(self.operator.config("local.json")).unwrap();
        let held: Value = serde_json::from_str(&file).unwrap();
        let mut client = Client::connect(self.site.addr);
        let auth = Put::new().int(0).bytes("digest").bytes(held["auth"].as_str().unwrap());
        client.send_as(-4, op::AUTH, &auth).unwrap();
        assert_eq!(client.receive().unwrap().err, 0);
        client
    }

    /// Returns the numbers of changing and of reading requests to EC2 since the last call.
    pub(crate) fn requests(&self) -> (usize, usize) {
        let counts = self.account.front.take_counts();
        let describes = |name: &str| name.starts_with("Describe");
        let reads = counts.iter().filter(|(name, _)| describes(name)).map(|(_, count)| count).sum();
        (counts.values().sum::<usize>() - reads, reads)
    }

    /// Waits until EC2 gets no requests for that long, and returns the numbers of requests until
    /// then.
    pub(crate) fn quiet_for(&self, silence: Duration) -> (usize, usize) {
        let (mut changes, mut reads, mut since) = (0, 0, Instant::now());
        wait_for("quiet", 4 * DEADLINE, || {
            let (more_changes, more_reads) = self.requests();
            if more_changes + more_reads > 0 {
                (changes, reads, since) = (changes + more_changes, reads + more_reads, Instant::now());
            }
            (since.elapsed() >= silence).then_some((changes, reads))
        })
    }
}

fn report(machine: u32) -> String {
    format!("/controller/firewall/machine-{machine:010}")
}
