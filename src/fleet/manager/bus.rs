//! The manager on a bus: its name, the calls of all senders, their rights, and the end of their
//! connections. A bus that is lost is connected again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};
use zbus::fdo::{DBusProxy, RequestNameFlags};
use zbus::message::Type;
use zbus::names::BusName;
use zbus::{Connection, MatchRule, Message, MessageStream};

use super::Manager;
use super::access::{group_id, is_member};
use super::call::{Caller, Rights};
use super::client::{Client, Owner};
use super::operator::{CallLimit, Presence};
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::names::BUS_NAME;
use crate::runtime::service::stopped;

/// The sender of the bus's own signals. No client can use this name.
const DBUS: &str = "org.freedesktop.DBus";
/// The time to connect to a bus, and for a call to it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect again.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);
/// The time to send the queued messages when the manager stops.
const LAST_MESSAGES: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum BusError {
    #[error("cannot connect to the bus")]
    Connect(#[source] zbus::Error),
    #[error("the bus did not answer in {} s", CONNECT_TIMEOUT.as_secs())]
    Timeout,
    #[error("another process has the name {BUS_NAME} on the bus")]
    NameTaken,
    #[error("the bus does not permit the name {BUS_NAME}; `portcullis install manager` writes a policy")]
    NameRefused(#[source] zbus::Error),
}

/// A connection to a bus on which the manager has its name.
#[derive(Debug)]
pub struct BusConnection {
    connection: Connection,
    messages: MessageStream,
}

impl BusConnection {
    /// Connects to a bus and takes the manager's name.
    ///
    /// # Errors
    /// If the bus is unreachable or refuses the name.
    pub async fn connect(bus: &Bus) -> Result<Self, BusError> {
        timeout(CONNECT_TIMEOUT, Self::open(bus)).await.unwrap_or(Err(BusError::Timeout))
    }

    async fn open(bus: &Bus) -> Result<Self, BusError> {
        let connection = bus.connect(CONNECT_TIMEOUT).await.map_err(BusError::Connect)?;
        let messages = MessageStream::from(&connection);
        let rule = MatchRule::builder()
            .msg_type(Type::Signal)
            .sender(DBUS)
            .interface(DBUS)
            .member("NameOwnerChanged")
            .build()
            .map_err(BusError::Connect)?;
        let daemon = DBusProxy::new(&connection).await.map_err(BusError::Connect)?;
        daemon.add_match_rule(rule).await.map_err(|error| BusError::Connect(error.into()))?;
        // Neither does this manager replace another one, nor may another one replace it.
        let named = connection.request_name_with_flags(BUS_NAME, RequestNameFlags::DO_NOT_QUEUE).await;
        named.map_err(|error| match error {
            zbus::Error::NameTaken => BusError::NameTaken,
            other => BusError::NameRefused(other),
        })?;
        Ok(Self { connection, messages })
    }
}

/// The rights of the senders on a bus.
#[derive(Debug)]
pub(super) struct Senders {
    connection: Connection,
    group: Option<String>,
    own_user: u32,
    /// Whether each sender may change something. An entry is removed when the sender's connection
    /// ends.
    known: Mutex<HashMap<String, bool>>,
}

impl Senders {
    /// Returns whether a sender may change something. A sender whose user is unknown may not.
    pub(super) async fn may_change(&self, sender: &str, presence: &Presence) -> bool {
        let known = self.known().get(sender).copied();
        if let Some(known) = known {
            return known;
        }
        let may_change = self.query_rights(sender).await.unwrap_or(false);
        remember(&mut self.known(), sender, may_change, presence);
        may_change
    }

    async fn query_rights(&self, sender: &str) -> Option<bool> {
        let name = BusName::try_from(sender.to_owned()).ok()?;
        let bus = DBusProxy::new(&self.connection).await.ok()?;
        let credentials = bus.get_connection_credentials(name).await.ok()?;
        let user = credentials.unix_user_id()?;
        if user == 0 || user == self.own_user {
            return Some(true);
        }
        let group = self.group.as_deref()?;
        let groups = std::fs::read_to_string("/etc/group").ok()?;
        Some(match credentials.unix_group_ids() {
            Some(ids) => group_id(&groups, group).is_some_and(|id| ids.contains(&id)),
            None => is_member(&std::fs::read_to_string("/etc/passwd").ok()?, &groups, user, group),
        })
    }

    fn forget(&self, sender: &str) {
        self.known().remove(sender);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, bool>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the rights of a sender, unless its connection has ended meanwhile: no event would remove
/// them any more.
fn remember(known: &mut HashMap<String, bool>, sender: &str, may_change: bool, presence: &Presence) {
    if !presence.has_ended() {
        known.insert(sender.to_owned(), may_change);
    }
}

impl Manager {
    /// Serves the public API on a bus until `stop` is true. Then every job ends with `cancelled`,
    /// and the signals about these jobs are sent. Members of `group` may change something, besides
    /// root and the manager's own user.
    pub async fn serve_bus(
        &self,
        first: BusConnection,
        bus: &Bus,
        group: Option<String>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut next = Some(first);
        loop {
            let connected = match next.take() {
                Some(connected) => connected,
                None => tokio::select! {
                    () = stopped(&mut stop) => return self.stop(),
                    connected = reconnect(bus) => connected,
                },
            };
            if self.serve_one_bus(connected, group.clone(), &mut stop).await {
                return;
            }
            warn!("bus lost");
        }
    }

    /// Serves one connection to a bus. Returns whether the manager was asked to stop.
    async fn serve_one_bus(
        &self,
        bus: BusConnection,
        group: Option<String>,
        stop: &mut watch::Receiver<bool>,
    ) -> bool {
        let BusConnection { connection, mut messages } = bus;
        let (client, mut queued) = Client::new();
        let id = self.state().add_client(client);
        let (sender, manager) = (connection.clone(), self.clone());
        let mut sending = tokio::spawn(async move {
            while let Some(message) = queued.next().await {
                if sender.send(&message).await.is_err() {
                    break;
                }
                if queued.wants_signals() {
                    manager.state().send_monitor_signals();
                }
            }
        });
        let opened = connection.clone();
        let own_user = self.0.own_user;
        let senders = Arc::new(Senders { connection, group, own_user, known: Mutex::default() });
        let mut limits: HashMap<String, CallLimit> = HashMap::new();
        let is_stopped = loop {
            tokio::select! {
                () = stopped(stop) => break true,
                _ = &mut sending => break false,
                message = messages.next() => match message {
                    Some(Ok(message)) if is_name_lost(&message) => break false,
                    Some(Ok(message)) => self.bus_message(id, &message, &senders, &mut limits).await,
                    _ => break false,
                },
            }
        };
        if is_stopped {
            self.stop();
        }
        limits.values().for_each(CallLimit::close);
        {
            let mut state = self.state();
            // This closes the queue of the bus, which ends the sending task.
            state.clients.remove(id);
            state.clients_lost(id);
        }
        if is_stopped {
            // The wait is bounded, in case the bus does not read.
            let _ = timeout(LAST_MESSAGES, sending).await;
        } else {
            sending.abort();
        }
        // Calls that are under way have clones of the connection, which would keep the name. The
        // bus may be stuck; the process ends, or the name is free when the bus continues.
        let _ = timeout(LAST_MESSAGES, opened.close()).await;
        is_stopped
    }

    async fn bus_message(
        &self,
        client: u64,
        message: &Message,
        senders: &Arc<Senders>,
        limits: &mut HashMap<String, CallLimit>,
    ) {
        let header = message.header();
        let Some(sender) = header.sender().map(|name| name.as_str().to_owned()) else { return };
        match header.message_type() {
            Type::MethodCall => {
                let limit = limits.entry(sender.clone()).or_default();
                let owner = Owner { client, sender: Some(sender) };
                let rights = Rights::OnBus(Arc::clone(senders));
                let caller = Caller { owner, rights, presence: limit.presence() };
                self.serve_call(&caller, message.clone(), limit).await;
            }
            Type::Signal if sender == DBUS && header.member().is_some_and(|it| *it == "NameOwnerChanged") => {
                let body = message.body();
                let Ok((name, _, new)) = body.deserialize::<(&str, &str, &str)>() else { return };
                if name.starts_with(':') && new.is_empty() {
                    if let Some(limit) = limits.remove(name) {
                        limit.close();
                    }
                    senders.forget(name);
                    self.state().client_lost(&Owner { client, sender: Some(name.to_owned()) });
                }
            }
            _ => {}
        }
    }
}

/// Returns whether the bus has taken the manager's name.
fn is_name_lost(message: &Message) -> bool {
    let header = message.header();
    let is_from_bus = header.sender().is_some_and(|sender| *sender == DBUS);
    let is_lost = header.member().is_some_and(|member| *member == "NameLost");
    is_from_bus && is_lost && message.body().deserialize::<&str>().is_ok_and(|name| name == BUS_NAME)
}

async fn reconnect(bus: &Bus) -> BusConnection {
    loop {
        sleep(RECONNECT_EVERY).await;
        match BusConnection::connect(bus).await {
            Ok(connected) => {
                info!("bus connected again");
                return connected;
            }
            Err(error) => warn!(%error, "cannot connect to the bus"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rights_of_a_sender_that_has_left_are_not_kept() {
        let (mut known, limit) = (HashMap::new(), CallLimit::default());
        remember(&mut known, ":1.1", true, &limit.presence());
        assert_eq!(known.remove(":1.1"), Some(true));
        limit.close();
        remember(&mut known, ":1.1", true, &limit.presence());
        assert!(known.is_empty());
    }
}
