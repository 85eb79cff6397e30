//! Where trackers are, told to machines: each machine has a node that it alone may read, and whoever judges keeps the
//! addresses of all trackers in it. A shell beside the judge: a machine whose node cannot be written waits for the next
//! round, and holds up nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::corner;
use super::ears::Ears;
use super::params::url_of;
use crate::model::MachineId;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::paths;
use crate::store::records::parse_credentials;
use crate::store::tree::{self, Feed as _, Read, Tree, Write};

/// How often it is looked whether anything is to be told.
const ROUND: Duration = Duration::from_secs(2);

/// A tracker that is gone stays in the list this long: it is probably being started anew.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A machine looks again after this, in case an event is lost.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// How long after a failure of the store a machine looks again.
const PAUSE: Duration = Duration::from_secs(2);

/// Trackers in one list.
const MAX_TRACKERS: usize = 16;

/// What was told to whom.
#[derive(Debug, Default)]
struct Told {
    /// Each address with when it was last seen.
    seen: BTreeMap<String, Instant>,
    list: Vec<u8>,
    machines: BTreeSet<MachineId>,
}

/// Keeps every machine told for as long as this replica judges. Runs until it is dropped.
pub async fn announce<T: Tree>(tree: &T, roles: &Roles, ears: &Ears) {
    let mut told = Told::default();
    loop {
        if ears.lock().condition.judging {
            // Nothing is lost by a failure but time: the next round begins where this one ended.
            if let Err(problem) = told.round(tree, roles).await {
                warn!(%problem, "machines are not told where trackers are");
            }
        } else {
            told = Told::default();
        }
        sleep(ROUND).await;
    }
}

impl Told {
    async fn round<T: Tree>(&mut self, tree: &T, roles: &Roles) -> Result<(), Error> {
        let now = Instant::now();
        self.seen.extend(corner::tracker_urls(tree).await?.into_iter().map(|url| (url, now)));
        self.seen.retain(|_, at| *at + REMEMBERED > now);
        let urls: Vec<&String> = self.seen.keys().take(MAX_TRACKERS).collect();
        if urls.is_empty() {
            return Ok(());
        }
        let list = serde_json::json!(urls).to_string().into_bytes();
        if list != self.list {
            self.list = list;
            self.machines.clear();
        }
        let names = tree.children(&paths::machines()).await?;
        let there: BTreeSet<MachineId> =
            names.iter().filter_map(|name| MachineId::from_key(name).ok()).collect();
        self.machines.retain(|machine| there.contains(machine));
        let missing: Vec<MachineId> = there.difference(&self.machines).copied().collect();
        let reads = missing.iter().map(|id| Read::Data(paths::machine_trackers(*id))).collect();
        let found = tree.read_many(reads).await?;
        for (machine, answer) in missing.into_iter().zip(found) {
            match self.tell(tree, roles, machine, answer.into_data()).await {
                Ok(()) => drop(self.machines.insert(machine)),
                Err(Error::Tree(err)) if err.is_retryable() => return Err(err.into()),
                // Gone, changed by somebody else, or not to be written by us: its own trouble.
                Err(problem) => warn!(%machine, %problem, "a machine is not told where trackers are"),
            }
        }
        Ok(())
    }

    async fn tell<T: Tree>(
        &self,
        tree: &T,
        roles: &Roles,
        machine: MachineId,
        known: Option<tree::Node>,
    ) -> Result<(), Error> {
        let (path, data) = (paths::machine_trackers(machine), self.list.clone());
        let write = match known {
            Some(node) if node.data == data => return Ok(()),
            Some(node) => Write::SetIfVersion { path, data, version: node.version },
            None => {
                let credentials = paths::machine_credentials(machine);
                let node = tree.get(&credentials).await?;
                let identity = parse_credentials(&credentials, &node.data)?.identity();
                Write::create(path, data, roles.machine_trackers(&identity))
            }
        };
        Ok(tree.write(vec![write]).await?)
    }
}

/// A machine's side of it: gives every list that it is told to `found`. Runs until it is dropped.
pub async fn follow<T: Tree>(tree: T, machine: MachineId, found: watch::Sender<Vec<String>>) {
    loop {
        if let Err(problem) = follow_once(&tree, machine, &found).await {
            warn!(%problem, "cannot look for trackers");
        }
        sleep(PAUSE).await;
    }
}

async fn follow_once<T: Tree>(
    tree: &T,
    machine: MachineId,
    found: &watch::Sender<Vec<String>>,
) -> Result<(), tree::Error> {
    let path = paths::machine_trackers(machine);
    let mut feed = tree.watch(&path).await?;
    loop {
        let trackers = match tree.get(&path).await {
            Ok(node) => parse(&node.data),
            Err(tree::Error::NoNode(_)) => None,
            Err(err) => return Err(err),
        };
        // A list that is gone or makes no sense leaves the one before.
        if let Some(trackers) = trackers.filter(|trackers| *trackers != *found.borrow()) {
            info!(?trackers, "told where trackers are");
            found.send_replace(trackers);
        }
        // Running out of patience is the look that a lost event would have caused.
        if let Ok(event) = timeout(LOOK_AGAIN, feed.next()).await {
            event?;
        }
    }
}

fn parse(data: &[u8]) -> Option<Vec<String>> {
    let list: Vec<String> = serde_json::from_slice(data).ok()?;
    let urls: Vec<String> =
        list.iter().filter_map(|url| url_of(url).ok().filter(|url| !url.is_empty())).collect();
    (!urls.is_empty() && urls.len() <= MAX_TRACKERS).then_some(urls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_are_a_list() {
        let list = |text: &str| parse(text.as_bytes());
        assert_eq!(list(r#"["http://a:1","ftp://x",""]"#), Some(vec!["http://a:1".to_owned()]));
        let many = format!("[{}]", vec!["\"http://a\""; MAX_TRACKERS + 1].join(","));
        for bad in ["", "[]", "{}", "[1]", r#"["x"]"#, &many] {
            assert_eq!(list(bad), None, "{bad}");
        }
    }
}
