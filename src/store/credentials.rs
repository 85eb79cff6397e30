//! Digest identities and their secrets. A secret is never shown: `Debug` hides it, no error
//! contains it, and an ACL holds only its hash.

use super::address::Address;
use super::error::Error;
use crate::model::{UnitName, hex};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::json;
use sha1::{Digest as _, Sha1};
use sha2::Sha256;
use std::fmt;

/// Random bytes in a secret.
const SECRET_BYTES: usize = 20;

/// A user and its secret, `user:secret`.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    user: String,
    secret: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("credentials have the form USER:SECRET")]
pub struct InvalidCredential;

impl Credential {
    /// Generates a new secret.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn generate(user: &str) -> Result<Self, Error> {
        Ok(Self { user: user.to_owned(), secret: random_hex(SECRET_BYTES)? })
    }

    /// # Errors
    /// If the colon, the user or the secret is missing, or for a control character. The error does
    /// not contain the text.
    pub fn parse(auth: &str) -> Result<Self, InvalidCredential> {
        let (user, secret) = auth.split_once(':').ok_or(InvalidCredential)?;
        if user.is_empty() || secret.is_empty() || auth.len() > 512 || auth.chars().any(char::is_control) {
            return Err(InvalidCredential);
        }
        Ok(Self { user: user.to_owned(), secret: secret.to_owned() })
    }

    /// Derives the secret of another user from this one. It does not reveal this secret, and the
    /// same `purpose` gives the same secret again.
    #[must_use]
    pub fn derive(&self, user: &str, purpose: &str) -> Self {
        // HMAC accepts keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret.as_bytes()).expect("any key");
        mac.update(purpose.as_bytes());
        let secret = hex(&mac.finalize().into_bytes()[..SECRET_BYTES]);
        Self { user: user.to_owned(), secret }
    }

    pub fn user(&self) -> &str {
        &self.user
    }

    /// `user:secret`, for the wire or a file that only its owner reads.
    pub fn expose(&self) -> String {
        format!("{}:{}", self.user, self.secret)
    }

    /// The identity in an ACL: `user:base64(sha1(user:secret))`.
    pub fn identity(&self) -> Identity {
        let digest = Sha1::digest(self.expose().as_bytes());
        Identity(format!("{}:{}", self.user, STANDARD.encode(digest)))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({}:...)", self.user)
    }
}

/// A digest identity as in an ACL. Contains a hash, not the secret.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(String);

impl Identity {
    /// # Errors
    /// If it is not `user:hash`.
    pub fn parse(text: &str) -> Result<Self, InvalidCredential> {
        let (user, hash) = text.split_once(':').ok_or(InvalidCredential)?;
        if user.is_empty() || STANDARD.decode(hash).map_err(|_| InvalidCredential)?.len() != 20 {
            return Err(InvalidCredential);
        }
        Ok(Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The file from which hook tools read the credentials of their unit and the CA of the store's
/// servers.
pub fn unit_credentials_file(unit: &UnitName, credential: &Credential, address: &Address) -> String {
    let mut file = json!({"unit": unit.to_string(), "auth": credential.expose()});
    if let Some(ca) = address.ca() {
        file["ca"] = ca.into();
    }
    format!("{file}\n")
}

/// Random bytes as hexadecimal digits.
///
/// # Errors
/// If the system has no random bytes.
pub(super) fn random_hex(bytes: usize) -> Result<String, Error> {
    let mut buffer = vec![0; bytes];
    getrandom::fill(&mut buffer).map_err(Error::Random)?;
    Ok(hex(&buffer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_zookeepers_digest() {
        // The pair that ZooKeeper's own DigestAuthenticationProvider documents for super:admin.
        let credential = Credential::parse("super:admin").unwrap();
        assert_eq!(credential.identity().as_str(), "super:xQJmxLMiHGwaqBvst5y6rkB6HQs=");
        assert_eq!(Identity::parse(credential.identity().as_str()), Ok(credential.identity()));
    }

    #[test]
    fn secrets_are_long_differ_and_stay_out_of_debug() {
        let (a, b) = (Credential::generate("operator").unwrap(), Credential::generate("operator").unwrap());
        assert_ne!(a, b);
        let secret = a.expose().split_once(':').unwrap().1.to_owned();
        assert_eq!(secret.len(), 2 * SECRET_BYTES);
        assert!(!format!("{a:?}").contains(&secret));
        assert!(!a.identity().as_str().contains(&secret));
    }

    #[test]
    fn malformed_credentials_are_refused_without_an_echo() {
        for bad in ["", "operator", ":x", "operator:", "a:b\n"] {
            let refusal = Credential::parse(bad).unwrap_err();
            assert_eq!(refusal.to_string(), "credentials have the form USER:SECRET");
        }
        for bad in ["", "operator", "operator:notbase64!", "operator:YWJj", ":xQJmxLMiHGwaqBvst5y6rkB6HQs="] {
            assert!(Identity::parse(bad).is_err(), "{bad}");
        }
    }
}
