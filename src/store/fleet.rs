//! The nodes of the fleet as `juju status` shows them: one znode, which the leading manager writes
//! when a node is connected or lost, and when systemd units fail or recover.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::acl::Roles;
use super::error::Error;
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::records::corrupt;
use super::snapshot::Readable;
use super::tree::{self, Tree, Write};
use super::update::ensure;

/// Failed systemd units whose names are stored for each node.
pub const MAX_FAILED_NAMES: usize = 5;

/// One node. The content changes only with the state of the node: the time at which it was last
/// seen is stored when it is lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct NodeRecord {
    /// The number of its machine.
    pub machine: Option<u32>,
    pub online: bool,
    /// The address of the connected agent.
    pub address: Option<String>,
    /// The number of failed systemd units.
    pub failed: usize,
    /// The names of some of them, at most [`MAX_FAILED_NAMES`].
    pub failed_units: Vec<String>,
    /// Milliseconds since 1970; only while the node is offline.
    pub last_seen_ms: Option<u64>,
}

impl NodeRecord {
    pub fn status(&self) -> &'static str {
        if self.online { "online" } else { "offline" }
    }
}

pub type NodeRecords = BTreeMap<String, NodeRecord>;

fn parse(path: &NodePath, data: &[u8]) -> Result<NodeRecords, Error> {
    serde_json::from_slice(data).map_err(|error| corrupt(path, format!("not a list of nodes: {error}")))
}

/// Reads the nodes. There are none until a manager has led in this environment.
pub async fn nodes<T: Tree>(tree: &T) -> Result<Readable<NodeRecords>, tree::Error> {
    let path = paths::fleet_nodes();
    let Some(node) = tree.find(&path).await? else { return Ok(Ok(NodeRecords::new())) };
    Ok(parse(&path, &node.data).map_err(|problem| problem.to_string()))
}

/// Writes the nodes while `lease` is held. Equal content is not written.
pub async fn write_nodes<T: Tree>(
    tree: &T,
    roles: &Roles,
    lease: &Lease,
    nodes: &NodeRecords,
) -> Result<(), tree::Error> {
    ensure(tree, &paths::fleet(), &roles.controllers()).await?;
    let path = paths::fleet_nodes();
    // A map with text keys is always valid JSON.
    let data = serde_json::to_vec(nodes).unwrap_or_default();
    let write = match tree.find(&path).await? {
        Some(node) if node.data == data => return Ok(()),
        Some(node) => Write::SetIfVersion { path, data, version: node.version },
        None => Write::create(path, data, roles.controllers()),
    };
    tree.write(vec![lease.fence(), write]).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_are_written() {
        let failed_units = vec!["a.service".to_owned()];
        let online = NodeRecord {
            machine: Some(3),
            online: true,
            address: Some("192.0.2.1".to_owned()),
            failed: 7,
            failed_units,
            last_seen_ms: None,
        };
        let nodes = NodeRecords::from([("web1".to_owned(), online), ("0".to_owned(), NodeRecord::default())]);
        let data = serde_json::to_vec(&nodes).unwrap();
        assert_eq!(parse(&paths::fleet_nodes(), &data).unwrap(), nodes);
        // A later version may add keys and leave others out.
        let later = parse(&paths::fleet_nodes(), b"{\"web1\": {\"online\": true, \"kernel\": 6}}").unwrap();
        assert!(later["web1"].online && later["web1"].failed == 0);
    }

    #[test]
    fn corrupt_records_name_the_znode() {
        for data in [&b""[..], b"[]", b"{\"web1\": 1}", b"{\"web1\": {\"online\": \"yes\"}}"] {
            let problem = parse(&paths::fleet_nodes(), data).unwrap_err().to_string();
            assert!(problem.starts_with("/controller/fleet/nodes: not a list of nodes"), "{problem}");
        }
    }
}
