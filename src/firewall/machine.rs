//! The life of a machine's agent: claim the machine, then look, plan and apply for its own firewall until it is lost or we
//! are asked to stop. One process holds a machine; a second waits for a session that may be dying and then says who does.
//! What is open is decided where it is for all machines, in `wanted` and `plan`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::select_all;
use portcullis_provider::Firewall;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};

use super::agent::Agent;
use super::own;
use super::run::Progress;
use crate::model::MachineId;
use crate::runtime::reconcile::{Due, Ended, Passed, Rounds, STORE_PAUSE, Timetable, turn};
use crate::store::acl::Acl;
use crate::store::changes::Dirty;
use crate::store::election::{Attempt, LEASE, Leadership, Seat};
use crate::store::paths::{self, NodePath};
use crate::store::tree::{self, Event, Feed as _, Tree, Write};

/// Longer than a session outlives its process: a predecessor that was killed is waited for.
const PREDECESSOR: Duration = Duration::from_secs(14);
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// How long events are gathered after the first, so that a burst is one look.
const GATHER: Duration = Duration::from_millis(5);

/// What no waiting cures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("machine {machine} is looked after by {holder} already")]
    Held { machine: MachineId, holder: String },
    #[error("Machine {0} was not found")]
    NoMachine(MachineId),
    #[error(transparent)]
    Store(#[from] crate::store::Error),
}

impl From<tree::Error> for Error {
    fn from(error: tree::Error) -> Self {
        Self::Store(error.into())
    }
}

/// Which machine, who claims it, and how often everything is compared.
#[derive(Debug, Clone)]
pub struct Claim {
    pub machine: MachineId,
    /// For the node that says so.
    pub acl: Acl,
    /// Says who holds the machine to whoever else would; unlike any other's.
    pub holder: String,
    pub resync: Duration,
}

/// Runs until `stop` says so. Without an agent the machine is only held.
///
/// # Errors
/// See [`Error`].
pub async fn run<T: Tree, F: Firewall>(
    mut agent: Option<&mut Agent<T, F>>,
    tree: &T,
    claim: &Claim,
    progress: &watch::Sender<Progress>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    loop {
        let ended = match take(tree, claim, &mut stop).await {
            Ok(Some(lead)) => {
                info!(machine = %claim.machine, "holding the machine");
                progress.send_modify(Progress::leads);
                match remember(tree, claim).await {
                    Ok(()) => hold(agent.as_deref_mut(), tree, lead, claim, progress, &mut stop).await,
                    Err(err) => Err(err),
                }
            }
            Ok(None) => Ok(Ended::Stopped),
            Err(err) => Err(err),
        };
        progress.send_modify(|progress| progress.leading = false);
        match ended {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::Replaced) => warn!(machine = %claim.machine, "no longer holding the machine"),
            Err(Error::Store(crate::store::Error::Tree(err))) if err.is_retryable() => {
                warn!(error = %err, "store lost");
                progress.send_modify(Progress::loses_the_store);
                if paused(STORE_PAUSE, &mut stop).await {
                    return Ok(());
                }
            }
            Err(err) => return Err(err),
        }
    }
}

/// Claims the machine; `None` if we are asked to stop first.
async fn take<T: Tree>(
    tree: &T,
    claim: &Claim,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<Leadership>, Error> {
    let seat = Seat::machine(claim.machine);
    let patience = Instant::now() + PREDECESSOR;
    let mut told = false;
    loop {
        match Leadership::take(seat.clone(), tree, &claim.acl, &claim.holder).await {
            Ok(Attempt::Won(lead)) => return Ok(Some(lead)),
            Ok(Attempt::Taken) => {}
            Err(err) => return Err(err.into()),
        }
        let Some(holder) = seat.holder(tree).await? else {
            if !tree.exists(&paths::machine(claim.machine)).await? {
                return Err(Error::NoMachine(claim.machine));
            }
            continue;
        };
        let holder: String = String::from_utf8_lossy(&holder).chars().take(200).collect();
        if Instant::now() >= patience {
            return Err(Error::Held { machine: claim.machine, holder });
        }
        if !told {
            warn!(machine = %claim.machine, %holder, "waiting for the machine");
            told = true;
        }
        if paused(LOOK_AGAIN, stop).await {
            return Ok(None);
        }
    }
}

/// Leaves word that the machine was looked after, for the time when nobody does any more.
async fn remember<T: Tree>(tree: &T, claim: &Claim) -> Result<(), Error> {
    let path = paths::machine_started(claim.machine);
    if tree.exists(&path).await? {
        return Ok(());
    }
    match tree.write(vec![Write::create(path, Vec::new(), claim.acl.clone())]).await {
        Ok(()) | Err(tree::Error::NodeExists(_)) => Ok(()),
        Err(tree::Error::NoNode(_)) => Err(Error::NoMachine(claim.machine)),
        Err(err) => Err(err.into()),
    }
}

async fn hold<T: Tree, F: Firewall>(
    mut agent: Option<&mut Agent<T, F>>,
    tree: &T,
    lead: Leadership,
    claim: &Claim,
    progress: &watch::Sender<Progress>,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Error> {
    let timetable = Timetable::new(Instant::now(), claim.resync, LEASE / 3);
    // What happened while another held the machine is not known.
    if let Some(agent) = agent.as_deref_mut() {
        agent.forget();
    }
    let feeds = Feeds::<T>::new(claim.machine);
    turn(&mut Holding { agent, tree, lead, claim, progress, feeds }, timetable, stop).await
}

/// What pass after pass needs.
struct Holding<'a, T: Tree, F> {
    agent: Option<&'a mut Agent<T, F>>,
    tree: &'a T,
    lead: Leadership,
    claim: &'a Claim,
    progress: &'a watch::Sender<Progress>,
    feeds: Feeds<T>,
}

impl<T: Tree, F: Firewall> Rounds for Holding<'_, T, F> {
    type Error = Error;

    async fn changed(&mut self) -> Result<(), Error> {
        Ok(self.feeds.gather().await?)
    }

    fn retry_at(&self) -> Option<Instant> {
        self.agent.as_ref().and_then(|agent| agent.next_retry())
    }

    async fn confirm(&mut self) -> Result<bool, Error> {
        Ok(self.feeds.during(self.lead.confirm(self.tree)).await?)
    }

    async fn pass(&mut self, due: Due) -> Result<Passed, Error> {
        let machine = self.claim.machine;
        debug!(%machine, ?due, "woken");
        let now = Instant::now();
        let since = self.feeds.heard().or((due == Due::Everything).then_some(now));
        let everything = since.is_some();
        let Some(agent) = self.agent.as_deref_mut() else {
            return Ok(Passed::Looked { everything, in_doubt: false });
        };
        let mut dirty = Dirty::default();
        if let Some(since) = since {
            dirty.add(&Event::Everything, since);
        }
        let passed = match self.feeds.during(agent.pass(&dirty, &self.lead)).await {
            Ok(pass) => {
                debug!(%machine, ?pass, "looked");
                self.progress.send_modify(|progress| {
                    progress.passes += 1;
                    progress.last = pass;
                });
                Passed::Looked { everything, in_doubt: agent.in_doubt() }
            }
            Err(crate::store::Error::Tree(tree::Error::NoNode(path))) if path == paths::machine(machine) => {
                return Err(Error::NoMachine(machine));
            }
            // Somebody else wrote what we wrote about, or our claim has ended: everything is read again.
            Err(crate::store::Error::Tree(err)) if err.is_conflict() => {
                warn!(error = %err, "report changed meanwhile");
                Passed::Disturbed
            }
            Err(err) => return Err(err.into()),
        };
        if let Some(view) = agent.view() {
            self.feeds.watch(self.tree, own::watched(view, machine)).await?;
        }
        Ok(passed)
    }
}

/// Whether we were asked to stop meanwhile.
async fn paused(pause: Duration, stop: &mut watch::Receiver<bool>) -> bool {
    tokio::select! {
        () = sleep(pause) => false,
        _ = stop.wait_for(|stop| *stop) => true,
    }
}

/// Watches over just what the machine may see; a watch over everything would wake every machine at every change.
struct Feeds<T: Tree> {
    machine: MachineId,
    feeds: BTreeMap<NodePath, T::Feed>,
    /// Since when something is changed that nobody has looked at yet.
    changed: Option<Instant>,
}

impl<T: Tree> Feeds<T> {
    fn new(machine: MachineId) -> Self {
        Self { machine, feeds: BTreeMap::new(), changed: None }
    }

    /// From here on these, and no others. A new one first says that everything may have changed.
    async fn watch(&mut self, tree: &T, paths: Vec<NodePath>) -> Result<(), tree::Error> {
        self.feeds.retain(|path, _| paths.contains(path));
        for path in paths {
            if let Entry::Vacant(place) = self.feeds.entry(path) {
                match tree.watch(place.key()).await {
                    Ok(feed) => _ = place.insert(feed),
                    // The machine gets no events for a flag that it may not read; each pass reads
                    // the flag anyway.
                    Err(tree::Error::NoAuth(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// When there was a change that nobody was told of yet, if there was. Now somebody is.
    fn heard(&mut self) -> Option<Instant> {
        self.changed.take()
    }

    /// Waits for a change that somebody else made, and gathers what follows at once. Cancel-safe: what was heard of in a call
    /// that was dropped is still [`heard`](Self::heard).
    async fn gather(&mut self) -> Result<(), tree::Error> {
        if self.changed.is_none() {
            self.event().await?;
            self.changed = Some(Instant::now());
        }
        let end = Instant::now() + GATHER;
        while let Ok(event) = timeout_at(end, self.event()).await {
            event?;
        }
        Ok(())
    }

    /// Takes in what is heard while `work` goes on, so that it is known since when it waits.
    async fn during<R>(&mut self, work: impl Future<Output = R>) -> R {
        tokio::select! {
            biased;
            done = work => done,
            never = self.listen() => match never {},
        }
    }

    async fn listen(&mut self) -> Infallible {
        // What a feed cannot wait out it says again to who gathers next.
        while self.event().await.is_ok() {
            self.changed.get_or_insert_with(Instant::now);
        }
        std::future::pending().await
    }

    async fn event(&mut self) -> Result<(), tree::Error> {
        let ours = [
            paths::machine_agent(self.machine),
            paths::machine_problem(self.machine),
            paths::machine_checkpoint(self.machine),
            paths::machine_stopping(self.machine),
            paths::machine_firewall(self.machine),
            paths::machine_firewall_log(self.machine),
        ];
        loop {
            if self.feeds.is_empty() {
                std::future::pending::<()>().await;
            }
            let waiting = self.feeds.values_mut().map(|feed| Box::pin(feed.next()));
            let (event, _, _) = select_all(waiting).await;
            match event? {
                Event::Changed(path) if ours.contains(&path) => {}
                _ => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::acl::Roles;
    use crate::store::tree::Write;
    use crate::store::{Credential, MemoryStore, MemoryTree};

    /// A pass that took so long that the claim is to be confirmed at once drops the wait for changes in its first moment.
    #[tokio::test(start_paused = true)]
    async fn a_change_that_was_heard_of_is_not_forgotten() {
        let operator = Credential::generate("operator").unwrap();
        let tree = MemoryStore::default().connect(Some(&operator));
        let roles = Roles { operator: operator.identity(), controller: operator.identity() };
        let create = |path| Write::create(path, Vec::new(), roles.operators());
        tree.write(vec![create(paths::machines())]).await.unwrap();
        let machine = MachineId::new(0);
        let mut feeds = Feeds::<MemoryTree>::new(machine);
        feeds.watch(&tree, vec![paths::machines()]).await.unwrap();
        feeds.gather().await.unwrap();
        assert!(feeds.heard().is_some() && feeds.heard().is_none(), "a new watch says everything, once");
        let patience = Duration::from_secs(3600);
        assert!(tokio::time::timeout(patience, feeds.gather()).await.is_err(), "nothing has changed");
        tree.write(vec![create(paths::machine(machine))]).await.unwrap();
        assert!(tokio::time::timeout(GATHER / 5, feeds.gather()).await.is_err(), "it gathers");
        tokio::time::timeout(patience, feeds.gather()).await.expect("told").unwrap();
        assert!(feeds.heard().is_some() && feeds.heard().is_none(), "once");
        tree.write(vec![create(paths::machine(MachineId::new(1)))]).await.unwrap();
        assert!(tokio::time::timeout(GATHER / 5, feeds.gather()).await.is_err(), "it gathers");
        assert!(feeds.heard().is_some(), "who looks anyway is told");
        assert!(tokio::time::timeout(patience, feeds.gather()).await.is_err(), "and nobody else");
    }
}
