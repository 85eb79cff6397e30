//! The HTTP/1 server for metrics, health and heartbeats. It accepts connections, keeps them within limits of number, size
//! and time, checks the framing of every request strictly (`framing`), and passes whole requests to a handler. `express` is
//! the fast path for small POST requests, `exchange` serves every other request. Paths and replies belong to the handlers,
//! which see no type of the HTTP library.

pub mod chunked;
mod exchange;
mod express;
pub mod framing;
mod message;
mod patient;
mod secure;
mod share;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use self::exchange::Exchange;
pub use self::express::Glance;
use self::express::{Left, Plain};
use self::message::Wire;
pub use self::message::{BodyError, Reply, Request};
use self::patient::Patient;
use self::secure::Acceptor;
pub use self::share::{NoPlace, Place, Places};
use self::share::{Share, Shared};

/// After a failure to take a connection, such as no free file, others are given time to end.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that wait to be taken: thousands of clients come back at once after a restart, and one for whom there is no
/// room tries again a second later. The system may allow fewer.
const BACKLOG: u32 = 16 * 1024;

/// How long connections have to finish once we are asked to stop.
const DRAIN: Duration = Duration::from_secs(3);

const TOO_SLOW: &str = "No answer in time";

/// What nobody may exceed, however friendly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time; more wait to be taken. One address gets half of them, and is sent away with more.
    pub connections: usize,
    /// A request's line and headers. More is refused with 431.
    pub head_bytes: usize,
    /// A request's body. A larger one is refused, by its announced length where there is one.
    pub body_bytes: usize,
    /// Paths whose bodies may be larger.
    pub large_bodies: &'static [(&'static str, usize)],
    /// What bodies above [`Limits::body_bytes`] may take at the same time, all together; one address gets half of it. What
    /// is more is refused with 503.
    pub large_bytes: usize,
    /// Buffers of all other unfinished requests together, beyond one KiB for each connection; one address gets half of
    /// it. More is refused with 503.
    pub pending_bytes: usize,
    /// After a refusal, so much of the refused request is still read and discarded, so that its sender sees the reply.
    pub spill_bytes: usize,
    /// For an idle connection.
    pub head_time: Duration,
    /// From the first byte of a head to its end, then for the body, and then for the handler.
    pub request_time: Duration,
    /// Without a single byte taken by a client that is being answered.
    pub write_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            head_bytes: 16 * 1024,
            body_bytes: 64 * 1024,
            large_bodies: &[],
            large_bytes: 64 * 1024 * 1024,
            pending_bytes: 32 * 1024 * 1024,
            spill_bytes: 4 * 1024 * 1024,
            head_time: Duration::from_secs(30),
            request_time: Duration::from_secs(10),
            write_time: Duration::from_secs(10),
        }
    }
}

impl Limits {
    fn body_limit(&self, path: &str) -> usize {
        let large = self.large_bodies.iter().find(|(large, _)| *large == path);
        large.map_or(self.body_bytes, |(_, bytes)| *bytes)
    }

    /// What a body takes of what large ones have together: as it came in, and as the one piece that is handed on.
    fn large(&self, body: usize) -> Option<usize> {
        (body > self.body_bytes).then_some(2 * body)
    }
}

/// Whoever answers at a door. A function from request to reply is one.
pub trait Handler: Send + Sync + 'static {
    fn answer(&self, request: Request) -> impl Future<Output = Reply> + Send;

    /// Does what a POST asks for, if that can be done on the spot and needs no other answer than an empty 200.
    fn taken_at_once(&self, _: &Glance<'_>) -> bool {
        false
    }
}

impl<H, F> Handler for H
where
    H: Fn(Request) -> F + Send + Sync + 'static,
    F: Future<Output = Reply> + Send,
{
    fn answer(&self, request: Request) -> impl Future<Output = Reply> + Send {
        self(request)
    }
}

/// A door that is open and not yet answered at.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    limits: Limits,
    tls: Option<Acceptor>,
}

impl Server {
    /// # Errors
    /// If the address cannot be listened on.
    pub async fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A port whose last connections have just ended is free.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { listener: socket.listen(BACKLOG)?, limits, tls: None })
    }

    /// Every connection speaks TLS.
    #[must_use]
    pub fn with_tls(self, config: Arc<ServerConfig>) -> Self {
        Self { tls: Some(Acceptor::new(config)), ..self }
    }

    /// # Errors
    /// If the system does not know.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers with `handler` until `stop` is true or its sender gone; then lets what was begun be finished, for a
    /// moment.
    pub async fn serve<H: Handler>(self, handler: H, stop: watch::Receiver<bool>) {
        self.serve_with(Arc::new(handler), stop).await;
    }

    /// The same for a handler at several doors.
    pub async fn serve_with<H: Handler>(self, handler: Arc<H>, mut stop: watch::Receiver<bool>) {
        let room = Arc::new(Semaphore::new(self.limits.connections));
        let shared = Shared::new(&self.limits);
        let mut connections = JoinSet::new();
        loop {
            let taken = tokio::select! {
                () = stopped(&mut stop) => break,
                Some(ended) = connections.join_next(), if !connections.is_empty() => {
                    reap(ended);
                    continue;
                }
                taken = take(&self.listener, &room) => taken,
            };
            match taken {
                Ok((stream, peer, permit)) => {
                    let Some(share) = shared.connection(peer.ip()) else {
                        debug!(%peer, "has its share of connections");
                        if self.tls.is_none() {
                            send_away(&stream);
                        }
                        continue;
                    };
                    let door = Door {
                        limits: self.limits,
                        handler: Arc::clone(&handler),
                        shared: Arc::clone(&shared),
                    };
                    let room = (permit, share);
                    match self.tls.clone() {
                        None => connections.spawn(connection(stream, peer, door, stop.clone(), room)),
                        Some(tls) => {
                            connections.spawn(tls.connection(stream, peer, door, stop.clone(), room))
                        }
                    };
                }
                Err(error) => {
                    warn!(%error, "cannot take connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        let drained = async {
            while let Some(ended) = connections.join_next().await {
                reap(ended);
            }
        };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            connections.shutdown().await;
        }
    }
}

/// A sender that is gone means the same as its word.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
}

fn reap(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        warn!(%error, "a connection ended badly");
    }
}

/// The next connection, once there is room for it. Cancel-safe: a permit without a connection goes back.
async fn take(
    listener: &TcpListener,
    room: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    // The semaphore is never closed.
    let permit = Arc::clone(room).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok((stream, peer, permit))
}

/// What every connection of a door needs to know.
struct Door<H> {
    limits: Limits,
    handler: Arc<H>,
    shared: Arc<Shared>,
}

/// Who is at the other end.
#[derive(Debug, Clone)]
struct Caller {
    peer: SocketAddr,
    /// Shown and vouched for, where the door speaks TLS.
    certificate: Option<Bytes>,
}

/// Says so, if it can be said at once.
fn send_away(stream: &TcpStream) {
    let reply = Reply::unavailable("Too many connections from this address");
    let mut answer = Vec::new();
    reply.write_to(&mut answer, &express::now(), Wire { close: true, ..Wire::default() });
    // If the reply cannot be written at once, the client sees only the end of the connection.
    let _ = stream.try_write(&answer);
}

async fn connection<H: Handler>(
    mut stream: TcpStream,
    peer: SocketAddr,
    door: Door<H>,
    stop: watch::Receiver<bool>,
    _room: (OwnedSemaphorePermit, Share),
) {
    let caller = Caller { peer, certificate: None };
    let mut read = BytesMut::new();
    let ended = loop {
        let Door { limits, handler, shared: _ } = &door;
        let plain = Plain { stream: &mut stream, peer, limits, handler: &**handler, stop: stop.clone() };
        let since = match plain.serve(&mut read).await {
            Ok(Left::Request(since)) => since,
            Ok(Left::Nothing) => break Ok(()),
            Err(error) => break Err(error),
        };
        // Boxed, because few connections need this, and its state is large.
        let stream = Patient::new(&mut stream, door.limits.write_time);
        let exchange =
            Exchange { stream, read: &mut read, caller: &caller, door: &door, stop: stop.clone(), since };
        match Box::pin(exchange.serve()).await {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    if let Err(error) = ended {
        debug!(%peer, %error, "connection ended early");
    }
}

/// Serves every request of a connection without the fast path.
async fn serve_general<H: Handler>(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    caller: &Caller,
    door: &Door<H>,
    stop: &watch::Receiver<bool>,
) {
    let mut read = BytesMut::new();
    loop {
        let stream = Patient::new(&mut stream, door.limits.write_time);
        let exchange =
            Exchange { stream, read: &mut read, caller, door, stop: stop.clone(), since: Instant::now() };
        match exchange.serve().await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                debug!(peer = %caller.peer, %error, "connection ended early");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
