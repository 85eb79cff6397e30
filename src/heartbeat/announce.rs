//! Where trackers are, told to machines: each machine has a node that it alone may read, and whoever judges keeps the
//! addresses of all trackers in it. A shell beside the judge: a machine whose node cannot be written waits for the next
//! round, and holds up nobody.

use std::cmp::Reverse;
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
use crate::store::tree::{self, Feed as _, Tree, Write};

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
    /// Those that could not be told and of whom that was said. A machine may shut us out of its node, for as long as it
    /// likes.
    in_trouble: BTreeSet<MachineId>,
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
        if self.list.is_empty() {
            // Whoever judged before may be among those that are being started anew. Only those who judge write this.
            let before = tree.get(&paths::heartbeat_trackers()).await?;
            self.seen.extend(parse(&before.data).unwrap_or_default().into_iter().map(|url| (url, now)));
        }
        self.seen.extend(corner::tracker_urls(tree).await?.into_iter().map(|url| (url, now)));
        self.seen.retain(|_, at| *at + REMEMBERED > now);
        let urls = self.newest();
        if urls.is_empty() {
            return Ok(());
        }
        let list = serde_json::json!(urls).to_string().into_bytes();
        if list != self.list {
            let kept = tree.get(&paths::heartbeat_trackers()).await?;
            if kept.data != list {
                let (path, version) = (paths::heartbeat_trackers(), kept.version);
                tree.write(vec![Write::SetIfVersion { path, data: list.clone(), version }]).await?;
            }
            self.list = list;
            self.machines.clear();
        }
        let names = tree.children(&paths::machines()).await?;
        let there: BTreeSet<MachineId> =
            names.iter().filter_map(|name| MachineId::from_key(name).ok()).collect();
        self.machines.retain(|machine| there.contains(machine));
        self.in_trouble.retain(|machine| there.contains(machine));
        let missing: Vec<MachineId> = there.difference(&self.machines).copied().collect();
        let nodes = missing.iter().map(|id| paths::machine_trackers(*id)).collect();
        let found = tree.data_of_each(nodes).await?;
        for (machine, answer) in missing.into_iter().zip(found) {
            let problem = match answer {
                Ok(known) => match self.tell(tree, roles, machine, known).await {
                    Ok(()) => {
                        self.machines.insert(machine);
                        self.in_trouble.remove(&machine);
                        continue;
                    }
                    Err(Error::Tree(err)) if err.is_retryable() => return Err(err.into()),
                    // Gone, changed by somebody else, or not to be written by us: its own trouble.
                    Err(problem) => problem.to_string(),
                },
                Err(refused) => refused,
            };
            if self.in_trouble.insert(machine) {
                warn!(%machine, %problem, "a machine is not told where trackers are");
            }
        }
        Ok(())
    }

    /// Those that are there before those that were, and no more than fit into a list; in the order of their names, so that
    /// the same trackers are the same list.
    fn newest(&self) -> Vec<&String> {
        let mut urls: Vec<(&String, &Instant)> = self.seen.iter().collect();
        urls.sort_by_key(|(_, at)| Reverse(**at));
        urls.truncate(MAX_TRACKERS);
        let mut urls: Vec<&String> = urls.into_iter().map(|(url, _)| url).collect();
        urls.sort_unstable();
        urls
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
    use crate::store::records::Placement;
    use crate::store::{Bootstrap, Credential, Environment, MemoryStore, MemoryTree};

    /// A tracker at `url`, two machines, and a session of the controller.
    async fn world(url: &str) -> (MemoryStore, Environment<MemoryTree>, MemoryTree) {
        let store = MemoryStore::default();
        let [operator, controller] =
            ["operator:x", "controller:x"].map(|text| Credential::parse(text).unwrap());
        let wanted = Bootstrap {
            environment: "test".parse().unwrap(),
            placement: Placement::Unassigned,
            operator: operator.identity(),
            controller: controller.identity(),
        };
        let boss = store.connect(Some(&operator));
        let environment = Environment::bootstrap(boss, &wanted).await.unwrap();
        for _ in 0..2 {
            environment.add_machine(None).await.unwrap();
        }
        let tree = store.connect(Some(&controller));
        let roles = &environment.info().roles;
        corner::ensure(&tree, roles).await.unwrap();
        let replica = Write::create(paths::heartbeat_replica("a"), url, roles.controllers());
        tree.write(vec![replica]).await.unwrap();
        (store, environment, tree)
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_shuts_us_out_holds_up_nobody() {
        let (store, environment, tree) = world("http://a:1").await;
        let roles = &environment.info().roles;
        let [first, second] = [MachineId::new(0), MachineId::new(1)];
        let credential = environment.machine_credential(first).await.unwrap();
        let identity = credential.identity();
        let only_me = Roles { operator: identity.clone(), controller: identity.clone() }.operators();
        let agent = store.connect(Some(&credential));
        let hidden = paths::machine_trackers(first);
        agent.write(vec![Write::create(hidden.clone(), Vec::new(), only_me)]).await.unwrap();

        let mut told = Told::default();
        for _ in 0..2 {
            told.round(&tree, roles).await.unwrap();
            assert_eq!(told.machines, [second].into());
            assert_eq!(told.in_trouble, [first].into(), "said once");
        }
        let other = store.connect(Some(&environment.machine_credential(second).await.unwrap()));
        let (found, mut lists) = watch::channel(Vec::new());
        tokio::select! {
            () = follow(other, second, found) => {}
            list = lists.wait_for(|list| !list.is_empty()) => assert_eq!(*list.unwrap(), ["http://a:1"]),
        }
        agent.set_acl(&hidden, roles.machine_trackers(&identity)).await.unwrap();
        told.round(&tree, roles).await.unwrap();
        assert_eq!(told.machines, [first, second].into());
        assert_eq!(told.in_trouble, [].into());
        assert_eq!(agent.get(&hidden).await.unwrap().data, br#"["http://a:1"]"#);
    }

    #[tokio::test(start_paused = true)]
    async fn who_judges_next_remembers_trackers_that_are_gone() {
        let (_store, environment, tree) = world("http://a:1").await;
        let roles = &environment.info().roles;
        Told::default().round(&tree, roles).await.unwrap();
        // It is gone, and with it the judge; another is there, which judges.
        let gone = Write::Delete { path: paths::heartbeat_replica("a") };
        let other = Write::create(paths::heartbeat_replica("b"), "http://b:1", roles.controllers());
        tree.write(vec![gone, other]).await.unwrap();
        let mut next = Told::default();
        next.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&next.list).unwrap(), ["http://a:1", "http://b:1"]);
        tokio::time::advance(REMEMBERED).await;
        next.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&next.list).unwrap(), ["http://b:1"]);
        let version = tree.get(&paths::heartbeat_trackers()).await.unwrap().version;
        next.round(&tree, roles).await.unwrap();
        assert_eq!(tree.get(&paths::heartbeat_trackers()).await.unwrap().version, version, "nothing new");
        // What a machine may write is not believed.
        let data = br#"["http://evil:1"]"#.to_vec();
        for machine in [0, 1].map(MachineId::new) {
            let path = paths::machine_trackers(machine);
            let version = tree.get(&path).await.unwrap().version;
            tree.write(vec![Write::SetIfVersion { path, data: data.clone(), version }]).await.unwrap();
        }
        let mut last = Told::default();
        last.round(&tree, roles).await.unwrap();
        assert_eq!(parse(&last.list).unwrap(), ["http://b:1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn trackers_that_are_there_come_before_those_that_were() {
        let (_store, environment, tree) = world("http://z:1").await;
        let mut told = Told::default();
        let gone = |number| (format!("http://a{number}:1"), Instant::now());
        told.seen.extend((0..MAX_TRACKERS).map(gone));
        tokio::time::advance(Duration::from_secs(1)).await;
        told.round(&tree, &environment.info().roles).await.unwrap();
        let list = parse(&told.list).unwrap();
        assert_eq!((list.len(), list.last().unwrap().as_str()), (MAX_TRACKERS, "http://z:1"));
        tokio::time::advance(REMEMBERED).await;
        told.round(&tree, &environment.info().roles).await.unwrap();
        assert_eq!(parse(&told.list).unwrap(), ["http://z:1"]);
    }

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
