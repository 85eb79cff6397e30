//! Tokens of machines. A machine proves its identity with a token that is derived from its
//! credential, does not reveal it, and is valid only for the machine's own name. Pure.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::model::{MachineId, hex, unhex};

const PURPOSE: &[u8] = b"portcullis heartbeat";
const SCHEME: &str = "Bearer machine-";

fn mac(secret: &[u8], text: &[u8]) -> Hmac<Sha256> {
    // HMAC takes keys of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any key");
    mac.update(text);
    mac
}

/// The signature of a document, in hexadecimal digits.
pub fn signature(secret: &[u8], document: &[u8]) -> String {
    hex(&mac(secret, document).finalize().into_bytes())
}

/// The `Authorization` header of a machine; `credential` is its `user:secret`.
pub fn authorization(machine: MachineId, credential: &str) -> String {
    format!("{SCHEME}{}.{}", machine.number(), signature(credential.as_bytes(), PURPOSE))
}

/// A machine's token: the machine, and the proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineToken {
    pub machine: MachineId,
    proof: Vec<u8>,
}

impl MachineToken {
    /// `None` if the header is not a machine's token.
    pub fn parse(authorization: &str) -> Option<Self> {
        let (number, proof) = authorization.strip_prefix(SCHEME)?.split_once('.')?;
        Some(Self { machine: MachineId::new(number.parse().ok()?), proof: unhex(proof)? })
    }

    /// Whether the proof matches this credential, in constant time.
    pub fn holds(&self, credential: &str) -> bool {
        mac(credential.as_bytes(), PURPOSE).verify_slice(&self.proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_proves_one_machine() {
        let header = authorization(MachineId::new(3), "machine-0000000003:secret");
        assert!(header.starts_with("Bearer machine-3.") && !header.contains("secret"));
        let token = MachineToken::parse(&header).unwrap();
        assert_eq!(token.machine, MachineId::new(3));
        assert!(token.holds("machine-0000000003:secret"));
        assert!(!token.holds("machine-0000000004:secret"));
        assert!(!token.holds("machine-0000000003:Secret"));
    }

    #[test]
    fn other_headers_are_no_tokens() {
        for header in [
            "",
            "Basic x",
            "Bearer x",
            "Bearer machine-3",
            "Bearer machine-x.00",
            "Bearer machine-3.0",
            "Bearer machine-3.zz",
        ] {
            assert_eq!(MachineToken::parse(header), None, "{header}");
        }
        assert!(!MachineToken::parse("Bearer machine-3.").unwrap().holds("a:b"));
    }

    #[test]
    fn signatures_are_hmac_sha256() {
        // RFC 4231, test case 2.
        assert_eq!(
            signature(b"Jefe", b"what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }
}
