//! The interface between the firewall's leader loop and the controller that provisions instances:
//! both run under one lease, and neither part names the other. It makes no decisions.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use tokio::sync::{mpsc, watch};

use crate::model::MachineId;
use crate::store::changes::{Dirty, Key};
use crate::store::lease::Lease;

/// Counts a failure by its kind.
pub type CountFailure = Box<dyn Fn(&'static str) + Send + Sync>;

/// Provides machines with instances while the firewall's leader loop holds the lease.
pub trait Provisioning {
    /// Sets the counter of failures.
    fn count_failures(&mut self, count: CountFailure);

    /// Works under the lease; returns once another process holds it. Failures of the provider are
    /// retried and reported through `updates`.
    fn work(
        &mut self,
        lease: Lease,
        pending_reads: &watch::Sender<PendingReads>,
        updates: &mpsc::Sender<ProvisioningUpdate>,
    ) -> impl Future<Output = Result<(), crate::store::Error>> + Send;
}

/// The type of an absent provisioner.
impl Provisioning for Infallible {
    fn count_failures(&mut self, _: CountFailure) {
        match *self {}
    }

    async fn work(
        &mut self,
        _: Lease,
        _: &watch::Sender<PendingReads>,
        _: &mpsc::Sender<ProvisioningUpdate>,
    ) -> Result<(), crate::store::Error> {
        match *self {}
    }
}

/// The objects that the provisioner reads again. The leader loop adds to it, and the provisioner
/// takes all of it at once.
#[derive(Debug, Default)]
pub struct PendingReads {
    pub everything: bool,
    pub machines: BTreeSet<MachineId>,
    /// A unit was added, changed or removed.
    pub units: bool,
}

impl PendingReads {
    pub fn add(&mut self, dirty: &Dirty) {
        self.everything |= dirty.everything();
        for key in dirty.keys() {
            match key {
                Key::Machine(id) => _ = self.machines.insert(id),
                Key::Unit(_) => self.units = true,
                Key::Service(_) => {}
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        !self.everything && !self.units && self.machines.is_empty()
    }
}

/// A report of the provisioner to the firewall controller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProvisioningUpdate {
    /// The problem of each machine that has one.
    pub problems: BTreeMap<MachineId, String>,
    /// Whether machines that are not in `problems` have none. False until the provider's whole
    /// inventory was read and has settled.
    pub is_complete: bool,
    /// Machines whose group may have changed.
    pub changed: BTreeSet<MachineId>,
}
