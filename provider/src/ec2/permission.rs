//! Converts our rules to EC2's permissions and back. Pure.
//!
//! EC2 combines a range of ports with all its sources into one permission; each source has its own
//! description. A rule is ours if that description is our mark and our rules can express its ports
//! and source.

use super::naming::RULE_MARK;
use crate::provider::Foreign;
use crate::rule::{Cidr, Family, PortRange, Rule, WirePorts};
use aws_sdk_ec2::types::{IpPermission, IpRange, Ipv6Range, UserIdGroupPair};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// The rules of a group, by owner.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Decoded {
    pub(super) owned: BTreeSet<Rule>,
    pub(super) foreign: Vec<Foreign>,
}

impl Decoded {
    /// Returns whether EC2 would refuse to add `rule` as a duplicate.
    pub(super) fn has(&self, rule: &Rule) -> bool {
        self.owned.contains(rule) || self.foreign.iter().any(|foreign| foreign.exact == Some(*rule))
    }
}

/// Returns the smallest set of permissions for `rules`, with our mark on each source.
pub(super) fn encode(rules: &BTreeSet<Rule>) -> Vec<IpPermission> {
    let mut by_ports: BTreeMap<PortRange, Vec<Cidr>> = BTreeMap::new();
    for rule in rules {
        by_ports.entry(rule.ports).or_default().push(rule.source);
    }
    by_ports.into_iter().map(|(ports, sources)| permission(ports, &sources)).collect()
}

fn permission(ports: PortRange, sources: &[Cidr]) -> IpPermission {
    let mut permission = IpPermission::builder()
        .ip_protocol(ports.proto().name())
        .from_port(i32::from(ports.from()))
        .to_port(i32::from(ports.to()));
    for source in sources {
        permission = match source.family() {
            Family::V4 => permission
                .ip_ranges(IpRange::builder().cidr_ip(source_text(*source)).description(RULE_MARK).build()),
            Family::V6 => permission.ipv6_ranges(
                Ipv6Range::builder().cidr_ipv6(source_text(*source)).description(RULE_MARK).build(),
            ),
        };
    }
    permission.build()
}

/// Formats a source. IPv6 is never written with dotted IPv4, which some readers do not accept.
fn source_text(source: Cidr) -> String {
    match source.network() {
        IpAddr::V6(v6) if v6.to_string().contains('.') => {
            let groups = v6.segments().map(|segment| format!("{segment:x}"));
            format!("{}/{}", groups.join(":"), source.prefix_len())
        }
        _ => source.to_string(),
    }
}

/// Returns the permissions of an environment's group: ssh from anywhere, and all traffic between
/// its members.
pub(super) fn environment_permissions(group: &str, ipv6: bool) -> Vec<IpPermission> {
    let mut ssh = IpPermission::builder()
        .ip_protocol("tcp")
        .from_port(22)
        .to_port(22)
        .ip_ranges(IpRange::builder().cidr_ip(Cidr::WORLD_V4.to_string()).description(RULE_MARK).build());
    if ipv6 {
        let world = Ipv6Range::builder().cidr_ipv6(Cidr::WORLD_V6.to_string()).description(RULE_MARK);
        ssh = ssh.ipv6_ranges(world.build());
    }
    let own = UserIdGroupPair::builder().group_id(group).description(RULE_MARK).build();
    vec![ssh.build(), IpPermission::builder().ip_protocol("-1").user_id_group_pairs(own).build()]
}

pub(super) fn decode(permissions: &[IpPermission]) -> Decoded {
    let mut decoded = Decoded::default();
    for permission in permissions {
        let ports = WirePorts {
            proto: permission.ip_protocol().unwrap_or("unknown"),
            from: permission.from_port(),
            to: permission.to_port(),
        };
        for range in permission.ip_ranges() {
            decoded.add(ports, range.cidr_ip(), range.description());
        }
        for range in permission.ipv6_ranges() {
            decoded.add(ports, range.cidr_ipv6(), range.description());
        }
        for pair in permission.user_id_group_pairs() {
            decoded.add_other(ports, pair.group_id().or(pair.group_name()));
        }
        for list in permission.prefix_list_ids() {
            decoded.add_other(ports, list.prefix_list_id());
        }
    }
    decoded
}

impl Decoded {
    fn add(&mut self, ports: WirePorts<'_>, source: Option<&str>, description: Option<&str>) {
        let Some(source) = source.and_then(|text| text.parse::<Cidr>().ok()) else {
            return self.add_other(ports, source);
        };
        match ports.exact() {
            Some(exact) if description == Some(RULE_MARK) => {
                self.owned.insert(Rule::new(exact, source));
            }
            _ => self.foreign.push(Foreign::from_wire(ports, source)),
        }
    }

    /// Adds a source that is not a block of addresses, which our rules cannot express.
    fn add_other(&mut self, ports: WirePorts<'_>, source: Option<&str>) {
        let port = |end: Option<i32>| end.map_or_else(|| "all".to_owned(), |port| port.to_string());
        let source = source.unwrap_or("unknown");
        let text = format!("{}-{}/{} from {source}", port(ports.from), port(ports.to), ports.proto);
        self.foreign.push(Foreign { text, exact: None, covers: Vec::new() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Protocol;
    use aws_sdk_ec2::types::PrefixListId;
    use proptest::prelude::*;

    fn rule(from: u16, to: u16, proto: Protocol, source: &str) -> Rule {
        Rule::new(PortRange::new(from, to, proto).unwrap(), source.parse().unwrap())
    }

    fn wire(proto: &str, from: i32, to: i32, cidr: &str, description: Option<&str>) -> IpPermission {
        let range = IpRange::builder().cidr_ip(cidr).set_description(description.map(str::to_owned)).build();
        IpPermission::builder().ip_protocol(proto).from_port(from).to_port(to).ip_ranges(range).build()
    }

    #[test]
    fn sources_of_a_range_share_one_permission() {
        let rules = BTreeSet::from([
            rule(80, 80, Protocol::Tcp, "0.0.0.0/0"),
            rule(80, 80, Protocol::Tcp, "::/0"),
            rule(80, 80, Protocol::Udp, "0.0.0.0/0"),
        ]);
        let encoded = encode(&rules);
        assert_eq!(encoded.len(), 2);
        let marks = encoded.iter().flat_map(|p| {
            let v4 = p.ip_ranges().iter().map(IpRange::description);
            v4.chain(p.ipv6_ranges().iter().map(Ipv6Range::description))
        });
        assert_eq!(marks.collect::<Vec<_>>(), [Some(RULE_MARK); 3]);
    }

    #[test]
    fn sources_are_written_without_dotted_ipv6() {
        for (source, text) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("::ffff:192.0.2.1/128", "0:0:0:0:0:ffff:c000:201/128"),
        ] {
            let source: Cidr = source.parse().unwrap();
            assert_eq!(source_text(source), text);
            assert_eq!(text.parse(), Ok(source), "and read again");
        }
    }

    #[test]
    fn all_spellings_of_ec2_are_decoded() {
        let ours = Some(RULE_MARK);
        let cases = [
            (wire("tcp", 80, 80, "0.0.0.0/0", ours), Some(rule(80, 80, Protocol::Tcp, "0.0.0.0/0"))),
            (wire("6", 80, 80, "0.0.0.0/0", ours), Some(rule(80, 80, Protocol::Tcp, "0.0.0.0/0"))),
            (wire("17", 5, 9, "10.1.2.3/8", ours), Some(rule(5, 9, Protocol::Udp, "10.0.0.0/8"))),
            (wire("tcp", 80, 80, "0.0.0.0/0", None), None),
            (wire("tcp", 80, 80, "0.0.0.0/0", Some("opened by portcullis ")), None),
            (wire("tcp", 0, 65535, "0.0.0.0/0", ours), None),
            (wire("-1", -1, -1, "0.0.0.0/0", ours), None),
            (wire("icmp", 8, -1, "0.0.0.0/0", ours), None),
            (wire("tcp", 80, 80, "not an address", ours), None),
        ];
        for (permission, owned) in cases {
            let decoded = decode(std::slice::from_ref(&permission));
            assert_eq!(decoded.owned, owned.into_iter().collect(), "{permission:?}");
            assert_eq!(decoded.foreign.len(), usize::from(owned.is_none()), "never dropped: {permission:?}");
        }
    }

    #[test]
    fn sources_that_are_not_addresses_are_kept_as_foreign() {
        let pair = UserIdGroupPair::builder().group_id("sg-1").description(RULE_MARK).build();
        let list = PrefixListId::builder().prefix_list_id("pl-1").build();
        let all = IpPermission::builder().ip_protocol("-1").user_id_group_pairs(pair).prefix_list_ids(list);
        let decoded = decode(&[all.build()]);
        let texts: Vec<&str> = decoded.foreign.iter().map(|foreign| foreign.text.as_str()).collect();
        assert_eq!(texts, ["all-all/-1 from sg-1", "all-all/-1 from pl-1"]);
        assert!(decoded.owned.is_empty());
    }

    #[test]
    fn foreign_rule_counts_as_existing() {
        let decoded = decode(&[wire("tcp", 80, 80, "0.0.0.0/0", None)]);
        assert!(decoded.has(&rule(80, 80, Protocol::Tcp, "0.0.0.0/0")));
        assert!(!decoded.has(&rule(80, 81, Protocol::Tcp, "0.0.0.0/0")));
    }

    #[test]
    fn environment_group_allows_ssh_and_its_members() {
        for (ipv6, sources) in [(false, 0), (true, 1)] {
            let permissions = environment_permissions("sg-1", ipv6);
            assert_eq!(permissions.len(), 2);
            assert_eq!(permissions[0].from_port(), Some(22));
            assert_eq!(permissions[0].ip_ranges()[0].cidr_ip(), Some("0.0.0.0/0"));
            assert_eq!(permissions[0].ipv6_ranges().len(), sources);
            assert_eq!(permissions[1].user_id_group_pairs()[0].group_id(), Some("sg-1"));
        }
    }

    fn any_rules() -> impl Strategy<Value = BTreeSet<Rule>> {
        let source = prop::sample::select(vec!["0.0.0.0/0", "::/0", "10.0.0.0/8", "2001:db8::/32"]);
        let proto = prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]);
        let one = (1u16..50, 0u16..5, proto, source);
        prop::collection::btree_set(one.prop_map(|(a, n, p, s)| rule(a, a + n, p, s)), 0..40)
    }

    proptest! {
        #[test]
        fn encoding_round_trips(rules in any_rules()) {
            let decoded = decode(&encode(&rules));
            prop_assert_eq!(decoded.owned, rules);
            prop_assert!(decoded.foreign.is_empty());
        }

        #[test]
        fn no_permission_appears_twice(rules in any_rules()) {
            let encoded = encode(&rules);
            let key = |p: &IpPermission| (p.ip_protocol().map(str::to_owned), p.from_port(), p.to_port());
            let keys: BTreeSet<_> = encoded.iter().map(key).collect();
            prop_assert_eq!(keys.len(), encoded.len());
        }
    }
}
