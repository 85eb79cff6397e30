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

use super::agent::{Directive, tend};
use super::cgroup;
use super::dir_lock;
use super::host::Site;
use super::machine_problem::{self, HeldUp};
use super::roster::{self, Missed};
use crate::model::UnitId;
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::runtime::trusted_path;
use crate::store::paths;
use crate::store::rollback::{Basis, RollbackGuard, Standing};
use crate::store::tree::{self, Feed as _, Tree};

/// Pause after a failure of the store.
const PAUSE: Duration = Duration::from_secs(1);

/// How long the agents have to end.
const LEAVING: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another process runs the units in {0}")]
    Held(String),
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
    site: &Site,
    guard: &RollbackGuard,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let Some(ground) = dir_lock::take(site, &mut stop).await? else { return Ok(()) };
    let site = &ground.site;
    let (held_up, mut trouble) = watch::channel(HeldUp::new());
    // `None` until a problem was written or removed: an earlier agent may have left one.
    let mut told: Option<Option<String>> = None;
    // Logged once here, because it applies to every hook.
    match cgroup::check() {
        Err(error) => warn!(
            %error,
            "no control groups: a process that clears its environment outlives its unit, and \
             memory is not limited"
        ),
        Ok(base) => {
            let unenforced = base.unenforced(site.limits);
            if !unenforced.is_empty() {
                let controllers = unenforced.join(", ");
                info!(%controllers, "control groups here have no such controllers; --hook-limits needs them");
            }
        }
    }
    let mut agents = FuturesUnordered::new();
    let mut directives: BTreeMap<UnitId, watch::Sender<Directive>> = BTreeMap::new();
    let mut feeds: Option<(T::Feed, T::Feed)> = None;
    let mut missed = Missed::new(CONFIRM_AFTER);
    // Units that were started while the store was older than the checkpoint.
    let mut started = BTreeSet::new();
    // How many removals wait for a second read, to log it once.
    let mut confirming = 0;
    loop {
        let given: BTreeMap<UnitId, Directive> =
            directives.iter().map(|(id, told)| (*id, *told.borrow())).collect();
        match look(tree, site, guard, &given, &mut feeds).await {
            Ok(Look { listed, residents, standing }) => {
                let behind = standing.held();
                let words =
                    machine_problem::words(ground.problem.as_deref(), behind, &trouble.borrow_and_update());
                if told.as_ref() != Some(&words) && machine_problem::tell(tree, site, words.as_deref()).await
                {
                    told = Some(words);
                }
                let decided = if behind.is_some() {
                    roster::hold(&listed, residents, &given, &mut started)
                } else {
                    started.clear();
                    missed.decide(&listed, residents, &given, Instant::now())
                };
                for (id, directive) in decided {
                    if let Some(told) = directives.get(&id) {
                        told.send_if_modified(|told| std::mem::replace(told, directive) != directive);
                    } else {
                        let (sender, receiver) = watch::channel(directive);
                        directives.insert(id, sender);
                        agents.push(tend(tree, site, id, receiver, (guard, &held_up)));
                    }
                }
            }
            Err(error) if error.is_transient() => {
                warn!(%error, "store lost");
                feeds = None;
            }
            Err(error) => return Err(error.into()),
        }
        let mut pause = Instant::now() + if feeds.is_some() { site.resync } else { PAUSE };
        // A failed read does not count as confirmation.
        if let Some((units, again)) = missed.in_doubt().filter(|_| feeds.is_some()) {
            // Usual: the operator may have removed several services.
            if confirming != units {
                info!(units, "units left the machine's list; reading it again before they are removed");
            }
            confirming = units;
            pause = pause.min(again);
        } else {
            confirming = 0;
        }
        loop {
            let woken = tokio::select! {
                lost = heard(&mut feeds, pause) => Woken::Look { lost },
                // The sender is in this function, so this cannot fail.
                _ = trouble.changed() => Woken::Look { lost: false },
                Some(id) = agents.next() => Woken::Ended(id),
                // A dropped sender means the same as a request to stop.
                () = async { drop(stop.wait_for(|stop| *stop).await) } => Woken::Stop,
            };
            match woken {
                Woken::Ended(id) => drop(directives.remove(&id)),
                Woken::Look { lost: false } => break,
                Woken::Look { lost: true } => {
                    feeds = None;
                    break;
                }
                Woken::Stop => {
                    for directive in directives.values() {
                        directive.send_replace(Directive::Leave);
                    }
                    let left = async { while agents.next().await.is_some() {} };
                    if timeout_at(Instant::now() + LEAVING, left).await.is_err() {
                        info!("unit agents did not end in time");
                    }
                    return Ok(());
                }
            }
        }
    }
}

enum Woken {
    /// Why the supervisor reads again: a change or the resync, or a lost watch.
    Look {
        lost: bool,
    },
    Ended(UnitId),
    Stop,
}

/// Waits until `pause` for a change of the list or an operator's acceptance of the store. Returns
/// whether the watch was lost.
/// Cancel-safe.
async fn heard<F: tree::Feed>(feeds: &mut Option<(F, F)>, pause: Instant) -> bool {
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
struct Look {
    listed: BTreeSet<UnitId>,
    /// Units that have files here.
    residents: Vec<UnitId>,
    standing: Standing,
}

async fn look<T: Tree>(
    tree: &T,
    site: &Site,
    guard: &RollbackGuard,
    given: &BTreeMap<UnitId, Directive>,
    feeds: &mut Option<(T::Feed, T::Feed)>,
) -> Result<Look, tree::Error> {
    let list = paths::machine_units(site.machine);
    if feeds.is_none() {
        let (mut fresh, mut accepted) = (tree.watch(&list).await?, tree.watch(guard.acceptance()).await?);
        // The first event only says that everything may have changed; the read below covers that.
        fresh.next().await?;
        accepted.next().await?;
        *feeds = Some((fresh, accepted));
    }
    // A stale list must not remove a unit that it does not contain yet.
    tree.sync().await?;
    let names = tree.children(&list).await?;
    let listed: BTreeSet<UnitId> = names.iter().filter_map(|name| UnitId::from_key(name).ok()).collect();
    let residents = site.residents().unwrap_or_else(|error| {
        warn!(%error, "cannot look for units that were removed");
        Vec::new()
    });
    let is_new = |id: &UnitId| !residents.contains(id) && !given.contains_key(id);
    let basis = if listed.iter().any(is_new) { Basis::New } else { Basis::Known };
    let standing = guard.review(tree, None, basis).await?;
    Ok(Look { listed, residents, standing })
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
