//! `portcullis heartbeat`: a heartbeat tracker as a process, or beside another role in one. The
//! listener opens first, so that beats are accepted before the store is reachable and while it is
//! not. Decisions are in `heartbeat`; this file connects the listener, the store and the clock.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::watch;
use tracing::warn;

use crate::cli::args::agent::jitter;
use crate::cli::args::environment::{Globals, Target};
use crate::cli::args::listen::{PlainArgs, Transport};
use crate::cli::args::metrics::MetricsArgs;
use crate::cli::args::tls::TlsArgs;
use crate::cli::authority;
use crate::cli::config::Role;
use crate::cli::error::Refusal;
use crate::cli::output;
use crate::cli::portcullis::keeper::plain_beside_tls;
use crate::cli::portcullis::listener_certificate::ListenerCertificate;
use crate::cli::portcullis::up;
use crate::heartbeat::api::health;
use crate::heartbeat::api::{Access, Api, limits};
use crate::heartbeat::discovery::publish_trackers;
use crate::heartbeat::tracker::shared_state::{Readiness, SharedState};
use crate::heartbeat::tracker::{Deps, Tracker};
use crate::net::http::Server;
use crate::net::http::client::Client;
use crate::net::tls::{ClientAuth, ClientFiles, ClientTls, ServerTls};
use crate::runtime::clock::wall_ms;
use crate::runtime::metrics::Registry;
use crate::runtime::resource_limits::raise_open_files;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::store::ZkTree;

/// The key that signs calls to webhooks. A variable, because other users can see flags.
const WEBHOOK_SECRET: &str = "PORTCULLIS_WEBHOOK_SECRET";

/// How long the tracker may take to write its last beats.
const LAST_FLUSH: Duration = Duration::from_secs(8);

/// The default of `--max-components`.
const MAX_COMPONENTS: usize = 1_000_000;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    globals: Globals,
    /// Address to accept beats on; port 0 selects a free port. On addresses that are not loopback,
    /// beats are accepted with TLS and a certificate of the environment's authority
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:28500")]
    listen: SocketAddr,
    #[command(flatten)]
    plain: PlainArgs,
    /// Accept beats without authentication for all components except machines, as clients of
    /// hms-hbtd need
    #[arg(long)]
    open: bool,
    /// Let every client that can connect change the parameters over HTTP; otherwise only `juju
    /// heartbeat params` can
    #[arg(long)]
    open_params: bool,
    /// Maximum number of components; beats of further ones are refused
    #[arg(long, value_name = "N", default_value_t = MAX_COMPONENTS)]
    max_components: usize,
    /// Additional CA certificates (PEM) to trust for https:// addresses that the tracker calls
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    #[command(flatten)]
    tls: TlsArgs,
    /// CA (PEM) of client certificates; a client that presents one may send beats only for the
    /// components that the certificate names
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    client_ca: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsArgs,
}

async fn bind(listen: SocketAddr) -> anyhow::Result<(Server, SocketAddr)> {
    let server =
        Server::bind(listen, limits()).await.with_context(|| format!("cannot listen on {listen}"))?;
    let address = server.local_addr().context("cannot determine the listening address")?;
    Ok((server, address))
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let target = args.globals.target_of(Role::Controller)?;
    let Args { listen, open, open_params, max_components, ca_file, tls, client_ca, .. } = args;
    let access = Access { beats: *open, params: *open_params };
    let ca_file = ca_file.as_deref();
    let tls = tls.load(client_ca.as_deref(), ClientAuth::Optional)?;
    let data = || up::data_dir(&target.environment, None);
    let certificate = certificate(&target, args.plain, *listen, data)?;
    if certificate.is_some() && tls.is_some() {
        return Err(plain_beside_tls(*listen).into());
    }
    let main_tls = certificate.as_ref().map(ListenerCertificate::ensure).transpose()?;
    let with = if main_tls.is_some() { "with TLS " } else { "" };
    let listen = (*listen, main_tls);
    let mut role = Tracking::open(listen, access, *max_components, ca_file, Reach::AnyMachine).await?;
    let mut said = format!("listening {with}on {}\n", role.address);
    if let Some((listen, config)) = tls {
        let (server, address) = bind(listen).await?;
        said.push_str(&format!("listening with TLS on {address}\n"));
        role.secure = Some((server.with_tls(config), address));
    }
    output::data(&said).context("cannot write to stdout")?;
    let registry = Registry::default();
    role.add_metrics(&registry);
    args.metrics.start(&mut service, &registry).await?;
    service.next_stage();
    service.start("heartbeat", OnEnd::StopOthers, |stop| role.run(target, stop));
    if let Some(certificate) = certificate {
        certificate.start_renewal(&mut service);
    }
    service.run().await
}

/// Returns the certificate of a tracker's listener that is not on loopback.
fn certificate(
    target: &Target,
    plain: PlainArgs,
    listen: SocketAddr,
    data: impl FnOnce() -> anyhow::Result<PathBuf>,
) -> anyhow::Result<Option<ListenerCertificate>> {
    match plain.transport(listen) {
        Transport::Local => Ok(None),
        Transport::AllowedPlain => {
            warn!(%listen, "plain text on an address that is not loopback: tokens can be read there");
            Ok(None)
        }
        Transport::Tls => {
            let missing = || {
                let path = target.config.authority(&target.environment);
                Refusal::NoListenerCertificate { listen, path }
            };
            let authority = authority::read(&target.config, &target.environment)?.ok_or_else(missing)?;
            ListenerCertificate::new(authority, &data()?, ("tracker", listen), &[]).map(Some)
        }
    }
}

/// Which machines send beats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Only this one, as in `up`.
    ThisMachine,
    AnyMachine,
}

/// A tracker with an open listener.
pub(super) struct Tracking {
    server: Server,
    /// Whether the main listener uses TLS.
    is_tls: bool,
    /// A second listener, with TLS.
    secure: Option<(Server, SocketAddr)>,
    reach: Reach,
    pub(super) address: SocketAddr,
    shared: Arc<SharedState>,
    access: Access,
    post: Client,
}

impl Tracking {
    pub(super) async fn open(
        (listen, tls): (SocketAddr, Option<ServerTls>),
        access: Access,
        max_components: usize,
        ca_file: Option<&Path>,
        reach: Reach,
    ) -> anyhow::Result<Self> {
        let ca = ca_file.map(Path::to_owned);
        let calls = ClientTls::load(ClientFiles { system_roots: true, ca, ..ClientFiles::default() })?;
        raise_open_files();
        let (mut server, address) = bind(listen).await?;
        let is_tls = tls.is_some();
        if let Some(tls) = tls {
            server = server.with_tls(tls);
        }
        let shared = Arc::new(SharedState::new(Arc::new(wall_ms), max_components));
        let post = Client::new(calls);
        Ok(Self { server, is_tls, secure: None, reach, address, shared, access, post })
    }

    fn add_metrics(&self, registry: &Registry) {
        let (counted, observed) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let metrics = move || {
            let inner = counted.lock();
            health::metrics(&inner.stats, &inner.counts())
        };
        let ready = move || match observed.readiness() {
            _ if !observed.lock().stats.loaded => Err("the store was not found yet"),
            Readiness::Ready => Ok("tracking"),
            Readiness::NotReady | Readiness::Stranded => Err("the store is out of reach"),
        };
        registry.add("heartbeat", metrics, ready);
    }

    /// Runs until the role is asked to stop, or fails in a way that a retry does not cure.
    pub(super) async fn run(self, target: Target, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        let Self { server, is_tls, secure, reach, shared, access, post, address } = self;
        let secure_url = secure.as_ref().map(|(_, address)| url_of(*address, reach, true));
        let url = secure_url.filter(|url| !url.is_empty()).unwrap_or_else(|| url_of(address, reach, is_tls));
        let (found, store) = watch::channel(None);
        let (shut, is_shut) = watch::channel(false);
        let (leave, leaving) = watch::channel(false);
        let api = Arc::new(Api::new(Arc::clone(&shared), store, access));
        let mut serving = tokio::spawn(async move {
            let plain = server.serve_with(Arc::clone(&api), is_shut.clone());
            match secure {
                Some((secure, _)) => drop(tokio::join!(plain, secure.serve_with(api, is_shut))),
                None => plain.await,
            }
        });
        let mut tracking = std::pin::pin!(track(&target, &shared, (post, url), &found, leaving));
        let ended = tokio::select! {
            ended = &mut tracking => ended,
            () = shared.pulse() => Ok(()),
            () = stopped(&mut stop) => {
                // The listener closes first, so that the last write has every accepted beat.
                shut.send_replace(true);
                tokio::select! {
                    ended = &mut tracking => return ended,
                    ended = &mut serving => ended.context("the listener failed")?,
                }
                leave.send_replace(true);
                tokio::time::timeout(LAST_FLUSH, tracking).await.context("the tracker did not stop in time")?
            }
        };
        serving.abort();
        ended
    }
}

/// Options for a tracker beside another role.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct HeartbeatArgs {
    /// Run a heartbeat tracker as well, and accept beats on this address
    #[arg(long, value_name = "ADDR")]
    heartbeat: Option<SocketAddr>,
    /// Accept beats without authentication for all components except machines
    #[arg(long)]
    heartbeat_open: bool,
    /// Let every client that can connect to the tracker change its parameters over HTTP
    #[arg(long)]
    heartbeat_open_params: bool,
    /// Additional CA certificates (PEM) to trust for https:// addresses that the tracker calls
    #[arg(long, value_name = "FILE")]
    heartbeat_ca_file: Option<PathBuf>,
}

/// A tracker beside another role, with its listener open.
pub(super) struct OpenTracker {
    tracking: Tracking,
    target: Target,
    certificate: Option<ListenerCertificate>,
}

impl HeartbeatArgs {
    /// The port of the listener, if a fixed one was asked for.
    pub(super) fn port(&self) -> Option<u16> {
        self.address().map(|listen| listen.port())
    }

    /// The address of the listener, if one with a fixed port was asked for.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.heartbeat.filter(|listen| listen.port() != 0)
    }

    pub(super) fn is_given(&self) -> bool {
        self.heartbeat.is_some()
    }

    /// Opens the tracker's listener on the address that was asked for, else on `default`, else not
    /// at all.
    pub(super) async fn open(
        &self,
        target: impl FnOnce() -> anyhow::Result<Target>,
        default: Option<SocketAddr>,
        reach: Reach,
        (plain, data): (PlainArgs, &Path),
    ) -> anyhow::Result<Option<OpenTracker>> {
        let Some(listen) = self.heartbeat.or(default) else { return Ok(None) };
        let ca_file = self.heartbeat_ca_file.as_deref();
        let access = Access { beats: self.heartbeat_open, params: self.heartbeat_open_params };
        let target = target()?;
        let certificate = certificate(&target, plain, listen, || Ok(data.to_owned()))?;
        let tls = certificate.as_ref().map(ListenerCertificate::ensure).transpose()?;
        let tracking = Tracking::open((listen, tls), access, MAX_COMPONENTS, ca_file, reach).await?;
        let tracker = OpenTracker { tracking, target, certificate };
        output::message(&format!("heartbeats on {}://{}", tracker.scheme(), tracker.address()));
        Ok(Some(tracker))
    }
}

impl OpenTracker {
    pub(super) fn scheme(&self) -> &'static str {
        if self.tracking.is_tls { "https" } else { "http" }
    }

    /// Keeps the certificate of the listener valid.
    pub(super) fn start_renewal(&mut self, service: &mut Service<anyhow::Error>) {
        if let Some(certificate) = self.certificate.take() {
            certificate.start_renewal(service);
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.tracking.address
    }

    pub(super) fn add_metrics(&self, registry: &Registry) {
        self.tracking.add_metrics(registry);
    }

    pub(super) async fn run(self, stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        self.tracking.run(self.target, stop).await.context("the heartbeat tracker failed")
    }
}

/// Waits for the store and runs the tracker on it.
async fn track(
    target: &Target,
    shared: &Arc<SharedState>,
    (post, url): (Client, String),
    found: &watch::Sender<Option<ZkTree>>,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let environment = tokio::select! {
        environment = target.wait_and_open() => environment?,
        () = stopped(&mut stop) => return Ok(()),
    };
    let roles = environment.info().roles.clone();
    let tree = environment.into_tree();
    found.send_replace(Some(tree.clone()));
    let secret = std::env::var(WEBHOOK_SECRET).ok().filter(|secret| !secret.is_empty());
    let mut tracker = Tracker::new(Deps {
        tree: tree.clone(),
        roles: roles.clone(),
        shared: Arc::clone(shared),
        url,
        post: Arc::new(post),
        webhook_secret: secret.map(|secret| secret.into_bytes().into()),
        random: jitter,
    })?;
    let ended = tokio::select! {
        ended = tracker.run(stop) => ended,
        () = publish_trackers(&tree, &roles, shared) => Ok(()),
    };
    // Ends the session and with it the lease, so that a standby does not wait for its timeout.
    found.send_replace(None);
    tree.close().await;
    Ok(ended?)
}

/// Returns the URL that machines reach the tracker at, or an empty string. A wildcard is not an
/// address for them, and at a loopback address they would send their tokens to any listener on
/// their own machine; they need `--beat-to` then.
fn url_of(address: SocketAddr, reach: Reach, is_tls: bool) -> String {
    let ip = address.ip().to_canonical();
    let useless = ip.is_unspecified() || ip.is_loopback() && reach == Reach::AnyMachine;
    let scheme = if is_tls { "https" } else { "http" };
    if useless { String::new() } else { format!("{scheme}://{address}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_that_machines_can_reach_are_announced() {
        let told = |address: &str, reach| !url_of(address.parse().unwrap(), reach, false).is_empty();
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
        let url = |is_tls| url_of("[fd00::1]:1".parse().unwrap(), Reach::AnyMachine, is_tls);
        assert_eq!((url(false).as_str(), url(true).as_str()), ("http://[fd00::1]:1", "https://[fd00::1]:1"));
    }
}
