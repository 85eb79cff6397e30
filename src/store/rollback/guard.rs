//! Reads and writes checkpoints for one agent. `rollback.rs` decides whether the tree was restored.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::Mutex;
use tracing::{info, warn};

use super::{Checkpoint, Record, Remembered, Verdict, judge, parse_checkpoint, parse_record, to_bytes};
use crate::model::MachineId;
use crate::mutant;
use crate::store::acl::{Acl, Roles};
use crate::store::credentials::{Identity, random_hex};
use crate::store::paths::{self, NodePath};
use crate::store::tree::{Answer, Error, Feed as _, Read, Tree, Write};

/// Attempts to write one checkpoint before it is left to the next pass.
const ATTEMPTS: u32 = 3;

/// Durable storage for an agent's checkpoint.
pub trait Memory: Send + Sync {
    /// `None` if nothing was saved yet.
    ///
    /// # Errors
    /// If what was saved cannot be read.
    fn load(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces what was saved, durably.
    fn save(&self, bytes: Vec<u8>) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>>;
}

/// The data that an agent is about to act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// No new data: the agent changes nothing, or only removes things.
    Known,
    /// The agent acts on data whose newest write has this zxid.
    UpTo(i64),
    /// The agent acts on data that it did not act on before.
    New,
}

/// Whether removals are allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    Good,
    /// The agent may not remove, close, end or terminate anything. The text gives the reason and
    /// the command to run.
    RolledBack(String),
}

impl Standing {
    pub fn rolled_back(&self) -> Option<&str> {
        match self {
            Self::Good => None,
            Self::RolledBack(why) => Some(why),
        }
    }
}

/// Keeps the checkpoint of one agent. Shared by everything in a process that acts for the same
/// agent.
pub struct RollbackGuard {
    node: NodePath,
    accepted: NodePath,
    acl: Acl,
    memory: Arc<dyn Memory>,
    /// `None` until the checkpoint was loaded. Locked during a review, so that two users of one
    /// guard do not write two checkpoints at once.
    state: Mutex<Option<State>>,
}

impl fmt::Debug for RollbackGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RollbackGuard").field("node", &self.node).finish_non_exhaustive()
    }
}

struct State {
    remembered: Remembered,
    /// The reason that was logged last.
    logged: Option<String>,
}

/// An agent's znodes.
struct StoredCheckpoint {
    record: Result<Option<Record>, String>,
    version: Option<i32>,
    /// The zxid of the last write of the record: everything up to it is covered by the checkpoint.
    covered: i64,
    accepted: Option<Checkpoint>,
}

impl StoredCheckpoint {
    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.record.as_ref().ok()?.as_ref()?.checkpoint.as_ref()
    }

    fn missing(&self) -> Option<&Checkpoint> {
        self.record.as_ref().ok()?.as_ref()?.missing.as_ref()
    }
}

impl RollbackGuard {
    /// For the agent of one machine.
    pub fn of_machine(id: MachineId, roles: &Roles, identity: &Identity, memory: Arc<dyn Memory>) -> Self {
        let acl = roles.machine_checkpoint(identity);
        Self::at(paths::machine_checkpoint(id), paths::machine_accepted(id), acl, memory)
    }

    /// For the controllers of an environment, of which each replica saves its own checkpoint.
    pub fn of_controller(roles: &Roles, memory: Arc<dyn Memory>) -> Self {
        let acl = roles.controllers();
        Self::at(paths::controller_checkpoint(), paths::controller_accepted(), acl, memory)
    }

    fn at(node: NodePath, accepted: NodePath, acl: Acl, memory: Arc<dyn Memory>) -> Self {
        Self { node, accepted, acl, memory, state: Mutex::new(None) }
    }

    /// The znode that an operator's acceptance is written to.
    pub fn acceptance(&self) -> &NodePath {
        &self.accepted
    }

    /// Compares the tree with the saved checkpoint, and writes a new one if `basis` needs it. Must
    /// be called after the tree was read and before the agent acts on it. Every write includes
    /// `fence`.
    ///
    /// # Errors
    /// The failures of the store. The agent must not act then.
    pub async fn review<T: Tree>(
        &self,
        tree: &T,
        fence: Option<Write>,
        basis: Basis,
    ) -> Result<Standing, Error> {
        if mutant!(RestoredStoreTrusted) {
            return Ok(Standing::Good);
        }
        let mut state = self.state.lock().await;
        let state = self.loaded(&mut state)?;
        for _ in 1..ATTEMPTS {
            match self.try_review(tree, state, fence.clone(), basis).await {
                // A server that lags behind the others shows an old version.
                Err(Error::BadVersion(path) | Error::NodeExists(path)) if path == self.node => {
                    tree.sync().await?;
                }
                done => return done,
            }
        }
        self.try_review(tree, state, fence, basis).await
    }

    async fn try_review<T: Tree>(
        &self,
        tree: &T,
        state: &mut State,
        fence: Option<Write>,
        basis: Basis,
    ) -> Result<Standing, Error> {
        let mut found = self.read(tree).await?;
        let mut verdict = found.verdict(state);
        if matches!(verdict, Verdict::Behind(_)) {
            // A server that lags behind the others shows an old checkpoint, too.
            tree.sync().await?;
            found = self.read(tree).await?;
            verdict = found.verdict(state);
        }
        let ours = match &state.remembered {
            Remembered::Checkpoint(ours) | Remembered::Unreadable(ours, _) => Some(ours.clone()),
            Remembered::Nothing => None,
        };
        let numbers = ours.iter().chain(found.checkpoint()).map(|checkpoint| checkpoint.number);
        let next = match verdict {
            Verdict::Behind(why) => {
                if found.missing() != ours.as_ref() {
                    let record = Record { checkpoint: found.checkpoint().cloned(), missing: ours };
                    self.write(tree, fence, &found, &record).await?;
                }
                if state.logged.as_ref() != Some(&why) {
                    warn!(reason = %why, "store went back: nothing is removed until `juju accept-store`");
                    state.logged = Some(why.clone());
                }
                let hint = "nothing is removed until an operator runs `juju accept-store`";
                return Ok(Standing::RolledBack(format!("{why}; {hint}")));
            }
            Verdict::Accepted => {
                info!("restored store accepted by an operator");
                Some(Checkpoint::after_acceptance(numbers))
            }
            Verdict::First => Some(Checkpoint::following(numbers)),
            Verdict::Ahead | Verdict::Continues => {
                let needed = match basis {
                    Basis::Known => found.missing().is_some(),
                    Basis::UpTo(zxid) => zxid > found.covered || found.missing().is_some(),
                    Basis::New => true,
                };
                needed.then(|| Checkpoint::following(numbers))
            }
        };
        state.logged = None;
        match next {
            Some(number) => {
                let checkpoint = new_checkpoint(number)?;
                let record = Record { checkpoint: Some(checkpoint.clone()), missing: None };
                self.write(tree, fence, &found, &record).await?;
                self.remember(state, checkpoint).await;
            }
            None => {
                if let Some(found) = found.checkpoint() {
                    self.remember(state, found.clone()).await;
                }
            }
        }
        Ok(Standing::Good)
    }

    /// Compares the checkpoint in the tombstone of this agent's machine with the saved one. A
    /// tombstone from before the agent's last changes is in a store that was restored.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub async fn review_tombstone(&self, checkpoint: Option<&Checkpoint>) -> Result<Standing, Error> {
        let mut state = self.state.lock().await;
        let state = self.loaded(&mut state)?;
        let record = Record { checkpoint: checkpoint.cloned(), missing: None };
        Ok(match judge(&state.remembered, &Ok(Some(record)), None) {
            Verdict::Behind(why) => Standing::RolledBack(why),
            Verdict::First | Verdict::Continues | Verdict::Ahead | Verdict::Accepted => Standing::Good,
        })
    }

    /// Saves the checkpoints that another replica writes, for as long as it is polled: a replica
    /// that becomes the leader after a restore must know the last checkpoint of the previous
    /// leader.
    pub async fn follow<T: Tree>(&self, tree: &T) -> Error {
        match self.try_follow(tree).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn try_follow<T: Tree>(&self, tree: &T) -> Result<std::convert::Infallible, Error> {
        let mut feed = tree.watch(&self.node).await?;
        loop {
            feed.next().await?;
            let mut state = self.state.lock().await;
            let state = self.loaded(&mut state)?;
            let found = self.read(tree).await?;
            if let (Verdict::Ahead, Some(checkpoint)) = (found.verdict(state), found.checkpoint()) {
                self.remember(state, checkpoint.clone()).await;
            }
        }
    }

    fn loaded<'s>(&self, state: &'s mut Option<State>) -> Result<&'s mut State, Error> {
        let state = match state.take() {
            Some(known) => state.insert(known),
            None => {
                let loaded = self.memory.load().map_err(|error| error.to_string());
                let parsed = loaded.and_then(|bytes| bytes.as_deref().map(parse_checkpoint).transpose());
                let remembered = match parsed {
                    Ok(None) => Remembered::Nothing,
                    Ok(Some(checkpoint)) => Remembered::Checkpoint(checkpoint),
                    Err(problem) => {
                        let problem = format!("the checkpoint file cannot be read: {problem}");
                        Remembered::Unreadable(new_checkpoint(0)?, problem)
                    }
                };
                state.insert(State { remembered, logged: None })
            }
        };
        Ok(state)
    }

    async fn read<T: Tree>(&self, tree: &T) -> Result<StoredCheckpoint, Error> {
        let reads = vec![Read::Data(self.node.clone()), Read::Data(self.accepted.clone())];
        let mut nodes = tree.read_many(reads).await?.into_iter().map(Answer::into_data);
        let (record, accepted) = (nodes.next().flatten(), nodes.next().flatten());
        Ok(StoredCheckpoint {
            version: record.as_ref().map(|node| node.version),
            covered: record.as_ref().map_or(0, |node| node.modified),
            record: record.map(|node| parse_record(&node.data)).transpose(),
            // An unreadable acceptance does not count.
            accepted: accepted.and_then(|node| parse_checkpoint(&node.data).ok()),
        })
    }

    async fn write<T: Tree>(
        &self,
        tree: &T,
        fence: Option<Write>,
        found: &StoredCheckpoint,
        record: &Record,
    ) -> Result<(), Error> {
        let (path, data) = (self.node.clone(), to_bytes(record));
        let write = match found.version {
            Some(version) => Write::SetIfVersion { path, data, version },
            None => Write::create(path, data, self.acl.clone()),
        };
        tree.write(fence.into_iter().chain([write]).collect()).await
    }

    /// The agent continues if the file cannot be written: a file with an older checkpoint does not
    /// hold the agent.
    async fn remember(&self, state: &mut State, checkpoint: Checkpoint) {
        let checkpoint = Remembered::Checkpoint(checkpoint);
        if state.remembered == checkpoint {
            return;
        }
        if let Remembered::Checkpoint(checkpoint) = &checkpoint
            && let Err(error) = self.memory.save(to_bytes(checkpoint)).await
        {
            warn!(%error, "checkpoint not saved: a restored store may not be recognised after a restart");
        }
        state.remembered = checkpoint;
    }
}

impl StoredCheckpoint {
    fn verdict(&self, state: &State) -> Verdict {
        judge(&state.remembered, &self.record, self.accepted.as_ref())
    }
}

fn new_checkpoint(number: u64) -> Result<Checkpoint, Error> {
    let id = random_hex(8)
        .map_err(|error| Error::Unexpected { hosts: "this machine".to_owned(), what: error.to_string() })?;
    Ok(Checkpoint { number, id })
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
