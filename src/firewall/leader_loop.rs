//! The main loop of the controller: acquires the lease, then runs passes until the lease is lost or
//! the process is asked to stop. A pass follows a change, runs when a failed machine is due again,
//! and at every resync, because events may be lost. An event only names what to read again.

use std::convert::Infallible;
use std::time::Duration;

use portcullis_provider::Firewall;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::controller::{FirewallController, Pass};
use crate::machine::provisioning::{PendingReads, Provisioning, ProvisioningUpdate};
use crate::mutant;
use crate::runtime::reconcile::{Due, Ended, Leased, Passed, Reconciler, STORE_PAUSE, Schedule};
use crate::runtime::reconcile::{run_leased, run_passes};
use crate::runtime::service::stopped;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::{Changes, Dirty};
use crate::store::lease::{LEASE, Lease, LeaseKey};
use crate::store::paths;
use crate::store::tree::{Event, Tree};

/// The progress of the controller, for monitoring.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Whether the controller holds the lease.
    pub leading: bool,
    /// Passes since the lease was acquired.
    pub passes: u64,
    pub last: Pass,
    pub store_failures: u64,
    /// Whether the connection to the store is currently lost.
    pub store_lost: bool,
}

impl Progress {
    pub(super) fn became_leader(&mut self) {
        (self.leading, self.passes, self.store_lost) = (true, 0, false);
    }

    pub(super) fn store_failed(&mut self) {
        self.store_failures += 1;
        self.store_lost = true;
    }
}

/// Runs until `stop` is set, without provisioning machines.
///
/// # Errors
/// Permanent errors: wrong credentials, or a missing environment.
pub async fn run<T: Tree, F: Firewall>(
    controller: &mut FirewallController<T, F>,
    tree: &T,
    roles: &Roles,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let no_provisioner: Option<&mut Infallible> = None;
    run_provisioning(controller, no_provisioner, tree, roles, resync, progress, stop).await
}

/// Like [`run`], and also provisions instances for the machines that need one.
///
/// # Errors
/// As for [`run`].
pub async fn run_provisioning<T: Tree, F: Firewall, P: Provisioning + Send>(
    controller: &mut FirewallController<T, F>,
    mut provisioner: Option<&mut P>,
    tree: &T,
    roles: &Roles,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    if let Some(provisioner) = provisioner.as_deref_mut() {
        let metrics = controller.metrics();
        provisioner.count_failures(Box::new(move |kind| metrics.not_provisioned(kind)));
    }
    let token = Lease::token()?;
    run_leased(&mut Leading { controller, provisioner, tree, roles, resync, progress, token }, &mut stop)
        .await
}

struct Leading<'a, T: Tree, F, P> {
    controller: &'a mut FirewallController<T, F>,
    provisioner: Option<&'a mut P>,
    tree: &'a T,
    roles: &'a Roles,
    resync: Duration,
    progress: &'a watch::Sender<Progress>,
    token: String,
}

impl<T: Tree, F: Firewall, P: Provisioning + Send> Leased for Leading<'_, T, F, P> {
    type Lease = Lease;
    type Error = Error;

    async fn acquire(&mut self, stop: &mut watch::Receiver<bool>) -> Result<Option<Lease>, Error> {
        let Self { controller, tree, roles, progress, token, .. } = self;
        tokio::select! {
            biased;
            () = stopped(stop) => Ok(None),
            acquired = async {
                tree.sync().await?;
                progress.send_modify(|progress| progress.store_lost = false);
                Lease::acquire(*tree, &LeaseKey::firewall(), &roles.controllers(), token).await
            } => acquired.map(Some),
            // Failures of the store are ignored here, because `Lease::acquire` reports them.
            never = async {
                loop {
                    let error = controller.follow_checkpoints(*tree).await;
                    debug!(%error, "cannot follow the checkpoints of the leader");
                    tokio::time::sleep(STORE_PAUSE).await;
                }
            } => never,
        }
    }

    async fn hold(&mut self, lease: Lease, stop: &mut watch::Receiver<bool>) -> Result<Ended, Error> {
        info!("leading");
        self.progress.send_modify(Progress::became_leader);
        let Self { controller, provisioner, tree, resync, progress, .. } = self;
        let provisioner = provisioner.as_deref_mut();
        run_as_leader(*controller, provisioner, *tree, lease, *resync, progress, stop).await
    }

    fn released(&mut self) {
        self.progress.send_modify(|progress| progress.leading = false);
    }

    fn store_lost(&mut self) {
        self.progress.send_modify(Progress::store_failed);
    }

    fn is_transient(error: &Error) -> bool {
        error.is_transient() && !mutant!(ExitsOnStoreOutage)
    }
}

/// Runs firewall and provisioning concurrently: neither waits for the other's calls, and both end
/// with the lease.
async fn run_as_leader<T: Tree, F: Firewall, P: Provisioning>(
    controller: &mut FirewallController<T, F>,
    provisioner: Option<&mut P>,
    tree: &T,
    lease: Lease,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    if provisioner.is_some() {
        controller.recall_notes();
    }
    let pending_reads = watch::Sender::new(PendingReads::default());
    let (send_updates, updates) = mpsc::channel(1);
    let provisioning = {
        let (lease, pending_reads) = (lease.clone(), &pending_reads);
        async move {
            match provisioner {
                Some(provisioner) => provisioner.work(lease, pending_reads, &send_updates).await,
                None => std::future::pending().await,
            }
        }
    };
    let firewall = run_firewall(controller, tree, lease, resync, progress, (&pending_reads, updates), stop);
    // Boxed: with a cloud provider the futures are large and exceed the compiler's nesting limit.
    tokio::select! {
        biased;
        ended = Box::pin(firewall) => ended,
        ended = Box::pin(provisioning) => ended.map(|()| Ended::Replaced),
    }
}

async fn run_firewall<T: Tree, F: Firewall>(
    controller: &mut FirewallController<T, F>,
    tree: &T,
    lease: Lease,
    resync: Duration,
    progress: &watch::Sender<Progress>,
    (pending_reads, updates): (&watch::Sender<PendingReads>, mpsc::Receiver<ProvisioningUpdate>),
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    controller.drop_caches();
    controller.prepare().await?;
    let changes = Changes::new(tree.watch(&paths::root()).await?);
    let resync = if mutant!(NoResync) { 1000 * resync } else { resync };
    let schedule = Schedule::new(Instant::now() + resync, resync, LEASE / 3);
    let mut passes = Passes { controller, tree, lease, progress, changes, pending_reads, updates };
    run_passes(&mut passes, schedule, stop).await
}

/// The state of the loop of passes.
struct Passes<'a, T: Tree, F> {
    controller: &'a mut FirewallController<T, F>,
    tree: &'a T,
    lease: Lease,
    progress: &'a watch::Sender<Progress>,
    changes: Changes<T::Feed>,
    /// Notifies provisioning of changes.
    pending_reads: &'a watch::Sender<PendingReads>,
    /// Receives results of provisioning.
    updates: mpsc::Receiver<ProvisioningUpdate>,
}

impl<T: Tree, F: Firewall> Reconciler for Passes<'_, T, F> {
    type Error = Error;

    async fn changed(&mut self) -> Result<(), Error> {
        let update = tokio::select! {
            biased;
            gathered = self.changes.gather() => return Ok(gathered?),
            Some(update) = self.updates.recv() => update,
        };
        for machine in
            self.controller.set_notes(&update.problems, update.is_complete).into_iter().chain(update.changed)
        {
            self.changes.add(&Event::Changed(paths::machine(machine)));
        }
        Ok(())
    }

    fn retry_at(&self) -> Option<Instant> {
        self.controller.next_retry()
    }

    async fn confirm(&mut self) -> Result<bool, Error> {
        self.changes.during(self.lease.confirm(self.tree)).await
    }

    async fn pass(&mut self, due: Due) -> Result<Passed, Error> {
        let late = due == Due::Retries && mutant!(EventsIgnoredDuringRetries);
        let mut dirty = if late { Dirty::default() } else { self.changes.gathered() };
        if mutant!(ReconnectsIgnored) && dirty.everything() && self.controller.view().is_some() {
            dirty = Dirty::default();
        }
        if due == Due::Everything {
            dirty.add(&Event::Everything, Instant::now());
        }
        self.pending_reads.send_if_modified(|reads| {
            reads.add(&dirty);
            !reads.is_empty()
        });
        let pass = match self.changes.during(self.controller.pass(&dirty, &self.lease)).await {
            Ok(pass) => pass,
            Err(Error::Tree(err)) if self.lease.was_replaced(&err) => return Ok(Passed::Replaced),
            // Another process wrote the same znodes: everything is read again.
            Err(Error::Tree(err)) if err.is_conflict() => {
                warn!(error = %err, "reports written by another process");
                // If the container of the reports was deleted, every later write would fail.
                self.controller.prepare().await?;
                return Ok(Passed::Conflict);
            }
            Err(err) if err.is_transient() && mutant!(ViewKeptAfterStoreFailure) => {
                return Ok(Passed::Looked { everything: dirty.everything(), unconfirmed: false });
            }
            Err(err) => return Err(err),
        };
        self.progress.send_modify(|progress| {
            progress.passes += 1;
            progress.last = pass;
        });
        Ok(Passed::Looked {
            everything: dirty.everything(),
            unconfirmed: self.controller.awaits_confirmation(),
        })
    }
}

#[cfg(test)]
#[path = "leader_loop_tests.rs"]
pub(super) mod tests;
