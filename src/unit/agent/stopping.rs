//! A unit that was removed and whose `stop` hook failed: said below the machine's own node, where status shows it, until the
//! operator has decided. Everything that it had running is ended meanwhile, and its files stay for the hook to be run again.

use serde_json::Value;
use tokio::time::sleep;
use tracing::warn;

use super::{Agent, Error, Order, disk};
use crate::model::UnitName;
use crate::store::paths;
use crate::store::stopping::{LABEL, NAME};
use crate::store::tree::{self, Feed as _, Tree, Write};
use crate::unit::workflow::{Resolution, State};

impl<T: Tree> Agent<'_, T> {
    /// Says that the hook failed, and waits for a decision about just this failure. [`Error::Gone`] if the agent is to leave.
    pub(super) async fn decided(&self, name: &UnitName, state: &State) -> Result<Resolution, Error> {
        let ended = self.at_home(|home| home.end_all()).await;
        ended.map_err(disk("cannot end what the unit left running"))?;
        // Before it is told, so that whoever comes after us takes it back.
        let marked = self.home().runs().with_reserve(|| std::fs::File::create(self.home().told()).map(drop));
        marked.map_err(disk("cannot note that the failure is told"))?;
        let path = paths::machine_stopping_unit(self.site.machine, self.id);
        let mut feed = self.tree.watch(&path).await?;
        loop {
            if let Some(resolution) = self.tell_stopping(name, state).await? {
                return Ok(resolution);
            }
            let mut orders = self.orders.clone();
            let wanted = if self.clearing { Order::Live } else { Order::Retire };
            if *orders.borrow_and_update() != wanted {
                return Err(Error::Gone);
            }
            tokio::select! {
                event = feed.next() => drop(event?),
                () = sleep(self.site.resync) => {}
                _ = orders.changed() => {}
            }
        }
    }

    /// What was decided, if that is known. What is said of an earlier failure is said anew.
    async fn tell_stopping(&self, name: &UnitName, state: &State) -> Result<Option<Resolution>, Error> {
        let (machine, roles) = (self.site.machine, &self.site.roles);
        let path = paths::machine_stopping_unit(machine, self.id);
        let data = stopping_to_bytes(name, state);
        let write = match self.tree.get(&path).await {
            Ok(node) => match State::parse(&node.data) {
                Ok(said) if said.runs == state.runs && said.failure == state.failure => {
                    return Ok(said.resolved);
                }
                _ => Write::SetIfVersion { path, data, version: node.version },
            },
            Err(tree::Error::NoNode(_)) => {
                let list = paths::machine_stopping(machine);
                if !self.tree.exists(&list).await? {
                    let make = Write::create(list, Vec::new(), roles.machine_stopping(&self.site.identity));
                    match self.tree.write(vec![make]).await {
                        Ok(()) | Err(tree::Error::NodeExists(_)) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Write::create(path, data, roles.unit_state(&self.site.identity))
            }
            Err(error) => return Err(error.into()),
        };
        match self.tree.write(vec![write]).await {
            // Its own event makes us look again.
            Ok(()) | Err(tree::Error::NodeExists(_) | tree::Error::BadVersion(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Says what comes next, before it does: from then on there is nothing to decide about, and nobody is told that a decision
    /// was taken which nobody hears. One that came before that is returned.
    pub(super) async fn tell_going_on(
        &self,
        name: &UnitName,
        state: &State,
        next: &State,
    ) -> Result<Option<Resolution>, Error> {
        if !self.home().told().exists() {
            return Ok(None);
        }
        let path = paths::machine_stopping_unit(self.site.machine, self.id);
        loop {
            let node = match self.tree.get(&path).await {
                Ok(node) => node,
                Err(tree::Error::NoNode(_)) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            if let Ok(said) = State::parse(&node.data)
                && said.failure.is_some()
                && said.failure == state.failure
                && said.resolved.is_some()
                && said.resolved != state.resolved
            {
                return Ok(said.resolved);
            }
            let data = stopping_to_bytes(name, next);
            let write = Write::SetIfVersion { path: path.clone(), data, version: node.version };
            match self.tree.write(vec![write]).await {
                Ok(()) | Err(tree::Error::NoNode(_)) => return Ok(None),
                // An operator, who types no faster than this.
                Err(tree::Error::BadVersion(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes it back, if it was ever said.
    pub(super) async fn untell_stopping(&self) -> Result<(), Error> {
        if !self.home().told().exists() {
            return Ok(());
        }
        let path = paths::machine_stopping_unit(self.site.machine, self.id);
        match self.tree.write(vec![Write::Delete { path }]).await {
            Ok(()) | Err(tree::Error::NoNode(_)) => Ok(()),
            Err(error) => {
                warn!(unit = %self.id, %error, "a stop hook that failed is still told of");
                Err(error.into())
            }
        }
    }
}

fn stopping_to_bytes(name: &UnitName, state: &State) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(&state.to_bytes()).unwrap_or_default();
    value[NAME] = name.to_string().into();
    if state.failure.is_none() {
        value[LABEL] = "stopping".into();
    }
    value.to_string().into_bytes()
}
