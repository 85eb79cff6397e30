//! The clients of the public API: the bus, with many senders, and the connections of operators. Each
//! has a bounded queue of messages, which a task of its own sends.

use std::collections::BTreeMap;

use tokio::sync::mpsc;
use zbus::Message;

use super::object::monitor_path;
use super::properties::variants;
use crate::fleet::dbus::names::MONITOR_INTERFACE;
use crate::fleet::monitor::Signal;
use crate::fleet::name::NodeName;

/// Messages that wait to be sent to one client. A client that does not read them is disconnected.
const QUEUED: usize = 16_384;

/// The connection that owns a monitor: a client and, on a bus, the unique name of the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) client: u64,
    pub(super) sender: Option<String>,
}

#[derive(Debug)]
pub(super) struct Client {
    queue: mpsc::Sender<Message>,
}

impl Client {
    /// Returns a client and its queue. The caller must close the client's connection when the queue
    /// ends.
    pub(super) fn new() -> (Self, mpsc::Receiver<Message>) {
        let (queue, queued) = mpsc::channel(QUEUED);
        (Self { queue }, queued)
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

    /// Sends a signal of a monitor to its owner only.
    pub(super) fn monitor_signal(
        &mut self,
        owner: &Owner,
        monitor: u32,
        node: &NodeName,
        systemd_unit: &str,
        signal: Signal,
    ) {
        let (node, unit) = (node.as_str(), systemd_unit);
        let builder = |member: &'static str| {
            let builder = Message::signal(monitor_path(monitor), MONITOR_INTERFACE, member);
            match &owner.sender {
                Some(sender) => builder.destination(sender.clone()),
                None => builder,
            }
        };
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
