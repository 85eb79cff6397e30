//! The reports on one machine's firewall: by the controller, by the machine itself, or by both, if
//! packets pass a cloud's group and the machine's own table. Converts data of the tree to
//! explanations. Pure.

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
    looked_after: bool,
}

impl MachineReports {
    /// The paths of the data, in the order of [`MachineReports::read`].
    pub fn places(machine: MachineId) -> [NodePath; 3] {
        [paths::firewall_report(machine), paths::machine_firewall(machine), paths::machine_agent(machine)]
    }

    /// Parses the data of [`MachineReports::places`]; an `Err` is the reason why data may not be read.
    pub fn read(machine: MachineId, [controller, own, agent]: [Readable<Option<Vec<u8>>>; 3]) -> Self {
        let parse = |path: NodePath, data: Readable<Option<Vec<u8>>>| -> Option<Readable<Report>> {
            let parsed = |data: Vec<u8>| Report::parse(&data).map_err(|err| format!("{path}: {err}"));
            data.map_or_else(|refused| Some(Err(refused)), |data| data.map(parsed))
        };
        Self {
            machine,
            controller: parse(paths::firewall_report(machine), controller),
            own: parse(paths::machine_firewall(machine), own),
            looked_after: !matches!(agent, Ok(None)),
        }
    }

    /// One explanation, or two if a packet has to pass both firewalls.
    pub fn explain(&self, view: &View, on: &[UnitId]) -> Vec<Explained> {
        let Some(own) = &self.own else {
            return vec![explain(view, self.machine, on, self.controller.as_ref())];
        };
        let mut first = explain(view, self.machine, on, Some(own));
        first.by.get_or_insert_with(|| "the machine's own".to_owned());
        if !self.looked_after {
            let down = "the machine's agent is down, and this is what it said last";
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

    fn said(nodes: [Option<&str>; 3]) -> Vec<(Option<String>, Option<String>)> {
        let told = MachineReports::read(M, nodes.map(|node| Ok(node.map(|text| text.as_bytes().to_vec()))));
        told.explain(&View::default(), &[]).into_iter().map(|said| (said.by, said.problem)).collect()
    }

    #[test]
    fn who_said_it_is_told_where_it_matters() {
        let (plain, own) = (r#"{"granted": {}}"#, r#"{"granted": {}, "by": "nftables"}"#);
        let some = |text: &str| Some(text.to_owned());
        let nobody = some("no controller has reported on this machine yet");
        let down = some("the machine's agent is down, and this is what it said last");
        let provider = some("the controller's provider");
        for (nodes, expected) in [
            ([None, None, None], vec![(None, nobody)]),
            ([Some(plain), None, None], vec![(None, None)]),
            ([None, Some(own), Some("")], vec![(some("nftables"), None)]),
            ([None, Some(own), None], vec![(some("nftables"), down)]),
            ([Some(plain), Some(own), Some("")], vec![(some("nftables"), None), (provider, None)]),
        ] {
            assert_eq!(said(nodes), expected, "{nodes:?}");
        }
        let garbled = said([None, Some("{"), Some("")]);
        assert_eq!(garbled[0].0.as_deref(), Some("the machine's own"));
        let problem = garbled[0].1.as_deref().unwrap();
        assert!(problem.starts_with("/machines/machine-0000000000/firewall: "), "{problem}");
        let refused =
            MachineReports::read(M, [Ok(None), Err("kept from others".to_owned()), Ok(Some(Vec::new()))]);
        let problem = refused.explain(&View::default(), &[]).remove(0).problem;
        assert_eq!(problem.as_deref(), Some("kept from others"));
    }
}
