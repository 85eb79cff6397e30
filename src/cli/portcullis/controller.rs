//! `portcullis controller`: the firewall controller as a process, with a heartbeat tracker beside
//! it if `--heartbeat` is given. Of several controllers of one environment one leads, and the
//! others stand by. Decisions are in `firewall`; this file connects the store, the provider and the
//! policy.

use std::sync::Arc;

use anyhow::Context as _;
use clap::ValueEnum;
#[cfg(feature = "ec2")]
use portcullis_provider::DryRun;
#[cfg(feature = "ec2")]
use portcullis_provider::ec2::Access;
use portcullis_provider::memory::{Memory, MemorySettings};
use portcullis_provider::{Firewall, Machines};
use tokio::sync::watch;
use tracing::info;
#[cfg(feature = "ec2")]
use tracing::warn;

use crate::cli::args::agent::{AgentArgs, jitter};
use crate::cli::args::ec2;
use crate::cli::args::environment::{Globals, Target};
use crate::cli::args::listen::PlainArgs;
use crate::cli::args::metrics;
use crate::cli::config::Role;
use crate::cli::portcullis::checkpoint_file;
use crate::cli::portcullis::fleet_role::FleetArgs;
use crate::cli::portcullis::heartbeat::{HeartbeatArgs, Reach};
use crate::cli::portcullis::issuer;
use crate::cli::portcullis::up;
use crate::firewall::controller::{FirewallController, PolicyReader};
use crate::firewall::leader_loop::{Progress, run_provisioning};
use crate::firewall::metrics::Metrics;
use crate::firewall::policy::Policy;
use crate::firewall::scratch_provider::ScratchProvider;
use crate::provision::controller::Provisioner;
#[cfg(feature = "ec2")]
use crate::provision::user_data::BootConfig;
use crate::runtime::metrics::Registry;
use crate::runtime::service::{OnEnd, Service, stopped, until_stopped};
use crate::store::rollback::RollbackGuard;
use crate::store::{Address, Environment, ZkTree};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    globals: Globals,
    /// Provider that holds the firewall rules
    #[arg(long, value_enum, value_name = "PROVIDER")]
    provider: Provider,
    #[command(flatten)]
    agent_args: AgentArgs,
    #[command(flatten)]
    heartbeat: HeartbeatArgs,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    plain: PlainArgs,
    #[command(flatten)]
    ec2: ec2::Ec2Args,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Provider {
    /// EC2 security groups; instances are launched for machines that have none
    Ec2,
    /// Reads EC2 and reports what would change, without changing anything
    DryRun,
    /// Rules in the memory of this process only, for experiments
    Memory,
}

impl Args {
    /// Forbids the ports of the store and of this process.
    fn base_policy(&self, store: &Address) -> Policy {
        let own = store.ports().chain(self.agent_args.metrics.port()).chain(self.heartbeat.port());
        let own = own.chain(self.fleet.address().map(|listen| listen.port()));
        Policy::with_own_ports(own)
    }
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let target = args.globals.target_of(Role::Controller)?;
    // First of all: to start without the policy that was named would be worse than not to start.
    let base = args.base_policy(&target.address);
    let policy = args.agent_args.policy(base.clone())?;
    let data = up::data_dir(&target.environment, None);
    let is_needed = args.heartbeat.is_given() || args.fleet.is_given();
    let data = is_needed.then_some(data).transpose()?.unwrap_or_default();
    let place = (args.plain, &*data);
    let tracker = args.heartbeat.open(|| Ok(target.clone()), None, Reach::AnyMachine, place).await?;
    let fleet = args.fleet.open(|| Ok(target.clone()), None, &data)?;
    let registry = Registry::default();
    let (counts, progress) =
        (Metrics::default(), watch::Sender::new(Progress { store_lost: true, ..Progress::default() }));
    metrics::add_firewall(&registry, "firewall", &counts, &progress.subscribe());
    if let Some(tracker) = &tracker {
        tracker.add_metrics(&registry);
    }
    if let Some(fleet) = &fleet {
        fleet.add_metrics(&registry);
    }
    args.agent_args.metrics.start(&mut service, &registry).await?;
    service.next_stage();
    issuer::start(&mut service, target.clone())?;
    let firewall = FirewallRole {
        provider: args.provider,
        ec2: args.ec2.clone(),
        policy,
        policy_reader: args.agent_args.policy_reader(base),
        agent_args: args.agent_args.clone(),
        wait_for_store: tracker.is_some(),
        target,
        counts,
        progress,
    };
    if let Some(mut tracker) = tracker {
        tracker.start_renewal(&mut service);
        service.start("heartbeat", OnEnd::StopOthers, |stop| tracker.run(stop));
        service.next_stage();
    }
    if let Some(fleet) = fleet {
        fleet.start(&mut service, OnEnd::StopOthers);
        service.next_stage();
    }
    service.start("firewall", OnEnd::StopOthers, |stop| firewall.run(stop));
    service.run().await
}

/// The firewall controller and, in EC2, the provisioning of machines.
struct FirewallRole {
    provider: Provider,
    ec2: ec2::Ec2Args,
    policy: Policy,
    /// Reads the policy file again.
    policy_reader: Option<PolicyReader>,
    agent_args: AgentArgs,
    /// Whether to wait for a store that cannot be reached yet. A tracker in the same process
    /// accepts beats meanwhile.
    wait_for_store: bool,
    target: Target,
    counts: Metrics,
    progress: watch::Sender<Progress>,
}

impl FirewallRole {
    async fn run(self, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        match self.provider {
            Provider::Memory => {
                self.ec2.refuse_all()?;
                let firewall = ScratchProvider::new(Memory::new(MemorySettings::default()));
                let Some(environment) = self.open_store(&mut stop).await? else { return Ok(()) };
                self.work(environment, firewall, NO_PROVISIONER, stop).await
            }
            #[cfg(feature = "ec2")]
            Provider::Ec2 => {
                let ec2::Ec2Config { launch, store } = self.ec2.settings(&self.target.address)?;
                if launch.is_some() && store.is_loopback() {
                    warn!(%store, "launched machines cannot reach a store on loopback; set --ec2-zookeeper");
                }
                let access = Access::find().await?;
                let Some(environment) = self.open_store(&mut stop).await? else { return Ok(()) };
                let driver = Arc::new(ec2::connect(&access, environment.info(), launch)?);
                let roles = environment.info().roles.clone();
                let fingerprint = crate::cli::authority::ca_fingerprint(&store)?;
                let boot = BootConfig::new(self.target.environment.clone(), store, fingerprint, roles);
                let tree = environment.tree().clone();
                let provisioner = Provisioner::new(tree, Arc::clone(&driver), boot, jitter);
                Box::pin(self.work(environment, driver, Some(provisioner), stop)).await
            }
            #[cfg(feature = "ec2")]
            Provider::DryRun => {
                let ec2::Ec2Config { launch, .. } = self.ec2.settings(&self.target.address)?;
                let access = Access::find().await?;
                let Some(environment) = self.open_store(&mut stop).await? else { return Ok(()) };
                let driver = DryRun::new(ec2::connect(&access, environment.info(), launch)?);
                Box::pin(self.work(environment, driver, NO_PROVISIONER, stop)).await
            }
            #[cfg(not(feature = "ec2"))]
            Provider::Ec2 | Provider::DryRun => {
                self.ec2.settings(&self.target.address)?;
                Err(crate::cli::error::Refusal::NoEc2.into())
            }
        }
    }

    /// Returns `None` if the role is asked to stop first.
    async fn open_store(
        &self,
        stop: &mut watch::Receiver<bool>,
    ) -> anyhow::Result<Option<Environment<ZkTree>>> {
        if !self.wait_for_store {
            return Ok(Some(self.target.open().await?));
        }
        tokio::select! {
            found = self.target.wait_and_open() => Ok(Some(found?)),
            () = stopped(stop) => Ok(None),
        }
    }

    async fn work<F: Firewall, M: Machines>(
        self,
        environment: Environment<ZkTree>,
        firewall: F,
        provisioner: Option<Provisioner<ZkTree, M>>,
        stop: watch::Receiver<bool>,
    ) -> anyhow::Result<()> {
        let Self { policy, policy_reader, agent_args, counts, progress, .. } = self;
        progress.send_replace(Progress::default());
        let info = environment.info();
        let roles = info.roles.clone();
        let checkpoint = checkpoint_file::open(&info.environment, "controller", &info.cluster_id);
        let guard = Arc::new(RollbackGuard::of_controller(&roles, checkpoint));
        let tree = environment.into_tree();
        let mut agent = FirewallController::new(tree.clone(), firewall, policy, roles.clone(), jitter)
            .with_policy_reader(policy_reader)
            .with_metrics(counts)
            .with_guard(Arc::clone(&guard));
        let mut provisioner = provisioner.map(|provisioner| provisioner.with_guard(guard));
        info!("controller ready");
        let running = run_provisioning(
            &mut agent,
            provisioner.as_mut(),
            &tree,
            &roles,
            agent_args.resync(),
            &progress,
            stop.clone(),
        );
        let ended = until_stopped(running, stop).await;
        drop((agent, provisioner));
        // Ends the session and with it the lease, so that a standby does not wait for its timeout.
        tree.close().await;
        ended
    }
}

/// For providers that launch no machines.
const NO_PROVISIONER: Option<Provisioner<ZkTree, Memory>> = None;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        typed: Args,
    }

    #[test]
    fn the_policy_forbids_the_ports_of_the_process() {
        let policy = |more: &[&str]| {
            let line = [&["controller", "--provider", "memory"], more].concat();
            let typed = Line::try_parse_from(line).unwrap().typed;
            typed.base_policy(&"127.0.0.1:4711,zk2:2182/prod".parse().unwrap())
        };
        assert_eq!(policy(&["--metrics", "127.0.0.1:0"]), Policy::with_own_ports([4711, 2182]));
        let listening = policy(&["--metrics", "127.0.0.1:9420", "--heartbeat", "0.0.0.0:9400"]);
        assert_eq!(listening, Policy::with_own_ports([4711, 2182, 9420, 9400]));
    }
}
