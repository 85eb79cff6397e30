//! The firewall of the machine that this process runs on: connects the firewall agent to the
//! presence of the machine. Rules are decided in `wanted` and `plan`.

use portcullis_provider::Firewall;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;

use super::agent::Agent;
use super::own;
use super::run::Progress;
use crate::machine::presence::{self, Claim, Workload};
use crate::store::changes::Dirty;
use crate::store::lease::Lease;
use crate::store::paths::NodePath;
use crate::store::tree::Tree;

/// Keeps the presence of the machine and reconciles its firewall until `stop` is set. Without an
/// agent it only keeps the presence.
///
/// # Errors
/// See [`presence::Error`].
pub async fn run<T: Tree, F: Firewall>(
    agent: Option<&mut Agent<T, F>>,
    tree: &T,
    claim: &Claim,
    progress: &watch::Sender<Progress>,
    stop: watch::Receiver<bool>,
) -> Result<(), presence::Error> {
    presence::run(&mut LocalFirewall { agent, claim, progress }, tree, claim, stop).await
}

struct LocalFirewall<'a, T, F> {
    agent: Option<&'a mut Agent<T, F>>,
    claim: &'a Claim,
    progress: &'a watch::Sender<Progress>,
}

impl<T: Tree, F: Firewall> Workload for LocalFirewall<'_, T, F> {
    fn claimed(&mut self) {
        self.progress.send_modify(Progress::leads);
        if let Some(agent) = self.agent.as_deref_mut() {
            agent.forget();
        }
    }

    fn released(&mut self) {
        self.progress.send_modify(|progress| progress.leading = false);
    }

    fn store_lost(&mut self) {
        self.progress.send_modify(Progress::loses_the_store);
    }

    fn retry_at(&self) -> Option<Instant> {
        self.agent.as_ref().and_then(|agent| agent.next_retry())
    }

    async fn pass(&mut self, dirty: &Dirty, lead: &Lease) -> Result<bool, crate::store::Error> {
        let Some(agent) = self.agent.as_deref_mut() else { return Ok(false) };
        let pass = agent.pass(dirty, lead).await?;
        debug!(machine = %self.claim.machine, ?pass, "looked");
        self.progress.send_modify(|progress| {
            progress.passes += 1;
            progress.last = pass;
        });
        Ok(agent.in_doubt())
    }

    fn watched(&self) -> Option<Vec<NodePath>> {
        let view = self.agent.as_ref()?.view()?;
        Some(own::watched(view, self.claim.machine))
    }
}
