//! Who may act for the environment: one leader at a time. The lock is an ephemeral znode; taking it raises an epoch,
//! and every write of the leader names that epoch, so that one who was replaced writes nothing more. For effects outside
//! the store there is a lease: a leader that has not confirmed its lock for a while must not act until it has.

use std::time::Duration;

use tokio::time::Instant;

use super::acl::{Acl, Roles};
use super::error::Error;
use super::paths::{self, NodePath};
use super::tree::{self, Event, Feed as _, Tree, Write};
use crate::model::MachineId;
use crate::model::planted::{Bug, planted};

/// How long after a confirmation a leader may act. A session outlives its last request by its whole timeout, which is
/// longer than this, so nobody else can have the lock in this time.
pub const LEASE: Duration = Duration::from_secs(3);

/// How long to wait for the lock between looks, in case an event is lost.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Steps by which an epoch is raised in one write.
const EPOCHS_AT_ONCE: i32 = 1_000;

/// What is led: where its lock and its epoch are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    pub leader: NodePath,
    /// Whose version rises with every leader. Without one the lock itself is named in writes, which only says that
    /// somebody holds it: enough for who writes nothing but a node of its own, by compare-and-swap.
    epoch: Option<NodePath>,
}

impl Seat {
    /// The firewall of an environment.
    pub fn firewall() -> Self {
        Self { leader: paths::leader(), epoch: Some(paths::epoch()) }
    }

    /// The judgement over its components.
    pub fn heartbeat() -> Self {
        Self { leader: paths::heartbeat_leader(), epoch: Some(paths::heartbeat_epoch()) }
    }

    /// One machine and what is on it.
    pub fn machine(id: MachineId) -> Self {
        Self { leader: paths::machine_agent(id), epoch: None }
    }

    /// What its holder wrote there, if there is one.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn holder<T: Tree>(&self, tree: &T) -> Result<Option<Vec<u8>>, tree::Error> {
        match tree.get(&self.leader).await {
            Ok(node) => Ok(Some(node.data)),
            Err(tree::Error::NoNode(_)) => Ok(None),
            Err(err) => Err(err),
        }
    }
}

/// The lock, held. Each part of the leader that acts outside the store has one, and confirms it for itself.
#[derive(Debug, Clone)]
pub struct Leadership {
    seat: Seat,
    token: String,
    fence: (NodePath, i32),
    confirmed: Instant,
}

/// One attempt at the lock.
#[derive(Debug)]
pub enum Attempt {
    Won(Leadership),
    /// Somebody else has it.
    Taken,
}

impl Leadership {
    /// A token for one candidate.
    ///
    /// # Errors
    /// [`Error::Random`].
    pub fn token() -> Result<String, Error> {
        super::credentials::random_hex(16)
    }

    /// Waits until the lock is ours. Cancel-safe: a lock taken by a dropped call ends with its session.
    ///
    /// # Errors
    /// What waiting does not cure, wrong credentials say.
    pub async fn campaign<T: Tree>(tree: &T, roles: &Roles, token: &str) -> Result<Self, Error> {
        let mut feed = tree.watch(&paths::controller()).await?;
        loop {
            match Self::attempt(tree, roles, token).await {
                Ok(Attempt::Won(leadership)) => return Ok(leadership),
                Ok(Attempt::Taken) => {}
                Err(Error::Tree(err)) if err.is_retryable() || err.is_ambiguous() => {}
                Err(err) => return Err(err),
            }
            let freed = async {
                loop {
                    match feed.next().await? {
                        Event::Changed(path) if path != paths::leader() => {}
                        _ => return Ok::<(), tree::Error>(()),
                    }
                }
            };
            // Running out of patience is no failure: it is the look that a lost event would have caused.
            if let Ok(event) = tokio::time::timeout(LOOK_AGAIN, freed).await {
                event?;
            }
        }
    }

    /// Takes the lock if it is free. `token` is the candidate's, for as long as it lives: a lock with it is one that an
    /// answer was lost for, or that a session of ours left behind, and is taken anew under the session of now.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn attempt<T: Tree>(tree: &T, roles: &Roles, token: &str) -> Result<Attempt, Error> {
        Self::attempt_at(Seat::firewall(), tree, roles, token).await
    }

    /// The same for any seat.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn attempt_at<T: Tree>(
        seat: Seat,
        tree: &T,
        roles: &Roles,
        token: &str,
    ) -> Result<Attempt, Error> {
        Self::take(seat, tree, &roles.controllers(), token).await
    }

    /// The same with rights of one's own. Who has no epoch has no right to delete the lock either, so there a lock with
    /// our token is ours as it stands; should it end with an older session of ours, [`Self::confirm`] will say so.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn take<T: Tree>(seat: Seat, tree: &T, acl: &Acl, token: &str) -> Result<Attempt, Error> {
        let asked = Instant::now();
        let lock = seat.leader.clone();
        let won =
            |seat, fence| Ok(Attempt::Won(Self { seat, token: token.to_owned(), fence, confirmed: asked }));
        let mut writes = Vec::new();
        match tree.get(&lock).await {
            Ok(node) if node.data == token.as_bytes() && seat.epoch.is_none() => {
                return won(seat, (lock, node.version));
            }
            Ok(node) if node.data == token.as_bytes() => {
                writes.push(Write::DeleteIfVersion { path: lock.clone(), version: node.version });
            }
            Ok(_) => return Ok(Attempt::Taken),
            Err(tree::Error::NoNode(_)) => {}
            Err(err) => return Err(err.into()),
        }
        let data = token.as_bytes().to_vec();
        let path = lock.clone();
        writes.push(Write::Create { path, data: data.clone(), acl: acl.clone(), ephemeral: true });
        let mut fence = (lock, 0);
        if let Some(epoch) = &seat.epoch {
            let version = epoch_version(tree, epoch, acl).await?;
            writes.push(Write::SetIfVersion { path: epoch.clone(), data, version });
            fence = (epoch.clone(), version + 1);
        }
        match tree.write(writes).await {
            Ok(()) => won(seat, fence),
            Err(err) if err.is_conflict() => Ok(Attempt::Taken),
            Err(err) => Err(err.into()),
        }
    }

    /// Raises the epoch above `known`. The epoch is too low only after a store was restored or its
    /// records were deleted; the numbers that this leader derives from its epoch must not repeat
    /// those of an earlier leader.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn raise_above<T: Tree>(&mut self, tree: &T, known: u32) -> Result<(), Error> {
        while self.epoch() <= known {
            let (path, version) = self.fence.clone();
            let missing = i64::from(known) + 1 - i64::from(self.epoch());
            let steps = i32::try_from(missing).unwrap_or(i32::MAX).min(EPOCHS_AT_ONCE);
            let data = self.token.as_bytes();
            let set = |step| Write::SetIfVersion {
                path: path.clone(),
                data: data.to_vec(),
                version: version.saturating_add(step),
            };
            tree.write((0..steps).map(set).collect()).await?;
            self.fence.1 = version.saturating_add(steps);
        }
        Ok(())
    }

    /// Asks the store whether the lock is still ours, and if so renews the lease.
    ///
    /// # Errors
    /// The failures of the store; the lease then runs on as it was.
    pub async fn confirm<T: Tree>(&mut self, tree: &T) -> Result<bool, Error> {
        let asked = Instant::now();
        tree.sync().await?;
        match tree.get(&self.seat.leader).await {
            Ok(node) if node.data == self.token.as_bytes() => {
                self.confirmed = asked;
                Ok(true)
            }
            Ok(_) | Err(tree::Error::NoNode(_)) => Ok(false),
            Err(err) => Err(err.into()),
        }
    }

    /// From when on no effect outside the store may be begun, unless the lock is confirmed again.
    pub fn may_act_until(&self) -> Instant {
        if planted(Bug::NoLease) { Instant::now() + LEASE } else { self.confirmed + LEASE }
    }

    /// Higher than that of every leader before.
    pub fn epoch(&self) -> u32 {
        self.fence.1.unsigned_abs()
    }

    /// Goes in front of every write of the leader: it fails for one who was replaced.
    pub fn fence(&self) -> Write {
        let (path, version) = self.fence.clone();
        Write::Check { path, version: if planted(Bug::NoFence) { -1 } else { version } }
    }
}

/// How many leaders there were; makes the node that counts them if it is not there.
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
    use crate::model::EnvironmentName;
    use crate::store::memory::Fault;
    use crate::store::records::Placement;
    use crate::store::{Bootstrap, Credential, Environment, MemoryStore, MemoryTree};

    async fn controllers() -> (MemoryStore, Roles, MemoryTree, MemoryTree) {
        let store = MemoryStore::default();
        let operator = Credential::generate("operator").unwrap();
        let controller = Credential::generate("controller").unwrap();
        let roles = Roles { operator: operator.identity(), controller: controller.identity() };
        let wanted = Bootstrap {
            environment: "test".parse::<EnvironmentName>().unwrap(),
            placement: Placement::Unassigned,
            operator: roles.operator.clone(),
            controller: roles.controller.clone(),
        };
        Environment::bootstrap(store.connect(Some(&operator)), &wanted).await.unwrap();
        let (a, b) = (store.connect(Some(&controller)), store.connect(Some(&controller)));
        (store, roles, a, b)
    }

    async fn win(tree: &MemoryTree, roles: &Roles) -> Leadership {
        match Leadership::attempt(tree, roles, "first").await.unwrap() {
            Attempt::Won(leadership) => leadership,
            Attempt::Taken => panic!("the lock is taken"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_one_leader_and_its_end_is_anothers_beginning() {
        let (_store, roles, a, b) = controllers().await;
        let mut first = win(&a, &roles).await;
        assert!(matches!(Leadership::attempt(&b, &roles, "second").await.unwrap(), Attempt::Taken));
        assert!(first.confirm(&a).await.unwrap());
        let waiting = tokio::spawn({
            let roles = roles.clone();
            async move { (Leadership::campaign(&b, &roles, "second").await.unwrap(), b) }
        });
        tokio::task::yield_now().await;
        drop(a);
        let (mut second, b) = tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap().unwrap();
        assert!(second.confirm(&b).await.unwrap());
        assert!(!first.confirm(&b).await.unwrap(), "another has the lock");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_whose_answer_was_lost_is_found_to_be_ours() {
        let (store, roles, a, _b) = controllers().await;
        a.write(vec![Write::create(paths::epoch(), Vec::new(), roles.controllers())]).await.unwrap();
        store.lose_answers([Fault::LostAfter]);
        assert!(Leadership::attempt(&a, &roles, "mine").await.is_err());
        let Attempt::Won(mut leader) = Leadership::attempt(&a, &roles, "mine").await.unwrap() else {
            panic!("taken by ourselves")
        };
        assert!(leader.confirm(&a).await.unwrap());
        a.write(vec![leader.fence()]).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_replaced_writes_nothing_more() {
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
    async fn epoch_is_raised_above_a_known_one() {
        let (_store, roles, a, b) = controllers().await;
        let mut first = win(&a, &roles).await;
        for (known, epoch) in [(0, 1), (1, 2), (2_500, 2_501)] {
            first.raise_above(&a, known).await.unwrap();
            assert_eq!(first.epoch(), epoch);
            a.write(vec![first.fence()]).await.unwrap();
        }
        drop(a);
        assert_eq!(win(&b, &roles).await.epoch(), 2_502, "it lasts");
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_cannot_confirm_stops_acting() {
        let (_store, roles, a, _b) = controllers().await;
        let mut leader = win(&a, &roles).await;
        tokio::time::advance(LEASE).await;
        assert!(leader.may_act_until() <= Instant::now());
        assert!(leader.confirm(&a).await.unwrap());
        assert_eq!(leader.may_act_until(), Instant::now() + LEASE);
    }
}
