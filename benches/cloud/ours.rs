//! The Portcullis controller, with an environment that results in the same groups: a machine for
//! each group, and a unit on each machine.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use aws_sdk_ec2::types::SecurityGroup;
use portcullis::model::ports::parse_argument;
use portcullis::model::{MachineId, UnitId};
use portcullis::store::{Deploy, Environment, UnitPorts, ZkTree};
use tokio::runtime::Runtime;

use crate::cloud::Account;
use crate::controller::{self, Controller, environment};
use crate::harness::{Store, wait_for};
use crate::operator::Operator;
use crate::{Figures, PORTS, SWAPPED, figure};

const DEADLINE: Duration = Duration::from_secs(300);

/// Longer than any pause between two requests of a controller that still has work.
const QUIET: Duration = Duration::from_secs(2);

pub(crate) struct Bench<'a> {
    runtime: &'a Runtime,
    pub(crate) account: Account,
    pub(crate) operator: Operator,
    environment: Environment<ZkTree>,
    groups: u32,
}

pub(crate) fn measure(runtime: &Runtime, behind: SocketAddr, groups: u32) -> Figures {
    let store = Store::keeper();
    let bench = Bench::new(runtime, behind, &store, groups);
    bench.populate();
    let controller = bench.controller("first");
    bench.is_quiet();

    bench.forget();
    let began = Instant::now();
    bench.operator.does(&["expose", "bench"]);
    let done = bench.answered("Authorize");
    let made = figure(&bench.account.front, done - began);
    bench.has(&PORTS);
    bench.is_quiet();

    // The other tools must run to find that there is nothing to do; for the controller, that is a
    // restart.
    controller.stop();
    bench.forget();
    let began = Instant::now();
    let controller = bench.controller("second");
    let last = bench.is_quiet();
    let looked = figure(&bench.account.front, last - began);

    bench.forget();
    let began = Instant::now();
    bench.swap();
    let done = bench.answered("Authorize").max(bench.answered("Revoke"));
    let swapped = figure(&bench.account.front, done - began);
    bench.has(&SWAPPED);
    controller.stop();
    [made, looked, swapped]
}

impl<'a> Bench<'a> {
    pub(crate) fn new(runtime: &'a Runtime, behind: SocketAddr, store: &Store, groups: u32) -> Self {
        let operator = Operator::with_store(&store.addr().to_string());
        operator.does(&["bootstrap"]);
        let environment = runtime.block_on(environment(&operator, &store.addr().to_string()));
        Self { runtime, account: runtime.block_on(Account::new(behind)), operator, environment, groups }
    }

    /// Creates machines with instances and empty groups, and a unit on each that opens its ports.
    pub(crate) fn populate(&self) {
        self.runtime.block_on(async {
            let vpc = self.account.default_vpc().await;
            let store = &self.environment.info().cluster_id;
            for machine in 0..self.groups {
                let instance = self.account.make_machine(store, &vpc, machine).await;
                self.environment.add_machine(Some(instance.parse().unwrap())).await.unwrap();
            }
            let deploy = Deploy {
                service: "bench".parse().unwrap(),
                charm: "local:bench-1".parse().unwrap(),
                metadata: serde_json::Map::new(),
                units: 1,
                to: Some(MachineId::new(0)),
            };
            self.environment.deploy(&deploy).await.unwrap();
            for machine in 1..self.groups {
                let service = "bench".parse().unwrap();
                self.environment.add_units(&service, 1, Some(MachineId::new(machine))).await.unwrap();
            }
            for unit in 0..self.groups {
                let ports = UnitPorts::new(self.environment.tree(), UnitId::new(unit));
                for port in PORTS {
                    ports.open(parse_argument(&port.to_string()).unwrap()).await.unwrap();
                }
            }
        });
    }

    fn swap(&self) {
        self.runtime.block_on(async {
            for unit in 0..self.groups {
                let ports = UnitPorts::new(self.environment.tree(), UnitId::new(unit));
                ports.close(parse_argument(&PORTS[2].to_string()).unwrap()).await.unwrap();
                ports.open(parse_argument(&SWAPPED[2].to_string()).unwrap()).await.unwrap();
            }
        });
    }

    fn controller(&self, name: &str) -> Controller {
        let command = controller::command(&self.operator, &self.account, "ec2", &["--resync", "3600"]);
        Controller::start(command, &self.operator, name)
    }

    fn forget(&self) {
        self.account.front.take_counts();
        self.account.front.take_spans();
    }

    /// Waits until there is one such request for each group; returns the time of the last reply.
    fn answered(&self, action: &str) -> Instant {
        wait_for(action, DEADLINE, || {
            let (count, last) = self.account.front.answered(action);
            last.filter(|_| count >= self.groups as usize)
        })
    }

    /// Waits until the controller has sent requests and has finished; returns the time of the last
    /// reply.
    pub(crate) fn is_quiet(&self) -> Instant {
        wait_for("quiet controller", DEADLINE, || {
            self.account.front.answered("").1.filter(|last| last.elapsed() > QUIET)
        })
    }

    fn has(&self, ports: &[u16; 3]) {
        wait_for("all rules", DEADLINE, || {
            let groups = self.runtime.block_on(self.account.groups());
            (groups.iter().filter(|group| is(group, ports)).count() == self.groups as usize).then_some(())
        });
    }
}

fn is(group: &SecurityGroup, ports: &[u16; 3]) -> bool {
    let mut open: Vec<i32> =
        group.ip_permissions().iter().filter_map(|permission| permission.from_port()).collect();
    open.sort_unstable();
    let mut wanted = ports.map(i32::from);
    wanted.sort_unstable();
    open == wanted
}

/// Creates the groups for the other tools, empty like those of the controller.
pub(crate) async fn make_groups(behind: SocketAddr, groups: u32) -> String {
    let account = Account::new(behind).await;
    let vpc = account.default_vpc().await;
    for number in 0..groups {
        account.make_group(&format!("bench-{number}"), &vpc).await;
    }
    vpc
}
