//! Private keys of certificates (ECDSA P-256), and the requests that are signed with them. A key is
//! never shown: `Debug` hides it, and no error contains it.

use std::fmt;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use sha2::{Digest as _, Sha256};

use super::authority::{AuthorityError, Names};
use super::certificate::Certificate;
use crate::model::hex;

/// A private key in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(String);

impl PrivateKey {
    /// # Errors
    /// If the system has no random bytes.
    pub fn generate() -> Result<Self, AuthorityError> {
        let pair =
            KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|_| AuthorityError::NoRandomness)?;
        Ok(Self(pair.serialize_pem()))
    }

    /// # Errors
    /// If the text is not a private key of the type ECDSA P-256. The error does not contain the
    /// text.
    pub fn parse(pem: &str) -> Result<Self, AuthorityError> {
        let key = Self(pem.to_owned());
        key.pair().map(|_| key)
    }

    /// The key in PEM form, for a file that only its owner reads.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns a certificate signing request (PEM) for this key and these names.
    ///
    /// # Errors
    /// If a name cannot be part of a certificate.
    pub fn request(&self, names: &Names) -> Result<String, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = names.to_subject()?;
        let request = params.serialize_request(&self.pair()?);
        request.and_then(|request| request.pem()).map_err(|_| AuthorityError::InvalidKey)
    }

    /// Whether a certificate is one for this key.
    pub fn matches(&self, certificate: &Certificate) -> bool {
        self.pair().is_ok_and(|pair| pair.der_bytes() == certificate.public_key())
    }

    /// The SHA-256 hash of the public key in hexadecimal digits.
    ///
    /// # Errors
    /// [`AuthorityError::InvalidKey`].
    pub fn fingerprint(&self) -> Result<String, AuthorityError> {
        Ok(hex(&Sha256::digest(self.pair()?.der_bytes())))
    }

    pub(super) fn pair(&self) -> Result<KeyPair, AuthorityError> {
        KeyPair::from_pem_and_sign_algo(&self.0, &PKCS_ECDSA_P256_SHA256)
            .map_err(|_| AuthorityError::InvalidKey)
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(...)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_stay_out_of_debug_and_errors() {
        let (one, two) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
        assert_ne!(one, two);
        assert_eq!(PrivateKey::parse(one.expose()).unwrap(), one);
        assert_eq!(format!("{one:?}"), "PrivateKey(...)");
        assert_eq!(one.fingerprint().unwrap().len(), 64);
        assert_ne!(one.fingerprint(), two.fingerprint());
        for bad in ["", "hunter2", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"] {
            let refusal = PrivateKey::parse(bad).unwrap_err();
            assert_eq!(refusal.to_string(), "not a private key of the type ECDSA P-256 in PEM form");
        }
    }
}
