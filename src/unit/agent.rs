//! A unit's agent: looks at what the tree says of the unit, takes the step that the workflow names, and looks again. What
//! is due is decided in `workflow`; how a hook is run, in `hook`. Everything that was begun is in the tree before it
//! begins, and here on the machine as well, for the time after the unit was removed.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use super::hook::Found;
use super::problem::HeldUp;
use super::site::{Home, Site};
use super::users;
use super::workflow::{Ended, Run, State, Step, Wanted};
use crate::model::UnitId;
use crate::store::records::{self, parse_credentials, parse_service_credential};
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Answer, Feed as _, Read, Tree, Write};
use crate::store::{self, Credential, Identity, paths};

/// How long after a failure of the store, or of the disk, the next attempt is made.
const PAUSE: Duration = Duration::from_secs(1);

/// How often a hook is looked for that an agent before us began.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long events are gathered after the first, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(1);

/// What is to become of a unit's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Live,
    /// The store is older than this machine's checkpoint: the agent does not act on the unit.
    Hold,
    /// The unit is no more: stop it, and clear away what it had.
    Retire,
    /// The agent ends, and what runs goes on running.
    Leave,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the unit is gone")]
    Gone,
    #[error(
        "the unit is missing from its machine's list, but was not removed: nothing is done with it until the two agree"
    )]
    Unlisted,
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("{doing}")]
    Disk { doing: &'static str, source: io::Error },
    /// Frozen as it is, until somebody mends it.
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

/// What the tree says of a unit.
struct Seen {
    record: records::Unit,
    credential: Credential,
    state: State,
    /// None if there is no node for it yet.
    version: Option<i32>,
    exposed: bool,
}

pub(super) struct Agent<'a, T: Tree> {
    tree: &'a T,
    site: &'a Site,
    id: UnitId,
    guard: &'a RollbackGuard,
    orders: watch::Receiver<Order>,
    /// Over the unit, and over its service's flag once the service is known.
    feeds: Option<(T::Feed, T::Feed)>,
    /// The state in the tree is not the one that is kept here: the disk was full, say.
    unkept: bool,
    /// The unit that owns the files here, if known.
    recognised: Option<Identity>,
    /// The files of another unit are being removed before this unit starts.
    clearing: bool,
}

/// Tends one unit until it is told otherwise.
pub(super) async fn tend<T: Tree>(
    tree: &T,
    site: &Site,
    id: UnitId,
    orders: watch::Receiver<Order>,
    (guard, held_up): (&RollbackGuard, &watch::Sender<HeldUp>),
) -> UnitId {
    let (recognised, clearing) = (None, false);
    let mut agent = Agent { tree, site, id, guard, orders, feeds: None, unkept: false, recognised, clearing };
    let mut told = String::new();
    loop {
        let order = *agent.orders.borrow_and_update();
        let passed = match order {
            Order::Leave => return id,
            Order::Hold => {
                agent.pause(site.resync).await;
                continue;
            }
            Order::Live => agent.pass().await.map(|idle| !idle),
            Order::Retire => match agent.retire().await {
                Ok(()) => {
                    held_up.send_if_modified(|all| all.remove(&id).is_some());
                    return id;
                }
                Err(error) => Err(error),
            },
        };
        match passed {
            Ok(true) => continue,
            Ok(false) => told.clear(),
            // Left for what is wanted now.
            Err(Error::Gone) if *agent.orders.borrow() != order => continue,
            // Whoever keeps the list of units will say what to do about it.
            Err(Error::Gone) => {}
            Err(error) => {
                let chain = chain(&error);
                if chain != told {
                    warn!(unit = %id, error = %chain, "unit held up");
                    // Status knows nothing of it any more, and a store that is away is not what is wrong with it.
                    if order == Order::Retire && !matches!(error, Error::Store(_)) {
                        held_up.send_modify(|all| _ = all.insert(id, chain.clone()));
                    }
                    told = chain;
                }
                agent.pause(PAUSE).await;
                continue;
            }
        }
        agent.wait().await;
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

impl<T: Tree> Agent<'_, T> {
    fn home(&self) -> Home<'_> {
        self.site.home(self.id)
    }

    /// Work on the unit's files, which may wait: for the disk, or for somebody who holds a file.
    async fn at_home<R: Send + 'static>(
        &self,
        work: impl FnOnce(Home<'_>) -> io::Result<R> + Send + 'static,
    ) -> io::Result<R> {
        let (site, id) = (self.site.clone(), self.id);
        off_thread(move || work(site.home(id))).await
    }

    async fn pause(&mut self, pause: Duration) {
        tokio::select! {
            () = sleep(pause) => {}
            // A sender that is gone leaves us to the list's next keeper.
            _ = self.orders.changed() => {}
        }
    }

    /// Waits for a reason to look again.
    async fn wait(&mut self) {
        let Some((unit, flag)) = &mut self.feeds else { return self.pause(PAUSE).await };
        let resync = Instant::now() + self.site.resync;
        let lost = tokio::select! {
            event = timeout_at(resync, unit.next()) => matches!(event, Ok(Err(_))),
            event = flag.next() => event.is_err(),
            _ = self.orders.changed() => return,
        };
        if lost {
            self.feeds = None;
            return self.pause(PAUSE).await;
        }
        let end = Instant::now() + GATHER;
        // What else there is to hear is heard in the look that follows.
        while timeout_at(end, unit.next()).await.is_ok_and(|event| event.is_ok()) {}
    }

    /// One look and one step. Says whether there was nothing to do.
    async fn pass(&mut self) -> Result<bool, Error> {
        let seen = self.observe().await?;
        if !self.recognises(&seen).await? {
            // This agent may read a restored store before the supervisor does, which then holds it.
            if let Standing::Held(why) = self.guard.review(self.tree, None, Basis::Known).await? {
                return Err(Error::Restored(why));
            }
            warn!(unit = %self.id, "files belong to a unit that had this number before the store was restored; removing them");
            self.clearing = true;
            let cleared = self.clear().await;
            self.clearing = false;
            return cleared.map(|()| false);
        }
        match seen.state.next(Wanted { exposed: seen.exposed, gone: false }) {
            Step::Wait => {
                if self.unkept {
                    self.unkept = self.keep(&seen, &seen.state).await.is_err();
                }
                // A unit that nothing was ever due for has no state yet.
                if seen.version.is_none() {
                    self.commit(&seen, &seen.state).await?;
                }
                Ok(true)
            }
            Step::Settle(state) => self.commit(&seen, &state).await.map(|()| false),
            Step::Begin(state) => self.begin(&seen, state).await.map(|()| false),
            Step::Resume(run) => {
                let ended = self.carry_out(&seen, run).await?;
                self.conclude(run, &ended).await.map(|()| false)
            }
        }
    }

    async fn observe(&mut self) -> Result<Seen, Error> {
        let id = self.id;
        let reads =
            [paths::unit(id), paths::unit_credentials(id), paths::unit_state(id), paths::unit_agent(id)];
        let answers = self.tree.read_many(reads.map(Read::Data).into()).await;
        let mut answers = match answers {
            Ok(answers) => answers.into_iter().map(Answer::into_data),
            // Removed, and the rights with it, in the middle of the look.
            Err(tree::Error::NoNode(_)) => return Err(Error::Gone),
            Err(error) => return Err(error.into()),
        };
        let mut next = || answers.next().flatten();
        let (Some(record), Some(secret)) = (next(), next()) else { return Err(Error::Gone) };
        let (state, agent) = (next(), next());
        let record = records::Unit::parse(&paths::unit(id), &record.data)?;
        let path = paths::unit_credentials(id);
        let credential = parse_credentials(&path, &secret.data)?;
        if let Some(shared) = parse_service_credential(&path, &secret.data)? {
            self.tree.prove(&shared).await?;
        }
        if self.feeds.is_none() {
            let flag = match self.tree.watch(&paths::exposed(record.service)).await {
                // Without the right to read the flag the agent gets no events about it; it reads
                // the flag at the unit's own events and at every resync.
                Err(tree::Error::NoAuth(_)) => self.tree.watch(&paths::unit(id)).await,
                flag => flag,
            }?;
            self.feeds = Some((self.tree.watch(&paths::unit(id)).await?, flag));
        }
        if agent.is_none() {
            self.show().await?;
        }
        let version = state.as_ref().map(|node| node.version);
        let state = match state {
            None => State::default(),
            Some(node) => State::parse(&node.data)
                .map_err(|problem| Error::Corrupt(format!("{}: {problem}", paths::unit_state(id))))?,
        };
        let exposed = self.tree.exists(&paths::exposed(record.service)).await?;
        Ok(Seen { record, credential, state, version, exposed })
    }

    /// Whether the files here belong to this unit. A restored store can assign the number of an
    /// earlier unit again.
    async fn recognises(&mut self, seen: &Seen) -> Result<bool, Error> {
        let identity = seen.credential.identity();
        if self.recognised.as_ref() == Some(&identity) {
            return Ok(true);
        }
        let found = self.at_home(|home| home.identity()).await;
        let found = found.map_err(disk("cannot read whose files the unit's are"))?;
        // Older versions wrote no identity.
        let ours = found.is_none_or(|found| found == identity.as_str());
        self.recognised = ours.then_some(identity);
        Ok(ours)
    }

    /// Says that somebody looks after the unit.
    async fn show(&self) -> Result<(), Error> {
        let path = paths::unit_agent(self.id);
        let acl = self.site.roles.unit_agent(&self.site.identity);
        let create = Write::Create { path, data: Vec::new(), acl, ephemeral: true };
        match self.tree.write(vec![create]).await {
            // A session that is about to end left it; its end is an event, and then it is made anew.
            Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(()),
            Err(tree::Error::NoNode(_)) => Err(Error::Gone),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes down that a hook begins. One that could not be told of after the unit's end is not begun at all.
    async fn begin(&mut self, seen: &Seen, state: State) -> Result<(), Error> {
        let begun = match (self.keep(seen, &state).await, state.running) {
            (Err(error), Some(run)) => seen.state.not_begun(run.hook, &chain(&error)),
            _ => state,
        };
        self.tell(seen, &begun).await
    }

    /// Writes a state down, here and then in the tree. A disk that does not take it does not keep the operator from
    /// knowing; it is tried again.
    async fn commit(&mut self, seen: &Seen, state: &State) -> Result<(), Error> {
        if let Err(error) = self.keep(seen, state).await {
            warn!(unit = %seen.record.name, error = %chain(&error), "unit's state not kept");
            self.unkept = true;
        }
        self.tell(seen, state).await
    }

    async fn keep(&self, seen: &Seen, state: &State) -> Result<(), Error> {
        let (name, identity) = (seen.record.name.clone(), seen.credential.identity());
        let made = move |home: Home<'_>| {
            home.make(&name)?;
            home.claim(&identity)?;
            home.runs().reserve();
            Ok(())
        };
        self.at_home(made).await.map_err(disk("cannot make the unit's directory"))?;
        self.keep_state(state).await
    }

    async fn keep_state(&self, state: &State) -> Result<(), Error> {
        let bytes = state.to_bytes();
        let write = move |home: Home<'_>| home.runs().with_reserve(|| users::write(&home.state(), &bytes));
        self.at_home(write).await.map_err(disk("cannot keep the unit's state"))
    }

    /// Somebody else's write in between makes it fail, and the next look starts from theirs.
    async fn tell(&self, seen: &Seen, state: &State) -> Result<(), Error> {
        let (path, data) = (paths::unit_state(self.id), state.to_bytes());
        let write = match seen.version {
            Some(version) => Write::SetIfVersion { path, data, version },
            None => Write::create(path, data, self.site.roles.unit_state(&self.site.identity)),
        };
        match self.tree.write(vec![write]).await {
            Ok(()) => {
                if seen.state.label() != state.label() {
                    info!(unit = %seen.record.name, state = %state.label(), "unit changed");
                }
                Ok(())
            }
            Err(tree::Error::BadVersion(_) | tree::Error::NodeExists(_)) => Ok(()),
            Err(tree::Error::NoNode(_)) => Err(Error::Gone),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes down what became of a hook, however long the store takes.
    async fn conclude(&mut self, run: Run, ended: &Ended) -> Result<(), Error> {
        loop {
            if *self.orders.borrow() != Order::Live {
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

    /// Finds out what became of a run, or runs it.
    async fn carry_out(&mut self, seen: &Seen, run: Run) -> Result<Ended, Error> {
        let runs = self.home().runs();
        loop {
            match runs.find(run.number).map_err(disk("cannot look for the hook"))? {
                Found::Over(ended) => return Ok(ended),
                Found::Lost(ended) => {
                    self.end_run(run).await?;
                    return Ok(ended);
                }
                Found::Running => {
                    self.pause(LOOK_AGAIN).await;
                    self.heed()?;
                }
                Found::Nothing => {
                    if let Some(ended) = self.start(seen, run).await? {
                        return Ok(ended);
                    }
                }
            }
        }
    }

    /// Leaves a hook that runs to itself, or to the one who comes after us: also when the unit is to be retired, since whether
    /// it was removed is found out then.
    fn heed(&self) -> Result<(), Error> {
        match *self.orders.borrow() {
            Order::Live | Order::Hold => Ok(()),
            Order::Leave | Order::Retire => Err(Error::Gone),
        }
    }

    /// One hook at a time, also if one was separated from whoever watched over it.
    async fn end_run(&self, run: Run) -> Result<(), Error> {
        let ended = self.at_home(move |home| home.end_run(run.number)).await;
        ended.map_err(disk("cannot end what is left of the hook"))
    }

    /// Runs a hook to its end. Returns what became of it if it could not even begin; else that is to be looked for.
    async fn start(&mut self, seen: &Seen, run: Run) -> Result<Option<Ended>, Error> {
        let name = seen.record.name.clone();
        if let Err(reason) = self.prepare(seen).await? {
            return Ok(Some(Ended::NotBegun { reason }));
        }
        if self.home().runs().was_tried(run.number) {
            self.end_run(run).await?;
        }
        let order = {
            let name = name.clone();
            move |home: Home<'_>| home.put_order(&name, run)
        };
        match self.at_home(order).await {
            Ok(true) => {}
            Ok(false) => {
                debug!(unit = %name, hook = %run.hook, "no such hook");
                return Ok(Some(Ended::Well));
            }
            Err(error) => {
                return Ok(Some(Ended::NotBegun { reason: format!("cannot be ordered: {error}") }));
            }
        }
        info!(unit = %name, hook = %run.hook, "running hook");
        self.ran(run).await
    }

    /// Waits for a run, in a thread of its own: a hook may take its time.
    async fn ran(&mut self, run: Run) -> Result<Option<Ended>, Error> {
        let (site, id) = (self.site.clone(), self.id);
        let mut running = std::pin::pin!(off_thread(move || site.home(id).run(run.number)));
        loop {
            let mut orders = self.orders.clone();
            tokio::select! {
                ran = &mut running => {
                    let failed = |error| Ended::Badly { reason: format!("cannot be run: {error}"), output: String::new() };
                    return Ok(ran.err().map(failed));
                }
                _ = orders.changed() => {
                    self.orders.borrow_and_update();
                    self.heed()?;
                }
            }
        }
    }
}

/// Work that blocks, in a thread that nobody waits for at the end of the process: a hook outlives its agent.
async fn off_thread<R: Send + 'static>(
    work: impl FnOnce() -> io::Result<R> + Send + 'static,
) -> io::Result<R> {
    let (done, result) = tokio::sync::oneshot::channel();
    let told = move || {
        // Whoever asked may have gone.
        drop(done.send(work()));
    };
    std::thread::Builder::new().name("unit".to_owned()).stack_size(256 * 1024).spawn(told)?;
    result.await.map_err(io::Error::other)?
}

mod equip;
mod retire;
mod stopping;
