//! Compare-and-swap on one znode: read it, compute its next content, and write that at the version
//! that was read, again whenever another client wrote in between. The number of retry is limited.

use super::acl::Acl;
use super::cas_retry::CasRetry;
use super::error::Error;
use super::paths::NodePath;
use super::tree::{self, Node, Tree, Write};

/// The decision about a znode that was read.
#[derive(Debug)]
pub enum Change<R> {
    /// Leaves it as it is.
    Keep(R),
    /// Replaces its content. Equal content is not written.
    Set(Vec<u8>, R),
}

/// Changes the content of a znode. `change` runs again after a conflict and after a lost answer, so
/// it must give the same result when its own change is already there.
///
/// # Errors
/// Those of `change`, [`tree::Error::NoNode`], [`Error::Contended`], and the failures of the store.
pub async fn update<T: Tree, R, E: From<Error>>(
    tree: &T,
    path: &NodePath,
    mut change: impl FnMut(&Node) -> Result<Change<R>, E>,
) -> Result<R, E> {
    let mut retry = CasRetry::at(path.clone());
    loop {
        let node = tree.get(path).await.map_err(Error::from)?;
        let (data, result) = match change(&node)? {
            Change::Set(data, result) if data != node.data => (data, result),
            Change::Keep(result) | Change::Set(_, result) => return Ok(result),
        };
        let write = Write::SetIfVersion { path: path.clone(), data, version: node.version };
        match tree.write(vec![write]).await {
            Ok(()) => return Ok(result),
            Err(err) => retry.after(err).await?,
        }
    }
}

/// Gives a znode this content, and creates it with `acl` if it is absent. Equal content is not
/// written.
///
/// # Errors
/// [`Error::Contended`] and the failures of the store.
pub async fn put<T: Tree>(tree: &T, path: &NodePath, data: &[u8], acl: &Acl) -> Result<(), Error> {
    let mut retry = CasRetry::at(path.clone());
    loop {
        let write = match tree.get(path).await {
            Ok(node) if node.data == data => return Ok(()),
            Ok(node) => {
                Write::SetIfVersion { path: path.clone(), data: data.to_vec(), version: node.version }
            }
            Err(tree::Error::NoNode(_)) => Write::create(path.clone(), data, acl.clone()),
            Err(err) => return Err(err.into()),
        };
        match tree.write(vec![write]).await {
            Ok(()) => return Ok(()),
            // The parent of the znode is absent.
            Err(err @ tree::Error::NoNode(_)) => return Err(err.into()),
            Err(err) => retry.after(err).await?,
        }
    }
}

/// Writes content at a version that was read earlier; `None` creates the znode with `acl`. Returns
/// whether it was written: another client may have written in between.
///
/// # Errors
/// [`tree::Error::NoNode`] and the failures of the store.
pub async fn write_at<T: Tree>(
    tree: &T,
    path: NodePath,
    data: Vec<u8>,
    version: Option<i32>,
    acl: Acl,
) -> Result<bool, tree::Error> {
    let write = match version {
        Some(version) => Write::SetIfVersion { path, data, version },
        None => Write::create(path, data, acl),
    };
    match tree.write(vec![write]).await {
        Ok(()) => Ok(true),
        Err(tree::Error::BadVersion(_) | tree::Error::NodeExists(_)) => Ok(false),
        Err(err) => Err(err),
    }
}

/// Creates an empty znode unless it exists.
pub async fn ensure<T: Tree>(tree: &T, path: &NodePath, acl: &Acl) -> Result<(), tree::Error> {
    ensure_with(tree, path, &[], acl).await
}

/// Creates a znode with this content unless it exists.
pub async fn ensure_with<T: Tree>(
    tree: &T,
    path: &NodePath,
    data: &[u8],
    acl: &Acl,
) -> Result<(), tree::Error> {
    if tree.exists(path).await? {
        return Ok(());
    }
    match tree.write(vec![Write::create(path.clone(), data, acl.clone())]).await {
        Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(()),
        Err(err) => Err(err),
    }
}

/// Deletes a znode, whatever its version. An absent one is fine.
pub async fn delete<T: Tree>(tree: &T, path: &NodePath) -> Result<(), tree::Error> {
    match tree.write(vec![Write::Delete { path: path.clone() }]).await {
        Ok(()) | Err(tree::Error::NoNode(_)) => Ok(()),
        Err(err) => Err(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::memory::Fault;
    use crate::store::{Credential, MemoryStore, MemoryTree, paths};

    fn store() -> (MemoryStore, MemoryTree, Acl) {
        let store = MemoryStore::default();
        let credential = Credential::parse("operator:x").unwrap();
        let roles = Roles { operator: credential.identity(), controller: credential.identity() };
        let tree = store.connect(Some(&credential));
        (store, tree, roles.operators())
    }

    #[tokio::test(start_paused = true)]
    async fn update_repeats_after_a_write_of_another_client() {
        let (_store, tree, acl) = store();
        put(&tree, &paths::units(), b"1", &acl).await.unwrap();
        let other = tree.clone();
        let mut reads = 0;
        let result: Result<i32, Error> = update(&tree, &paths::units(), |node| {
            reads += 1;
            if reads == 1 {
                let (path, version) = (paths::units(), node.version);
                let write = Write::SetIfVersion { path, data: b"5".to_vec(), version };
                let written = futures_util::FutureExt::now_or_never(other.write(vec![write]));
                written.expect("the memory store answers at once").unwrap();
            }
            let number: i32 = std::str::from_utf8(&node.data).unwrap().parse().unwrap();
            Ok(Change::Set((number + 1).to_string().into_bytes(), number))
        })
        .await;
        assert_eq!((result.unwrap(), reads), (5, 2));
        assert_eq!(tree.get(&paths::units()).await.unwrap().data, b"6");
    }

    #[tokio::test(start_paused = true)]
    async fn equal_content_is_not_written() {
        let (_store, tree, acl) = store();
        put(&tree, &paths::units(), b"1", &acl).await.unwrap();
        put(&tree, &paths::units(), b"1", &acl).await.unwrap();
        let same = |_: &Node| Ok::<_, Error>(Change::Set(b"1".to_vec(), ()));
        update(&tree, &paths::units(), same).await.unwrap();
        assert_eq!(tree.get(&paths::units()).await.unwrap().version, 0);
        put(&tree, &paths::units(), b"2", &acl).await.unwrap();
        assert_eq!(tree.get(&paths::units()).await.unwrap().version, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_answer_is_read_back() {
        let (store, tree, acl) = store();
        store.lose_answers([Fault::LostAfter]);
        put(&tree, &paths::units(), b"1", &acl).await.unwrap();
        assert_eq!(tree.get(&paths::units()).await.unwrap().version, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_absent_parent_is_no_conflict() {
        let (_store, tree, acl) = store();
        let path = paths::units().child("a");
        let refused = put(&tree, &path, b"1", &acl).await.unwrap_err();
        assert!(matches!(refused, Error::Tree(tree::Error::NoNode(_))), "{refused}");
        delete(&tree, &path).await.unwrap();
    }
}
