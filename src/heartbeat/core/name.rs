//! Names of components. A [`Name`] is validated, normalised and small enough to be copied, so that
//! a beat for a known component needs no allocation. The right to send beats for a name is
//! checked elsewhere. Pure.

use std::fmt;

use crate::model::MachineId;

/// The longest name: longer than any real one, and short enough to be kept a million times.
pub const MAX_NAME: usize = 64;

const MACHINE: &str = "machine-";

/// Names that no component can have: tools and logs use them for the parameters and for the elected
/// tracker.
const RESERVED: [&str; 2] = ["params", "judge"];

/// A component's name: lower-case letters, digits, `-`, `_`, `.` and `:`, beginning with a letter
/// or digit. Numbers in the names of hardware (`x01c0s00b0n0`) and of machines have no leading
/// zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    bytes: [u8; MAX_NAME],
    length: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("Invalid Component Name")]
pub struct InvalidName;

impl Name {
    /// # Errors
    /// If the text is empty, too long, or has a character that is not allowed.
    pub fn parse(text: &str) -> Result<Self, InvalidName> {
        let given = text.as_bytes();
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
        let first = *given.first().ok_or(InvalidName)?;
        if given.len() > MAX_NAME || !first.is_ascii_alphanumeric() || !given.iter().all(|b| allowed(*b)) {
            return Err(InvalidName);
        }
        let mut name = Self { bytes: [0; MAX_NAME], length: 0 };
        let numbered = is_hardware(given) || is_machine(given);
        for (at, byte) in given.iter().enumerate() {
            let leading_zero = numbered
                && *byte == b'0'
                && !at
                    .checked_sub(1)
                    .is_some_and(|before| name.ends_in_digit() && given[before].is_ascii_digit())
                && given.get(at + 1).is_some_and(u8::is_ascii_digit);
            if !leading_zero {
                name.bytes[usize::from(name.length)] = byte.to_ascii_lowercase();
                name.length += 1;
            }
        }
        Ok(name)
    }

    /// The name of a machine of the environment.
    pub fn of_machine(id: MachineId) -> Self {
        let text = format!("{MACHINE}{}", id.number());
        let mut name = Self { bytes: [0; MAX_NAME], length: 0 };
        for (to, from) in name.bytes.iter_mut().zip(text.bytes()) {
            *to = from;
            name.length += 1;
        }
        name
    }

    /// The machine with this name. Only that machine may send beats for it.
    pub fn machine(&self) -> Option<MachineId> {
        self.as_str().strip_prefix(MACHINE)?.parse().ok().map(MachineId::new)
    }

    /// Whether no component may have this name.
    pub fn is_reserved(&self) -> bool {
        RESERVED.contains(&self.as_str())
    }

    pub fn as_str(&self) -> &str {
        // `parse` accepts only ASCII.
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or_default()
    }

    fn ends_in_digit(&self) -> bool {
        self.length > 0 && self.bytes[usize::from(self.length) - 1].is_ascii_digit()
    }
}

/// `x`, a number, then letters and numbers in turn.
fn is_hardware(given: &[u8]) -> bool {
    let (first, rest) = (given[0], &given[1..]);
    first.eq_ignore_ascii_case(&b'x')
        && rest.first().is_some_and(u8::is_ascii_digit)
        && rest.last().is_some_and(u8::is_ascii_digit)
        && rest.iter().all(u8::is_ascii_alphanumeric)
}

fn is_machine(given: &[u8]) -> bool {
    given.len() > MACHINE.len()
        && given[..MACHINE.len()].eq_ignore_ascii_case(MACHINE.as_bytes())
        && given[MACHINE.len()..].iter().all(u8::is_ascii_digit)
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_normalised() {
        for (given, kept) in [
            ("x0c0s0b0n0", "x0c0s0b0n0"),
            ("X0001C00S07B0N10", "x1c0s7b0n10"),
            ("x100c0", "x100c0"),
            ("machine-0000000007", "machine-7"),
            ("Machine-0", "machine-0"),
            ("node-007.rack:2_b", "node-007.rack:2_b"),
            ("x-ray-007", "x-ray-007"),
            ("0", "0"),
        ] {
            assert_eq!(Name::parse(given).unwrap().as_str(), kept, "{given}");
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        let long = "a".repeat(MAX_NAME + 1);
        for given in ["", ".", "..", "-a", "a/b", "a b", "a\0", "é", "a\n", "../params", "%2e", long.as_str()]
        {
            assert_eq!(Name::parse(given), Err(InvalidName), "{given:?}");
        }
        assert!(Name::parse(&long[1..]).is_ok());
    }

    #[test]
    fn machines_have_names_of_their_own() {
        for number in [0, 7, u32::MAX] {
            let name = Name::of_machine(MachineId::new(number));
            assert_eq!(name.machine(), Some(MachineId::new(number)));
            assert_eq!(Name::parse(name.as_str()), Ok(name));
        }
        for other in ["machine-", "machine-x", "machines-1", "x1", "machine-99999999999"] {
            assert_eq!(Name::parse(other).unwrap().machine(), None, "{other}");
        }
    }

    #[test]
    fn two_names_are_reserved() {
        for (text, reserved) in [("params", true), ("Judge", true), ("params1", false), ("x0", false)] {
            assert_eq!(Name::parse(text).unwrap().is_reserved(), reserved, "{text}");
        }
    }

    proptest! {
        #[test]
        fn normal_names_stay_as_they_are(text in "[a-zA-Z0-9:._-]{1,64}") {
            if let Ok(name) = Name::parse(&text) {
                prop_assert_eq!(Name::parse(name.as_str()), Ok(name));
                prop_assert!(name.as_str().len() <= text.len());
            }
        }

        #[test]
        fn anything_is_parsed_or_refused(text in any::<String>()) {
            prop_assert!(Name::parse(&text).is_err() || text.is_ascii());
        }
    }
}
