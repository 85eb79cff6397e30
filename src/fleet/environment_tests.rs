//! Several managers of one environment on a store in memory.

use super::*;
use crate::fleet::manager::Timing;
use crate::model::MachineId;
use crate::store::NewMachine;
use crate::store::fleet::{addresses, nodes};
use crate::store::records::Placement;
use crate::store::{Environment, MemoryStore, MemoryTree};

struct Running {
    manager: Manager,
    address: String,
    stop: watch::Sender<bool>,
    task: tokio::task::JoinHandle<Result<(), Error>>,
}

impl Running {
    fn start(tree: MemoryTree, environment: &Environment<MemoryTree>, address: &str) -> Self {
        let manager = Manager::new(Timing::default(), Leadership::Standby { leader: None });
        let roles = environment.info().roles.clone();
        let list = vec![address.to_owned()];
        let mut role = EnvironmentManager::new(tree, roles, manager.clone(), list).unwrap();
        let (stop, stopped) = watch::channel(false);
        Self {
            manager,
            address: address.to_owned(),
            stop,
            task: tokio::spawn(async move { role.run(stopped).await }),
        }
    }

    fn nodes(&self) -> Vec<String> {
        self.manager.reports().keys().map(ToString::to_string).collect()
    }
}

/// Waits until a condition holds, at most an hour of paused time.
async fn eventually(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    for _ in 0..36_000 {
        if is_true().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what} did not happen");
}

#[tokio::test(start_paused = true)]
async fn the_leader_has_the_machines_of_the_tree_as_its_nodes() {
    let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
    let named = NewMachine { name: Some("web1".parse().unwrap()), ..NewMachine::default() };
    let first = environment.add_machine(named).await.unwrap();
    let a = Running::start(store.connect(Some(&controller)), &environment, "192.0.2.1:842");
    eventually("a leader", async || a.nodes() == ["web1"]).await;
    let reader = store.connect(Some(&controller));
    eventually("an address", async || addresses(&reader).await.unwrap() == ["192.0.2.1:842"]).await;
    let stored = async || nodes(&reader).await.unwrap().unwrap();
    eventually("stored nodes", async || stored().await.contains_key("web1")).await;
    assert_eq!(stored().await["web1"].machine, Some(first.number()));
    assert!(!stored().await["web1"].online);
    // Machines appear and disappear without a restart.
    environment.add_machine(None).await.unwrap();
    eventually("a second node", async || a.nodes() == ["1", "web1"]).await;
    environment.terminate(&[first], crate::store::Termination::Forced).await.unwrap();
    eventually("the end of the first node", async || a.nodes() == ["1"]).await;
    eventually("the end of its record", async || !stored().await.contains_key("web1")).await;
    a.stop.send_replace(true);
    a.task.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_standby_names_the_leader_and_follows_it() {
    let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
    environment.add_machine(None).await.unwrap();
    let first = store.connect(Some(&controller));
    let a = Running::start(first.clone(), &environment, "192.0.2.1:842");
    eventually("a leader", async || a.nodes() == ["0"]).await;
    let b = Running::start(store.connect(Some(&controller)), &environment, "192.0.2.2:842");
    let of_a = Leadership::Standby { leader: Some("192.0.2.1:842".to_owned()) };
    eventually("a standby", async || b.manager.leadership() == of_a).await;
    assert_eq!(b.nodes(), [""; 0]);
    // The session of the leader expires: it leads no more, and the standby leads.
    store.expire(&first);
    let reader = store.connect(Some(&controller));
    let leads = |it: &Running| it.manager.leadership() == Leadership::Leading;
    eventually("the next leader", async || {
        let is_held = reader.exists(&crate::store::paths::fleet_leader()).await.unwrap();
        let published = addresses(&reader).await.unwrap();
        let address = |it: &Running| leads(it).then_some(it.address.clone());
        let leading: Vec<String> = [&a, &b].into_iter().filter_map(address).collect();
        is_held && leading.len() == 1 && published == leading
    })
    .await;
    let (leader, standby) = if leads(&a) { (&a, &b) } else { (&b, &a) };
    assert_eq!(leader.nodes(), ["0"]);
    let expected = Leadership::Standby { leader: Some(leader.address.clone()) };
    eventually("the next standby", async || standby.manager.leadership() == expected).await;
}

#[tokio::test(start_paused = true)]
async fn a_converged_leader_writes_nothing() {
    let (store, environment, controller) = MemoryStore::bootstrapped(Placement::Unassigned).await;
    environment.add_machine(None).await.unwrap();
    let a = Running::start(store.connect(Some(&controller)), &environment, "192.0.2.1:842");
    let reader = store.connect(Some(&controller));
    let version = async || {
        let node = reader.find(&crate::store::paths::fleet_nodes()).await.unwrap();
        node.map(|node| node.version)
    };
    eventually("stored nodes", async || version().await.is_some()).await;
    let before = version().await;
    tokio::time::sleep(10 * RESYNC).await;
    assert_eq!(version().await, before);
    assert_eq!(a.nodes(), [MachineId::new(0).number().to_string()]);
}
