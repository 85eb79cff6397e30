//! Names and structure of our table, shared by `render` and `parse`. Pure.

use crate::rule::{Cidr, PortRange, Protocol, Rule};
use std::fmt;
use std::net::IpAddr;

/// The properties of the table beside its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSettings {
    pub table: TableName,
    pub mode: Mode,
    /// Ports that are always open to every source: ssh, the store, the agents' own ports. No change
    /// can close them.
    pub protected: Vec<PortRange>,
    /// Ports that are always open to their source only.
    pub protected_from: Vec<Rule>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Rejects all traffic that no rule accepts.
    Enforce,
    /// Accepts the traffic of the rules and leaves the rest to other tables: for a trial before
    /// enforcing, which cuts off all unlisted traffic.
    AcceptOnly,
}

/// Prefix of our tables; the rest of the name distinguishes environments on one machine.
const PREFIX: &str = "portcullis-";
const MAX_INSTANCE_CHARS: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableName(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a table is named by 1 to {MAX_INSTANCE_CHARS} letters, digits, '-' and '_'")]
pub struct InvalidTableName;

impl TableName {
    /// # Errors
    /// If `instance` is empty, too long, or has characters other than letters, digits, `-` and `_`.
    pub fn for_instance(instance: &str) -> Result<Self, InvalidTableName> {
        let fits = (1..=MAX_INSTANCE_CHARS).contains(&instance.len());
        let plain = instance.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if !fits || !plain {
            return Err(InvalidTableName);
        }
        Ok(Self(format!("{PREFIX}{instance}")))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) const CHAIN: &str = "input";

/// Ports of one protocol that are open to the same source. Each lane is a separate chain that only
/// packets of that protocol and source enter: one rule with a set of all single ports, then a rule
/// for each range.
///
/// The set is anonymous and is replaced with its rule, never changed: otherwise a packet in the
/// middle of the old rules would be looked up in the new set. It contains no ranges, because the
/// kernel searches such sets in a way that loses packets during a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Protected(Protocol),
    ProtectedFrom(Cidr, Protocol),
    From(Cidr, Protocol),
}

impl Lane {
    pub(super) const PROTECTED: [Self; 2] = [Self::Protected(Protocol::Tcp), Self::Protected(Protocol::Udp)];

    pub(super) fn proto(self) -> Protocol {
        match self {
            Self::Protected(proto) | Self::ProtectedFrom(_, proto) | Self::From(_, proto) => proto,
        }
    }

    /// Returns the name of the chain. IPv6 addresses are written in full, because nft's names have
    /// no colons.
    pub(super) fn chain_name(self) -> String {
        let (source, proto) = match self {
            Self::Protected(proto) => return format!("protected_{proto}"),
            Self::ProtectedFrom(source, proto) => {
                return format!("protected_{}", Self::From(source, proto).chain_name());
            }
            Self::From(source, proto) => (source, proto),
        };
        let len = source.prefix_len();
        match source.network() {
            IpAddr::V4(v4) => format!("{proto}_from_{v4}/{len}"),
            IpAddr::V6(v6) => {
                let groups = v6.segments().map(|segment| format!("{segment:x}"));
                format!("{proto}_from6_{}/{len}", groups.join("."))
            }
        }
    }

    fn words(self) -> String {
        match self {
            Self::Protected(proto) => format!("protected {proto}"),
            Self::ProtectedFrom(source, proto) => format!("protected {proto} from {source}"),
            Self::From(source, proto) => format!("{proto} from {source}"),
        }
    }

    fn from_words(words: &str) -> Option<Self> {
        let proto = |name| [Protocol::Tcp, Protocol::Udp].into_iter().find(|proto| proto.name() == name);
        match words.split_once(" from ") {
            None => proto(words.strip_prefix("protected ")?).map(Self::Protected),
            Some((name, source)) => {
                let source = source.parse().ok()?;
                Some(match name.strip_prefix("protected ") {
                    Some(name) => Self::ProtectedFrom(source, proto(name)?),
                    None => Self::From(source, proto(name)?),
                })
            }
        }
    }
}

/// The purpose of a rule of the chain. It is written into the rule's comment, which identifies our
/// rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Established,
    Loopback,
    Icmp,
    Icmpv6,
    Enter(Lane),
    /// TCP packets that do not begin a connection. Connection tracking has no entry for connections
    /// that are older than itself, and treats their first packet that it sees as a new connection
    /// in that packet's direction. Such packets reach the kernel's TCP: it delivers them to the
    /// connection that they belong to, or answers with a reset.
    ExistingTcp,
    /// UDP datagrams for a socket that is connected to their sender, for the same reason.
    ConnectedUdp,
    ResetTcp,
    RejectRest,
}

const MARK: &str = "portcullis: ";

impl Purpose {
    pub(super) fn comment(self) -> String {
        match self {
            Self::Established => format!("{MARK}established"),
            Self::Loopback => format!("{MARK}loopback"),
            Self::Icmp => format!("{MARK}icmp"),
            Self::Icmpv6 => format!("{MARK}icmpv6"),
            Self::Enter(lane) => format!("{MARK}{}", lane.words()),
            Self::ExistingTcp => format!("{MARK}tcp of existing connections"),
            Self::ConnectedUdp => format!("{MARK}udp of connected sockets"),
            Self::ResetTcp => format!("{MARK}reset tcp"),
            Self::RejectRest => format!("{MARK}reject the rest"),
        }
    }

    pub(super) fn from_comment(comment: &str) -> Option<Self> {
        match comment.strip_prefix(MARK)? {
            "established" => Some(Self::Established),
            "loopback" => Some(Self::Loopback),
            "icmp" => Some(Self::Icmp),
            "icmpv6" => Some(Self::Icmpv6),
            "tcp of existing connections" => Some(Self::ExistingTcp),
            "udp of connected sockets" => Some(Self::ConnectedUdp),
            "reset tcp" => Some(Self::ResetTcp),
            "reject the rest" => Some(Self::RejectRest),
            lane => Lane::from_words(lane).map(Self::Enter),
        }
    }
}

/// Returns the rules of the chain in order; `lanes` holds the other ones than
/// [`Lane::PROTECTED`].
pub(super) fn purposes(mode: Mode, lanes: impl Iterator<Item = Lane>) -> Vec<Purpose> {
    let mut all = vec![Purpose::Established, Purpose::Loopback, Purpose::Icmp, Purpose::Icmpv6];
    all.extend(Lane::PROTECTED.into_iter().chain(lanes).map(Purpose::Enter));
    if mode == Mode::Enforce {
        all.extend([Purpose::ExistingTcp, Purpose::ConnectedUdp, Purpose::ResetTcp, Purpose::RejectRest]);
    }
    all
}

pub(super) fn policy(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "drop",
        Mode::AcceptOnly => "accept",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_table_names_are_refused() {
        assert_eq!(TableName::for_instance("prod-2").unwrap().to_string(), "portcullis-prod-2");
        for bad in ["", "a b", "a;flush ruleset", "ä", &"x".repeat(65)] {
            assert_eq!(TableName::for_instance(bad), Err(InvalidTableName), "{bad}");
        }
    }

    #[test]
    fn purposes_round_trip_through_comments() {
        let sources = ["0.0.0.0/0", "::/0", "10.0.0.0/8", "2001:db8::/32", "::ffff:192.0.2.1/128"];
        let open = sources.iter().map(|text| Lane::From(text.parse().unwrap(), Protocol::Udp));
        let shielded = sources.iter().map(|text| Lane::ProtectedFrom(text.parse().unwrap(), Protocol::Tcp));
        let all = purposes(Mode::Enforce, shielded.chain(open));
        assert_eq!(all.len(), 20);
        for purpose in all {
            let comment = purpose.comment();
            assert!(comment.len() <= 128, "the kernel keeps no more of a comment");
            assert_eq!(Purpose::from_comment(&comment), Some(purpose));
        }
        for other in ["", "loopback", "portcullis: ", "portcullis: tcp from nowhere", "portcullis:loopback"] {
            assert_eq!(Purpose::from_comment(other), None);
        }
    }

    #[test]
    fn chain_names_are_unique_per_source() {
        let name = |text: &str, proto| Lane::From(text.parse().unwrap(), proto).chain_name();
        assert_eq!(name("::ffff:1.2.3.4/128", Protocol::Tcp), "tcp_from6_0.0.0.0.0.ffff.102.304/128");
        assert_eq!(name("0:0:0:ffff:1:2:3:4", Protocol::Tcp), "tcp_from6_0.0.0.ffff.1.2.3.4/128");
        assert_eq!(name("1.2.3.4", Protocol::Tcp), "tcp_from_1.2.3.4/32");
        assert_eq!(name("1.2.3.4", Protocol::Udp), "udp_from_1.2.3.4/32");
        assert_eq!(name("1.2.3.4/31", Protocol::Udp), "udp_from_1.2.3.4/31");
    }
}
