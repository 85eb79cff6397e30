//! Machines: adding, reading, terminating.

use super::acl::{Acl, Roles};
use super::cas_retry::CasRetry;
use super::credentials::Credential;
use super::delete_tree::{deletions, remove};
use super::environment::{Environment, LOCAL_MACHINE};
use super::error::Error;
use super::paths;
use super::records::{
    Machine, NamedMachine, Placement, corrupt, credentials_to_bytes, machine_problem_to_bytes,
    parse_credentials,
};
use super::termination::Written;
use super::tree::{self, Read, Tree, Write};
use super::units::Counter;
use super::update::{ensure, put};
use crate::model::{HostAddress, InstanceId, MachineId, NodeName, UnitId};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

impl Machine {
    /// A machine that the controller will launch.
    pub(super) fn wanted() -> Self {
        Self { instance_id: None, name: None, addresses: Vec::new(), adopted: false, rest: Map::new() }
    }
}

/// A machine to add.
#[derive(Debug, Clone, Default)]
pub struct NewMachine {
    /// An existing instance, which is never terminated.
    pub adopted: Option<InstanceId>,
    pub name: Option<NodeName>,
    /// The address of a machine that exists already, so that the controller does not launch it.
    pub address: Option<HostAddress>,
}

impl From<Option<InstanceId>> for NewMachine {
    fn from(adopted: Option<InstanceId>) -> Self {
        Self { adopted, ..Self::default() }
    }
}

/// Whether a machine is terminated although it is in use or its agent is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    Ordinary,
    Forced,
}

/// A machine's znodes.
pub(super) fn machine_writes(
    roles: &Roles,
    id: MachineId,
    record: &Machine,
    credential: &Credential,
) -> Vec<Write> {
    let identity = credential.identity();
    vec![
        Write::create(paths::machine(id), record.to_bytes(), roles.machine(&identity)),
        Write::create(paths::machine_units(id), Vec::new(), roles.machine_units(&identity)),
        Write::create(
            paths::machine_credentials(id),
            credentials_to_bytes(credential),
            roles.machine_credentials(),
        ),
    ]
}

/// Changes the record of a machine while the lease of `fence` is held, and returns the new record.
/// `change` returns `None` if there is nothing to change; a record that became unreadable is left
/// as it is.
pub async fn record_machine<T: Tree>(
    tree: &T,
    fence: Write,
    id: MachineId,
    change: impl FnOnce(&Machine) -> Option<Machine>,
) -> Result<Option<Machine>, tree::Error> {
    let path = paths::machine(id);
    let node = tree.get(&path).await?;
    let Ok(old) = Machine::parse(&path, &node.data) else { return Ok(None) };
    let Some(new) = change(&old).filter(|new| *new != old) else { return Ok(None) };
    let write = Write::SetIfVersion { path, data: new.to_bytes(), version: node.version };
    tree.write(vec![fence, write]).await?;
    Ok(Some(new))
}

/// All machines. Children of the list that are no ids are ignored.
pub async fn list_machines<T: Tree>(tree: &T) -> Result<BTreeSet<MachineId>, tree::Error> {
    let names = tree.children(&paths::machines()).await?;
    Ok(names.iter().filter_map(|name| MachineId::from_key(name).ok()).collect())
}

/// The units on the list of a machine.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn list_machine_units<T: Tree>(tree: &T, id: MachineId) -> Result<BTreeSet<UnitId>, tree::Error> {
    let names = tree.children(&paths::machine_units(id)).await?;
    Ok(names.iter().filter_map(|name| UnitId::from_key(name).ok()).collect())
}

/// Reports what keeps a machine's agent from running its units, or with `None` that nothing does.
///
/// # Errors
/// [`tree::Error::NoNode`] if the machine was removed, and the failures of the store.
pub async fn report_machine_problem<T: Tree>(
    tree: &T,
    machine: MachineId,
    problem: Option<&str>,
    acl: &Acl,
) -> Result<(), Error> {
    let path = paths::machine_problem(machine);
    if problem.is_none() && !tree.exists(&path).await? {
        return Ok(());
    }
    put(tree, &path, &machine_problem_to_bytes(problem), acl).await
}

impl<T: Tree> Environment<T> {
    /// Adds a machine, and its name if it has one.
    ///
    /// # Errors
    /// [`Error::MachineExists`] and [`Error::ReservedMachineName`] for the name, and the failures
    /// of the store.
    pub async fn add_machine(&self, wanted: impl Into<NewMachine>) -> Result<MachineId, Error> {
        let NewMachine { adopted, name, address } = wanted.into();
        if let Some(name) = name.as_ref().filter(|name| name.is_reserved()) {
            return Err(Error::ReservedMachineName(name.clone()));
        }
        if name.is_some() {
            // Environments of older versions do not have the index.
            ensure(&self.tree, &paths::machine_names(), &self.info.roles.operators()).await?;
        }
        let mut record = Machine {
            adopted: adopted.is_some(),
            instance_id: adopted,
            name,
            addresses: address.iter().map(ToString::to_string).collect(),
            ..Machine::wanted()
        };
        let key = self.key()?;
        record.rest.insert("op".to_owned(), Value::from(key.as_str()));
        let retry = key.retry_at(paths::machines());
        let work = async |retry: &mut CasRetry| {
            loop {
                let counter = Counter::read(&self.tree, paths::machines()).await?;
                if retry.unsure {
                    let made = self.machine_marked(key.as_str()).await;
                    if let Some(id) = made? {
                        return Ok(id);
                    }
                }
                let id = MachineId::new(counter.next());
                let credential = Credential::generate(&id.key())?;
                let mut writes = vec![counter.take(1)?];
                if let Some(name) = &record.name {
                    let path = paths::machine_name(name);
                    if let Some(node) = self.tree.find(&path).await? {
                        let found = NamedMachine::parse(&path, &node.data)?;
                        let is_ours = found.op == key.as_str();
                        return if is_ours { Ok(found.id) } else { Err(Error::MachineExists(name.clone())) };
                    }
                    let named = NamedMachine { id, op: key.as_str().to_owned() };
                    writes.push(Write::create(path, named.to_bytes(), self.info.roles.operators()));
                }
                writes.extend(machine_writes(&self.info.roles, id, &record, &credential));
                match self.tree.write(writes).await {
                    Ok(()) => return Ok(id),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    /// The machine that a command created, if it exists.
    async fn machine_marked(&self, mark: &str) -> Result<Option<MachineId>, Error> {
        let ids = self.machine_ids().await?;
        let reads = ids.iter().map(|id| Read::Data(paths::machine(*id))).collect();
        let answers = self.tree.read_many(reads).await?;
        let is_marked = |id: MachineId, node: &tree::Node| {
            // An unreadable record is not the one that was just written.
            Machine::parse(&paths::machine(id), &node.data)
                .is_ok_and(|machine| machine.rest.get("op").and_then(Value::as_str) == Some(mark))
        };
        let found = ids.into_iter().zip(answers).find(|(id, answer)| match answer {
            tree::Answer::Data(Some(node)) => is_marked(*id, node),
            _ => false,
        });
        Ok(found.map(|(id, _)| id))
    }

    /// # Errors
    /// [`Error::MachineNotFound`], [`Error::Corrupt`] and the failures of the store.
    pub async fn machine(&self, id: MachineId) -> Result<Machine, Error> {
        let path = paths::machine(id);
        let node = self.tree.find(&path).await?.ok_or(Error::MachineNotFound(id))?;
        Machine::parse(&path, &node.data)
    }

    /// All machines, lowest first.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and the failures of the store.
    pub async fn machine_ids(&self) -> Result<Vec<MachineId>, Error> {
        let container = paths::machines();
        let names = self.tree.children(&container).await?;
        names
            .iter()
            .map(|name| MachineId::from_key(name).map_err(|e| corrupt(&container, e.to_string())))
            .collect()
    }

    /// Removes all of these machines or none, and leaves a tombstone of each that had an agent.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`], [`Error::MachineInUse`], [`Error::LocalMachine`],
    /// [`Error::AgentDown`], and the failures of the store.
    pub async fn terminate_machines(&self, ids: &[MachineId]) -> Result<(), Error> {
        self.terminate(ids, Termination::Ordinary).await
    }

    /// As [`terminate_machines`](Self::terminate_machines). A forced termination also removes the
    /// units of the machines, and machines whose agents are down.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`], [`Error::LocalMachine`], [`Error::Corrupt`] for an unreadable
    /// unit, and those of an ordinary termination.
    pub async fn terminate(&self, ids: &[MachineId], how: Termination) -> Result<(), Error> {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        if self.info.placement == Placement::Local && ids.contains(&LOCAL_MACHINE) {
            return Err(Error::LocalMachine(LOCAL_MACHINE));
        }
        let retry = self.key()?.retry_at(paths::machines());
        let work = async |retry: &mut CasRetry| {
            loop {
                let ends = self.read_ends(&ids).await?;
                for end in &ends {
                    end.check(how, retry.unsure)?;
                }
                if ends.iter().all(|end| end.record.is_none()) {
                    return Ok(());
                }
                if how == Termination::Forced {
                    self.remove_units_of(&ends).await?;
                }
                let mut writes =
                    deletions(&self.tree, ids.iter().map(|&id| paths::machine(id)).collect()).await?;
                writes.extend(self.names_of(&ends).await?.into_iter().map(|path| Write::Delete { path }));
                match self.add_tombstones(&ends, &mut writes).await? {
                    Written::Changed => {
                        retry.after(tree::Error::BadVersion(paths::machines())).await?;
                        continue;
                    }
                    Written::Complete => {}
                }
                match remove(&self.tree, writes).await {
                    Ok(()) => return Ok(()),
                    Err(e) => retry.after(e).await?,
                }
            }
        };
        retry.run(work).await
    }

    /// The credential of a machine's agent.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn machine_credential(&self, id: MachineId) -> Result<Credential, Error> {
        let path = paths::machine_credentials(id);
        let node = self.tree.find(&path).await?.ok_or(Error::MachineNotFound(id))?;
        parse_credentials(&path, &node.data)
    }
}
