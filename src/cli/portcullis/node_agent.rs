//! The agent of a node inside `portcullis machine` and `up`: it connects the systemd of this
//! machine with the manager of the environment. The work is in `fleet::agent`.

#[cfg(feature = "fleet")]
mod run;

use std::path::Path;

#[cfg(not(feature = "fleet"))]
use crate::cli::error::Refusal;
use crate::net::tls::ClientTls;

#[cfg(feature = "fleet")]
pub(super) use self::run::NodeAgent;

/// systemd creates this directory when it runs as the first process.
const SYSTEMD_RUNS: &str = "/run/systemd/system";

/// The options of an agent inside another role.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct SystemdArgs {
    /// systemd of this machine that the environment's manager controls: `system`, `user`, an
    /// address of D-Bus, or `none` [default: system, for root on a machine that runs systemd; else
    /// none]
    #[arg(long, value_name = "BUS")]
    systemd: Option<String>,
}

impl SystemdArgs {
    /// The bus of systemd, if it is controlled.
    fn bus(&self) -> Option<&str> {
        match self.systemd.as_deref() {
            Some("none") => None,
            Some(bus) => Some(bus),
            None => is_default().then_some("system"),
        }
    }

    pub(super) fn is_controlled(&self) -> bool {
        self.bus().is_some()
    }

    /// Returns the agent, if systemd is controlled. It uses a manager on loopback only on the
    /// manager's own host.
    ///
    /// # Errors
    /// If this build has no fleet.
    pub(super) fn agent(&self, tls: &ClientTls, is_managers_host: bool) -> anyhow::Result<Option<NodeAgent>> {
        self.bus().map(|bus| NodeAgent::new(bus, tls, is_managers_host)).transpose()
    }
}

fn is_default() -> bool {
    cfg!(feature = "fleet") && rustix::process::geteuid().is_root() && Path::new(SYSTEMD_RUNS).is_dir()
}

/// An agent that this build does not have.
#[cfg(not(feature = "fleet"))]
pub(super) enum NodeAgent {}

#[cfg(not(feature = "fleet"))]
impl NodeAgent {
    fn new(_: &str, _: &ClientTls, _: bool) -> anyhow::Result<Self> {
        Err(Refusal::NoFleet.into())
    }

    pub(super) async fn run(
        self,
        _: crate::store::ZkTree,
        _: crate::model::MachineId,
        _: tokio::sync::watch::Receiver<bool>,
    ) {
        match self {}
    }
}
