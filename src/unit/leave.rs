//! Removes all units from a machine that leaves its environment: runs their `stop` hooks, ends
//! their processes and deletes their files. The store is not used, since it no longer contains the
//! machine. A failed `stop` hook is logged and does not keep the unit.

use std::io;

use tokio::sync::watch;
use tracing::{info, warn};

use super::agent::{Stopped, last_stop};
use super::dir_lock;
use super::host::UnitHost;
use super::supervisor::Error;
use super::tree_walk::remove_tree;
use crate::model::UnitId;

/// Removes all units of the machine and returns their number. Fails while another process runs
/// them.
///
/// # Errors
/// See [`Error`]. A second call continues with the units that are left.
pub async fn remove_units(host: &UnitHost, mut stop: watch::Receiver<bool>) -> Result<usize, Error> {
    let Some(locked) = dir_lock::take(host, &mut stop).await? else { return Ok(0) };
    let host = locked.host.clone();
    let directory = host.directory.display().to_string();
    // Hooks and processes are waited for.
    let removed = tokio::task::spawn_blocking(move || {
        let units_with_files = host.units_with_files()?;
        units_with_files.iter().try_for_each(|id| remove_unit(&host, *id))?;
        remove_tree(&host.charms())?;
        Ok(units_with_files.len())
    });
    let removed = removed.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    removed.map_err(|source| Error::Directory { directory, source })
}

fn remove_unit(host: &UnitHost, id: UnitId) -> io::Result<()> {
    let unit_dir = host.unit_dir(id);
    match last_stop(&unit_dir) {
        Ok(Stopped::Ran) => info!(unit = %id, "stop hook has run"),
        Ok(Stopped::NotDue) => {}
        Err(error) => warn!(unit = %id, %error, "stop hook did not run"),
    }
    unit_dir.end_all()?;
    unit_dir.remove()?;
    info!(unit = %id, "unit removed");
    Ok(())
}
