//! The links between agents and managers: each can be delayed, held and cut. A held link delivers
//! its bytes when it is released, as TCP does after a short outage; no connection can be opened
//! meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use portcullis::fleet::address::ManagerAddress;
use portcullis::fleet::dbus::accept::Proof;
use portcullis::fleet::dbus::connect::{ConnectError, Connector, Peer, authenticated_peer};
use portcullis::fleet::manager::Manager;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// The time of an attempt to connect that gets no answer.
const ATTEMPT: Duration = Duration::from_millis(800);
const BUFFER: usize = 64 << 10;

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Open,
    Held,
    Closed,
}

#[derive(Debug, Default)]
struct Place {
    is_held: bool,
    latency: Duration,
    /// The flows of the connections that were opened since the last restart of the manager.
    flows: Vec<watch::Sender<Flow>>,
}

impl Place {
    fn set(&mut self, flow: Flow) {
        self.flows.retain(|sender| sender.receiver_count() > 0);
        for sender in &self.flows {
            sender.send_if_modified(|now| {
                let is_change = *now != flow && *now != Flow::Closed;
                if is_change {
                    *now = flow;
                }
                is_change
            });
        }
    }
}

#[derive(Debug, Default)]
struct State {
    manager: Option<Manager>,
    /// The tasks of the manager's connections.
    serving: JoinSet<()>,
    places: BTreeMap<String, Place>,
    /// The flows of clients, which have no faults.
    clients: Vec<watch::Sender<Flow>>,
}

/// All links. Clones are the same ones.
#[derive(Debug, Clone, Default)]
pub(crate) struct Network(Arc<Mutex<State>>);

impl Network {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("a lock")
    }

    /// Lets a manager accept connections.
    pub(crate) fn start(&self, manager: Manager) {
        self.state().manager = Some(manager);
    }

    /// The process of the manager ends: all its connections end.
    pub(crate) fn kill_manager(&self) {
        let mut state = self.state();
        state.manager = None;
        state.serving.abort_all();
        state.serving = JoinSet::new();
        for place in state.places.values_mut() {
            // A peer behind a held link does not notice it.
            if !place.is_held {
                place.set(Flow::Closed);
            }
        }
        for sender in state.clients.drain(..) {
            sender.send_replace(Flow::Closed);
        }
    }

    /// Holds or releases the link of a node.
    pub(crate) fn hold(&self, node: &str, is_held: bool) {
        let mut state = self.state();
        let place = state.places.entry(node.to_owned()).or_default();
        place.is_held = is_held;
        place.set(if is_held { Flow::Held } else { Flow::Open });
    }

    /// Ends the connections of a node.
    pub(crate) fn reset(&self, node: &str) {
        self.state().places.entry(node.to_owned()).or_default().set(Flow::Closed);
    }

    pub(crate) fn delay(&self, node: &str, latency: Duration) {
        self.state().places.entry(node.to_owned()).or_default().latency = latency;
    }

    /// Returns the way of a node's agent to the manager.
    pub(crate) fn of(&self, node: &str) -> Way {
        Way { network: self.clone(), node: node.to_owned() }
    }

    /// Opens a connection of an operator; `None` if no manager runs.
    pub(crate) async fn operator(&self) -> Option<Peer> {
        let (flow, flowing) = watch::channel(Flow::Open);
        self.state().clients.push(flow);
        let end = self.open(flowing, "operator", Duration::ZERO)?;
        authenticated_peer(end).await.ok()
    }

    /// Returns the client's end of a connection to the manager.
    fn open(&self, flow: watch::Receiver<Flow>, name: &str, latency: Duration) -> Option<DuplexStream> {
        let mut state = self.state();
        let manager = state.manager.clone()?;
        let (near, near_end) = duplex(BUFFER);
        let (far, far_end) = duplex(BUFFER);
        let ((near_read, near_write), (far_read, far_write)) = (split(near_end), split(far_end));
        tokio::spawn(carry(near_read, far_write, flow.clone(), latency));
        tokio::spawn(carry(far_read, near_write, flow, latency));
        let proof = Proof::Certificate { names: vec![name.to_owned()], der: Default::default() };
        state.serving.spawn(async move {
            let accepted = Instant::now();
            if let Ok(peer) = authenticated_peer(far).await {
                manager.serve_peer(peer, proof, "192.0.2.1".to_owned(), accepted).await;
            }
        });
        Some(near)
    }
}

/// Carries bytes in one direction until the flow is closed or an end is gone.
async fn carry(
    mut from: ReadHalf<DuplexStream>,
    mut to: WriteHalf<DuplexStream>,
    mut flow: watch::Receiver<Flow>,
    latency: Duration,
) {
    let mut closed = flow.clone();
    let carried = async {
        let mut buffer = vec![0; BUFFER];
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            if !latency.is_zero() {
                sleep(latency).await;
            }
            if flow.wait_for(|flow| *flow != Flow::Held).await.is_err()
                || to.write_all(&buffer[..read]).await.is_err()
            {
                return;
            }
        }
        // The end is not noticed behind a held link.
        let _ = flow.wait_for(|flow| *flow != Flow::Held).await;
        let _ = to.shutdown().await;
    };
    tokio::select! {
        () = carried => {}
        _ = closed.wait_for(|flow| *flow == Flow::Closed) => {}
    }
}

/// The way of one agent to the manager.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    network: Network,
    node: String,
}

impl Connector for Way {
    async fn connect(&self, address: &ManagerAddress) -> Result<Peer, ConnectError> {
        let opened = {
            let mut state = self.network.state();
            let place = state.places.entry(self.node.clone()).or_default();
            let latency = place.latency;
            if place.is_held {
                None
            } else {
                let (flow, flowing) = watch::channel(Flow::Open);
                place.flows.push(flow);
                drop(state);
                Some(self.network.open(flowing, &self.node, latency))
            }
        };
        let timed_out = || ConnectError::Timeout { address: address.clone() };
        match opened {
            None => {
                sleep(ATTEMPT).await;
                Err(timed_out())
            }
            Some(None) => Err(timed_out()),
            Some(Some(stream)) => authenticated_peer(stream)
                .await
                .map_err(|source| ConnectError::Dbus { address: address.clone(), source }),
        }
    }
}
