//! A door that speaks TLS: connections get a while to show who they are, and then go the way of all others. Whose certificates
//! are believed is decided by whoever made the configuration; what is in them is for the handler.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::debug;

use super::share::Share;
use super::{Caller, Door, Handler, serve_general, stopped};

#[derive(Clone)]
pub(super) struct Acceptor(TlsAcceptor);

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Acceptor")
    }
}

impl Acceptor {
    pub(super) fn new(config: Arc<ServerConfig>) -> Self {
        Self(config.into())
    }

    pub(super) async fn connection<H: Handler>(
        self,
        stream: TcpStream,
        peer: SocketAddr,
        door: Door<H>,
        mut stop: watch::Receiver<bool>,
        _room: (OwnedSemaphorePermit, Share),
    ) {
        let shaken = tokio::select! {
            shaken = timeout(door.limits.request_time, self.0.accept(stream)) => shaken,
            () = stopped(&mut stop) => return,
        };
        match shaken {
            Ok(Ok(stream)) => {
                let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
                let certificate = shown.map(|shown| Bytes::copy_from_slice(shown));
                let caller = Caller { peer, certificate };
                Box::pin(serve_general(stream, &caller, &door, &stop)).await;
            }
            Ok(Err(error)) => debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => debug!(%peer, "TLS handshake timed out"),
        }
    }
}
