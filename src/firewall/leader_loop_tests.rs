//! Tests of the loop's metrics, with paused time and a slow provider.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::memory::MemorySettings;
use portcullis_provider::provider::{MachineNumber, Seen};
use portcullis_provider::rule::Change;
use portcullis_provider::{Applied, Error as ProviderError, Memory};
use tokio::time::sleep;

use super::*;
use crate::firewall::metrics::Metrics;
use crate::firewall::policy::Policy;
use crate::machine::number;
use crate::model::ports::parse_argument;
use crate::model::{MachineId, UnitId};
use crate::store::records::Placement;
use crate::store::{Deploy, MemoryStore, UnitPorts};

/// The duration of each change; shorter than a lease, so that no pass is cut short.
pub(in crate::firewall) const CHANGE: Duration = Duration::from_secs(2);

pub(in crate::firewall) struct Slow(pub Memory);

impl Firewall for Slow {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, ProviderError> {
        self.0.observe(machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        sleep(CHANGE).await;
        self.0.apply(machine, change, until).await
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.0.rules_per_family()
    }
}

/// The number of changes, and their total duration in tenths of a second.
pub(in crate::firewall) fn took(metrics: &Metrics) -> (u32, u32) {
    let text = metrics.render(&Progress::default());
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    let tenths = value("portcullis_firewall_change_seconds_sum") * 10.0;
    (value("portcullis_firewall_change_seconds_count") as u32, tenths.floor() as u32)
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_change_includes_the_pass_before_it() {
    let (store, operator, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
    let provider = Memory::new(MemorySettings::default());
    for name in ["a", "b"] {
        let machine = operator.add_machine(Some(format!("i-{name}").parse().unwrap())).await.unwrap();
        provider.add_group(number(machine));
        let deploy = Deploy {
            service: name.parse().unwrap(),
            charm: format!("local:{name}-1").parse().unwrap(),
            metadata: serde_json::Map::new(),
            units: 1,
            to: Some(machine),
        };
        operator.deploy(&deploy).await.unwrap();
        operator.expose(&name.parse().unwrap()).await.unwrap();
    }
    let (tree, roles) = (store.connect(Some(&controller)), operator.info().roles.clone());
    let policy = Policy::with_own_ports([]);
    let mut controller = FirewallController::new(tree.clone(), Slow(provider), policy, roles.clone(), || 0);
    let metrics = controller.metrics();
    let (stop, stopped) = watch::channel(false);
    let progress = watch::Sender::new(Progress::default());
    let running = run(&mut controller, &tree, &roles, Duration::from_secs(60), &progress, stopped);
    let scenario = async {
        let open = async |unit| {
            let ports = UnitPorts::new(operator.tree(), UnitId::new(unit));
            ports.open(parse_argument("80").unwrap()).await.unwrap();
        };
        sleep(CHANGE).await;
        open(0).await;
        sleep(CHANGE / 4).await;
        open(1).await;
        sleep(2 * CHANGE).await;
        stop.send_replace(true);
    };
    let (ended, ()) = tokio::join!(running, scenario);
    ended.unwrap();
    assert_eq!(took(&metrics), (2, 20 + 35), "the second waited for one and a half seconds");
}

/// A provider whose requests take as long as those of an overloaded cloud.
struct Latent {
    inner: Memory,
    latency: Duration,
}

impl Firewall for Latent {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, ProviderError> {
        sleep(self.latency).await;
        self.inner.observe(machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change, until: Instant) -> Applied {
        if Instant::now() >= until {
            return Applied::as_one(Err(ProviderError::NotBegun { what: machine.into() }));
        }
        sleep(self.latency).await;
        self.inner.apply(machine, change, Instant::now() + LEASE).await
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.inner.rules_per_family()
    }
}

/// Opens and closes one port on each of 20 machines and returns how many passes the close took.
async fn passes_until_closed(latency: Duration, resync: Duration) -> u64 {
    const MACHINES: usize = 20;
    let (store, operator, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
    let provider = Memory::new(MemorySettings::default());
    let mut machines = Vec::new();
    for n in 0..MACHINES {
        let machine = operator.add_machine(Some(format!("i-{n}").parse().unwrap())).await.unwrap();
        provider.add_group(number(machine));
        machines.push(machine);
    }
    let deploy = Deploy {
        service: "web".parse().unwrap(),
        charm: "local:web-1".parse().unwrap(),
        metadata: serde_json::Map::new(),
        units: 0,
        to: None,
    };
    operator.deploy(&deploy).await.unwrap();
    for machine in &machines {
        let added = operator.add_units(&deploy.service, 1, Some(*machine)).await.unwrap();
        let ports = UnitPorts::new(operator.tree(), added[0].id);
        ports.open(parse_argument("80").unwrap()).await.unwrap();
    }
    operator.expose(&deploy.service).await.unwrap();
    let (tree, roles) = (store.connect(Some(&controller)), operator.info().roles.clone());
    let slow = Latent { inner: provider.clone(), latency };
    let mut controller =
        FirewallController::new(tree.clone(), slow, Policy::with_own_ports([]), roles.clone(), || 0);
    let (stop, stopped) = watch::channel(false);
    let progress = watch::Sender::new(Progress::default());
    let running = run(&mut controller, &tree, &roles, resync, &progress, stopped);
    let open = || {
        let has_rules = |machine: &&MachineId| !provider.actual(number(**machine)).unwrap().owned.is_empty();
        machines.iter().filter(has_rules).count()
    };
    let until = async |count: usize| {
        let reached = async {
            while open() != count {
                sleep(Duration::from_millis(100)).await;
            }
        };
        let timeout = Duration::from_secs(600);
        let done = tokio::time::timeout(timeout, reached).await;
        done.unwrap_or_else(|_| panic!("{latency:?}, resync {resync:?}: {} open, not {count}", open()));
    };
    let scenario = async {
        until(MACHINES).await;
        let before = progress.borrow().passes;
        operator.unexpose(&deploy.service).await.unwrap();
        until(0).await;
        stop.send_replace(true);
        progress.borrow().passes - before
    };
    let (ended, passes) = tokio::join!(running, scenario);
    ended.unwrap();
    passes
}

#[tokio::test(start_paused = true)]
async fn unexpose_closes_ports_when_the_provider_is_slow() {
    for latency in [0, 1, 3, 12, 30].map(Duration::from_secs) {
        for resync in [2, 60].map(Duration::from_secs) {
            let passes = passes_until_closed(latency, resync).await;
            assert!(passes <= 12, "{latency:?}, resync {resync:?}: {passes} passes");
        }
    }
}
