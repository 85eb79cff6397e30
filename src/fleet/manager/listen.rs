//! The manager's listeners: TCP, with or without TLS, and a unix socket. A connection that has not
//! finished its handshakes and its registration in time is closed, and delays no other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use super::Manager;
use crate::fleet::dbus::accept::{AcceptError, TcpPolicy, accept_unix};
use crate::fleet::dbus::connect::HANDSHAKE_TIMEOUT;
use crate::net::listener::{Listener, drain};
use crate::net::tls::refused_client::RefusedClients;
use crate::runtime::service::stopped;

/// The maximum number of connections over TCP. One client address may use half of them.
pub const MAX_CONNECTIONS: usize = 8_192;
/// The maximum number of connections over the unix socket.
const MAX_LOCAL_CONNECTIONS: usize = 256;
/// The pause after a failure to accept, for example when no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Manager {
    /// Serves agents and operators until `stop` is true.
    pub async fn serve_tcp(&self, listener: Listener, policy: TcpPolicy, stop: watch::Receiver<bool>) {
        let (policy, refused) = (Arc::new(policy), Arc::new(RefusedClients::default()));
        let serve = |stream, from| {
            let (manager, policy, refused) = (self.clone(), Arc::clone(&policy), Arc::clone(&refused));
            async move { manager.serve_tcp_connection(stream, from, (&policy, &refused)).await }
        };
        listener.run(serve, |_| {}, stop).await;
    }

    async fn serve_tcp_connection(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        (policy, refused): (&TcpPolicy, &RefusedClients),
    ) {
        let begun = Instant::now();
        match timeout(HANDSHAKE_TIMEOUT, policy.accept(stream, from)).await {
            Ok(Ok((peer, proof))) => {
                let address = from.ip().to_canonical().to_string();
                self.serve_peer(peer, proof, address, begun).await;
            }
            Ok(Err(error @ (AcceptError::PlainTcp | AcceptError::NoTls | AcceptError::NoCertificate))) => {
                refused.log(from, &error);
            }
            Ok(Err(AcceptError::Handshake(error))) => refused.log_failure(from, &error),
            Ok(Err(error)) => debug!(%from, %error, "handshake failed"),
            Err(_) => debug!(%from, "handshake timed out"),
        }
    }

    /// Serves processes on this host until `stop` is true, then waits a bounded time for the open
    /// connections.
    pub async fn serve_unix(&self, listener: UnixListener, mut stop: watch::Receiver<bool>) {
        let free = Arc::new(Semaphore::new(MAX_LOCAL_CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = stopped(&mut stop) => break,
                Some(_) = connections.join_next(), if !connections.is_empty() => {}
                accepted = listener.accept() => match (accepted, Arc::clone(&free).try_acquire_owned()) {
                    (Ok((stream, _)), Ok(permit)) => {
                        let manager = self.clone();
                        connections.spawn(async move {
                            manager.serve_unix_connection(stream).await;
                            drop(permit);
                        });
                    }
                    (Ok(_), Err(_)) => debug!("too many connections to the unix socket"),
                    (Err(error), _) => {
                        warn!(%error, "cannot accept connections");
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
        drop(listener);
        drain(connections).await;
    }

    async fn serve_unix_connection(&self, stream: UnixStream) {
        let begun = Instant::now();
        match timeout(HANDSHAKE_TIMEOUT, accept_unix(stream)).await {
            Ok(Ok((peer, proof))) => self.serve_peer(peer, proof, String::new(), begun).await,
            Ok(Err(error)) => debug!(%error, "handshake failed"),
            Err(_) => debug!("handshake timed out"),
        }
    }
}
