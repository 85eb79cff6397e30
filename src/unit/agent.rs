//! A unit's agent: looks at what the tree says of the unit, takes the step that the workflow names, and looks again. What
//! is due is decided in `workflow`; how a hook is run, in `hook`. Everything that was begun is in the tree before it
//! begins, and here on the machine as well, for the time after the unit was removed.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use super::hook::Found;
use super::site::{Home, Site};
use super::workflow::{Ended, Hook, MAX_STATE_BYTES, Phase, Run, State, Step, Wanted};
use super::{directory, pack};
use crate::model::{CharmHash, UnitId, UnitName};
use crate::store::records::{self, CHARM_HASH, parse_credentials, parse_service_credential};
use crate::store::tree::{self, Answer, Feed as _, Read, Tree, Write};
use crate::store::{self, Credential, paths};

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
    /// The unit is no more: stop it, and clear away what it had.
    Retire,
    /// The agent ends, and what runs goes on running.
    Leave,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the unit is gone")]
    Gone,
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("{doing}")]
    Disk { doing: &'static str, source: io::Error },
    /// Frozen as it is, until somebody mends it.
    #[error("{0}")]
    Corrupt(String),
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
    orders: watch::Receiver<Order>,
    /// Over the unit, and over its service's flag once the service is known.
    feeds: Option<(T::Feed, T::Feed)>,
}

/// Tends one unit until it is told otherwise.
pub(super) async fn tend<T: Tree>(
    tree: &T,
    site: &Site,
    id: UnitId,
    orders: watch::Receiver<Order>,
) -> UnitId {
    let mut agent = Agent { tree, site, id, orders, feeds: None };
    let mut told = String::new();
    loop {
        let order = *agent.orders.borrow_and_update();
        let passed = match order {
            Order::Leave => return id,
            Order::Live => agent.pass().await.map(|idle| !idle),
            Order::Retire => match agent.retire().await {
                Ok(()) => return id,
                Err(error) => Err(error),
            },
        };
        match passed {
            Ok(true) => continue,
            Ok(false) => told.clear(),
            // Whoever keeps the list of units will say what to do about it.
            Err(Error::Gone) => {}
            Err(error) => {
                let chain = chain(&error);
                if chain != told {
                    warn!(unit = %id, error = %chain, "unit held up");
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
        match seen.state.next(Wanted { exposed: seen.exposed, gone: false }) {
            Step::Wait => {
                // A unit that nothing was ever due for has no state yet.
                if seen.version.is_none() {
                    self.commit(&seen, &seen.state).await?;
                }
                Ok(true)
            }
            Step::Settle(state) | Step::Begin(state) => self.commit(&seen, &state).await.map(|()| false),
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
            let flag = self.tree.watch(&paths::exposed(record.service)).await?;
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

    /// Writes a state down, here and then in the tree. Somebody else's write in between makes it fail, and the next
    /// look starts from theirs.
    async fn commit(&self, seen: &Seen, state: &State) -> Result<(), Error> {
        let home = self.home();
        home.make(&seen.record.name).map_err(disk("cannot make the unit's directory"))?;
        keep(&home, state)?;
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
                Found::Running => {
                    self.pause(LOOK_AGAIN).await;
                    self.heed(run)?;
                }
                Found::Nothing => {
                    if let Some(ended) = self.start(seen, run).await? {
                        return Ok(ended);
                    }
                }
            }
        }
    }

    /// Leaves a hook that runs to itself, or to the one who comes after us.
    fn heed(&self, run: Run) -> Result<(), Error> {
        match *self.orders.borrow() {
            Order::Live => Ok(()),
            Order::Leave => Err(Error::Gone),
            Order::Retire => {
                self.home().runs().stop(run.number).map_err(disk("cannot stop the hook"))?;
                Err(Error::Gone)
            }
        }
    }

    /// Runs a hook to its end. Returns what became of it if it could not even begin; else that is to be looked for.
    async fn start(&mut self, seen: &Seen, run: Run) -> Result<Option<Ended>, Error> {
        let name = seen.record.name.clone();
        if let Err(reason) = self.prepare(seen).await? {
            return Ok(Some(Ended::Badly { reason, output: String::new() }));
        }
        if self.home().runs().was_tried(run.number) {
            // One hook at a time, also if the first was separated from whoever watched over it.
            let (site, id) = (self.site.clone(), self.id);
            let ended = off_thread(move || site.home(id).end_run(run.number)).await;
            ended.map_err(disk("cannot end what is left of the hook"))?;
        }
        let home = self.home();
        let Some(order) = home.order(&name, run) else {
            debug!(unit = %name, hook = %run.hook, "no such hook");
            return Ok(Some(Ended::Well));
        };
        if let Err(error) = home.runs().order(run.number, &order) {
            return Ok(Some(Ended::Badly {
                reason: format!("cannot be ordered: {error}"),
                output: String::new(),
            }));
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
                    self.heed(run)?;
                }
            }
        }
    }

    /// Everything that a hook needs: the charm, and the unit's credentials. The inner error is for the operator.
    async fn prepare(&self, seen: &Seen) -> Result<Result<(), String>, Error> {
        let home = self.home();
        let name = &seen.record.name;
        let given = home.make(name).and_then(|()| home.give(name, &seen.credential));
        if let Err(error) = given {
            return Ok(Err(format!("cannot be given its credentials: {error}")));
        }
        if home.charm().is_dir() {
            return Ok(Ok(()));
        }
        let hash = seen.record.rest.get(CHARM_HASH).and_then(|hash| CharmHash::parse(hash.as_str()?));
        let Some(hash) = hash else {
            return Ok(Err("its charm is not in the store: deploy the service again".to_owned()));
        };
        let bytes = match self.fetch(&hash).await {
            Ok(bytes) => bytes,
            Err(Error::Store(store::Error::Tree(error))) if error.is_retryable() => return Err(error.into()),
            Err(error) => return Ok(Err(format!("its charm cannot be had: {}", chain(&error)))),
        };
        let entries = match pack::unpack(&bytes) {
            Ok(entries) => entries,
            Err(error) => return Ok(Err(format!("its charm cannot be used: {error}"))),
        };
        let (place, user) = (home.charm(), home.user());
        let written = off_thread(move || directory::write(&place, &entries, user)).await;
        Ok(written.map_err(|error| format!("its charm cannot be written: {error}")))
    }

    /// The charm's bytes, from the last unit that had the same one or from the store.
    async fn fetch(&self, hash: &CharmHash) -> Result<Vec<u8>, Error> {
        let kept = self.site.charms().join(hash.key());
        if let Ok(bytes) = std::fs::read(&kept)
            && CharmHash::of(&bytes) == *hash
        {
            return Ok(bytes);
        }
        let bytes = store::charm(self.tree, hash).await?;
        let aside = kept.with_extension(self.id.key());
        let keep = || {
            std::fs::create_dir_all(self.site.charms())?;
            std::fs::write(&aside, &bytes)?;
            std::fs::rename(&aside, &kept)
        };
        // Only the next unit misses it.
        if let Err(error) = keep() {
            debug!(%error, "charm not kept");
        }
        Ok(bytes)
    }

    /// The unit is no more: its `stop` hook runs if it was started, its processes end, its files go.
    async fn retire(&mut self) -> Result<(), Error> {
        let home = self.site.home(self.id);
        let known = read_state(&home).zip(read_name(&home));
        if let Some((mut state, name)) = known {
            loop {
                match state.next(Wanted { exposed: false, gone: true }) {
                    Step::Wait => break,
                    Step::Settle(next) | Step::Begin(next) => state = next,
                    Step::Resume(run) => {
                        let ended = self.last(&name, run).await?;
                        state = state.ended(run, &ended);
                    }
                }
                keep(&home, &state)?;
            }
            match &state.failure {
                Some(failure) => warn!(unit = %name, reason = %failure.reason, "stop hook failed"),
                None if state.phase == Phase::Stopped => info!(unit = %name, "unit stopped"),
                None => {}
            }
        }
        let site = self.site.clone();
        let id = self.id;
        let cleared = off_thread(move || {
            let home = site.home(id);
            home.end_all()?;
            home.remove()
        });
        cleared.await.map_err(disk("cannot clear the unit away"))?;
        info!(unit = %self.id, "unit cleared away");
        Ok(())
    }

    /// A run of a unit that was removed. Nothing but `stop` is begun any more.
    async fn last(&mut self, name: &UnitName, run: Run) -> Result<Ended, Error> {
        let (site, id) = (self.site.clone(), self.id);
        let home = site.home(id);
        let runs = home.runs();
        loop {
            match runs.find(run.number).map_err(disk("cannot look for the hook"))? {
                Found::Over(ended) => return Ok(ended),
                Found::Running if run.hook == Hook::Stop => sleep(LOOK_AGAIN).await,
                Found::Running => {
                    runs.stop(run.number).map_err(disk("cannot stop the hook"))?;
                    sleep(LOOK_AGAIN).await;
                }
                Found::Nothing if run.hook != Hook::Stop => {
                    return Ok(Ended::Badly { reason: "was not run".to_owned(), output: String::new() });
                }
                Found::Nothing => {
                    let Some(order) = home.order(name, run) else { return Ok(Ended::Well) };
                    runs.order(run.number, &order).map_err(disk("cannot order the hook"))?;
                    let site = self.site.clone();
                    let ran = off_thread(move || site.home(id).run(run.number)).await;
                    ran.map_err(disk("cannot run the hook"))?;
                }
            }
        }
    }
}

fn keep(home: &Home<'_>, state: &State) -> Result<(), Error> {
    let (path, aside) = (home.state(), home.state().with_extension("new"));
    std::fs::write(&aside, state.to_bytes())
        .and_then(|()| std::fs::rename(&aside, path))
        .map_err(disk("cannot keep the unit's state"))
}

/// `None` if there is none, or if nobody can tell what it means: then there is nothing to stop by it.
fn read_state(home: &Home<'_>) -> Option<State> {
    let bytes = std::fs::read(home.state()).ok().filter(|bytes| bytes.len() <= MAX_STATE_BYTES)?;
    State::parse(&bytes).ok()
}

fn read_name(home: &Home<'_>) -> Option<UnitName> {
    std::fs::read_to_string(home.name()).ok()?.trim().parse().ok()
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
