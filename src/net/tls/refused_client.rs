//! Why the handshake with a client failed, as far as the client's certificate or protocol is the
//! reason, with the remedy, and log lines about it, which are limited.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rustls::{AlertDescription, CertificateError, Error};
use tracing::{debug, warn};

use crate::net::log_limit::LogLimit;

/// The first byte of a TLS connection.
pub const TLS_HANDSHAKE: u8 = 0x16;

/// The client of a plain listener begins a TLS handshake.
pub const UNEXPECTED_TLS: &str = "the client uses TLS and this listener does not: name it without \
                                      tls:// or https://, or choose its TLS port";

/// Returns why a client was refused, and the remedy; `None` if the connection just ended, as those
/// of port scans do.
pub fn refused_client(error: &io::Error) -> Option<&'static str> {
    let tls = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match tls {
        Error::InvalidMessage(_) => {
            "the client does not use TLS: begin the address of this listener with tls:// or https://"
        }
        Error::NoCertificatesPresented => {
            "the client presented no certificate: `juju machine renew N` issues a new one to machine N \
             if it has expired"
        }
        Error::InvalidCertificate(problem) => match problem {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the client's certificate was issued by another CA: `juju machine renew N` issues one of \
                 this environment to machine N"
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the client's certificate has expired, or the clock of this machine is wrong: compare \
                 the clocks, or issue a new one with `juju machine renew N`"
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the client's certificate is not valid yet, or the clock of this machine is wrong: compare \
                 the clocks, or issue a new one with `juju machine renew N`"
            }
            _ => "the client's certificate is invalid",
        },
        Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateExpired
            | AlertDescription::DecryptError,
        ) => {
            "the client does not accept the certificate of this listener: give it the CA certificate with \
             --ca or --ca-file"
        }
        _ => return None,
    })
}

/// The log lines about the refused clients of one listener.
#[derive(Debug)]
pub struct RefusedClients {
    since: Instant,
    limit: Mutex<LogLimit>,
}

impl Default for RefusedClients {
    fn default() -> Self {
        Self { since: Instant::now(), limit: Mutex::default() }
    }
}

impl RefusedClients {
    /// Logs a failed handshake, as a warning if the client was refused.
    pub fn log_failure(&self, peer: SocketAddr, error: &io::Error) {
        match refused_client(error) {
            Some(reason) => self.log(peer, &reason),
            None => debug!(%peer, %error, "TLS handshake failed"),
        }
    }

    /// Logs a client that was refused for this reason.
    pub fn log(&self, peer: SocketAddr, reason: &dyn Display) {
        let now_ms = i64::try_from(self.since.elapsed().as_millis()).unwrap_or(i64::MAX);
        let noted = self.limit.lock().unwrap_or_else(PoisonError::into_inner).note(now_ms);
        if let Some(unlogged) = noted {
            warn!(%peer, %reason, unlogged, "connection refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, RootCertStore};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::net::tls::authority::{Authority, Names, Validity};
    use crate::net::tls::key::PrivateKey;
    use crate::net::tls::tests::new_ca;
    use crate::net::tls::{ClientAuth, IdentityFiles, ServerFiles, ServerTls};
    use crate::runtime::clock::wall_ms;

    const DAY: u64 = 86_400_000;

    fn issue(ca: &Authority, from_ms: u64) -> (String, PrivateKey) {
        let key = PrivateKey::generate().unwrap();
        let validity = Validity { from_ms, until_ms: from_ms + DAY };
        (ca.issue_for(&key, &Names::of(["localhost"]), validity).unwrap(), key)
    }

    /// A listener whose clients need a certificate.
    fn listener(directory: &std::path::Path, ca: &Authority) -> ServerTls {
        let write = |name: &str, text: &str| {
            let path = directory.join(name);
            crate::runtime::atomic_file::replace_exclusively(&path, text.as_bytes()).unwrap();
            path
        };
        let (chain, key) = issue(ca, wall_ms());
        let identity =
            IdentityFiles { certificates: write("own.pem", &chain), key: write("own.key", key.expose()) };
        let client_ca = Some((write("ca.pem", ca.certificate()), ClientAuth::Required));
        ServerTls::load(ServerFiles { identity, client_ca }).unwrap()
    }

    /// The client's side: what it trusts, and its certificate; `None` for plain text.
    type Client<'a> = Option<(&'a Authority, Option<(String, PrivateKey)>)>;

    async fn reason(server: &ServerTls, client: Client<'_>) -> Option<&'static str> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let connecting = async {
            let Some((trusted, identity)) = client else {
                stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
                // Until the server closes the connection.
                drop(stream.read(&mut [0; 64]).await);
                return;
            };
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(trusted.certificate().as_bytes()).unwrap()).unwrap();
            let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
            let config = ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
            let config = match identity {
                None => config.with_no_client_auth(),
                Some((chain, key)) => {
                    let chain =
                        CertificateDer::pem_slice_iter(chain.as_bytes()).map(Result::unwrap).collect();
                    let key = PrivateKeyDer::from_pem_slice(key.expose().as_bytes()).unwrap();
                    config.with_client_auth_cert(chain, key).unwrap()
                }
            };
            let name = ServerName::try_from("localhost").unwrap();
            if let Ok(mut stream) = TlsConnector::from(Arc::new(config)).connect(name, stream).await {
                drop(stream.read(&mut [0; 64]).await);
            }
        };
        let accepting = async {
            let (stream, _) = listener.accept().await.unwrap();
            server.accept(stream).await.err().map(|error| refused_client(&error).unwrap_or("another reason"))
        };
        tokio::join!(connecting, accepting).1
    }

    #[tokio::test]
    async fn each_refused_client_has_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let (ca, other, now_ms) = (new_ca(), new_ca(), wall_ms());
        let server = listener(directory.path(), &ca);
        let presenting = |issuer: &Authority, from_ms| Some((&ca, Some(issue(issuer, from_ms))));
        let clock = "compare the clocks, or issue a new one with `juju machine renew N`";
        for (client, expected) in [
            (presenting(&ca, now_ms - DAY / 2), None),
            (
                None,
                Some(
                    "the client does not use TLS: begin the address of this listener with tls:// or https://",
                ),
            ),
            (
                Some((&ca, None)),
                Some(
                    "the client presented no certificate: `juju machine renew N` issues a new one to \
                     machine N if it has expired",
                ),
            ),
            (
                presenting(&other, now_ms - DAY / 2),
                Some(
                    "the client's certificate was issued by another CA: `juju machine renew N` issues one of \
                     this environment to machine N",
                ),
            ),
            (
                presenting(&ca, now_ms - 2 * DAY),
                Some(&*format!(
                    "the client's certificate has expired, or the clock of this machine is wrong: {clock}"
                )),
            ),
            (
                presenting(&ca, now_ms + DAY),
                Some(&*format!(
                    "the client's certificate is not valid yet, or the clock of this machine is wrong: \
                     {clock}"
                )),
            ),
            (
                Some((&other, None)),
                Some(
                    "the client does not accept the certificate of this listener: give it the CA certificate \
                     with --ca or --ca-file",
                ),
            ),
        ] {
            assert_eq!(reason(&server, client).await, expected);
        }
    }

    #[test]
    fn a_connection_that_just_ends_is_no_refusal() {
        let ended = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert_eq!(refused_client(&ended), None);
    }
}
