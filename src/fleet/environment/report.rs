//! Which nodes a leader has, and what it stores about them. Pure.

use std::collections::BTreeMap;

use crate::fleet::manager::report::{FailedUnits, NodeReport};
use crate::fleet::manager::{NodeRule, NodeRules};
use crate::fleet::name::NodeName;
use crate::model::MachineId;
use crate::store::dependencies::Dependencies;
use crate::store::fleet::{MAX_FAILED_NAMES, NodeRecord, NodeRecords};
use crate::store::snapshot::Readable;

/// Returns the nodes of an environment, and the machines whose names cannot be read. Such a machine
/// keeps the node that it was before. If the permitted dependencies cannot be read, those that were
/// read before stay in force.
pub fn node_rules(
    names: &BTreeMap<MachineId, Readable<NodeName>>,
    dependencies: Option<&Dependencies>,
    before: &NodeRules,
) -> (NodeRules, Vec<(MachineId, String)>) {
    let (mut rules, mut unreadable) = (NodeRules::new(), Vec::new());
    for (&machine, name) in names {
        match name {
            Ok(name) => {
                let may_depend_on = match dependencies {
                    Some(all) => Some(all.get(name).cloned().unwrap_or_default()),
                    None => before.get(name).and_then(|rule| rule.may_depend_on.clone()),
                };
                rules.insert(name.clone(), NodeRule { may_depend_on, ..NodeRule::of_machine(machine) });
            }
            Err(problem) => {
                let known = before.iter().find(|(_, rule)| rule.machine == Some(machine));
                rules.extend(known.map(|(name, rule)| (name.clone(), rule.clone())));
                unreadable.push((machine, problem.clone()));
            }
        }
    }
    (rules, unreadable)
}

/// Returns the records of all nodes. A node that is offline keeps its failed units and the time at
/// which it was last seen, also by an earlier leader.
pub fn node_records(
    rules: &NodeRules,
    reports: &BTreeMap<NodeName, NodeReport>,
    failed: &FailedUnits,
    before: &NodeRecords,
) -> NodeRecords {
    let record = |name: &NodeName, rule: &NodeRule| {
        let known = before.get(name.as_str()).cloned().unwrap_or_default();
        let report = reports.get(name);
        let online = report.is_some_and(|report| report.online);
        let seen = report.map(|report| report.last_seen_ms).filter(|ms| *ms != 0);
        let units = failed.get(name);
        NodeRecord {
            machine: rule.machine.map(MachineId::number),
            online,
            address: report.and_then(|report| report.address.clone()),
            failed: units.map_or(known.failed, Vec::len),
            failed_units: units
                .map_or(known.failed_units, |units| units.iter().take(MAX_FAILED_NAMES).cloned().collect()),
            last_seen_ms: if online { None } else { seen.or(known.last_seen_ms) },
        }
    };
    rules.iter().map(|(name, rule)| (name.to_string(), record(name, rule))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    #[test]
    fn a_machine_with_an_unreadable_record_keeps_its_node() {
        let [first, second, third] = [0, 1, 2].map(MachineId::new);
        let names = [(first, Ok(name("web1"))), (second, Ok(name("1")))];
        let (before, unreadable) = node_rules(&names.into(), None, &NodeRules::new());
        assert_eq!(before.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["1", "web1"]);
        assert_eq!(unreadable, []);
        let broken = || Err("not JSON".to_owned());
        let names = [(first, broken()), (second, Ok(name("1"))), (third, broken())];
        let (rules, unreadable) = node_rules(&names.into(), None, &before);
        assert_eq!(rules, before, "a machine that was never read is no node");
        assert_eq!(unreadable.len(), 2);
        let (rules, _) = node_rules(&[(second, Ok(name("1")))].into(), None, &before);
        assert_eq!(rules.keys().map(NodeName::as_str).collect::<Vec<_>>(), ["1"], "web1 was removed");
    }

    #[test]
    fn permitted_dependencies_stay_in_force_while_they_cannot_be_read() {
        let names = || [(MachineId::new(0), Ok(name("web1")))].into();
        let (unknown, _) = node_rules(&names(), None, &NodeRules::new());
        assert_eq!(unknown[&name("web1")].may_depend_on, None);
        let dependencies = Dependencies::from([(name("web1"), [name("db1")].into())]);
        let (known, _) = node_rules(&names(), Some(&dependencies), &unknown);
        assert_eq!(known[&name("web1")].may_depend_on, Some([name("db1")].into()));
        assert_eq!(node_rules(&names(), None, &known).0, known);
        let (none, _) = node_rules(&names(), Some(&Dependencies::new()), &known);
        assert_eq!(none[&name("web1")].may_depend_on, Some([].into()));
    }

    #[test]
    fn an_offline_node_keeps_its_failed_units_and_the_time_it_was_seen() {
        let rules: NodeRules = [(name("web1"), NodeRule::of_machine(MachineId::new(4)))].into();
        let online = NodeReport { online: true, address: Some("192.0.2.1".to_owned()), last_seen_ms: 5_000 };
        let units: Vec<String> = (0..7).map(|number| format!("{number}.service")).collect();
        let failed = FailedUnits::from([(name("web1"), units.clone())]);
        let of = |report: NodeReport, failed: &FailedUnits, before: &NodeRecords| {
            node_records(&rules, &[(name("web1"), report)].into(), failed, before)
        };
        let first = of(online.clone(), &failed, &NodeRecords::new());
        let expected = NodeRecord {
            machine: Some(4),
            online: true,
            address: Some("192.0.2.1".to_owned()),
            failed: 7,
            failed_units: units[..MAX_FAILED_NAMES].to_vec(),
            last_seen_ms: None,
        };
        assert_eq!(first["web1"], expected);
        let later = NodeReport { last_seen_ms: 9_000, ..online };
        assert_eq!(of(later, &failed, &first), first, "time alone changes nothing");
        let lost = NodeReport { online: false, address: None, last_seen_ms: 9_000 };
        let second = of(lost, &FailedUnits::new(), &first);
        let expected = NodeRecord { online: false, address: None, last_seen_ms: Some(9_000), ..expected };
        assert_eq!(second["web1"], expected);
        // The next leader has not seen the node.
        let unseen = NodeReport { online: false, address: None, last_seen_ms: 0 };
        assert_eq!(of(unseen, &FailedUnits::new(), &second), second);
    }
}
