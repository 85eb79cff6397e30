//! The agent of one unit: reads the unit from the tree, takes the step that the workflow returns,
//! and reads again. `workflow` decides which step is due; `hook` runs hooks. The agent records
//! every hook before it starts: in the tree and, for the time after the unit's removal, on this
//! machine.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use super::hook::RunState;
use super::host::{UnitDir, UnitHost};
use super::machine_problem::FailedRemovals;
use super::workflow::{Ended, Run, State, Step, Wanted};
use crate::model::{UnitId, error_chain};
use crate::runtime::atomic_file;
use crate::store::changes::{Watched, gather_burst};
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Feed as _, Tree};
use crate::store::{self, Credential, Identity, UnitRead, paths, presence, records};

/// Pause after a failure of the store or the disk.
const PAUSE: Duration = Duration::from_secs(1);

/// Interval at which the agent checks a hook that an earlier agent started.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long events are collected after the first one, so that a burst causes one read.
const GATHER: Duration = Duration::from_millis(1);

/// An instruction of the supervisor to a unit's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Directive {
    Live,
    /// The store is older than this machine's checkpoint: the agent does not act on the unit.
    Hold,
    /// The unit was removed: stop it, and remove its processes and files.
    Remove,
    /// The agent ends; hooks and services of the unit continue.
    Leave,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the unit is gone")]
    Gone,
    #[error(
        "the unit is missing from its machine's list, but was not removed: nothing is done with it until \
         the two agree"
    )]
    Unlisted,
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("{doing}")]
    Disk { doing: &'static str, source: io::Error },
    /// The unit stays frozen until the data is repaired.
    #[error("{0}")]
    Corrupt(String),
    /// The store was restored from a backup, and no operator has accepted it yet.
    #[error("files of another unit are kept: {0}")]
    Restored(String),
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        Self::Store(error.into())
    }
}

fn disk(doing: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Disk { doing, source }
}

/// A unit as read from the tree.
struct Seen {
    record: records::Unit,
    credential: Credential,
    state: State,
    /// `None` if the state has no znode yet.
    version: Option<i32>,
    exposed: bool,
}

pub(super) struct Agent<'a, T: Tree> {
    tree: &'a T,
    host: &'a UnitHost,
    id: UnitId,
    guard: &'a RollbackGuard,
    directives: watch::Receiver<Directive>,
    /// Watches of the unit and, once its service is known, of the service's flag.
    feeds: Option<(T::Feed, T::Feed)>,
    /// The state in the tree is newer than the file on this machine, for example because the disk
    /// was full.
    local_copy_outdated: bool,
    /// The unit that owns the files here, if known.
    owner: Option<Identity>,
    /// The files of another unit are being removed before this unit starts.
    clearing: bool,
}

/// Runs the agent of one unit until a directive ends it.
pub(super) async fn run_agent<T: Tree>(
    tree: &T,
    host: &UnitHost,
    id: UnitId,
    directives: watch::Receiver<Directive>,
    (guard, failed_removals): (&RollbackGuard, &watch::Sender<FailedRemovals>),
) -> UnitId {
    let (owner, clearing) = (None, false);
    let mut agent =
        Agent { tree, host, id, guard, directives, feeds: None, local_copy_outdated: false, owner, clearing };
    let mut logged = String::new();
    loop {
        let directive = *agent.directives.borrow_and_update();
        let passed = match directive {
            Directive::Leave => return id,
            Directive::Hold => {
                agent.pause(host.resync).await;
                continue;
            }
            Directive::Live => agent.pass().await.map(|idle| !idle),
            Directive::Remove => match agent.remove().await {
                Ok(()) => {
                    failed_removals.send_if_modified(|all| all.remove(&id).is_some());
                    return id;
                }
                Err(error) => Err(error),
            },
        };
        match passed {
            Ok(true) => continue,
            Ok(false) => logged.clear(),
            // The directive changed meanwhile: act on the new one.
            Err(Error::Gone) if *agent.directives.borrow() != directive => continue,
            // The supervisor decides what happens to a unit that is gone.
            Err(Error::Gone) => {}
            Err(error) => {
                let chain = error_chain(&error);
                if chain != logged {
                    warn!(unit = %id, error = %chain, "unit agent waits after an error");
                    // Status no longer shows a removed unit, so the machine reports the problem. An
                    // unreachable store is not a problem of the unit.
                    if directive == Directive::Remove && !matches!(error, Error::Store(_)) {
                        failed_removals.send_modify(|all| _ = all.insert(id, chain.clone()));
                    }
                    logged = chain;
                }
                agent.pause(PAUSE).await;
                continue;
            }
        }
        agent.wait().await;
    }
}

impl<T: Tree> Agent<'_, T> {
    fn unit_dir(&self) -> UnitDir<'_> {
        self.host.unit_dir(self.id)
    }

    /// Runs blocking work on the unit's files in another thread.
    async fn with_unit_dir<R: Send + 'static>(
        &self,
        work: impl FnOnce(UnitDir<'_>) -> io::Result<R> + Send + 'static,
    ) -> io::Result<R> {
        let (host, id) = (self.host.clone(), self.id);
        off_thread(move || work(host.unit_dir(id))).await
    }

    async fn pause(&mut self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            // If the sender is gone, the next supervisor sends a directive.
            _ = self.directives.changed() => {}
        }
    }

    /// Waits until the unit has to be read again.
    async fn wait(&mut self) {
        let Some((unit, flag)) = &mut self.feeds else { return self.pause(PAUSE).await };
        let resync = Instant::now() + self.host.resync;
        let lost = tokio::select! {
            event = timeout_at(resync, unit.next()) => matches!(event, Ok(Err(_))),
            event = flag.next() => event.is_err(),
            _ = self.directives.changed() => return,
        };
        if lost {
            self.feeds = None;
            return self.pause(PAUSE).await;
        }
        // The next wait reports a feed that is lost.
        let _ = gather_burst(unit, GATHER, |_| {}).await;
    }

    /// Reads the unit and takes one step. Returns whether there was nothing to do.
    async fn pass(&mut self) -> Result<bool, Error> {
        let seen = self.observe().await?;
        if !self.owns_files(&seen).await? {
            // This agent may read a restored store before the supervisor does, which then holds it.
            if let Standing::RolledBack(why) = self.guard.review(self.tree, None, Basis::Known).await? {
                return Err(Error::Restored(why));
            }
            warn!(
                unit = %self.id,
                "files belong to a unit that had this number before the store was restored; removing them"
            );
            self.clearing = true;
            let cleared = self.clear().await;
            self.clearing = false;
            return cleared.map(|()| false);
        }
        match seen.state.next(Wanted { exposed: seen.exposed, gone: false }) {
            Step::Wait => {
                if self.local_copy_outdated {
                    self.local_copy_outdated = self.save(&seen, &seen.state).await.is_err();
                }
                // A unit has no state until its first hook is due.
                if seen.version.is_none() {
                    self.commit(&seen, &seen.state).await?;
                }
                Ok(true)
            }
            Step::Settle(state) => self.commit(&seen, &state).await.map(|()| false),
            Step::Begin(state) => self.begin(&seen, state).await.map(|()| false),
            Step::Resume(run) => {
                let ended = self.carry_out(&seen, run).await?;
                self.record_result(run, &ended).await.map(|()| false)
            }
        }
    }

    async fn observe(&mut self) -> Result<Seen, Error> {
        let id = self.id;
        let read = store::read_unit(self.tree, id).await?.ok_or(Error::Gone)?;
        let UnitRead { record, credential, shared, state, agent } = read;
        if let Some(shared) = shared {
            self.tree.prove(&shared).await?;
        }
        if self.feeds.is_none() {
            let flag = match Watched::ExposedFlag(record.service).feed(self.tree).await {
                // Without the right to read the flag the agent gets no events about it; it reads
                // the flag at the unit's own events and at every resync.
                Err(tree::Error::NoAuth(_)) => Watched::Unit(id).feed(self.tree).await,
                flag => flag,
            }?;
            self.feeds = Some((Watched::Unit(id).feed(self.tree).await?, flag));
        }
        if !agent {
            self.show().await?;
        }
        let version = state.as_ref().map(|node| node.version);
        let state = match state {
            None => State::default(),
            Some(node) => State::parse(&node.data)
                .map_err(|problem| Error::Corrupt(format!("{}: {problem}", paths::unit_state(id))))?,
        };
        let exposed = store::is_exposed(self.tree, record.service).await?;
        Ok(Seen { record, credential, state, version, exposed })
    }

    /// Whether the files here belong to this unit. A restored store can assign the number of an
    /// earlier unit again.
    async fn owns_files(&mut self, seen: &Seen) -> Result<bool, Error> {
        let identity = seen.credential.identity();
        if self.owner.as_ref() == Some(&identity) {
            return Ok(true);
        }
        let found = self.with_unit_dir(|unit_dir| unit_dir.identity()).await;
        let found = found.map_err(disk("cannot read which unit owns the files"))?;
        // Older versions wrote no identity.
        let ours = found.is_none_or(|found| found == identity.as_str());
        self.owner = ours.then_some(identity);
        Ok(ours)
    }

    /// Creates the ephemeral znode that shows that the unit's agent is running.
    async fn show(&self) -> Result<(), Error> {
        let acl = self.host.roles.unit_agent(&self.host.identity);
        match presence::show_unit_agent(self.tree, self.id, acl).await {
            Err(tree::Error::NoNode(_)) => Err(Error::Gone),
            done => Ok(done?),
        }
    }

    /// Records the start of a hook. If the record cannot be kept on this machine, the hook does not
    /// start.
    async fn begin(&mut self, seen: &Seen, state: State) -> Result<(), Error> {
        let begun = match (self.save(seen, &state).await, state.running) {
            (Err(error), Some(run)) => seen.state.not_begun(run.hook, &error_chain(&error)),
            _ => state,
        };
        self.write_state(seen, &begun).await
    }

    /// Writes the state to this machine and then to the tree. If the disk refuses it, the tree
    /// still gets it, and the local write is retried.
    async fn commit(&mut self, seen: &Seen, state: &State) -> Result<(), Error> {
        if let Err(error) = self.save(seen, state).await {
            let unit = &seen.record.name;
            warn!(%unit, error = %error_chain(&error), "cannot save the unit's state on this machine");
            self.local_copy_outdated = true;
        }
        self.write_state(seen, state).await
    }

    async fn save(&self, seen: &Seen, state: &State) -> Result<(), Error> {
        let (name, identity) = (seen.record.name.clone(), seen.credential.identity());
        let create = move |unit_dir: UnitDir<'_>| {
            unit_dir.create_dirs(&name)?;
            unit_dir.save_identity(&identity)?;
            unit_dir.runs().reserve();
            Ok(())
        };
        self.with_unit_dir(create).await.map_err(disk("cannot make the unit's directory"))?;
        self.save_state(state).await
    }

    async fn save_state(&self, state: &State) -> Result<(), Error> {
        let bytes = state.to_bytes();
        let write = move |unit_dir: UnitDir<'_>| {
            unit_dir.runs().with_reserve(|| atomic_file::replace_exclusively(&unit_dir.state(), &bytes))
        };
        self.with_unit_dir(write).await.map_err(disk("cannot keep the unit's state"))
    }

    /// Fails if another client wrote in between; the next read then starts from that state.
    async fn write_state(&self, seen: &Seen, state: &State) -> Result<(), Error> {
        let acl = self.host.roles.unit_state(&self.host.identity);
        match store::write_unit_state(self.tree, self.id, state.to_bytes(), seen.version, acl).await {
            Ok(written) => {
                if written && seen.state.label() != state.label() {
                    let reason = state.failure.as_ref().map(|failure| failure.reason.as_str());
                    info!(unit = %seen.record.name, state = %state.label(), reason, "unit changed");
                }
                Ok(())
            }
            Err(tree::Error::NoNode(_)) => Err(Error::Gone),
            Err(error) => Err(error.into()),
        }
    }

    /// Records the result of a hook, retrying until the store accepts it.
    async fn record_result(&mut self, run: Run, ended: &Ended) -> Result<(), Error> {
        loop {
            if *self.directives.borrow() != Directive::Live {
                return Ok(());
            }
            let seen = self.observe().await?;
            if seen.state.running != Some(run) {
                return Ok(());
            }
            let state = seen.state.ended(run, ended);
            if let Some(failure) = &state.failure {
                let (unit, hook) = (&seen.record.name, failure.hook);
                warn!(%unit, %hook, reason = %failure.reason, "hook failed");
            }
            self.commit(&seen, &state).await?;
        }
    }

    /// Returns the result of a run; runs the hook if it did not start yet.
    async fn carry_out(&mut self, seen: &Seen, run: Run) -> Result<Ended, Error> {
        loop {
            match self.state_of(run).await? {
                RunState::Finished(ended) | RunState::Lost(ended) => return Ok(ended),
                RunState::Running => {
                    self.pause(POLL_INTERVAL).await;
                    self.check_directive()?;
                }
                RunState::Nothing => {
                    if let Some(ended) = self.start(seen, run).await? {
                        return Ok(ended);
                    }
                }
            }
        }
    }

    /// Returns the state of a run. Ends the processes of a lost one.
    async fn state_of(&self, run: Run) -> Result<RunState, Error> {
        let state = self.unit_dir().runs().find(run.number).map_err(disk("cannot look for the hook"))?;
        if matches!(state, RunState::Lost(_)) {
            self.end_run(run).await?;
        }
        Ok(state)
    }

    /// Fails if the agent has to leave. A running hook then continues without this agent. This
    /// includes a unit that is to be removed: the removal first finds out whether it really was.
    fn check_directive(&self) -> Result<(), Error> {
        match *self.directives.borrow() {
            Directive::Live | Directive::Hold => Ok(()),
            Directive::Leave | Directive::Remove => Err(Error::Gone),
        }
    }

    /// Ends the remaining processes of a run: a unit runs one hook at a time.
    async fn end_run(&self, run: Run) -> Result<(), Error> {
        let ended = self.with_unit_dir(move |unit_dir| unit_dir.end_run(run.number)).await;
        ended.map_err(disk("cannot end what is left of the hook"))
    }

    /// Runs a hook to its end. Returns a result only if the hook could not start; otherwise its
    /// result is in the files of the run.
    async fn start(&mut self, seen: &Seen, run: Run) -> Result<Option<Ended>, Error> {
        let name = seen.record.name.clone();
        if let Err(reason) = self.prepare(seen).await? {
            return Ok(Some(Ended::NotBegun { reason }));
        }
        if self.unit_dir().runs().was_tried(run.number) {
            self.end_run(run).await?;
        }
        let write_spec = {
            let name = name.clone();
            move |unit_dir: UnitDir<'_>| unit_dir.write_hook_spec(&name, run)
        };
        match self.with_unit_dir(write_spec).await {
            Ok(true) => {}
            Ok(false) => {
                debug!(unit = %name, hook = %run.hook, "no such hook");
                return Ok(Some(Ended::Well));
            }
            Err(error) => {
                return Ok(Some(Ended::NotBegun {
                    reason: format!("its specification cannot be written: {error}"),
                }));
            }
        }
        info!(unit = %name, hook = %run.hook, "running hook");
        self.wait_for_run(run).await
    }

    /// Waits for a run in another thread, because a hook may take long.
    async fn wait_for_run(&mut self, run: Run) -> Result<Option<Ended>, Error> {
        let (host, id) = (self.host.clone(), self.id);
        let mut running = std::pin::pin!(off_thread(move || host.unit_dir(id).run(run.number)));
        loop {
            let mut directives = self.directives.clone();
            tokio::select! {
                result = &mut running => {
                    let reason = |error| format!("cannot be run: {error}");
                    return Ok(result.err().map(|error| Ended::badly(reason(error))));
                }
                _ = directives.changed() => {
                    self.directives.borrow_and_update();
                    self.check_directive()?;
                }
            }
        }
    }
}

/// Runs blocking work in a thread that does not delay the end of the process: a hook outlives its
/// agent.
async fn off_thread<R: Send + 'static>(
    work: impl FnOnce() -> io::Result<R> + Send + 'static,
) -> io::Result<R> {
    let (done, result) = tokio::sync::oneshot::channel();
    let task = move || {
        // The caller may have been cancelled.
        drop(done.send(work()));
    };
    std::thread::Builder::new().name("unit".to_owned()).stack_size(256 * 1024).spawn(task)?;
    result.await.map_err(io::Error::other)?
}

mod install_charm;
mod remove;
mod stop_failed;

pub(super) use remove::{Stopped, last_stop};
