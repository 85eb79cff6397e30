//! The policy: ports and sources that are never opened, regardless of the store. Pure. The policy
//! file belongs to the controller, so that no write to the store can weaken it; the command line
//! reads it.

use crate::mutant;
use portcullis_provider::rule::{Cidr, PortRange, Protocol, Rule, RuleSet};
use serde::Deserialize;

/// The maximum size of a policy file in bytes.
pub const MAX_BYTES: usize = 64 * 1024;

/// Fewer than EC2's 60, so that rules created by hand still fit.
const MAX_RULES: usize = 50;
/// The kernel has no such limit; this one bounds the effect of a faulty charm.
const MAX_OWN_RULES: usize = 1_000;
/// The number of rules that fit into a machine's report, which is one znode.
const RULES_IN_REPORT_MAX: usize = 1_000;
const MAX_PORTS_IN_RANGE: u32 = 1_000;
const SSH: u16 = 22;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    forbidden_ports: Vec<PortRange>,
    forbidden_sources: Vec<Cidr>,
    /// A longer range is held back completely.
    max_ports_in_range: u32,
    /// The maximum number of rules on one machine, per address family.
    max_rules: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPolicy {
    #[error("{bytes} bytes are more than the {MAX_BYTES} allowed for a policy")]
    TooLarge { bytes: usize },
    /// An empty file is more likely truncated than intended as an empty policy.
    #[error("the file is empty; `{{}}` is a policy that changes nothing")]
    Empty,
    #[error("not a policy: {0}")]
    Syntax(String),
    #[error("{key}: {problem}")]
    Value { key: &'static str, problem: String },
}

/// The format of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    forbidden_ports: Option<Vec<String>>,
    #[serde(default)]
    forbidden_sources: Vec<String>,
    max_ports_in_range: Option<u32>,
    max_rules: Option<usize>,
}

/// Why a requested port stays closed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Denial {
    ForbiddenPort,
    ForbiddenSource(Cidr),
    RangeTooLong { max: u32 },
    TooManyRules { max: usize },
}

impl std::fmt::Display for Denial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Denial::ForbiddenPort => f.write_str("policy forbids the port"),
            Denial::ForbiddenSource(source) => write!(f, "policy forbids the source {source}"),
            Denial::RangeTooLong { max } => write!(f, "policy allows at most {max} ports in one range"),
            Denial::TooManyRules { max } => write!(f, "policy allows at most {max} rules on a machine"),
        }
    }
}

impl Policy {
    /// The policy without a file: SSH, the store's ports and the ports of Portcullis stay closed.
    pub fn with_own_ports(own: impl IntoIterator<Item = u16>) -> Self {
        Policy {
            forbidden_ports: std::iter::once(SSH).chain(own).filter_map(single_tcp).collect(),
            forbidden_sources: Vec::new(),
            max_ports_in_range: MAX_PORTS_IN_RANGE,
            max_rules: MAX_RULES,
        }
    }

    /// Like [`Policy::with_own_ports`], for a machine that manages its own firewall.
    pub fn for_own_machine(own: impl IntoIterator<Item = u16>) -> Self {
        Policy { max_rules: MAX_OWN_RULES, ..Policy::with_own_ports(own) }
    }

    /// Parses a policy file. The ports `own` are always forbidden; a list of ports in the file
    /// replaces the default, which is SSH.
    ///
    /// # Errors
    /// Why the file is invalid. A policy is never applied in part.
    pub fn parse(text: &str, own: impl IntoIterator<Item = u16>) -> Result<Self, InvalidPolicy> {
        Policy::with_own_ports(own).changed_by(text)
    }

    /// Returns this policy with the changes of a file; a list of ports in the file replaces the
    /// default, which is SSH.
    ///
    /// # Errors
    /// As for [`Policy::parse`].
    pub fn changed_by(self, text: &str) -> Result<Self, InvalidPolicy> {
        if text.len() > MAX_BYTES {
            return Err(InvalidPolicy::TooLarge { bytes: text.len() });
        }
        if is_empty(text) {
            return Err(InvalidPolicy::Empty);
        }
        let file: File =
            serde_saphyr::from_str(text).map_err(|err| InvalidPolicy::Syntax(one_line(&err.to_string())))?;
        let mut policy = self;
        if let Some(ports) = file.forbidden_ports {
            policy.forbidden_ports.retain(|range| range.from() != SSH);
            for text in ports {
                let range = crate::model::ports::parse_argument(&text).map_err(|err| {
                    InvalidPolicy::Value { key: "forbidden-ports", problem: err.to_string() }
                })?;
                policy.forbidden_ports.push(range);
            }
        }
        for text in file.forbidden_sources {
            let source = text.parse().map_err(|err: portcullis_provider::rule::InvalidCidr| {
                InvalidPolicy::Value { key: "forbidden-sources", problem: err.to_string() }
            })?;
            policy.forbidden_sources.push(source);
        }
        policy.max_ports_in_range = file.max_ports_in_range.unwrap_or(policy.max_ports_in_range);
        policy.max_rules = file.max_rules.unwrap_or(policy.max_rules);
        if policy.max_rules > RULES_IN_REPORT_MAX {
            let problem = format!("{} are more than the maximum of {RULES_IN_REPORT_MAX}", policy.max_rules);
            return Err(InvalidPolicy::Value { key: "max-rules", problem });
        }
        Ok(policy)
    }

    pub fn max_rules(&self) -> usize {
        self.max_rules
    }

    /// The part of a wanted range that may be opened to `source`, and the parts that are held back
    /// and why.
    pub fn check(&self, ports: PortRange, source: Cidr) -> (RuleSet, Vec<(PortRange, Denial)>) {
        if u32::from(ports.to() - ports.from()) >= self.max_ports_in_range {
            return (RuleSet::new(), vec![(ports, Denial::RangeTooLong { max: self.max_ports_in_range })]);
        }
        if let Some(forbidden) = self.forbids_source(source) {
            return (RuleSet::new(), vec![(ports, Denial::ForbiddenSource(forbidden))]);
        }
        let asked: RuleSet = [Rule::new(ports, source)].into_iter().collect();
        let allowed = if mutant!(PolicyNotApplied) { asked.clone() } else { self.permitted(&asked) };
        let held = asked.minus(&allowed).rules().map(|rule| (rule.ports, Denial::ForbiddenPort)).collect();
        (allowed, held)
    }

    /// The part of these rules whose ports and sources are not forbidden. The length of ranges is
    /// not checked: the limit applies to requests, and rules may be merged from several requests.
    pub fn permitted(&self, rules: &RuleSet) -> RuleSet {
        let denied = rules.rules().flat_map(|rule| {
            let whole = self.forbids_source(rule.source).is_some().then_some(rule.ports);
            let ports = whole.into_iter().chain(self.forbidden_ports.iter().copied());
            ports.map(move |ports| Rule::new(ports, rule.source))
        });
        rules.minus(&denied.collect())
    }

    fn forbids_source(&self, source: Cidr) -> Option<Cidr> {
        self.forbidden_sources.iter().copied().find(|forbidden| overlap(*forbidden, source))
    }

    /// Whether [`Policy::check`] would hold nothing back. Fast path for most ports.
    pub fn allows_all(&self, ports: PortRange, source: Cidr) -> bool {
        u32::from(ports.to() - ports.from()) < self.max_ports_in_range
            && self.forbids_source(source).is_none()
            && !self.touches_forbidden(ports)
    }

    fn touches_forbidden(&self, ports: PortRange) -> bool {
        self.forbidden_ports.iter().any(|range| {
            range.proto() == ports.proto() && range.from() <= ports.to() && ports.from() <= range.to()
        })
    }
}

/// Whether a YAML text has only blank lines, comments and document markers.
fn is_empty(text: &str) -> bool {
    let mut lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    lines.all(|line| line.is_empty() || line.starts_with('#') || matches!(line, "---" | "..." | "~" | "null"))
}

fn single_tcp(port: u16) -> Option<PortRange> {
    PortRange::single(port, Protocol::Tcp).ok()
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Two blocks overlap exactly if the shorter prefix contains both.
fn overlap(a: Cidr, b: Cidr) -> bool {
    let len = a.prefix_len().min(b.prefix_len());
    a.family() == b.family() && Cidr::new(a.network(), len) == Cidr::new(b.network(), len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: u16, to: u16) -> PortRange {
        PortRange::new(from, to, Protocol::Tcp).unwrap()
    }

    fn checked(policy: &Policy, from: u16, to: u16, source: &str) -> (Vec<String>, Vec<String>) {
        let (allowed, held) = policy.check(range(from, to), source.parse().unwrap());
        assert_eq!(policy.allows_all(range(from, to), source.parse().unwrap()), held.is_empty());
        (
            allowed.rules().map(|rule| rule.ports.to_string()).collect(),
            held.into_iter().map(|(ports, why)| format!("{ports}: {why}")).collect(),
        )
    }

    #[test]
    fn by_default_ssh_and_own_ports_stay_closed() {
        let policy = Policy::with_own_ports([2181]);
        assert_eq!(checked(&policy, 80, 80, "0.0.0.0/0"), (vec!["80/tcp".into()], vec![]));
        assert_eq!(
            checked(&policy, 22, 22, "0.0.0.0/0"),
            (vec![], vec!["22/tcp: policy forbids the port".into()])
        );
        assert_eq!(
            checked(&policy, 2180, 2182, "::/0"),
            (vec!["2180/tcp".into(), "2182/tcp".into()], vec!["2181/tcp: policy forbids the port".into()])
        );
    }

    #[test]
    fn a_file_replaces_ssh_but_never_own_ports() {
        let text = "forbidden-ports: [8080/udp, 9000-9010]\nforbidden-sources: [10.1.0.0/16]\n\
                    max-ports-in-range: 5\nmax-rules: 2\n";
        let policy = Policy::parse(text, [2181]).unwrap();
        assert_eq!(policy.max_rules(), 2);
        assert_eq!(checked(&policy, 22, 22, "10.2.0.0/16").1, Vec::<String>::new());
        assert_eq!(checked(&policy, 9005, 9005, "10.2.0.0/16").0, Vec::<String>::new());
        assert_eq!(checked(&policy, 2181, 2181, "10.2.0.0/16").0, Vec::<String>::new());
        assert_eq!(
            checked(&policy, 80, 85, "10.2.0.0/16").1,
            ["80-85/tcp: policy allows at most 5 ports in one range"]
        );
        for (source, held) in
            [("10.0.0.0/8", true), ("10.1.2.0/24", true), ("10.2.0.0/16", false), ("0.0.0.0/0", true)]
        {
            assert_eq!(checked(&policy, 80, 80, source).0.is_empty(), held, "{source}");
        }
    }

    #[test]
    fn an_invalid_policy_is_refused_completely() {
        for (text, part) in [
            ("forbidden-prots: [22]", "forbidden-prots"),
            ("forbidden-ports: [eighty]", "forbidden-ports: Invalid port, must be an integer, got 'eighty'"),
            ("forbidden-sources: [10.0.0.0/99]", "forbidden-sources: not a block of addresses"),
            ("max-rules: many", "not a policy"),
            ("max-rules: 1001", "max-rules: 1001 are more than the maximum of 1000"),
            ("[1, 2]", "not a policy"),
        ] {
            let err = Policy::parse(text, []).unwrap_err().to_string();
            assert!(err.contains(part) && !err.contains('\n'), "{text}: {err}");
        }
        assert!(Policy::parse(&" ".repeat(MAX_BYTES + 1), []).is_err());
    }

    #[test]
    fn an_empty_policy_is_refused() {
        for text in
            ["", "\n", " \t\n \r\n", "# max-rules: 3\n", "---\n# all\n...\n", "\u{feff}", "~\n", "null"]
        {
            assert_eq!(Policy::parse(text, [2181]), Err(InvalidPolicy::Empty), "{text:?}");
        }
        assert_eq!(Policy::parse("{}\n", [2181]), Ok(Policy::with_own_ports([2181])), "the control");
        assert_eq!(Policy::parse("# three\nmax-rules: 3\n", []).map(|policy| policy.max_rules()), Ok(3));
    }
}
