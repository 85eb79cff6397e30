//! Bytes as hexadecimal digits, lower-case ones when written. Pure.

use sha2::{Digest as _, Sha256};

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some((digit(pair.first()?)? * 16 + digit(pair.get(1)?)?) as u8)).collect()
}

/// The first bytes of the SHA-256 digest of `data`, as hexadecimal digits: a short name that
/// differs from those of other data.
pub fn digest_prefix(data: &[u8], bytes: usize) -> String {
    hex(&Sha256::digest(data)[..bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_prefix_has_two_digits_for_each_byte() {
        // From `printf abc | sha256sum`.
        assert_eq!(digest_prefix(b"abc", 6), "ba7816bf8f01");
        assert_eq!(digest_prefix(b"abc", 8), "ba7816bf8f01cfea");
    }
}
