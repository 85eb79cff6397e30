//! Firewall rules: protocols, port ranges and sources, which are valid by construction. Parses the
//! text forms that people type and the numbers that firewalls return. Clouds, stores and files do
//! not belong here. Pure.

mod change;
mod cidr;
mod set;

use std::fmt;

pub use change::Change;
pub use cidr::{Cidr, Family, InvalidCidr};
pub use set::RuleSet;

/// A transport protocol that a port can be opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    /// Parses a protocol name in any letter case.
    pub fn from_name(name: &str) -> Option<Self> {
        if name.eq_ignore_ascii_case("tcp") {
            Some(Self::Tcp)
        } else if name.eq_ignore_ascii_case("udp") {
            Some(Self::Udp)
        } else {
            None
        }
    }

    /// Parses a firewall's protocol: its name, or its number in the IP header.
    pub fn from_wire(text: &str) -> Option<Self> {
        match text {
            "6" => Some(Self::Tcp),
            "17" => Some(Self::Udp),
            name => Self::from_name(name),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One port or a range of ports of one protocol, with `1 <= from <= to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    from: u16,
    to: u16,
    proto: Protocol,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no port range from {from} to {to}")]
pub struct InvalidPortRange {
    from: u16,
    to: u16,
}

impl PortRange {
    /// # Errors
    /// If `from` is 0 or greater than `to`.
    pub fn new(from: u16, to: u16, proto: Protocol) -> Result<Self, InvalidPortRange> {
        if from == 0 || from > to {
            return Err(InvalidPortRange { from, to });
        }
        Ok(Self { from, to, proto })
    }

    /// # Errors
    /// If `port` is 0.
    pub fn single(port: u16, proto: Protocol) -> Result<Self, InvalidPortRange> {
        Self::new(port, port, proto)
    }

    pub fn from(self) -> u16 {
        self.from
    }

    pub fn to(self) -> u16 {
        self.to
    }

    pub fn proto(self) -> Protocol {
        self.proto
    }

    /// Returns the range of all ports of a protocol.
    pub const fn all(proto: Protocol) -> Self {
        Self { from: 1, to: u16::MAX, proto }
    }

    pub fn is_single(self) -> bool {
        self.from == self.to
    }

    pub fn contains(self, port: u16, proto: Protocol) -> bool {
        self.proto == proto && (self.from..=self.to).contains(&port)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_single() {
            write!(f, "{}/{}", self.from, self.proto)
        } else {
            write!(f, "{}-{}/{}", self.from, self.to, self.proto)
        }
    }
}

/// The ports that are open to one source. Equality compares the spelling; [`RuleSet`] compares the
/// coverage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    pub source: Cidr,
    pub ports: PortRange,
}

impl Rule {
    pub fn new(ports: PortRange, source: Cidr) -> Self {
        Self { source, ports }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from {}", self.ports, self.source)
    }
}

/// A port entry as returned by a firewall: protocols may be numbers, `-1` means all, and ports may
/// be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WirePorts<'a> {
    pub proto: &'a str,
    pub from: Option<i32>,
    pub to: Option<i32>,
}

impl WirePorts<'_> {
    /// Returns the range of this entry, if a [`PortRange`] can express it exactly. An entry that
    /// starts at port 0 covers the same ports as one that starts at 1, but can only be removed in
    /// its own spelling.
    pub fn exact(self) -> Option<PortRange> {
        let proto = Protocol::from_wire(self.proto)?;
        let from = u16::try_from(self.from?).ok()?;
        let to = u16::try_from(self.to?).ok()?;
        PortRange::new(from, to, proto).ok()
    }

    /// Returns all ports that this entry opens; none for ICMP and similar protocols.
    pub fn covers(self) -> Vec<PortRange> {
        if self.proto == "-1" || self.proto.eq_ignore_ascii_case("all") {
            return vec![PortRange::all(Protocol::Tcp), PortRange::all(Protocol::Udp)];
        }
        let Some(proto) = Protocol::from_wire(self.proto) else { return Vec::new() };
        let (from, to) = match (self.from, self.to) {
            (None | Some(-1), None | Some(-1)) => return vec![PortRange::all(proto)],
            (Some(from), Some(to)) => (from, to),
            (Some(only), None) | (None, Some(only)) => (only, only),
        };
        let from = from.clamp(1, i32::from(u16::MAX));
        let (Ok(from), Ok(to)) = (u16::try_from(from), u16::try_from(to)) else { return Vec::new() };
        PortRange::new(from, to, proto).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entries_of_firewalls_are_parsed() {
        use Protocol::{Tcp, Udp};
        let range = |from, to, proto| PortRange::new(from, to, proto).unwrap();
        let everything = vec![PortRange::all(Tcp), PortRange::all(Udp)];
        let cases = [
            ("tcp", Some(80), Some(80), Some(range(80, 80, Tcp)), vec![range(80, 80, Tcp)]),
            ("6", Some(80), Some(81), Some(range(80, 81, Tcp)), vec![range(80, 81, Tcp)]),
            ("17", Some(53), Some(53), Some(range(53, 53, Udp)), vec![range(53, 53, Udp)]),
            ("UDP", Some(53), Some(53), Some(range(53, 53, Udp)), vec![range(53, 53, Udp)]),
            ("tcp", Some(0), Some(65535), None, vec![PortRange::all(Tcp)]),
            ("tcp", Some(-1), Some(-1), None, vec![PortRange::all(Tcp)]),
            ("tcp", None, None, None, vec![PortRange::all(Tcp)]),
            ("-1", None, None, None, everything.clone()),
            ("-1", Some(80), Some(80), None, everything),
            ("icmp", Some(8), Some(-1), None, vec![]),
            ("58", None, None, None, vec![]),
            ("tcp", Some(90), Some(80), None, vec![]),
            ("tcp", Some(80), Some(70000), None, vec![]),
            ("tcp", Some(0), Some(0), None, vec![]),
        ];
        for (proto, from, to, exact, covers) in cases {
            let entry = WirePorts { proto, from, to };
            assert_eq!(entry.exact(), exact, "{entry:?}");
            assert_eq!(entry.covers(), covers, "{entry:?}");
        }
    }

    #[test]
    fn rule_is_printed_with_its_source() {
        let rule = Rule::new(PortRange::single(80, Protocol::Tcp).unwrap(), Cidr::WORLD_V6);
        assert_eq!(rule.to_string(), "80/tcp from ::/0");
    }

    #[test]
    fn single_ports_and_ranges_are_printed() {
        assert_eq!(PortRange::single(80, Protocol::Tcp).unwrap().to_string(), "80/tcp");
        assert_eq!(PortRange::new(8000, 8080, Protocol::Udp).unwrap().to_string(), "8000-8080/udp");
    }

    #[test]
    fn zero_and_reversed_ranges_are_refused() {
        assert!(PortRange::single(0, Protocol::Tcp).is_err());
        assert!(PortRange::new(0, 5, Protocol::Tcp).is_err());
        let refusal = PortRange::new(90, 80, Protocol::Tcp).unwrap_err();
        assert_eq!(refusal.to_string(), "no port range from 90 to 80");
    }

    #[test]
    fn protocol_names_are_case_insensitive() {
        assert_eq!(Protocol::from_name("TcP"), Some(Protocol::Tcp));
        assert_eq!(Protocol::from_name("UDP"), Some(Protocol::Udp));
        assert_eq!(Protocol::from_name("sctp"), None);
        assert_eq!(Protocol::from_name(""), None);
    }

    proptest! {
        #[test]
        fn range_contains_exactly_its_ports(a in 1u16.., b in 1u16.., port in 0u16..) {
            let range = PortRange::new(a.min(b), a.max(b), Protocol::Tcp).unwrap();
            prop_assert_eq!(range.contains(port, Protocol::Tcp), port >= a.min(b) && port <= a.max(b));
            prop_assert!(!range.contains(port, Protocol::Udp));
        }
    }
}
