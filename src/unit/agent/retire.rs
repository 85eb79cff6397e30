//! The end of a unit: what is known of it here, now that the tree knows nothing any more, decides whether `stop` is due; its
//! processes end, and its files go, unless that hook fails: then the operator decides first. A full disk holds none of that up.

use std::fs::File;
use std::io::{self, Read as _};

use tokio::time::sleep;
use tracing::{info, warn};

use super::{Agent, Error, LOOK_AGAIN, disk};
use crate::model::UnitName;
use crate::store::paths;
use crate::store::tree::Tree;
use crate::unit::hook::Found;
use crate::unit::site::Home;
use crate::unit::workflow::{Ended, Failure, Hook, MAX_STATE_BYTES, Phase, Run, State, Step, Wanted};

impl<T: Tree> Agent<'_, T> {
    /// The unit is no more: its `stop` hook runs if it was started, its processes end, its files go.
    pub(super) async fn retire(&mut self) -> Result<(), Error> {
        // Both go in one step when a unit is removed. Nothing of what follows can be taken back, so a list is not enough; and
        // a store that does not answer has not said that the unit is gone.
        if self.tree.exists(&paths::unit(self.id)).await? {
            return Err(Error::Unlisted);
        }
        self.clear().await
    }

    /// Stops the unit that the files here belong to, and removes its files and processes.
    pub(super) async fn clear(&mut self) -> Result<(), Error> {
        let state = self.at_home(|home| read_state(&home)).await;
        if let Some(mut state) = state.map_err(disk("cannot read the unit's state"))? {
            let name = read_name(&self.home())?;
            loop {
                match state.next(Wanted { exposed: false, gone: true }) {
                    Step::Wait if state.failure.is_some() => {
                        // Kept below: whoever comes after us has no other word of it once it is acted on.
                        state.resolved = Some(self.decided(&name, &state).await?);
                    }
                    Step::Wait => break,
                    Step::Settle(next) | Step::Begin(next) => {
                        match self.tell_going_on(&name, &state, &next).await? {
                            Some(resolution) => state.resolved = Some(resolution),
                            None => state = next,
                        }
                    }
                    Step::Resume(run) => {
                        let ended = self.last(&name, run).await?;
                        state = state.ended(run, &ended);
                        if let Some(failure) = &state.failure {
                            warn!(unit = %name, hook = %failure.hook, reason = %failure.reason, "hook failed");
                        }
                    }
                }
                if let Err(error) = self.keep_state(&state).await {
                    // Only an agent that comes after us would have missed it.
                    warn!(unit = %name, %error, "unit's state not kept");
                }
            }
            if state.phase == Phase::Stopped {
                info!(unit = %name, "unit stopped");
            }
        }
        let ended = self.at_home(|home| home.end_all()).await;
        ended.map_err(disk("cannot end what the unit left running"))?;
        // As long as there are files, somebody comes back to it.
        self.untell_stopping().await?;
        let cleared = self.at_home(|home| home.remove()).await;
        cleared.map_err(disk("cannot clear the unit away"))?;
        info!(unit = %self.id, "unit cleared away");
        Ok(())
    }

    /// A run of a unit that was removed. Nothing but `stop` is begun any more.
    async fn last(&mut self, name: &UnitName, run: Run) -> Result<Ended, Error> {
        let runs = self.home().runs();
        loop {
            match runs.find(run.number).map_err(disk("cannot look for the hook"))? {
                Found::Over(ended) => return Ok(ended),
                Found::Lost(ended) => {
                    self.end_run(run).await?;
                    return Ok(ended);
                }
                Found::Running if run.hook == Hook::Stop => sleep(LOOK_AGAIN).await,
                Found::Running => {
                    runs.stop(run.number).map_err(disk("cannot stop the hook"))?;
                    sleep(LOOK_AGAIN).await;
                }
                Found::Nothing if run.hook != Hook::Stop => {
                    // It may have been begun all the same, and `stop` comes next.
                    if runs.was_tried(run.number) {
                        self.end_run(run).await?;
                    }
                    return Ok(Ended::Badly { reason: "was not run".to_owned(), output: String::new() });
                }
                Found::Nothing => {
                    let name = name.clone();
                    match self.at_home(move |home| stop(&home, &name, run)).await {
                        Ok(Stop::Ran) => {}
                        Ok(Stop::Missing) => return Ok(Ended::Well),
                        Err(error) => {
                            let reason = format!("cannot be run: {error}");
                            return Ok(Ended::Badly { reason, output: String::new() });
                        }
                    }
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

/// Runs `stop` to its end, as whoever runs hooks now: that may be somebody else than when the last one ran.
fn stop(home: &Home<'_>, name: &UnitName, run: Run) -> io::Result<Stop> {
    // As for every other hook: one at a time.
    if home.runs().was_tried(run.number) {
        home.end_run(run.number)?;
    }
    home.make(name)?;
    home.hand_over()?;
    if !home.put_order(name, run)? {
        return Ok(Stop::Missing);
    }
    home.run(run.number).map(|()| Stop::Ran)
}

/// `None` if there is none: then there is nothing to stop. Of one that makes no sense nobody knows, and the operator decides as
/// about a `stop` that failed.
fn read_state(home: &Home<'_>) -> io::Result<Option<State>> {
    let mut bytes = Vec::new();
    match File::open(home.state()) {
        Ok(file) => file.take(MAX_STATE_BYTES as u64 + 1).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let unknown = |problem: String| -> io::Result<State> {
        let reason = format!("not begun: the unit's state cannot be read: {problem}");
        let failure = Some(Failure { hook: Hook::Stop, reason, output: String::new() });
        // Another run must not be taken for one that was.
        Ok(State { phase: Phase::Started, failure, runs: home.runs().last()?, ..State::default() })
    };
    State::parse(&bytes).or_else(unknown).map(Some)
}

/// Written down before there is a state.
fn read_name(home: &Home<'_>) -> Result<UnitName, Error> {
    let text = std::fs::read_to_string(home.name()).map_err(disk("cannot read the unit's name"))?;
    text.trim().parse().map_err(|_| Error::Corrupt(format!("{} is not a unit's name", home.name().display())))
}
