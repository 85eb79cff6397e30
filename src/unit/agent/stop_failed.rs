//! A removed unit whose `stop` hook failed. The failure is recorded below the machine's znode,
//! where status reads it, until the operator decides. Meanwhile the unit's processes are ended, and
//! its files stay so that the hook can run again.

use serde_json::Value;
use tokio::time::sleep;
use tracing::warn;

use super::{Agent, Directive, Error, disk};
use crate::model::UnitName;
use crate::store::failed_stops::{LABEL, NAME, Report};
use crate::store::tree::{Feed as _, Tree};
use crate::store::update::Change;
use crate::unit::workflow::{Resolution, State};

impl<T: Tree> Agent<'_, T> {
    /// Records the failure and waits for a decision about it. Returns [`Error::Gone`] if the agent
    /// has to leave.
    pub(super) async fn wait_for_decision(
        &self,
        name: &UnitName,
        state: &State,
    ) -> Result<Resolution, Error> {
        let ended = self.with_unit_dir(|unit_dir| unit_dir.end_all()).await;
        ended.map_err(disk("cannot end what the unit left running"))?;
        // Marked on disk first, so that a later agent removes the record.
        let marked = self
            .unit_dir()
            .runs()
            .with_reserve(|| std::fs::File::create(self.unit_dir().failed_stop_marker()).map(drop));
        marked.map_err(disk("cannot mark that the failed stop hook is reported"))?;
        let mut feed = self.report().watch().await?;
        loop {
            if let Some(resolution) = self.report_failed_stop(name, state).await? {
                return Ok(resolution);
            }
            let mut directives = self.directives.clone();
            let wanted = if self.clearing { Directive::Live } else { Directive::Remove };
            if *directives.borrow_and_update() != wanted {
                return Err(Error::Gone);
            }
            tokio::select! {
                event = feed.next() => drop(event?),
                () = sleep(self.host.resync) => {}
                _ = directives.changed() => {}
            }
        }
    }

    /// Returns the decision, if there is one. A record of an earlier failure is replaced.
    async fn report_failed_stop(&self, name: &UnitName, state: &State) -> Result<Option<Resolution>, Error> {
        let report = self.report();
        let read = report.read().await?;
        if let Some(Ok(said)) = read.as_ref().map(|node| State::parse(&node.data))
            && said.runs == state.runs
            && said.failure == state.failure
        {
            return Ok(said.resolved);
        }
        // This write, or one in between, causes an event, and the caller reads again.
        let data = report_to_bytes(name, state);
        report.write(data, read.as_ref(), &self.host.roles, &self.host.identity).await?;
        Ok(None)
    }

    fn report(&self) -> Report<'_, T> {
        Report::new(self.tree, self.host.machine, self.id)
    }

    /// Records that the decision is being carried out, before it is: from then on the client
    /// refuses further decisions. Returns a decision that arrived before that.
    pub(super) async fn report_resumed(
        &self,
        name: &UnitName,
        state: &State,
        next: &State,
    ) -> Result<Option<Resolution>, Error> {
        if !self.unit_dir().failed_stop_marker().exists() {
            return Ok(None);
        }
        let report = self.report();
        let decided = report.update(|node| match State::parse(&node.data) {
            Ok(said)
                if said.failure.is_some()
                    && said.failure == state.failure
                    && said.resolved.is_some()
                    && said.resolved != state.resolved =>
            {
                Change::Keep(said.resolved)
            }
            _ => Change::Set(report_to_bytes(name, next), None),
        });
        Ok(decided.await?.flatten())
    }

    /// Removes the record, if there is one.
    pub(super) async fn clear_report(&self) -> Result<(), Error> {
        if !self.unit_dir().failed_stop_marker().exists() {
            return Ok(());
        }
        let removed = self.report().remove().await;
        if let Err(error) = &removed {
            warn!(unit = %self.id, %error, "cannot remove the report of a failed stop hook");
        }
        Ok(removed?)
    }
}

fn report_to_bytes(name: &UnitName, state: &State) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(&state.to_bytes()).unwrap_or_default();
    value[NAME] = name.to_string().into();
    if state.failure.is_none() {
        value[LABEL] = "stopping".into();
    }
    value.to_string().into_bytes()
}
