//! The signals of a manager on one connection, and the loss of the manager. Messages are read
//! during calls too: a connection whose messages are not read delivers no replies either.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::time::timeout;
use zbus::message::Type;
use zbus::names::OwnedUniqueName;
use zbus::{Connection, MatchRule, Message, MessageStream};

use super::error::ClientError;
use crate::fleet::dbus::names::BUS_NAME;

const DBUS: &str = "org.freedesktop.DBus";
/// A manager sends a heartbeat every two seconds on connections without a bus.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

/// A connection whose signals are read.
#[derive(Debug)]
pub(super) struct Signals {
    messages: MessageStream,
    /// The manager's unique name; `None` on a connection without a bus.
    owner: Option<OwnedUniqueName>,
}

impl Signals {
    /// Begins to read signals. On a bus, the manager is lost when the owner of its name changes.
    pub(super) async fn read(connection: &Connection) -> Result<Self, ClientError> {
        let messages = MessageStream::from(connection);
        let mut signals = Self { messages, owner: None };
        if connection.is_bus() {
            let rule = MatchRule::builder().msg_type(Type::Signal).sender(DBUS).interface(DBUS);
            let rule = rule.member("NameOwnerChanged").arg(0, BUS_NAME).build().map_err(bus_error)?;
            let bus = zbus::fdo::DBusProxy::new(connection).await.map_err(bus_error)?;
            bus.add_match_rule(rule).await.map_err(bus_error)?;
            let name = zbus::names::BusName::try_from(BUS_NAME).map_err(bus_error)?;
            signals.owner = Some(bus.get_name_owner(name).await.map_err(|_| ClientError::NoManager)?);
        }
        Ok(signals)
    }

    /// Adds a match rule for signals of the manager to the bus. Without a bus, the manager sends
    /// all of them.
    pub(super) async fn add_match(
        &mut self,
        connection: &Connection,
        path: Option<&str>,
        interface: &'static str,
        member: &'static str,
    ) -> Result<(), ClientError> {
        if self.owner.is_none() {
            return Ok(());
        }
        let rule = MatchRule::builder().msg_type(Type::Signal).sender(BUS_NAME);
        let rule = rule.interface(interface).member(member);
        let rule = match path {
            Some(path) => rule.path(path),
            None => rule,
        };
        let rule = rule.build().map_err(bus_error)?;
        let add = async {
            let bus = zbus::fdo::DBusProxy::new(connection).await.map_err(bus_error)?;
            bus.add_match_rule(rule).await.map_err(bus_error)
        };
        self.during(add, |_| {}).await
    }

    /// Completes a call, and handles the signals that arrive before its reply.
    pub(super) async fn during<T>(
        &mut self,
        call: impl Future<Output = Result<T, ClientError>>,
        mut handle: impl FnMut(&Message),
    ) -> Result<T, ClientError> {
        let mut call = pin!(call);
        loop {
            tokio::select! {
                biased;
                reply = &mut call => return reply,
                signal = self.next() => handle(&signal?),
            }
        }
    }

    /// Returns the next signal of the manager.
    ///
    /// # Errors
    /// If the manager is lost.
    pub(super) async fn next(&mut self) -> Result<Message, ClientError> {
        loop {
            let received = match self.owner {
                Some(_) => self.messages.next().await,
                None => timeout(SILENCE_LIMIT, self.messages.next()).await.unwrap_or(None),
            };
            let Some(Ok(message)) = received else { return Err(ClientError::ManagerLost) };
            if message.message_type() != Type::Signal {
                continue;
            }
            let Some(owner) = &self.owner else { return Ok(message) };
            let header = message.header();
            let sender = header.sender().map_or("", |sender| sender.as_str());
            if sender == owner.as_str() {
                return Ok(message);
            }
            let changed =
                sender == DBUS && header.member().is_some_and(|it| it.as_str() == "NameOwnerChanged");
            if changed && has_new_owner(&message, owner.as_str()) {
                return Err(ClientError::ManagerLost);
            }
        }
    }
}

fn has_new_owner(changed: &Message, owner: &str) -> bool {
    let body = changed.body();
    let names = body.deserialize::<(&str, &str, &str)>();
    names.is_ok_and(|(name, _, new)| name == BUS_NAME && new != owner)
}

fn bus_error(error: impl Into<zbus::Error>) -> ClientError {
    ClientError::Protocol(error.into().to_string())
}
