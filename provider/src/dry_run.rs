//! A provider that looks and does not touch: it reads through another one and only notes what it was told to do. It has
//! no machines to launch or end, so whoever runs on it cannot.

use crate::error::Error;
use crate::provider::{Applied, Firewall, MachineNumber, Seen};
use crate::rule::Change;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What would be done is the latest change per machine: the one behind it keeps asking for the same, since nothing
/// that it reads ever changes.
#[derive(Debug)]
pub struct DryRun<F> {
    inner: F,
    would: Mutex<BTreeMap<MachineNumber, Change>>,
}

impl<F: Firewall> DryRun<F> {
    pub fn new(inner: F) -> Self {
        Self { inner, would: Mutex::new(BTreeMap::new()) }
    }

    /// The last change that was asked for on each machine.
    pub fn would_change(&self) -> BTreeMap<MachineNumber, Change> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MachineNumber, Change>> {
        self.would.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: Firewall> Firewall for DryRun<F> {
    async fn observe(
        &self,
        machines: &BTreeSet<MachineNumber>,
    ) -> Result<BTreeMap<MachineNumber, Seen>, Error> {
        self.inner.observe(machines).await
    }

    async fn apply(&self, machine: MachineNumber, change: &Change) -> Applied {
        tracing::info!(%machine, open = change.open.len(), close = change.close.len(), "dry run: not changed");
        self.lock().insert(machine, change.clone());
        Applied::as_one(Ok(()))
    }

    fn rules_per_family(&self) -> Option<usize> {
        self.inner.rules_per_family()
    }

    fn requests(&self) -> BTreeMap<String, u64> {
        self.inner.requests()
    }
}
