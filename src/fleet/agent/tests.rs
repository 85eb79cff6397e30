//! An agent with a systemd in memory, and managers that the tests play.

use std::collections::VecDeque;
use std::sync::Mutex as StdMutex;

use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use zbus::Message;
use zbus::message::{Flags, Type};

use super::*;
use crate::fleet::dbus::connect::{Peer, authenticated_peer};
use crate::fleet::dbus::names::{INTERNAL_AGENT_INTERFACE, INTERNAL_AGENT_PATH};
use crate::fleet::liveness::HEARTBEAT_INTERVAL;
use crate::fleet::systemd::{Behaviour, MemorySystemd};

/// A minute of silence ends no connection here.
const PATIENT: Duration = Duration::from_secs(600);

/// Connects to the managers that the test plays, and notes the addresses.
#[derive(Debug, Clone, Default)]
struct Played {
    attempts: Arc<StdMutex<Vec<String>>>,
    /// The ends for the managers.
    opened: Arc<StdMutex<VecDeque<DuplexStream>>>,
}

impl Connector for Played {
    /// An address with port 1 does not answer, one with port 2 refuses.
    async fn connect(&self, address: &ManagerAddress) -> Result<Peer, ConnectError> {
        let text = address.to_string();
        self.attempts.lock().unwrap().push(text.clone());
        if text.ends_with(":1") {
            std::future::pending::<()>().await;
        }
        if text.ends_with(":2") {
            return Err(ConnectError::Timeout { address: address.clone() });
        }
        let (own, far) = duplex(1 << 20);
        self.opened.lock().unwrap().push_back(far);
        let dbus = |source| ConnectError::Dbus { address: address.clone(), source };
        authenticated_peer(own).await.map_err(dbus)
    }
}

struct World {
    systemd: MemorySystemd,
    /// The agent's queue of events has room for one.
    events: mpsc::Sender<Event>,
    played: Played,
    managers: watch::Sender<Vec<ManagerAddress>>,
    stop: watch::Sender<bool>,
    agent: JoinHandle<()>,
}

fn addresses(names: &[&str]) -> Vec<ManagerAddress> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

impl World {
    fn start(managers: &[&str]) -> Self {
        let (systemd, _) = MemorySystemd::new(&[("slow.service", Behaviour::Slow)]);
        Self::with(managers, systemd)
    }

    fn with(managers: &[&str], systemd: MemorySystemd) -> Self {
        let (events, received) = mpsc::channel(1);
        let (managers, list) = watch::channel(addresses(managers));
        let played = Played::default();
        let settings = Settings {
            name: "n1".parse().unwrap(),
            managers: list,
            security: played.clone(),
            heartbeat_interval: HEARTBEAT_INTERVAL,
            silence_limit: PATIENT,
            jitter: |most| most / 2,
        };
        let (stop, stopped) = watch::channel(false);
        let agent = tokio::spawn(Agent::new(settings, systemd.clone(), received).run(stopped));
        Self { systemd, events, played, managers, stop, agent }
    }

    /// Waits until the agent has attempted to connect this often, and returns the addresses.
    async fn attempts(&self, count: usize) -> Vec<String> {
        while self.played.attempts.lock().unwrap().len() < count {
            sleep(MS).await;
        }
        self.played.attempts.lock().unwrap().clone()
    }

    /// Accepts the agent's next connection, and its registration.
    async fn accept(&self) -> Peer {
        let stream = loop {
            if let Some(stream) = self.played.opened.lock().unwrap().pop_front() {
                break stream;
            }
            sleep(MS).await;
        };
        let mut peer = authenticated_peer(stream).await.unwrap();
        let register = peer.next().await.unwrap();
        peer.connection.reply(&register.header(), &()).await.unwrap();
        peer
    }

    async fn end(self) {
        self.stop.send_replace(true);
        self.agent.await.unwrap();
    }
}

const MS: Duration = Duration::from_millis(1);

async fn send<B>(peer: &Peer, method: &str, body: &B, is_answered: bool)
where
    B: serde::Serialize + zbus::DynamicType,
{
    let call = Message::method_call(INTERNAL_AGENT_PATH, method).interface(INTERNAL_AGENT_INTERFACE);
    let call = if is_answered { call } else { call.with_flags(Flags::NO_REPLY_EXPECTED) };
    peer.connection.send(&call.build(body).unwrap()).await.unwrap();
}

/// Returns the next message of a type, besides heartbeats.
async fn receive(peer: &mut Peer, wanted: Type) -> Message {
    loop {
        let message = peer.next().await.expect("a connection");
        let is_heartbeat = message.header().member().is_some_and(|member| *member == "Heartbeat");
        if message.message_type() == wanted && !is_heartbeat {
            return message;
        }
    }
}

/// Receives errors until one has a name with this end.
async fn until_error(peer: &mut Peer, name: &str) {
    while !receive(peer, Type::Error).await.header().error_name().unwrap().as_str().ends_with(name) {}
}

#[tokio::test(start_paused = true)]
async fn an_agent_stops_and_connects_while_systemd_does_not_answer() {
    let (systemd, _) = MemorySystemd::new(&[]);
    systemd.set_answering(false);
    let world = World::with(&["m:9"], systemd);
    let began = Instant::now();
    drop(world.accept().await);
    // The subscriptions of the lost connection cannot be ended yet.
    let next = world.accept().await;
    send(&next, "Subscribe", &"a.service", false).await;
    drop(next);
    let last = world.accept().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    world.end().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    drop(last);
}

#[tokio::test(start_paused = true)]
async fn events_do_not_wait_for_a_connection() {
    for address in ["m:1", "m:2", "m:9"] {
        let world = World::start(&[address]);
        world.attempts(1).await;
        for id in 0..100 {
            world.events.send(Event::JobRunning(id)).await.unwrap();
        }
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_address_that_worked_is_used_again() {
    let world = World::start(&["a:2", "b:9", "c:9"]);
    drop(world.accept().await);
    drop(world.accept().await);
    let _last = world.accept().await;
    assert_eq!(world.attempts(4).await, ["a:2", "b:9", "b:9", "b:9"]);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_of_the_addresses_takes_effect_at_once() {
    // An attempt to connect, and the pause after a failure.
    for before in [&["a:1"][..], &["a:2"], &[]] {
        let world = World::start(before);
        sleep(Duration::from_secs(10)).await;
        let changed = Instant::now();
        world.managers.send_replace(addresses(&["b:9"]));
        let _peer = world.accept().await;
        assert!(changed.elapsed() <= 2 * FIRST_PAUSE, "{before:?} {:?}", changed.elapsed());
        world.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_is_cancelled_also_if_the_agent_has_too_many_calls() {
    let world = World::start(&["m:9"]);
    let mut peer = world.accept().await;
    send(&peer, "StartUnit", &("slow.service", "replace", 7_u32), true).await;
    receive(&mut peer, Type::MethodReturn).await;
    world.systemd.set_answering(false);
    for _ in 0..600 {
        send(&peer, "FreezeUnit", &"slow.service", true).await;
    }
    until_error(&mut peer, "LimitsExceeded").await;
    send(&peer, "JobCancel", &7_u32, false).await;
    send(&peer, "Explode", &(), true).await;
    until_error(&mut peer, "UnknownMethod").await;
    world.systemd.set_answering(true);
    let done = receive(&mut peer, Type::Signal).await;
    assert_eq!(done.body().deserialize::<(u32, &str)>().unwrap(), (7, "cancelled"));
    world.end().await;
}
