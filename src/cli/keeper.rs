//! `portcullis keeper`: the embedded store as a process of its own.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use tracing::info;

use super::output;
use super::tls_door::TlsDoor;
use crate::keeper::state::TreeLimits;
use crate::keeper::tls::{Clients, Tls};
use crate::keeper::{Config, Keeper, Limits};
use crate::runtime::files::raise_open_files;
use crate::runtime::shutdown::Shutdown;

/// Names the identity that no access list binds. A variable and not a flag, because flags are seen by everyone.
const SUPER_DIGEST: &str = "PORTCULLIS_SUPER_DIGEST";

#[derive(Debug, Args)]
pub(super) struct Typed {
    /// Where the data is kept; made if it is not there
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
    /// Bytes in one request; a longer one closes its connection
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_frame_bytes)]
    max_frame_bytes: usize,
    /// Bytes of answers that a client may leave unread before its requests wait
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().max_outstanding_bytes)]
    max_outstanding_bytes: usize,
    /// Znodes in the tree
    #[arg(long, value_name = "N", default_value_t = TreeLimits::default().max_nodes)]
    max_nodes: usize,
    /// Bytes of data in the tree
    #[arg(long, value_name = "BYTES", default_value_t = TreeLimits::default().max_bytes)]
    max_tree_bytes: usize,
    /// Bytes of log after which a snapshot is taken
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    snapshot_every_bytes: u64,
}

impl Serving {
    /// The keeper's settings. Makes room for its connections, too, as far as the system lets it.
    pub(super) fn config(&self, data_dir: PathBuf) -> anyhow::Result<Config> {
        raise_open_files();
        Ok(Config {
            tls: self.tls()?,
            tick_ms: self.tick_ms,
            super_digest: std::env::var(SUPER_DIGEST).ok().filter(|digest| !digest.is_empty()),
            snapshot_every_bytes: self.snapshot_every_bytes,
            limits: Limits {
                max_connections: self.max_connections,
                max_frame_bytes: self.max_frame_bytes,
                max_outstanding_bytes: self.max_outstanding_bytes,
                tree: TreeLimits { max_nodes: self.max_nodes, max_bytes: self.max_tree_bytes },
            },
            ..Config::new(data_dir, self.listen)
        })
    }

    fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let read = self.tls.read(self.tls_client_ca.as_deref(), Clients::MustShow)?;
        Ok(read.map(|(listen, config)| Tls { listen, config }))
    }
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
