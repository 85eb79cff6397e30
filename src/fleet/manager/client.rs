//! The clients of the public API: the bus, with many senders, and the connections of operators.
//! Each has a bounded queue of messages, which a task of its own sends. Replies and signals about
//! jobs and nodes are always added to it; signals of monitors wait in the monitors until there is
//! room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc;
use zbus::Message;

use super::object::monitor_path;
use super::properties::variants;
use crate::fleet::dbus::names::MONITOR_INTERFACE;
use crate::fleet::monitor::{Outgoing, Signal};
use crate::model::OperatorName;

/// Messages that wait to be sent to one client. A client that does not read them is disconnected.
const QUEUED: usize = 16_384;
/// Signals of monitors are added while fewer messages wait.
const WITH_SIGNALS: usize = QUEUED / 4;
/// If signals of monitors had to wait, they are added when no more messages than these are left.
const FEW: usize = WITH_SIGNALS / 2;

/// The connection that owns a monitor: a client and, on a bus, the unique name of the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) client: u64,
    pub(super) sender: Option<String>,
}

#[derive(Debug)]
pub(super) struct Client {
    /// The added operator whose connection this is.
    operator: Option<OperatorName>,
    queue: mpsc::Sender<Message>,
    /// Whether signals of the client's monitors wait for room.
    is_waiting: Arc<AtomicBool>,
}

/// The queued messages of a client.
#[derive(Debug)]
pub(super) struct Queued {
    messages: mpsc::Receiver<Message>,
    is_waiting: Arc<AtomicBool>,
}

impl Queued {
    /// Returns the next message; `None` if the client was removed. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Message> {
        self.messages.recv().await
    }

    /// Returns whether signals of monitors wait for room, and there is room now.
    pub(super) fn wants_signals(&self) -> bool {
        self.messages.len() <= FEW && self.is_waiting.swap(false, Ordering::SeqCst)
    }
}

impl Client {
    /// Returns a client and its queue. The caller must close the client's connection when the queue
    /// ends.
    pub(super) fn new() -> (Self, Queued) {
        let (queue, messages) = mpsc::channel(QUEUED);
        let is_waiting = Arc::<AtomicBool>::default();
        (Self { operator: None, queue, is_waiting: Arc::clone(&is_waiting) }, Queued { messages, is_waiting })
    }

    pub(super) fn of_operator(self, operator: Option<OperatorName>) -> Self {
        Self { operator, ..self }
    }
}

#[derive(Debug, Default)]
pub(super) struct Clients {
    last_id: u64,
    clients: BTreeMap<u64, Client>,
}

impl Clients {
    pub(super) fn add(&mut self, client: Client) -> u64 {
        self.last_id += 1;
        self.clients.insert(self.last_id, client);
        self.last_id
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.clients.remove(&id);
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.clients.contains_key(&id)
    }

    /// Removes the clients of added operators that are not among these.
    pub(super) fn retain_operators(&mut self, operators: &BTreeSet<OperatorName>) {
        self.clients.retain(|_, client| client.operator.as_ref().is_none_or(|name| operators.contains(name)));
    }

    /// Removes all clients. Queued messages are still sent.
    pub(super) fn clear(&mut self) {
        self.clients.clear();
    }

    /// Adds a message to the queue of a client. A client whose queue is full is removed.
    pub(super) fn send(&mut self, id: u64, message: Message) {
        if let Some(client) = self.clients.get(&id)
            && client.queue.try_send(message).is_err()
        {
            self.clients.remove(&id);
        }
    }

    /// Sends a signal to all clients.
    pub(super) fn broadcast(&mut self, built: zbus::Result<Message>) {
        // Building a message does not fail: all parts of the manager's own messages are valid.
        let Ok(message) = built else { return };
        self.clients.retain(|_, client| client.queue.try_send(message.clone()).is_ok());
    }

    /// Returns whether signals of monitors may be added to the queue of a client. Those for a
    /// client that was removed are dropped.
    pub(super) fn has_room(&self, id: u64) -> bool {
        let queued = |client: &Client| client.queue.max_capacity() - client.queue.capacity();
        self.clients.get(&id).is_none_or(|client| queued(client) < WITH_SIGNALS)
    }

    /// Sets for which clients signals of monitors wait for room.
    pub(super) fn set_waiting(&self, waiting: &BTreeSet<u64>) {
        for (id, client) in &self.clients {
            client.is_waiting.store(waiting.contains(id), Ordering::SeqCst);
        }
    }

    /// Sends signals of a monitor to its owner only.
    pub(super) fn monitor_signals(&mut self, outgoing: Outgoing<Owner>) {
        let Outgoing { owner, monitor, node, systemd_unit, signals } = outgoing;
        let (node, unit) = (node.as_str(), systemd_unit.as_str());
        let builder = |member: &'static str| {
            let builder = Message::signal(monitor_path(monitor), MONITOR_INTERFACE, member);
            match &owner.sender {
                Some(sender) => builder.destination(sender.clone()),
                None => builder,
            }
        };
        for signal in signals {
            let built = match signal {
                Signal::UnitNew(reason) => builder("UnitNew").build(&(node, unit, reason.as_str())),
                Signal::UnitRemoved(reason) => builder("UnitRemoved").build(&(node, unit, reason.as_str())),
                Signal::UnitStateChanged { active, sub, reason } => {
                    builder("UnitStateChanged").build(&(node, unit, active, sub, reason.as_str()))
                }
                Signal::UnitPropertiesChanged(state) => {
                    builder("UnitPropertiesChanged").build(&(node, unit, variants(&state)))
                }
            };
            if let Ok(message) = built {
                self.send(owner.client, message);
            }
        }
    }
}
