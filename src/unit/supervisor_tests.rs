//! Tests with a machine's list of units that is wrong for a moment, and with one that is right.

use super::*;
use crate::model::MachineId;
use crate::runtime::confirm::CONFIRM_AFTER;
use crate::store::acl::Roles;
use crate::store::rollback::{Memory, Record};
use crate::store::tree::Write;
use crate::store::{Credential, MemoryStore, MemoryTree, paths};
use crate::unit::host::HookUser;
use crate::unit::limits::HookLimits;
use crate::unit::resolve::resolve;
use crate::unit::workflow::{Hook, Resolution, Run, State};

const UNITS: u32 = 4;

/// The checkpoint file of an agent.
#[derive(Default)]
struct Saved(std::sync::Mutex<Option<Vec<u8>>>);

impl Memory for Saved {
    fn load(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn save(&self, bytes: Vec<u8>) -> std::pin::Pin<Box<dyn Future<Output = io::Result<()>> + Send + '_>> {
        *self.0.lock().unwrap() = Some(bytes);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct World {
    store: MemoryStore,
    tree: MemoryTree,
    host: UnitHost,
    memory: std::sync::Arc<Saved>,
    _home: tempfile::TempDir,
}

impl World {
    /// Creates units that are listed and have files on the machine.
    async fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let operator = Credential::generate("operator").unwrap();
        let roles = Roles { operator: operator.identity(), controller: operator.identity() };
        let host = UnitHost {
            machine: MachineId::new(0),
            identity: operator.identity(),
            roles,
            environment: "local".parse().unwrap(),
            address: "127.0.0.1:1".parse().unwrap(),
            directory: home.path().join("units"),
            runner: "/nonexistent".into(),
            path: String::new(),
            user: HookUser::Agents,
            users: home.path().join("users.json"),
            limit: Duration::from_secs(1),
            limits: HookLimits::default(),
            resync: Duration::from_secs(60),
            charm_slot: std::sync::Arc::default(),
        };
        for id in 0..UNITS {
            std::fs::create_dir_all(host.directory.join("runs").join(UnitId::new(id).key())).unwrap();
        }
        let store = MemoryStore::default();
        let tree = store.connect(Some(&operator));
        let world = Self { store, tree, host, memory: std::sync::Arc::default(), _home: home };
        let machine = world.host.machine;
        world.create([paths::machines(), paths::machine(machine), paths::machine_units(machine)]).await;
        world.list(0..UNITS).await;
        world
    }

    async fn create(&self, paths: impl IntoIterator<Item = paths::NodePath>) {
        let acl = || self.host.roles.operators();
        let writes = paths.into_iter().map(|path| Write::create(path, Vec::new(), acl())).collect();
        self.tree.write(writes).await.unwrap();
    }

    async fn list(&self, ids: impl IntoIterator<Item = u32>) {
        let machine = self.host.machine;
        self.create(ids.into_iter().map(|id| paths::machine_unit(machine, UnitId::new(id)))).await;
    }

    async fn strike(&self, ids: impl IntoIterator<Item = u32>) {
        let path = |id| paths::machine_unit(self.host.machine, UnitId::new(id));
        let writes = ids.into_iter().map(|id| Write::Delete { path: path(id) }).collect();
        self.tree.write(writes).await.unwrap();
    }

    /// Returns the guard of an agent of this machine that has just started.
    fn guard(&self) -> RollbackGuard {
        let UnitHost { machine, roles, identity, .. } = &self.host;
        let memory: std::sync::Arc<dyn Memory> = std::sync::Arc::clone(&self.memory) as _;
        RollbackGuard::of_machine(*machine, roles, identity, memory)
    }

    fn here(&self) -> Vec<u32> {
        self.host.units_with_files().unwrap().into_iter().map(UnitId::number).collect()
    }

    /// Waits in real time: units are ended in a separate thread, and the paused clock does not wait
    /// for it.
    async fn until_here(&self, wanted: &[u32]) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while self.here() != wanted {
            assert!(std::time::Instant::now() < deadline, "{:?} instead of {wanted:?}", self.here());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_briefly_wrong_stops_no_unit() {
    let world = World::new().await;
    let (stop, stopped) = watch::channel(false);
    let life = async {
        let all: Vec<u32> = (0..UNITS).collect();
        tokio::time::sleep(Duration::from_secs(10)).await;
        for _ in 0..3 {
            world.strike(0..UNITS).await;
            tokio::time::sleep(CONFIRM_AFTER / 2).await;
            world.list(0..UNITS).await;
            tokio::time::sleep(CONFIRM_AFTER * 2).await;
        }
        assert_eq!(world.here(), all);
        world.strike([1]).await;
        world.until_here(&[0, 2, 3]).await;
        // All units are ended as well, if they stay off the list.
        world.strike([0, 2, 3]).await;
        tokio::time::sleep(CONFIRM_AFTER / 2).await;
        assert_eq!(world.here(), [0, 2, 3]);
        world.until_here(&[]).await;
        stop.send_replace(true);
    };
    let guard = world.guard();
    let (ended, ()) = tokio::join!(run(&world.tree, &world.host, &guard, stopped), life);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_unit_that_is_only_missing_from_the_list_is_not_ended() {
    let world = World::new().await;
    let (stop, stopped) = watch::channel(false);
    let life = async {
        let there = paths::unit(UnitId::new(1));
        world.create([paths::units(), there.clone()]).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        // Long enough for the list to be confirmed for all units; all but one were really removed.
        world.strike(0..UNITS).await;
        world.until_here(&[1]).await;
        tokio::time::sleep(CONFIRM_AFTER * 10).await;
        assert_eq!(world.here(), [1]);
        world.tree.write(vec![Write::Delete { path: there }]).await.unwrap();
        world.until_here(&[]).await;
        stop.send_replace(true);
    };
    let guard = world.guard();
    let (ended, ()) = tokio::join!(run(&world.tree, &world.host, &guard, stopped), life);
    ended.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_unit_with_an_unreadable_state_is_not_removed() {
    let world = World::new().await;
    let runs = |id| world.host.directory.join("runs").join(UnitId::new(id).key());
    for id in 0..2 {
        std::fs::write(runs(id).join("name"), format!("web/{id}")).unwrap();
    }
    // One state that cannot be read from the disk, and one with invalid content.
    std::fs::create_dir(runs(0).join("state")).unwrap();
    std::fs::write(runs(1).join("state"), "{\"phase\":").unwrap();
    std::fs::write(runs(1).join("7.end"), "").unwrap();
    let (stop, stopped) = watch::channel(false);
    let life = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.strike([2]).await;
        world.until_here(&[0, 1, 3]).await;
        world.strike([0]).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.strike([1]).await;
        let path = paths::machine_stopping_unit(world.host.machine, UnitId::new(1));
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !world.tree.exists(&path).await.unwrap() {
            assert!(std::time::Instant::now() < deadline, "nobody says that it could not be stopped");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let said = State::parse(&world.tree.get(&path).await.unwrap().data).unwrap();
        assert_eq!((said.label(), said.runs), ("stop-error".to_owned(), 7));
        let reason = said.failure.unwrap().reason;
        assert!(reason.starts_with("not started: the unit's state cannot be read: not JSON: "), "{reason}");
        assert_eq!(world.here(), [0, 1, 3]);
        std::fs::remove_dir(runs(0).join("state")).unwrap();
        world.until_here(&[1, 3]).await;
        resolve(&world.tree, &path, Resolution::Skip).await.unwrap();
        world.until_here(&[3]).await;
        stop.send_replace(true);
    };
    let guard = world.guard();
    let (ended, ()) = tokio::join!(run(&world.tree, &world.host, &guard, stopped), life);
    ended.unwrap();
}

#[tokio::test]
async fn an_unreadable_hook_is_not_treated_as_missing() {
    let world = World::new().await;
    let unit_dir = world.host.unit_dir(UnitId::new(0));
    let name = "web/0".parse().unwrap();
    let spec = || unit_dir.hook_spec(&name, Run { hook: Hook::Start, number: 1 });
    let hooks = unit_dir.charm().join("hooks");
    assert_eq!(spec().unwrap(), None, "no charm");
    std::fs::create_dir_all(unit_dir.charm()).unwrap();
    assert_eq!(spec().unwrap(), None, "no hooks");
    std::fs::write(&hooks, "").unwrap();
    assert_eq!(spec().unwrap(), None, "something else");
    std::fs::remove_file(&hooks).unwrap();
    std::os::unix::fs::symlink("hooks", &hooks).unwrap();
    let refused = spec().unwrap_err().to_string();
    assert!(refused.starts_with("cannot look for /") && refused.contains("/hooks/start: "), "{refused}");
    std::fs::remove_file(&hooks).unwrap();
    std::fs::create_dir(&hooks).unwrap();
    std::os::unix::fs::symlink("nowhere", hooks.join("start")).unwrap();
    assert!(spec().unwrap().is_some(), "a link that leads nowhere is there");
}

/// The unit that was deployed after the backup stays, and is removed once an operator accepts the
/// store.
#[tokio::test(start_paused = true)]
async fn a_restored_store_removes_no_unit_until_it_is_accepted() {
    let world = World::new().await;
    let (stop, stopped) = watch::channel(false);
    let guard = world.guard();
    guard.review(&world.tree, None, Basis::Known).await.unwrap();
    let backup = world.store.backup();
    let life = async {
        // Deployed after the backup: its files exist once the agent has read it.
        world.list([UNITS]).await;
        let checkpoint = paths::machine_checkpoint(world.host.machine);
        while world.tree.get(&checkpoint).await.unwrap().version == 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let files = world.host.directory.join("runs").join(UnitId::new(UNITS).key());
        std::fs::create_dir_all(files).unwrap();
        world.store.restore(&backup);
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(world.here(), (0..=UNITS).collect::<Vec<_>>());
        let problem = world.tree.get(&paths::machine_problem(world.host.machine)).await.unwrap();
        let problem = String::from_utf8(problem.data).unwrap();
        assert!(problem.contains("units are not removed: the store went back"), "{problem}");
        // As `juju accept-store` does.
        let record = world.tree.get(&checkpoint).await.unwrap();
        let record: Record = serde_json::from_slice(&record.data).unwrap();
        let data = serde_json::to_vec(&record.missing.unwrap()).unwrap();
        let acceptance = Write::create(guard.acceptance().clone(), data, world.host.roles.operators());
        world.tree.write(vec![acceptance]).await.unwrap();
        world.until_here(&(0..UNITS).collect::<Vec<_>>()).await;
        stop.send_replace(true);
    };
    let (ended, ()) = tokio::join!(run(&world.tree, &world.host, &guard, stopped), life);
    ended.unwrap();
    let problem = world.tree.get(&paths::machine_problem(world.host.machine)).await.unwrap();
    assert!(!String::from_utf8(problem.data).unwrap().contains("went back"));
}
