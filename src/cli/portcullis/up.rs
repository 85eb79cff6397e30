//! `portcullis up`: all roles in one process on one machine, with the embedded keeper as the store
//! and all units on machine 0. The next start continues with the same data.

use std::env;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;

use crate::cli::args::environment::Globals;
use crate::cli::args::own_firewall::{FirewallArgs, Kind};
use crate::cli::args::units::UnitArgs;
use crate::cli::authority;
use crate::cli::config::{ConfigDir, Role, SavedEnvironment};
use crate::cli::error::Refusal;
use crate::cli::file;
use crate::cli::juju::bootstrap;
use crate::cli::output;
use crate::cli::portcullis::fleet_role::FleetArgs;
use crate::cli::portcullis::heartbeat::{HeartbeatArgs, Reach};
use crate::cli::portcullis::issuer;
use crate::cli::portcullis::keeper::{KeeperArgs, add_metrics, announce, serve};
use crate::cli::portcullis::machine;
use crate::cli::portcullis::machine_file;
use crate::cli::portcullis::node_agent::SystemdArgs;
use crate::heartbeat::client::BeatClient;
use crate::keeper::{Config, Keeper};
use crate::model::{EnvironmentName, MachineId};
use crate::net::http::client::Client;
use crate::net::tls::authority::Authority;
use crate::net::tls::{ClientFiles, ClientTls};
use crate::runtime::metrics::Registry;
use crate::runtime::service::{OnEnd, Service};
use crate::store::records::Placement;
use crate::store::{Address, Environment, ZkTree};

/// The machine of all units.
pub(in crate::cli) const LOCAL_MACHINE: MachineId = MachineId::new(0);

/// How long a connection to a listener on this machine may take.
const LOOPBACK_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Environment to run [default: local]
    #[arg(short, long, value_name = "ENV", env = "JUJU_ENV", hide_env_values = true)]
    environment: Option<String>,
    /// Directory for the data, with the same requirements as for `portcullis keeper` [default:
    /// $XDG_DATA_HOME/portcullis/ENV]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    serving: KeeperArgs,
    #[command(flatten)]
    firewall: FirewallArgs,
    #[command(flatten)]
    units: UnitArgs,
    #[command(flatten)]
    heartbeat: HeartbeatArgs,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    systemd: SystemdArgs,
}

/// The default address of the tracker and of the manager: only this machine connects.
const ANY_LOCAL_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let globals = Globals::of(args.environment.clone());
    let environment = globals.environment()?;
    let data_dir = data_dir(&environment, args.data_dir.as_deref())?;
    args.firewall.check()?;
    let mut service = Service::new().context("cannot catch signals")?;
    let (config, certificate) = args.serving.config(data_dir.clone(), &globals)?;
    let keeper = start(&globals, &environment, config).await?;
    let file = machine_file::ensure(&globals, LOCAL_MACHINE, None).await?;
    let credential = file.credential.expose();
    let listeners = std::iter::once(keeper.local_addr());
    let listeners = listeners.chain(args.heartbeat.address()).chain(args.fleet.address());
    let own = args.firewall.clone().beside(listeners.collect());
    let options = (&own, &args.units);
    let agent = machine::prepare(&environment, LOCAL_MACHINE, file, options, (Kind::DryRun, &data_dir))?;
    let machine_files = agent.machine_files();
    announce(&keeper, certificate.is_some())?;
    let target = || globals.target_of(Role::Controller);
    let place = (args.serving.plain, &*data_dir);
    let tracker = args.heartbeat.open(target, Some(ANY_LOCAL_PORT), Reach::ThisMachine, place).await?;
    let default = args.systemd.is_controlled().then_some(ANY_LOCAL_PORT);
    let fleet = args.fleet.open(target, default, &data_dir)?;
    let registry = Registry::default();
    add_metrics(&registry, &keeper);
    agent.add_metrics(&registry);
    if let Some(tracker) = &tracker {
        tracker.add_metrics(&registry);
    }
    if let Some(fleet) = &fleet {
        fleet.add_metrics(&registry);
    }
    args.firewall.metrics().start(&mut service, &registry).await?;
    service.next_stage();
    // The store is the base; it runs on when another role fails, and stops last.
    service.start("keeper", OnEnd::AbortOthers, |stop| serve(keeper, stop));
    service.next_stage();
    let mut trackers = Vec::new();
    if let Some(mut tracker) = tracker {
        trackers.push(format!("{}://{}", tracker.scheme(), reachable(tracker.address())));
        tracker.start_renewal(&mut service);
        service.start("heartbeat", OnEnd::Continue, |stop| tracker.run(stop));
    }
    if let Some(fleet) = fleet {
        fleet.start(&mut service, OnEnd::Continue);
    }
    service.next_stage();
    issuer::start(&mut service, globals.target_of(Role::Controller)?)?;
    if let Some(certificate) = certificate {
        certificate.start_renewal(&mut service);
    }
    let tls = ClientTls::load(ClientFiles { machine: Some(machine_files), ..ClientFiles::default() })?;
    let sender =
        BeatClient::new(LOCAL_MACHINE, &credential, watch::channel(trackers).1).with_certificate(tls.clone());
    let agent = agent.with_node(args.systemd.agent(&tls, true)?);
    service.start("machine", OnEnd::Continue, |stop| agent.run(stop));
    machine::start_beats(&mut service, sender, Client::new(tls));
    output::message(&format!("Environment '{environment}' is up; `juju status` shows it. Ctrl-C ends it."));
    service.run().await
}

/// Returns the data directory of an environment on this machine.
pub(super) fn data_dir(environment: &EnvironmentName, given: Option<&Path>) -> anyhow::Result<PathBuf> {
    match given {
        Some(given) => Ok(given.to_owned()),
        None => default_data_dir(environment, env::var_os("XDG_DATA_HOME"), env::var_os("HOME")),
    }
}

/// Follows the XDG rule: a relative or empty value counts as unset.
fn default_data_dir(
    environment: &EnvironmentName,
    xdg: Option<OsString>,
    home: Option<OsString>,
) -> anyhow::Result<PathBuf> {
    let base = data_base(xdg, home).context(
        "cannot find the data directory: neither XDG_DATA_HOME nor HOME is an absolute path; set --data-dir",
    )?;
    Ok(base.join("portcullis").join(environment.as_str()))
}

/// Returns this user's data directory.
pub(in crate::cli) fn data_base(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(xdg).or_else(|| absolute(home).map(|home| home.join(".local/share")))
}

/// Starts a keeper, bootstraps the environment in it if necessary, and saves its address and
/// credentials for `juju`.
pub(super) async fn start(
    globals: &Globals,
    environment: &EnvironmentName,
    wanted: Config,
) -> anyhow::Result<Keeper> {
    let config = globals.config()?;
    // Read first: if the file is refused, no keeper without usable credentials is left behind.
    let saved = config.read(environment, Role::Operator)?;
    let made = file::ensure_private_dir(&wanted.data_dir);
    made.with_context(|| format!("cannot make {}", wanted.data_dir.display()))?;
    let is_tls = wanted.listen_tls.is_some();
    let keeper = Keeper::start(wanted)?;
    let scheme = if is_tls { "tls://" } else { "" };
    let address: Address = format!("{scheme}{}", reachable(keeper.local_addr())).parse()?;
    let authority = if is_tls { authority::read(&config, environment)? } else { None };
    let address = address.with_ca(authority.as_ref().map(Authority::certificate));
    if let Some(saved) = saved {
        take_over(&config, environment, &address, &saved).await?;
    }
    let (opened, _) = bootstrap::ensure(&config, environment, &address, Placement::Local).await?;
    opened.into_tree().close().await;
    Ok(keeper)
}

/// Returns the address that a client on this machine uses.
fn reachable(listening: SocketAddr) -> SocketAddr {
    let ip = match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listening.port())
}

/// Saves the present address of this keeper, unless the saved credentials belong to another store
/// that still answers or is on another machine.
async fn take_over(
    config: &ConfigDir,
    environment: &EnvironmentName,
    address: &Address,
    saved: &SavedEnvironment,
) -> anyhow::Result<()> {
    let old: Option<Address> = saved.zookeeper.parse().ok();
    if old.clone().map(|old| old.with_ca(saved.ca.as_deref())).as_ref() == Some(address) {
        return Ok(());
    }
    let tree = ZkTree::connect(address, Some(&saved.credential)).await?;
    let ours = Environment::open(tree).await.is_ok();
    // A destroyed environment leaves its credentials, and its authority is another one from now on.
    let is_same = |old: &Address| old.to_string() == address.to_string();
    let was_destroyed = saved.cluster_id.is_none() && old.as_ref().is_some_and(is_same);
    if !ours && !was_destroyed && !is_abandoned(old.as_ref()) {
        return Err(Refusal::OtherStore {
            environment: environment.clone(),
            saved: saved.zookeeper.clone(),
            path: config.path(environment, Role::Operator)?,
        }
        .into());
    }
    for role in [Role::Operator, Role::Controller] {
        if let Some(old) = config.read(environment, role)? {
            let (zookeeper, ca) = (address.to_string(), address.ca().map(str::to_owned));
            config.replace(environment, role, &SavedEnvironment { zookeeper, ca, ..old })?;
        }
    }
    Ok(())
}

/// Whether the address is on this machine and no listener answers there. An `up` that ended before
/// it made its environment leaves such an address.
fn is_abandoned(old: Option<&Address>) -> bool {
    let addr =
        old.and_then(|old| old.hosts().parse::<SocketAddr>().ok()).filter(|addr| addr.ip().is_loopback());
    addr.is_some_and(|addr| TcpStream::connect_timeout(&addr, LOOPBACK_TIMEOUT).is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_directory_follows_xdg() {
        let local: EnvironmentName = "local".parse().unwrap();
        let dir = |xdg: Option<&str>, home: Option<&str>| {
            default_data_dir(&local, xdg.map(OsString::from), home.map(OsString::from)).ok()
        };
        assert_eq!(dir(Some("/d"), Some("/h")), Some("/d/portcullis/local".into()));
        assert_eq!(dir(Some("d"), Some("/h")), Some("/h/.local/share/portcullis/local".into()));
        assert_eq!(dir(None, None), None);
    }

    #[test]
    fn clients_reach_a_wildcard_address_over_loopback() {
        for (listening, reached) in
            [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("10.0.0.1:1", "10.0.0.1:1")]
        {
            assert_eq!(reachable(listening.parse().unwrap()).to_string(), reached);
        }
    }
}
