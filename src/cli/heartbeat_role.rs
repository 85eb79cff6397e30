//! `portcullis heartbeat`: a heartbeat tracker as a process, or beside another role in one. The door opens first: beats are taken before a store was found
//! and while it is away. What a beat means is decided in `heartbeat`; here it gets its door, its store and its clock.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::config::Role;
use super::settings::{Globals, Settings};
use super::tls_door::TlsDoor;
use super::upkeep::jitter;
use super::{file, output};
use crate::heartbeat::announce::announce;
use crate::heartbeat::api::{Access, Api, limits};
use crate::heartbeat::ears::Ears;
use crate::heartbeat::notify::Http;
use crate::heartbeat::tls::Trust;
use crate::heartbeat::tracker::{Setting, Tracker};
use crate::keeper::tls::Clients;
use crate::runtime::clock::wall_ms;
use crate::runtime::files::raise_open_files;
use crate::runtime::http::Server;
use crate::runtime::shutdown::Shutdown;
use crate::store::{Environment, ZkTree};

/// Signs what webhooks get. A variable and not a flag, because flags are seen by everyone.
const WEBHOOK_SECRET: &str = "PORTCULLIS_WEBHOOK_SECRET";

/// How long after a store was not found it is looked for again.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How long the tracker may take to leave in order.
const LAST_WORDS: Duration = Duration::from_secs(8);

/// More than all certificates that a system believes.
const MAX_CA_BYTES: usize = 4 << 20;

/// Components that a tracker remembers, unless told otherwise.
const MAX_COMPONENTS: usize = 1_000_000;

#[derive(Debug, Args)]
pub(super) struct Typed {
    #[command(flatten)]
    globals: Globals,
    /// Address to take beats on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:28500")]
    listen: SocketAddr,
    /// Take beats from anybody, for anything but machines; clients of hms-hbtd need it
    #[arg(long)]
    open: bool,
    /// Let every client that can connect change the parameters over HTTP; otherwise only `juju
    /// heartbeat params` can
    #[arg(long)]
    open_params: bool,
    /// Components that are remembered; one more is refused
    #[arg(long, value_name = "N", default_value_t = MAX_COMPONENTS)]
    max_components: usize,
    /// Certificates in PEM of who else is believed in calls to https:// addresses, besides those of this system
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsDoor,
    /// Authority in PEM of clients' certificates: whoever shows one beats for the components that it names, and no others
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    client_ca: Option<PathBuf>,
}

async fn bind(listen: SocketAddr) -> anyhow::Result<(Server, SocketAddr)> {
    let server =
        Server::bind(listen, limits()).await.with_context(|| format!("cannot listen on {listen}"))?;
    let address = server.local_addr().context("cannot tell where this listens")?;
    Ok((server, address))
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    let settings = args.globals.settings_of(Role::Controller)?;
    let Typed { listen, open, open_params, max_components, ca_file, tls, client_ca, .. } = args;
    let access = Access { beats: *open, params: *open_params };
    let ca_file = ca_file.as_deref();
    let tls = tls.read(client_ca.as_deref(), Clients::MayShow)?;
    let mut role = Tracking::open(*listen, access, *max_components, ca_file, Reach::AnyMachine).await?;
    let mut said = format!("listening on {}\n", role.address);
    if let Some((listen, config)) = tls {
        let (server, address) = bind(listen).await?;
        said.push_str(&format!("listening with TLS on {address}\n"));
        role.secure = Some(server.with_tls(config));
    }
    output::data(&said).context("cannot write to stdout")?;
    let (stop, stopped) = watch::channel(false);
    let mut running = std::pin::pin!(role.run(settings, stopped));
    tokio::select! {
        ended = &mut running => ended,
        signal = shutdown.asked() => {
            info!(signal, "stopping");
            stop.send_replace(true);
            running.await
        }
    }
}

/// From where beats come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// There is no other machine.
    ThisMachine,
    AnyMachine,
}

/// A tracker whose door is open, for whoever has the role beside another.
pub(super) struct Tracking {
    server: Server,
    /// The door that speaks TLS.
    secure: Option<Server>,
    reach: Reach,
    pub(super) address: SocketAddr,
    ears: Arc<Ears>,
    access: Access,
    post: Http,
}

impl Tracking {
    pub(super) async fn open(
        listen: SocketAddr,
        access: Access,
        max_components: usize,
        ca_file: Option<&Path>,
        reach: Reach,
    ) -> anyhow::Result<Self> {
        let trust = ca_file.map_or_else(|| Ok(Trust::default()), read_ca)?;
        raise_open_files();
        let (server, address) = bind(listen).await?;
        let ears = Arc::new(Ears::new(Arc::new(wall_ms), max_components));
        Ok(Self { server, secure: None, reach, address, ears, access, post: Http::trusting(trust) })
    }

    /// Runs until `stop` says so, and then leaves in order; or until it fails in a way that waiting does not cure.
    pub(super) async fn run(self, settings: Settings, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        let Self { server, secure, reach, ears, access, post, address } = self;
        let url = url_of(address, reach);
        let (found, store) = watch::channel(None);
        let (shut, is_shut) = watch::channel(false);
        let (leave, leaving) = watch::channel(false);
        let api = Arc::new(Api::new(Arc::clone(&ears), store, access));
        let mut serving = tokio::spawn(async move {
            let plain = server.serve_with(Arc::clone(&api), is_shut.clone());
            match secure {
                Some(secure) => drop(tokio::join!(plain, secure.serve_with(api, is_shut))),
                None => plain.await,
            }
        });
        let mut tracking = std::pin::pin!(track(&settings, &ears, (post, url), &found, leaving));
        let ended = tokio::select! {
            ended = &mut tracking => ended,
            () = ears.pulse() => Ok(()),
            () = async { drop(stop.wait_for(|stop| *stop).await) } => {
                // First the door, so that every beat that was taken is in the last words.
                shut.send_replace(true);
                tokio::select! {
                    ended = &mut tracking => return ended,
                    ended = &mut serving => ended.context("the door fell")?,
                }
                leave.send_replace(true);
                tokio::time::timeout(LAST_WORDS, tracking).await.context("the tracker does not end")?
            }
        };
        serving.abort();
        ended
    }
}

/// A tracker in a process that is there for something else: how it is asked for.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct Beside {
    /// Track heartbeats, too, and take beats here
    #[arg(long, value_name = "ADDR")]
    heartbeat: Option<SocketAddr>,
    /// Take beats from anybody, for anything but machines
    #[arg(long)]
    heartbeat_open: bool,
    /// Let every client that can connect to the tracker change its parameters over HTTP
    #[arg(long)]
    heartbeat_open_params: bool,
    /// Certificates in PEM of who else is believed when the tracker calls https:// addresses
    #[arg(long, value_name = "FILE")]
    heartbeat_ca_file: Option<PathBuf>,
}

/// One that runs.
pub(super) struct Started {
    pub(super) address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Beside {
    /// The port that was asked for.
    pub(super) fn port(&self) -> Option<u16> {
        self.heartbeat.map(|listen| listen.port()).filter(|port| *port != 0)
    }

    /// Starts it where it was asked for, else at `default`, else not at all.
    pub(super) async fn start(
        &self,
        settings: impl FnOnce() -> anyhow::Result<Settings>,
        default: Option<SocketAddr>,
        reach: Reach,
    ) -> anyhow::Result<Option<Started>> {
        let Some(listen) = self.heartbeat.or(default) else { return Ok(None) };
        let ca_file = self.heartbeat_ca_file.as_deref();
        let access = Access { beats: self.heartbeat_open, params: self.heartbeat_open_params };
        let tracking = Tracking::open(listen, access, MAX_COMPONENTS, ca_file, reach).await?;
        let (address, settings) = (tracking.address, settings()?);
        output::message(&format!("heartbeats on http://{address}"));
        let (stop, stopped) = watch::channel(false);
        Ok(Some(Started { address, stop, task: tokio::spawn(tracking.run(settings, stopped)) }))
    }
}

impl Started {
    /// Waits until it ends by itself, which is a failure. Cancel-safe.
    pub(super) async fn failed(started: &mut Option<Self>) -> anyhow::Error {
        let Some(tracker) = started else { return std::future::pending().await };
        let ended = (&mut tracker.task).await;
        *started = None;
        match ended {
            Ok(Err(error)) => error.context("the tracker of heartbeats has ended"),
            _ => anyhow::anyhow!("the tracker of heartbeats has died"),
        }
    }

    /// Has it leave in order.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        self.stop.send_replace(true);
        self.task.await.context("the tracker of heartbeats has died")?
    }
}

/// Finds the store, however long that takes, and runs the tracker on it.
async fn track(
    settings: &Settings,
    ears: &Arc<Ears>,
    (post, url): (Http, String),
    found: &watch::Sender<Option<ZkTree>>,
    mut stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let environment = tokio::select! {
        environment = look_for_store(settings) => environment?,
        _ = stopped.wait_for(|stopped| *stopped) => return Ok(()),
    };
    let roles = environment.info().roles.clone();
    let tree = environment.into_tree();
    found.send_replace(Some(tree.clone()));
    let secret = std::env::var(WEBHOOK_SECRET).ok().filter(|secret| !secret.is_empty());
    let mut tracker = Tracker::new(Setting {
        tree: tree.clone(),
        roles: roles.clone(),
        ears: Arc::clone(ears),
        url,
        post: Arc::new(post),
        webhook_secret: secret.map(|secret| secret.into_bytes().into()),
        random: jitter,
    })?;
    let ended = tokio::select! {
        ended = tracker.run(stopped) => ended,
        () = announce(&tree, &roles, ears) => Ok(()),
    };
    // Ends the session and with it the lock, so that whoever stands by need not wait.
    found.send_replace(None);
    tree.close().await;
    Ok(ended?)
}

/// Waits for a store that is not there; what waiting does not cure is told at once.
pub(super) async fn look_for_store(settings: &Settings) -> anyhow::Result<Environment<ZkTree>> {
    loop {
        match settings.open().await {
            Ok(environment) => return Ok(environment),
            Err(error) => {
                let passing =
                    error.downcast_ref::<crate::store::tree::Error>().is_some_and(|e| e.is_retryable());
                let store_error = error.downcast_ref::<crate::store::Error>();
                let passing = passing
                    || matches!(store_error, Some(crate::store::Error::Tree(error)) if error.is_retryable());
                if !passing {
                    return Err(error);
                }
                warn!(error = format!("{error:#}"), "no store yet");
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

pub(super) fn read_ca(path: &Path) -> anyhow::Result<Trust> {
    let wrong = || format!("cannot use the certificates in {}", path.display());
    let pem = file::read_trusted(path, MAX_CA_BYTES)?
        .with_context(|| format!("{} does not exist", path.display()))?;
    Trust::also(&pem).with_context(wrong)
}

/// Where machines reach the tracker. A wildcard is no address for others, and with an address of loopback they would give
/// their tokens to whoever listens there on their own machine; `--beat-to` names one then.
fn url_of(address: SocketAddr, reach: Reach) -> String {
    let ip = address.ip().to_canonical();
    let useless = ip.is_unspecified() || ip.is_loopback() && reach == Reach::AnyMachine;
    if useless { String::new() } else { format!("http://{address}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_told_of_addresses_that_are_theirs_to_reach() {
        let told = |address: &str, reach| !url_of(address.parse().unwrap(), reach).is_empty();
        for (address, anywhere, here) in [
            ("10.0.0.1:1", true, true),
            ("[fd00::1]:1", true, true),
            ("127.0.0.1:1", false, true),
            ("127.8.8.8:1", false, true),
            ("[::1]:1", false, true),
            ("[::ffff:127.0.0.1]:1", false, true),
            ("0.0.0.0:1", false, false),
            ("[::]:1", false, false),
        ] {
            assert_eq!(told(address, Reach::AnyMachine), anywhere, "{address}");
            assert_eq!(told(address, Reach::ThisMachine), here, "{address}");
        }
        assert_eq!(url_of("[fd00::1]:1".parse().unwrap(), Reach::AnyMachine), "http://[fd00::1]:1");
    }
}
