//! Serves HTTP on a listener: the limits of requests, and the connections, with TLS and without.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use super::buffer_limits::BufferLimits;
use super::exchange::Exchange;
use super::fast_path::{self, FastConnection, Left, RawPost};
use super::message::{Reply, Request, Wire};
use super::tls_accept;
use super::write_timeout::WriteTimeout;
use crate::net::listener::Listener;
use crate::net::tls::ServerTls;
use crate::net::tls::refused_client::RefusedClients;

pub(super) const TOO_SLOW: &str = "No answer in time";

/// The limits of a server and of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time; more wait to be accepted. One client address gets half of
    /// them; beyond that its connections are refused with 503.
    pub connections: usize,
    /// A request's line and headers. More is refused with 431.
    pub head_bytes: usize,
    /// A request's body. A larger one is refused, by its announced length where there is one.
    pub body_bytes: usize,
    /// Paths whose bodies may be larger.
    pub large_bodies: &'static [(&'static str, usize)],
    /// All bodies above [`Limits::body_bytes`] together; one client address gets half of it. More
    /// is refused with 503.
    pub large_bytes: usize,
    /// Buffers of all other unfinished requests together, beyond one KiB for each connection; one
    /// client address gets half of it. More is refused with 503.
    pub pending_bytes: usize,
    /// The part of a refused request that is still read and discarded, so that its client sees the
    /// reply.
    pub spill_bytes: usize,
    /// For an idle connection.
    pub head_time: Duration,
    /// From the first byte of a head to its end, then for the body, and then for the handler.
    pub request_time: Duration,
    /// For a client that reads no byte of its reply.
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
    pub(super) fn body_limit(&self, path: &str) -> usize {
        let large = self.large_bodies.iter().find(|(large, _)| *large == path);
        large.map_or(self.body_bytes, |(_, bytes)| *bytes)
    }

    /// Returns the memory of a large body: the bytes as received, and the one piece that is passed
    /// to the handler.
    pub(super) fn large(&self, body: usize) -> Option<usize> {
        (body > self.body_bytes).then_some(2 * body)
    }
}

/// Answers requests. A function from request to reply is a handler.
pub trait Handler: Send + Sync + 'static {
    fn answer(&self, request: Request) -> impl Future<Output = Reply> + Send;

    /// Handles a POST request at once, without waiting, if its answer is an empty 200. Returns
    /// whether it did.
    fn handle_fast(&self, _: &RawPost<'_>) -> bool {
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

/// A server whose address is bound.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    limits: Limits,
    tls: Option<ServerTls>,
}

impl Server {
    /// # Errors
    /// If the address cannot be bound.
    pub async fn bind(address: SocketAddr, limits: Limits) -> io::Result<Self> {
        Ok(Self { listener: Listener::bind(address, limits.connections)?, limits, tls: None })
    }

    /// Serves TLS on every connection.
    #[must_use]
    pub fn with_tls(self, tls: ServerTls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// # Errors
    /// If the system cannot return the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers with `handler` until `stop` is true or its sender is dropped. Requests that have
    /// begun then have a bounded time to finish.
    pub async fn serve<H: Handler>(self, handler: H, stop: watch::Receiver<bool>) {
        self.serve_with(Arc::new(handler), stop).await;
    }

    /// The same for a handler of several servers.
    pub async fn serve_with<H: Handler>(self, handler: Arc<H>, stop: watch::Receiver<bool>) {
        let Self { listener, limits, tls } = self;
        let is_plain = tls.is_none();
        let (buffers, refused) = (BufferLimits::new(&limits), RefusedClients::default());
        let endpoint = Arc::new(Endpoint { limits, handler, buffers, tls, refused });
        let stopping = stop.clone();
        let serve = move |stream, peer| connection(stream, peer, Arc::clone(&endpoint), stopping.clone());
        let refuse = |stream: &TcpStream| {
            if is_plain {
                refuse(stream);
            }
        };
        listener.run(serve, refuse, stop).await;
    }
}

/// The state that all connections of a server share.
pub(super) struct Endpoint<H> {
    pub(super) limits: Limits,
    pub(super) handler: Arc<H>,
    pub(super) buffers: Arc<BufferLimits>,
    tls: Option<ServerTls>,
    /// The log lines about clients of a plain listener that use TLS.
    pub(super) refused: RefusedClients,
}

/// The client of a connection.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) peer: SocketAddr,
    /// The verified certificate of a TLS connection, in DER form.
    pub(super) certificate: Option<Bytes>,
}

/// Replies with 503, if that can be written at once.
fn refuse(stream: &TcpStream) {
    let reply = Reply::unavailable("Too many connections from this address");
    let mut answer = Vec::new();
    reply.write_to(&mut answer, &fast_path::now(), Wire { close: true, ..Wire::default() });
    // Otherwise the client sees only the end of the connection.
    let _ = stream.try_write(&answer);
}

async fn connection<H: Handler>(
    stream: TcpStream,
    peer: SocketAddr,
    endpoint: Arc<Endpoint<H>>,
    mut stop: watch::Receiver<bool>,
) {
    let Some(tls) = &endpoint.tls else {
        return plain_connection(stream, peer, &endpoint, stop).await;
    };
    // Boxed, because the state of a handshake is large, and most connections have no TLS.
    let accepting = tls_accept::accept(tls, (stream, peer), endpoint.limits.request_time, &mut stop);
    if let Some((stream, certificate)) = Box::pin(accepting).await {
        let caller = Caller { peer, certificate };
        Box::pin(serve_general(stream, &caller, &endpoint, &stop)).await;
    }
}

async fn plain_connection<H: Handler>(
    mut stream: TcpStream,
    peer: SocketAddr,
    endpoint: &Endpoint<H>,
    stop: watch::Receiver<bool>,
) {
    let caller = Caller { peer, certificate: None };
    let mut read = BytesMut::new();
    let ended = loop {
        let Endpoint { limits, handler, .. } = endpoint;
        let fast =
            FastConnection { stream: &mut stream, peer, limits, handler: &**handler, stop: stop.clone() };
        let since = match fast.serve(&mut read).await {
            Ok(Left::Request(since)) => since,
            Ok(Left::Nothing) => break Ok(()),
            Err(error) => break Err(error),
        };
        // Boxed, because few connections need this, and its state is large.
        let stream = WriteTimeout::new(&mut stream, limits.write_time);
        let exchange =
            Exchange { stream, read: &mut read, caller: &caller, endpoint, stop: stop.clone(), since };
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
    endpoint: &Endpoint<H>,
    stop: &watch::Receiver<bool>,
) {
    let mut read = BytesMut::new();
    loop {
        let stream = WriteTimeout::new(&mut stream, endpoint.limits.write_time);
        let (stop, since) = (stop.clone(), Instant::now());
        let exchange = Exchange { stream, read: &mut read, caller, endpoint, stop, since };
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
