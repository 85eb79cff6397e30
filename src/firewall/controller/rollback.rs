//! Keeps ports open while the store is behind what this agent acted on: rules that such a store
//! does not ask for may belong to units that were deployed after the backup. `store::rollback`
//! decides whether the store was restored.

use std::collections::{BTreeMap, BTreeSet};

use portcullis_provider::Firewall;
use tracing::info;

use super::FirewallController;
use crate::firewall::plan::MachinePlan;
use crate::firewall::report::Report;
use crate::model::MachineId;
use crate::store::lease::Lease;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Tree};

/// Returns the data that plans act on: opening a port acts on the newest data, closing one on none.
fn basis<'p>(mut plans: impl Iterator<Item = &'p MachinePlan>, newest: i64) -> Basis {
    if plans.any(|plan| !plan.change.open.is_empty()) { Basis::UpTo(newest) } else { Basis::Known }
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Removes closes from `plans` if the store was restored from an older backup, and returns the
    /// affected machines. Ports are still opened. The reports give the reason.
    pub(super) async fn hold_if_behind(
        &mut self,
        plans: &mut BTreeMap<MachineId, MachinePlan>,
        reports: &mut BTreeMap<MachineId, Report>,
        lead: &Lease,
    ) -> Result<BTreeSet<MachineId>, tree::Error> {
        let (Some(guard), Some(view)) = (&self.guard, &self.view) else { return Ok(BTreeSet::new()) };
        let changes = plans.values().any(|plan| !plan.change.is_empty());
        if changes || !self.reviewed {
            let before = self.standing.held().is_some();
            let basis = basis(plans.values(), view.newest);
            self.standing = guard.review(&self.tree, Some(lead.fence()), basis).await?;
            self.reviewed = true;
            if before && self.standing == Standing::Good {
                info!("closing ports resumed");
            }
        }
        let Some(why) = self.standing.held().map(str::to_owned) else { return Ok(BTreeSet::new()) };
        let mut kept = BTreeSet::new();
        for (&id, plan) in plans.iter_mut() {
            let lost = plan.lost();
            plan.change.close.retain(|rule| !lost.contains(rule));
            if !lost.is_empty() {
                kept.insert(id);
            }
            if let Some(report) = reports.get_mut(&id) {
                self.keep_granted(id, &lost, report);
            }
        }
        for report in reports.values_mut() {
            report.problem.get_or_insert_with(|| format!("ports are not closed: {why}"));
        }
        Ok(kept)
    }

    /// Saves the leader's checkpoints while this replica is on standby.
    pub(crate) async fn stand_by(&self, tree: &T) -> tree::Error {
        match self.guard.as_deref() {
            Some(guard) => RollbackGuard::follow(guard, tree).await,
            None => std::future::pending().await,
        }
    }
}
