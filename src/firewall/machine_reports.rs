//! The reports on one machine's firewall: by the controller, by the machine itself, or by both, if
//! packets pass a cloud's group and the machine's own table. Pure. Converts data of the tree to
//! explanations.

use super::explain::{Explained, explain};
use super::observe::{Readable, View};
use super::report::Report;
use crate::model::{MachineId, UnitId};
use crate::store::paths::{self, NodePath};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineReports {
    machine: MachineId,
    controller: Option<Readable<Report>>,
    own: Option<Readable<Report>>,
    /// Whether the machine's agent is running.
    agent_is_up: bool,
}

impl MachineReports {
    /// The paths of the data, in the order of [`MachineReports::read`].
    pub fn paths(machine: MachineId) -> [NodePath; 3] {
        [paths::firewall_report(machine), paths::machine_firewall(machine), paths::machine_agent(machine)]
    }

    /// Parses the data of [`MachineReports::paths`]; an `Err` is the reason why data may not be
    /// read.
    pub fn read(machine: MachineId, [controller, own, agent]: [Readable<Option<Vec<u8>>>; 3]) -> Self {
        let parse = |path: NodePath, data: Readable<Option<Vec<u8>>>| -> Option<Readable<Report>> {
            let parsed = |data: Vec<u8>| Report::parse(&data).map_err(|err| format!("{path}: {err}"));
            data.map_or_else(|refused| Some(Err(refused)), |data| data.map(parsed))
        };
        Self {
            machine,
            controller: parse(paths::firewall_report(machine), controller),
            own: parse(paths::machine_firewall(machine), own),
            agent_is_up: !matches!(agent, Ok(None)),
        }
    }

    /// One explanation, or two if a packet has to pass both firewalls.
    pub fn explain(&self, view: &View, on: &[UnitId]) -> Vec<Explained> {
        let Some(own) = &self.own else {
            return vec![explain(view, self.machine, on, self.controller.as_ref())];
        };
        let mut first = explain(view, self.machine, on, Some(own));
        first.by.get_or_insert_with(|| "the machine's own".to_owned());
        if !self.agent_is_up {
            let down = "the machine's agent is down; this is its last report";
            first.problem.get_or_insert_with(|| down.to_owned());
        }
        let second = self.controller.as_ref().map(|report| {
            let by = Some("the controller's provider".to_owned());
            Explained { by, ..explain(view, self.machine, on, Some(report)) }
        });
        std::iter::once(first).chain(second).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: MachineId = MachineId::new(0);

    fn explained(nodes: [Option<&str>; 3]) -> Vec<(Option<String>, Option<String>)> {
        let reports =
            MachineReports::read(M, nodes.map(|node| Ok(node.map(|text| text.as_bytes().to_vec()))));
        reports.explain(&View::default(), &[]).into_iter().map(|one| (one.by, one.problem)).collect()
    }

    #[test]
    fn the_source_of_a_report_is_shown_where_there_may_be_two() {
        let (plain, own) = (r#"{"granted": {}}"#, r#"{"granted": {}, "by": "nftables"}"#);
        let some = |text: &str| Some(text.to_owned());
        let no_report = some("no controller has reported on this machine yet");
        let down = some("the machine's agent is down; this is its last report");
        let provider = some("the controller's provider");
        for (nodes, expected) in [
            ([None, None, None], vec![(None, no_report)]),
            ([Some(plain), None, None], vec![(None, None)]),
            ([None, Some(own), Some("")], vec![(some("nftables"), None)]),
            ([None, Some(own), None], vec![(some("nftables"), down)]),
            ([Some(plain), Some(own), Some("")], vec![(some("nftables"), None), (provider, None)]),
        ] {
            assert_eq!(explained(nodes), expected, "{nodes:?}");
        }
        let invalid = explained([None, Some("{"), Some("")]);
        assert_eq!(invalid[0].0.as_deref(), Some("the machine's own"));
        let problem = invalid[0].1.as_deref().unwrap();
        assert!(problem.starts_with("/machines/machine-0000000000/firewall: "), "{problem}");
        let refused =
            MachineReports::read(M, [Ok(None), Err("kept from others".to_owned()), Ok(Some(Vec::new()))]);
        let problem = refused.explain(&View::default(), &[]).remove(0).problem;
        assert_eq!(problem.as_deref(), Some("kept from others"));
    }
}
