//! Units that were removed and whose `stop` hook failed: their machine reports them below its own
//! znode until the operator has decided. They are no longer units of the environment, and have no
//! ports.

use super::acl::Roles;
use super::credentials::Identity;
use super::environment::Environment;
use super::error::Error;
use super::paths::{self, NodePath};
use super::records::{UnitState, corrupt};
use super::tree::{self, Answer, Node, Read, Tree};
use super::update::{self, Change};
use crate::model::{MachineId, UnitId, UnitName};
use serde_json::Value;

/// A machine's report of such a unit: the state of its workflow, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedStop {
    pub name: UnitName,
    pub state: UnitState,
}

/// The key of the unit's name beside its state.
pub const NAME: &str = "unit";

/// The key of the state that status shows.
pub const LABEL: &str = "state";

impl FailedStop {
    pub fn parse(path: &NodePath, data: &[u8]) -> Result<Self, Error> {
        let state = UnitState::parse(path, data)?;
        // A state is always an object.
        let value: Value = serde_json::from_slice(data).unwrap_or_default();
        let name = value.get(NAME).and_then(Value::as_str).and_then(|name| name.parse().ok());
        let name = name.ok_or_else(|| corrupt(path, format!("\"{NAME}\" is not the name of a unit")))?;
        Ok(Self { name, state })
    }
}

/// All reports of some machines. An unreadable report is returned as such.
pub async fn read_all<T: Tree>(
    tree: &T,
    machines: &[MachineId],
) -> Result<Vec<(MachineId, UnitId, Result<FailedStop, String>)>, tree::Error> {
    let lists = machines.iter().map(|id| Read::Children(paths::machine_stopping(*id))).collect();
    let mut units = Vec::new();
    for (machine, list) in machines.iter().zip(tree.read_each(lists).await?) {
        // A list that its machine keeps others from reading counts as empty.
        let names = list.ok().and_then(Answer::into_children).unwrap_or_default();
        units.extend(names.iter().filter_map(|name| Some((*machine, UnitId::from_key(name).ok()?))));
    }
    let paths = units.iter().map(|(machine, unit)| paths::machine_stopping_unit(*machine, *unit));
    let nodes = tree.data_of_each(paths.collect()).await?;
    let reports = units.into_iter().zip(nodes).filter_map(|((machine, unit), node)| {
        let path = paths::machine_stopping_unit(machine, unit);
        let parsed = match node {
            Ok(node) => FailedStop::parse(&path, &node?.data).map_err(|problem| problem.to_string()),
            Err(refused) => Err(refused),
        };
        Some((machine, unit, parsed))
    });
    Ok(reports.collect())
}

/// The report of one unit, as its machine reads and writes it.
#[derive(Debug)]
pub struct Report<'t, T> {
    tree: &'t T,
    machine: MachineId,
    path: NodePath,
}

impl<'t, T: Tree> Report<'t, T> {
    pub fn new(tree: &'t T, machine: MachineId, unit: UnitId) -> Self {
        Self { tree, machine, path: paths::machine_stopping_unit(machine, unit) }
    }

    /// Watches the report.
    pub async fn watch(&self) -> Result<T::Feed, tree::Error> {
        self.tree.watch(&self.path).await
    }

    /// The report as it is in the store.
    pub async fn read(&self) -> Result<Option<Node>, tree::Error> {
        self.tree.find(&self.path).await
    }

    /// Replaces the report that was read, unless it changed since.
    pub async fn write(
        &self,
        data: Vec<u8>,
        read: Option<&Node>,
        roles: &Roles,
        machine: &Identity,
    ) -> Result<(), tree::Error> {
        if read.is_none() {
            let list = paths::machine_stopping(self.machine);
            update::ensure(self.tree, &list, &roles.machine_stopping(machine)).await?;
        }
        let version = read.map(|node| node.version);
        update::write_at(self.tree, self.path.clone(), data, version, roles.unit_state(machine)).await?;
        Ok(())
    }

    /// Changes the report by compare-and-swap; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Contended`] and the failures of the store.
    pub async fn update<R>(&self, mut change: impl FnMut(&Node) -> Change<R>) -> Result<Option<R>, Error> {
        match update::update(self.tree, &self.path, |node| Ok(change(node))).await {
            Ok(result) => Ok(Some(result)),
            Err(Error::Tree(tree::Error::NoNode(_))) => Ok(None),
            Err(err) => Err(err),
        }
    }

    /// Removes the report.
    pub async fn remove(&self) -> Result<(), tree::Error> {
        update::delete(self.tree, &self.path).await
    }
}

impl<T: Tree> Environment<T> {
    /// The report of a unit whose `stop` hook failed, if there is one.
    pub async fn failed_stop(&self, name: &UnitName) -> Result<Option<NodePath>, Error> {
        let machines = self.machine_ids().await?;
        let all = read_all(&self.tree, &machines).await?;
        let is_it = |report: &Result<FailedStop, String>| report.as_ref().is_ok_and(|it| it.name == *name);
        let found = all.into_iter().find(|(_, _, report)| is_it(report));
        Ok(found.map(|(machine, unit, _)| paths::machine_stopping_unit(machine, unit)))
    }
}
