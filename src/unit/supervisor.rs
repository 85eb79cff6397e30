//! Supervises all units of a machine: starts an agent for each listed unit, and lets the agents of
//! other units remove them. Each agent decides itself which hook is due.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::agent::{Directive, run_agent};
use super::cgroup;
use super::dir_lock;
use super::host::UnitHost;
use super::machine_problem::{self, FailedRemovals};
use super::roster;
use crate::model::UnitId;
use crate::runtime::confirm::Unconfirmed;
use crate::runtime::service::stopped;
use crate::runtime::trusted_path;
use crate::store::changes::Watched;
use crate::store::list_machine_units;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Feed as _, Tree};

/// Pause after a failure of the store.
const PAUSE: Duration = Duration::from_secs(1);

/// How long the agents have to end.
const LEAVING: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another process runs the units in {0}")]
    DirectoryInUse(String),
    #[error("cannot use {directory} for units")]
    Directory { directory: String, source: io::Error },
    #[error("cannot use {directory} for units: {}", refusal.with_repair())]
    Untrusted { directory: String, refusal: trusted_path::Error },
    #[error(transparent)]
    Tree(#[from] tree::Error),
}

/// Runs the machine's units until `stop`. Their hooks and the processes that these started continue
/// after that. No unit is removed while `guard` reports a restored store.
///
/// # Errors
/// See [`Error`]; the failures of the store only if no waiting cures them.
pub async fn run<T: Tree>(
    tree: &T,
    host: &UnitHost,
    guard: &RollbackGuard,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let Some(locked) = dir_lock::take(host, &mut stop).await? else { return Ok(()) };
    let host = &locked.host;
    log_missing_controls(host);
    let (failed_removals, mut failures) = watch::channel(FailedRemovals::new());
    // `None` until a problem was written or removed: an earlier agent may have left one.
    let mut reported: Option<Option<String>> = None;
    let mut agents = FuturesUnordered::new();
    let mut directives: Directives = BTreeMap::new();
    let mut feeds: Option<(T::Feed, T::Feed)> = None;
    let mut removals = Removals::default();
    loop {
        let current = directives.iter().map(|(id, current)| (*id, *current.borrow())).collect();
        match read(tree, host, guard, &current, &mut feeds).await {
            Ok(observed) => {
                let (lock, rolled_back) = (locked.problem.as_deref(), observed.standing.rolled_back());
                let problem = machine_problem::describe(lock, rolled_back, &failures.borrow_and_update());
                if reported.as_ref() != Some(&problem)
                    && machine_problem::report(tree, host, problem.as_deref()).await
                {
                    reported = Some(problem);
                }
                for (id, directive) in removals.decide(observed, &current) {
                    if let Some(current) = directives.get(&id) {
                        current
                            .send_if_modified(|current| std::mem::replace(current, directive) != directive);
                    } else {
                        let (sender, receiver) = watch::channel(directive);
                        directives.insert(id, sender);
                        agents.push(run_agent(tree, host, id, receiver, (guard, &failed_removals)));
                    }
                }
            }
            Err(error) if error.is_transient() => {
                warn!(%error, "store lost");
                feeds = None;
            }
            Err(error) => return Err(error.into()),
        }
        let resync = Instant::now() + if feeds.is_some() { host.resync } else { PAUSE };
        // A failed read does not count as confirmation.
        let pause = removals.read_again(feeds.is_some()).map_or(resync, |again| again.min(resync));
        loop {
            tokio::select! {
                lost = wait_for_event(&mut feeds, pause) => {
                    feeds = feeds.filter(|_| !lost);
                    break;
                }
                // The sender is in this function, so this cannot fail.
                _ = failures.changed() => break,
                Some(id) = agents.next() => drop(directives.remove(&id)),
                () = stopped(&mut stop) => {
                    leave(&directives, &mut agents).await;
                    return Ok(());
                }
            }
        }
    }
}

type Directives = BTreeMap<UnitId, watch::Sender<Directive>>;

/// Logged once for all hooks.
fn log_missing_controls(host: &UnitHost) {
    match cgroup::check() {
        Err(error) => warn!(
            %error,
            "no control groups: a process that clears its environment outlives its unit, and memory is \
             not limited"
        ),
        Ok(base) => {
            let controllers = base.unenforced(host.limits).join(", ");
            if !controllers.is_empty() {
                info!(%controllers, "control groups here have no such controllers; --hook-limits needs them");
            }
        }
    }
}

/// Lets the agents end; hooks continue.
async fn leave(directives: &Directives, agents: &mut FuturesUnordered<impl Future<Output = UnitId>>) {
    for directive in directives.values() {
        directive.send_replace(Directive::Leave);
    }
    let left = async { while agents.next().await.is_some() {} };
    if timeout_at(Instant::now() + LEAVING, left).await.is_err() {
        info!("unit agents did not end in time");
    }
}

/// State that is kept from one read to the next.
#[derive(Debug, Default)]
struct Removals {
    unconfirmed: Unconfirmed<UnitId, Instant>,
    /// Units that were started while the store was older than the checkpoint.
    started: BTreeSet<UnitId>,
    /// How many removals wait for a second read, to log it once.
    logged: usize,
}

impl Removals {
    fn decide(
        &mut self,
        Observed { listed, units_with_files, standing }: Observed,
        current: &BTreeMap<UnitId, Directive>,
    ) -> BTreeMap<UnitId, Directive> {
        if standing.rolled_back().is_some() {
            return roster::hold(&listed, units_with_files, current, &mut self.started);
        }
        self.started.clear();
        roster::decide(&mut self.unconfirmed, &listed, units_with_files, current, Instant::now())
    }

    /// When to read again to confirm removals.
    fn read_again(&mut self, is_connected: bool) -> Option<Instant> {
        let pending = self.unconfirmed.pending().filter(|_| is_connected);
        let units = pending.map_or(0, |(units, _)| units);
        // Usual: the operator may have removed several services.
        if std::mem::replace(&mut self.logged, units) != units && units > 0 {
            info!(units, "units left the machine's list; reading it again before they are removed");
        }
        pending.map(|(_, again)| again)
    }
}

/// Waits until `pause` for a change of the list or an operator's acceptance of the store. Returns
/// whether the watch was lost. Cancel-safe.
async fn wait_for_event<F: tree::Feed>(feeds: &mut Option<(F, F)>, pause: Instant) -> bool {
    match feeds {
        Some((list, accepted)) => {
            let event = async {
                tokio::select! {
                    event = list.next() => event,
                    event = accepted.next() => event,
                }
            };
            matches!(timeout_at(pause, event).await, Ok(Err(_)))
        }
        None => {
            tokio::time::sleep_until(pause).await;
            false
        }
    }
}

/// The units of a machine in the tree and on disk.
struct Observed {
    listed: BTreeSet<UnitId>,
    /// Units that have files here.
    units_with_files: Vec<UnitId>,
    standing: Standing,
}

async fn read<T: Tree>(
    tree: &T,
    host: &UnitHost,
    guard: &RollbackGuard,
    current: &BTreeMap<UnitId, Directive>,
    feeds: &mut Option<(T::Feed, T::Feed)>,
) -> Result<Observed, tree::Error> {
    if feeds.is_none() {
        let mut fresh = Watched::MachineUnits(host.machine).feed(tree).await?;
        let mut accepted = tree.watch(guard.acceptance()).await?;
        // The first event only says that everything may have changed; the read below covers that.
        fresh.next().await?;
        accepted.next().await?;
        *feeds = Some((fresh, accepted));
    }
    // A stale list must not remove a unit that it does not contain yet.
    tree.sync().await?;
    let listed = list_machine_units(tree, host.machine).await?;
    let units_with_files = host.units_with_files().unwrap_or_else(|error| {
        warn!(%error, "cannot look for units that were removed");
        Vec::new()
    });
    let is_new = |id: &UnitId| !units_with_files.contains(id) && !current.contains_key(id);
    let basis = if listed.iter().any(is_new) { Basis::New } else { Basis::Known };
    let standing = guard.review(tree, None, basis).await?;
    Ok(Observed { listed, units_with_files, standing })
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
