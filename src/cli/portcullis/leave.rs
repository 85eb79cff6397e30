//! Removes a machine from its environment: deletes its units, their processes, the firewall table
//! and the machine file from this host. This happens if the store has a tombstone of the machine,
//! or by hand with `portcullis machine --leave`.

use std::path::PathBuf;

use anyhow::Context as _;
use portcullis_provider::nftables::{Mode, TableName, TableSettings};
use portcullis_provider::{Error as FirewallError, Nftables};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::cli::error::{Refusal, Usage};
use crate::cli::portcullis::machine_file;
use crate::identity::files::MachineIdentity;
use crate::machine::number;
use crate::net::tls::IdentityFiles;
use crate::store::rollback::{RollbackGuard, Standing};
use crate::store::tombstones::find_tombstone;
use crate::store::tree::Tree;
use crate::unit::host::UnitHost;
use crate::unit::leave::remove_units;

/// The objects that are removed from this host.
#[derive(Debug, Clone)]
pub(super) struct Leaving {
    pub(super) host: UnitHost,
    /// The files of the machine's certificate.
    pub(super) identity: MachineIdentity,
    pub(super) machine_file: PathBuf,
}

/// The objects that were removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Removed {
    pub(super) units: usize,
    pub(super) table: bool,
}

impl Leaving {
    /// Removes everything of the machine. The machine file goes last, so that a second call
    /// continues after a failure.
    pub(super) async fn leave(&self, stop: watch::Receiver<bool>) -> anyhow::Result<Removed> {
        let units = remove_units(&self.host, stop).await?;
        let table = self.remove_table().await?;
        let IdentityFiles { certificates, key } = self.identity.files();
        for file in [&certificates, &key, &self.machine_file] {
            machine_file::remove(file)?;
        }
        info!(machine = %self.host.machine, units, table, "machine has left its environment");
        Ok(Removed { units, table })
    }

    /// Removes the firewall table. Removes nothing if the table belongs to another program, if this
    /// host has no nftables, or if this user may not change it.
    async fn remove_table(&self) -> anyhow::Result<bool> {
        let table = TableName::for_instance(self.host.environment.as_str()).map_err(Usage::new)?;
        let settings =
            TableSettings { table, mode: Mode::Enforce, protected: Vec::new(), protected_from: Vec::new() };
        match Nftables::new(number(self.host.machine), settings).remove_table().await {
            Ok(removed) => Ok(removed),
            Err(
                error @ (FirewallError::Foreign { .. }
                | FirewallError::Unusable { .. }
                | FirewallError::Denied { .. }),
            ) => {
                warn!(%error, "the firewall table was not removed");
                Ok(false)
            }
            Err(error) => Err(error).context("cannot remove the firewall table"),
        }
    }

    /// Leaves if the operator has terminated the machine. Returns the error that ends the agent, or
    /// `None` if the store has no tombstone of the machine; then nothing is removed.
    pub(super) async fn leave_if_terminated<T: Tree>(
        &self,
        tree: &T,
        guard: &RollbackGuard,
        stop: watch::Receiver<bool>,
    ) -> anyhow::Result<Option<Refusal>> {
        let machine = self.host.machine;
        let Some(tombstone) = find_tombstone(tree, machine, &self.host.identity).await? else {
            return Ok(None);
        };
        if let Standing::RolledBack(reason) = guard.review_tombstone(tombstone.checkpoint()).await? {
            return Ok(Some(Refusal::UntrustedTombstone { machine, reason }));
        }
        let Removed { units, .. } = self.leave(stop).await?;
        Ok(Some(Refusal::Left { machine, units }))
    }
}
