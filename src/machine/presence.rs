//! The presence of a machine's agent: claims the machine in the store and runs its workload until
//! the claim is lost or the agent is asked to stop. One process holds a machine; a second one waits
//! for a session that may be about to expire, then fails and names the holder. Other parts
//! implement the workload.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::host::HostReport;
use crate::model::MachineId;
use crate::runtime::reconcile::{Due, Ended, Leased, Passed, Reconciler, Schedule};
use crate::runtime::reconcile::{run_leased, run_passes, stopped_within};
use crate::store::acl::Acl;
use crate::store::changes::{Changes, Dirty};
use crate::store::lease::{LEASE, Lease, LeaseKey};
use crate::store::paths::{self, NodePath};
use crate::store::presence::{mark_machine_started, report_host};
use crate::store::records::Host;
use crate::store::tree::{self, Event, Feed, Tree};

/// How long to wait for the session of a killed predecessor; longer than its timeout.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(14);
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Errors that end the agent, because retries do not help.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("machine {machine} already has an agent: {holder}")]
    Claimed { machine: MachineId, holder: String },
    #[error("Machine {0} was not found")]
    NoMachine(MachineId),
    #[error(transparent)]
    Store(#[from] crate::store::Error),
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        Self::Store(error.into())
    }
}

/// The machine to claim, the claimant, and the resync interval.
#[derive(Debug, Clone)]
pub struct MachineClaim {
    pub machine: MachineId,
    /// The ACL of the claim's node.
    pub acl: Acl,
    /// A unique description of this process, shown to other processes that try to claim the
    /// machine.
    pub holder: String,
    pub resync: Duration,
    /// `None` if the agent does not report its host.
    pub host: Option<HostReport>,
}

/// The work of an agent while it holds the machine.
pub trait Workload {
    /// Called after the machine was claimed. Another process may have held the machine before and
    /// changed its state.
    fn claimed(&mut self);

    /// Called after the claim has ended.
    fn released(&mut self);

    fn store_lost(&mut self);

    /// Returns the time at which failed work is due again.
    fn retry_at(&self) -> Option<Instant>;

    /// Reconciles; returns whether a second read has to confirm the result of the first.
    fn pass(
        &mut self,
        dirty: &Dirty,
        lease: &Lease,
    ) -> impl Future<Output = Result<bool, crate::store::Error>> + Send;

    /// Returns the nodes to watch; `None` leaves the watches as they are.
    fn watched(&self) -> Option<Vec<NodePath>>;
}

/// Runs until `stop` is set.
///
/// # Errors
/// See [`Error`].
pub async fn run<T: Tree, W: Workload + Send>(
    workload: &mut W,
    tree: &T,
    claim: &MachineClaim,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    run_leased(&mut Claiming { workload, tree, claim }, &mut stop).await
}

struct Claiming<'a, T, W> {
    workload: &'a mut W,
    tree: &'a T,
    claim: &'a MachineClaim,
}

impl<T: Tree, W: Workload + Send> Leased for Claiming<'_, T, W> {
    type Lease = Lease;
    type Error = Error;

    async fn acquire(&mut self, stop: &mut watch::Receiver<bool>) -> Result<Option<Lease>, Error> {
        acquire(self.tree, self.claim, stop).await
    }

    async fn hold(&mut self, lease: Lease, stop: &mut watch::Receiver<bool>) -> Result<Ended, Error> {
        let Self { workload, tree, claim } = self;
        info!(machine = %claim.machine, "holding the machine");
        workload.claimed();
        record_start(*tree, claim).await?;
        run_with_claim(*workload, *tree, lease, claim, stop).await
    }

    fn released(&mut self) {
        self.workload.released();
    }

    fn store_lost(&mut self) {
        self.workload.store_lost();
    }

    fn is_transient(error: &Error) -> bool {
        matches!(error, Error::Store(err) if err.is_transient())
    }
}

/// Claims the machine; returns `None` if `stop` is set first.
async fn acquire<T: Tree>(
    tree: &T,
    claim: &MachineClaim,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<Lease>, Error> {
    let key = LeaseKey::machine(claim.machine);
    let deadline = Instant::now() + PREDECESSOR_TIMEOUT;
    let mut is_logged = false;
    loop {
        if let Some(lease) = Lease::try_acquire(tree, &key, &claim.acl, &claim.holder).await? {
            return Ok(Some(lease));
        }
        let Some(holder) = key.holder(tree).await? else {
            if !tree.exists(&paths::machine(claim.machine)).await? {
                return Err(Error::NoMachine(claim.machine));
            }
            continue;
        };
        let holder: String = String::from_utf8_lossy(&holder).chars().take(200).collect();
        if Instant::now() >= deadline {
            return Err(Error::Claimed { machine: claim.machine, holder });
        }
        if !is_logged {
            warn!(machine = %claim.machine, %holder, "waiting for the machine");
            is_logged = true;
        }
        if stopped_within(POLL_INTERVAL, stop).await {
            return Ok(None);
        }
    }
}

/// Records that the machine had an agent, so that status distinguishes a lost agent from one that
/// never started.
async fn record_start<T: Tree>(tree: &T, claim: &MachineClaim) -> Result<(), Error> {
    match mark_machine_started(tree, claim.machine, &claim.acl).await {
        Ok(()) => Ok(()),
        Err(tree::Error::NoNode(_)) => Err(Error::NoMachine(claim.machine)),
        Err(err) => Err(err.into()),
    }
}

async fn run_with_claim<T: Tree, W: Workload + Send>(
    workload: &mut W,
    tree: &T,
    lease: Lease,
    claim: &MachineClaim,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    let schedule = Schedule::new(Instant::now(), claim.resync, LEASE / 3);
    let changes = Changes::new(Feeds::<T>::new(claim.machine));
    run_passes(&mut Holding { workload, tree, lease, claim, changes, reported: None }, schedule, stop).await
}

/// The state that all passes share.
struct Holding<'a, T: Tree, W> {
    workload: &'a mut W,
    tree: &'a T,
    lease: Lease,
    claim: &'a MachineClaim,
    changes: Changes<Feeds<T>>,
    /// The last report about the host in this claim.
    reported: Option<Host>,
}

impl<T: Tree, W> Holding<'_, T, W> {
    /// Reports the host name and the addresses of the machine if they have changed.
    async fn report_host(&mut self) -> Result<(), Error> {
        let Some(report) = &self.claim.host else { return Ok(()) };
        let host = report.read();
        if self.reported.as_ref() == Some(&host) {
            return Ok(());
        }
        match report_host(self.tree, self.claim.machine, &host, &report.acl).await {
            Ok(()) => {
                self.reported = Some(host);
                Ok(())
            }
            Err(crate::store::Error::Tree(tree::Error::NoNode(_))) => {
                Err(Error::NoMachine(self.claim.machine))
            }
            Err(err) => Err(err.into()),
        }
    }
}

impl<T: Tree, W: Workload + Send> Reconciler for Holding<'_, T, W> {
    type Error = Error;

    async fn changed(&mut self) -> Result<(), Error> {
        Ok(self.changes.gather().await?)
    }

    fn retry_at(&self) -> Option<Instant> {
        self.workload.retry_at()
    }

    async fn confirm(&mut self) -> Result<bool, Error> {
        Ok(self.changes.during(self.lease.confirm(self.tree)).await?)
    }

    async fn pass(&mut self, due: Due) -> Result<Passed, Error> {
        let machine = self.claim.machine;
        debug!(%machine, ?due, "pass due");
        let mut dirty = self.changes.gathered();
        if due == Due::Everything {
            dirty.add(&Event::Everything, Instant::now());
        }
        let everything = dirty.everything();
        if everything {
            self.report_host().await?;
        }
        let passed = match self.changes.during(self.workload.pass(&dirty, &self.lease)).await {
            Ok(unconfirmed) => Passed::Looked { everything, unconfirmed },
            Err(crate::store::Error::Tree(tree::Error::NoNode(path))) if path == paths::machine(machine) => {
                return Err(Error::NoMachine(machine));
            }
            // Another process wrote the same node, or the claim has ended: everything is read
            // again.
            Err(crate::store::Error::Tree(err)) if err.is_conflict() => {
                warn!(error = %err, "report written by another process");
                Passed::Conflict
            }
            Err(err) => return Err(err.into()),
        };
        if let Some(paths) = self.workload.watched() {
            self.changes.feed_mut().watch(self.tree, paths).await?;
        }
        Ok(passed)
    }
}

/// Watches of the nodes that concern the machine. Watching all nodes would wake every machine at
/// each change.
struct Feeds<T: Tree> {
    machine: MachineId,
    feeds: BTreeMap<NodePath, T::Feed>,
}

impl<T: Tree> Feeds<T> {
    fn new(machine: MachineId) -> Self {
        Self { machine, feeds: BTreeMap::new() }
    }

    /// Replaces the watched nodes. A new watch begins with an event which means that everything may
    /// have changed.
    async fn watch(&mut self, tree: &T, paths: Vec<NodePath>) -> Result<(), tree::Error> {
        self.feeds.retain(|path, _| paths.contains(path));
        for path in paths {
            if let Entry::Vacant(place) = self.feeds.entry(path) {
                match tree.watch(place.key()).await {
                    Ok(feed) => _ = place.insert(feed),
                    // The machine gets no events for a flag that it may not read; each pass reads
                    // the flag anyway.
                    Err(tree::Error::NoAuth(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

impl<T: Tree> Feed for Feeds<T> {
    /// Waits for a change by another process.
    async fn next(&mut self) -> Result<Event, tree::Error> {
        let ours = [
            paths::machine_agent(self.machine),
            paths::machine_host(self.machine),
            paths::machine_problem(self.machine),
            paths::machine_checkpoint(self.machine),
            paths::machine_stopping(self.machine),
            paths::machine_firewall(self.machine),
            paths::machine_firewall_log(self.machine),
        ];
        loop {
            if self.feeds.is_empty() {
                std::future::pending::<()>().await;
            }
            let waiting = self.feeds.values_mut().map(|feed| Box::pin(feed.next()));
            let (event, _, _) = select_all(waiting).await;
            match event? {
                Event::Changed(path) if ours.contains(&path) => {}
                _ => return Ok(Event::Everything),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::changes::GATHER;
    use crate::store::tree::Write;
    use crate::store::{Credential, MemoryStore, MemoryTree};

    /// If a pass took so long that the claim must be confirmed at once, the wait for changes is
    /// dropped immediately.
    #[tokio::test(start_paused = true)]
    async fn a_change_survives_a_cancelled_wait() {
        let operator = Credential::generate("operator").unwrap();
        let tree = MemoryStore::default().connect(Some(&operator));
        let roles = Roles { operator: operator.identity(), controller: operator.identity() };
        let create = |path| Write::create(path, Vec::new(), roles.operators());
        tree.write(vec![create(paths::machines())]).await.unwrap();
        let machine = MachineId::new(0);
        let mut changes = Changes::new(Feeds::<MemoryTree>::new(machine));
        changes.feed_mut().watch(&tree, vec![paths::machines()]).await.unwrap();
        changes.gather().await.unwrap();
        assert!(
            changes.gathered().everything() && changes.gathered().is_empty(),
            "a new watch reports everything, once"
        );
        let limit = Duration::from_secs(3600);
        assert!(tokio::time::timeout(limit, changes.gather()).await.is_err(), "no change, no wake-up");
        tree.write(vec![create(paths::machine(machine))]).await.unwrap();
        assert!(tokio::time::timeout(GATHER / 5, changes.gather()).await.is_err(), "it gathers");
        tokio::time::timeout(limit, changes.gather()).await.expect("a wake-up").unwrap();
        assert!(changes.gathered().everything() && changes.gathered().is_empty(), "once");
        tree.write(vec![create(paths::machine(MachineId::new(1)))]).await.unwrap();
        assert!(tokio::time::timeout(GATHER / 5, changes.gather()).await.is_err(), "it gathers");
        assert!(changes.gathered().everything(), "the next pass includes the change");
        assert!(
            tokio::time::timeout(limit, changes.gather()).await.is_err(),
            "and it does not wake another pass"
        );
    }
}
