//! Removes all units from a machine that leaves its environment: runs their `stop` hooks, ends
//! their processes and deletes their files. The store is not used, since it no longer contains the
//! machine. A failed `stop` hook is logged and does not keep the unit.

use std::io;

use tokio::sync::watch;
use tracing::{info, warn};

use super::agent::{Stopped, last_stop};
use super::dir_lock;
use super::host::Site;
use super::supervisor::Error;
use super::tree_walk::remove_tree;
use crate::model::UnitId;

/// Removes all units of the machine and returns their number. Fails while another process runs
/// them.
///
/// # Errors
/// See [`Error`]. A second call continues with the units that are left.
pub async fn remove_units(site: &Site, mut stop: watch::Receiver<bool>) -> Result<usize, Error> {
    let Some(ground) = dir_lock::take(site, &mut stop).await? else { return Ok(0) };
    let site = ground.site.clone();
    let directory = site.directory.display().to_string();
    // Hooks and processes are waited for.
    let removed = tokio::task::spawn_blocking(move || {
        let residents = site.residents()?;
        residents.iter().try_for_each(|id| remove_unit(&site, *id))?;
        remove_tree(&site.charms())?;
        Ok(residents.len())
    });
    let removed = removed.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    removed.map_err(|source| Error::Directory { directory, source })
}

fn remove_unit(site: &Site, id: UnitId) -> io::Result<()> {
    let home = site.home(id);
    match last_stop(&home) {
        Ok(Stopped::Ran) => info!(unit = %id, "stop hook has run"),
        Ok(Stopped::NotDue) => {}
        Err(error) => warn!(unit = %id, %error, "stop hook did not run"),
    }
    home.end_all()?;
    home.remove()?;
    info!(unit = %id, "unit removed");
    Ok(())
}
