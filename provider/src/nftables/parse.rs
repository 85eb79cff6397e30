//! Parses the output of `nft -j list table` for our table. Unreadable output is an error, so that
//! it is never mistaken for closed ports. Pure.

use super::render::{Start, lanes, protected};
use super::table::{self, CHAIN, Lane, Purpose, TableSettings};
use crate::rule::{InvalidPortRange, PortRange, Rule, RuleSet};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedTable {
    pub(super) rules: RuleSet,
    /// Descriptions of deviations from the table that we would write.
    pub(super) drift: Vec<String>,
    /// Whether the table has rules, but neither our mark nor the chains that we always create.
    pub(super) foreign: bool,
    /// All chains except the input chain, ours or foreign.
    chains: BTreeSet<String>,
    /// The chains of protected ports in the table that we would write.
    protected: BTreeSet<String>,
    /// Whether flushing the table is not enough to repair it.
    rebuild: bool,
}

impl ParsedTable {
    pub(super) fn no_table() -> Self {
        let drift = vec!["its table is missing".to_owned()];
        let (chains, protected) = (BTreeSet::new(), BTreeSet::new());
        Self { rules: RuleSet::new(), drift, foreign: false, chains, protected, rebuild: false }
    }

    /// Returns the start of a transaction that leads to `next`.
    pub(super) fn start_for(&self, next: &RuleSet) -> Start {
        if self.rebuild {
            return Start::Anew;
        }
        let mut needed: BTreeSet<String> =
            lanes(next).into_keys().chain(Lane::PROTECTED).map(|lane| lane.chain_name()).collect();
        needed.extend(self.protected.iter().cloned());
        Start::Over { stale: self.chains.difference(&needed).cloned().collect() }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ParseError {
    #[error("nft's listing is not JSON: {0}")]
    Json(serde_json::Error),
    #[error("nft's listing has no '{0}' where one belongs")]
    Missing(&'static str),
    #[error("the chain '{chain}' has a rule that we cannot read: {expressions}")]
    Rule { chain: String, expressions: String },
    #[error("nft lists ports that cannot be: {0}")]
    Ports(InvalidPortRange),
}

/// Size limit of a quoted rule.
const SHOWN_CHARS: usize = 120;

/// The listing, by kind of object.
#[derive(Debug, Default)]
struct Listing {
    chains: BTreeMap<String, Chain>,
    /// Kinds of objects that we do not create.
    strange: BTreeSet<String>,
}

#[derive(Debug, Default)]
struct Chain {
    /// Type, hook, priority and policy of a base chain.
    hook: Option<[String; 4]>,
    rules: Vec<ChainRule>,
}

#[derive(Debug)]
struct ChainRule {
    /// `None` without our mark.
    purpose: Option<Purpose>,
    expressions: Value,
}

pub(super) fn parse(text: &str, settings: &TableSettings) -> Result<ParsedTable, ParseError> {
    let Listing { mut chains, strange } = sort(text)?;
    let input = chains.remove(CHAIN).unwrap_or_default();
    let purposes: Vec<Option<Purpose>> = input.rules.iter().map(|rule| rule.purpose).collect();
    let entered: BTreeSet<Lane> = purposes.iter().flatten().filter_map(|purpose| purpose.lane()).collect();
    let mut rules = Vec::new();
    let mut shielded = BTreeMap::new();
    for &lane in &entered {
        let name = lane.chain_name();
        let ports = chains.get(&name).map_or(Ok(Vec::new()), |chain| ports(&name, lane, chain))?;
        match lane {
            Lane::From(source, _) => rules.extend(ports.into_iter().map(|ports| Rule::new(ports, source))),
            Lane::Protected(_) | Lane::ProtectedFrom(..) if ports.is_empty() => {}
            Lane::Protected(_) | Lane::ProtectedFrom(..) => _ = shielded.insert(lane, ports),
        }
    }
    let mut drift = Vec::new();
    let wanted = protected(settings);
    if shielded != wanted {
        drift.push("its protected ports are not those of the settings".to_owned());
    }
    let open = entered.iter().copied().filter(|lane| !Lane::PROTECTED.contains(lane));
    if !purposes.iter().copied().eq(table::purposes(settings.mode, open).into_iter().map(Some)) {
        drift.push("its rules are not as we made them".to_owned());
    }
    let hooked = input
        .hook
        .as_ref()
        .is_none_or(|[kind, hook, priority, _]| [kind.as_str(), hook, priority] == ["filter", "input", "0"]);
    let wanted_policy = table::policy(settings.mode);
    if !input.hook.as_ref().is_some_and(|[_, _, _, policy]| hooked && policy == wanted_policy) {
        drift.push(format!("its policy is not to {wanted_policy} what comes in"));
    }
    let names: BTreeSet<String> = entered.iter().map(|lane| lane.chain_name()).collect();
    if chains.iter().any(|(name, chain)| chain.hook.is_some() || !names.contains(name)) {
        drift.push("it has chains that we did not make".to_owned());
    }
    drift.extend(strange.iter().map(|kind| format!("it has a {kind}, which we do not make")));

    let any_rule = !input.rules.is_empty() || chains.values().any(|chain| !chain.rules.is_empty());
    let made_by_us = Lane::PROTECTED.iter().any(|lane| chains.contains_key(&lane.chain_name()));
    let foreign = any_rule && !made_by_us && purposes.iter().all(Option::is_none);
    let hijacked = chains.iter().any(|(name, chain)| chain.hook.is_some() && names.contains(name));
    let rebuild = !strange.is_empty() || !hooked || hijacked;
    let chains = chains.into_keys().collect();
    let protected = wanted.into_keys().map(Lane::chain_name).collect();
    Ok(ParsedTable { rules: rules.into_iter().collect(), drift, foreign, chains, protected, rebuild })
}

impl Purpose {
    fn lane(self) -> Option<Lane> {
        match self {
            Self::Enter(lane) => Some(lane),
            _ => None,
        }
    }
}

fn sort(text: &str) -> Result<Listing, ParseError> {
    let json: Value = serde_json::from_str(text).map_err(ParseError::Json)?;
    let objects = json.get("nftables").and_then(Value::as_array).ok_or(ParseError::Missing("nftables"))?;
    let mut listing = Listing::default();
    for (kind, object) in objects.iter().filter_map(Value::as_object).flatten() {
        match kind.as_str() {
            "metainfo" | "table" => {}
            "chain" => {
                let hook = object
                    .get("hook")
                    .is_some()
                    .then(|| ["type", "hook", "prio", "policy"].map(|key| word(object, key)));
                listing.chains.entry(text_of(object, "name")?.to_owned()).or_default().hook = hook;
            }
            "rule" => {
                let comment = object.get("comment").and_then(Value::as_str);
                let expressions = object.get("expr").cloned().ok_or(ParseError::Missing("expr"))?;
                let rule = ChainRule { purpose: comment.and_then(Purpose::from_comment), expressions };
                listing.chains.entry(text_of(object, "chain")?.to_owned()).or_default().rules.push(rule);
            }
            other => _ = listing.strange.insert(other.to_owned()),
        }
    }
    Ok(listing)
}

/// Returns a string or a number as text; empty if there is none.
fn word(object: &Value, key: &str) -> String {
    match object.get(key) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

fn text_of<'a>(object: &'a Value, key: &'static str) -> Result<&'a str, ParseError> {
    object.get(key).and_then(Value::as_str).ok_or(ParseError::Missing(key))
}

fn ports(name: &str, lane: Lane, chain: &Chain) -> Result<Vec<PortRange>, ParseError> {
    let unreadable = |expressions: &Value| {
        let expressions = expressions.to_string().chars().take(SHOWN_CHARS).collect();
        ParseError::Rule { chain: name.to_owned(), expressions }
    };
    let mut ranges = Vec::new();
    for ChainRule { expressions, .. } in &chain.rules {
        for (from, to) in spans(expressions).ok_or_else(|| unreadable(expressions))? {
            ranges.push(PortRange::new(from, to, lane.proto()).map_err(ParseError::Ports)?);
        }
    }
    ranges.sort();
    Ok(ranges)
}

/// Returns the destination ports of an accept rule without other matches: a port, a range, or a set
/// of them.
fn spans(expressions: &Value) -> Option<Vec<(u16, u16)>> {
    let [test, verdict] = expressions.as_array()?.as_slice() else { return None };
    let test = test.get("match").filter(|test| test.get("op").and_then(Value::as_str) == Some("=="))?;
    let left = test.pointer("/left/payload/field").and_then(Value::as_str);
    if left != Some("dport") || verdict.get("accept").is_none() {
        return None;
    }
    let right = test.get("right")?;
    match right.get("set") {
        None => Some(vec![span(right)?]),
        Some(set) => set.as_array()?.iter().map(span).collect(),
    }
}

/// Parses `80` or `{"range": [8000, 8080]}`.
fn span(value: &Value) -> Option<(u16, u16)> {
    let port = |value: &Value| u16::try_from(value.as_u64()?).ok();
    match value.get("range") {
        None => port(value).map(|port| (port, port)),
        Some(range) => {
            let [from, to] = range.as_array()?.as_slice() else { return None };
            Some((port(from)?, port(to)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::render::render;
    use super::super::table::{Mode, TableName};
    use super::*;
    use crate::rule::{Cidr, Protocol};
    use proptest::prelude::*;

    const LISTING: &str = include_str!("../../fixtures/nftables/listing.json");

    fn settings() -> TableSettings {
        let protected = [22, 2181].map(|port| PortRange::single(port, Protocol::Tcp).unwrap()).to_vec();
        let table = TableName::for_instance("prod").unwrap();
        TableSettings { table, mode: Mode::Enforce, protected, protected_from: Vec::new() }
    }

    fn shown(found: &ParsedTable) -> Vec<String> {
        found.rules.rules().map(|rule| rule.to_string()).collect()
    }

    #[test]
    fn listing_of_nft_is_parsed() {
        let found = parse(LISTING, &settings()).unwrap();
        let expected = [
            "80/tcp from 0.0.0.0/0",
            "8000-8080/tcp from 0.0.0.0/0",
            "9000/tcp from 0.0.0.0/0",
            "53/udp from 0.0.0.0/0",
            "5432/tcp from 10.0.0.0/8",
            "80/tcp from ::/0",
            "5432/tcp from 2001:db8::/32",
        ];
        assert_eq!(shown(&found), expected);
        assert_eq!((found.drift, found.foreign), (vec![], false));
    }

    #[test]
    fn drift_is_described() {
        let other = |change: fn(&mut TableSettings)| {
            let mut settings = settings();
            change(&mut settings);
            parse(LISTING, &settings).unwrap().drift
        };
        assert_eq!(
            other(|settings| settings.mode = Mode::AcceptOnly),
            ["its rules are not as we made them", "its policy is not to accept what comes in"]
        );
        assert_eq!(
            other(|settings| settings.protected.clear()),
            ["its protected ports are not those of the settings"]
        );
        for (from, to, drift) in [
            ("portcullis: loopback", "mine", "its rules are not as we made them"),
            ("portcullis: reset tcp", "portcullis: tcp from ::/0", "its rules are not as we made them"),
            (r#""hook": "input""#, r#""hook": "output""#, "its policy is not to drop what comes in"),
            (r#""prio": 0"#, r#""prio": -100"#, "its policy is not to drop what comes in"),
            (r#"{"metainfo""#, r#"{"map": {}}, {"metainfo""#, "it has a map, which we do not make"),
            (
                r#"{"metainfo""#,
                r#"{"chain": {"name": "mine"}}, {"metainfo""#,
                "it has chains that we did not make",
            ),
            (r#"{"set": [22, "#, r#"{"set": [23, "#, "its protected ports are not those of the settings"),
        ] {
            let text = LISTING.replacen(from, to, 1);
            assert_ne!(text, LISTING, "{from}");
            let found = parse(&text, &settings()).unwrap();
            assert!(found.drift.iter().any(|words| words == drift), "{from}: {:?}", found.drift);
            assert!(!found.foreign);
        }
    }

    #[test]
    fn table_without_our_mark_is_foreign() {
        assert!(
            parse(&LISTING.replace("portcullis: ", "").replace("protected_", ""), &settings())
                .unwrap()
                .foreign
        );
        let empty = parse(r#"{"nftables": [{"table": {}}]}"#, &settings()).unwrap();
        assert!(!empty.foreign && !empty.drift.is_empty());
    }

    #[test]
    fn unreadable_listing_is_an_error() {
        for (from, to, refusal) in [
            (
                r#"{"set": [80, "#,
                r#"{"set": ["http", "#,
                "the chain 'tcp_from_0.0.0.0/0' has a rule that we cannot read: [{",
            ),
            (r#""right": 80}"#, r#""right": 65536}"#, "that we cannot read"),
            (r#"{"set": [80, "#, r#"{"set": [65536, "#, "that we cannot read"),
            (r#"{"set": [80, 9000]}"#, r#"{"set": 80}"#, "that we cannot read"),
            (r#"{"set": [80, 9000]}"#, r#""@mine""#, "that we cannot read"),
            (r#"{"set": [80, "#, r#"{"set": [0, "#, "no port range from 0 to 0"),
            (r#""right": 80}}, {"accept": null}"#, r#""right": 80}}, {"drop": null}"#, "that we cannot read"),
            (r#""right": 80}"#, r#""right": 0}"#, "no port range from 0 to 0"),
            (r#"{"range": [8000, 8080]}"#, r#"{"range": [8080, 8000]}"#, "no port range from 8080 to 8000"),
            (r#"{"range": [8000, 8080]}"#, r#"{"range": [8080]}"#, "that we cannot read"),
            (r#""expr""#, r#""mine""#, "has no 'expr'"),
            (r#""nftables""#, r#""iptables""#, "has no 'nftables'"),
            (r#"{"nftables""#, "", "is not JSON"),
        ] {
            let text = LISTING.replacen(from, to, 1);
            assert_ne!(text, LISTING, "{from}");
            let error = parse(&text, &settings()).unwrap_err().to_string();
            assert!(error.contains(refusal), "{error}");
        }
    }

    /// Converts a transaction to the listing that nft would print.
    fn listed(transaction: &str) -> String {
        let json: Value = serde_json::from_str(transaction).unwrap();
        let commands = json["nftables"].as_array().unwrap();
        let listed: Vec<&Value> = commands.iter().filter_map(|command| command.get("add")).collect();
        serde_json::json!({"nftables": listed}).to_string()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn rendered_tables_round_trip(
            ports in prop::collection::vec(
                (1u16..200, 0u16..9, any::<bool>(), any::<u128>(), 0u8..=128), 0..12
            )
        ) {
            let rules: RuleSet = ports.into_iter().map(|(from, more, tcp, bits, len)| {
                let address = if len <= 32 {
                    std::net::IpAddr::from((bits as u32).to_be_bytes())
                } else {
                    std::net::IpAddr::from(bits.to_be_bytes())
                };
                let proto = if tcp { Protocol::Tcp } else { Protocol::Udp };
                Rule::new(PortRange::new(from, from + more, proto).unwrap(), Cidr::new(address, len).unwrap())
            }).collect();
            for mode in [Mode::Enforce, Mode::AcceptOnly] {
                let settings = TableSettings { mode, ..settings() };
                let text = render(&settings, &rules, &Start::Anew);
                let found = parse(&listed(&text), &settings).unwrap();
                prop_assert_eq!(&found.rules, &rules);
                prop_assert_eq!((&found.drift, found.foreign), (&vec![], false));
                prop_assert_eq!(found.start_for(&rules), Start::Over { stale: vec![] });
            }
        }

        #[test]
        fn parser_never_panics(at in 0..LISTING.len(), byte in any::<u8>()) {
            let mut bytes = LISTING.as_bytes().to_vec();
            bytes[at] = byte;
            let text = String::from_utf8_lossy(&bytes);
            if let Err(error) = parse(&text, &settings()) {
                prop_assert!(["nft", "the chain"].iter().any(|start| error.to_string().starts_with(start)));
            }
            let cut = parse(&LISTING[..at], &settings());
            prop_assert!(cut.is_err() || LISTING[at..].trim().is_empty());
        }
    }
}
