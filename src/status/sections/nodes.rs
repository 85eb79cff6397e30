//! The nodes of the fleet: the machines whose systemd a manager controls. Pure.

use super::Section;
use crate::status::view::View;
use crate::store::fleet::NodeRecords;
use crate::store::snapshot::Readable;

/// The nodes as the leading manager has stored them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes(pub Readable<NodeRecords>);

impl Default for Nodes {
    fn default() -> Self {
        Self(Ok(NodeRecords::new()))
    }
}

impl Section for Nodes {
    fn add_to(&self, view: &mut View) {
        match &self.0 {
            Ok(nodes) => view.nodes.clone_from(nodes),
            Err(problem) => view.nodes_error = Some(problem.clone()),
        }
    }
}
