//! The names of nodes and systemd units, and how they appear in object paths. Pure.

use super::dbus::names::MAX_SYSTEMD_UNIT_NAME;

pub use crate::model::NodeName;

/// The reason why a name is refused. Names may be long and are not repeated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    #[error("invalid systemd unit name: it has more than {MAX_SYSTEMD_UNIT_NAME} characters")]
    LongUnit,
    #[error("invalid systemd unit name: it may have letters, digits and :-_.\\@")]
    Unit,
}

/// Checks the length and the characters of a systemd unit's name. systemd checks the rest.
///
/// # Errors
/// If systemd refuses names of this length or with these characters.
pub fn check_systemd_unit(name: &str) -> Result<(), BadName> {
    check_unit(name, |c| matches!(c, ':' | '-' | '_' | '.' | '\\' | '@'))
}

/// Checks a systemd unit's name, or a glob of such names.
///
/// # Errors
/// If no unit can have a name that it matches.
pub fn check_systemd_unit_glob(glob: &str) -> Result<(), BadName> {
    check_unit(glob, |c| matches!(c, ':' | '-' | '_' | '.' | '\\' | '@' | '*' | '?' | '[' | ']' | '!'))
}

fn check_unit(name: &str, mark: impl Fn(char) -> bool) -> Result<(), BadName> {
    if name.len() > MAX_SYSTEMD_UNIT_NAME {
        return Err(BadName::LongUnit);
    }
    let valid = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || mark(c));
    valid.then_some(()).ok_or(BadName::Unit)
}

/// Escapes a name for an object path as `sd_bus_path_encode` does: everything but letters, and
/// digits that are not first, becomes `_` and two hexadecimal digits.
pub fn escape(name: &str) -> String {
    if name.is_empty() {
        return "_".to_owned();
    }
    let mut escaped = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (at > 0 && byte.is_ascii_digit()) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("_{byte:02x}"));
        }
    }
    escaped
}

/// Reverses [`escape`]; `None` if the text is not the escaped form of a name.
pub fn unescape(escaped: &str) -> Option<String> {
    if escaped == "_" {
        return Some(String::new());
    }
    let mut bytes = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some(byte) = rest.bytes().next() {
        if byte == b'_' {
            bytes.push(u8::from_str_radix(rest.get(1..3)?, 16).ok()?);
            rest = &rest[3..];
        } else {
            bytes.push(byte);
            rest = rest.get(1..)?;
        }
    }
    let name = String::from_utf8(bytes).ok()?;
    (!name.is_empty() && escape(&name) == escaped).then_some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_escaped_as_systemd_does() {
        for (name, escaped) in [
            ("", "_"),
            ("n1", "n1"),
            ("0", "_30"),
            ("12", "_312"),
            ("node-1", "node_2d1"),
            ("a.b", "a_2eb"),
            ("foo@bar.service", "foo_40bar_2eservice"),
            ("a_b", "a_5fb"),
        ] {
            assert_eq!(escape(name), escaped);
            assert_eq!(unescape(escaped).as_deref(), Some(name));
        }
        for not_escaped in ["a_", "a_2", "_4e", "0", "a-b", "a_2D", "_zz", "é"] {
            assert_eq!(unescape(not_escaped), None, "{not_escaped}");
        }
    }

    #[test]
    fn unit_names_are_checked() {
        for (name, is_unit, is_glob) in [
            ("a.service", true, true),
            ("foo@a\\x2db.service", true, true),
            ("a*.service", false, true),
            ("*", false, true),
            ("[a-z]?.socket", false, true),
            ("", false, false),
            ("a b.service", false, false),
            ("a/b", false, false),
            (&"a".repeat(256), false, false),
        ] {
            assert_eq!(check_systemd_unit(name).is_ok(), is_unit, "{name}");
            assert_eq!(check_systemd_unit_glob(name).is_ok(), is_glob, "{name}");
        }
    }

    proptest! {
        #[test]
        fn every_name_has_one_path(name in any::<String>()) {
            let escaped = escape(&name);
            prop_assert!(escaped.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
            prop_assert_eq!(unescape(&escaped), Some(name));
        }

        #[test]
        fn unescape_accepts_any_text(text in "[_0-9a-f]{0,12}|\\PC{0,12}") {
            if let Some(name) = unescape(&text) {
                prop_assert_eq!(escape(&name), text);
            }
        }
    }
}
