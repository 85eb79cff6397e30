//! The TLS configuration of a listener: its own certificate and, if clients present certificates,
//! the CA that signs those. A client's certificate decides only whether the handshake succeeds; the
//! parts decide what its names allow.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::crypto::aws_lc_rs;
use rustls::server::WebPkiClientVerifier;
use rustls::sign::SingleCertAndKey;
use rustls::{HandshakeKind, RootCertStore, ServerConfig};

use super::files::{IdentityFiles, Reloaded, TlsError, add_ca_file};
use super::refused_client::RefusedClients;

/// Whether clients of a listener with a client CA have to present a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    Required,
    Optional,
}

/// The files of a listener.
#[derive(Debug, Clone)]
pub struct ServerFiles {
    pub identity: IdentityFiles,
    /// The CA of clients' certificates; without it, clients present none.
    pub client_ca: Option<(PathBuf, ClientAuth)>,
}

impl ServerFiles {
    fn paths(&self) -> Vec<&Path> {
        let IdentityFiles { certificates, key } = &self.identity;
        let ca = self.client_ca.as_ref().map(|(path, _)| path.as_path());
        [certificates.as_path(), key.as_path()].into_iter().chain(ca).collect()
    }

    fn read(&self) -> Result<Arc<ServerConfig>, TlsError> {
        // Named explicitly: another crate of the process may bring another provider.
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider has the cipher suites of both versions");
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some((path, auth)) => {
                let mut roots = RootCertStore::empty();
                add_ca_file(&mut roots, path)?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
                let verifier = match auth {
                    ClientAuth::Optional => verifier.allow_unauthenticated(),
                    ClientAuth::Required => verifier,
                };
                let verifier = verifier.build().map_err(|_| TlsError::BadCa(path.clone()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let identity = self.identity.read(&provider)?;
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(identity)));
        // Tickets need no memory of the server: thousands of clients resume their sessions.
        if let Ok(tickets) = aws_lc_rs::Ticketer::new() {
            config.ticketer = tickets;
        }
        Ok(Arc::new(config))
    }
}

/// The current TLS configuration of a listener. Clones share it.
#[derive(Debug, Clone)]
pub struct ServerTls(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    files: ServerFiles,
    config: Reloaded<Arc<ServerConfig>>,
    full: AtomicU64,
    resumed: AtomicU64,
    refused: RefusedClients,
}

/// Handshakes that have succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handshakes {
    /// With certificates and signatures.
    pub full: u64,
    /// With the keys of an earlier connection.
    pub resumed: u64,
}

impl ServerTls {
    /// # Errors
    /// If the files cannot be used.
    pub fn load(files: ServerFiles) -> Result<Self, TlsError> {
        let config = Reloaded::new(&files.paths(), || files.read())?;
        let (full, resumed) = (AtomicU64::new(0), AtomicU64::new(0));
        let refused = RefusedClients::default();
        Ok(Self(Arc::new(Inner { files, config, full, resumed, refused })))
    }

    /// Logs a failed handshake.
    pub fn log_failure(&self, peer: SocketAddr, error: &io::Error) {
        self.0.refused.log_failure(peer, error);
    }

    /// Counts a handshake that has succeeded.
    pub fn count(&self, kind: Option<HandshakeKind>) {
        let counter = match kind {
            Some(HandshakeKind::Resumed) => &self.0.resumed,
            _ => &self.0.full,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn handshakes(&self) -> Handshakes {
        let Inner { full, resumed, .. } = &*self.0;
        Handshakes { full: full.load(Ordering::Relaxed), resumed: resumed.load(Ordering::Relaxed) }
    }

    /// Returns the configuration for the next handshake: the one of the files as they are now or,
    /// if they cannot be used, the last one that could.
    pub fn config(&self) -> Arc<ServerConfig> {
        let Inner { files, config, .. } = &*self.0;
        config.get(&files.paths(), || files.read())
    }
}
