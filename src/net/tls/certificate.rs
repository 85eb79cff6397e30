//! The names, the key and the validity of a certificate in PEM form. A handshake verifies its
//! signature; nothing here does. Pure.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use sha2::{Digest as _, Sha256};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::authority::{AuthorityError, Names, Validity};
use crate::model::{hex, unhex};

/// A certificate that was read from PEM text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    names: Names,
    validity: Validity,
    is_ca: bool,
    /// The bits of the public key, without its algorithm.
    public_key: Vec<u8>,
    fingerprint: Fingerprint,
}

impl Certificate {
    /// Reads the first certificate of a chain.
    ///
    /// # Errors
    /// [`AuthorityError::InvalidCertificate`].
    pub fn parse(pem: &str) -> Result<Self, AuthorityError> {
        let invalid = AuthorityError::InvalidCertificate;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| invalid.clone())?;
        Self::parse_der(&der).ok_or(invalid)
    }

    /// Returns the number of certificates in PEM text.
    pub fn count_in(pem: &str) -> usize {
        CertificateDer::pem_slice_iter(pem.as_bytes()).filter(Result::is_ok).count()
    }

    /// Reads a certificate in DER form; `None` if it cannot be parsed.
    pub fn parse_der(der: &[u8]) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(der).ok()?;
        let time_ms = |seconds: i64| u64::try_from(seconds).unwrap_or(0).saturating_mul(1000);
        let mut names = Names::default();
        if let Some(found) = parsed.subject_alternative_name().ok()? {
            for name in &found.value.general_names {
                match name {
                    GeneralName::DNSName(name) => _ = names.dns.insert(name.to_ascii_lowercase()),
                    GeneralName::IPAddress(bytes) => names.ips.extend(address(bytes)),
                    _ => {}
                }
            }
        }
        Some(Self {
            names,
            validity: Validity {
                from_ms: time_ms(parsed.validity().not_before.timestamp()),
                until_ms: time_ms(parsed.validity().not_after.timestamp()),
            },
            is_ca: parsed.is_ca(),
            public_key: parsed.public_key().subject_public_key.data.to_vec(),
            fingerprint: Fingerprint(Sha256::digest(der).into()),
        })
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    pub fn validity(&self) -> Validity {
        self.validity
    }

    pub fn is_ca(&self) -> bool {
        self.is_ca
    }

    pub(super) fn public_key(&self) -> &[u8] {
        &self.public_key
    }

    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// The SHA-256 hash of a certificate, written as 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; 32]);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a fingerprint has 64 hexadecimal digits")]
pub struct InvalidFingerprint;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl FromStr for Fingerprint {
    type Err = InvalidFingerprint;

    fn from_str(text: &str) -> Result<Self, InvalidFingerprint> {
        let bytes = unhex(text).filter(|_| text.len() == 64).ok_or(InvalidFingerprint)?;
        bytes.try_into().map(Self).map_err(|_| InvalidFingerprint)
    }
}
