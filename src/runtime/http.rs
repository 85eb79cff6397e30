//! HTTP/1 for the daemon's own doors: metrics, health, beats. Takes connections, keeps every one of them within limits of
//! number, size and time, and hands whole requests to whoever asked for them. It knows no path and no meaning: what to
//! answer belongs to the callers, which see no type of the HTTP library.

mod express;
mod message;
mod patient;
mod secure;
mod share;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tracing::{debug, warn};

pub use self::express::Glance;
use self::express::Plain;
use self::message::Content;
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
    /// A request's body. More is read and thrown away, up to [`Limits::spill_bytes`], so that the sender gets to the
    /// answer that says so.
    pub body_bytes: usize,
    /// Paths whose bodies may be larger.
    pub large_bodies: &'static [(&'static str, usize)],
    /// What bodies above [`Limits::body_bytes`] may take at the same time, all together; one address gets half of it. What
    /// is more is refused with 503.
    pub large_bytes: usize,
    pub spill_bytes: usize,
    /// From the end of one request to the end of the head of the next: an idle connection ends after it, too.
    pub head_time: Duration,
    /// For the body, and then for the answer to be made.
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
    let reply = Reply::unavailable("Too many connections from this address").with("connection", "close");
    let mut answer = Vec::new();
    if reply.push_onto(&mut answer, &express::now()).is_ok() {
        // One that does not read it sees at least the end.
        let _ = stream.try_write(&answer);
    }
}

async fn connection<H: Handler>(
    stream: TcpStream,
    peer: SocketAddr,
    door: Door<H>,
    stop: watch::Receiver<bool>,
    _room: (OwnedSemaphorePermit, Share),
) {
    let Door { limits, handler, shared } = &door;
    let plain = Plain { stream, peer, limits, handler: &**handler, shared, stop: stop.clone() };
    match plain.serve().await {
        Ok(None) => {}
        Ok(Some((stream, read))) => {
            // Few go on here, and what it needs is large.
            let caller = Caller { peer, certificate: None };
            Box::pin(by_the_book(stream, read.freeze(), caller, Arc::new(door), stop)).await;
        }
        Err(error) => debug!(%peer, %error, "connection ended early"),
    }
}

/// Serves a connection as the HTTP library does it; `read` is what was read of it before.
async fn by_the_book<H: Handler>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    read: Bytes,
    caller: Caller,
    door: Arc<Door<H>>,
    mut stop: watch::Receiver<bool>,
) {
    let (limits, peer) = (door.limits, caller.peer);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (door, caller) = (Arc::clone(&door), caller.clone());
        async move { Ok::<_, Infallible>(answer(request, caller, &door).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).max_header_size(limits.head_bytes).header_read_timeout(limits.head_time);
    // Its own choice is six times as much, for each connection.
    builder.max_buf_size(64 * 1024);
    let io = TokioIo::new(Patient::new(stream, limits.write_time).after(read));
    let mut serving = pin!(builder.serve_connection(io, service));
    // Serving first: what it has of a request by now is read before it is told to end, and is not thrown away for one that
    // has not begun.
    let ended = tokio::select! {
        biased;
        ended = serving.as_mut() => ended,
        () = stopped(&mut stop) => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        debug!(%peer, %error, "connection ended early");
    }
}

async fn answer<H: Handler>(
    request: hyper::Request<Incoming>,
    Caller { peer, certificate }: Caller,
    door: &Door<H>,
) -> Response<Content> {
    let (head, incoming) = request.into_parts();
    let limits = door.limits;
    let allowed = limits.body_limit(head.uri.path());
    // The length that was announced; one that was not may be anything that is allowed.
    let expected = incoming
        .size_hint()
        .upper()
        .map_or(allowed, |bytes| allowed.min(bytes.try_into().unwrap_or(allowed)));
    let room = limits.large(expected).map(|bytes| door.shared.bytes(peer.ip(), bytes));
    let busy = matches!(room, Some(None));
    // Without room it is read all the same, and thrown away.
    let limits = Limits { body_bytes: if busy { limits.body_bytes } else { allowed }, ..limits };
    let body = tokio::time::timeout(limits.request_time, read_body(incoming, limits))
        .await
        .unwrap_or(Err(BodyError::TooSlow));
    let body = if busy && body.is_err() { Err(BodyError::Busy) } else { body };
    // What is left unread would be taken for the next request.
    let failed = body.as_ref().err().copied();
    let request = Request { head, body, peer, certificate };
    let reply = tokio::time::timeout(limits.request_time, door.handler.answer(request))
        .await
        .unwrap_or_else(|_| Reply::unavailable(TOO_SLOW));
    drop(room);
    let reply = if failed.is_some() { reply.with("connection", "close") } else { reply };
    let reply = if failed == Some(BodyError::Busy) { reply.with("retry-after", "1") } else { reply };
    reply.into_response()
}

async fn read_body(mut body: Incoming, limits: Limits) -> Result<Bytes, BodyError> {
    let mut first: Option<Bytes> = None;
    let mut more = BytesMut::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        total += data.len();
        if total > limits.body_bytes {
            (first, more) = (None, BytesMut::new());
            if total > limits.body_bytes + limits.spill_bytes {
                break;
            }
        } else if first.is_none() {
            // Most bodies are one piece, and need not be copied.
            first = Some(data);
        } else {
            more.extend_from_slice(&data);
        }
    }
    match first {
        _ if total > limits.body_bytes => Err(BodyError::TooLarge),
        None => Ok(Bytes::new()),
        Some(first) if more.is_empty() => Ok(first),
        Some(first) => Ok([first, more.freeze()].concat().into()),
    }
}

#[cfg(test)]
mod tests;
