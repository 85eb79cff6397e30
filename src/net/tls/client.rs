//! The TLS configuration of outgoing connections: the trusted CAs, those of files and on request
//! those of the system, and the certificate that the client presents, if it has one that is still
//! valid.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::warn;

use super::certificate::Certificate;
use super::files::{IdentityFiles, Reloaded, TlsError, add_ca_file};
use crate::runtime::clock::wall_ms;

/// The files of a client.
#[derive(Debug, Clone, Default)]
pub struct ClientFiles {
    /// Whether the CAs of the system are trusted, too. Any of them could issue a certificate with
    /// the name of a server of the environment.
    pub system_roots: bool,
    /// Further CAs that are trusted.
    pub ca: Option<PathBuf>,
    /// The client's own certificate.
    pub identity: Option<IdentityFiles>,
    /// The files of a machine's identity. They are used once they exist and can be used: without
    /// them, the machine can still get new ones.
    pub machine: Option<MachineFiles>,
}

/// The CA and the certificate of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineFiles {
    pub ca: PathBuf,
    pub identity: IdentityFiles,
}

impl ClientFiles {
    fn paths(&self) -> Vec<&Path> {
        let machine = self.machine.iter().map(|files| &files.identity);
        let identities = self.identity.iter().chain(machine);
        let identities = identities.flat_map(|files| [&*files.certificates, &*files.key]);
        let ca = self.ca.as_deref().into_iter().chain(self.machine.iter().map(|files| &*files.ca));
        identities.chain(ca).collect()
    }

    /// Reads the files for the first time: unusable files of the machine count as missing ones.
    fn read_first(&self, system: &[CertificateDer<'static>]) -> Result<Current, TlsError> {
        self.read(system, |error| {
            let cause = error.source().map(ToString::to_string);
            warn!(%error, cause, "certificate files of the machine cannot be used");
            Ok(())
        })
    }

    /// Reads the files. `refuse` decides about an unusable file of the machine.
    fn read(
        &self,
        system: &[CertificateDer<'static>],
        refuse: impl Fn(TlsError) -> Result<(), TlsError>,
    ) -> Result<Current, TlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        // Invalid certificates among those of the system are ignored.
        roots.add_parsable_certificates(system.iter().cloned());
        if let Some(path) = &self.ca {
            add_ca_file(&mut roots, path)?;
        }
        let mut identity = self.identity.as_ref().map(|files| files.read(&provider)).transpose()?;
        if let Some(machine) = &self.machine {
            usable(add_ca_file(&mut roots, &machine.ca), &refuse)?;
            identity = identity.or(usable(machine.identity.read(&provider), &refuse)?);
        }
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .expect("the provider has the cipher suites of both versions")
            .with_root_certificates(roots);
        let identity = identity.map(|key| Arc::new(Unexpired::new(key)));
        let config = match &identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                builder.with_client_cert_resolver(Arc::clone(identity) as Arc<dyn ResolvesClientCert>)
            }
        };
        Ok(Current { config: Arc::new(config), identity })
    }
}

/// A result without a file that does not exist, or that is not refused.
fn usable<T>(
    read: Result<T, TlsError>,
    refuse: impl Fn(TlsError) -> Result<(), TlsError>,
) -> Result<Option<T>, TlsError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(TlsError::Missing(_)) => Ok(None),
        Err(error) => refuse(error).map(|()| None),
    }
}

/// A configuration and the certificate in it.
#[derive(Debug, Clone)]
struct Current {
    config: Arc<ClientConfig>,
    identity: Option<Arc<Unexpired>>,
}

/// A certificate that is presented until it expires: a server would refuse the connection, which a
/// client with other credentials can still use to have its certificate renewed.
#[derive(Debug)]
struct Unexpired {
    key: Arc<CertifiedKey>,
    until_ms: u64,
}

impl Unexpired {
    fn new(key: CertifiedKey) -> Self {
        let parsed = key.cert.first().and_then(|der| Certificate::parse_der(der));
        // Whether a certificate that cannot be read is accepted is up to the server.
        let until_ms = parsed.map_or(u64::MAX, |certificate| certificate.validity().until_ms);
        Self { key: Arc::new(key), until_ms }
    }
}

impl ResolvesClientCert for Unexpired {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.has_certs().then(|| Arc::clone(&self.key))
    }

    fn has_certs(&self) -> bool {
        wall_ms() < self.until_ms
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
    current: Reloaded<Current>,
}

impl Loaded {
    async fn load(files: &ClientFiles) -> io::Result<Self> {
        Self::with(files, || rustls_native_certs::load_native_certs().certs).await
    }

    /// Loads the files, and the CAs of the system with `native`.
    async fn with(
        files: &ClientFiles,
        native: impl FnOnce() -> Vec<CertificateDer<'static>> + Send + 'static,
    ) -> io::Result<Self> {
        let system = if files.system_roots {
            tokio::task::spawn_blocking(native).await.map_err(io::Error::other)?
        } else {
            Vec::new()
        };
        if system.is_empty() && files.ca.is_none() && files.machine.is_none() {
            return Err(io::Error::other(TlsError::NoRoots));
        }
        let current =
            Reloaded::new(&files.paths(), || files.read_first(&system)).map_err(io::Error::other)?;
        Ok(Self { system, current })
    }
}

impl ClientTls {
    /// # Errors
    /// If the files cannot be used.
    pub fn load(files: ClientFiles) -> Result<Self, TlsError> {
        // The files of a machine are read, and reported, with the first connection.
        ClientFiles { machine: None, ..files.clone() }.read(&[], Err)?;
        Ok(Self(Arc::new(Inner { files, ..Inner::default() })))
    }

    /// Connects over an open connection to a server whose certificate is valid for `host`, a DNS
    /// name or an address. The files are read again if they have changed.
    ///
    /// # Errors
    /// If the handshake fails.
    pub async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        TlsConnector::from(self.current().await?.config).connect(name, stream).await
    }

    /// Whether connections present a certificate to servers that ask for one.
    pub async fn has_certificate(&self) -> bool {
        let current = self.current().await.ok();
        current.and_then(|current| current.identity).is_some_and(|identity| identity.has_certs())
    }

    /// Identifies the present configuration: a connection with another one was made before the
    /// files changed.
    pub async fn version(&self) -> Option<ConfigVersion> {
        self.current().await.ok().map(|current| ConfigVersion(current.config))
    }

    async fn current(&self) -> io::Result<Current> {
        let Inner { files, loaded } = &*self.0;
        let Loaded { system, current } = loaded.get_or_try_init(|| Loaded::load(files)).await?;
        Ok(current.get(&files.paths(), || files.read(system, Err)))
    }
}

/// The configuration of a connection.
#[derive(Debug, Clone)]
pub struct ConfigVersion(Arc<ClientConfig>);

impl PartialEq for ConfigVersion {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::net::tls::tests::{handshake, issue, new_ca, write};
    use crate::net::tls::{ServerFiles, ServerTls};

    /// A client on a system that trusts `system`.
    async fn client_on(system: CertificateDer<'static>, files: ClientFiles) -> ClientTls {
        let loaded = Loaded::with(&files, || vec![system]).await.unwrap();
        ClientTls(Arc::new(Inner { files, loaded: OnceCell::new_with(Some(loaded)) }))
    }

    #[tokio::test]
    async fn cas_of_the_system_are_trusted_on_request_only() {
        let (directory, public, own) = (tempfile::tempdir().unwrap(), new_ca(), new_ca());
        let directory = directory.path();
        let ca = write(directory, "own.pem", own.certificate());
        let system = CertificateDer::from_pem_slice(public.certificate().as_bytes()).unwrap();
        for (issuer, system_roots, is_trusted) in
            [(&public, true, true), (&public, false, false), (&own, true, true), (&own, false, true)]
        {
            let identity = issue(directory, issuer, "localhost");
            let server = ServerTls::load(ServerFiles { identity, client_ca: None }).unwrap();
            let files = ClientFiles { ca: Some(ca.clone()), system_roots, ..ClientFiles::default() };
            let connected = handshake(&server, &client_on(system.clone(), files).await).await;
            assert_eq!(connected.is_ok(), is_trusted, "{connected:?}");
        }
    }
}
