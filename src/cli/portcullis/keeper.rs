//! `portcullis keeper`: the embedded store as a process of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::sync::watch;
use tracing::warn;

use crate::cli::args::environment::Globals;
use crate::cli::args::listen::{PlainArgs, Transport};
use crate::cli::args::metrics::MetricsArgs;
use crate::cli::args::tls::TlsArgs;
use crate::cli::authority;
use crate::cli::error::Usage;
use crate::cli::output;
use crate::cli::portcullis::listener_certificate::ListenerCertificate;
use crate::keeper::four_letter::Stats;
use crate::keeper::identities::IdentityLimits;
use crate::keeper::state::TreeLimits;
use crate::keeper::storage::RESERVE_BYTES;
use crate::keeper::watch_requests::WatchLimits;
use crate::keeper::{Config, Keeper, Limits, TlsListen};
use crate::net::tls::ClientAuth;
use crate::runtime::metrics::{Exposition, Registry};
use crate::runtime::resource_limits::raise_open_files;
use crate::runtime::service::{OnEnd, Service, stopped};
use crate::runtime::trusted_path;

/// The identity that access lists do not apply to. A variable, because other users can see flags.
const SUPER_DIGEST: &str = "PORTCULLIS_SUPER_DIGEST";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Environment whose authority issues the certificate of a listener that is not on loopback
    /// [default: local]
    #[arg(short, long, value_name = "ENV", env = "JUJU_ENV", hide_env_values = true)]
    environment: Option<String>,
    /// Directory for the data, created if it does not exist. It is refused if other users own it,
    /// or can write to it, to what is in it or to a directory above it
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    #[command(flatten)]
    serving: KeeperArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

/// Options of the keeper, for `keeper` and `up`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct KeeperArgs {
    /// Address to listen on; port 0 selects a free port. On addresses that are not loopback, the
    /// store is served with TLS and a certificate of the environment's authority
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:2181")]
    pub(super) listen: SocketAddr,
    #[command(flatten)]
    pub(super) plain: PlainArgs,
    /// Further DNS name or address for that certificate, besides those of this host; may be
    /// repeated
    #[arg(long, value_name = "NAME")]
    tls_name: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Over TLS, serve only clients that present a certificate of this CA (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_client_ca: Option<PathBuf>,
    /// Milliseconds of a tick; session timeouts are between 2 and 20 ticks
    #[arg(long, value_name = "MS", default_value_t = 2_000)]
    #[arg(value_parser = clap::value_parser!(i32).range(1..=60_000))]
    tick_ms: i32,
    /// Maximum number of connections; further ones are closed. The limit of open files applies, too
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_connections)]
    max_connections: usize,
    /// Maximum number of connections from one remote address, or one /64 network of IPv6; 0 is no
    /// limit. Loopback is not limited
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_connections_per_address)]
    max_connections_per_address: usize,
    /// Seconds after which a connection without known credentials is closed, if the root znode is
    /// not open to everyone (`bootstrap` closes it); 0 is never
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16))]
    unauthenticated_seconds: u16,
    /// Maximum bytes of one request or response; a longer request closes its connection, a longer
    /// response becomes an error
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_frame_bytes)]
    max_frame_bytes: usize,
    /// Bytes of responses that a client may leave unread before its requests wait
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_outstanding_bytes)]
    max_outstanding_bytes: usize,
    /// Bytes of memory for unfinished requests and unread responses of all clients; beyond it the
    /// connection that uses the most is closed
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_buffer_bytes)]
    max_buffer_bytes: usize,
    /// Maximum number of watches of one connection; all connections together may have five times as
    /// many
    #[arg(long, value_name = "N", default_value_t = WatchLimits::default().per_connection)]
    max_watches_per_connection: usize,
    /// Maximum number of identities of one connection
    #[arg(long, value_name = "N", default_value_t = IdentityLimits::default().per_connection)]
    max_identities_per_connection: usize,
    /// Maximum number of znodes in the tree
    #[arg(long, value_name = "N", default_value_t = TreeLimits::default().max_nodes)]
    max_nodes: usize,
    /// Maximum bytes of data in the tree
    #[arg(long, value_name = "BYTES", default_value_t = TreeLimits::default().max_bytes)]
    max_tree_bytes: usize,
    /// Bytes of log after which a snapshot is taken
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    snapshot_every_bytes: u64,
    /// Bytes of disk space to reserve, at most a sixteenth of the disk, in addition to the size of
    /// a snapshot. When the disk is full, reads, sessions and snapshots still work, and changes are
    /// refused until there is space again; 0 reserves nothing
    #[arg(long, value_name = "BYTES", default_value_t = RESERVE_BYTES)]
    disk_reserve_bytes: u64,
}

impl KeeperArgs {
    /// Returns the keeper's settings, and the certificate of a listener that is not on loopback.
    /// Also raises the limit of open files for its connections.
    pub(super) fn config(
        &self,
        data_dir: PathBuf,
        globals: &Globals,
    ) -> anyhow::Result<(Config, Option<ListenerCertificate>)> {
        raise_open_files();
        ensure_data_dir(&data_dir)?;
        let certificate = self.certificate(&data_dir, globals)?;
        let listen_tls = certificate.as_ref().map(ListenerCertificate::ensure).transpose()?;
        let config = Config {
            listen_tls,
            tls: self.tls()?,
            tick_ms: self.tick_ms,
            super_digest: std::env::var(SUPER_DIGEST).ok().filter(|digest| !digest.is_empty()),
            snapshot_every_bytes: self.snapshot_every_bytes,
            reserve_bytes: self.disk_reserve_bytes,
            limits: self.limits(),
            ..Config::new(data_dir, self.listen)
        };
        Ok((config, certificate))
    }

    fn certificate(&self, data_dir: &Path, globals: &Globals) -> anyhow::Result<Option<ListenerCertificate>> {
        let listen = self.listen;
        match self.plain.transport(listen) {
            Transport::Local => Ok(None),
            Transport::AllowedPlain => {
                warn!(%listen, "plain text on an address that is not loopback: secrets can be read there");
                Ok(None)
            }
            Transport::Tls if self.tls.is_given() => Err(plain_beside_tls(listen).into()),
            Transport::Tls => {
                let (config, environment) = (globals.config()?, globals.environment()?);
                let authority = authority::read_or_create_for_keeper(&config, &environment, data_dir)?;
                ListenerCertificate::new(authority, data_dir, ("keeper", listen), &self.tls_name).map(Some)
            }
        }
    }

    fn limits(&self) -> Limits {
        let watches = WatchLimits {
            per_connection: self.max_watches_per_connection,
            total: self.max_watches_per_connection.saturating_mul(5),
            ..WatchLimits::default()
        };
        let identities = IdentityLimits {
            per_connection: self.max_identities_per_connection,
            ..IdentityLimits::default()
        };
        Limits {
            max_connections: self.max_connections,
            max_connections_per_address: self.max_connections_per_address,
            unauthenticated_ms: i64::from(self.unauthenticated_seconds) * 1_000,
            max_frame_bytes: self.max_frame_bytes,
            max_outstanding_bytes: self.max_outstanding_bytes,
            max_buffer_bytes: self.max_buffer_bytes,
            identities,
            watches,
            tree: TreeLimits { max_nodes: self.max_nodes, max_bytes: self.max_tree_bytes },
        }
    }

    fn tls(&self) -> anyhow::Result<Option<TlsListen>> {
        let read = self.tls.load(self.tls_client_ca.as_deref(), ClientAuth::Required)?;
        Ok(read.map(|(listen, config)| TlsListen { listen, config }))
    }
}

/// The refusal of a plain listener that is reachable from other machines beside one with TLS.
pub(super) fn plain_beside_tls(listen: SocketAddr) -> Usage {
    Usage::new(format!(
        "--listen {listen} would be plain text beside --tls-listen: use a loopback address, leave \
         --tls-listen out to serve TLS on {listen}, or set --allow-plain-tcp"
    ))
}

/// Creates the data directory, unless other users could change what is in it: the store trusts its
/// own files.
fn ensure_data_dir(data_dir: &Path) -> anyhow::Result<()> {
    let ensured = trusted_path::ensure_directory(data_dir, 0o700)
        .and_then(|()| trusted_path::check_with_entries(data_dir));
    ensured.with_context(|| format!("cannot use data directory {}", data_dir.display()))
}

pub(super) async fn run(args: &Args) -> anyhow::Result<()> {
    let mut service = Service::new().context("cannot catch signals")?;
    let globals = Globals::of(args.environment.clone());
    let (config, certificate) = args.serving.config(args.data_dir.clone(), &globals)?;
    let keeper = Keeper::start(config)?;
    announce(&keeper, certificate.is_some())?;
    let registry = Registry::default();
    add_metrics(&registry, &keeper);
    args.metrics.start(&mut service, &registry).await?;
    service.next_stage();
    service.start("keeper", OnEnd::AbortOthers, |stop| serve(keeper, stop));
    if let Some(certificate) = certificate {
        certificate.start_renewal(&mut service);
    }
    service.run().await
}

/// Adds what the keeper counts for `mntr`.
pub(super) fn add_metrics(registry: &Registry, keeper: &Keeper) {
    let (for_metrics, for_readiness) = (keeper.stats(), keeper.stats());
    let ready = move || if for_readiness.get().disk_full { Err("the disk is full") } else { Ok("serving") };
    registry.add("keeper", move || render(&for_metrics.get()), ready);
}

fn render(stats: &Stats) -> String {
    let count = |count: usize| count as u64;
    let mut text = Exposition::of("keeper");
    for (name, help, value) in [
        ("connections", "Open connections", count(stats.connections)),
        ("sessions", "Open sessions", count(stats.sessions)),
        ("watches", "Watches of all connections", count(stats.watches)),
        ("znodes", "Znodes in the tree", count(stats.node_count)),
        ("ephemeral_znodes", "Ephemeral znodes in the tree", count(stats.ephemerals)),
        ("data_bytes", "Bytes of data in the tree", count(stats.data_bytes)),
        ("buffer_bytes", "Bytes of unfinished requests and unread answers", count(stats.buffer_bytes)),
        ("disk_full", "Whether changes are refused because the disk is full", stats.disk_full.into()),
    ] {
        text.one(name, "gauge", help, value);
    }
    text.one("requests_total", "counter", "Requests received", stats.received);
    text.one("answers_total", "counter", "Answers and events sent", stats.sent);
    text.one("fsyncs_total", "counter", "Syncs of the log to disk", stats.syncs);
    text.head("refusals_total", "counter", "Connections closed and requests refused, by reason");
    for (reason, value) in [
        ("connections", stats.connections_refused),
        ("unread_answers", stats.outstanding_closed),
        ("unauthenticated", stats.unauthenticated_closed),
        ("rights", stats.rights_refused),
        ("bad_frame", stats.bad_frames),
        ("limits", stats.limits_refused),
        ("buffers", stats.buffers_closed),
    ] {
        text.line(&format!("refusals_total{{reason=\"{reason}\"}}"), value);
    }
    text.into_text()
}

/// Prints the addresses of the keeper. `is_tls` is about the main one.
pub(super) fn announce(keeper: &Keeper, is_tls: bool) -> anyhow::Result<()> {
    let with = if is_tls { "with TLS " } else { "" };
    let tls = keeper.tls_addr().map_or_else(String::new, |addr| format!("listening with TLS on {addr}\n"));
    output::data(&format!("listening {with}on {}\n{tls}", keeper.local_addr()))
        .context("cannot write to stdout")
}

/// Runs until the role is asked to stop. If the keeper ends by itself, its disk has failed.
pub(super) async fn serve(keeper: Keeper, mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
    let handle = keeper.stop_handle();
    let mut ended = tokio::task::spawn_blocking(move || keeper.wait());
    let result = tokio::select! {
        () = stopped(&mut stop) => {
            handle.stop();
            (&mut ended).await
        }
        result = &mut ended => result,
    };
    Ok(result.context("the keeper thread ended unexpectedly")??)
}
