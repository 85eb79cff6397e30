//! Connections to a manager, of an agent or an operator: TLS, plain TCP or a unix socket, and D-Bus
//! on it. The caller retries.

use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use zbus::connection::{AuthMechanism, Builder, Connection};
use zbus::{Guid, Message, MessageStream};

use super::socket::{Activity, PeerSocket};
use crate::fleet::address::ManagerAddress;
use crate::net::tls::ClientTls;
use crate::net::tls::probe::client_problem;

/// The time for the connection, TLS and SASL.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for one attempt to connect to an address over TCP. After a lost packet the system
/// repeats the attempt only after a second; a new attempt reaches a host sooner whose link has just
/// healed.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(800);
/// The time that a peer has to answer a call. Some of systemd's methods take seconds.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// How a client connects over TCP. Unix sockets never use TLS.
#[derive(Debug, Clone)]
pub enum Security {
    /// TLS with the client's certificate. The manager's certificate has to be valid for this name,
    /// or for the host if there is none.
    Tls { tls: ClientTls, server_name: Option<String> },
    /// No encryption. The manager accepts this from loopback addresses only, unless it was started
    /// with `--allow-plain-tcp`.
    Plain,
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot connect to the manager at {address}")]
    Connect { address: ManagerAddress, source: io::Error },
    #[error("the TLS handshake with the manager at {address} failed: {problem}")]
    Tls { address: ManagerAddress, problem: String },
    #[error("the manager at {address} does not speak D-Bus")]
    Dbus { address: ManagerAddress, source: zbus::Error },
    #[error("the manager at {address} did not answer in {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Timeout { address: ManagerAddress },
}

/// A peer-to-peer connection. It ends when this value and all clones of its connection are dropped.
#[derive(Debug)]
pub struct Peer {
    pub connection: Connection,
    /// All messages that the peer sent since the connection began. It has to be polled, or the
    /// connection stalls.
    pub messages: MessageStream,
    pub activity: Activity,
}

impl Peer {
    /// Returns the next message; `None` if the connection ended.
    pub async fn next(&mut self) -> Option<Message> {
        self.messages.next().await?.ok()
    }
}

/// Opens the connections of an agent.
pub trait Connector: Send + Sync + 'static {
    fn connect(&self, address: &ManagerAddress) -> impl Future<Output = Result<Peer, ConnectError>> + Send;
}

impl Connector for Security {
    async fn connect(&self, address: &ManagerAddress) -> Result<Peer, ConnectError> {
        connect(address, self).await
    }
}

/// Connects to a manager.
///
/// # Errors
/// If the manager is unreachable, refuses the client or does not answer in time.
pub async fn connect(address: &ManagerAddress, security: &Security) -> Result<Peer, ConnectError> {
    let limited = timeout(HANDSHAKE_TIMEOUT, open(address, security)).await;
    limited.unwrap_or_else(|_| Err(ConnectError::Timeout { address: address.clone() }))
}

async fn open(address: &ManagerAddress, security: &Security) -> Result<Peer, ConnectError> {
    let failed = |source| ConnectError::Connect { address: address.clone(), source };
    let opened = match (address, security) {
        (ManagerAddress::Unix(path), _) => {
            plain_peer(UnixStream::connect(path).await.map_err(failed)?, None).await
        }
        (ManagerAddress::Tcp { host, port }, security) => {
            let stream = connect_tcp(host, *port).await.map_err(failed)?;
            stream.set_nodelay(true).map_err(failed)?;
            match security {
                Security::Plain => plain_peer(stream, None).await,
                Security::Tls { tls, server_name } => {
                    let name = server_name.as_deref().unwrap_or(host);
                    let stream = tls.connect(name, stream).await;
                    let refused = |error: io::Error| {
                        let problem = client_problem(&error, name).unwrap_or_else(|| error.to_string());
                        ConnectError::Tls { address: address.clone(), problem }
                    };
                    authenticated_peer(stream.map_err(refused)?).await
                }
            }
        }
    };
    opened.map_err(|source| ConnectError::Dbus { address: address.clone(), source })
}

/// Connects to the first address of a host that accepts a connection.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in lookup_host((host, port)).await? {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await.map_err(io::Error::from).flatten() {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Opens D-Bus without SASL, over a stream whose peers are authenticated already.
///
/// # Errors
/// If the connection ends at once.
pub async fn authenticated_peer<S>(stream: S) -> zbus::Result<Peer>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Sync + Unpin + std::fmt::Debug + 'static,
{
    let (socket, activity) = PeerSocket::new(stream);
    let builder = Builder::authenticated_socket(socket, Guid::generate());
    finish(builder, activity).await
}

/// Opens D-Bus with the SASL mechanism ANONYMOUS: as a server if there is a `guid`.
pub(super) async fn plain_peer<S>(stream: S, guid: Option<Guid<'static>>) -> zbus::Result<Peer>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Sync + Unpin + std::fmt::Debug + 'static,
{
    let (socket, activity) = PeerSocket::new(stream);
    let builder = Builder::socket(socket).auth_mechanism(AuthMechanism::Anonymous);
    let builder = match guid {
        Some(guid) => builder.server(guid),
        None => builder,
    };
    finish(builder, activity).await
}

async fn finish(builder: Builder<'_>, activity: Activity) -> zbus::Result<Peer> {
    let messages = builder.p2p().method_timeout(CALL_TIMEOUT).build_message_stream().await?;
    Ok(Peer { connection: Connection::from(&messages), messages, activity })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_attempt_to_connect_is_short() {
        // The queue of the listener is full, so the system drops further packets, as a cut link
        // does.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let queued = std::net::TcpStream::connect(address).unwrap();
        let began = tokio::time::Instant::now();
        let refused = connect(&address.to_string().parse().unwrap(), &Security::Plain).await.unwrap_err();
        let ConnectError::Connect { source, .. } = refused else { panic!("{refused:?}") };
        assert_eq!(source.kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), CONNECT_TIMEOUT);
        drop(queued);
    }
}
