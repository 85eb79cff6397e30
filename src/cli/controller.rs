//! `portcullis controller`: the firewall agent as a process, and beside it a heartbeat tracker if one is asked for. Of several for one environment one leads, and the others
//! stand by. What the agent does is decided in `firewall`; here it gets its store, its provider and its policy.

use std::sync::Arc;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
#[cfg(feature = "ec2")]
use portcullis_provider::DryRun;
#[cfg(feature = "ec2")]
use portcullis_provider::ec2::Access;
use portcullis_provider::memory::{Memory, Settings as MemorySettings};
use portcullis_provider::{Firewall, Machines};
use tokio::sync::watch;
use tracing::info;
#[cfg(feature = "ec2")]
use tracing::warn;

use super::config::Role;
use super::heartbeat_role::{Beside, Reach, Started, look_for_store};
use super::settings::{Globals, Settings};
use super::upkeep::{Upkeep, jitter, last_pass};
use super::{checkpoint_file, ec2, metrics};
use crate::firewall::agent::{Agent, PolicyReader};
#[cfg(feature = "ec2")]
use crate::firewall::boot::Boot;
use crate::firewall::policy::Policy;
use crate::firewall::provisioner::Provisioner;
use crate::firewall::run::{Progress, run_provisioning};
use crate::firewall::trial::Trial;
use crate::runtime::shutdown::Shutdown;
use crate::store::rollback::RollbackGuard;
use crate::store::{Address, Environment, ZkTree};

#[derive(Debug, Args)]
pub(super) struct Typed {
    #[command(flatten)]
    globals: Globals,
    /// Where the rules are made
    #[arg(long, value_enum, value_name = "PROVIDER")]
    provider: Provider,
    #[command(flatten)]
    upkeep: Upkeep,
    #[command(flatten)]
    heartbeat: Beside,
    #[command(flatten)]
    ec2: ec2::Flags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Provider {
    /// Security groups in EC2, and instances for machines that have none
    Ec2,
    /// Looks at EC2 and says what would be changed there, and changes nothing
    DryRun,
    /// Rules that exist in this process alone and end with it: for trying things out
    Memory,
}

impl Typed {
    /// Neither the store nor what we listen on ourselves is ever opened.
    fn base_policy(&self, store: &Address) -> Policy {
        let own = store.ports().chain(self.upkeep.watched.port()).chain(self.heartbeat.port());
        Policy::with_own_ports(own)
    }
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    let settings = args.globals.settings_of(Role::Controller)?;
    // Before anything else is touched: rules made under another policy than the one that was named are worse than none.
    let base = args.base_policy(&settings.address);
    let policy = args.upkeep.policy(base.clone())?;
    let reader = args.upkeep.policy_reader(base);
    let tracker = args.heartbeat.start(|| Ok(settings.clone()), None, Reach::AnyMachine).await?;
    let mut rules = Rules { tracker, policy, reader, upkeep: &args.upkeep };
    match args.provider {
        Provider::Memory => {
            args.ec2.refuse_all()?;
            let firewall = Trial::new(Memory::new(MemorySettings::default()));
            let Some(environment) = rules.store(&settings, &mut shutdown).await? else { return Ok(()) };
            work(environment, firewall, nobody(), rules, shutdown).await
        }
        #[cfg(feature = "ec2")]
        Provider::Ec2 => {
            let ec2::Settings { launch, store } = args.ec2.settings(&settings.address)?;
            if launch.is_some() && store.is_loopback() {
                warn!(%store, "launched machines cannot reach a store on this one: --ec2-zookeeper");
            }
            let access = Access::find().await?;
            let Some(environment) = rules.store(&settings, &mut shutdown).await? else { return Ok(()) };
            let driver = Arc::new(ec2::connect(&access, environment.info(), launch)?);
            let roles = environment.info().roles.clone();
            let boot = Boot::new(settings.environment.clone(), store, roles);
            let tree = environment.tree().clone();
            let provisioner = Provisioner::new(tree, Arc::clone(&driver), boot, jitter);
            Box::pin(work(environment, driver, Some(provisioner), rules, shutdown)).await
        }
        #[cfg(feature = "ec2")]
        Provider::DryRun => {
            let ec2::Settings { launch, .. } = args.ec2.settings(&settings.address)?;
            let access = Access::find().await?;
            let Some(environment) = rules.store(&settings, &mut shutdown).await? else { return Ok(()) };
            let driver = DryRun::new(ec2::connect(&access, environment.info(), launch)?);
            Box::pin(work(environment, driver, nobody(), rules, shutdown)).await
        }
        #[cfg(not(feature = "ec2"))]
        Provider::Ec2 | Provider::DryRun => {
            args.ec2.settings(&settings.address)?;
            Err(super::failure::Refusal::NoEc2.into())
        }
    }
}

/// What holds whoever makes the rules.
struct Rules<'a> {
    policy: Policy,
    /// Reads the policy file again.
    reader: Option<PolicyReader>,
    upkeep: &'a Upkeep,
    /// Beside the firewall, if it was asked for.
    tracker: Option<Started>,
}

impl Rules<'_> {
    /// The store; none if we were asked to stop first. With a tracker beside it is waited for, since beats are taken
    /// before there is one.
    async fn store(
        &mut self,
        settings: &Settings,
        shutdown: &mut Shutdown,
    ) -> anyhow::Result<Option<Environment<ZkTree>>> {
        if self.tracker.is_none() {
            return Ok(Some(settings.open().await?));
        }
        let signal = tokio::select! {
            found = look_for_store(settings) => return Ok(Some(found?)),
            error = Started::failed(&mut self.tracker) => return Err(error),
            signal = shutdown.asked() => signal,
        };
        info!(signal, "stopping");
        if let Some(tracker) = self.tracker.take() {
            tracker.end().await?;
        }
        Ok(None)
    }
}

/// For a provider that has no machines to give.
fn nobody() -> Option<Provisioner<ZkTree, Memory>> {
    None
}

/// Runs the agent until a signal comes, or until it fails in a way that waiting does not cure.
async fn work<F: Firewall, M: Machines>(
    environment: Environment<ZkTree>,
    firewall: F,
    provisioner: Option<Provisioner<ZkTree, M>>,
    rules: Rules<'_>,
    mut shutdown: Shutdown,
) -> anyhow::Result<()> {
    let roles = environment.info().roles.clone();
    let memory =
        checkpoint_file::open(&environment.info().environment, "controller", &environment.info().cluster_id);
    let guard = Arc::new(RollbackGuard::of_controller(&roles, memory));
    let tree = environment.into_tree();
    let Rules { policy, reader, upkeep, mut tracker } = rules;
    let mut agent = Agent::new(tree.clone(), firewall, policy, roles.clone(), jitter)
        .with_policy_reader(reader)
        .with_guard(Arc::clone(&guard));
    let mut provisioner = provisioner.map(|provisioner| provisioner.with_guard(guard));
    let (stop, stopped) = watch::channel(false);
    let (progress, watching) = watch::channel(Progress::default());
    let door = upkeep.watched.open(&agent.metrics(), watching, stopped.clone()).await?;
    info!("controller ready");
    let ended = {
        let mut running = std::pin::pin!(run_provisioning(
            &mut agent,
            provisioner.as_mut(),
            &tree,
            &roles,
            upkeep.resync(),
            &progress,
            stopped
        ));
        let failed = tokio::select! {
            ended = &mut running => Some(ended.map_err(anyhow::Error::from)),
            error = Started::failed(&mut tracker) => Some(Err(error)),
            signal = shutdown.asked() => {
                info!(signal, "stopping");
                None
            }
        };
        stop.send_replace(true);
        match failed {
            Some(ended) => ended,
            None => last_pass(running).await,
        }
    };
    drop((agent, provisioner));
    let tracked = match tracker {
        Some(tracker) => tracker.end().await,
        None => Ok(()),
    };
    metrics::shut(door).await;
    // Ends the session and with it the lock, so that whoever stands by need not wait.
    tree.close().await;
    ended.and(tracked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        typed: Typed,
    }

    #[test]
    fn nobody_opens_what_it_listens_on_itself() {
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
