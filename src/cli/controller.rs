//! `portcullis controller`: the firewall agent as a process. Of several for one environment one leads, and the others
//! stand by. What the agent does is decided in `firewall`; here it gets its store, its provider and its policy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use portcullis_provider::Firewall;
use portcullis_provider::memory::{Memory, Settings as MemorySettings};
use tokio::sync::watch;
use tracing::info;

use super::config::Role;
use super::failure::Refusal;
use super::file;
use super::metrics::{self, Watched};
use super::settings::Globals;
use crate::firewall::agent::Agent;
use crate::firewall::policy::{self, Policy};
use crate::firewall::run::{Progress, run as run_agent};
use crate::firewall::trial::Trial;
use crate::runtime::shutdown::Shutdown;
use crate::store::{Environment, ZkTree};

/// How long a pass that is under way may take once we are asked to end.
const LAST_PASS: Duration = Duration::from_secs(15);

#[derive(Debug, Args)]
pub(super) struct Typed {
    #[command(flatten)]
    globals: Globals,
    /// Where the rules are made
    #[arg(long, value_enum, value_name = "PROVIDER")]
    provider: Provider,
    /// Everything is compared this often, whatever was noticed in between
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    resync: u64,
    /// What may never be opened [default: ssh and the store's own ports]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    #[command(flatten)]
    watched: Watched,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Provider {
    /// Rules that exist in this process alone and end with it: for trying things out
    Memory,
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let shutdown = Shutdown::listen().context("cannot catch signals")?;
    let settings = args.globals.settings_of(Role::Controller)?;
    // Before anything else is touched: rules made under another policy than the one that was named are worse than none.
    let policy = read_policy(args.policy.as_deref(), Policy::with_own_ports(settings.address.ports()))?;
    let environment = settings.open().await?;
    let resync = Duration::from_secs(args.resync);
    match args.provider {
        Provider::Memory => {
            let firewall = Trial::new(Memory::new(MemorySettings::default()));
            work(environment, firewall, (policy, resync, &args.watched), shutdown).await
        }
    }
}

/// What the file says over `base`, or `base` if none was named.
pub(super) fn read_policy(path: Option<&Path>, base: Policy) -> anyhow::Result<Policy> {
    let Some(path) = path else { return Ok(base) };
    let bytes = file::read_limited(path, policy::MAX_BYTES)?
        .ok_or_else(|| Refusal::NoPolicy { path: path.to_owned() })?;
    let wrong = || format!("cannot use the policy in {}", path.display());
    let text = std::str::from_utf8(&bytes).with_context(wrong)?;
    base.changed_by(text).with_context(wrong)
}

/// Runs the agent until a signal comes, or until it fails in a way that waiting does not cure.
async fn work<F: Firewall>(
    environment: Environment<ZkTree>,
    firewall: F,
    (policy, resync, watched): (Policy, Duration, &Watched),
    mut shutdown: Shutdown,
) -> anyhow::Result<()> {
    let roles = environment.info().roles.clone();
    let tree = environment.into_tree();
    let mut agent = Agent::new(tree.clone(), firewall, policy, roles.clone(), jitter);
    let (stop, stopped) = watch::channel(false);
    let (progress, watching) = watch::channel(Progress::default());
    let door = watched.open(&agent.metrics(), watching, stopped.clone()).await?;
    info!("controller ready");
    let ended = {
        let mut running = std::pin::pin!(run_agent(&mut agent, &tree, &roles, resync, &progress, stopped));
        tokio::select! {
            ended = &mut running => ended,
            signal = shutdown.asked() => {
                info!(signal, "stopping");
                stop.send_replace(true);
                tokio::time::timeout(LAST_PASS, running).await.context("the last pass does not end")?
            }
        }
    };
    drop(agent);
    stop.send_replace(true);
    metrics::shut(door).await;
    // Ends the session and with it the lock, so that whoever stands by need not wait.
    tree.close().await;
    Ok(ended?)
}

/// Spreads retries. Without the system's randomness they are only less spread.
pub(super) fn jitter() -> u64 {
    getrandom::u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_was_named_is_used_or_refused() {
        let base = Policy::with_own_ports([4711, 2182]);
        let read = |path| read_policy(path, base.clone());
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("policy.yaml");
        assert_eq!(read(None).unwrap(), base);
        let missing = format!("{:#}", read(Some(&path)).unwrap_err());
        assert!(missing.ends_with("policy.yaml does not exist"), "{missing}");
        std::fs::write(&path, "max-rules: 3\n").unwrap();
        assert_eq!(read(Some(&path)).unwrap().max_rules(), 3);
        for broken in [&b"max-rulse: 3\n"[..], b"\xff\xfe", b"forbidden-ports: [0]"] {
            std::fs::write(&path, broken).unwrap();
            let refused = format!("{:#}", read(Some(&path)).unwrap_err());
            assert!(refused.contains("cannot use the policy in ") && !refused.contains('\n'), "{refused}");
        }
        std::fs::write(&path, vec![b' '; policy::MAX_BYTES + 1]).unwrap();
        assert!(read(Some(&path)).is_err());
    }
}
