//! The vocabulary of firewall rules: protocols and port ranges that cannot hold nonsense. Nothing here knows a
//! cloud, a store or a file; the text forms are those that people read and type.

use std::fmt;

/// A transport protocol that a port can be opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    /// Reads a protocol name in any letter case.
    pub fn from_name(name: &str) -> Option<Self> {
        if name.eq_ignore_ascii_case("tcp") {
            Some(Self::Tcp)
        } else if name.eq_ignore_ascii_case("udp") {
            Some(Self::Udp)
        } else {
            None
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

/// One port or a run of ports of one protocol. `1 <= from <= to`, always.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shows_single_ports_and_ranges() {
        assert_eq!(PortRange::single(80, Protocol::Tcp).unwrap().to_string(), "80/tcp");
        assert_eq!(PortRange::new(8000, 8080, Protocol::Udp).unwrap().to_string(), "8000-8080/udp");
    }

    #[test]
    fn refuses_zero_and_backwards() {
        assert!(PortRange::single(0, Protocol::Tcp).is_err());
        assert!(PortRange::new(0, 5, Protocol::Tcp).is_err());
        let refusal = PortRange::new(90, 80, Protocol::Tcp).unwrap_err();
        assert_eq!(refusal.to_string(), "no port range from 90 to 80");
    }

    #[test]
    fn protocol_names_in_any_case() {
        assert_eq!(Protocol::from_name("TcP"), Some(Protocol::Tcp));
        assert_eq!(Protocol::from_name("UDP"), Some(Protocol::Udp));
        assert_eq!(Protocol::from_name("sctp"), None);
        assert_eq!(Protocol::from_name(""), None);
    }

    proptest! {
        #[test]
        fn a_range_holds_exactly_its_ports(a in 1u16.., b in 1u16.., port in 0u16..) {
            let range = PortRange::new(a.min(b), a.max(b), Protocol::Tcp).unwrap();
            prop_assert_eq!(range.contains(port, Protocol::Tcp), port >= a.min(b) && port <= a.max(b));
            prop_assert!(!range.contains(port, Protocol::Udp));
        }
    }
}
