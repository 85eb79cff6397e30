//! Access control lists in the form of the client library.

use zookeeper_client as zk;

use crate::store::acl::Acl;

pub(super) fn to_acls(acl: &Acl) -> Vec<zk::Acl> {
    let granted = acl.grants().iter().map(|(identity, rights)| {
        let all = [
            zk::Permission::READ,
            zk::Permission::WRITE,
            zk::Permission::CREATE,
            zk::Permission::DELETE,
            zk::Permission::ADMIN,
        ];
        let permission = all
            .into_iter()
            .enumerate()
            .filter(|(bit, _)| rights.bits() & (1 << bit) != 0)
            .fold(zk::Permission::NONE, |sum, (_, permission)| sum | permission);
        zk::Acl::new(permission, zk::AuthId::new("digest", identity.as_str()))
    });
    let public = || zk::Acl::new(zk::Permission::READ, zk::AuthId::new("world", "anyone"));
    granted.chain(acl.is_public().then(public)).collect()
}
