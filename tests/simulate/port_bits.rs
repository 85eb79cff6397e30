//! Open ports as bits: every combination of port, protocol and source in a world is one bit.
//! Computed without the agent's arithmetic on ranges, so that errors in that arithmetic are found.

use portcullis::model::{Cidr, PortRange, Protocol};
use portcullis_provider::rule::Rule;

/// The ports that units open and close.
pub(crate) const ARGUMENTS: [&str; 19] = [
    "80",
    "81",
    "82",
    "443",
    "22",
    "20-25",
    "8000-8010",
    "53/udp",
    "8005",
    "9001",
    "9003",
    "9005",
    "9007",
    "9009",
    "9011",
    "9013",
    "9015",
    "9017",
    "9019",
];

/// The sources of services that are not exposed to the world.
pub(crate) const SOURCES: [&str; 2] = ["10.0.0.0/8", "192.168.0.0/16"];

const PORTS: usize = 32;

/// Denied by policy in every world.
const SSH: u16 = 22;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PortBits(u128);

/// Returns the port of a bit.
fn port(bit: usize) -> (u16, Protocol) {
    let tcp = |port| (port, Protocol::Tcp);
    match bit as u16 {
        bit @ 0..6 => tcp(20 + bit),
        6 => (53, Protocol::Udp),
        bit @ 7..10 => tcp(73 + bit),
        10 => tcp(443),
        bit @ 11..22 => tcp(7989 + bit),
        bit => tcp(9001 + 2 * (bit - 22)),
    }
}

fn source(cidr: Cidr) -> Option<usize> {
    let all = [Cidr::WORLD_V4, Cidr::WORLD_V6].into_iter().chain(named());
    all.enumerate().find(|(_, known)| *known == cidr).map(|(n, _)| n)
}

pub(crate) fn named() -> impl Iterator<Item = Cidr> {
    SOURCES.iter().map(|text| text.parse().expect("a block"))
}

impl PortBits {
    pub(crate) const NONE: PortBits = PortBits(0);
    pub(crate) const ALL: PortBits = PortBits(u128::MAX);

    /// The ports of `range` from `sources` (0 and 1 are the world in IPv4 and IPv6). `None` if some
    /// of the ports have no bit.
    pub(crate) fn of(range: PortRange, sources: &[usize]) -> Option<PortBits> {
        let inside = |bit: &usize| {
            let (port, proto) = port(*bit);
            proto == range.proto() && range.from() <= port && port <= range.to()
        };
        let bits: u128 = (0..PORTS).filter(inside).map(|bit| 1 << bit).sum();
        let whole = bits.count_ones() == u32::from(range.to() - range.from()) + 1;
        whole.then(|| PortBits(sources.iter().map(|source| bits << (source * PORTS)).sum()))
    }

    /// The ports that a rule opens.
    pub(crate) fn of_rule(rule: &Rule) -> Option<PortBits> {
        PortBits::of(rule.ports, &[source(rule.source)?])
    }

    pub(crate) fn forbidden() -> PortBits {
        let ssh = PortRange::single(SSH, Protocol::Tcp).expect("a port");
        PortBits::of(ssh, &[0, 1, 2, 3]).expect("a known port")
    }

    pub(crate) fn and(self, other: PortBits) -> PortBits {
        PortBits(self.0 & other.0)
    }

    pub(crate) fn or(self, other: PortBits) -> PortBits {
        PortBits(self.0 | other.0)
    }

    pub(crate) fn minus(self, other: PortBits) -> PortBits {
        PortBits(self.0 & !other.0)
    }

    /// Every port of the set combined with every source of the set.
    pub(crate) fn every_combination(self) -> PortBits {
        let block = |source: usize| self.0 >> (source * PORTS) & u128::from(u32::MAX);
        let ports = (0..4).map(block).fold(0, |all, ports| all | ports);
        PortBits((0..4).filter(|source| block(*source) != 0).map(|source| ports << (source * PORTS)).sum())
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> u32 {
        self.0.count_ones()
    }
}

impl std::fmt::Display for PortBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for n in (0..PORTS * 4).filter(|n| self.0 >> n & 1 == 1) {
            let (port, proto) = port(n % PORTS);
            write!(f, " {port}/{} from {}", proto.name(), ["v4", "v6", SOURCES[0], SOURCES[1]][n / PORTS])?;
        }
        Ok(())
    }
}
