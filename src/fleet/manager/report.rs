//! The state of all nodes for a report outside D-Bus: which are connected, and which of their
//! systemd units have failed.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::Manager;
use crate::fleet::name::NodeName;

/// The time between two reads of all units of all nodes.
const READ_EVERY: Duration = Duration::from_secs(30);
/// The least time between two reads, when nodes connect one after another.
const READ_PAUSE: Duration = Duration::from_secs(2);

/// A node as the manager sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeReport {
    pub online: bool,
    /// The address of the connected agent.
    pub address: Option<String>,
    /// Milliseconds since 1970; 0 if no agent was ever connected to this manager.
    pub last_seen_ms: u64,
}

/// The names of the failed systemd units of each node that has answered.
pub type FailedUnits = BTreeMap<NodeName, Vec<String>>;

impl Manager {
    /// Returns a receiver that changes when a node is added, removed, connected or lost.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.state().changes.subscribe()
    }

    pub fn reports(&self) -> BTreeMap<NodeName, NodeReport> {
        let state = self.state();
        let report = |node: &super::state::Node| NodeReport {
            online: node.link.is_some(),
            address: Some(node.peer_ip()).filter(|address| !address.is_empty()),
            last_seen_ms: node.last_seen_us / 1_000,
        };
        state.nodes.iter().map(|(name, node)| (name.clone(), report(node))).collect()
    }

    /// Reads the failed units of all connected nodes, soon after a node has connected and
    /// regularly. Runs until it is dropped.
    pub async fn follow_failed_units(&self, found: &watch::Sender<FailedUnits>) {
        let mut changes = self.changes();
        loop {
            let earliest = Instant::now() + READ_PAUSE;
            changes.mark_unchanged();
            let known = found.borrow().clone();
            let read = self.read_failed_units(&known).await;
            found.send_if_modified(|known| {
                let is_new = *known != read;
                *known = read;
                is_new
            });
            let latest = Instant::now() + READ_EVERY;
            tokio::select! {
                _ = changes.changed() => sleep_until(earliest).await,
                () = sleep_until(latest) => {}
            }
        }
    }
}
