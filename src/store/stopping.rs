//! Units that were removed and whose `stop` hook failed: what their machine says of them, below its own node, until the
//! operator has decided. In the tree they are no units any more, and have no ports.

use super::environment::Environment;
use super::error::Error;
use super::paths::{self, NodePath};
use super::records::{UnitState, corrupt};
use super::tree::{Read, Tree};
use crate::model::{MachineId, UnitId, UnitName};
use serde_json::Value;

/// What a machine says of such a unit: its workflow's state, and its name with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopping {
    pub name: UnitName,
    pub state: UnitState,
}

/// The key of the unit's name beside its state.
pub const NAME: &str = "unit";

/// The key of what status shows of its state.
pub const LABEL: &str = "state";

impl Stopping {
    /// # Errors
    /// [`Error::Corrupt`], naming `path`.
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let state = UnitState::parse(path, data)?;
        // It is an object, or there would be no state.
        let value: Value = serde_json::from_slice(data).unwrap_or_default();
        let name = value.get(NAME).and_then(Value::as_str).and_then(|name| name.parse().ok());
        let name = name.ok_or_else(|| corrupt(path, format!("\"{NAME}\" is not the name of a unit")))?;
        Ok(Self { name, state })
    }
}

/// All that some machines say. One that cannot be read is in it as such.
///
/// # Errors
/// The failures of the store.
pub async fn stopping<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<Vec<(MachineId, UnitId, Result<Stopping, String>)>, super::tree::Error> {
    let lists = machines.iter().map(|id| Read::Children(paths::machine_stopping(*id))).collect();
    let mut units = Vec::new();
    for (machine, list) in machines.iter().zip(tree.read_each(lists).await?) {
        // Whoever shuts others out of the list has nothing to say.
        let names = list.ok().and_then(super::tree::Answer::into_children).unwrap_or_default();
        units.extend(names.iter().filter_map(|name| Some((*machine, UnitId::from_key(name).ok()?))));
    }
    let paths = units.iter().map(|(machine, unit)| paths::machine_stopping_unit(*machine, *unit));
    let nodes = tree.data_of_each(paths.collect()).await?;
    let said = units.into_iter().zip(nodes).filter_map(|((machine, unit), node)| {
        let path = paths::machine_stopping_unit(machine, unit);
        let parsed = match node {
            Ok(node) => Stopping::parse(&path, &node?.data).map_err(|problem| problem.to_string()),
            Err(refused) => Err(refused),
        };
        Some((machine, unit, parsed))
    });
    Ok(said.collect())
}

impl<T: Tree> Environment<T> {
    /// Where a unit's machine says that its `stop` hook failed, if one does.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn stopping(&self, name: &UnitName) -> Result<Option<NodePath>, Error> {
        let machines = self.machine_ids().await?;
        let all = stopping(&self.tree, &machines).await?;
        let ours = all.into_iter().find(|(_, _, said)| said.as_ref().is_ok_and(|said| said.name == *name));
        Ok(ours.map(|(machine, unit, _)| paths::machine_stopping_unit(machine, unit)))
    }
}
