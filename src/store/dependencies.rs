//! Which nodes of the fleet may depend on units of which others. Operators write the list, and the
//! leading manager reads it. Without an entry, a node may depend only on itself.

use std::collections::{BTreeMap, BTreeSet};

use super::environment::Environment;
use super::error::Error;
use super::fleet::node_names;
use super::paths::{self, NodePath};
use super::records::corrupt;
use super::snapshot::Readable;
use super::tree::{self, Tree};
use super::update::{Change, ensure, ensure_with, update};
use crate::model::NodeName;

/// For each node, the nodes on which it may depend.
pub type Dependencies = BTreeMap<NodeName, BTreeSet<NodeName>>;

fn parse(path: &NodePath, data: &[u8]) -> Result<Dependencies, Error> {
    let wrong = |reason: String| corrupt(path, format!("not a list of permitted dependencies: {reason}"));
    let texts: BTreeMap<String, BTreeSet<String>> =
        serde_json::from_slice(data).map_err(|error| wrong(error.to_string()))?;
    let name = |text: String| text.parse::<NodeName>().map_err(|error| wrong(error.to_string()));
    texts
        .into_iter()
        .map(|(node, on)| Ok((name(node)?, on.into_iter().map(name).collect::<Result<_, _>>()?)))
        .collect()
}

fn to_bytes(dependencies: &Dependencies) -> Vec<u8> {
    let texts: BTreeMap<&str, Vec<&str>> = dependencies
        .iter()
        .map(|(node, on)| (node.as_str(), on.iter().map(NodeName::as_str).collect()))
        .collect();
    // A map with text keys is always valid JSON.
    serde_json::to_vec(&texts).unwrap_or_default()
}

/// Reads the list. It is empty until an operator has permitted something.
pub async fn dependencies<T: Tree>(tree: &T) -> Result<Readable<Dependencies>, tree::Error> {
    let path = paths::fleet_dependencies();
    let Some(node) = tree.find(&path).await? else { return Ok(Ok(Dependencies::new())) };
    Ok(parse(&path, &node.data).map_err(|problem| problem.to_string()))
}

impl<T: Tree> Environment<T> {
    /// Returns those of the names that no machine has.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn unknown_nodes(&self, names: &[NodeName]) -> Result<Vec<NodeName>, Error> {
        let known: BTreeSet<NodeName> =
            node_names(self.tree()).await?.into_values().filter_map(Result::ok).collect();
        Ok(names.iter().filter(|name| !known.contains(*name)).cloned().collect())
    }

    /// Permits that units of a node depend on units of others, or withdraws the permission. Returns
    /// the nodes for which this changed something.
    ///
    /// # Errors
    /// [`Error::Corrupt`], and the failures of the store.
    pub async fn set_dependencies(
        &self,
        node: &NodeName,
        on: &[NodeName],
        is_allowed: bool,
    ) -> Result<Vec<NodeName>, Error> {
        let (tree, roles) = (self.tree(), &self.info().roles);
        let path = paths::fleet_dependencies();
        ensure(tree, &paths::fleet(), &roles.controllers()).await?;
        ensure_with(tree, &path, b"{}", &roles.operators()).await?;
        let before = parse(&path, &tree.get(&path).await?.data)?;
        let was_allowed = |on: &NodeName| before.get(node).is_some_and(|allowed| allowed.contains(on));
        let changed = on.iter().filter(|on| was_allowed(on) != is_allowed).cloned().collect();
        update(tree, &path, |found| {
            let mut all = parse(&path, &found.data)?;
            let allowed = all.entry(node.clone()).or_default();
            for name in on {
                if is_allowed {
                    allowed.insert(name.clone());
                } else {
                    allowed.remove(name);
                }
            }
            all.retain(|_, allowed| !allowed.is_empty());
            Ok::<_, Error>(Change::Set(to_bytes(&all), ()))
        })
        .await?;
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;
    use crate::store::records::Placement;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn operators_write_the_list_and_managers_read_it() {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let manager = store.connect(Some(&controller));
        assert_eq!(dependencies(&manager).await.unwrap(), Ok(Dependencies::new()));
        let (foo, bar, baz) = (name("foo"), name("bar"), name("baz"));
        let both = [bar.clone(), baz.clone()];
        assert_eq!(environment.set_dependencies(&foo, &both, true).await.unwrap(), both);
        assert_eq!(environment.set_dependencies(&foo, &both, true).await.unwrap(), [], "nothing new");
        let expected = Dependencies::from([(foo.clone(), both.into())]);
        assert_eq!(dependencies(&manager).await.unwrap(), Ok(expected));
        let changed = environment.set_dependencies(&foo, &[bar.clone(), foo.clone()], false).await.unwrap();
        assert_eq!(changed, [bar]);
        environment.set_dependencies(&foo, &[baz], false).await.unwrap();
        assert_eq!(dependencies(&manager).await.unwrap(), Ok(Dependencies::new()));
        let machine = environment.add_machine(None).await.unwrap();
        let known = NodeName::of_number(machine);
        let unknown = environment.unknown_nodes(&[known, name("web")]).await.unwrap();
        assert_eq!(unknown, [name("web")]);
        // A manager cannot permit anything.
        let path = paths::fleet_dependencies();
        let write = tree::Write::SetIfVersion { path, data: b"{}".to_vec(), version: 0 };
        assert!(matches!(manager.write(vec![write]).await, Err(tree::Error::NoAuth(_))));
    }

    #[test]
    fn corrupt_lists_name_the_znode() {
        for data in [&b""[..], b"[]", b"{\"a\": 1}", b"{\"A b\": []}", b"{\"a\": [\"B_\"]}"] {
            let problem = parse(&paths::fleet_dependencies(), data).unwrap_err().to_string();
            assert!(problem.starts_with("/controller/fleet/dependencies: not a list"), "{problem}");
        }
    }
}
