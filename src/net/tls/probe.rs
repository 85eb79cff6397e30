//! A handshake that finds out why TLS connections to a server fail, for clients whose library does
//! not report it.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject as _;
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Why a handshake failed, as far as the server's certificate or protocol is the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandshakeFailure {
    OtherCa,
    /// The CA certificate is searched in the server's chain, and the chain has none.
    NoCa,
    Expired,
    NotYetValid,
    OtherName(String),
    /// The server closed the connection, or sent other bytes than those of TLS.
    NotTls,
    Other(String),
}

impl fmt::Display for HandshakeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherCa => f.write_str("the server's certificate was issued by another CA"),
            Self::NoCa => f.write_str("the server does not send its CA certificate"),
            Self::Expired => {
                f.write_str("the server's certificate has expired, or the clock of this machine is wrong")
            }
            Self::NotYetValid => f.write_str(
                "the server's certificate is not valid yet, or the clock of this machine is wrong",
            ),
            Self::OtherName(name) => write!(f, "the server's certificate is not valid for '{name}'"),
            Self::NotTls => f.write_str("the server does not use TLS on this port"),
            Self::Other(reason) => f.write_str(reason),
        }
    }
}

impl HandshakeFailure {
    /// Returns the remedy for a client of a tracker or a manager.
    fn remedy(&self) -> Option<&'static str> {
        Some(match self {
            Self::OtherCa => {
                "`juju machine renew N` gives machine N the CA of its environment, and --ca-file names \
                 another one"
            }
            Self::NoCa => "append the CA certificate to the certificate file of the server",
            Self::Expired | Self::NotYetValid => {
                "compare the clocks; a restart of the server renews its certificate"
            }
            Self::OtherName(_) => "use a name or an address that is in it",
            Self::NotTls => "choose its TLS port, or connect without TLS, as http:// does",
            Self::Other(_) => return None,
        })
    }
}

/// Returns why the TLS connection of a client of a tracker or a manager failed, and the remedy. The
/// client expected a certificate for `host`.
pub fn client_problem(error: &io::Error, host: &str) -> Option<String> {
    if let Some(refused) = refused_certificate(error) {
        return Some(refused.to_owned());
    }
    let why = failure(error, host)?;
    Some(match why.remedy() {
        Some(remedy) => format!("{why}: {remedy}"),
        None => why.to_string(),
    })
}

/// Returns why a server refused the certificate of a client, if that is what an error reports.
pub fn refused_certificate(error: &(dyn std::error::Error + 'static)) -> Option<&'static str> {
    if let Some(io) = error.downcast_ref::<io::Error>()
        && let Some(inner) = io.get_ref()
    {
        return refused_certificate(inner);
    }
    match error.downcast_ref::<Error>() {
        Some(Error::AlertReceived(AlertDescription::CertificateExpired)) => Some(
            "the server refused the certificate of this client, which has expired or is not valid yet: \
             compare the clocks, or issue a new one with `juju machine renew ID`",
        ),
        Some(Error::AlertReceived(AlertDescription::CertificateRequired)) => Some(
            "the server requires a certificate of the client: `juju machine renew N` issues a new one if \
                 it has expired",
        ),
        Some(Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::DecryptError,
        )) => Some(
            "the server refused the certificate of this client: another CA issued it, and `juju machine \
             renew ID` issues a new one",
        ),
        Some(_) => None,
        None => error.source().and_then(refused_certificate),
    }
}

/// The CA whose servers are tried.
#[derive(Debug, Clone)]
pub struct Probe(Arc<ClientConfig>);

/// Returns whether a server answers with TLS, whatever its certificate.
pub async fn speaks_tls(host: &str, stream: TcpStream) -> bool {
    match Probe::trusting(RootCertStore::empty()).handshake(host, stream).await {
        Ok(()) => true,
        Err(failure) => !matches!(failure, None | Some(HandshakeFailure::NotTls)),
    }
}

impl Probe {
    /// Returns `None` if `ca` has no CA certificate in PEM form.
    pub fn new(ca: &str) -> Option<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca.as_bytes()) {
            roots.add(certificate.ok()?).ok()?;
        }
        (!roots.is_empty()).then(|| Self::trusting(roots))
    }

    fn trusting(roots: RootCertStore) -> Self {
        let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the cipher suites of both versions");
        Self::with_config(builder.with_root_certificates(roots).with_no_client_auth())
    }

    pub(super) fn with_config(config: ClientConfig) -> Self {
        Self(Arc::new(config))
    }

    /// Tries a handshake with a server whose certificate has to be valid for `host`.
    ///
    /// # Errors
    /// The reason; `None` if it is neither the certificate nor the protocol.
    pub async fn handshake(&self, host: &str, stream: TcpStream) -> Result<(), Option<HandshakeFailure>> {
        let name = ServerName::try_from(host.to_owned()).map_err(|_| None)?;
        let connected = TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await;
        connected.map(drop).map_err(|error| failure(&error, host))
    }
}

fn failure(error: &io::Error, host: &str) -> Option<HandshakeFailure> {
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
        let closed = matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset);
        return closed.then_some(HandshakeFailure::NotTls);
    };
    Some(match tls {
        Error::InvalidCertificate(problem) => match problem {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => HandshakeFailure::OtherCa,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => HandshakeFailure::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                HandshakeFailure::NotYetValid
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                HandshakeFailure::OtherName(host.to_owned())
            }
            other => HandshakeFailure::Other(format!("invalid certificate: {other}")),
        },
        Error::InvalidMessage(_) => HandshakeFailure::NotTls,
        other => HandshakeFailure::Other(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tls::authority::{Authority, Names, Validity};
    use crate::net::tls::key::PrivateKey;
    use crate::net::tls::tests::new_ca;
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    fn year_ms(year: u64) -> u64 {
        (year - 1970) * 31_557_600_000
    }

    fn server(ca: &Authority, name: &str, years: (u64, u64)) -> ServerConfig {
        let key = PrivateKey::generate().unwrap();
        let validity = Validity { from_ms: year_ms(years.0), until_ms: year_ms(years.1) };
        let chain = ca.issue_for(&key, &Names::of([name]), validity).unwrap();
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes()).unwrap();
        ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap()
    }

    async fn probe(ca: &Authority, served: Option<ServerConfig>) -> Result<(), Option<HandshakeFailure>> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            match served {
                // The client refuses most of these handshakes.
                Some(config) => drop(TlsAcceptor::from(Arc::new(config)).accept(stream).await),
                None => stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap(),
            }
        };
        let stream = TcpStream::connect(address).await.unwrap();
        let trusting = Probe::new(ca.certificate()).unwrap();
        let (probed, ()) = tokio::join!(trusting.handshake("localhost", stream), serving);
        probed
    }

    #[tokio::test]
    async fn each_failure_has_its_reason() {
        let (ca, other) = (new_ca(), new_ca());
        let valid = (2000, 2100);
        for (served, expected) in [
            (Some(server(&ca, "localhost", valid)), Ok(())),
            (Some(server(&other, "localhost", valid)), Err(Some(HandshakeFailure::OtherCa))),
            (Some(server(&ca, "localhost", (2000, 2001))), Err(Some(HandshakeFailure::Expired))),
            (Some(server(&ca, "localhost", (2090, 2100))), Err(Some(HandshakeFailure::NotYetValid))),
            (
                Some(server(&ca, "elsewhere", valid)),
                Err(Some(HandshakeFailure::OtherName("localhost".to_owned()))),
            ),
            (None, Err(Some(HandshakeFailure::NotTls))),
        ] {
            assert_eq!(probe(&ca, served).await, expected);
        }
    }

    #[test]
    fn text_without_a_certificate_is_refused() {
        for text in ["", "PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            assert!(Probe::new(text).is_none(), "{text}");
        }
    }
}
