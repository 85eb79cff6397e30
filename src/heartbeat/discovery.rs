//! Publishes the addresses of all trackers to machines: each machine has a znode that only it may
//! read, and the judge keeps the list in it. A machine whose znode cannot be written is tried again
//! in the next round, and does not delay others.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::heartbeat::core::params::url_of;
use crate::heartbeat::store;
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::model::MachineId;
use crate::store::Error;
use crate::store::acl::Roles;
use crate::store::changes::Watched;
use crate::store::heartbeat::{
    Single, machine_trackers, set_machine_trackers, set_trackers, trackers_of_each,
};
use crate::store::list_machines;
use crate::store::tree::{self, Feed as _, Tree};

/// Pause between two rounds.
const ROUND: Duration = Duration::from_secs(2);

/// A tracker that is gone stays in the list this long, because it is probably restarting.
const REMEMBERED: Duration = Duration::from_secs(60);

/// A machine reads the list again after this time, because events get lost.
const READ_AGAIN: Duration = Duration::from_secs(60);

/// Pause after a failure of the store.
const PAUSE: Duration = Duration::from_secs(2);

/// Trackers in one list.
const MAX_TRACKERS: usize = 16;

/// The list of trackers, and the machines that have it.
#[derive(Debug, Default)]
struct Publisher {
    /// Each address with the time when its tracker was last registered.
    seen: BTreeMap<String, Instant>,
    list: Vec<u8>,
    machines: BTreeSet<MachineId>,
    /// Machines whose znode cannot be written, for which a warning was logged. A machine can deny
    /// access to its znode for any time.
    failing: BTreeSet<MachineId>,
}

/// Publishes the list for as long as this replica is the judge. Runs until it is dropped.
pub async fn publish_trackers<T: Tree>(tree: &T, roles: &Roles, shared: &SharedState) {
    let mut publisher = Publisher::default();
    loop {
        if shared.lock().stats.judging {
            // The next round continues where this one failed.
            if let Err(problem) = publisher.round(tree, roles).await {
                warn!(%problem, "tracker list not published");
            }
        } else {
            publisher = Publisher::default();
        }
        sleep(ROUND).await;
    }
}

impl Publisher {
    async fn round<T: Tree>(&mut self, tree: &T, roles: &Roles) -> Result<(), Error> {
        let now = Instant::now();
        if self.list.is_empty() {
            // The previous judge may be restarting. Only judges write this znode.
            let before = Single::Trackers.read(tree).await?;
            self.seen.extend(parse(&before.data).unwrap_or_default().into_iter().map(|url| (url, now)));
        }
        self.seen.extend(store::tracker_urls(tree).await?.into_iter().map(|url| (url, now)));
        self.seen.retain(|_, at| *at + REMEMBERED > now);
        let urls = self.newest();
        if urls.is_empty() {
            return Ok(());
        }
        let list = serde_json::json!(urls).to_string().into_bytes();
        if list != self.list {
            set_trackers(tree, &list).await?;
            self.list = list;
            self.machines.clear();
        }
        let there = list_machines(tree).await?;
        self.machines.retain(|machine| there.contains(machine));
        self.failing.retain(|machine| there.contains(machine));
        let missing: Vec<MachineId> = there.difference(&self.machines).copied().collect();
        let found = trackers_of_each(tree, &missing).await?;
        for (machine, answer) in missing.into_iter().zip(found) {
            let problem = match answer {
                Ok(known) => match self.publish_to(tree, roles, machine, known).await {
                    Ok(()) => {
                        self.machines.insert(machine);
                        self.failing.remove(&machine);
                        continue;
                    }
                    Err(err) if err.is_transient() => return Err(err),
                    // The machine is gone, its znode has changed, or access is denied.
                    Err(problem) => problem.to_string(),
                },
                Err(refused) => refused,
            };
            if self.failing.insert(machine) {
                warn!(%machine, %problem, "tracker list not published to machine");
            }
        }
        Ok(())
    }

    /// Present trackers come before those that are gone, and the list is limited; sorted by
    /// address, so that the same trackers make the same list.
    fn newest(&self) -> Vec<&String> {
        let mut urls: Vec<(&String, &Instant)> = self.seen.iter().collect();
        urls.sort_by_key(|(_, at)| Reverse(**at));
        urls.truncate(MAX_TRACKERS);
        let mut urls: Vec<&String> = urls.into_iter().map(|(url, _)| url).collect();
        urls.sort_unstable();
        urls
    }

    async fn publish_to<T: Tree>(
        &self,
        tree: &T,
        roles: &Roles,
        machine: MachineId,
        known: Option<tree::Node>,
    ) -> Result<(), Error> {
        if known.is_some_and(|node| node.data == self.list) {
            return Ok(());
        }
        set_machine_trackers(tree, roles, machine, &self.list).await
    }
}

/// Reads the list on a machine, and sends it to `found`. Runs until it is dropped.
pub async fn follow_trackers<T: Tree>(tree: T, machine: MachineId, found: watch::Sender<Vec<String>>) {
    loop {
        if let Err(problem) = follow_trackers_once(&tree, machine, &found).await {
            warn!(%problem, "tracker list unreadable");
        }
        sleep(PAUSE).await;
    }
}

async fn follow_trackers_once<T: Tree>(
    tree: &T,
    machine: MachineId,
    found: &watch::Sender<Vec<String>>,
) -> Result<(), tree::Error> {
    let mut feed = Watched::MachineTrackers(machine).feed(tree).await?;
    loop {
        let trackers = machine_trackers(tree, machine).await?.and_then(|node| parse(&node.data));
        // A missing or malformed list leaves the previous one in use.
        if let Some(trackers) = trackers.filter(|trackers| *trackers != *found.borrow()) {
            info!(?trackers, "tracker list changed");
            found.send_replace(trackers);
        }
        // A timeout reads again, as a lost event would have caused.
        if let Ok(event) = timeout(READ_AGAIN, feed.next()).await {
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
    use crate::store::records::Placement;
    use crate::store::tree::Write;
    use crate::store::{Environment, MemoryStore, MemoryTree, paths};

    /// A tracker at `url`, two machines, and a session of the controller.
    async fn world(url: &str) -> (MemoryStore, Environment<MemoryTree>, MemoryTree) {
        let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
        for _ in 0..2 {
            environment.add_machine(None).await.unwrap();
        }
        let tree = store.connect(Some(&controller));
        let roles = &environment.info().roles;
        store::ensure(&tree, roles).await.unwrap();
        let replica = Write::create(paths::heartbeat_replica("a"), url, roles.controllers());
        tree.write(vec![replica]).await.unwrap();
        (store, environment, tree)
    }

    #[tokio::test(start_paused = true)]
    async fn machine_that_denies_access_does_not_delay_others() {
        let (store, environment, tree) = world("http://a:1").await;
        let roles = &environment.info().roles;
        let [first, second] = [MachineId::new(0), MachineId::new(1)];
        let credential = environment.machine_credential(first).await.unwrap();
        let identity = credential.identity();
        let only_me = Roles { operator: identity.clone(), controller: identity.clone() }.operators();
        let agent = store.connect(Some(&credential));
        let hidden = paths::machine_trackers(first);
        agent.write(vec![Write::create(hidden.clone(), Vec::new(), only_me)]).await.unwrap();

        let mut publisher = Publisher::default();
        for _ in 0..2 {
            publisher.round(&tree, roles).await.unwrap();
            assert_eq!(publisher.machines, [second].into());
            assert_eq!(publisher.failing, [first].into(), "logged once");
        }
        let other = store.connect(Some(&environment.machine_credential(second).await.unwrap()));
        let (found, mut lists) = watch::channel(Vec::new());
        tokio::select! {
            () = follow_trackers(other, second, found) => {}
            list = lists.wait_for(|list| !list.is_empty()) => assert_eq!(*list.unwrap(), ["http://a:1"]),
        }
        agent.set_acl(&hidden, roles.machine_trackers(&identity)).await.unwrap();
        publisher.round(&tree, roles).await.unwrap();
        assert_eq!(publisher.machines, [first, second].into());
        assert_eq!(publisher.failing, [].into());
        assert_eq!(agent.get(&hidden).await.unwrap().data, br#"["http://a:1"]"#);
    }

    #[tokio::test(start_paused = true)]
    async fn next_judge_keeps_trackers_that_are_gone() {
        let (_store, environment, tree) = world("http://a:1").await;
        let roles = &environment.info().roles;
        Publisher::default().round(&tree, roles).await.unwrap();
        // The tracker is gone, and with it the judge; another tracker becomes the judge.
        let gone = Write::Delete { path: paths::heartbeat_replica("a") };
        let other = Write::create(paths::heartbeat_replica("b"), "http://b:1", roles.controllers());
        tree.write(vec![gone, other]).await.unwrap();
        let mut next = Publisher::default();
        next.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&next.list).unwrap(), ["http://a:1", "http://b:1"]);
        tokio::time::advance(REMEMBERED).await;
        next.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&next.list).unwrap(), ["http://b:1"]);
        let version = tree.get(&paths::heartbeat_trackers()).await.unwrap().version;
        next.round(&tree, roles).await.unwrap();
        assert_eq!(tree.get(&paths::heartbeat_trackers()).await.unwrap().version, version, "nothing new");
        // Lists that a machine can write are not trusted.
        let data = br#"["http://evil:1"]"#.to_vec();
        for machine in [0, 1].map(MachineId::new) {
            let path = paths::machine_trackers(machine);
            let version = tree.get(&path).await.unwrap().version;
            tree.write(vec![Write::SetIfVersion { path, data: data.clone(), version }]).await.unwrap();
        }
        let mut last = Publisher::default();
        last.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&last.list).unwrap(), ["http://b:1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn present_trackers_come_before_those_that_are_gone() {
        let (_store, environment, tree) = world("http://z:1").await;
        let mut publisher = Publisher::default();
        let gone = |number| (format!("http://a{number}:1"), Instant::now());
        publisher.seen.extend((0..MAX_TRACKERS).map(gone));
        tokio::time::advance(Duration::from_secs(1)).await;
        publisher.round(&tree, &environment.info().roles).await.unwrap();
        let list = parse(&publisher.list).unwrap();
        assert_eq!((list.len(), list.last().unwrap().as_str()), (MAX_TRACKERS, "http://z:1"));
        tokio::time::advance(REMEMBERED).await;
        publisher.round(&tree, &environment.info().roles).await.unwrap();
        assert_eq!(parse(&publisher.list).unwrap(), ["http://z:1"]);
    }

    #[test]
    fn list_contains_only_addresses() {
        let list = |text: &str| parse(text.as_bytes());
        assert_eq!(list(r#"["http://a:1","ftp://x",""]"#), Some(vec!["http://a:1".to_owned()]));
        let many = format!("[{}]", vec!["\"http://a\""; MAX_TRACKERS + 1].join(","));
        for bad in ["", "[]", "{}", "[1]", r#"["x"]"#, &many] {
            assert_eq!(list(bad), None, "{bad}");
        }
    }
}
