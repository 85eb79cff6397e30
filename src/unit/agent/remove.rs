//! Removes a unit. The tree no longer has its state, so the copy on this machine decides whether
//! `stop` has to run. Then the unit's processes end and its files are removed. If `stop` fails, the
//! files stay until the operator decides. A full disk delays none of this.

use std::fs::File;
use std::io::{self, Read as _};

use tokio::time::sleep;
use tracing::{info, warn};

use super::{Agent, Error, POLL_INTERVAL, disk};
use crate::model::UnitName;
use crate::store;
use crate::store::tree::Tree;
use crate::unit::hook::RunState;
use crate::unit::host::UnitDir;
use crate::unit::workflow::{
    Ended, Failure, Hook, MAX_STATE_BYTES, Phase, Resolution, Run, State, Step, Wanted,
};

impl<T: Tree> Agent<'_, T> {
    /// Removes a unit: runs `stop` if it was started, ends its processes, removes its files.
    pub(super) async fn remove(&mut self) -> Result<(), Error> {
        // A removal deletes the unit's znode and its list entry in one transaction. The following
        // steps cannot be undone, so the list alone is not enough; and a store that does not answer
        // does not confirm the removal.
        if store::unit_exists(self.tree, self.id).await? {
            return Err(Error::Unlisted);
        }
        self.clear().await
    }

    /// Stops the unit that owns the files on this machine, and removes its processes and files.
    pub(super) async fn clear(&mut self) -> Result<(), Error> {
        let state = self.with_unit_dir(|unit_dir| read_state(&unit_dir)).await;
        if let Some(mut state) = state.map_err(disk("cannot read the unit's state"))? {
            let name = read_name(&self.unit_dir())?;
            loop {
                match state.next(Wanted { exposed: false, gone: true }) {
                    Step::Wait if state.failure.is_some() => {
                        // Saved before it is acted on: the next agent has no other source for it.
                        state.resolved = Some(self.wait_for_decision(&name, &state).await?);
                    }
                    Step::Wait => break,
                    Step::Settle(next) | Step::Begin(next) => {
                        match self.report_resumed(&name, &state, &next).await? {
                            Some(resolution) => state.resolved = Some(resolution),
                            None => state = next,
                        }
                    }
                    Step::Resume(run) => {
                        let ended = self.finish_run(&name, run).await?;
                        state = state.ended(run, &ended);
                        if let Some(failure) = &state.failure {
                            let Failure { hook, reason, .. } = failure;
                            warn!(unit = %name, %hook, %reason, "hook failed");
                        }
                    }
                }
                if let Err(error) = self.save_state(&state).await {
                    // Only a later agent would need this file.
                    warn!(unit = %name, %error, "cannot save the unit's state on this machine");
                }
            }
            if state.phase == Phase::Stopped {
                info!(unit = %name, "unit stopped");
            }
        }
        let ended = self.with_unit_dir(|unit_dir| unit_dir.end_all()).await;
        ended.map_err(disk("cannot end what the unit left running"))?;
        // While files remain, a later agent continues the removal.
        self.clear_report().await?;
        let cleared = self.with_unit_dir(|unit_dir| unit_dir.remove()).await;
        cleared.map_err(disk("cannot clear the unit away"))?;
        info!(unit = %self.id, "unit removed");
        Ok(())
    }

    /// Handles a run of a removed unit. No hook except `stop` is started any more.
    async fn finish_run(&mut self, name: &UnitName, run: Run) -> Result<Ended, Error> {
        let runs = self.unit_dir().runs();
        loop {
            match self.state_of(run).await? {
                RunState::Finished(ended) | RunState::Lost(ended) => return Ok(ended),
                RunState::Running if run.hook == Hook::Stop => sleep(POLL_INTERVAL).await,
                RunState::Running => {
                    runs.stop(run.number).map_err(disk("cannot stop the hook"))?;
                    sleep(POLL_INTERVAL).await;
                }
                RunState::Nothing if run.hook != Hook::Stop => {
                    // The hook may have started nevertheless, and `stop` runs next.
                    if runs.was_tried(run.number) {
                        self.end_run(run).await?;
                    }
                    return Ok(Ended::badly("was not run"));
                }
                RunState::Nothing => {
                    let name = name.clone();
                    match self.with_unit_dir(move |unit_dir| stop(&unit_dir, &name, run)).await {
                        Ok(Stop::Ran) => {}
                        Ok(Stop::Missing) => return Ok(Ended::Well),
                        Err(error) => return Ok(Ended::badly(format!("cannot be run: {error}"))),
                    }
                }
            }
        }
    }
}

/// Whether a unit's `stop` hook had to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::unit) enum Stopped {
    Ran,
    NotDue,
}

/// Runs the `stop` hook of a unit whose machine leaves its environment, if the unit was started.
/// Other hooks are ended. A failed hook counts as resolved, since no operator can decide any more.
///
/// # Errors
/// If the state of the unit cannot be read, or the hook cannot be started.
pub(in crate::unit) fn last_stop(unit_dir: &UnitDir<'_>) -> io::Result<Stopped> {
    let Some(mut state) = read_state(unit_dir)? else { return Ok(Stopped::NotDue) };
    let name = read_name(unit_dir).map_err(io::Error::other)?;
    let mut stopped = Stopped::NotDue;
    loop {
        match state.next(Wanted { exposed: false, gone: true }) {
            Step::Wait if state.failure.is_some() && state.resolved.is_none() => {
                state.resolved = Some(Resolution::Skip);
            }
            Step::Wait => return Ok(stopped),
            Step::Settle(next) | Step::Begin(next) => state = next,
            Step::Resume(run) => {
                let runs = unit_dir.runs();
                if run.hook == Hook::Stop && matches!(runs.find(run.number)?, RunState::Nothing) {
                    stop(unit_dir, &name, run)?;
                    stopped = Stopped::Ran;
                } else if runs.was_tried(run.number) {
                    unit_dir.end_run(run.number)?;
                }
                let ended = match runs.find(run.number)? {
                    RunState::Finished(ended) | RunState::Lost(ended) => ended,
                    RunState::Nothing if run.hook == Hook::Stop => Ended::Well,
                    RunState::Nothing | RunState::Running => Ended::badly("was not run"),
                };
                state = state.ended(run, &ended);
                if let Some(Failure { hook, reason, .. }) = &state.failure {
                    warn!(unit = %name, %hook, %reason, "hook failed");
                }
            }
        }
    }
}

enum Stop {
    Ran,
    /// The charm has no such hook.
    Missing,
}

/// Runs `stop` to its end as the current hook user, which may differ from the user of earlier
/// hooks.
fn stop(unit_dir: &UnitDir<'_>, name: &UnitName, run: Run) -> io::Result<Stop> {
    // A unit runs one hook at a time.
    if unit_dir.runs().was_tried(run.number) {
        unit_dir.end_run(run.number)?;
    }
    unit_dir.create_dirs(name)?;
    unit_dir.chown_charm()?;
    if !unit_dir.write_hook_spec(name, run)? {
        return Ok(Stop::Missing);
    }
    unit_dir.run(run.number).map(|()| Stop::Ran)
}

/// Returns the saved state, or `None` if there is none and nothing has to be stopped. The operator
/// decides about an unreadable state, as about a `stop` hook that failed.
fn read_state(unit_dir: &UnitDir<'_>) -> io::Result<Option<State>> {
    let mut bytes = Vec::new();
    match File::open(unit_dir.state()) {
        Ok(file) => file.take(MAX_STATE_BYTES as u64 + 1).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let unknown = |problem: String| -> io::Result<State> {
        let reason = format!("not started: the unit's state cannot be read: {problem}");
        let failure = Some(Failure { hook: Hook::Stop, reason, output: String::new() });
        // The number must differ from those of all earlier runs.
        Ok(State { phase: Phase::Started, failure, runs: unit_dir.runs().last()?, ..State::default() })
    };
    State::parse(&bytes).or_else(unknown).map(Some)
}

/// The part of a state that is recorded before the first state exists.
fn read_name(unit_dir: &UnitDir<'_>) -> Result<UnitName, Error> {
    let text = std::fs::read_to_string(unit_dir.name()).map_err(disk("cannot read the unit's name"))?;
    text.trim()
        .parse()
        .map_err(|_| Error::Corrupt(format!("{} is not a unit's name", unit_dir.name().display())))
}
