//! The TLS configuration of outgoing connections: the trusted CAs, those of the system and those of
//! a file, and the certificate that the client presents, if it has one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::files::{IdentityFiles, Reloaded, TlsError, add_ca_file};

/// The files of a client.
#[derive(Debug, Clone, Default)]
pub struct ClientFiles {
    /// CAs that are trusted besides those of the system.
    pub ca: Option<PathBuf>,
    /// The client's own certificate.
    pub identity: Option<IdentityFiles>,
}

impl ClientFiles {
    fn paths(&self) -> Vec<&Path> {
        let identity = self.identity.iter().flat_map(|files| [&*files.certificates, &*files.key]);
        identity.chain(self.ca.as_deref()).collect()
    }

    fn read(&self, system: &[CertificateDer<'static>]) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        // Invalid certificates among those of the system are ignored.
        roots.add_parsable_certificates(system.iter().cloned());
        if let Some(path) = &self.ca {
            add_ca_file(&mut roots, path)?;
        }
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider has the cipher suites of both versions")
            .with_root_certificates(roots);
        Ok(Arc::new(match &self.identity {
            None => builder.with_no_client_auth(),
            Some(files) => {
                let identity = SingleCertAndKey::from(files.read(&provider)?);
                builder.with_client_cert_resolver(Arc::new(identity))
            }
        }))
    }
}

/// The current TLS configuration of a client. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ClientTls(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    files: ClientFiles,
    /// Set with the first connection: the CAs of the system are many.
    loaded: OnceCell<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    system: Vec<CertificateDer<'static>>,
    config: Reloaded<Arc<ClientConfig>>,
}

impl Loaded {
    async fn load(files: &ClientFiles) -> io::Result<Self> {
        let system = tokio::task::spawn_blocking(|| rustls_native_certs::load_native_certs().certs);
        let system = system.await.map_err(io::Error::other)?;
        if system.is_empty() && files.ca.is_none() {
            return Err(io::Error::other(TlsError::NoRoots));
        }
        let config = Reloaded::new(&files.paths(), || files.read(&system)).map_err(io::Error::other)?;
        Ok(Self { system, config })
    }
}

impl ClientTls {
    /// # Errors
    /// If the files cannot be used.
    pub fn load(files: ClientFiles) -> Result<Self, TlsError> {
        files.read(&[])?;
        Ok(Self(Arc::new(Inner { files, ..Inner::default() })))
    }

    /// Connects over an open connection to a server whose certificate is valid for `host`, a DNS
    /// name or an address. The files are read again if they have changed.
    ///
    /// # Errors
    /// If the handshake fails.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let Inner { files, loaded } = &*self.0;
        let Loaded { system, config } = loaded.get_or_try_init(|| Loaded::load(files)).await?;
        let config = config.get(&files.paths(), || files.read(system));
        TlsConnector::from(config).connect(name, stream).await
    }
}
