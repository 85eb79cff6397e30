//! The fleet in the store: the machines that are its nodes, the addresses of the leading manager,
//! and the state of the nodes as `juju status` shows it. The state is one znode, which the leading
//! manager writes when a node is connected or lost, and when systemd units fail or recover.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::acl::Roles;
use super::error::Error;
use super::lease::Lease;
use super::paths::{self, NodePath};
use super::records::{Machine, corrupt};
use super::snapshot::Readable;
use super::tree::{self, Answer, Read, Tree, Write};
use super::update::{ensure, ensure_with};
use crate::model::{MachineId, NodeName};

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

/// Addresses in the list of the leading manager.
const MAX_ADDRESSES: usize = 16;

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

/// Returns the name of the node that a machine is.
pub fn node_name(id: MachineId, record: &Machine) -> NodeName {
    record.name.clone().unwrap_or_else(|| NodeName::of_number(id))
}

/// Reads the name of one machine's node.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed, [`Error::Corrupt`], and the failures of the
/// store.
pub async fn read_node_name<T: Tree>(tree: &T, id: MachineId) -> Result<NodeName, Error> {
    let path = paths::machine(id);
    let node = tree.get(&path).await?;
    Ok(node_name(id, &Machine::parse(&path, &node.data)?))
}

/// Reads the names of all machines' nodes. Machines that are removed meanwhile are left out.
pub async fn node_names<T: Tree>(tree: &T) -> Result<BTreeMap<MachineId, Readable<NodeName>>, tree::Error> {
    let ids = super::list_machines(tree).await?;
    let reads = ids.iter().map(|id| Read::Data(paths::machine(*id))).collect();
    let answers = tree.read_many(reads).await?;
    let named = ids.into_iter().zip(answers).filter_map(|(id, answer)| {
        let name = match answer {
            Answer::Data(node) => Machine::parse(&paths::machine(id), &node?.data)
                .map(|record| node_name(id, &record))
                .map_err(|problem| problem.to_string()),
            _ => return None,
        };
        Some((id, name))
    });
    Ok(named.collect())
}

/// Creates the container of the managers' znodes.
pub async fn prepare<T: Tree>(tree: &T, roles: &Roles) -> Result<(), tree::Error> {
    ensure(tree, &paths::fleet(), &roles.controllers()).await?;
    ensure_with(tree, &paths::fleet_address(), b"[]", &roles.manager_address()).await
}

/// Writes the addresses of the leading manager while `lease` is held. An equal list is not written.
pub async fn write_addresses<T: Tree>(tree: &T, lease: &Lease, list: &[String]) -> Result<(), tree::Error> {
    let list = &list[..list.len().min(MAX_ADDRESSES)];
    let data = serde_json::json!(list).to_string().into_bytes();
    let path = paths::fleet_address();
    let node = tree.get(&path).await?;
    if node.data == data {
        return Ok(());
    }
    tree.write(vec![lease.fence(), Write::SetIfVersion { path, data, version: node.version }]).await
}

/// Reads the addresses of the manager that leads, or that led last; none if there never was one.
pub async fn addresses<T: Tree>(tree: &T) -> Result<Vec<String>, Error> {
    let path = paths::fleet_address();
    let Some(node) = tree.find(&path).await? else { return Ok(Vec::new()) };
    let list: Result<Vec<String>, _> = serde_json::from_slice(&node.data);
    let list = list.ok().filter(|list| list.len() <= MAX_ADDRESSES);
    list.ok_or_else(|| corrupt(&path, "not a list of at most 16 addresses".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use crate::store::lease::LeaseKey;
    use crate::store::machines::NewMachine;
    use crate::store::records::Placement;

    #[tokio::test(start_paused = true)]
    async fn machines_read_the_addresses_of_the_leader() {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let named = NewMachine { name: Some("web1".parse().unwrap()), ..NewMachine::default() };
        let [first, second] =
            [environment.add_machine(named).await.unwrap(), environment.add_machine(None).await.unwrap()];
        let (tree, roles) = (store.connect(Some(&controller)), environment.info().roles.clone());
        let machine = store.connect(Some(&environment.machine_credential(first).await.unwrap()));
        assert_eq!(addresses(&machine).await.unwrap(), [""; 0], "no manager has ever led");
        prepare(&tree, &roles).await.unwrap();
        let key = LeaseKey::fleet();
        let lease = Lease::try_acquire(&tree, &key, &roles.controllers(), "a").await.unwrap().unwrap();
        let list = ["192.0.2.1:842".to_owned()];
        for _ in 0..2 {
            write_addresses(&tree, &lease, &list).await.unwrap();
            assert_eq!(tree.get(&paths::fleet_address()).await.unwrap().version, 1, "written once");
        }
        assert_eq!(addresses(&machine).await.unwrap(), list);
        let names = node_names(&tree).await.unwrap();
        let expected = [(first, "web1"), (second, &second.number().to_string())];
        assert_eq!(names, expected.map(|(id, name)| (id, Ok(name.parse().unwrap()))).into());
        assert_eq!(read_node_name(&machine, first).await.unwrap().as_str(), "web1");
        // A manager that was replaced does not change the list.
        drop(tree);
        let other = store.connect(Some(&controller));
        Lease::try_acquire(&other, &key, &roles.controllers(), "b").await.unwrap().unwrap();
        assert!(write_addresses(&other, &lease, &[]).await.is_err());
        let forged = vec![Write::SetIfVersion {
            path: paths::fleet_address(),
            data: b"[\"198.51.100.1:1\"]".to_vec(),
            version: 1,
        }];
        assert!(matches!(machine.write(forged).await, Err(tree::Error::NoAuth(_))));
        assert_eq!(addresses(&machine).await.unwrap(), list);
    }

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
