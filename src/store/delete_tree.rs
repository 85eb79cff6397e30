//! Deletes whole subtrees in one write: deepest first, each znode at the version that was read, so
//! that a concurrent change makes the deletion fail as a whole. An agent may deny access to znodes
//! that it created below ours; they are deleted all the same, since the right to delete belongs to
//! the parent.

use super::error::Error;
use super::paths::NodePath;
use super::records::corrupt;
use super::tree::{self, Answer, Node, Read, Tree, Write};

/// The depth of the deepest tree that Portcullis creates. A deeper one is foreign and not deleted.
const MAX_DEPTH: usize = 6;

/// Reads the trees below `roots`, level by level, and returns the writes that delete them. Absent
/// roots are skipped.
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
            match node_with_children(answers.next(), answers.next()) {
                Ok(Some((node, names))) => {
                    below.extend(names.iter().map(|name| path.child(name)));
                    deletes.push(Write::DeleteIfVersion { path, version: node.version });
                }
                Ok(None) => {}
                // An unreadable root means wrong credentials; below it, a hidden znode of an agent.
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

/// A znode and its children, if it exists.
fn node_with_children(
    data: Answered,
    children: Answered,
) -> Result<Option<(Node, Vec<String>)>, tree::Error> {
    let node = data.transpose()?.and_then(Answer::into_data);
    let names = children.transpose()?.and_then(Answer::into_children);
    Ok(node.zip(names))
}

/// Applies the writes of [`deletions`], with others that belong to them. A hidden znode with
/// children cannot be deleted: reading again would find the same, so it is no conflict.
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
    async fn deletion_names_a_hidden_znode_with_children() {
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
