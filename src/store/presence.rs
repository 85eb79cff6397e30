//! Signs of life of agents: ephemeral znodes that exist for as long as an agent's session, and a
//! lasting mark of machines that ever had one. The agent of a machine holds a lease instead; see
//! `lease`.

use super::acl::Acl;
use super::error;
use super::paths;
use super::records::Host;
use super::tree::{Error, Tree, Write};
use super::update::{ensure, put};
use crate::model::{MachineId, UnitId};

/// Marks a unit as run by an agent, for as long as this session lasts. A mark that an earlier
/// session left stays: its end is an event, after which the agent calls this again.
///
/// # Errors
/// [`Error::NoNode`] if the unit was removed, and the failures of the store.
pub async fn show_unit_agent<T: Tree>(tree: &T, unit: UnitId, acl: Acl) -> Result<(), Error> {
    let create = Write::Create { path: paths::unit_agent(unit), data: Vec::new(), acl, ephemeral: true };
    match tree.write(vec![create]).await {
        Err(Error::NodeExists(_)) => Ok(()),
        done => done,
    }
}

/// Records that a machine had an agent, so that status tells a lost agent from one that never
/// started.
///
/// # Errors
/// [`Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn mark_machine_started<T: Tree>(tree: &T, machine: MachineId, acl: &Acl) -> Result<(), Error> {
    ensure(tree, &paths::machine_started(machine), acl).await
}

/// Reports the host name and the addresses of a machine. An equal report is not written.
///
/// # Errors
/// [`Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn report_host<T: Tree>(
    tree: &T,
    machine: MachineId,
    host: &Host,
    acl: &Acl,
) -> Result<(), error::Error> {
    put(tree, &paths::machine_host(machine), &host.to_bytes(), acl).await
}
