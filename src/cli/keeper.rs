//! `portcullis keeper`: the embedded store as a process of its own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use tracing::info;

use super::output;
use super::tls_door::TlsDoor;
use crate::keeper::identities::IdentityLimits;
use crate::keeper::state::TreeLimits;
use crate::keeper::storage::RESERVE_BYTES;
use crate::keeper::tls::{Clients, Tls};
use crate::keeper::watching::WatchLimits;
use crate::keeper::{Config, Keeper, Limits};
use crate::runtime::files::raise_open_files;
use crate::runtime::shutdown::Shutdown;
use crate::runtime::trusted_path;

/// Names the identity that no access list binds. A variable and not a flag, because flags are seen by everyone.
const SUPER_DIGEST: &str = "PORTCULLIS_SUPER_DIGEST";

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Directory for the data, created if it does not exist. It is refused if other users own it,
    /// or can write to it, to what is in it or to a directory above it
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    #[command(flatten)]
    serving: Serving,
}

/// How a keeper serves, for `keeper` and `up` alike.
#[derive(Debug, Clone, Args)]
pub(super) struct Serving {
    /// Address to serve on; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:2181")]
    pub(super) listen: SocketAddr,
    #[command(flatten)]
    tls: TlsDoor,
    /// Over TLS, serve only clients that show a certificate of this authority (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_listen")]
    tls_client_ca: Option<PathBuf>,
    /// Sessions last from 2 to 20 ticks without a sign of life
    #[arg(long, value_name = "MS", default_value_t = 2_000, value_parser = clap::value_parser!(i32).range(1..=60_000))]
    tick_ms: i32,
    /// Connections at once; one more is closed. Never more than this process may have open files
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_connections)]
    max_connections: usize,
    /// Connections at once from one remote address, or one /64 network of IPv6; 0 is no limit. Loopback is not limited
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_connections_per_address)]
    max_connections_per_address: usize,
    /// Seconds after which a connection without known credentials is closed, once the root node is closed to the
    /// world (as `bootstrap` closes it); 0 is never
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16))]
    unauthenticated_seconds: u16,
    /// Bytes in one request or answer; a longer request closes its connection, a longer answer is refused
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_frame_bytes)]
    max_frame_bytes: usize,
    /// Bytes of answers that a client may leave unread before its requests wait
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_outstanding_bytes)]
    max_outstanding_bytes: usize,
    /// Bytes of memory for unfinished requests and unread answers of all clients; beyond it the connection that takes
    /// the most is closed
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_buffer_bytes)]
    max_buffer_bytes: usize,
    /// Watches of one connection; all connections together may have five times as many
    #[arg(long, value_name = "N", default_value_t = WatchLimits::default().per_connection)]
    max_watches_per_connection: usize,
    /// Identities that one connection may prove
    #[arg(long, value_name = "N", default_value_t = IdentityLimits::default().per_connection)]
    max_identities_per_connection: usize,
    /// Znodes in the tree
    #[arg(long, value_name = "N", default_value_t = TreeLimits::default().max_nodes)]
    max_nodes: usize,
    /// Bytes of data in the tree
    #[arg(long, value_name = "BYTES", default_value_t = TreeLimits::default().max_bytes)]
    max_tree_bytes: usize,
    /// Bytes of log after which a snapshot is taken
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    snapshot_every_bytes: u64,
    /// Bytes of the disk, at most a sixteenth of it, that are reserved, with room for a snapshot,
    /// for when the disk is full: reads, sessions and snapshots still work then, and changes are
    /// refused until there is room again; 0 is none
    #[arg(long, value_name = "BYTES", default_value_t = RESERVE_BYTES)]
    disk_reserve_bytes: u64,
}

impl Serving {
    /// The keeper's settings. Makes room for its connections, too, as far as the system lets it.
    pub(super) fn config(&self, data_dir: PathBuf) -> anyhow::Result<Config> {
        raise_open_files();
        ensure_data_dir(&data_dir)?;
        Ok(Config {
            tls: self.tls()?,
            tick_ms: self.tick_ms,
            super_digest: std::env::var(SUPER_DIGEST).ok().filter(|digest| !digest.is_empty()),
            snapshot_every_bytes: self.snapshot_every_bytes,
            reserve_bytes: self.disk_reserve_bytes,
            limits: self.limits(),
            ..Config::new(data_dir, self.listen)
        })
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

    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let read = self.tls.read(self.tls_client_ca.as_deref(), Clients::MustShow)?;
        Ok(read.map(|(listen, config)| Tls { listen, config }))
    }
}

/// Creates the data directory, unless other users could change what is in it: the store trusts its
/// own files.
fn ensure_data_dir(data_dir: &Path) -> anyhow::Result<()> {
    let ensured = trusted_path::ensure_directory(data_dir, 0o700)
        .and_then(|()| trusted_path::check_with_entries(data_dir));
    ensured.with_context(|| format!("cannot keep data in {}", data_dir.display()))
}

pub(super) async fn run(args: &Typed) -> anyhow::Result<()> {
    let mut shutdown = Shutdown::listen().context("cannot catch signals")?;
    let keeper = Keeper::start(args.serving.config(args.data_dir.clone())?)?;
    announce(&keeper)?;
    serve(keeper, shutdown.asked()).await
}

/// Tells whoever started this process where it serves.
pub(super) fn announce(keeper: &Keeper) -> anyhow::Result<()> {
    let tls = keeper.tls_addr().map_or_else(String::new, |addr| format!("listening with TLS on {addr}\n"));
    output::data(&format!("listening on {}\n{tls}", keeper.local_addr())).context("cannot write to stdout")
}

/// Waits until it is asked to stop, or for the keeper to end by itself, which is always a failure of its disk.
pub(super) async fn serve(keeper: Keeper, asked: impl Future<Output = &'static str>) -> anyhow::Result<()> {
    let stop = keeper.stop_handle();
    let mut ended = tokio::task::spawn_blocking(move || keeper.wait());
    let result = tokio::select! {
        signal = asked => {
            info!(signal, "stopping");
            stop.stop();
            (&mut ended).await
        }
        result = &mut ended => result,
    };
    Ok(result.context("the keeper's thread is gone")??)
}
