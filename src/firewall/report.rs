//! What the agent says about a machine: kept in the tree, one znode a machine, for `status` and `explain`, and as the
//! agent's own memory of what each unit had. Pure: values and their JSON.

use std::collections::BTreeMap;

use portcullis_provider::rule::{Cidr, PortRange, Rule, RuleSet};
use serde_json::{Map, Value, json};

use super::plan::LastGranted;
use super::wanted::HeldBack;
use crate::model::UnitId;
use crate::model::ports::parse_argument;

/// The most bytes that a report may have; beyond it details are left out, never the memory of what was granted.
pub const MAX_BYTES: usize = 60 * 1024;

/// Why nothing can be done for a machine that has no instance so far. Status shows that without words.
pub const NOT_PROVISIONED: &str = "not provisioned yet";

/// Why nothing is known.
pub const NOBODY: &str = "no controller has reported on this machine yet";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// What holds the rules, where that is not the controller's provider: the machine itself, in words.
    pub by: Option<String>,
    pub granted: LastGranted,
    /// Wanted and not open yet.
    pub pending: Vec<Rule>,
    pub held: Vec<(UnitId, PortRange, String)>,
    pub frozen: BTreeMap<UnitId, String>,
    /// Why the machine is not as it should be, if it is not.
    pub problem: Option<String>,
    /// What is wrong with the machine itself, as provisioning said last; it is the problem, too, where there is no other.
    pub note: Option<String>,
    /// Rules of others that were seen, in words.
    pub foreign: Vec<String>,
}

/// A report that does not hold what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a firewall report: {0}")]
pub struct InvalidReport(String);

impl Report {
    /// Not everything is as it should be, and it is worth waiting for.
    pub fn is_pending(&self) -> bool {
        self.problem.is_some() || !self.pending.is_empty()
    }

    pub fn held_from(held: &[HeldBack]) -> Vec<(UnitId, PortRange, String)> {
        held.iter().map(|held| (held.unit, held.ports, held.reason.to_string())).collect()
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let full = self.to_json().to_string().into_bytes();
        if full.len() <= MAX_BYTES {
            return full;
        }
        let short = Report {
            by: self.by.clone(),
            granted: self.granted.clone(),
            problem: self.problem.clone(),
            note: self.note.clone(),
            ..Report::default()
        };
        short.to_json().to_string().into_bytes()
    }

    fn to_json(&self) -> Value {
        let by_unit =
            |(unit, rules): (&UnitId, &RuleSet)| (unit.key(), rules.rules().map(rule_json).collect());
        let mut json = json!({"granted": self.granted.iter().map(by_unit).collect::<Map<_, _>>()});
        if let Some(by) = &self.by {
            json["by"] = Value::from(by.as_str());
        }
        if !self.pending.is_empty() {
            json["pending"] = self.pending.iter().copied().map(rule_json).collect();
        }
        if !self.held.is_empty() {
            let held = |(unit, ports, reason): &(UnitId, PortRange, String)| json!({"unit": unit.key(), "ports": ports.to_string(), "reason": reason});
            json["held"] = self.held.iter().map(held).collect();
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
        json
    }

    /// # Errors
    /// What is wrong with it. A memory that cannot be read is not an empty one.
    pub fn parse(data: &[u8]) -> Result<Self, InvalidReport> {
        let value: Value = serde_json::from_slice(data).map_err(|err| InvalidReport(err.to_string()))?;
        let bad = |what: &str| InvalidReport(what.to_owned());
        let unit = |key: &str| UnitId::from_key(key).map_err(|err| InvalidReport(err.to_string()));
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut report = Report::default();
        for (key, rules) in value["granted"].as_object().ok_or_else(|| bad("\"granted\" is missing"))? {
            let rules = rules.as_array().ok_or_else(|| bad("\"granted\" is no list"))?;
            let rules: Option<RuleSet> = rules.iter().map(parse_rule).collect();
            report.granted.insert(unit(key)?, rules.ok_or_else(|| bad("a rule is wrong"))?);
        }
        report.pending = list(&value["pending"])
            .iter()
            .map(parse_rule)
            .collect::<Option<_>>()
            .ok_or_else(|| bad("a rule is wrong"))?;
        for held in list(&value["held"]) {
            let text = |key: &str| held[key].as_str().ok_or_else(|| bad("\"held\" is wrong"));
            let ports = parse_argument(text("ports")?).map_err(|err| InvalidReport(err.to_string()))?;
            report.held.push((unit(text("unit")?)?, ports, text("reason")?.to_owned()));
        }
        for (key, reason) in value["frozen"].as_object().into_iter().flatten() {
            report.frozen.insert(unit(key)?, reason.as_str().unwrap_or_default().to_owned());
        }
        report.by = value["by"].as_str().map(str::to_owned);
        report.problem = value["problem"].as_str().map(str::to_owned);
        report.note = value["note"].as_str().map(str::to_owned);
        report.foreign =
            list(&value["foreign"]).iter().filter_map(|text| text.as_str().map(str::to_owned)).collect();
        Ok(report)
    }
}

fn rule_json(rule: Rule) -> Value {
    json!({"ports": rule.ports.to_string(), "from": rule.source.to_string()})
}

fn parse_rule(value: &Value) -> Option<Rule> {
    let ports = parse_argument(value["ports"].as_str()?).ok()?;
    let source: Cidr = value["from"].as_str()?.parse().ok()?;
    Some(Rule::new(ports, source))
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
            pending: vec![rule],
            held: vec![(UnitId::new(3), ports, "policy forbids the port".into())],
            frozen: BTreeMap::from([(UnitId::new(4), "garbage".into())]),
            problem: Some("throttled".into()),
            note: Some("its instance is gone".into()),
            foreign: vec!["22/tcp from 10.0.0.0/8".into()],
        }
    }

    #[test]
    fn a_report_survives_the_tree() {
        for report in [sample(), Report::default()] {
            assert_eq!(Report::parse(&report.to_bytes()), Ok(report));
        }
    }

    #[test]
    fn what_is_no_report_is_no_empty_memory() {
        for text in
            ["", "[]", "{}", r#"{"granted": {"unit-x": []}}"#, r#"{"granted": {"unit-0000000001": [{}]}}"#]
        {
            assert!(Report::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_report_that_is_too_long_keeps_its_memory() {
        let mut report = sample();
        report.foreign = vec!["x".repeat(100); 1000];
        let short = Report::parse(&report.to_bytes()).unwrap();
        assert_eq!((short.granted, short.problem), (report.granted, report.problem));
        assert!(short.foreign.is_empty());
    }
}
