//! Accepts connections on an address, within a limit for all of them and one for each client
//! address, and lets them finish when the process stops. The bytes of a connection belong to the
//! protocol that is served on it.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::client_limits::{Slots, half_of};
use crate::runtime::service::stopped;

/// Pause after a failure to accept, for example when no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that wait to be accepted: thousands of clients connect at once after a restart, and
/// a client that finds the queue full tries again only after a second. The system may allow fewer.
const BACKLOG: u32 = 16 * 1024;

/// The time that connections have to finish once `stop` is set.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// An address that is bound.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    max_connections: usize,
}

impl Listener {
    /// Binds `address`. At most `max_connections` are open at the same time; more wait to be
    /// accepted. One client address gets half of them.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn bind(address: SocketAddr, max_connections: usize) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Allows a port whose last connections have just ended.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { socket: socket.listen(BACKLOG)?, max_connections })
    }

    /// # Errors
    /// If the system cannot return the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Runs `serve` for every connection until `stop` is true or its sender is dropped, then waits
    /// a bounded time for the open connections. Connections beyond the limit of their client
    /// address are passed to `refuse` and closed.
    pub async fn run<F: Future<Output = ()> + Send + 'static>(
        self,
        serve: impl Fn(TcpStream, SocketAddr) -> F,
        refuse: impl Fn(&TcpStream),
        mut stop: watch::Receiver<bool>,
    ) {
        let free = Arc::new(Semaphore::new(self.max_connections));
        let slots = Slots::new(self.max_connections, half_of(self.max_connections));
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = stopped(&mut stop) => break,
                Some(ended) = connections.join_next(), if !connections.is_empty() => {
                    log_panic(ended);
                    continue;
                }
                accepted = accept(&self.socket, &free) => accepted,
            };
            match accepted {
                Ok((stream, peer, permit)) => match slots.take(peer.ip()) {
                    Ok(slot) => {
                        let serving = serve(stream, peer);
                        connections.spawn(async move {
                            serving.await;
                            drop((permit, slot));
                        });
                    }
                    Err(_) => {
                        debug!(%peer, "too many connections from this address");
                        refuse(&stream);
                    }
                },
                Err(error) => {
                    warn!(%error, "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.socket);
        drain(connections).await;
    }
}

/// Waits a bounded time for the end of the connections, then ends them.
pub async fn drain(mut connections: JoinSet<()>) {
    let drained = async {
        while let Some(ended) = connections.join_next().await {
            log_panic(ended);
        }
    };
    if tokio::time::timeout(DRAIN_TIMEOUT, drained).await.is_err() {
        connections.shutdown().await;
    }
}

fn log_panic(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        warn!(%error, "the task of a connection failed");
    }
}

/// Returns the next connection, once fewer than the limit are open. Cancel-safe: a permit without a
/// connection is given back.
async fn accept(
    socket: &TcpListener,
    free: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    // The semaphore is never closed.
    let permit = Arc::clone(free).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = socket.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer, permit))
}
