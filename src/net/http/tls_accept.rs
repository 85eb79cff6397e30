//! The TLS handshake of a new connection, within a time limit. The server's TLS configuration
//! decides which certificates are accepted; the handler decides what their names allow.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;
use tracing::debug;

use crate::net::tls::ServerTls;
use crate::runtime::service::stopped;

/// Returns the connection and the client's certificate in DER form, if it presented one; none if
/// the handshake fails or the server stops.
pub(super) async fn accept(
    tls: &ServerTls,
    (stream, peer): (TcpStream, SocketAddr),
    limit: Duration,
    stop: &mut watch::Receiver<bool>,
) -> Option<(TlsStream<TcpStream>, Option<Bytes>)> {
    let accepted = tokio::select! {
        accepted = timeout(limit, tls.accept(stream)) => accepted,
        () = stopped(stop) => return None,
    };
    match accepted {
        Ok(Ok(accepted)) => Some(accepted),
        Ok(Err(error)) => {
            tls.log_failure(peer, &error);
            None
        }
        Err(_) => {
            debug!(%peer, "TLS handshake timed out");
            None
        }
    }
}
