//! Closes the root of a keeper above a chroot.

use tokio::time::timeout_at;
use zookeeper_client as zk;

use super::{ZkTree, to_acls};
use crate::store::acl::Acl;
use crate::store::paths;
use crate::store::tree::Error;

impl ZkTree {
    /// Gives the root of a keeper that this tree is only a part of these rights, if it is still open to the
    /// world. The root of a ZooKeeper ensemble, which others share, is left alone.
    ///
    /// # Errors
    /// The failures of the store. A root that others have closed is none.
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
        // Only the keeper is born with this node closed to writers.
        let keeper = rights("/zookeeper/quota").await?.0 == anyone(zk::Permission::READ);
        if !keeper || open != anyone(zk::Permission::ALL) {
            return Ok(false);
        }
        let client = self.link.ready(self.request_deadline()).await?;
        let acls = to_acls(acl);
        let set = client.set_acl("/", &acls, Some(version));
        match timeout_at(self.request_deadline(), set).await {
            Ok(Ok(_)) => Ok(true),
            // Closed by another meanwhile.
            Ok(Err(zk::Error::BadVersion | zk::Error::NoAuth)) => Ok(false),
            Ok(Err(error)) => {
                Err(self.link.refusal(&error, &root).unwrap_or_else(|| self.link.unreachable()))
            }
            Err(_) => Err(self.link.timeout()),
        }
    }
}
