//! A block of source addresses, always in canonical form: bits outside the prefix are zero, so that
//! different spellings of one block are equal. Pure.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address family. Rule limits and packet matches are per family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    network: IpAddr,
    len: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a block of addresses such as 10.0.0.0/8 or 2001:db8::/32, got '{text}'")]
pub struct InvalidCidr {
    text: String,
}

/// Size limit of a quoted text, above the length of the longest block.
const SHOWN_CHARS: usize = 64;

impl Cidr {
    /// All of IPv4.
    pub const WORLD_V4: Self = Self { network: IpAddr::V4(Ipv4Addr::UNSPECIFIED), len: 0 };
    /// All of IPv6.
    pub const WORLD_V6: Self = Self { network: IpAddr::V6(Ipv6Addr::UNSPECIFIED), len: 0 };

    /// Returns the block of `len` leading bits that contains `address`; `None` if the family has
    /// fewer bits.
    pub fn new(address: IpAddr, len: u8) -> Option<Self> {
        let network = match address {
            IpAddr::V4(v4) if len <= 32 => IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask_v4(len))),
            IpAddr::V6(v6) if len <= 128 => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask_v6(len))),
            _ => return None,
        };
        Some(Self { network, len })
    }

    /// Returns whether `text` has bits outside the prefix, so that another block or a single
    /// address may have been meant. It is parsed as the block that contains the address.
    pub fn has_host_bits(self, text: &str) -> bool {
        let address = text.split_once('/').and_then(|(address, _)| address.parse::<IpAddr>().ok());
        address.is_some_and(|address| address != self.network)
    }

    pub fn network(self) -> IpAddr {
        self.network
    }

    pub fn prefix_len(self) -> u8 {
        self.len
    }

    pub fn family(self) -> Family {
        match self.network {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }

    pub fn is_world(self) -> bool {
        self.len == 0
    }

    pub fn contains(self, address: IpAddr) -> bool {
        Self::new(address, self.len) == Some(self)
    }

    /// Returns whether this block contains every address of `inner`.
    pub fn encloses(self, inner: Self) -> bool {
        self.len <= inner.len && self.contains(inner.network)
    }
}

fn mask_v4(len: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0)
}

fn mask_v6(len: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0)
}

impl FromStr for Cidr {
    type Err = InvalidCidr;

    /// A bare address is a block of that one address.
    fn from_str(text: &str) -> Result<Self, InvalidCidr> {
        let parsed = match text.split_once('/') {
            None => text
                .parse::<IpAddr>()
                .ok()
                .and_then(|address| Self::new(address, if address.is_ipv4() { 32 } else { 128 })),
            Some((address, len)) if !len.is_empty() && len.bytes().all(|b| b.is_ascii_digit()) => {
                address.parse().ok().zip(len.parse().ok()).and_then(|(address, len)| Self::new(address, len))
            }
            Some(_) => None,
        };
        parsed.ok_or_else(|| InvalidCidr { text: text.chars().take(SHOWN_CHARS).collect() })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_are_canonicalised() {
        for (text, canonical) in [
            ("10.0.0.1/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("255.255.255.255/0", "0.0.0.0/0"),
            ("192.0.2.7", "192.0.2.7/32"),
            ("192.0.2.7/32", "192.0.2.7/32"),
            ("2001:DB8:0:0:0:0:0:1/32", "2001:db8::/32"),
            ("::/0", "::/0"),
            ("2001:db8::1", "2001:db8::1/128"),
        ] {
            let cidr: Cidr = text.parse().unwrap();
            assert_eq!(cidr.to_string(), canonical, "{text}");
        }
        assert_eq!("1.2.3.4/0".parse(), Ok(Cidr::WORLD_V4));
        assert_eq!("::1/0".parse(), Ok(Cidr::WORLD_V6));
    }

    #[test]
    fn host_bits_are_detected() {
        for (text, expected) in [
            ("10.0.0.1/8", true),
            ("10.0.0.0/8", false),
            ("192.0.2.7", false),
            ("192.0.2.7/32", false),
            ("2001:db8::1/32", true),
            ("2001:DB8:0:0:0:0:0:0/32", false),
            ("::1/0", true),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().has_host_bits(text), expected, "{text}");
        }
    }

    #[test]
    fn invalid_blocks_are_refused() {
        for text in [
            "",
            "/",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/33",
            "::/129",
            "10.0.0/8",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "10.0.0.0/256",
            "10.0.0.0/8/8",
            " 10.0.0.0/8",
            "example.com/8",
            "010.0.0.0/8",
        ] {
            let refusal = text.parse::<Cidr>().unwrap_err();
            assert!(refusal.to_string().ends_with(&format!("got '{text}'")), "{refusal}");
        }
        let flood = "1".repeat(1_000_000);
        assert!(flood.parse::<Cidr>().unwrap_err().to_string().len() < 200);
    }

    fn any_address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits))),
            any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits))),
        ]
    }

    proptest! {
        #[test]
        fn printed_blocks_round_trip(address in any_address(), len in 0u8..=128) {
            if let Some(cidr) = Cidr::new(address, len) {
                prop_assert_eq!(cidr.to_string().parse(), Ok(cidr));
                prop_assert!(cidr.contains(address));
                prop_assert!(cidr.encloses(cidr));
            } else {
                prop_assert!(address.is_ipv4() && len > 32);
            }
        }

        #[test]
        fn longer_prefix_is_inside_a_shorter_one(address in any_address(), a in 0u8..=32, b in 0u8..=32) {
            let outer = Cidr::new(address, a.min(b)).unwrap();
            let inner = Cidr::new(address, a.max(b)).unwrap();
            prop_assert!(outer.encloses(inner));
            prop_assert_eq!(inner.encloses(outer), a == b);
        }

        #[test]
        fn families_never_contain_each_other(v4 in any::<u32>(), v6 in any::<u128>()) {
            prop_assert!(!Cidr::WORLD_V4.contains(IpAddr::V6(Ipv6Addr::from_bits(v6))));
            prop_assert!(!Cidr::WORLD_V6.contains(IpAddr::V4(Ipv4Addr::from_bits(v4))));
        }
    }
}
