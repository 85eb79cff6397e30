//! Names of environments, services, units, charms and instances. Each is safe in a path, a file
//! name and a line of text. Pure.

use std::fmt;
use std::str::FromStr;

/// Longest name of a service or an environment, in bytes, so that `juju-ENV-N` fits into the 255
/// characters of a security group's name.
const MAX_NAME: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error("Invalid {kind} name {given:?}: {reason}")]
    Malformed { kind: &'static str, given: String, reason: &'static str },
    #[error("Invalid {kind} name of {length} characters: at most {MAX_NAME} are allowed")]
    TooLong { kind: &'static str, length: usize },
}

/// Checks that a name is neither empty nor too long. The error does not quote a long text.
fn check_length(kind: &'static str, text: &str) -> Result<(), InvalidName> {
    if text.is_empty() {
        return Err(InvalidName::Malformed { kind, given: String::new(), reason: "it is empty" });
    }
    if text.len() > MAX_NAME {
        return Err(InvalidName::TooLong { kind, length: text.chars().count() });
    }
    Ok(())
}

/// Checks Juju's rule: lower-case letters and digits, starting with a letter, and at least one
/// letter after each `-`, so that `wordpress-2` cannot be mistaken for a numbered object.
fn is_service_name(text: &str) -> bool {
    let plain = |part: &str| part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.split('-').all(|part| plain(part) && part.bytes().any(|b| b.is_ascii_lowercase()))
}

/// The name of a service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName(String);

impl ServiceName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ServiceName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        check_length("service", text)?;
        if !is_service_name(text) {
            return Err(InvalidName::Malformed {
                kind: "service",
                given: text.to_owned(),
                reason: "it takes lower-case letters, digits and single dashes, starts with a \
                         letter, and has a letter after each dash",
            });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a unit, `SERVICE/N`. N is never reused within a service name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitName {
    service: ServiceName,
    number: u32,
}

impl UnitName {
    pub fn new(service: ServiceName, number: u32) -> Self {
        Self { service, number }
    }

    pub fn service(&self) -> &ServiceName {
        &self.service
    }

    pub fn number(&self) -> u32 {
        self.number
    }
}

impl FromStr for UnitName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.len() > MAX_NAME + 11 {
            return Err(InvalidName::TooLong { kind: "unit", length: text.chars().count() });
        }
        let malformed = |reason| InvalidName::Malformed { kind: "unit", given: text.to_owned(), reason };
        let (service, number) =
            text.split_once('/').ok_or_else(|| malformed("it has the form SERVICE/NUMBER"))?;
        let canonical = number == "0" || !number.starts_with('0');
        if !canonical || number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed("it has the form SERVICE/NUMBER"));
        }
        let number = number.parse().map_err(|_| malformed("its number is too large"))?;
        let service =
            service.parse().map_err(|_| malformed("what is before the slash is not a service name"))?;
        Ok(Self { service, number })
    }
}

impl fmt::Display for UnitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.service, self.number)
    }
}

/// The name of an environment, which is used in file names (`ENV.json`) and in names of security
/// groups (`juju-ENV-N`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EnvironmentName(String);

impl EnvironmentName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for EnvironmentName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        check_length("environment", text)?;
        let alphanumeric = |b: u8| b.is_ascii_alphanumeric();
        let allowed = |b: u8| alphanumeric(b) || matches!(b, b'-' | b'_' | b'.');
        let bytes = text.as_bytes();
        if !alphanumeric(bytes[0]) || !bytes.iter().all(|&b| allowed(b)) {
            return Err(InvalidName::Malformed {
                kind: "environment",
                given: text.to_owned(),
                reason: "it takes letters, digits, '-', '_' and '.', and starts with a letter or a digit",
            });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for EnvironmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The origin and the revision of a charm: `local:wordpress-1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CharmUrl {
    name: ServiceName,
    revision: u32,
}

impl CharmUrl {
    /// Returns the URL of a charm from a directory. Charm names follow the same rule as service
    /// names.
    pub fn local(name: ServiceName, revision: u32) -> Self {
        Self { name, revision }
    }

    pub fn name(&self) -> &ServiceName {
        &self.name
    }

    pub fn revision(&self) -> u32 {
        self.revision
    }
}

impl FromStr for CharmUrl {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        if text.len() > MAX_NAME + 20 {
            return Err(InvalidName::TooLong { kind: "charm", length: text.chars().count() });
        }
        let malformed = || InvalidName::Malformed {
            kind: "charm",
            given: text.to_owned(),
            reason: "it has the form local:NAME-REVISION",
        };
        let rest = text.strip_prefix("local:").ok_or_else(malformed)?;
        let (name, revision) = rest.rsplit_once('-').ok_or_else(malformed)?;
        let canonical = revision == "0" || !revision.starts_with('0');
        if !canonical || !revision.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed());
        }
        let name = name.parse().map_err(|_| malformed())?;
        Ok(Self { name, revision: revision.parse().map_err(|_| malformed())? })
    }
}

impl fmt::Display for CharmUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local:{}-{}", self.name, self.revision)
    }
}

/// The provider's id of a machine, for example `i-0abc`. Opaque, but without spaces or control
/// characters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(String);

impl InstanceId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InstanceId {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        check_length("instance", text)?;
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':');
        if !text.bytes().all(allowed) {
            return Err(InvalidName::Malformed {
                kind: "instance",
                given: text.to_owned(),
                reason: "it takes letters, digits, '-', '_', '.' and ':'",
            });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn service_names_follow_the_rule_of_juju() {
        for good in ["w", "wordpress", "my-blog", "a1", "a-1b", "a-b2-c", "db2"] {
            assert_eq!(good.parse::<ServiceName>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            "Wordpress",
            "1a",
            "a-",
            "-a",
            "a--b",
            "a-1",
            "wordpress/0",
            "a b",
            "a\n",
            "a\0",
            "é",
            "a.b",
            "..",
            "a_b",
            " a",
        ] {
            assert!(bad.parse::<ServiceName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn errors_escape_control_characters_and_do_not_quote_long_texts() {
        let refusal = "a\u{1b}[2Jb\n".parse::<ServiceName>().unwrap_err().to_string();
        assert!(refusal.starts_with(r#"Invalid service name "a\u{1b}[2Jb\n": "#), "{refusal}");
        let long = "a".repeat(300);
        assert_eq!(
            long.parse::<ServiceName>().unwrap_err().to_string(),
            "Invalid service name of 300 characters: at most 100 are allowed"
        );
        assert!("a".repeat(100).parse::<ServiceName>().is_ok());
        assert!(format!("{long}/0").parse::<UnitName>().unwrap_err().to_string().len() < 100);
    }

    #[test]
    fn unit_names_have_one_spelling() {
        let unit: UnitName = "my-blog/12".parse().unwrap();
        assert_eq!((unit.service().as_str(), unit.number()), ("my-blog", 12));
        assert_eq!(unit.to_string(), "my-blog/12");
        for bad in [
            "wordpress",
            "wordpress/",
            "wordpress/00",
            "wordpress/-1",
            "wordpress/+1",
            "wordpress/1/2",
            "/0",
            "Word/0",
            "wordpress/4294967296",
            "wordpress/ 1",
        ] {
            assert!(bad.parse::<UnitName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn charm_urls_have_one_spelling() {
        let charm: CharmUrl = "local:my-blog-12".parse().unwrap();
        assert_eq!((charm.name().as_str(), charm.revision()), ("my-blog", 12));
        assert_eq!(charm.to_string(), "local:my-blog-12");
        for bad in [
            "my-blog-1",
            "local:blog",
            "local:blog-",
            "local:blog-01",
            "local:-1",
            "cs:blog-1",
            "local:a b-1",
        ] {
            assert!(bad.parse::<CharmUrl>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn instance_ids_have_no_spaces_or_slashes() {
        assert_eq!("i-0abc".parse::<InstanceId>().unwrap().as_str(), "i-0abc");
        for bad in ["", "i 1", "i/1", "i-1\n", "ï"] {
            assert!(bad.parse::<InstanceId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn environment_names_are_safe_file_names() {
        for good in ["local", "prod-2", "a.b_c", "0"] {
            assert!(good.parse::<EnvironmentName>().is_ok(), "{good}");
        }
        for bad in ["", ".", "..", ".hidden", "-e", "a/b", "a b", "a\0", "ü"] {
            assert!(bad.parse::<EnvironmentName>().is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn parsed_names_are_printed_unchanged(text in "[a-z0-9/-]{0,12}") {
            if let Ok(name) = text.parse::<ServiceName>() {
                prop_assert_eq!(name.to_string(), text.clone());
            }
            if let Ok(name) = text.parse::<UnitName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }

        #[test]
        fn parsers_never_panic(text in "\\PC*") {
            prop_assert!(text.parse::<ServiceName>().is_err() || is_service_name(&text));
            prop_assert!(text.parse::<UnitName>().is_err() || text.contains('/'));
            prop_assert!(text.parse::<EnvironmentName>().is_err() || text.is_ascii());
        }
    }
}
