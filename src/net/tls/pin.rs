//! Fetches the CA certificate with a known fingerprint from a server whose chain leads to it. The
//! certificate is genuine, whoever sent it; later connections verify the server with it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio::net::TcpStream;

use super::certificate::Certificate;
use super::probe::{HandshakeFailure, Probe};

/// Connects, and returns the CA certificate (PEM) with this SHA-256 fingerprint in hexadecimal
/// digits.
///
/// # Errors
/// As for [`Probe::handshake`].
pub async fn fetch_ca(
    host: &str,
    stream: TcpStream,
    fingerprint: &str,
) -> Result<String, Option<HandshakeFailure>> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = Arc::new(Pinned {
        fingerprint: fingerprint.to_owned(),
        provider: Arc::clone(&provider),
        found: Mutex::default(),
        has_no_ca: AtomicBool::default(),
    });
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has the cipher suites of both versions");
    let config = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::<Pinned>::clone(&verifier))
        .with_no_client_auth();
    let shaken = Probe::with_config(config).handshake(host, stream).await;
    let found = verifier.found.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if verifier.has_no_ca.load(Ordering::SeqCst) {
        return Err(Some(HandshakeFailure::NoCa));
    }
    shaken?;
    found.map(|der| pem(&der)).ok_or(Some(HandshakeFailure::OtherCa))
}

fn pem(der: &CertificateDer<'_>) -> String {
    let base64 = STANDARD.encode(der);
    let lines = base64.as_bytes().chunks(64).map(|line| String::from_utf8_lossy(line) + "\n");
    format!("-----BEGIN CERTIFICATE-----\n{}-----END CERTIFICATE-----\n", lines.collect::<String>())
}

/// Accepts servers whose chain contains the certificate with the fingerprint and leads to it.
#[derive(Debug)]
struct Pinned {
    fingerprint: String,
    provider: Arc<CryptoProvider>,
    /// The CA certificate, once a chain was verified with it.
    found: Mutex<Option<CertificateDer<'static>>>,
    /// Whether the chain has no CA certificate at all.
    has_no_ca: AtomicBool,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let is_pinned = |der: &&CertificateDer<'_>| {
            let certificate = Certificate::parse_der(der);
            certificate.is_some_and(|found| found.fingerprint().to_string() == self.fingerprint)
        };
        let pinned = intermediates.iter().find(is_pinned);
        let is_ca = |der: &CertificateDer<'_>| Certificate::parse_der(der).is_some_and(|found| found.is_ca());
        self.has_no_ca.store(!intermediates.iter().any(is_ca), Ordering::SeqCst);
        let pinned = pinned.ok_or(Error::InvalidCertificate(CertificateError::UnknownIssuer))?;
        let mut roots = RootCertStore::empty();
        roots.add(pinned.clone().into_owned())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
                .build()
                .map_err(|error| Error::General(error.to_string()))?;
        let verified =
            verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        *self.found.lock().unwrap_or_else(PoisonError::into_inner) = Some(pinned.clone().into_owned());
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject as _;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::net::tls::authority::{Authority, MACHINE_LIFETIME, Names, Validity};
    use crate::net::tls::key::PrivateKey;
    use crate::runtime::clock::wall_ms;

    fn authority() -> Authority {
        Authority::create("prod", &PrivateKey::generate().unwrap(), wall_ms()).unwrap()
    }

    fn fingerprint(authority: &Authority) -> String {
        Certificate::parse(authority.certificate()).unwrap().fingerprint().to_string()
    }

    /// Serves a chain in PEM form until the test ends.
    async fn serve(chain: &str, key: &PrivateKey) -> SocketAddr {
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<_, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A client that refuses the certificate ends the handshake.
                drop(acceptor.accept(stream).await);
            }
        });
        address
    }

    #[tokio::test]
    async fn only_a_chain_that_leads_to_the_fingerprint_is_accepted() {
        let (ours, other) = (authority(), authority());
        let key = PrivateKey::generate().unwrap();
        let issue = |ca: &Authority, name: &str| {
            let validity = Validity::starting(wall_ms(), MACHINE_LIFETIME);
            ca.issue_for(&key, &Names::of([name]), validity).unwrap()
        };
        let leaf =
            |chain: String| chain.split_inclusive("-----END CERTIFICATE-----\n").next().unwrap().to_owned();
        let disguised = leaf(issue(&other, "127.0.0.1")) + ours.certificate();
        let without_ca = leaf(issue(&ours, "127.0.0.1"));
        for (chain, expected) in [
            (issue(&ours, "127.0.0.1"), None),
            (issue(&other, "127.0.0.1"), Some(HandshakeFailure::OtherCa)),
            (disguised, Some(HandshakeFailure::OtherCa)),
            (without_ca, Some(HandshakeFailure::NoCa)),
            (issue(&ours, "192.0.2.1"), Some(HandshakeFailure::OtherName("127.0.0.1".to_owned()))),
        ] {
            let address = serve(&chain, &key).await;
            let stream = TcpStream::connect(address).await.unwrap();
            let fetched = fetch_ca("127.0.0.1", stream, &fingerprint(&ours)).await;
            match expected {
                None => {
                    let found = Certificate::parse(&fetched.unwrap()).unwrap().fingerprint().to_string();
                    assert_eq!(found, fingerprint(&ours));
                }
                Some(failure) => assert_eq!(fetched, Err(Some(failure))),
            }
        }
    }
}
