//! The token with which a machine joins an environment: the store's address, the fingerprint of the
//! CA, and a one-time secret. Pure. The store decides whether the secret is known and unused.
//!
//! `pj1.BODY.CHECK`: the version, the body as base64 of a JSON object, and a checksum of both. The
//! checksum distinguishes a token that was truncated or mistyped from a forged one. It is no
//! signature: only the store can verify a token.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

use crate::model::{EnvironmentName, MachineId};
use crate::store::joining::OfferKind;
use crate::store::{Address, Credential};

/// The version of the format.
const VERSION: &str = "pj1";

/// How long a token is valid.
pub const LIFETIME_MS: u64 = 3_600_000;

/// The maximum length of a token. An address of many hosts needs most of it.
const MAX_LENGTH: usize = 8192;

/// The length of a fingerprint in hexadecimal digits.
const FINGERPRINT_DIGITS: usize = 64;

#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    pub environment: EnvironmentName,
    pub machine: MachineId,
    /// Without a CA certificate: the machine fetches it and compares its fingerprint.
    pub store: Address,
    /// The SHA-256 fingerprint of the CA certificate in hexadecimal digits; `None` for a store
    /// without TLS.
    pub fingerprint: Option<String>,
    /// The one-time credential.
    pub credential: Credential,
    /// Milliseconds since 1970.
    pub expires_ms: u64,
    pub offer: OfferKind,
}

/// Why a text is not a token, or cannot be used. It never quotes the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidToken {
    #[error("the token is damaged: it was truncated or mistyped; copy the whole line")]
    Damaged,
    #[error("the token has the format '{0}', and this program supports '{VERSION}': it is older or newer")]
    OtherVersion(String),
    #[error("the token is not one that `juju add-machine` printed: {0}")]
    Malformed(&'static str),
    #[error("the token has expired {}", ago(*.expired_ms, *.now_ms))]
    Expired { expired_ms: u64, now_ms: u64 },
    #[error(
        "the token is valid for more than an hour from now: the clock of this machine is wrong by {}",
        words(*.ahead_ms)
    )]
    FromTheFuture { ahead_ms: u64 },
}

#[derive(Serialize, Deserialize)]
struct Wire {
    environment: String,
    machine: u32,
    store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ca: Option<String>,
    auth: String,
    expires: u64,
    /// Whether the user data of a launched instance has the token.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    launch: bool,
}

/// Hides the secret.
impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({} of {})", self.machine, self.environment)
    }
}

impl JoinToken {
    /// The text for the command line of `portcullis join`.
    pub fn expose(&self) -> String {
        let wire = Wire {
            environment: self.environment.to_string(),
            machine: self.machine.number(),
            store: self.store.to_string(),
            ca: self.fingerprint.clone(),
            auth: self.credential.expose(),
            expires: self.expires_ms,
            launch: self.offer == OfferKind::Launch,
        };
        // Encoding texts and numbers as JSON cannot fail.
        let body = URL_SAFE_NO_PAD.encode(serde_json::to_vec(&wire).expect("texts and numbers"));
        let text = format!("{VERSION}.{body}");
        format!("{text}.{}", checksum(&text))
    }

    /// Refuses a token that is not valid at `now_ms`, by the clock of this machine.
    ///
    /// # Errors
    /// [`InvalidToken::Expired`] and [`InvalidToken::FromTheFuture`].
    pub fn check_time(&self, now_ms: u64) -> Result<(), InvalidToken> {
        // Clocks of two machines always differ a little.
        let latest_ms = now_ms.saturating_add(LIFETIME_MS + TOLERANCE_MS);
        if now_ms >= self.expires_ms {
            return Err(InvalidToken::Expired { expired_ms: self.expires_ms, now_ms });
        }
        if self.expires_ms > latest_ms {
            let ahead_ms = self.expires_ms - now_ms.saturating_add(LIFETIME_MS);
            return Err(InvalidToken::FromTheFuture { ahead_ms });
        }
        Ok(())
    }
}

/// How much the clocks of the operator's machine and of the joining machine may differ.
const TOLERANCE_MS: u64 = 300_000;

impl FromStr for JoinToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        let text = text.trim();
        if text.len() > MAX_LENGTH {
            return Err(InvalidToken::Malformed("it is too long"));
        }
        let (version, _) = text.split_once('.').ok_or(InvalidToken::Damaged)?;
        let is_version = version.strip_prefix("pj").is_some_and(|n| n.len() <= 3 && n.parse::<u16>().is_ok());
        if version != VERSION && is_version {
            return Err(InvalidToken::OtherVersion(version.to_owned()));
        }
        let (signed, check) = text.rsplit_once('.').ok_or(InvalidToken::Damaged)?;
        let body = signed.strip_prefix(VERSION).and_then(|body| body.strip_prefix('.'));
        let body = body.filter(|_| check == checksum(signed)).ok_or(InvalidToken::Damaged)?;
        let malformed = InvalidToken::Malformed;
        let bytes = URL_SAFE_NO_PAD.decode(body).map_err(|_| malformed("its body is not base64"))?;
        let wire: Wire = serde_json::from_slice(&bytes).map_err(|_| malformed("a part is missing"))?;
        let is_digest = |text: &String| {
            text.len() == FINGERPRINT_DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        if !wire.ca.as_ref().is_none_or(is_digest) {
            return Err(malformed("its fingerprint is not one"));
        }
        let store: Address = wire.store.parse().map_err(|_| malformed("its store is not an address"))?;
        if store.is_tls() != wire.ca.is_some() {
            return Err(malformed("a fingerprint belongs to a store with TLS, and only to one"));
        }
        Ok(Self {
            environment: wire.environment.parse().map_err(|_| malformed("its environment is not a name"))?,
            machine: MachineId::new(wire.machine),
            store,
            fingerprint: wire.ca,
            credential: Credential::parse(&wire.auth).map_err(|_| malformed("its secret is not one"))?,
            expires_ms: wire.expires,
            offer: if wire.launch { OfferKind::Launch } else { OfferKind::Operator },
        })
    }
}

fn checksum(text: &str) -> String {
    format!("{:08x}", crc32c::crc32c(text.as_bytes()))
}

fn ago(expired_ms: u64, now_ms: u64) -> String {
    format!("{} ago, by the clock of this machine", words(now_ms.saturating_sub(expired_ms)))
}

/// A duration in its largest unit.
fn words(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: u64 = 1_800_000_000_000;
    const HOUR: u64 = 3_600_000;

    fn token(store: &str, fingerprint: Option<&str>) -> JoinToken {
        JoinToken {
            environment: "prod".parse().unwrap(),
            machine: MachineId::new(3),
            store: store.parse().unwrap(),
            fingerprint: fingerprint.map(str::to_owned),
            credential: Credential::parse("join-machine-0000000003:hunter2").unwrap(),
            expires_ms: NOW + HOUR,
            offer: OfferKind::Operator,
        }
    }

    fn usual() -> JoinToken {
        token("tls://10.0.0.10:2281/prod", Some(&"ab".repeat(32)))
    }

    #[test]
    fn a_token_is_read_back_and_hides_its_secret() {
        let many = vec!["zookeeper-with-a-long-name.example.com:2181"; 32].join(",");
        for token in [usual(), token("127.0.0.1:2181", None), token(&many, None)] {
            let text = token.expose();
            assert_eq!(text.parse(), Ok(token.clone()));
            assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()), "surrounding blanks do not matter");
            assert!(!text.contains("hunter2") && !format!("{token:?}").contains("hunter2"));
        }
    }

    #[test]
    fn every_truncation_is_distinguished_from_a_forged_token() {
        let text = usual().expose();
        for length in 0..text.len() {
            assert_eq!(text[..length].parse::<JoinToken>(), Err(InvalidToken::Damaged), "{length}");
        }
        assert_eq!(format!("{text}a").parse::<JoinToken>(), Err(InvalidToken::Damaged));
        let forged = JoinToken { credential: Credential::parse("join:guessed").unwrap(), ..usual() };
        assert!(forged.expose().parse::<JoinToken>().is_ok(), "the store refuses it");
    }

    #[test]
    fn other_versions_and_malformed_bodies_are_refused() {
        let other = "pj2.e30.00000000".parse::<JoinToken>();
        assert_eq!(other, Err(InvalidToken::OtherVersion("pj2".to_owned())));
        let body = |json: &str| {
            let text = format!("{VERSION}.{}", URL_SAFE_NO_PAD.encode(json));
            format!("{text}.{}", checksum(&text)).parse::<JoinToken>()
        };
        let auth = r#""auth":"a:b","expires":1"#;
        let cases = [
            "{}".to_owned(),
            format!(r#"{{"environment":"../x","machine":0,"store":"a",{auth}}}"#),
            format!(r#"{{"environment":"prod","machine":0,"store":"a b",{auth}}}"#),
            format!(r#"{{"environment":"prod","machine":0,"store":"tls://a",{auth}}}"#),
            format!(r#"{{"environment":"prod","machine":0,"store":"tls://a","ca":"abc",{auth}}}"#),
            r#"{"environment":"prod","machine":0,"store":"a","auth":"b","expires":1}"#.to_owned(),
        ];
        for case in cases {
            assert!(matches!(body(&case), Err(InvalidToken::Malformed(_))), "{case}");
        }
        assert!(body(&format!(r#"{{"environment":"prod","machine":0,"store":"a",{auth}}}"#)).is_ok());
        let long = "a".repeat(MAX_LENGTH + 1);
        assert!(matches!(long.parse::<JoinToken>(), Err(InvalidToken::Malformed(_))));
    }

    #[test]
    fn a_token_is_valid_for_an_hour_and_a_wrong_clock_is_reported() {
        const DAY: u64 = 24 * HOUR;
        for (now_ms, refusal) in [
            (NOW, None),
            (NOW + HOUR - 1, None),
            (NOW - TOLERANCE_MS, None),
            (NOW + HOUR, Some("the token has expired 0 s ago, by the clock of this machine")),
            (NOW + DAY, Some("the token has expired 23 h ago, by the clock of this machine")),
            (
                NOW - DAY,
                Some(
                    "the token is valid for more than an hour from now: the clock of this machine is wrong \
                     by 24 h",
                ),
            ),
        ] {
            let found = usual().check_time(now_ms).err().map(|error| error.to_string());
            assert_eq!(found.as_deref(), refusal, "{now_ms}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_is_refused(text in "(pj[0-9]{1,2}\\.)?[A-Za-z0-9_.-]{0,80}") {
            prop_assert!(text.parse::<JoinToken>().is_err());
        }

        #[test]
        fn a_mistyped_character_is_noticed(at in 0..usual().expose().len(), typed in "[A-Za-z0-9_-]") {
            let text = usual().expose();
            let mistyped = format!("{}{typed}{}", &text[..at], &text[at + 1..]);
            prop_assume!(mistyped != text);
            let refused = mistyped.parse::<JoinToken>().unwrap_err();
            prop_assert!(matches!(refused, InvalidToken::Damaged | InvalidToken::OtherVersion(_)));
        }
    }
}
