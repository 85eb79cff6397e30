//! The SHA-256 of a charm, which identifies it. Pure.

use sha2::{Digest as _, Sha256};
use std::fmt;

use super::hex;

/// The SHA-256 of a charm. It also grants access to the charm in the store, like a password, so
/// `Debug` and `Display` print only its beginning.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CharmHash(String);

const SHOWN: usize = 12;

impl CharmHash {
    pub fn of(bytes: &[u8]) -> Self {
        Self(hex(&Sha256::digest(bytes)))
    }

    /// Parses 64 lower-case hexadecimal digits; returns `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let is_hash = text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        is_hash.then(|| Self(text.to_owned()))
    }

    /// Returns the whole hash, which is a secret.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns the name of the charm's znode, which does not reveal the hash.
    pub fn key(&self) -> String {
        hex(&Sha256::digest(format!("key of charm {}", self.0)))[..40].to_owned()
    }
}

impl fmt::Display for CharmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0[..SHOWN])
    }
}

impl fmt::Debug for CharmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CharmHash({self}...)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_printed_in_part_and_its_key_does_not_reveal_it() {
        let hash = CharmHash::of(b"");
        assert_eq!(hash.expose(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!((hash.to_string().as_str(), format!("{hash:?}").len()), ("e3b0c44298fc", 26));
        assert_eq!(hash.key().len(), 40);
        assert!(!hash.key().contains("e3b0c44"));
        assert_eq!(CharmHash::parse(hash.expose()), Some(hash));
        for no_hash in ["", "abc", &"A".repeat(64), &"g".repeat(64), &"a".repeat(65)] {
            assert_eq!(CharmHash::parse(no_hash), None, "{no_hash}");
        }
    }
}
