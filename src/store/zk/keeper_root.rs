//! Closes the root of a keeper above a chroot.

use tokio::time::timeout_at;
use zookeeper_client as zk;

use super::{ZkTree, to_acls};
use crate::store::acl::Acl;
use crate::store::paths;
use crate::store::tree::Error;

impl ZkTree {
    /// Sets this access list on the root of the keeper above this tree, if the root is still open
    /// to the world. Does not change the root of a ZooKeeper ensemble, which other users share.
    ///
    /// # Errors
    /// The failures of the store. A root that another operator has closed is not an error.
    pub async fn close_keeper_root(&self, acl: &Acl) -> Result<bool, Error> {
        if self.link.address.chroot().is_empty() {
            return Ok(false);
        }
        let root = paths::root();
        let rights =
            |path: &'static str| self.read(&root, move |client| async move { client.get_acl(path).await });
        let (open, version) = match rights("/").await {
            Ok((acls, stat)) => (acls, stat.aversion),
            Err(Error::NoAuth(_)) => return Ok(false),
            Err(error) => return Err(error),
        };
        let anyone = |permission| vec![zk::Acl::new(permission, zk::AuthId::anyone())];
        // Only the keeper creates this node without write permission for the world.
        let keeper = rights("/zookeeper/quota").await?.0 == anyone(zk::Permission::READ);
        if !keeper || open != anyone(zk::Permission::ALL) {
            return Ok(false);
        }
        let client = self.link.ready(self.request_deadline()).await?;
        let acls = to_acls(acl);
        let set = client.set_acl("/", &acls, Some(version));
        match timeout_at(self.request_deadline(), set).await {
            Ok(Ok(_)) => Ok(true),
            // Another operator has closed it meanwhile.
            Ok(Err(zk::Error::BadVersion | zk::Error::NoAuth)) => Ok(false),
            Ok(Err(error)) => {
                Err(self.link.refusal(&error, &root).unwrap_or_else(|| self.link.unreachable()))
            }
            Err(_) => Err(self.link.timeout()),
        }
    }
}
