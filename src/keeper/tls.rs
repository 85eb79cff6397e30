//! What TLS is served with: certificates, key and, if clients must show one, the authority of theirs. What a certificate
//! says about a client decides only whether it may come in; who it is, it proves as without TLS.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{Error, InconsistentKeys, RootCertStore, ServerConfig};

/// What serves TLS, made of files.
pub type Config = Arc<ServerConfig>;

/// Where TLS is served and with what.
#[derive(Debug, Clone)]
pub struct Tls {
    pub listen: SocketAddr,
    pub config: Config,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TlsError {
    #[error("there is no certificate in PEM form")]
    NoCertificate,
    #[error("there is no private key in PEM form")]
    NoKey,
    #[error("the private key is of a kind that is not supported")]
    BadKey,
    #[error("the private key does not fit the certificate")]
    OtherKey,
    #[error("the clients' authority is none")]
    BadAuthority,
}

/// Whether clients have a certificate to show, where there is an authority for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    MustShow,
    MayShow,
}

/// What serves `certificates`, the server's own first. With `authority`, clients show a certificate of it.
pub fn server_config(
    certificates: &[u8],
    key: &[u8],
    authority: Option<&[u8]>,
    clients: Clients,
) -> Result<Config, TlsError> {
    // Named and not found: another part of the program may bring another one along.
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("ring has the cipher suites of both versions");
    let builder = match authority {
        None => builder.with_no_client_auth(),
        Some(pem) => {
            let mut roots = RootCertStore::empty();
            for root in certificates_in(pem).map_err(|_| TlsError::BadAuthority)? {
                roots.add(root).map_err(|_| TlsError::BadAuthority)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
            let verifier = match clients {
                Clients::MayShow => verifier.allow_unauthenticated(),
                Clients::MustShow => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|_| TlsError::BadAuthority)?)
        }
    };
    let certified = certified(certificates_in(certificates)?, key, &provider)?;
    Ok(Arc::new(builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))))
}

fn certificates_in(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or(TlsError::NoCertificate)
}

fn certified(
    certificates: Vec<CertificateDer<'static>>,
    key: &[u8],
    provider: &CryptoProvider,
) -> Result<CertifiedKey, TlsError> {
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::NoKey)?;
    let key = provider.key_provider.load_private_key(key).map_err(|_| TlsError::BadKey)?;
    let certified = CertifiedKey::new(certificates, key);
    // Only a mismatch is an error: clients accept certificates of the first X.509 version, which rustls cannot read.
    match certified.keys_match() {
        Err(Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => Err(TlsError::OtherKey),
        _ => Ok(certified),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_its_reason() {
        let made = || generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let CertifiedKey { cert, signing_key } = made();
        let (cert, key) = (cert.pem(), signing_key.serialize_pem());
        let other = made().signing_key.serialize_pem();
        let served = |cert: &str, key: &str, authority: Option<&str>| {
            let authority = authority.map(str::as_bytes);
            server_config(cert.as_bytes(), key.as_bytes(), authority, Clients::MustShow).map(|_| ())
        };
        assert_eq!(served(&cert, &key, None), Ok(()));
        assert_eq!(served(&cert, &key, Some(&cert)), Ok(()));
        assert_eq!(served("", &key, None), Err(TlsError::NoCertificate));
        assert_eq!(served(&key, &key, None), Err(TlsError::NoCertificate));
        assert_eq!(served(&cert, &cert, None), Err(TlsError::NoKey));
        assert_eq!(served(&cert, &other, None), Err(TlsError::OtherKey));
        assert_eq!(served(&cert, &key, Some(&key)), Err(TlsError::BadAuthority));
    }
}
