//! Whom to believe when a call goes to an `https://` address: who the system believes, and who was named besides.

use std::io;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

#[derive(Debug, Clone, Default)]
pub struct Trust {
    extra: Vec<CertificateDer<'static>>,
    /// Made with the first call that needs it: the system's certificates are many.
    made: Arc<OnceCell<Arc<ClientConfig>>>,
}

/// Nobody could be believed because of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not certificates in PEM")]
pub struct NoCertificates;

impl Trust {
    /// Believes these, too.
    ///
    /// # Errors
    /// If there is none in it, or one that is none.
    pub fn also(pem: &[u8]) -> Result<Self, NoCertificates> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let extra = found.ok().filter(|found| !found.is_empty()).ok_or(NoCertificates)?;
        let mut roots = RootCertStore::empty();
        for certificate in &extra {
            roots.add(certificate.clone()).map_err(|_| NoCertificates)?;
        }
        Ok(Self { extra, made: Arc::default() })
    }

    /// Speaks TLS over a connection, to whoever proves to be `host`.
    pub(super) async fn connect(&self, host: &str, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(io::Error::other)?;
        let config = self.made.get_or_try_init(|| self.make()).await?;
        TlsConnector::from(Arc::clone(config)).connect(name, stream).await
    }

    async fn make(&self) -> io::Result<Arc<ClientConfig>> {
        let extra = self.extra.clone();
        let made = tokio::task::spawn_blocking(move || {
            let mut roots = RootCertStore::empty();
            // What the system has of certificates that make no sense is the system's business.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots.add_parsable_certificates(extra);
            if roots.is_empty() {
                return Err(io::Error::other("this system believes nobody"));
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let builder = builder.map_err(io::Error::other)?;
            Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
        });
        made.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused() {
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for pem in ["", "hello", "-----BEGIN CERTIFICATE-----\n", broken] {
            assert_eq!(Trust::also(pem.as_bytes()).unwrap_err(), NoCertificates, "{pem}");
        }
    }
}
