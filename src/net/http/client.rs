//! The HTTP client: one request and the status of its answer, within a time limit. It keeps idle
//! connections for the next request to the same server. Retries after an error belong to the
//! callers; the only retry here is the one that an idle connection makes necessary.

use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::net::tls::ClientTls;
use crate::net::tls::client::ConfigVersion;
use crate::net::tls::probe::{client_problem, refused_certificate};
use crate::net::url::{Url, UrlError};

/// More of an answer than this is not read.
const MAX_ANSWER: usize = 64 * 1024;

/// Idle connections to one server.
const MAX_IDLE: usize = 4;

/// After this time an idle connection is not used again. Servers of this crate close theirs after
/// 30 seconds.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// The same for calls that are not repeated: many other servers close idle connections after a few
/// seconds, and a request that meets the end of its connection has an unknown result.
const IDLE_TIMEOUT_ONCE: Duration = Duration::from_secs(1);

/// One request to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub method: &'static str,
    /// `http://HOST[:PORT]/PATH`, or the same with `https`.
    pub url: String,
    /// Besides those that every request has; names in lower case.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// For the whole exchange, with the connection if a new one is needed.
    pub limit: Duration,
    /// Whether the client may send the request again when an idle connection was closed before the
    /// answer came. The server may handle such a request twice.
    pub repeatable: bool,
}

impl Call {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }
}

/// Makes calls; tests have an implementation of their own.
pub trait HttpClient: Send + Sync + 'static {
    /// Returns the status of the answer, if there was a whole answer in time.
    fn call(&self, call: Call) -> impl Future<Output = Result<u16, CallError>> + Send;
}

/// The reason why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("invalid address: {0}")]
    Address(#[from] UrlError),
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("TLS handshake failed: {0}")]
    Tls(std::io::Error),
    #[error("no whole answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("invalid request: {0}")]
    Request(#[from] hyper::http::Error),
    #[error("no answer in time")]
    TooSlow,
    /// The call was not made, or its task ended: the caller may no longer make it.
    #[error("the call was cancelled")]
    Cancelled,
}

impl CallError {
    /// Returns one line about a failed call to this URL, with the remedy if it is a matter of TLS.
    pub fn problem(&self, url: &str) -> String {
        let problem = match self {
            Self::Tls(error) => {
                let host = Url::parse(url).ok().map(|url| url.host);
                client_problem(error, &host.unwrap_or_default())
            }
            Self::Http(error) if !url.starts_with("https://") && (error.is_parse() || is_closed(error)) => {
                Some(format!("{self}: if the server requires TLS, its address begins with https://"))
            }
            other => refused_certificate(other).map(str::to_owned),
        };
        problem.unwrap_or_else(|| self.to_string())
    }
}

/// Whether the server has closed the connection without an answer.
fn is_closed(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    error.is_incomplete_message()
        || source.is_some_and(|source| source.kind() == std::io::ErrorKind::ConnectionReset)
}

/// The client for HTTP/1, with TLS and without. Clones share their idle connections.
#[derive(Debug, Clone, Default)]
pub struct Client {
    tls: ClientTls,
    idle: Arc<Mutex<Idle>>,
}

/// A request that failed on its connection.
struct Failed {
    error: CallError,
    /// Whether no byte of the request was sent.
    is_unsent: bool,
}

impl Client {
    pub fn new(tls: ClientTls) -> Self {
        Self { tls, ..Self::default() }
    }

    async fn exchange(&self, call: &Call) -> Result<u16, CallError> {
        let url = Url::parse(&call.url)?;
        let most = if call.repeatable { IDLE_TIMEOUT } else { IDLE_TIMEOUT_ONCE };
        loop {
            let idle = self.idle().take(&url, most);
            let Some(mut connection) = idle else { break };
            // A changed certificate is presented with the next call, on a new connection.
            let is_current = !url.is_tls || connection.tls == self.tls.version().await;
            if !is_current || connection.sender.ready().await.is_err() {
                continue;
            }
            match self.send(connection, request(call, &url)?, &url).await {
                Err(failed) if failed.is_unsent || call.repeatable => {}
                done => return done.map_err(|failed| failed.error),
            }
        }
        let connection = self.connect(&url).await?;
        self.send(connection, request(call, &url)?, &url).await.map_err(|failed| failed.error)
    }

    /// Dropping the future closes the connection.
    async fn send(
        &self,
        mut connection: Connection,
        request: Request<Full<Bytes>>,
        url: &Url,
    ) -> Result<u16, Failed> {
        let response = connection.sender.try_send_request(request).await.map_err(|mut error| {
            let is_unsent = error.take_message().is_some();
            Failed { error: error.into_error().into(), is_unsent }
        })?;
        let status = response.status().as_u16();
        let mut answer = response.into_body();
        let mut read = 0;
        while let Some(frame) = answer.frame().await {
            let frame = frame.map_err(|error| Failed { error: error.into(), is_unsent: false })?;
            read += frame.data_ref().map_or(0, Bytes::len);
            if read > MAX_ANSWER {
                return Ok(status);
            }
        }
        self.idle().put(url, connection);
        Ok(status)
    }

    async fn connect(&self, url: &Url) -> Result<Connection, CallError> {
        let stream = match url.host.parse::<IpAddr>() {
            Ok(address) => TcpStream::connect(SocketAddr::from((address, url.port))).await,
            Err(_) => TcpStream::connect((url.host.as_str(), url.port)).await,
        };
        let stream = stream.map_err(CallError::Connect)?;
        stream.set_nodelay(true).map_err(CallError::Connect)?;
        if url.is_tls {
            let tls = self.tls.version().await;
            let stream = self.tls.connect(&url.host, stream).await.map_err(CallError::Tls)?;
            Connection::start(TokioIo::new(stream), tls).await
        } else {
            Connection::start(TokioIo::new(stream), None).await
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HttpClient for Client {
    async fn call(&self, call: Call) -> Result<u16, CallError> {
        timeout(call.limit, self.exchange(&call)).await.unwrap_or(Err(CallError::TooSlow))
    }
}

/// An open connection; dropping it closes it.
#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// The TLS configuration that the connection was made with.
    tls: Option<ConfigVersion>,
    /// The one task that reads and writes.
    _driver: JoinSet<()>,
}

impl Connection {
    async fn start<S>(stream: S, tls: Option<ConfigVersion>) -> Result<Self, CallError>
    where
        S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    {
        let (sender, connection) = http1::handshake(stream).await?;
        let mut driver = JoinSet::new();
        // An error of the connection is the error of its request, too.
        driver.spawn(async move { drop(connection.await) });
        Ok(Self { sender, tls, _driver: driver })
    }
}

/// Connections that wait for the next request, by server.
#[derive(Debug, Default)]
struct Idle(HashMap<Server, Vec<(Instant, Connection)>>);

/// Whether TLS is used, the host and the port.
type Server = (bool, String, u16);

impl Idle {
    /// Returns the connection that was used last, if that is not longer ago than `most`. Closes all
    /// connections that are too old.
    fn take(&mut self, url: &Url, most: Duration) -> Option<Connection> {
        let now = Instant::now();
        self.0.retain(|_, connections| {
            connections.retain(|(since, open)| now - *since < IDLE_TIMEOUT && !open.sender.is_closed());
            !connections.is_empty()
        });
        let connections = self.0.get_mut(&server(url))?;
        connections.pop_if(|(since, _)| now - *since < most).map(|(_, connection)| connection)
    }

    fn put(&mut self, url: &Url, connection: Connection) {
        let connections = self.0.entry(server(url)).or_default();
        if connections.len() >= MAX_IDLE {
            connections.remove(0);
        }
        connections.push((Instant::now(), connection));
    }
}

fn server(url: &Url) -> Server {
    (url.is_tls, url.host.clone(), url.port)
}

fn request(call: &Call, url: &Url) -> Result<Request<Full<Bytes>>, CallError> {
    let mut request = Request::builder()
        .method(call.method)
        .uri(&url.path)
        .header("host", &url.authority)
        .header("content-type", "application/json")
        .header("user-agent", "portcullis");
    for (name, value) in &call.headers {
        request = request.header(*name, value);
    }
    Ok(request.body(Full::new(Bytes::from(call.body.clone())))?)
}

#[cfg(test)]
mod tests;
