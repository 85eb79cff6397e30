//! An operator's acceptance of a restored store. It names the last checkpoint of each held agent,
//! so it is void once that agent has written a newer one, and a later restore cannot make it valid
//! again. `rollback` explains why agents are held.

use super::cas_retry::CasRetry;
use super::environment::Environment;
use super::error::Error;
use super::paths::{self, NodePath};
use super::records::corrupt;
use super::rollback::{parse_record, to_bytes};
use super::tree::{Answer, Node, Read, Tree, Write};
use crate::model::MachineId;

/// An agent that was held and may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acceptance {
    Controller,
    Machine(MachineId),
}

impl Acceptance {
    /// The paths of the agent's checkpoint and of its acceptance.
    fn paths(self) -> [NodePath; 2] {
        match self {
            Self::Controller => [paths::controller_checkpoint(), paths::controller_accepted()],
            Self::Machine(id) => [paths::machine_checkpoint(id), paths::machine_accepted(id)],
        }
    }
}

/// The agents that an operator accepted the store for, and those for which that failed.
#[derive(Debug, Default)]
pub struct Accepted {
    pub agents: Vec<Acceptance>,
    pub failed: Vec<(Acceptance, Error)>,
}

impl<T: Tree> Environment<T> {
    /// Accepts the store as it is for every agent that is held. Invalid data of one agent does not
    /// affect the others.
    ///
    /// # Errors
    /// The failures of the store that concern no single agent.
    pub async fn accept_store(&self) -> Result<Accepted, Error> {
        let machines = self.machine_ids().await?.into_iter().map(Acceptance::Machine);
        let agents: Vec<Acceptance> = machines.chain([Acceptance::Controller]).collect();
        let mut accepted = Accepted::default();
        for agent in agents {
            match self.accept_for(agent).await {
                Ok(true) => accepted.agents.push(agent),
                Ok(false) => {}
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => accepted.failed.push((agent, error)),
            }
        }
        Ok(accepted)
    }

    /// Returns whether the agent is held.
    async fn accept_for(&self, agent: Acceptance) -> Result<bool, Error> {
        let mut retry = CasRetry::at(agent.paths()[1].clone());
        loop {
            let [checkpoint, path] = agent.paths();
            let reads = vec![Read::Data(checkpoint.clone()), Read::Data(path.clone())];
            let mut nodes = self.tree.read_many(reads).await?.into_iter().map(Answer::into_data);
            let (record, before): (Option<Node>, Option<Node>) =
                (nodes.next().flatten(), nodes.next().flatten());
            let Some(record) = record else { return Ok(false) };
            let record = parse_record(&record.data).map_err(|problem| corrupt(&checkpoint, problem))?;
            let Some(missing) = record.missing else { return Ok(false) };
            let data = to_bytes(&missing);
            let write = match before {
                Some(node) if node.data == data => return Ok(true),
                Some(node) => Write::SetIfVersion { path, data, version: node.version },
                None => {
                    let acl = match agent {
                        Acceptance::Controller => self.info.roles.operators(),
                        Acceptance::Machine(id) => {
                            let identity = self.machine_credential(id).await?.identity();
                            self.info.roles.machine_accepted(&identity)
                        }
                    };
                    Write::create(path, data, acl)
                }
            };
            match self.tree.write(vec![write]).await {
                Ok(()) => return Ok(true),
                Err(error) => retry.after(error).await?,
            }
        }
    }
}
