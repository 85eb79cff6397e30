//! Starting and stopping a keeper from a program: its settings, its limits, and the handle on its thread.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use mio::Waker;
use tracing::{debug, warn};

use super::admission::ConnectionLimits;
use super::identities::IdentityLimits;
use super::log::StorageError;
use super::server::Server;
use super::state::TreeLimits;
use super::storage::RESERVE_BYTES;
use super::tls::Tls;
use super::watching::WatchLimits;

/// Open files that no connection may take: the log, a snapshot, the doors, and whatever else is in the process.
const RESERVED_FILES: usize = 64;

/// Beyond each of these there is a refusal, and a line in the log or an error code that says so.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// A connection beyond it is closed at once and counted in `mntr`. A limit of open files lowers it.
    pub max_connections: usize,
    /// The same for one remote address; 0 is no limit. Connections from loopback are not counted.
    pub max_connections_per_address: usize,
    /// A connection that has not authenticated as an identity in some access list is closed after
    /// this time, if the root node grants it no right either; 0 is never.
    pub unauthenticated_ms: i64,
    /// A longer or negative frame closes its connection.
    pub max_frame_bytes: usize,
    /// Answers that a client has not taken: at this many its requests wait; with events on top of four times as
    /// many its connection is closed.
    pub max_outstanding_bytes: usize,
    /// Memory for unfinished requests and unread answers of all connections together. Above it the
    /// connection that uses the most is closed.
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
    /// Bytes of the longest answer. It is longer than the longest request, so that a node written
    /// with the largest request can be read: the answer also has a stat and headers.
    pub(super) fn max_answer_bytes(&self) -> usize {
        const AROUND_DATA: usize = 1 << 10;
        self.max_frame_bytes.saturating_add(AROUND_DATA)
    }

    pub(super) fn connections(&self) -> ConnectionLimits {
        ConnectionLimits { total: self.max_connections, per_address: self.max_connections_per_address }
    }

    /// These limits in a process that may have so many files open, if that is limited: each connection is one, and a
    /// keeper without a free one can neither refuse a connection nor turn its log.
    pub(super) fn within(self, open_files: Option<u64>) -> Self {
        let files = open_files.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
        let most = files - RESERVED_FILES.min(files / 2);
        if most < self.max_connections {
            warn!(
                open_files = files,
                asked = self.max_connections,
                max_connections = most,
                "fewer connections than asked for: the limit of open files allows no more"
            );
        }
        Limits { max_connections: self.max_connections.min(most), ..self }
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    /// A second door, for clients that want TLS.
    pub tls: Option<Tls>,
    pub tick_ms: i32,
    /// `user:hash` of the identity that no access list binds.
    pub super_digest: Option<String>,
    /// A snapshot is taken when this much log has grown since the last.
    pub snapshot_every_bytes: u64,
    /// Disk space that is reserved for a full disk; 0 is none.
    pub reserve_bytes: u64,
    pub limits: Limits,
}

impl Config {
    pub fn new(data_dir: impl Into<PathBuf>, listen: SocketAddr) -> Self {
        Config {
            data_dir: data_dir.into(),
            listen,
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
    #[error("cannot wait for connections")]
    Poll(#[source] io::Error),
    #[error("the keeper's thread panicked")]
    Panicked,
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// A running keeper. Dropped, it stops as after `stop`, and waits.
#[derive(Debug)]
pub struct Keeper {
    local_addr: SocketAddr,
    tls_addr: Option<SocketAddr>,
    stop: StopHandle,
    thread: Option<JoinHandle<Result<(), KeeperError>>>,
}

/// Stops a keeper from anywhere.
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
            // The loop looks at the flag once a second in any case.
            debug!(%err, "could not wake the keeper");
        }
    }
}

impl Keeper {
    /// Recovers the data directory, binds, and serves on a thread of its own.
    pub fn start(config: Config) -> Result<Keeper, KeeperError> {
        let (server, stop) = Server::new(config)?;
        let (local_addr, tls_addr) = (server.local_addr(), server.tls_addr());
        let thread = std::thread::Builder::new()
            .name("keeper".to_owned())
            .spawn(move || server.run())
            .map_err(KeeperError::Poll)?;
        Ok(Keeper { local_addr, tls_addr, stop, thread: Some(thread) })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Where TLS is served, if it is.
    pub fn tls_addr(&self) -> Option<SocketAddr> {
        self.tls_addr
    }

    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Waits until the keeper has stopped: after `stop`, or because its disk failed.
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
