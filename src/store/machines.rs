//! Machines: added, found, terminated.

use super::acl::Roles;
use super::credentials::Credential;
use super::environment::{Environment, LOCAL_MACHINE};
use super::error::Error;
use super::paths;
use super::records::{Machine, Placement, corrupt, credentials_to_bytes, parse_credentials};
use super::retry::Attempts;
use super::subtree::{deletions, remove};
use super::tree::{self, Read, Tree, Write};
use super::units::Counter;
use crate::model::{InstanceId, MachineId};
use serde_json::{Map, Value};

impl Machine {
    /// A machine that the controller has yet to launch.
    pub(super) fn wanted() -> Self {
        Self { instance_id: None, addresses: Vec::new(), adopted: false, rest: Map::new() }
    }
}

/// A machine's nodes.
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

impl<T: Tree> Environment<T> {
    /// With `adopted`, the machine is an instance that is there already, and that is never terminated.
    ///
    /// # Errors
    /// The failures of the store.
    pub async fn add_machine(&self, adopted: Option<InstanceId>) -> Result<MachineId, Error> {
        let mut record = Machine { adopted: adopted.is_some(), instance_id: adopted, ..Machine::wanted() };
        let operation = self.operation()?;
        record.rest.insert("op".to_owned(), Value::from(operation.mark()));
        let attempts = operation.attempts_at(paths::machines());
        let work = async |attempts: &mut Attempts| {
            loop {
                let counter = Counter::read(&self.tree, paths::machines()).await?;
                if attempts.unsure {
                    let made = self.machine_marked(operation.mark()).await;
                    if let Some(id) = made? {
                        return Ok(id);
                    }
                }
                let id = MachineId::new(counter.next());
                let credential = Credential::generate(&id.key())?;
                let mut writes = vec![counter.take(1)?];
                writes.extend(machine_writes(&self.info.roles, id, &record, &credential));
                match self.tree.write(writes).await {
                    Ok(()) => return Ok(id),
                    Err(e) => attempts.after(e).await?,
                }
            }
        };
        attempts.carry_out(work).await
    }

    /// The machine that an operation made, if it is there.
    async fn machine_marked(&self, mark: &str) -> Result<Option<MachineId>, Error> {
        let ids = self.machine_ids().await?;
        let reads = ids.iter().map(|id| Read::Data(paths::machine(*id))).collect();
        let answers = self.tree.read_many(reads).await?;
        let is_marked = |id: MachineId, node: &tree::Node| {
            // A record that cannot be read is not the one that was just written.
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
        match self.tree.get(&path).await {
            Ok(node) => Machine::parse(&path, &node.data),
            Err(tree::Error::NoNode(_)) => Err(Error::MachineNotFound(id)),
            Err(e) => Err(e.into()),
        }
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

    /// All of them or none.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`], [`Error::MachineInUse`], [`Error::LocalMachine`], and the failures of the store.
    pub async fn terminate_machines(&self, ids: &[MachineId]) -> Result<(), Error> {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        if self.info.placement == Placement::Local && ids.contains(&LOCAL_MACHINE) {
            return Err(Error::LocalMachine(LOCAL_MACHINE));
        }
        let attempts = self.operation()?.attempts_at(paths::machines());
        let work = async |attempts: &mut Attempts| {
            loop {
                let reads = ids.iter().flat_map(|&id| {
                    [Read::Data(paths::machine(id)), Read::Children(paths::machine_units(id))]
                });
                let answers = self.tree.read_many(reads.collect()).await?;
                let mut gone = 0;
                for (&id, pair) in ids.iter().zip(answers.chunks(2)) {
                    match pair {
                        [_, tree::Answer::Children(Some(units))] if !units.is_empty() => {
                            return Err(Error::MachineInUse(id));
                        }
                        [tree::Answer::Data(None), _] if !attempts.unsure => {
                            return Err(Error::MachineNotFound(id));
                        }
                        [tree::Answer::Data(None), _] => gone += 1,
                        _ => {}
                    }
                }
                if gone == ids.len() {
                    return Ok(());
                }
                let writes =
                    deletions(&self.tree, ids.iter().map(|&id| paths::machine(id)).collect()).await?;
                match remove(&self.tree, writes).await {
                    Ok(()) => return Ok(()),
                    Err(e) => attempts.after(e).await?,
                }
            }
        };
        attempts.carry_out(work).await
    }

    /// The identity that a machine's agent has.
    ///
    /// # Errors
    /// [`Error::MachineNotFound`] and the failures of the store.
    pub async fn machine_credential(&self, id: MachineId) -> Result<Credential, Error> {
        let path = paths::machine_credentials(id);
        match self.tree.get(&path).await {
            Ok(node) => parse_credentials(&path, &node.data),
            Err(tree::Error::NoNode(_)) => Err(Error::MachineNotFound(id)),
            Err(e) => Err(e.into()),
        }
    }
}
