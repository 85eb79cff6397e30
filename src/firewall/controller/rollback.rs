//! Keeps ports open while the store is older than the controller's checkpoint: rules that such a
//! store does not ask for may belong to units that were deployed after the backup.
//! `store::rollback` decides whether the store was restored.

use std::collections::BTreeSet;
use std::sync::Arc;

use portcullis_provider::Firewall;
use tracing::info;

use super::{FirewallController, Planned};
use crate::firewall::plan::MachinePlan;
use crate::model::MachineId;
use crate::store::lease::Lease;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Tree};

/// Whether the store is older than the checkpoint.
pub(super) struct RollbackCheck {
    /// `None` if the controller has no checkpoint.
    guard: Option<Arc<RollbackGuard>>,
    /// The result of the last review.
    standing: Standing,
    /// The store was reviewed since the last full read.
    is_reviewed: bool,
}

impl Default for RollbackCheck {
    fn default() -> Self {
        Self { guard: None, standing: Standing::Good, is_reviewed: false }
    }
}

impl RollbackCheck {
    pub(super) fn new(guard: Arc<RollbackGuard>) -> Self {
        Self { guard: Some(guard), ..Self::default() }
    }

    /// Requires a review in the next pass, even if it changes nothing.
    pub(super) fn must_review(&mut self) {
        self.is_reviewed = false;
    }
}

/// Returns the data that plans act on: opening a port acts on the newest data, closing one on none.
fn basis<'p>(mut plans: impl Iterator<Item = &'p MachinePlan>, newest_zxid: i64) -> Basis {
    if plans.any(|plan| !plan.change.open.is_empty()) { Basis::UpTo(newest_zxid) } else { Basis::Known }
}

impl<T: Tree, F: Firewall> FirewallController<T, F> {
    /// Removes closes from the plans if the store was restored from an older backup, and returns
    /// the affected machines. Ports are still opened. The reports give the reason.
    pub(super) async fn hold_if_rolled_back(
        &mut self,
        planned: &mut Planned,
        lease: &Lease,
    ) -> Result<BTreeSet<MachineId>, tree::Error> {
        let check = &mut self.rollback;
        let (Some(guard), Some(view)) = (&check.guard, &self.view) else { return Ok(BTreeSet::new()) };
        let changes = planned.plans.values().any(|plan| !plan.change.is_empty());
        if changes || !check.is_reviewed {
            let was_held = check.standing.rolled_back().is_some();
            let basis = basis(planned.plans.values(), view.newest_zxid);
            check.standing = guard.review(&self.tree, Some(lease.fence()), basis).await?;
            check.is_reviewed = true;
            if was_held && check.standing == Standing::Good {
                info!("closing ports resumed");
            }
        }
        let Some(why) = check.standing.rolled_back().map(str::to_owned) else { return Ok(BTreeSet::new()) };
        let mut kept = BTreeSet::new();
        for (&id, plan) in &mut planned.plans {
            let lost = plan.unreplaced_closes();
            plan.change.close.retain(|rule| !lost.contains(rule));
            if !lost.is_empty() {
                kept.insert(id);
            }
            if let Some(report) = planned.reports.get_mut(&id) {
                self.copy_last_rules(id, &lost, report);
            }
        }
        for report in planned.reports.values_mut() {
            report.problem.get_or_insert_with(|| format!("ports are not closed: {why}"));
        }
        Ok(kept)
    }

    /// Saves the leader's checkpoints while this replica is on standby.
    pub(crate) async fn follow_checkpoints(&self, tree: &T) -> tree::Error {
        match self.rollback.guard.as_deref() {
            Some(guard) => RollbackGuard::follow(guard, tree).await,
            None => std::future::pending().await,
        }
    }
}
