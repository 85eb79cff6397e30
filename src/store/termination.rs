//! The steps of a termination: reading the machines that end, the checks, and the znodes that are
//! removed or created with them. `machines` puts them together.

use super::credentials::Credential;
use super::environment::Environment;
use super::error::Error;
use super::machines::Termination;
use super::paths::{self, NodePath};
use super::records::{Machine, NamedMachine, Unit, parse_credentials};
use super::tombstones::Tombstone;
use super::tree::{self, Answer, Node, Read, Tree, Write};
use super::update::ensure;
use crate::model::{MachineId, UnitId};

/// Reads of each machine.
const READS: usize = 5;

/// A machine that is to be terminated.
#[derive(Debug)]
pub(super) struct End {
    id: MachineId,
    /// `None` if the machine is not in the store.
    pub(super) record: Option<Node>,
    units: Vec<UnitId>,
    /// Whether an agent is connected, and whether one ever was.
    has_agent: bool,
    had_agent: bool,
    /// `None` if it is unreadable.
    credential: Option<Credential>,
}

/// Whether the writes still belong to what was read before.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    Complete,
    Changed,
}

impl End {
    /// Refuses a machine that must not be terminated. With `unsure`, an absent machine may have
    /// been removed by this command.
    pub(super) fn check(&self, how: Termination, unsure: bool) -> Result<(), Error> {
        match (how, &self.record) {
            (_, None) if !unsure => Err(Error::MachineNotFound(self.id)),
            (Termination::Ordinary, Some(_)) if !self.units.is_empty() => Err(Error::MachineInUse(self.id)),
            (Termination::Ordinary, Some(_)) if self.had_agent && !self.has_agent => {
                Err(Error::AgentDown(self.id))
            }
            _ => Ok(()),
        }
    }
}

impl<T: Tree> Environment<T> {
    pub(super) async fn read_ends(&self, ids: &[MachineId]) -> Result<Vec<End>, Error> {
        let reads = ids.iter().flat_map(|&id| {
            [
                Read::Data(paths::machine(id)),
                Read::Children(paths::machine_units(id)),
                Read::Data(paths::machine_agent(id)),
                Read::Data(paths::machine_started(id)),
                Read::Data(paths::machine_credentials(id)),
            ]
        });
        // An agent can deny access to znodes that it created; they exist nevertheless.
        let mut answers = self.tree.read_each(reads.collect()).await?.into_iter();
        let mut ends = Vec::with_capacity(ids.len());
        for &id in ids {
            let mut group = answers.by_ref().take(READS);
            let mut next = || group.next().unwrap_or(Ok(Answer::Data(None)));
            let (record, units) = (next()?.into_data(), next()?.into_children().unwrap_or_default());
            let is_there = |answer: Result<Answer, tree::Error>| match answer {
                Ok(answer) => Ok(answer.into_data().is_some()),
                Err(tree::Error::NoAuth(_)) => Ok(true),
                Err(error) => Err(error),
            };
            let (has_agent, had_agent) = (is_there(next())?, is_there(next())?);
            let path = paths::machine_credentials(id);
            let credential = next()?.into_data().and_then(|node| parse_credentials(&path, &node.data).ok());
            let units = units.iter().filter_map(|name| UnitId::from_key(name).ok()).collect();
            ends.push(End { id, record, units, has_agent, had_agent, credential });
        }
        Ok(ends)
    }

    /// Removes the units of machines that are terminated by force.
    pub(super) async fn remove_units_of(&self, ends: &[End]) -> Result<(), Error> {
        for unit in ends.iter().flat_map(|end| &end.units) {
            let path = paths::unit(*unit);
            let Some(node) = self.tree.find(&path).await? else { continue };
            let name = Unit::parse(&path, &node.data)?.name;
            match self.remove_unit(&name).await {
                // Another command removed it meanwhile.
                Ok(()) | Err(Error::UnitNotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The entries of the index of names that belong to these machines. The whole index is read
    /// only if the record of a machine is unreadable.
    pub(super) async fn names_of(&self, ends: &[End]) -> Result<Vec<NodePath>, Error> {
        let mut candidates = Vec::new();
        let mut is_complete = true;
        for End { id, record, .. } in ends {
            let Some(node) = record else { continue };
            match Machine::parse(&paths::machine(*id), &node.data) {
                Ok(record) => candidates.extend(record.name.map(|name| paths::machine_name(&name))),
                Err(_) => is_complete = false,
            }
        }
        if !is_complete {
            let index = paths::machine_names();
            candidates = match self.tree.children(&index).await {
                Ok(names) => names.iter().map(|name| index.child(name)).collect(),
                Err(tree::Error::NoNode(_)) => Vec::new(),
                Err(error) => return Err(error.into()),
            };
        }
        let entries = self.tree.read_many(candidates.iter().cloned().map(Read::Data).collect()).await?;
        let is_theirs = |(path, entry): (NodePath, Answer)| {
            let named = NamedMachine::parse(&path, &entry.into_data()?.data).ok()?;
            ends.iter().any(|end| end.id == named.id).then_some(path)
        };
        Ok(candidates.into_iter().zip(entries).filter_map(is_theirs).collect())
    }

    /// Adds the tombstones of machines that had an agent. The checkpoint in a tombstone must be the
    /// one that `writes` delete; otherwise the agent has written another one meanwhile.
    pub(super) async fn add_tombstones(
        &self,
        ends: &[End],
        writes: &mut Vec<Write>,
    ) -> Result<Written, Error> {
        let buried = ends.iter().filter(|end| end.record.is_some() && end.had_agent);
        let buried = buried.filter_map(|end| Some((end.id, end.credential.as_ref()?.identity())));
        let buried: Vec<_> = buried.collect();
        if buried.is_empty() {
            return Ok(Written::Complete);
        }
        // Environments of older versions do not have the container.
        ensure(&self.tree, &paths::tombstones(), &self.info.roles.operators()).await?;
        let reads = buried.iter().map(|(id, _)| Read::Data(paths::machine_checkpoint(*id))).collect();
        let checkpoints = self.tree.read_each(reads).await?;
        for ((id, identity), checkpoint) in buried.into_iter().zip(checkpoints) {
            let path = paths::machine_checkpoint(id);
            // A checkpoint that the agent hides from the operator counts as none.
            let node = checkpoint.ok().and_then(Answer::into_data);
            let deleted = writes.iter().find_map(|write| match write {
                Write::DeleteIfVersion { path: deleted, version } if *deleted == path => Some(*version),
                _ => None,
            });
            if node.as_ref().map(|node| node.version) != deleted {
                return Ok(Written::Changed);
            }
            let tombstone = Tombstone::new(&identity, node.as_ref().map(|node| node.data.as_slice()));
            let acl = self.info.roles.tombstone(&identity);
            writes.push(Write::create(paths::tombstone(id), tombstone.to_bytes(), acl));
        }
        Ok(Written::Complete)
    }
}
