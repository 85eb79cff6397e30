//! The firewall of the machine that this process runs on: connects the firewall controller to the
//! presence of the machine. Rules are decided in `wanted` and `plan`.

use portcullis_provider::Firewall;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use super::controller::FirewallController;
use super::leader_loop::Progress;
use super::observe_local;
use crate::machine::presence::{self, MachineClaim, Workload};
use crate::store::changes::Dirty;
use crate::store::lease::Lease;
use crate::store::paths::NodePath;
use crate::store::tree::Tree;

/// Keeps the presence of the machine and reconciles its firewall until `stop` is set. Without a
/// controller it only keeps the presence.
///
/// # Errors
/// See [`presence::Error`].
pub async fn run<T: Tree, F: Firewall>(
    controller: Option<&mut FirewallController<T, F>>,
    tree: &T,
    claim: &MachineClaim,
    progress: &watch::Sender<Progress>,
    stop: watch::Receiver<bool>,
) -> Result<(), presence::Error> {
    presence::run(&mut LocalFirewall { controller, claim, progress }, tree, claim, stop).await
}

struct LocalFirewall<'a, T, F> {
    controller: Option<&'a mut FirewallController<T, F>>,
    claim: &'a MachineClaim,
    progress: &'a watch::Sender<Progress>,
}

impl<T: Tree, F: Firewall> Workload for LocalFirewall<'_, T, F> {
    fn claimed(&mut self) {
        self.progress.send_modify(Progress::became_leader);
        if let Some(controller) = self.controller.as_deref_mut() {
            controller.drop_caches();
        }
    }

    fn released(&mut self) {
        self.progress.send_modify(|progress| progress.leading = false);
    }

    fn store_lost(&mut self) {
        self.progress.send_modify(Progress::store_failed);
    }

    fn retry_at(&self) -> Option<Instant> {
        self.controller.as_ref().and_then(|controller| controller.next_retry())
    }

    async fn pass(&mut self, dirty: &Dirty, lease: &Lease) -> Result<bool, crate::store::Error> {
        let Some(controller) = self.controller.as_deref_mut() else { return Ok(false) };
        let pass = controller.pass(dirty, lease).await?;
        debug!(machine = %self.claim.machine, ?pass, "pass completed");
        self.progress.send_modify(|progress| {
            progress.passes += 1;
            progress.last = pass;
        });
        Ok(controller.awaits_confirmation())
    }

    fn watched(&self) -> Option<Vec<NodePath>> {
        let view = self.controller.as_ref()?.view()?;
        Some(observe_local::paths_to_watch(view, self.claim.machine))
    }
}
