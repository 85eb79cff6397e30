//! The manager of the environment beside another role: `--fleet` of `controller` and `up`.

use std::net::SocketAddr;
use std::path::Path;

use crate::cli::args::environment::Target;
#[cfg(not(feature = "fleet"))]
use crate::cli::error::Refusal;
#[cfg(feature = "fleet")]
use crate::cli::output;

#[cfg(feature = "fleet")]
pub(super) use crate::cli::portcullis::manager::environment::ManagerRole;

#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct FleetArgs {
    /// Run the manager of the environment's nodes as well, and accept agents and operators on this
    /// address
    #[arg(long, value_name = "ADDR")]
    fleet: Option<SocketAddr>,
}

impl FleetArgs {
    /// The address of the listener, if one with a fixed port was asked for.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.fleet.filter(|listen| listen.port() != 0)
    }

    pub(super) fn is_given(&self) -> bool {
        self.fleet.is_some()
    }

    /// Opens the manager's listener on the address that was asked for, else on `default`, else not
    /// at all.
    pub(super) fn open(
        &self,
        target: impl FnOnce() -> anyhow::Result<Target>,
        default: Option<SocketAddr>,
        data: &Path,
    ) -> anyhow::Result<Option<ManagerRole>> {
        let Some(listen) = self.fleet.or(default) else { return Ok(None) };
        let role = ManagerRole::open(target()?, listen, data)?;
        #[cfg(feature = "fleet")]
        output::message(&format!("nodes on {}", role.address()));
        Ok(Some(role))
    }
}

/// A manager that this build does not have.
#[cfg(not(feature = "fleet"))]
pub(super) enum ManagerRole {}

#[cfg(not(feature = "fleet"))]
impl ManagerRole {
    fn open(_: Target, _: SocketAddr, _: &Path) -> anyhow::Result<Self> {
        Err(Refusal::NoFleet.into())
    }

    pub(super) fn add_metrics(&self, _: &crate::runtime::metrics::Registry) {
        match *self {}
    }

    pub(super) fn start(
        self,
        _: &mut crate::runtime::service::Service<anyhow::Error>,
        _: crate::runtime::service::OnEnd,
    ) {
        match self {}
    }
}
