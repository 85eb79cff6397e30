//! Renders the whole table as one transaction in nft's JSON. Pure.

use super::table::{self, CHAIN, Lane, Purpose, TableName, TableSettings};
use crate::rule::{Cidr, Family, PortRange, Protocol, Rule, RuleSet};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The start of the transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Start {
    /// Flushes our table, if it exists. Deleting its input chain would drop packets until it is
    /// created again. `stale` holds chains that are no longer needed.
    Over { stale: Vec<String> },
    /// Deletes the table, because flushing it is not enough.
    Anew,
}

/// Renders one command per line. Adding the table first makes the next command succeed even if
/// there was no table.
pub(super) fn render(settings: &TableSettings, rules: &RuleSet, start: &Start) -> String {
    let table = json!({"family": "inet", "name": settings.table.as_str()});
    let mut commands = vec![json!({"add": {"table": table}})];
    match start {
        Start::Anew => {
            commands.extend([json!({"delete": {"table": table}}), json!({"add": {"table": table}})]);
        }
        Start::Over { stale } => {
            commands.push(json!({"flush": {"table": table}}));
            commands.extend(stale.iter().map(|name| json!({"delete": {"chain": chain(settings, name)}})));
        }
    }
    let mut base = chain(settings, CHAIN);
    for (key, value) in [("type", "filter"), ("hook", "input"), ("policy", table::policy(settings.mode))] {
        base[key] = json!(value);
    }
    base["prio"] = json!(0);
    commands.push(json!({"add": {"chain": base}}));

    let (mut protected, open) = (protected(settings), lanes(rules));
    for lane in Lane::PROTECTED {
        protected.entry(lane).or_default();
    }
    for (lane, ports) in protected.iter().chain(&open) {
        let name = lane.chain_name();
        commands.push(json!({"add": {"chain": chain(settings, &name)}}));
        commands.extend(accepts(ports).iter().map(|accept| rule(settings, &name, None, accept)));
    }
    let limited = protected.keys().filter(|lane| !Lane::PROTECTED.contains(lane));
    for purpose in table::purposes(settings.mode, limited.chain(open.keys()).copied()) {
        commands.push(rule(settings, CHAIN, Some(purpose.comment()), &expressions(purpose)));
    }
    let lines: Vec<String> = commands.iter().map(Value::to_string).collect();
    format!("{{\"nftables\": [\n{}\n]}}\n", lines.join(",\n"))
}

/// Renders the deletion of the table.
pub(super) fn delete(table: &TableName) -> String {
    let table = json!({"family": "inet", "name": table.as_str()});
    json!({"nftables": [{"delete": {"table": table}}]}).to_string()
}

pub(super) fn lanes(rules: &RuleSet) -> BTreeMap<Lane, Vec<PortRange>> {
    let mut lanes: BTreeMap<Lane, Vec<PortRange>> = BTreeMap::new();
    for Rule { source, ports } in rules.rules() {
        lanes.entry(Lane::From(source, ports.proto())).or_default().push(ports);
    }
    lanes
}

pub(super) fn protected(settings: &TableSettings) -> BTreeMap<Lane, Vec<PortRange>> {
    let mut lanes: BTreeMap<Lane, Vec<PortRange>> = BTreeMap::new();
    let set: RuleSet = settings.protected.iter().map(|&ports| Rule::new(ports, Cidr::WORLD_V4)).collect();
    for Rule { ports, .. } in set.rules() {
        lanes.entry(Lane::Protected(ports.proto())).or_default().push(ports);
    }
    let limited: RuleSet = settings.protected_from.iter().copied().collect();
    for Rule { source, ports } in limited.rules() {
        lanes.entry(Lane::ProtectedFrom(source, ports.proto())).or_default().push(ports);
    }
    lanes
}

fn chain(settings: &TableSettings, name: &str) -> Value {
    json!({"family": "inet", "table": settings.table.as_str(), "name": name})
}

fn rule(settings: &TableSettings, chain: &str, comment: Option<String>, expressions: &[Value]) -> Value {
    let mut rule = json!({"family": "inet", "table": settings.table.as_str(), "chain": chain});
    if let Some(comment) = comment {
        rule["comment"] = json!(comment);
    }
    rule["expr"] = json!(expressions);
    json!({"add": {"rule": rule}})
}

/// Returns the rules of a chain for one protocol: all single ports in one set, and a rule for each
/// range.
fn accepts(ports: &[PortRange]) -> Vec<[Value; 2]> {
    let (single, ranges): (Vec<PortRange>, Vec<PortRange>) =
        ports.iter().partition(|ports| ports.is_single());
    let single: Vec<u16> = single.into_iter().map(PortRange::from).collect();
    // nft lists a set of one element as that element.
    let set = match single.as_slice() {
        [] => None,
        [port] => Some(json!(port)),
        all => Some(json!({"set": all})),
    };
    let ranges = ranges.into_iter().map(|ports| json!({"range": [ports.from(), ports.to()]}));
    let destination = json!({"payload": {"protocol": "th", "field": "dport"}});
    set.into_iter()
        .chain(ranges)
        .map(|right| [matches("==", &destination, &right), json!({"accept": null})])
        .collect()
}

fn expressions(purpose: Purpose) -> Vec<Value> {
    let meta = |key: &str, value: &str| matches("==", &json!({"meta": {"key": key}}), &json!(value));
    let accept = json!({"accept": null});
    let enter = |lane: Lane| json!({"jump": {"target": lane.chain_name()}});
    match purpose {
        Purpose::Established => {
            vec![matches("in", &json!({"ct": {"key": "state"}}), &json!(["established", "related"])), accept]
        }
        Purpose::Loopback => vec![meta("iif", "lo"), accept],
        Purpose::Icmp => vec![is_protocol(ICMP), accept],
        Purpose::Icmpv6 => vec![is_protocol(ICMPV6), accept],
        Purpose::Enter(lane @ Lane::Protected(proto)) => vec![is_protocol(number(proto)), enter(lane)],
        Purpose::Enter(lane @ (Lane::ProtectedFrom(source, proto) | Lane::From(source, proto))) => {
            vec![comes_from(source), is_protocol(number(proto)), enter(lane)]
        }
        // A listening socket starts a connection only for a packet with SYN and without ACK.
        Purpose::ExistingTcp => {
            let flags = json!({"&": [{"payload": {"protocol": "tcp", "field": "flags"}}, ["syn", "ack"]]});
            vec![matches("!=", &flags, &json!("syn")), accept]
        }
        // Before the input hook the kernel assigns a datagram to a socket that is connected to the
        // sender, and the packet then has the socket's owner. It also does so for multicast without
        // a connected peer, hence "host".
        Purpose::ConnectedUdp => {
            let owner = json!({"range": [0, u32::MAX - 1]});
            let owned = matches("==", &json!({"meta": {"key": "skuid"}}), &owner);
            vec![meta("pkttype", "host"), is_protocol(number(Protocol::Udp)), owned, accept]
        }
        Purpose::ResetTcp => {
            vec![is_protocol(number(Protocol::Tcp)), json!({"reject": {"type": "tcp reset"}})]
        }
        Purpose::RejectRest => vec![json!({"reject": {"type": "icmpx", "expr": "port-unreachable"}})],
    }
}

/// Matches a protocol by its number. nft looks names up in /etc/protocols, which a small
/// installation does not have.
fn is_protocol(number: u8) -> Value {
    matches("==", &json!({"meta": {"key": "l4proto"}}), &json!(number))
}

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

const fn number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

fn matches(op: &str, left: &Value, right: &Value) -> Value {
    json!({"match": {"op": op, "left": left, "right": right}})
}

/// Matches a source. A whole family is matched by its name, because nft has no prefix of length 0.
fn comes_from(source: Cidr) -> Value {
    let (protocol, nfproto) = match source.family() {
        Family::V4 => ("ip", "ipv4"),
        Family::V6 => ("ip6", "ipv6"),
    };
    if source.is_world() {
        return matches("==", &json!({"meta": {"key": "nfproto"}}), &json!(nfproto));
    }
    let address = json!({"payload": {"protocol": protocol, "field": "saddr"}});
    let prefix = json!({"prefix": {"addr": source.network().to_string(), "len": source.prefix_len()}});
    matches("==", &address, &prefix)
}

#[cfg(test)]
mod tests {
    use super::super::table::{Mode, TableName};
    use super::*;

    fn settings(mode: Mode) -> TableSettings {
        let protected = [(22, 22), (2181, 2181), (22, 22)]
            .map(|(from, to)| PortRange::new(from, to, Protocol::Tcp).unwrap())
            .to_vec();
        let table = TableName::for_instance("prod").unwrap();
        TableSettings { table, mode, protected, protected_from: Vec::new() }
    }

    fn rules() -> RuleSet {
        let rule = |from, to, proto, source: &str| {
            Rule::new(PortRange::new(from, to, proto).unwrap(), source.parse().unwrap())
        };
        let all = [
            rule(80, 80, Protocol::Tcp, "0.0.0.0/0"),
            rule(8000, 8040, Protocol::Tcp, "0.0.0.0/0"),
            rule(8041, 8080, Protocol::Tcp, "0.0.0.0/0"),
            rule(9000, 9000, Protocol::Tcp, "0.0.0.0/0"),
            rule(53, 53, Protocol::Udp, "0.0.0.0/0"),
            rule(80, 80, Protocol::Tcp, "::/0"),
            rule(5432, 5432, Protocol::Tcp, "10.0.0.0/8"),
            rule(5432, 5432, Protocol::Tcp, "2001:db8::/32"),
        ];
        all.into_iter().collect()
    }

    #[test]
    fn table_is_rendered_as_one_transaction() {
        let start = Start::Over { stale: vec!["tcp_from_192.0.2.0/24".to_owned()] };
        let text = render(&settings(Mode::Enforce), &rules(), &start);
        assert_eq!(text, include_str!("../../fixtures/nftables/enforce.json"));
    }

    #[test]
    fn protected_ports_with_sources_have_chains_of_their_own() {
        let ports = PortRange::single(2181, Protocol::Tcp).unwrap();
        let protected_from =
            ["10.0.0.0/8", "fd00::/8"].map(|source| Rule::new(ports, source.parse().unwrap())).to_vec();
        let settings = TableSettings { protected_from, ..settings(Mode::Enforce) };
        let text = render(&settings, &RuleSet::new(), &Start::Anew);
        for source in ["10.0.0.0/8", "6_fd00.0.0.0.0.0.0.0/8"] {
            let source = if source.starts_with('6') { source.to_owned() } else { format!("_{source}") };
            let name = format!("\"protected_tcp_from{source}\"");
            assert!(
                text.lines().any(|line| line.contains("chain") && line.contains(&name)),
                "{name} in {text}"
            );
        }
        assert!(text.contains("portcullis: protected tcp from fd00::/8"));
        let entered = text.find("portcullis: protected tcp from 10.0.0.0/8").unwrap();
        assert!(text.find("portcullis: protected udp").unwrap() < entered, "after those for everybody");
        assert!(entered < text.find("portcullis: reset tcp").unwrap(), "before the rejects");
    }

    #[test]
    fn accept_only_mode_rejects_nothing() {
        let text = render(&settings(Mode::AcceptOnly), &RuleSet::new(), &Start::Anew);
        assert_eq!(text, include_str!("../../fixtures/nftables/accept_only.json"));
    }
}
