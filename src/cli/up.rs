//! `portcullis up`: everything in one process on one machine: the keeper, and an environment in it in which all units
//! are on machine 0. Started again, it goes on where it was.

use std::env;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::watch;
use tracing::warn;

use super::config::{ConfigDir, Remembered, Role};
use super::failure::Refusal;
use super::heartbeat_role::{Beside, Reach, Started};
use super::keeper::{Serving, announce, serve};
use super::settings::Globals;
use super::unit_options::UnitOptions;
use super::{bootstrap, file, machine, machine_file, output, upkeep};
use crate::heartbeat::notify::Http;
use crate::heartbeat::sender::Sender;
use crate::keeper::{Config, Keeper};
use crate::model::{EnvironmentName, MachineId};
use crate::runtime::shutdown::Shutdown;
use crate::store::records::Placement;
use crate::store::{Address, Environment, ZkTree};

/// Where everything runs.
pub(super) const LOCAL_MACHINE: MachineId = MachineId::new(0);

/// Whoever listens on this machine accepts at once.
const LOOPBACK_PATIENCE: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Environment to run [default: local]
    #[arg(short, long, value_name = "ENV", env = "JUJU_ENV", hide_env_values = true)]
    environment: Option<String>,
    /// Directory for the data; the same is required of it as by `portcullis keeper` [default:
    /// $XDG_DATA_HOME/portcullis/ENV]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    serving: Serving,
    #[command(flatten)]
    own: machine::Own,
    #[command(flatten)]
    units: UnitOptions,
    #[command(flatten)]
    heartbeat: Beside,
}

/// Where heartbeats are taken unless something else is said: nobody but this machine sends any.
const ANY_LOCAL_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let globals = Globals::of(args.environment.clone());
    let environment = globals.environment()?;
    let data_dir = data_dir(&environment, args.data_dir.as_deref())?;
    args.own.check()?;
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    let keeper = start(&globals, &environment, args.serving.config(data_dir.clone())?).await?;
    let file = machine_file::ensure(&globals, LOCAL_MACHINE, None).await?;
    let credential = file.credential.expose();
    let own = args.own.clone().beside(args.heartbeat.port());
    let options = (&own, &args.units);
    let agent =
        machine::prepare(&environment, LOCAL_MACHINE, file, options, (machine::Kind::DryRun, &data_dir))?;
    announce(&keeper)?;
    let at = Some(ANY_LOCAL_PORT);
    let mut tracker =
        args.heartbeat.start(|| globals.settings_of(Role::Controller), at, Reach::ThisMachine).await?;
    let trackers: Vec<String> =
        tracker.iter().map(|tracker| format!("http://{}", reachable(tracker.address))).collect();
    let sender = Sender::new(LOCAL_MACHINE, &credential, watch::channel(trackers).1);
    output::message(&format!("Environment '{environment}' is up; `juju status` shows it. Ctrl-C ends it."));
    let (stop, stopped) = watch::channel(false);
    let beating = tokio::spawn(sender.run(Arc::new(Http::default()), stopped.clone()));
    // Guests here: what happens to them does not end the store.
    let agent = tokio::spawn(async {
        if let Err(error) = agent.run(stopped).await {
            warn!("the machine's agent failed: {error:#}");
        }
    });
    let asked = async {
        let signal = loop {
            tokio::select! {
                signal = shutdown.asked() => break signal,
                // A guest, too.
                error = Started::failed(&mut tracker) => warn!("{error:#}"),
            }
        };
        stop.send_replace(true);
        // Before the store goes, so that all end in order; who does not is cut off with the process.
        let _ = tokio::time::timeout(upkeep::LAST_PASS, async { tokio::join!(beating, agent) }).await;
        if let Some(tracker) = tracker
            && let Err(error) = tracker.end().await
        {
            warn!("{error:#}");
        }
        signal
    };
    serve(keeper, asked).await
}

/// Where an environment's data is on this machine.
pub(super) fn data_dir(environment: &EnvironmentName, given: Option<&Path>) -> anyhow::Result<PathBuf> {
    match given {
        Some(given) => Ok(given.to_owned()),
        None => default_data_dir(environment, env::var_os("XDG_DATA_HOME"), env::var_os("HOME")),
    }
}

/// The XDG rule: a relative or empty value counts as unset.
fn default_data_dir(
    environment: &EnvironmentName,
    xdg: Option<OsString>,
    home: Option<OsString>,
) -> anyhow::Result<PathBuf> {
    let base = data_base(xdg, home)
        .context("neither XDG_DATA_HOME nor HOME says where this user's data is; --data-dir does")?;
    Ok(base.join("portcullis").join(environment.as_str()))
}

/// Where this user's data is.
pub(super) fn data_base(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(xdg).or_else(|| absolute(home).map(|home| home.join(".local/share")))
}

/// A keeper that serves a whole environment, which `juju` finds.
pub(super) async fn start(
    globals: &Globals,
    environment: &EnvironmentName,
    wanted: Config,
) -> anyhow::Result<Keeper> {
    let config = globals.config()?;
    // Read first: a file that is refused must not leave a keeper that nobody can enter.
    let remembered = config.read(environment, Role::Operator)?;
    let made = file::ensure_private_dir(&wanted.data_dir);
    made.with_context(|| format!("cannot make {}", wanted.data_dir.display()))?;
    let keeper = Keeper::start(wanted)?;
    let address: Address = reachable(keeper.local_addr()).to_string().parse()?;
    if let Some(remembered) = remembered {
        take_over(&config, environment, &address, &remembered).await?;
    }
    let (opened, _) = bootstrap::ensure(&config, environment, &address, Placement::Local).await?;
    opened.into_tree().close().await;
    Ok(keeper)
}

/// The address that a client on this machine uses.
fn reachable(listening: SocketAddr) -> SocketAddr {
    let ip = match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listening.port())
}

/// Brings what is remembered to the address that this keeper has today, unless it belongs to another store: one that
/// still answers, or one that was never on this machine.
async fn take_over(
    config: &ConfigDir,
    environment: &EnvironmentName,
    address: &Address,
    remembered: &Remembered,
) -> anyhow::Result<()> {
    let old: Option<Address> = remembered.zookeeper.parse().ok();
    if old.as_ref() == Some(address) {
        return Ok(());
    }
    let tree = ZkTree::connect(address, Some(&remembered.credential)).await?;
    let ours = Environment::open(tree).await.is_ok();
    if !ours && !is_abandoned(old.as_ref()) {
        return Err(Refusal::OtherStore {
            environment: environment.clone(),
            remembered: remembered.zookeeper.clone(),
            path: config.path(environment, Role::Operator)?,
        }
        .into());
    }
    for role in [Role::Operator, Role::Controller] {
        if let Some(old) = config.read(environment, role)? {
            config.replace(environment, role, &Remembered { zookeeper: address.to_string(), ..old })?;
        }
    }
    Ok(())
}

/// Left by an `up` that ended before it had made its environment: an address on this machine where nothing answers.
fn is_abandoned(old: Option<&Address>) -> bool {
    let addr =
        old.and_then(|old| old.hosts().parse::<SocketAddr>().ok()).filter(|addr| addr.ip().is_loopback());
    addr.is_some_and(|addr| TcpStream::connect_timeout(&addr, LOOPBACK_PATIENCE).is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_goes_where_xdg_says() {
        let local: EnvironmentName = "local".parse().unwrap();
        let dir = |xdg: Option<&str>, home: Option<&str>| {
            default_data_dir(&local, xdg.map(OsString::from), home.map(OsString::from)).ok()
        };
        assert_eq!(dir(Some("/d"), Some("/h")), Some("/d/portcullis/local".into()));
        assert_eq!(dir(Some("d"), Some("/h")), Some("/h/.local/share/portcullis/local".into()));
        assert_eq!(dir(None, None), None);
    }

    #[test]
    fn a_wildcard_is_reached_over_loopback() {
        for (listening, reached) in
            [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("10.0.0.1:1", "10.0.0.1:1")]
        {
            assert_eq!(reachable(listening.parse().unwrap()).to_string(), reached);
        }
    }
}
