//! Ids that the store assigns: never reused, printed as `service-0000000007`. A machine also has a
//! public form, the bare number, which operators type and which is in the name of its security
//! group. Pure.

use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{given}' is not a {kind} id")]
pub struct InvalidId {
    kind: &'static str,
    given: String,
}

/// Parses exactly ten digits, so that every id has one spelling.
fn parse_key(kind: &'static str, text: &str) -> Result<u32, InvalidId> {
    let refusal = || InvalidId { kind, given: text.chars().take(40).collect() };
    let digits = text.strip_prefix(kind).and_then(|rest| rest.strip_prefix('-')).ok_or_else(refusal)?;
    if digits.len() != 10 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(refusal());
    }
    digits.parse().map_err(|_| refusal())
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl $name {
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            pub const fn number(self) -> u32 {
                self.0
            }

            /// Returns the name of the znode and of the digest user: `KIND-NNNNNNNNNN`.
            pub fn key(self) -> String {
                format!(concat!($kind, "-{:010}"), self.0)
            }

            /// # Errors
            /// If `text` is not in the form of [`Self::key`].
            pub fn from_key(text: &str) -> Result<Self, InvalidId> {
                parse_key($kind, text).map(Self)
            }
        }
    };
}

id!(
    /// The id of a service. A service that is deployed again under an old name gets a new id.
    ServiceId,
    "service"
);
id!(
    /// The id of a unit; see [`ServiceId`].
    UnitId,
    "unit"
);
id!(
    /// The id of a machine, printed as the bare number.
    MachineId,
    "machine"
);

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key())
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key())
    }
}

impl fmt::Display for MachineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for MachineId {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        let refusal = || InvalidId { kind: "machine", given: text.chars().take(40).collect() };
        let canonical = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
        if !canonical {
            return Err(refusal());
        }
        text.parse().map(Self).map_err(|_| refusal())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_ten_digits() {
        assert_eq!(UnitId::new(7).key(), "unit-0000000007");
        assert_eq!(UnitId::from_key("unit-0000000007"), Ok(UnitId::new(7)));
        assert_eq!(ServiceId::from_key("service-4294967295"), Ok(ServiceId::new(u32::MAX)));
        for bad in [
            "unit-7",
            "unit-00000000007",
            "unit-000000000a",
            "unit-+000000007",
            "service-0000000007",
            "",
            "unit-",
            "unit-9999999999",
            "UNIT-0000000007",
        ] {
            assert!(UnitId::from_key(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn machine_ids_are_printed_as_numbers() {
        assert_eq!("12".parse(), Ok(MachineId::new(12)));
        assert_eq!("0".parse(), Ok(MachineId::new(0)));
        assert_eq!(MachineId::new(12).to_string(), "12");
        assert_eq!(MachineId::new(12).key(), "machine-0000000012");
        for bad in ["", "-1", "+1", "01", "1 ", "one", "4294967296", "machine-0000000001"] {
            let refusal = bad.parse::<MachineId>().unwrap_err();
            assert_eq!(refusal.to_string(), format!("'{bad}' is not a machine id"));
        }
    }

    #[test]
    fn error_does_not_quote_a_long_text() {
        let refusal = "9".repeat(5000).parse::<MachineId>().unwrap_err();
        assert!(refusal.to_string().len() < 80);
    }
}
