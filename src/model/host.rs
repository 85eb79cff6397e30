//! Names of machines as other machines see them: the name that an operator gives to a machine, and
//! the addresses that it can be reached at. Also names of operators. Pure.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::{InvalidName, MachineId};

/// Longest name of a machine, which is one label of a DNS name.
const MAX_NODE_NAME: usize = 63;
const MAX_OPERATOR_NAME: usize = 40;
/// Longest host name in DNS.
const MAX_HOST: usize = 253;

/// Names of roles in certificates, and of every host for itself.
const RESERVED: [&str; 7] = ["operator", "controller", "keeper", "store", "tracker", "manager", "localhost"];
/// The beginnings of the names of machines by number, and of added operators, in certificates.
const RESERVED_PREFIXES: [&str; 2] = [NUMBERED, "operator-"];
const NUMBERED: &str = "machine-";

/// The name with the number of a machine, as in its certificate and in heartbeats.
pub fn number_name(id: MachineId) -> String {
    format!("{NUMBERED}{}", id.number())
}

/// Whether a certificate with this DNS name speaks for a role, an operator or a machine by its
/// number, so that it is not a name that somebody gives to a machine.
pub fn is_reserved_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let name = name.trim_end_matches('.');
    RESERVED.contains(&name) || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The name of a machine. It is a DNS name in the machine's certificate and the name of a node in
/// the fleet. The default is the machine's number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(String);

impl NodeName {
    /// Returns the name of a machine that was given none.
    pub fn of_number(machine: MachineId) -> Self {
        Self(machine.number().to_string())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether an operator may not give this name to a machine, because certificates use it for
    /// another machine or another role.
    pub fn is_reserved(&self) -> bool {
        is_reserved_name(&self.0) || self.0.bytes().all(|b| b.is_ascii_digit())
    }
}

impl FromStr for NodeName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let malformed = |reason| {
            let given = text.chars().take(MAX_NODE_NAME).collect();
            InvalidName::Malformed { kind: "machine", given, reason }
        };
        if text.len() > MAX_NODE_NAME {
            return Err(malformed("it has more than 63 characters"));
        }
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let is_label = |label: &str| {
            let bytes = label.as_bytes();
            let ends = bytes.first().zip(bytes.last());
            ends.is_some_and(|(first, last)| plain(*first) && plain(*last))
                && bytes.iter().all(|&b| plain(b) || b == b'-')
        };
        if !text.split('.').all(is_label) {
            return Err(malformed(
                "it takes lower-case letters, digits, '-' and '.', and starts and ends with a letter or a \
                 digit, also before and after each '.'",
            ));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of an operator.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperatorName(String);

impl OperatorName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for OperatorName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let is_name = text.bytes().next().is_some_and(plain) && text.bytes().all(|b| plain(b) || b == b'-');
        if !is_name || text.len() > MAX_OPERATOR_NAME {
            let given = text.chars().take(MAX_OPERATOR_NAME).collect();
            let reason =
                "it takes 1 to 40 lower-case letters, digits and '-', and starts with a letter or a digit";
            return Err(InvalidName::Malformed { kind: "operator", given, reason });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for OperatorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A host name or an IP address that a machine can be reached at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddress(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid address '{}': {reason}", given.escape_debug())]
pub struct InvalidHost {
    given: String,
    reason: &'static str,
}

impl HostAddress {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<IpAddr> for HostAddress {
    fn from(address: IpAddr) -> Self {
        Self(address.to_string())
    }
}

impl FromStr for HostAddress {
    type Err = InvalidHost;

    fn from_str(text: &str) -> Result<Self, InvalidHost> {
        let refuse = |reason| Err(InvalidHost { given: text.chars().take(80).collect(), reason });
        if let Ok(address) = text.parse::<IpAddr>() {
            if address.is_unspecified() || address.is_multicast() {
                return refuse("no machine can be reached at it");
            }
            return Ok(Self(address.to_string()));
        }
        if text.is_empty() || text.len() > MAX_HOST {
            return refuse("a host name has 1 to 253 characters");
        }
        let is_label = |label: &str| {
            !label.is_empty()
                && !label.starts_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        };
        // Digits and dots alone are a mistyped IPv4 address.
        let is_name = text.bytes().any(|b| b.is_ascii_alphabetic());
        if !is_name || !text.trim_end_matches('.').split('.').all(is_label) {
            return refuse("it is neither an IP address nor a host name; a port does not belong to it");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for HostAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_machines_are_dns_names_without_underscores() {
        let longest = "a".repeat(63);
        for good in ["web", "web-1", "rack2.row-3.web", "7", "0a", longest.as_str()] {
            assert_eq!(good.parse::<NodeName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        let too_long = "a".repeat(64);
        for bad in
            ["", "Web", "web_1", "web 1", "-web", "web-", ".", "..", "web.", "a..b", "a/b", "ä", &too_long]
        {
            assert!(bad.parse::<NodeName>().is_err(), "{bad}");
        }
        let number = NodeName::of_number(MachineId::new(12));
        assert_eq!(number.as_str(), "12");
        for name in ["12", "machine-1", "operator-ann", "operator", "controller", "keeper", "store"] {
            assert!(name.parse::<NodeName>().unwrap().is_reserved(), "{name}");
        }
        for name in ["tracker", "manager", "localhost"] {
            assert!(name.parse::<NodeName>().unwrap().is_reserved(), "{name}");
        }
        for name in ["12a", "machine", "operators", "store-1", "localhost.example"] {
            assert!(!name.parse::<NodeName>().unwrap().is_reserved(), "{name}");
        }
        for name in ["Operator-Ann", "LOCALHOST", "localhost.", "Machine-4"] {
            assert!(is_reserved_name(name), "{name}");
        }
    }

    #[test]
    fn names_of_operators_are_short_and_plain() {
        for good in ["alice", "ops-2", "7"] {
            assert_eq!(good.parse::<OperatorName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        let too_long = "a".repeat(41);
        for bad in ["", "Alice", "a/b", "a:b", "-a", "..", &too_long] {
            assert!(bad.parse::<OperatorName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_host_names_or_ip_addresses() {
        for (given, shown) in [
            ("192.0.2.1", "192.0.2.1"),
            ("2001:DB8::0:1", "2001:db8::1"),
            ("web1.example.com", "web1.example.com"),
            ("web_1", "web_1"),
            ("web1.", "web1."),
        ] {
            assert_eq!(given.parse::<HostAddress>().unwrap().as_str(), shown);
        }
        let too_long = "a.".repeat(127);
        for bad in
            ["", "192.0.2", "192.0.2.1:22", "[::1]", "0.0.0.0", "::", "224.0.0.1", "-x", "a b", &too_long]
        {
            assert!(bad.parse::<HostAddress>().is_err(), "{bad}");
        }
    }
}
