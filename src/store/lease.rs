//! Leases: at most one process at a time acts for an environment, for the heartbeat states, or for
//! a machine. A lease is an ephemeral znode. Acquiring it raises an epoch, and every write of the
//! holder checks that epoch, so that a replaced holder writes nothing more. For effects outside the
//! store there is a deadline: a holder acts only for [`LEASE`] after it last confirmed its znode.

use std::time::Duration;

use tokio::time::Instant;

use super::acl::Acl;
use super::error::Error;
use super::paths::{self, NodePath};
use super::tree::{self, Feed as _, Tree, Write};
use crate::model::MachineId;
use crate::mutant;

/// How long after a confirmation the holder may act. Shorter than the session timeout, which begins
/// with the last request of the session, so no other process can acquire the lease in this time.
pub const LEASE: Duration = Duration::from_secs(3);

/// How often to try again without an event, because events get lost.
const RETRY_EVERY: Duration = Duration::from_secs(5);

/// The object that a lease is for: where its lock and its epoch are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseKey {
    lock: NodePath,
    /// The znode whose version rises with every holder. Without one, the holder's writes check the
    /// lock, which only proves that some process holds it: enough for a holder that writes only a
    /// znode of its own, by compare-and-swap.
    epoch: Option<NodePath>,
}

impl LeaseKey {
    /// The firewall of an environment.
    pub fn firewall() -> Self {
        Self { lock: paths::leader(), epoch: Some(paths::epoch()) }
    }

    /// The states of an environment's heartbeat components.
    pub fn heartbeat() -> Self {
        Self { lock: paths::heartbeat_leader(), epoch: Some(paths::heartbeat_epoch()) }
    }

    /// The nodes of an environment, which one manager controls.
    pub fn fleet() -> Self {
        Self { lock: paths::fleet_leader(), epoch: Some(paths::fleet_epoch()) }
    }

    /// One machine and its units.
    pub fn machine(id: MachineId) -> Self {
        Self { lock: paths::machine_agent(id), epoch: None }
    }

    /// The token of the holder, if there is one.
    pub async fn holder<T: Tree>(&self, tree: &T) -> Result<Option<Vec<u8>>, tree::Error> {
        Ok(tree.find(&self.lock).await?.map(|node| node.data))
    }
}

/// A lease that this process holds. Each task of the holder that acts outside the store has a
/// clone, and confirms it separately.
#[derive(Debug, Clone)]
pub struct Lease {
    key: LeaseKey,
    token: String,
    fence: (NodePath, i32),
    confirmed: Instant,
}

impl Lease {
    /// A token for one candidate.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn token() -> Result<String, Error> {
        super::credentials::random_hex(16)
    }

    /// Waits until the lease is acquired. Cancel-safe: a lease that a dropped call acquired ends
    /// with its session.
    ///
    /// # Errors
    /// Failures that do not pass, for example wrong credentials.
    pub async fn acquire<T: Tree>(tree: &T, key: &LeaseKey, acl: &Acl, token: &str) -> Result<Self, Error> {
        let mut feed = tree.watch(&key.lock).await?;
        loop {
            match Self::try_acquire(tree, key, acl, token).await {
                Ok(Some(lease)) => return Ok(lease),
                Ok(None) => {}
                Err(err) if err.is_transient() => {}
                Err(err) => return Err(err),
            }
            // A timeout is no failure: a lost event would have caused the same read.
            if let Ok(event) = tokio::time::timeout(RETRY_EVERY, feed.next()).await {
                event?;
            }
        }
    }

    /// Acquires the lease if it is free; `None` if another process holds it. `token` identifies the
    /// candidate for as long as it runs: a lock that has it was created by a request whose answer
    /// was lost, or by an earlier session of this process, and is created again in the current
    /// session.
    ///
    /// A holder without an epoch has no right to delete its lock, so there a lock with `token`
    /// counts as acquired. If it ends with an older session, [`Self::confirm`] reports that.
    pub async fn try_acquire<T: Tree>(
        tree: &T,
        key: &LeaseKey,
        acl: &Acl,
        token: &str,
    ) -> Result<Option<Self>, Error> {
        let confirmed = Instant::now();
        let LeaseKey { lock, epoch } = key;
        let acquired = |fence| Ok(Some(Self { key: key.clone(), token: token.to_owned(), fence, confirmed }));
        let mut writes = Vec::new();
        match tree.get(lock).await {
            Ok(node) if node.data == token.as_bytes() && epoch.is_none() => {
                return acquired((lock.clone(), node.version));
            }
            Ok(node) if node.data == token.as_bytes() => {
                writes.push(Write::DeleteIfVersion { path: lock.clone(), version: node.version });
            }
            Ok(_) => return Ok(None),
            Err(tree::Error::NoNode(_)) => {}
            Err(err) => return Err(err.into()),
        }
        let data = token.as_bytes().to_vec();
        let path = lock.clone();
        writes.push(Write::Create { path, data: data.clone(), acl: acl.clone(), ephemeral: true });
        let mut fence = (lock.clone(), 0);
        if let Some(epoch) = epoch {
            let version = epoch_version(tree, epoch, acl).await?;
            writes.push(Write::SetIfVersion { path: epoch.clone(), data, version });
            fence = (epoch.clone(), version + 1);
        }
        match tree.write(writes).await {
            Ok(()) => acquired(fence),
            Err(err) if err.is_conflict() => Ok(None),
            Err(err) => Err(err.into()),
        }
    }

    /// Gives the lease back early. It ends with the session in any case, so a failure only makes
    /// the next holder wait longer.
    pub async fn release<T: Tree>(&self, tree: &T) {
        let unlock = Write::DeleteIfVersion { path: self.key.lock.clone(), version: 0 };
        let _ = tree.write(vec![self.fence(), unlock]).await;
    }

    /// Checks with the store that this process still holds the lease, and if so extends the
    /// deadline.
    ///
    /// # Errors
    /// The failures of the store; the deadline then stays as it was.
    pub async fn confirm<T: Tree>(&mut self, tree: &T) -> Result<bool, Error> {
        let asked = Instant::now();
        tree.sync().await?;
        let held = self.key.holder(tree).await?.is_some_and(|token| token == self.token.as_bytes());
        if held {
            self.confirmed = asked;
        }
        Ok(held)
    }

    /// The deadline after which no effect outside the store may begin, unless the lease is
    /// confirmed again.
    pub fn may_act_until(&self) -> Instant {
        if mutant!(LeaseNotChecked) { Instant::now() + LEASE } else { self.confirmed + LEASE }
    }

    /// A number higher than that of every earlier holder.
    pub fn epoch(&self) -> u32 {
        self.fence.1.unsigned_abs()
    }

    /// Whether a write failed because another process holds the lease now.
    pub fn was_replaced(&self, failure: &tree::Error) -> bool {
        matches!(failure, tree::Error::BadVersion(path) if *path == self.fence.0)
    }

    /// The first step of every write of the holder: it fails once the holder was replaced.
    pub fn fence(&self) -> Write {
        let (path, version) = self.fence.clone();
        Write::Check { path, version: if mutant!(WritesWithoutFence) { -1 } else { version } }
    }
}

/// The version of the epoch's znode, which is created if it is absent.
async fn epoch_version<T: Tree>(tree: &T, epoch: &NodePath, acl: &Acl) -> Result<i32, Error> {
    match tree.get(epoch).await {
        Ok(node) => Ok(node.version),
        Err(tree::Error::NoNode(path)) => {
            match tree.write(vec![Write::create(path, Vec::new(), acl.clone())]).await {
                Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(0),
                Err(err) => Err(err.into()),
            }
        }
        Err(err) => Err(err.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::memory::Fault;
    use crate::store::records::Placement;
    use crate::store::{MemoryStore, MemoryTree};

    async fn controllers() -> (MemoryStore, Roles, MemoryTree, MemoryTree) {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        let roles = environment.info().roles.clone();
        let (a, b) = (store.connect(Some(&controller)), store.connect(Some(&controller)));
        (store, roles, a, b)
    }

    async fn try_acquire(tree: &MemoryTree, roles: &Roles, token: &str) -> Result<Option<Lease>, Error> {
        Lease::try_acquire(tree, &LeaseKey::firewall(), &roles.controllers(), token).await
    }

    async fn win(tree: &MemoryTree, roles: &Roles) -> Lease {
        try_acquire(tree, roles, "first").await.unwrap().expect("the lease is free")
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_passes_on_when_its_holder_disconnects() {
        let (_store, roles, a, b) = controllers().await;
        let mut first = win(&a, &roles).await;
        assert!(try_acquire(&b, &roles, "second").await.unwrap().is_none());
        assert!(first.confirm(&a).await.unwrap());
        let waiting = tokio::spawn({
            let roles = roles.clone();
            async move {
                let lease = Lease::acquire(&b, &LeaseKey::firewall(), &roles.controllers(), "second").await;
                (lease.unwrap(), b)
            }
        });
        tokio::task::yield_now().await;
        drop(a);
        let (mut second, b) = tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap().unwrap();
        assert!(second.confirm(&b).await.unwrap());
        assert!(!first.confirm(&b).await.unwrap(), "another process holds the lease");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_created_without_an_answer_is_acquired_again() {
        let (store, roles, a, _b) = controllers().await;
        a.write(vec![Write::create(paths::epoch(), Vec::new(), roles.controllers())]).await.unwrap();
        store.lose_answers([Fault::LostAfter]);
        assert!(try_acquire(&a, &roles, "mine").await.is_err());
        let mut leader = try_acquire(&a, &roles, "mine").await.unwrap().expect("the lock has our token");
        assert!(leader.confirm(&a).await.unwrap());
        a.write(vec![leader.fence()]).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_holder_cannot_write() {
        let (_store, roles, a, b) = controllers().await;
        let first = win(&a, &roles).await;
        let mark =
            |fence| vec![fence, Write::create(paths::firewall_reports(), Vec::new(), roles.controllers())];
        drop(a);
        let second = win(&b, &roles).await;
        let refused = b.write(mark(first.fence())).await.unwrap_err();
        assert_eq!(refused, tree::Error::BadVersion(paths::epoch()));
        b.write(mark(second.fence())).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_passes_without_confirmation() {
        let (_store, roles, a, _b) = controllers().await;
        let mut leader = win(&a, &roles).await;
        tokio::time::advance(LEASE).await;
        assert!(leader.may_act_until() <= Instant::now());
        assert!(leader.confirm(&a).await.unwrap());
        assert_eq!(leader.may_act_until(), Instant::now() + LEASE);
    }
}
