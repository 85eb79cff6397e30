//! The certificate authority of an environment: a CA certificate and its key. It issues
//! certificates for public keys, with given names and a given validity; the caller decides which
//! names a key may have. Times are arguments, in milliseconds since 1970. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKey,
    PublicKeyData, SanType, SerialNumber, date_time_ymd,
};
use sha2::{Digest as _, Sha256};

use super::certificate::Certificate;
use super::key::PrivateKey;
use crate::model::hex;

/// How long the certificate of a machine is valid.
pub const MACHINE_LIFETIME: Duration = Duration::from_secs(90 * 86_400);

/// How long the certificates of operators and controllers are valid.
pub const ROLE_LIFETIME: Duration = Duration::from_secs(365 * 86_400);

/// How long a CA is valid.
const CA_LIFETIME: Duration = Duration::from_secs(20 * 365 * 86_400);

/// Certificates are valid from this time before they are issued, for machines whose clock is late.
const BACKDATED: Duration = Duration::from_secs(3600);

/// Maximum size of a certificate signing request.
pub const MAX_REQUEST_BYTES: usize = 16 << 10;

/// Maximum number of names in a certificate or request.
const MAX_NAMES: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    #[error("the system has no random bytes")]
    NoRandomness,
    #[error("not a private key of the type ECDSA P-256 in PEM form")]
    InvalidKey,
    #[error("not a CA certificate in PEM form")]
    InvalidCa,
    #[error("the private key does not belong to the CA certificate")]
    OtherKey,
    #[error("not a certificate in PEM form")]
    InvalidCertificate,
    #[error("not a certificate signing request: {0}")]
    InvalidRequest(&'static str),
    #[error("'{}' is not a DNS name", .0.escape_debug())]
    InvalidName(String),
    #[error("the certificate cannot be signed: {0}")]
    NotSigned(String),
}

/// The names of a certificate: DNS names in lower case, and addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    pub dns: BTreeSet<String>,
    pub ips: BTreeSet<IpAddr>,
}

impl Names {
    /// Sorts texts into addresses and DNS names.
    pub fn of<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Self {
        let mut found = Self::default();
        for name in names {
            match name.as_ref().parse() {
                Ok(ip) => _ = found.ips.insert(ip),
                Err(_) => _ = found.dns.insert(name.as_ref().to_ascii_lowercase()),
            }
        }
        found
    }

    /// Without texts that are neither addresses nor DNS names.
    #[must_use]
    pub fn without_invalid(mut self) -> Self {
        self.dns.retain(|name| is_dns_name(name));
        self
    }

    /// The first name that is not among the `permitted`.
    pub fn first_outside(&self, permitted: &Self) -> Option<String> {
        let ip = self.ips.difference(&permitted.ips).next().map(ToString::to_string);
        self.dns.difference(&permitted.dns).next().cloned().or(ip)
    }

    pub(super) fn to_subject(&self) -> Result<Vec<SanType>, AuthorityError> {
        let dns = self.dns.iter().map(|name| {
            let refused = || AuthorityError::InvalidName(name.clone());
            let name = name.as_str().try_into().ok().filter(|_| is_dns_name(name)).ok_or_else(refused)?;
            Ok(SanType::DnsName(name))
        });
        dns.chain(self.ips.iter().map(|ip| Ok(SanType::IpAddress(*ip)))).collect()
    }
}

fn is_dns_name(name: &str) -> bool {
    rustls::pki_types::DnsName::try_from(name).is_ok()
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ips = self.ips.iter().map(ToString::to_string);
        f.write_str(&self.dns.iter().cloned().chain(ips).collect::<Vec<_>>().join(", "))
    }
}

/// When a certificate is valid, in milliseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    pub from_ms: u64,
    pub until_ms: u64,
}

impl Validity {
    /// From now, and a little before, for this time.
    pub fn starting(now_ms: u64, lifetime: Duration) -> Self {
        Self { from_ms: now_ms.saturating_sub(ms(BACKDATED)), until_ms: now_ms.saturating_add(ms(lifetime)) }
    }

    /// The time at which two thirds have passed, and the certificate is renewed.
    pub fn renew_at_ms(&self) -> u64 {
        self.from_ms + self.until_ms.saturating_sub(self.from_ms) / 3 * 2
    }
}

/// A certificate signing request whose signature was verified: the sender has the private key.
#[derive(Debug, Clone)]
pub struct Request {
    key: PublicKey,
    names: Names,
}

impl Request {
    /// # Errors
    /// If the text is not a request (PEM) for an ECDSA P-256 key with its valid signature, or asks
    /// for other names than DNS names and addresses.
    pub fn parse(pem: &str) -> Result<Self, AuthorityError> {
        let invalid = AuthorityError::InvalidRequest;
        if pem.len() > MAX_REQUEST_BYTES {
            return Err(invalid("it is too long"));
        }
        let parsed = CertificateSigningRequestParams::from_pem(pem).map_err(|error| match error {
            rcgen::Error::InvalidCertificationRequestSignature => invalid("its signature is wrong"),
            rcgen::Error::UnsupportedExtension => invalid("it asks for an unsupported extension"),
            _ => invalid("it cannot be parsed"),
        })?;
        if parsed.public_key.algorithm() != &PKCS_ECDSA_P256_SHA256 {
            return Err(invalid("its key is not of the type ECDSA P-256"));
        }
        if parsed.params.subject_alt_names.len() > MAX_NAMES {
            return Err(invalid("it asks for too many names"));
        }
        let mut names = Names::default();
        for name in &parsed.params.subject_alt_names {
            match name {
                // The names are part of messages; a DNS name is short and has no control
                // characters.
                SanType::DnsName(name) if !is_dns_name(name.as_str()) => {
                    return Err(invalid("it asks for a name that is no DNS name"));
                }
                SanType::DnsName(name) => _ = names.dns.insert(name.as_str().to_ascii_lowercase()),
                SanType::IpAddress(ip) => _ = names.ips.insert(*ip),
                _ => return Err(invalid("it asks for other names than DNS names and addresses")),
            }
        }
        Ok(Self { key: parsed.public_key, names })
    }

    /// The names that the request asks for.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Whether the request is one for this private key.
    pub fn is_of(&self, key: &PrivateKey) -> bool {
        key.pair().is_ok_and(|pair| pair.der_bytes() == self.key.der_bytes())
    }

    /// Whether a certificate has the key of this request.
    pub fn has_key_of(&self, certificate: &Certificate) -> bool {
        self.key.der_bytes() == certificate.public_key()
    }
}

/// A CA certificate and its key.
pub struct Authority {
    certificate: String,
    key: PrivateKey,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Authority {
    /// Creates the CA of an environment with a new key.
    ///
    /// # Errors
    /// If the key or the name cannot be used.
    pub fn create(environment: &str, key: &PrivateKey, now_ms: u64) -> Result<Self, AuthorityError> {
        let pair = key.pair()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        // The id distinguishes the CAs of two environments that have the same name.
        let id = hex(&Sha256::digest(pair.der_bytes())[..8]);
        params.distinguished_name.push(DnType::CommonName, format!("{environment} authority {id}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        set_validity(&mut params, Validity::starting(now_ms, CA_LIFETIME));
        params.serial_number = Some(serial(pair.der_bytes(), now_ms));
        let made = params.self_signed(&pair).map_err(|error| not_signed(&error))?;
        Self::load(&made.pem(), key)
    }

    /// # Errors
    /// If the certificate (PEM) is not that of a CA, or belongs to another key.
    pub fn load(certificate: &str, key: &PrivateKey) -> Result<Self, AuthorityError> {
        let parsed = Certificate::parse(certificate).map_err(|_| AuthorityError::InvalidCa)?;
        let pair = key.pair()?;
        if !parsed.is_ca() {
            return Err(AuthorityError::InvalidCa);
        }
        if parsed.public_key() != pair.der_bytes() {
            return Err(AuthorityError::OtherKey);
        }
        let issuer = Issuer::from_ca_cert_pem(certificate, pair).map_err(|_| AuthorityError::InvalidCa)?;
        Ok(Self { certificate: certificate.to_owned(), key: key.clone(), issuer })
    }

    /// The CA certificate in PEM form.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    pub fn key(&self) -> &PrivateKey {
        &self.key
    }

    /// Issues a certificate for the key of a request, and for exactly these names. Returns the
    /// chain in PEM form: the new certificate, then that of the CA.
    ///
    /// # Errors
    /// If a name cannot be part of a certificate.
    pub fn issue(
        &self,
        request: &Request,
        names: &Names,
        validity: Validity,
    ) -> Result<String, AuthorityError> {
        self.sign(&request.key, names, validity)
    }

    /// Issues a certificate for a key at hand; otherwise like [`issue`](Self::issue).
    ///
    /// # Errors
    /// As for [`issue`](Self::issue).
    pub fn issue_for(
        &self,
        key: &PrivateKey,
        names: &Names,
        validity: Validity,
    ) -> Result<String, AuthorityError> {
        self.sign(&key.pair()?, names, validity)
    }

    fn sign(
        &self,
        key: &impl PublicKeyData,
        names: &Names,
        validity: Validity,
    ) -> Result<String, AuthorityError> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.to_subject()?;
        params.distinguished_name = DistinguishedName::new();
        if let Some(name) = names.dns.first() {
            params.distinguished_name.push(DnType::CommonName, name.as_str());
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, validity);
        params.serial_number = Some(serial(key.der_bytes(), validity.from_ms));
        let made = params.signed_by(key, &self.issuer).map_err(|error| not_signed(&error))?;
        Ok(format!("{}{}", made.pem(), self.certificate))
    }
}

fn not_signed(error: &rcgen::Error) -> AuthorityError {
    AuthorityError::NotSigned(error.to_string())
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn set_validity(params: &mut CertificateParams, validity: Validity) {
    let at = |ms: u64| date_time_ymd(1970, 1, 1) + Duration::from_secs(ms / 1000);
    (params.not_before, params.not_after) = (at(validity.from_ms), at(validity.until_ms));
}

/// A serial number that differs for each key and time, positive and at most 20 bytes long.
fn serial(public_key: &[u8], time_ms: u64) -> SerialNumber {
    let mut hash = Sha256::digest([public_key, &time_ms.to_be_bytes()].concat())[..16].to_vec();
    hash[0] = hash[0] & 0x7f | 0x40;
    SerialNumber::from(hash)
}

#[cfg(test)]
#[path = "authority_tests.rs"]
mod tests;
