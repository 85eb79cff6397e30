//! A fleet in memory: one manager at a time, agents, their systemds, and clients.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::agent::{Agent, Settings};
use portcullis::fleet::dbus::values::JobType;
use portcullis::fleet::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use portcullis::fleet::manager::{Leadership, Manager, NodeRule, NodeRules, Timing};
use portcullis::fleet::systemd::{
    Behaviour, Event, JobRequest, MemorySystemd, Subscriptions, UnitControl as _,
};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use crate::client::{Client, MANAGER};
use crate::network::Network;
use crate::random::Random;

pub(crate) const MS: Duration = Duration::from_millis(1);
pub(crate) const UNITS: [&str; 4] = ["quick.service", "slow.service", "failing.service", "late.service"];
/// No call and no event is about this unit.
const UNTOUCHED: &str = "untouched.service";

/// The events that agents receive: those of the agent that runs.
type Receiver = Arc<Mutex<Option<mpsc::Sender<Event>>>>;

pub(crate) struct Node {
    pub(crate) systemd: MemorySystemd,
    receiver: Receiver,
    agent: Option<(JoinHandle<()>, watch::Sender<bool>)>,
    /// Jobs that were asked for, through the manager or not.
    pub(crate) asked: u32,
}

/// A client, and the paths of its monitors.
pub(crate) struct Caller {
    pub(crate) client: Client,
    pub(crate) monitors: Vec<String>,
}

/// How often something has happened.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage {
    pub(crate) events: BTreeMap<&'static str, usize>,
    pub(crate) jobs: usize,
    pub(crate) lost_nodes: usize,
    pub(crate) simulated_ms: u128,
}

impl Coverage {
    pub(crate) fn add_to(&mut self, other: Self) {
        for (event, count) in other.events {
            *self.events.entry(event).or_default() += count;
        }
        self.jobs += other.jobs;
        self.lost_nodes += other.lost_nodes;
        self.simulated_ms += other.simulated_ms;
    }
}

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) network: Network,
    pub(crate) nodes: BTreeMap<&'static str, Node>,
    pub(crate) manager: Manager,
    /// A client that receives everything.
    pub(crate) observer: Client,
    pub(crate) callers: Vec<Caller>,
    /// Calls that are not answered yet.
    pub(crate) calls: JoinSet<()>,
    pub(crate) coverage: Coverage,
    begun: Instant,
    log: bool,
}

const NODES: [&str; 3] = ["n1", "n2", "n3"];
const CALLERS: usize = 3;

fn all_nodes() -> NodeRules {
    NODES.iter().map(|name| (name.parse().expect("a name"), NodeRule::default())).collect()
}

impl World {
    pub(crate) async fn new(seed: u64, log: bool) -> Self {
        let mut random = Random::new(seed);
        let network = Network::default();
        let manager = Manager::new(Timing::default(), Leadership::Leading);
        manager.set_nodes(all_nodes());
        network.start(manager.clone());
        let observer = observe(&network).await;
        let mut nodes = BTreeMap::new();
        for name in NODES.into_iter().take(1 + random.below(NODES.len())) {
            network.delay(name, MS * u32::try_from(random.below(30)).expect("small"));
            nodes.insert(name, Node::new().await);
        }
        let callers = Vec::new();
        let (calls, coverage, begun) = (JoinSet::new(), Coverage::default(), Instant::now());
        let mut world =
            Self { random, network, nodes, manager, observer, callers, calls, coverage, begun, log };
        world.manager.set_nodes(world.rules());
        for name in world.names() {
            world.start_agent(name);
        }
        world.open_callers().await;
        world
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.nodes.keys().copied().collect()
    }

    pub(crate) fn rules(&self) -> NodeRules {
        all_nodes().into_iter().filter(|(name, _)| self.nodes.contains_key(name.as_str())).collect()
    }

    pub(crate) fn node(&mut self, name: &str) -> &mut Node {
        self.nodes.get_mut(name).expect("a node")
    }

    #[allow(clippy::print_stdout)]
    pub(crate) fn note(&mut self, event: &'static str, about: &str) {
        *self.coverage.events.entry(event).or_default() += 1;
        if self.log {
            println!("{:>8} ms {event} {about}", self.begun.elapsed().as_millis());
        }
    }

    async fn open_callers(&mut self) {
        self.callers.clear();
        for _ in 0..CALLERS {
            let client = Client::open(&self.network).await;
            self.callers.push(Caller { client, monitors: Vec::new() });
        }
    }

    pub(crate) fn start_agent(&mut self, name: &'static str) {
        let way = self.network.of(name);
        let node = self.node(name);
        let (events, received) = mpsc::channel(64);
        *node.receiver.lock().expect("a lock") = Some(events);
        let address: ManagerAddress = "manager:842".parse().expect("an address");
        let settings = Settings {
            name: name.parse().expect("a name"),
            managers: watch::channel(vec![address]).1,
            security: way,
            heartbeat_interval: HEARTBEAT_INTERVAL,
            silence_limit: SILENCE_LIMIT,
            jitter: |most| most / 3,
        };
        let (stop, stopped) = watch::channel(false);
        let agent = Agent::new(settings, node.systemd.clone(), received);
        node.agent = Some((tokio::spawn(agent.run(stopped)), stop));
    }

    /// Ends the agent's process: at once, or with SIGTERM. Its bus connection ends with it.
    pub(crate) async fn stop_agent(&mut self, name: &'static str, with_signal: bool) {
        let node = self.node(name);
        if let Some((agent, stop)) = node.agent.take() {
            if with_signal {
                stop.send_replace(true);
                let begun = Instant::now();
                agent.await.expect("an agent");
                assert!(begun.elapsed() < Duration::from_secs(1), "the agent does not stop");
            } else {
                agent.abort();
            }
        }
        node.receiver.lock().expect("a lock").take();
        // It waits for nothing: what systemd sends is set before the call.
        let _ = futures_util::FutureExt::now_or_never(node.systemd.watch(Subscriptions::default()));
        self.network.reset(name);
    }

    /// Ends the manager's process and starts it again after a pause.
    pub(crate) async fn restart_manager(&mut self, with_signal: bool, pause: Duration) {
        if with_signal {
            self.manager.stop();
            self.observer.ended().await;
        }
        self.network.kill_manager();
        self.end_of_observation(with_signal);
        sleep(pause).await;
        self.manager = Manager::new(Timing::default(), Leadership::Leading);
        self.manager.set_nodes(self.rules());
        self.network.start(self.manager.clone());
        self.observer = observe(&self.network).await;
        self.open_callers().await;
    }

    /// Checks the jobs of the manager that has ended, or ends with no job left.
    fn end_of_observation(&mut self, is_complete: bool) {
        let seen = std::mem::take(&mut *self.observer.seen());
        self.coverage.jobs += seen.jobs.len();
        for (id, (announced, ended)) in seen.jobs {
            assert_eq!(announced, 1, "job {id} was announced {announced} times");
            assert!(ended == 1 || ended == 0 && !is_complete, "job {id} ended {ended} times");
        }
    }

    /// Waits for something that has to happen within a time.
    async fn within(&mut self, what: &str, most: Duration, mut is_so: impl AsyncFnMut(&mut Self) -> bool) {
        let end = Instant::now() + most;
        while !is_so(self).await {
            assert!(Instant::now() < end, "no {what} within {most:?}");
            sleep(20 * MS).await;
        }
    }

    /// Ends all faults, and checks the state that has to follow.
    pub(crate) async fn settle(&mut self) {
        self.note("settle", "");
        for name in self.names() {
            self.network.hold(name, false);
            self.node(name).systemd.set_answering(true);
            if self.node(name).agent.is_none() {
                self.start_agent(name);
            }
        }
        while let Some(ended) = self.calls.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
        self.within("online nodes", Duration::from_secs(10), async |world| {
            world.observer.status().await == "up"
        })
        .await;
        // Jobs of slow units end because the units start, or because the jobs are cancelled.
        let cancels = self.random.one_in(2);
        if !cancels {
            self.nodes.values().for_each(|node| node.systemd.let_slow_start());
        }
        self.within("end of the jobs", Duration::from_secs(10), async |world| {
            let jobs = world.observer.children("job").await;
            for job in jobs.iter().filter(|_| cancels) {
                // The job may have ended.
                let _ = world.observer.call(&format!("{MANAGER}/job/{job}"), "Cancel", &()).await;
            }
            jobs.is_empty()
        })
        .await;
        self.within("last states of the units", Duration::from_secs(5), async |world| {
            let expected = world.units().await;
            world.observer.seen().units == expected
        })
        .await;
        self.end_of_observation(true);
        self.check_nodes().await;
        self.check_the_end().await;
        self.coverage.simulated_ms = self.begun.elapsed().as_millis();
    }

    async fn units(&self) -> BTreeMap<(String, String), String> {
        let mut units = BTreeMap::new();
        for (name, node) in &self.nodes {
            for row in node.systemd.list_units().await.expect("units") {
                units.insert(((*name).to_owned(), row.0), row.3);
            }
        }
        units
    }

    /// Checks that the nodes have executed the requested jobs and no others.
    async fn check_nodes(&self) {
        for (name, node) in &self.nodes {
            let (created, asked) = (node.systemd.jobs_created(), node.asked);
            assert!(created <= asked, "{name}: {created} jobs were created, and {asked} were asked for");
            let state = node.systemd.state(UNTOUCHED).await.expect("a state");
            assert_eq!(state.active, "active", "{name}: a unit was touched");
        }
    }

    /// No monitor remains without its client, and no subscription without a monitor or a manager.
    async fn check_the_end(&mut self) {
        self.callers.clear();
        let few = Duration::from_secs(3);
        self.within("end of the callers' monitors", few, async |world| {
            world.observer.children("monitor").await.len() == 1
        })
        .await;
        let monitors = self.observer.children("monitor").await;
        self.observer
            .call(&format!("{MANAGER}/monitor/{}", monitors[0]), "Close", &())
            .await
            .expect("a reply");
        self.within("end of the subscriptions", few, async |world| !world.is_watching()).await;
        self.observer = observe(&self.network).await;
        self.within("a subscription", few, async |world| world.is_watching()).await;
        self.network.kill_manager();
        self.within("end of a lost manager's subscriptions", few, async |world| !world.is_watching()).await;
    }

    fn is_watching(&self) -> bool {
        self.nodes.values().any(|node| node.systemd.is_watching())
    }
}

impl Node {
    async fn new() -> Self {
        let behaviours = [Behaviour::Quick, Behaviour::Slow, Behaviour::Failing, Behaviour::TooSlow];
        let mut units: Vec<(&str, Behaviour)> = UNITS.into_iter().zip(behaviours).collect();
        units.push((UNTOUCHED, Behaviour::Quick));
        let (systemd, mut events) = MemorySystemd::new(&units);
        let receiver = Receiver::default();
        let current = Arc::clone(&receiver);
        tokio::spawn(async move {
            while let Some(event) = events.recv().await {
                let sender = current.lock().expect("a lock").clone();
                if let Some(sender) = sender {
                    // The agent may have ended.
                    let _ = sender.send(event).await;
                }
            }
        });
        let mut node = Self { systemd, receiver, agent: None, asked: 0 };
        node.start_locally(UNTOUCHED, JobType::Start).await;
        node
    }

    /// A job that does not come from the manager.
    pub(crate) async fn start_locally(&mut self, unit: &str, kind: JobType) {
        self.asked += 1;
        let queued = futures_util::FutureExt::now_or_never(
            self.systemd.queue_job(JobRequest::new(kind, unit, "replace")),
        );
        // A systemd that does not answer executes no local job either.
        drop(queued);
    }
}

/// Opens a client that subscribes to all units.
async fn observe(network: &Network) -> Client {
    let client = Client::open(network).await;
    let monitor = client.monitor().await.expect("a monitor");
    client.call(&monitor, "Subscribe", &("*", "*")).await.expect("a subscription");
    client
}
