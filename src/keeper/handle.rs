//! Starts and stops a keeper: configuration, limits, and the handle of its thread.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use mio::Waker;
use tracing::{debug, warn};

use super::admission::ConnectionLimits;
use super::four_letter::Stats;
use super::identities::IdentityLimits;
use super::log::StorageError;
use super::server::Server;
use super::state::TreeLimits;
use super::storage::RESERVE_BYTES;
use super::watch_requests::WatchLimits;
use crate::net::tls::ServerTls;

/// Open files that are reserved for the log, snapshots, listeners and the rest of the process.
const RESERVED_FILES: usize = 64;

/// Limits of the server. Exceeding one is refused with a log line or an error code.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A connection beyond the limit is closed at once and counted in `mntr`. The limit of open
    /// files of the process lowers this limit.
    pub max_connections: usize,
    /// The same for one remote address; 0 is no limit. Connections from loopback are not counted.
    pub max_connections_per_address: usize,
    /// A connection that has not authenticated as an identity in some access list is closed after
    /// this time, if the root node grants it no right either; 0 is never.
    pub unauthenticated_ms: i64,
    /// A longer or negative frame closes its connection.
    pub max_frame_bytes: usize,
    /// Unsent bytes of replies to one client. Above this limit its requests are postponed; above
    /// four times this limit, which events can cause, its connection is closed.
    pub max_outstanding_bytes: usize,
    /// Total memory of incomplete requests and unsent replies. Above the limit the connection with
    /// the largest buffers is closed.
    pub max_buffer_bytes: usize,
    pub identities: IdentityLimits,
    pub watches: WatchLimits,
    pub tree: TreeLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_connections: 10_000,
            max_connections_per_address: 60,
            unauthenticated_ms: 30_000,
            max_frame_bytes: 1_048_575,
            max_outstanding_bytes: 4 << 20,
            max_buffer_bytes: 128 << 20,
            identities: IdentityLimits::default(),
            watches: WatchLimits::default(),
            tree: TreeLimits::default(),
        }
    }
}

impl Limits {
    /// Returns the size limit of a reply. It is larger than that of a request, so that a node
    /// written with the largest request can be read: the reply also has a stat and headers.
    pub(super) fn max_answer_bytes(&self) -> usize {
        const AROUND_DATA: usize = 1 << 10;
        self.max_frame_bytes.saturating_add(AROUND_DATA)
    }

    pub(super) fn connections(&self) -> ConnectionLimits {
        ConnectionLimits { total: self.max_connections, per_address: self.max_connections_per_address }
    }

    /// Lowers the limits to the process's limit of open files, if it has one. Each connection is an
    /// open file, and without a free one the keeper can neither refuse a connection nor start a new
    /// log segment.
    pub(super) fn within(self, open_files: Option<u64>) -> Self {
        let files = open_files.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
        let most = files - RESERVED_FILES.min(files / 2);
        if most < self.max_connections {
            warn!(
                open_files = files,
                asked = self.max_connections,
                max_connections = most,
                "connection limit lowered to the limit of open files"
            );
        }
        Limits { max_connections: self.max_connections.min(most), ..self }
    }
}

/// The TLS listener.
#[derive(Debug, Clone)]
pub struct TlsListen {
    pub listen: SocketAddr,
    pub config: ServerTls,
}

#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    /// Serves TLS on `listen`, too.
    pub listen_tls: Option<ServerTls>,
    /// A second listener, with TLS.
    pub tls: Option<TlsListen>,
    pub tick_ms: i32,
    /// `user:hash` of the identity that bypasses all access lists.
    pub super_digest: Option<String>,
    /// A snapshot is written when the log has grown by this much since the last one.
    pub snapshot_every_bytes: u64,
    /// Disk space that is reserved for operation on a full disk; 0 reserves none.
    pub reserve_bytes: u64,
    pub limits: Limits,
}

impl Config {
    pub fn new(data_dir: impl Into<PathBuf>, listen: SocketAddr) -> Self {
        Config {
            data_dir: data_dir.into(),
            listen,
            listen_tls: None,
            tls: None,
            tick_ms: 2_000,
            super_digest: None,
            snapshot_every_bytes: 64 << 20,
            reserve_bytes: RESERVE_BYTES,
            limits: Limits::default(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("cannot listen on {addr}")]
    Listen { addr: SocketAddr, source: io::Error },
    #[error("cannot poll for connections")]
    Poll(#[source] io::Error),
    #[error("the keeper's thread panicked")]
    Panicked,
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// A running keeper. Dropping it stops it and waits for its thread.
#[derive(Debug)]
pub struct Keeper {
    local_addr: SocketAddr,
    tls_addr: Option<SocketAddr>,
    stop: StopHandle,
    thread: Option<JoinHandle<Result<(), KeeperError>>>,
    stats: SharedStats,
}

/// Stops a keeper from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle {
    stopping: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl StopHandle {
    pub(super) fn new(stopping: Arc<AtomicBool>, waker: Arc<Waker>) -> Self {
        StopHandle { stopping, waker }
    }

    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        if let Err(err) = self.waker.wake() {
            // The event loop reads the flag once a second in any case.
            debug!(%err, "waking the keeper failed");
        }
    }
}

/// The counters of the keeper, as of a second ago at most, without the list of clients.
#[derive(Debug, Clone, Default)]
pub struct SharedStats(Arc<Mutex<Stats>>);

impl SharedStats {
    pub fn get(&self) -> Stats {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, stats: Stats) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

impl Keeper {
    /// Recovers the data directory, binds the listeners, and starts the server's thread.
    pub fn start(config: Config) -> Result<Keeper, KeeperError> {
        let (server, stop) = Server::new(config)?;
        let (local_addr, tls_addr, stats) = (server.local_addr(), server.tls_addr(), server.stats());
        let thread = std::thread::Builder::new()
            .name("keeper".to_owned())
            .spawn(move || server.run())
            .map_err(KeeperError::Poll)?;
        Ok(Keeper { local_addr, tls_addr, stop, thread: Some(thread), stats })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Returns the address of the TLS listener, if there is one.
    pub fn tls_addr(&self) -> Option<SocketAddr> {
        self.tls_addr
    }

    pub fn stats(&self) -> SharedStats {
        self.stats.clone()
    }

    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Waits until the keeper stops, because of `stop` or a failed disk.
    pub fn wait(mut self) -> Result<(), KeeperError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), KeeperError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(KeeperError::Panicked),
            None => Ok(()),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.stop();
        if let Err(err) = self.join() {
            warn!(%err, "keeper stopped with an error");
        }
    }
}
