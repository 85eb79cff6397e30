//! The controller's report on a machine, and its JSON. Pure. One znode per machine, read by
//! `status` and `explain`, and by the controller itself for the rules that each unit had.

use std::collections::BTreeMap;

use portcullis_provider::rule::{Cidr, PortRange, Rule, RuleSet};
use serde_json::{Map, Value, json};

use super::plan::LastGranted;
use super::wanted::DeniedPort;
use crate::model::UnitId;
use crate::model::ports::parse_argument;

/// The maximum size of a report in bytes, below the limit of the store.
const MAX_BYTES: usize = 60 * 1024;

/// A report with at most this many rules and other items always fits.
const SURELY_FEW: usize = 100;

/// The problem of a machine that has no instance yet. Status does not print it.
pub const NOT_PROVISIONED: &str = "not provisioned yet";

/// The problem of a machine whose group the provider does not have.
pub const NO_GROUP: &str = "the provider has no group for its rules";

/// The problem of a machine without a report.
pub const NO_REPORT: &str = "no controller has reported on this machine yet";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Describes the machine's own firewall, if that has the rules instead of the controller's
    /// provider.
    pub by: Option<String>,
    pub granted: LastGranted,
    /// Names of the units in `granted`. For a removed unit this is the only record of its name.
    pub names: BTreeMap<UnitId, String>,
    /// Wanted rules that are not open yet.
    pub pending: Vec<Rule>,
    pub denied: Vec<(UnitId, PortRange, String)>,
    /// The number of held ports that are not listed in `held`.
    pub more_denied: usize,
    pub frozen: BTreeMap<UnitId, String>,
    /// The changes that a dry run would make, as text; empty if there are none.
    pub dry_run: Option<String>,
    /// Why the machine does not have the wanted rules, if it does not.
    pub problem: Option<String>,
    /// A problem of the machine itself, from provisioning. Without another problem it is also
    /// `problem`.
    pub note: Option<String>,
    /// Foreign rules, as text.
    pub foreign: Vec<String>,
    /// The machine is not reachable over IPv6, so no IPv6 rules are opened.
    pub no_ipv6: bool,
}

/// Data that is not a valid report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a firewall report: {0}")]
pub struct InvalidReport(String);

impl Report {
    /// Whether changes are incomplete and the controller will continue with them.
    pub fn is_pending(&self) -> bool {
        self.problem.is_some() || (!self.pending.is_empty() && self.dry_run.is_none())
    }

    pub fn denied_from(held: &[DeniedPort]) -> Vec<(UnitId, PortRange, String)> {
        held.iter().map(|held| (held.unit, held.ports, held.reason.to_string())).collect()
    }

    /// Shortens the report to the maximum size. Held ports that do not fit are only counted.
    /// Granted and pending rules are included completely or not at all, because readers treat rules
    /// that are granted and not pending as open.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let rules = self.granted.values().map(RuleSet::len).sum::<usize>() + self.pending.len();
        if rules + self.denied.len() + self.foreign.len() + self.frozen.len() <= SURELY_FEW {
            return self;
        }
        while self.to_bytes().len() > MAX_BYTES {
            if self.denied.is_empty() && self.foreign.is_empty() {
                return self.without_rules(rules);
            }
            let kept = self.denied.len() / 2;
            self.more_denied += self.denied.len() - kept;
            self.denied.truncate(kept);
            self.foreign.truncate(self.foreign.len() / 2);
        }
        self
    }

    fn without_rules(self, rules: usize) -> Self {
        let problem = format!("{rules} rules for its units are too many to list");
        let problem = self.problem.map_or_else(|| problem.clone(), |first| format!("{first}; {problem}"));
        Report {
            problem: Some(problem),
            by: self.by,
            dry_run: self.dry_run,
            note: self.note,
            more_denied: self.more_denied,
            no_ipv6: self.no_ipv6,
            ..Report::default()
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        self.to_json().to_string().into_bytes()
    }

    fn to_json(&self) -> Value {
        let by_unit = |(unit, rules): (&UnitId, &RuleSet)| (unit.key(), rules_json(rules.rules()));
        let mut json = json!({"granted": self.granted.iter().map(by_unit).collect::<Map<_, _>>()});
        if !self.names.is_empty() {
            let name = |(unit, name): (&UnitId, &String)| (unit.key(), Value::from(name.as_str()));
            json["names"] = Value::Object(self.names.iter().map(name).collect());
        }
        if let Some(by) = &self.by {
            json["by"] = Value::from(by.as_str());
        }
        if let Some(changes) = &self.dry_run {
            json["dry-run"] = Value::from(changes.as_str());
        }
        if !self.pending.is_empty() {
            json["pending"] = rules_json(self.pending.iter().copied());
        }
        for (unit, ports, reason) in &self.denied {
            let ports_json = &mut json["held"][unit.key()][reason.as_str()];
            match ports_json.as_array_mut() {
                Some(list) => list.push(Value::from(ports.to_string())),
                None => *ports_json = json!([ports.to_string()]),
            }
        }
        if self.more_denied > 0 {
            json["held-besides"] = Value::from(self.more_denied);
        }
        if !self.frozen.is_empty() {
            let frozen = |(unit, reason): (&UnitId, &String)| (unit.key(), Value::from(reason.as_str()));
            json["frozen"] = Value::Object(self.frozen.iter().map(frozen).collect());
        }
        if let Some(problem) = &self.problem {
            json["problem"] = Value::from(problem.as_str());
        }
        if let Some(note) = &self.note {
            json["note"] = Value::from(note.as_str());
        }
        if !self.foreign.is_empty() {
            json["foreign"] = self.foreign.iter().map(String::as_str).collect();
        }
        if self.no_ipv6 {
            json["ipv6"] = Value::from(false);
        }
        json
    }

    /// # Errors
    /// Why the data is invalid. An unreadable report is not treated as empty.
    pub fn parse(data: &[u8]) -> Result<Self, InvalidReport> {
        let value: Value = serde_json::from_slice(data).map_err(|err| InvalidReport(err.to_string()))?;
        let bad = |what: &str| InvalidReport(what.to_owned());
        let unit = |key: &str| UnitId::from_key(key).map_err(|err| InvalidReport(err.to_string()));
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut report = Report::default();
        for (key, rules) in value["granted"].as_object().ok_or_else(|| bad("\"granted\" is missing"))? {
            let rules = parse_rules(rules).ok_or_else(|| bad("a rule is wrong"))?;
            report.granted.insert(unit(key)?, rules.into_iter().collect());
        }
        // Older versions wrote no names.
        for (key, name) in value["names"].as_object().into_iter().flatten() {
            report.names.insert(unit(key)?, name.as_str().unwrap_or_default().to_owned());
        }
        if let Some(pending) = value.get("pending") {
            report.pending = parse_rules(pending).ok_or_else(|| bad("a rule is wrong"))?;
        }
        // The previous version wrote a list, which is ignored; the controller's next report
        // replaces it.
        for (key, reasons) in value["held"].as_object().into_iter().flatten() {
            for (reason, ports) in reasons.as_object().into_iter().flatten() {
                for ports in list(ports) {
                    let ports = parse_argument(ports.as_str().ok_or_else(|| bad("\"held\" is wrong"))?);
                    let ports = ports.map_err(|err| InvalidReport(err.to_string()))?;
                    report.denied.push((unit(key)?, ports, reason.clone()));
                }
            }
        }
        for (key, reason) in value["frozen"].as_object().into_iter().flatten() {
            report.frozen.insert(unit(key)?, reason.as_str().unwrap_or_default().to_owned());
        }
        report.more_denied =
            value["held-besides"].as_u64().and_then(|more| usize::try_from(more).ok()).unwrap_or(0);
        report.no_ipv6 = value["ipv6"] == false;
        report.by = value["by"].as_str().map(str::to_owned);
        report.dry_run = value["dry-run"].as_str().map(str::to_owned);
        report.problem = value["problem"].as_str().map(str::to_owned);
        report.note = value["note"].as_str().map(str::to_owned);
        report.foreign =
            list(&value["foreign"]).iter().filter_map(|text| text.as_str().map(str::to_owned)).collect();
        Ok(report)
    }
}

/// Groups rules by source, because most rules share one.
fn rules_json(rules: impl Iterator<Item = Rule>) -> Value {
    let mut by_source: BTreeMap<Cidr, Vec<Value>> = BTreeMap::new();
    for rule in rules {
        by_source.entry(rule.source).or_default().push(Value::from(rule.ports.to_string()));
    }
    by_source.into_iter().map(|(source, ports)| (source.to_string(), Value::from(ports))).collect()
}

fn parse_rules(value: &Value) -> Option<Vec<Rule>> {
    let mut rules = Vec::new();
    // The format of older versions: a list of single rules.
    for rule in value.as_array().into_iter().flatten() {
        let ports = parse_argument(rule["ports"].as_str()?).ok()?;
        rules.push(Rule::new(ports, rule["from"].as_str()?.parse().ok()?));
    }
    if value.is_array() {
        return Some(rules);
    }
    for (source, ports) in value.as_object()? {
        let source: Cidr = source.parse().ok()?;
        for ports in ports.as_array()? {
            rules.push(Rule::new(parse_argument(ports.as_str()?).ok()?, source));
        }
    }
    Some(rules)
}

#[cfg(test)]
mod tests {
    use super::*;
    use portcullis_provider::rule::Protocol;

    fn sample() -> Report {
        let ports = PortRange::new(80, 81, Protocol::Tcp).unwrap();
        let rule = Rule::new(ports, Cidr::WORLD_V6);
        Report {
            by: Some("nftables".into()),
            granted: LastGranted::from([(UnitId::new(3), [rule].into_iter().collect())]),
            names: BTreeMap::from([(UnitId::new(3), "web/3".into())]),
            dry_run: Some("would open 80-81/tcp from ::/0".into()),
            pending: vec![rule],
            denied: vec![(UnitId::new(3), ports, "policy forbids the port".into())],
            more_denied: 4,
            frozen: BTreeMap::from([(UnitId::new(4), "garbage".into())]),
            problem: Some("throttled".into()),
            note: Some("its instance is gone".into()),
            foreign: vec!["22/tcp from 10.0.0.0/8".into()],
            no_ipv6: true,
        }
    }

    #[test]
    fn a_report_is_parsed_as_written() {
        for report in [sample(), Report::default()] {
            assert_eq!(Report::parse(&report.to_bytes()), Ok(report));
        }
    }

    #[test]
    fn a_dry_run_is_not_pending_and_a_problem_is() {
        let waiting = Report { problem: None, dry_run: None, ..sample() };
        assert!(waiting.is_pending());
        let dry = Report { dry_run: Some("would open 80/tcp".into()), ..waiting };
        assert!(!dry.is_pending());
        assert!(Report { problem: Some("throttled".into()), ..dry }.is_pending());
    }

    #[test]
    fn a_report_of_an_older_version_is_parsed() {
        let old = r#"{"granted": {"unit-0000000003": [{"ports": "80-81/tcp", "from": "::/0"}]},
            "pending": [{"ports": "80-81/tcp", "from": "::/0"}]}"#;
        let Report { granted, pending, .. } = sample();
        assert_eq!(Report::parse(old.as_bytes()), Ok(Report { granted, pending, ..Report::default() }));
    }

    #[test]
    fn invalid_data_is_not_an_empty_report() {
        for text in [
            "",
            "[]",
            "{}",
            r#"{"granted": {"unit-x": {}}}"#,
            r#"{"granted": {"unit-0000000001": [{}]}}"#,
            r#"{"granted": {}, "pending": 7}"#,
        ] {
            assert!(Report::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_long_report_counts_omitted_ports_and_lists_open_rules_completely_or_not_at_all() {
        let ports = |n: u16| PortRange::single(2 * n + 1, Protocol::Tcp).unwrap();
        let rules = |count: u16| (0..count).map(move |n| Rule::new(ports(n), Cidr::WORLD_V4));
        let held = |n| (UnitId::new(3), ports(n), "policy allows at most 1000 rules on a machine".to_owned());
        let long = |granted, pending, held_back| Report {
            granted: LastGranted::from([(UnitId::new(3), rules(granted).collect())]),
            pending: rules(pending).collect(),
            denied: (0..held_back).map(held).collect(),
            foreign: vec!["x".repeat(100); 1_000],
            ..sample()
        };
        for report in [long(1_000, 1_000, 10), long(50, 0, 30_000), long(20_000, 20_000, 500)] {
            let kept = report.clone().bounded();
            assert!(kept.to_bytes().len() <= MAX_BYTES, "{}", kept.to_bytes().len());
            assert_eq!(kept.denied.len() + kept.more_denied, report.denied.len() + report.more_denied);
            assert_eq!(kept.clone().bounded(), kept, "else every pass would write it");
            assert_eq!(Report::parse(&kept.to_bytes()), Ok(kept.clone()));
            if kept.granted.is_empty() {
                assert!(kept.pending.is_empty() && kept.problem.unwrap().contains("40000 rules"));
            } else {
                assert_eq!((&kept.granted, &kept.pending), (&report.granted, &report.pending));
            }
        }
        assert!(!long(1_000, 1_000, 10).bounded().granted.is_empty(), "the maximum of a machine fits");
    }
}
