//! Taking whole subtrees out: everything below some nodes, deepest first, each at the version that was read, so that
//! what appears or changes meanwhile makes the removal fail as a whole. An agent may hide what it makes below a node of
//! ours; it goes with that node all the same, since the right to delete lies on the parent.

use super::error::Error;
use super::paths::NodePath;
use super::records::corrupt;
use super::tree::{self, Answer, Node, Read, Tree, Write};

/// Nothing of ours is deeper; a deeper tree is not ours to take out.
const MAX_DEPTH: usize = 6;

/// Reads what is below `roots`, level by level, and returns the writes that delete it. Absent roots are passed over.
pub(super) async fn deletions<T: Tree>(tree: &T, roots: Vec<NodePath>) -> Result<Vec<Write>, Error> {
    let mut levels: Vec<Vec<Write>> = Vec::new();
    let mut level = roots;
    while !level.is_empty() {
        if levels.len() == MAX_DEPTH {
            return Err(corrupt(&level[0], "deeper than anything that belongs here".to_owned()));
        }
        let reads = level.iter().flat_map(|path| [Read::Data(path.clone()), Read::Children(path.clone())]);
        let mut answers = tree.read_each(reads.collect()).await?.into_iter();
        let mut deletes = Vec::with_capacity(level.len());
        let mut below = Vec::new();
        for path in level {
            match found(answers.next(), answers.next()) {
                Ok(Some((node, names))) => {
                    below.extend(names.iter().map(|name| path.child(name)));
                    deletes.push(Write::DeleteIfVersion { path, version: node.version });
                }
                Ok(None) => {}
                // The roots are ours, and who may not read them has no business here.
                Err(tree::Error::NoAuth(_)) if !levels.is_empty() => deletes.push(Write::Delete { path }),
                Err(refused) => return Err(refused.into()),
            }
        }
        levels.push(deletes);
        level = below;
    }
    Ok(levels.into_iter().rev().flatten().collect())
}

type Answered = Option<Result<Answer, tree::Error>>;

/// A node and its children, if it is there.
fn found(data: Answered, children: Answered) -> Result<Option<(Node, Vec<String>)>, tree::Error> {
    let node = data.transpose()?.and_then(Answer::into_data);
    let names = children.transpose()?.and_then(Answer::into_children);
    Ok(node.zip(names))
}

/// Writes what [`deletions`] found, with whatever belongs to it. A hidden node that has children is one that we may not
/// empty: reading again would find the same, so it is no conflict.
pub(super) async fn remove<T: Tree>(tree: &T, writes: Vec<Write>) -> Result<(), tree::Error> {
    let hidden: Vec<NodePath> = writes
        .iter()
        .filter_map(|write| match write {
            Write::Delete { path } => Some(path.clone()),
            _ => None,
        })
        .collect();
    match tree.write(writes).await {
        Err(tree::Error::NotEmpty(path)) if hidden.contains(&path) => Err(tree::Error::NoAuth(path)),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::{Credential, MemoryStore, paths};

    #[tokio::test]
    async fn a_hidden_node_with_children_is_named() {
        let store = MemoryStore::default();
        let [boss, agent] = ["operator:x", "machine-0:x"].map(|text| Credential::parse(text).unwrap());
        let only = |who: &Credential| Roles { operator: who.identity(), controller: who.identity() };
        let both = Roles { operator: boss.identity(), controller: agent.identity() };
        let (boss_tree, agent_tree) = (store.connect(Some(&boss)), store.connect(Some(&agent)));
        let root = paths::machines();
        let hidden = root.child("hidden");
        let make = |path: &NodePath, acl| Write::create(path.clone(), Vec::new(), acl);
        boss_tree.write(vec![make(&root, both.controllers())]).await.unwrap();
        let acl = || only(&agent).operators();
        agent_tree.write(vec![make(&hidden, acl()), make(&hidden.child("more"), acl())]).await.unwrap();
        let take_out = async || {
            let writes = deletions(&boss_tree, vec![root.clone()]).await.unwrap();
            remove(&boss_tree, writes).await
        };
        assert_eq!(take_out().await, Err(tree::Error::NoAuth(hidden.clone())));
        assert_eq!(boss_tree.exists(&root).await, Ok(true), "all of it or nothing");
        agent_tree.write(vec![Write::Delete { path: hidden.child("more") }]).await.unwrap();
        assert_eq!(take_out().await, Ok(()));
        assert_eq!(boss_tree.exists(&root).await, Ok(false));
        // A root that may not be read is not passed over.
        agent_tree.write(vec![make(&root, acl())]).await.unwrap();
        let refused = deletions(&boss_tree, vec![root.clone()]).await.unwrap_err();
        assert!(matches!(refused, Error::Tree(tree::Error::NoAuth(path)) if path == root));
    }
}
