//! Accepted connections of a manager: the handshakes, and the names that the peer proved. The
//! caller bounds the time, and decides what the names allow.

use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::{TcpStream, UnixStream};
use zbus::Guid;

use super::connect::{Peer, authenticated_peer, plain_peer};
use crate::net::tls::ServerTls;
use crate::net::tls::peer::dns_names;
use crate::net::tls::refused_client::TLS_HANDSHAKE;

/// The connections that a manager accepts over TCP.
#[derive(Debug, Clone)]
pub struct TcpPolicy {
    /// The certificates; without them there is no TLS.
    pub tls: Option<ServerTls>,
    /// Whether plain TCP is accepted from other hosts, too.
    pub allow_plain: bool,
}

/// The identity of a peer that the handshake proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// The peer has the key of this certificate, which an accepted authority has signed.
    Certificate { names: Vec<String>, der: Bytes },
    /// A process on this host, over a unix socket, with this user id.
    LocalUser(u32),
    /// Plain TCP proves no identity.
    None,
}

#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    #[error(
        "plain TCP is accepted only from loopback addresses: connect with TLS, as --tls-cert, --tls-key and \
         --ca-file of an agent do"
    )]
    PlainTcp,
    #[error(
        "the client uses TLS, and this manager has no certificate: start it with --tls-cert, or connect \
         without TLS"
    )]
    NoTls,
    #[error("the client presented no certificate")]
    NoCertificate,
    #[error("the handshake failed")]
    Handshake(#[from] io::Error),
    #[error("the peer does not speak D-Bus")]
    Dbus(#[from] zbus::Error),
}

impl TcpPolicy {
    /// Accepts a connection, with TLS if the client begins with it.
    ///
    /// # Errors
    /// If the policy refuses the client, or the client fails in a handshake.
    pub async fn accept(&self, stream: TcpStream, from: SocketAddr) -> Result<(Peer, Proof), AcceptError> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        // A D-Bus connection begins with a zero byte.
        if first[0] != TLS_HANDSHAKE {
            if !(self.allow_plain || from.ip().to_canonical().is_loopback()) {
                return Err(AcceptError::PlainTcp);
            }
            return Ok((plain_peer(stream, Some(Guid::generate())).await?, Proof::None));
        }
        let tls = self.tls.as_ref().ok_or(AcceptError::NoTls)?;
        let (stream, certificate) = tls.accept(stream).await?;
        let der = certificate.ok_or(AcceptError::NoCertificate)?;
        let proof = Proof::Certificate { names: dns_names(&der), der };
        Ok((authenticated_peer(stream).await?, proof))
    }
}

/// Accepts a connection over a unix socket.
///
/// # Errors
/// If the client fails in the handshake.
pub async fn accept_unix(stream: UnixStream) -> Result<(Peer, Proof), AcceptError> {
    let user = stream.peer_cred()?.uid();
    Ok((plain_peer(stream, Some(Guid::generate())).await?, Proof::LocalUser(user)))
}
