//! A simulated fleet: trackers on one store in memory, on paused time, with a store that becomes
//! unreachable, sessions that expire, processes that pause, and wall clocks that jump. It records
//! what really happened; `invariants` checks the results.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use portcullis::heartbeat::core::audit::Change;
use portcullis::heartbeat::core::name::Name;
use portcullis::heartbeat::tracker::shared_state::{Readiness, SharedState};
use portcullis::heartbeat::tracker::{Deps, Tracker};
use portcullis::store::acl::{Acl, Roles};
use portcullis::store::memory::Fault;
use portcullis::store::paths::NodePath;
use portcullis::store::records::Placement;
use portcullis::store::tree::{Answer, Error, Node, Read, Stat, Tree, Write};
use portcullis::store::{Bootstrap, Credential, Environment, MemoryStore, MemoryTree};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::manager::Manager;
use crate::oracle::{Farewell, Reader};

/// The session timeout of the store.
pub(crate) const SESSION: Duration = Duration::from_secs(10);

/// A session that the simulation can cut off.
#[derive(Debug, Clone)]
pub(crate) struct Wire {
    pub(crate) tree: MemoryTree,
    down: Arc<AtomicBool>,
    /// Only this session is cut off.
    cut_off: Arc<AtomicBool>,
    losses: Losses,
}

/// Writes of trackers that will get no answer: each the next write below a path.
type Losses = Arc<Mutex<VecDeque<(NodePath, Fault)>>>;

impl Wire {
    fn loss(&self, writes: &[Write]) -> Option<Fault> {
        let mut losses = self.losses.lock().expect("no panic");
        let below =
            |path: &NodePath| writes.iter().any(|write| write.path().as_str().starts_with(path.as_str()));
        losses.pop_front_if(|(path, _)| below(path)).map(|(_, loss)| loss)
    }

    async fn reach(&self) -> Result<(), Error> {
        if self.down.load(Ordering::Relaxed) || self.cut_off.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            return Err(Error::Unreachable { hosts: "nowhere".to_owned() });
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(())
    }
}

impl Tree for Wire {
    type Feed = <MemoryTree as Tree>::Feed;

    async fn get(&self, path: &NodePath) -> Result<Node, Error> {
        self.reach().await?;
        self.tree.get(path).await
    }

    async fn stat(&self, path: &NodePath) -> Result<Option<Stat>, Error> {
        self.reach().await?;
        self.tree.stat(path).await
    }

    async fn children(&self, path: &NodePath) -> Result<Vec<String>, Error> {
        self.reach().await?;
        self.tree.children(path).await
    }

    async fn read_each(&self, reads: Vec<Read>) -> Result<Vec<Result<Answer, Error>>, Error> {
        self.reach().await?;
        self.tree.read_each(reads).await
    }

    async fn write(&self, writes: Vec<Write>) -> Result<(), Error> {
        self.reach().await?;
        let lost = Err(Error::Ambiguous { hosts: "nowhere".to_owned() });
        match self.loss(&writes) {
            None => self.tree.write(writes).await,
            Some(Fault::LostBefore) => lost,
            Some(Fault::LostAfter) => {
                // A refused write is refused, whether its answer arrives or not.
                let _ = self.tree.write(writes).await;
                lost
            }
        }
    }

    async fn set_acl(&self, path: &NodePath, acl: Acl) -> Result<(), Error> {
        self.reach().await?;
        self.tree.set_acl(path, acl).await
    }

    async fn sync(&self) -> Result<(), Error> {
        self.reach().await
    }

    async fn watch(&self, path: &NodePath) -> Result<Self::Feed, Error> {
        self.reach().await?;
        self.tree.watch(path).await
    }
}

/// A process that can be paused and continued.
#[derive(Debug, Clone, Default)]
struct Brake {
    on: Arc<AtomicBool>,
    wakers: Arc<Mutex<Vec<Waker>>>,
}

impl Brake {
    fn set(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
        if !on {
            for waker in self.wakers.lock().expect("no panic").drain(..) {
                waker.wake();
            }
        }
    }
}

struct Braked<F> {
    inner: Pin<Box<F>>,
    brake: Brake,
}

impl<F: Future> Future for Braked<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        if self.brake.on.load(Ordering::Relaxed) {
            self.brake.wakers.lock().expect("no panic").push(cx.waker().clone());
            return Poll::Pending;
        }
        self.inner.as_mut().poll(cx)
    }
}

pub(crate) struct Replica {
    pub(crate) shared: Arc<SharedState>,
    wire: Wire,
    brake: Brake,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
    pub(crate) reader: Reader,
}

impl Replica {
    pub(crate) fn is_stopped(&self) -> bool {
        self.brake.on.load(Ordering::Relaxed)
    }
}

/// A component, and what really happened to it.
#[derive(Debug, Clone)]
pub(crate) struct Component {
    pub(crate) name: Name,
    pub(crate) beats: bool,
    /// The only tracker that the component knows; it sends beats to it whatever the answer.
    pub(crate) only: Option<u32>,
    period: Duration,
    pub(crate) next: Instant,
    /// When a tracker last accepted a beat of it.
    pub(crate) last: Option<Instant>,
    /// The longest time between two accepted beats.
    pub(crate) longest_gap: Duration,
    /// A planned stop, or the rest of one.
    pub(crate) farewell: Option<Farewell>,
    pub(crate) maintained: bool,
    /// Its beginning and end as wall-clock times, as long as the wall clock does not jump.
    pub(crate) maintenance: Option<(u64, u64)>,
}

pub(crate) struct World {
    pub(crate) store: MemoryStore,
    controller: Credential,
    pub(crate) roles: Roles,
    pub(crate) manager: Manager,
    pub(crate) replicas: BTreeMap<u32, Replica>,
    next_replica: u32,
    pub(crate) components: Vec<Component>,
    down: Arc<AtomicBool>,
    losses: Losses,
    calendar: Arc<AtomicU64>,
    start: Instant,
    random: u64,
    /// Times of faults that may lose a beat that a tracker has just accepted.
    pub(crate) upsets: Vec<Instant>,
    /// Every published change, by number.
    pub(crate) shown: BTreeMap<u64, Change>,
}

impl World {
    pub(crate) async fn new(seed: u64, components: usize) -> Self {
        let store = MemoryStore::default();
        let operator = Credential::generate("operator").expect("random");
        let controller = Credential::generate("controller").expect("random");
        let roles = Roles { operator: operator.identity(), controller: controller.identity() };
        let wanted = Bootstrap {
            environment: "test".parse().expect("a name"),
            placement: Placement::Unassigned,
            operator: roles.operator.clone(),
            controller: roles.controller.clone(),
        };
        Environment::bootstrap(store.connect(Some(&operator)), &wanted).await.expect("bootstrap");
        let mut world = Self {
            store,
            controller,
            roles,
            manager: Manager::default(),
            replicas: BTreeMap::new(),
            next_replica: 0,
            components: Vec::new(),
            down: Arc::default(),
            losses: Losses::default(),
            calendar: Arc::new(AtomicU64::new(1_700_000_000_000)),
            start: Instant::now(),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            upsets: Vec::new(),
            shown: BTreeMap::new(),
        };
        for number in 0..components {
            let period = Duration::from_millis(1_000 + world.below(4_000));
            let name = Name::parse(&format!("x{number}c0s0b0n0")).expect("a name");
            let next = Instant::now() + Duration::from_millis(world.below(1_000));
            world.components.push(Component {
                name,
                beats: true,
                only: None,
                period,
                next,
                last: None,
                longest_gap: Duration::ZERO,
                farewell: None,
                maintained: false,
                maintenance: None,
            });
        }
        world
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // xorshift: small, and the same on every platform.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit.max(1)
    }

    pub(crate) fn tree(&self) -> MemoryTree {
        self.store.connect(Some(&self.controller))
    }

    /// Starts a tracker.
    pub(crate) fn start(&mut self) -> u32 {
        let id = self.next_replica;
        self.next_replica += 1;
        let (calendar, start) = (Arc::clone(&self.calendar), self.start);
        let wall = move || calendar.load(Ordering::Relaxed) + start.elapsed().as_millis() as u64;
        let shared = Arc::new(SharedState::new(Arc::new(wall), 10_000));
        let (down, losses) = (Arc::clone(&self.down), Arc::clone(&self.losses));
        let wire = Wire { tree: self.tree(), down, cut_off: Arc::default(), losses };
        let deps = Deps {
            tree: wire.clone(),
            roles: self.roles.clone(),
            shared: Arc::clone(&shared),
            post: Arc::new(self.manager.clone()),
            url: String::new(),
            webhook_secret: Some(Arc::from(&b"hush"[..])),
            random: || 4,
        };
        let mut tracker = Tracker::new(deps).expect("random");
        let (stop, stopped) = watch::channel(false);
        let brake = Brake::default();
        let life = {
            let shared = Arc::clone(&shared);
            async move {
                let mut running = pin!(tracker.run(stopped));
                tokio::select! {
                    ended = &mut running => ended.expect("a tracker that waits for its store"),
                    () = shared.pulse() => {}
                }
            }
        };
        let task = tokio::spawn(Braked { inner: Box::pin(life), brake: brake.clone() });
        self.replicas.insert(id, Replica { shared, wire, brake, stop, task, reader: Reader::new() });
        id
    }

    /// Ends a tracker like a power failure; its session expires later.
    pub(crate) fn kill(&mut self, id: u32) {
        self.upset();
        let Some(replica) = self.replicas.remove(&id) else { return };
        replica.task.abort();
        let wire = replica.wire;
        let store = self.store.clone();
        tokio::spawn(async move {
            tokio::time::sleep(SESSION).await;
            store.expire(&wire.tree);
        });
    }

    /// Stops a tracker as planned.
    pub(crate) async fn stop(&mut self, id: u32) {
        self.upset();
        let Some(replica) = self.replicas.remove(&id) else { return };
        replica.brake.set(false);
        replica.stop.send_replace(true);
        replica.task.await.expect("an orderly end");
    }

    /// Pauses a process for a while; if that is long enough, its session expires.
    pub(crate) fn freeze(&mut self, id: u32, time: Duration) {
        self.upset();
        let Some(replica) = self.replicas.get(&id) else { return };
        let (brake, wire, store) = (replica.brake.clone(), replica.wire.clone(), self.store.clone());
        brake.set(true);
        tokio::spawn(async move {
            tokio::time::sleep(time.min(SESSION)).await;
            if time > SESSION {
                store.expire(&wire.tree);
                tokio::time::sleep(time - SESSION).await;
                brake.set(false);
                // The connection learns that its session is over.
                store.interrupt();
            } else {
                brake.set(false);
            }
        });
    }

    pub(crate) fn set_store(&mut self, there: bool) {
        self.upset();
        self.down.store(!there, Ordering::Relaxed);
        if there {
            self.store.interrupt();
        }
    }

    /// Cuts one tracker off from the store, or connects it again; its session may expire meanwhile.
    pub(crate) fn cut_off(&mut self, id: u32, is_cut_off: bool) {
        self.upset();
        self.replicas[&id].wire.cut_off.store(is_cut_off, Ordering::Relaxed);
    }

    pub(crate) fn expire(&self, id: u32) {
        self.store.expire(&self.replicas[&id].wire.tree);
    }

    /// Loses the answer to the next write of a tracker below `path`.
    pub(crate) fn lose_answer(&mut self, path: NodePath, loss: Fault) {
        self.upset();
        self.losses.lock().expect("no panic").push_back((path, loss));
    }

    /// Expires all sessions, as a long outage of the store does.
    pub(crate) fn expire_all(&self) {
        for replica in self.replicas.values() {
            self.store.expire(&replica.wire.tree);
        }
    }

    /// Makes the store unreachable when the state manager next accepts a call.
    pub(crate) fn lose_store_with_a_call(&mut self) {
        self.upset();
        self.manager.book().unplug = Some(Arc::clone(&self.down));
    }

    /// The wall-clock time of all trackers.
    pub(crate) fn wall(&self) -> u64 {
        self.calendar.load(Ordering::Relaxed) + self.start.elapsed().as_millis() as u64
    }

    fn upset(&mut self) {
        self.upsets.push(Instant::now());
    }

    pub(crate) fn step_calendar(&mut self, ms: i64) {
        let now = self.calendar.load(Ordering::Relaxed);
        self.calendar.store(now.saturating_add_signed(ms), Ordering::Relaxed);
        // The end of a maintenance is not checked after that.
        for component in &mut self.components {
            component.maintenance = None;
        }
    }

    /// Silences a component without a planned stop.
    pub(crate) fn silence(&mut self, component: usize) {
        self.components[component].beats = false;
    }

    pub(crate) fn revive(&mut self, component: usize) {
        let component = &mut self.components[component];
        component.beats = true;
        component.next = Instant::now();
    }

    /// Lets time pass, with beats of all components that send them.
    pub(crate) async fn pass(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(100)).await;
            for at in 0..self.components.len() {
                let component = &self.components[at];
                let speaks = component.beats || component.farewell.is_some_and(|farewell| farewell.left > 0);
                if speaks && component.next <= Instant::now() {
                    self.beat(at).await;
                }
            }
            self.listen().await;
        }
    }

    /// Sends a beat to any tracker that accepts it; a sender tries the next one after a refusal.
    async fn beat(&mut self, at: usize) {
        let only = self.components[at].only;
        let accepts = |r: &Replica| !r.is_stopped() && r.shared.readiness() != Readiness::Stranded;
        let there: Vec<u32> = self
            .replicas
            .iter()
            .filter(|(id, r)| only.map_or_else(|| accepts(r), |only| **id == only))
            .map(|(id, _)| *id)
            .collect();
        let period = self.components[at].period;
        if there.is_empty() {
            self.components[at].next = Instant::now() + Duration::from_millis(500);
            return;
        }
        let chosen = there[self.below(there.len() as u64) as usize];
        let (shared, name) = (Arc::clone(&self.replicas[&chosen].shared), self.components[at].name);
        let accepted = shared.readiness() != Readiness::Stranded;
        // The answer may wait for the store; the simulation does not.
        let going_away = !self.components[at].beats;
        tokio::spawn(async move { shared.beat(&[(name, going_away)]).await.expect("room for all") });
        let component = &mut self.components[at];
        let now = Instant::now();
        if !accepted {
            component.next = now + period;
            return;
        }
        if going_away {
            if let Some(last) = component.last.filter(|_| component.farewell.is_some_and(|f| f.at.is_none()))
            {
                component.longest_gap = component.longest_gap.max(now - last);
            }
            component.farewell = component.farewell.map(|farewell| farewell.sent(now));
            component.next = now + Duration::from_secs(1);
            return;
        }
        // A component that returns from a planned stop was not silent.
        let back = component.farewell.take().is_some_and(|farewell| farewell.at.is_some());
        if let Some(last) = component.last.filter(|_| !back) {
            component.longest_gap = component.longest_gap.max(now - last);
        }
        component.last = Some(now);
        component.next = now + period;
    }
}
