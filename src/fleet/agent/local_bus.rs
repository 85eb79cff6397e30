//! The agent on the bus of its own machine: the helper `hirte-proxy` creates and removes proxies
//! here. A bus that is lost is connected again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::{debug, info, warn};
use zbus::fdo::{DBusProxy, RequestNameFlags};
use zbus::message::Type;
use zbus::names::BusName;
use zbus::{Connection, Message, MessageStream};

use super::proxy_service::ProxyService;
use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::errors::{self, CallError};
use crate::fleet::dbus::names::{AGENT_BUS_NAME, AGENT_INTERFACE, MANAGER_PATH};
use crate::fleet::systemd::UnitControl;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);
/// Calls that are executed at the same time. Each proxy service that starts has one.
const MAX_CALLS: usize = 1_000;

/// Serves helpers until it is dropped.
pub(super) async fn serve<C: UnitControl>(bus: Bus, proxies: Arc<ProxyService<C>>) {
    let mut is_logged = false;
    loop {
        match open(&bus).await {
            Ok((connection, messages)) => {
                info!(name = AGENT_BUS_NAME, %bus, "proxy services are available");
                is_logged = false;
                serve_one(connection, messages, &proxies).await;
                warn!(%bus, "bus lost");
            }
            Err(error) if !is_logged => {
                warn!(name = AGENT_BUS_NAME, %bus, %error, "proxy services are not available");
                is_logged = true;
            }
            Err(error) => debug!(%bus, %error, "proxy services are not available"),
        }
        sleep(RECONNECT_EVERY).await;
    }
}

async fn open(bus: &Bus) -> zbus::Result<(Connection, MessageStream)> {
    let connection = bus.connect(CONNECT_TIMEOUT).await?;
    let messages = MessageStream::from(&connection);
    connection.request_name_with_flags(AGENT_BUS_NAME, RequestNameFlags::DO_NOT_QUEUE).await?;
    Ok((connection, messages))
}

async fn serve_one<C: UnitControl>(
    connection: Connection,
    mut messages: MessageStream,
    proxies: &Arc<ProxyService<C>>,
) {
    let own_user = rustix::process::geteuid().as_raw();
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            message = messages.next() => match message {
                Some(Ok(call)) if call.message_type() == Type::MethodCall => {
                    let (connection, proxies) = (connection.clone(), Arc::clone(proxies));
                    // A proxy that has stopped is always removed.
                    let is_removal = call.header().member().is_some_and(|name| *name == "RemoveProxy");
                    let is_full = calls.len() >= MAX_CALLS && !is_removal;
                    calls.spawn(async move {
                        let done = if is_full {
                            Err(CallError::new(errors::LIMITS_EXCEEDED, "too many calls at the same time"))
                        } else {
                            execute(&connection, own_user, &proxies, &call).await
                        };
                        reply(&connection, &call, done).await;
                    });
                }
                Some(Ok(message)) if is_name_lost(&message) => return,
                Some(Ok(_)) => {}
                _ => return,
            },
            Some(_) = calls.join_next(), if !calls.is_empty() => {}
        }
    }
}

async fn reply(connection: &Connection, call: &Message, done: Result<(), CallError>) {
    let header = call.header();
    let sent = match done {
        Ok(()) => connection.reply(&header, &()).await,
        Err(error) => connection.reply_error(&header, error.name.as_str(), &error.message).await,
    };
    if let Err(error) = sent {
        debug!(%error, "cannot send a reply");
    }
}

async fn execute<C: UnitControl>(
    connection: &Connection,
    own_user: u32,
    proxies: &Arc<ProxyService<C>>,
    call: &Message,
) -> Result<(), CallError> {
    let (header, body) = (call.header(), call.body());
    let unknown = |what| Err(CallError::new(errors::UNKNOWN_METHOD, format!("the agent has no such {what}")));
    if header.path().is_none_or(|path| path.as_str() != MANAGER_PATH) {
        return Err(CallError::new(errors::UNKNOWN_OBJECT, "the agent has no such object"));
    }
    if header.interface().is_some_and(|name| name.as_str() != AGENT_INTERFACE) {
        return unknown("interface");
    }
    let sender = header.sender().map(|sender| BusName::from(sender.to_owned()));
    let sender = sender.ok_or_else(|| CallError::new(errors::ACCESS_DENIED, "the sender is unknown"))?;
    let user = DBusProxy::new(connection).await?.get_connection_unix_user(sender).await;
    let user = user.map_err(|error| CallError::new(errors::ACCESS_DENIED, error.to_string()))?;
    if ![0, own_user].contains(&user) {
        return Err(CallError::new(errors::ACCESS_DENIED, "only root and the agent's user may call this"));
    }
    let arguments = || {
        let arguments: Result<(String, String, String), _> = body.deserialize();
        let text = "the method takes three strings: the proxy service, the node and its unit";
        arguments.map_err(|_| CallError::new(errors::INVALID_ARGS, text))
    };
    match header.member().map(|name| name.as_str()) {
        Some("CreateProxy") => {
            let (proxy, node, unit) = arguments()?;
            let created = proxies.create(proxy, node, unit).await;
            created.map_err(|reason| CallError::new(errors::FAILED, reason))
        }
        Some("RemoveProxy") => {
            let (proxy, ..) = arguments()?;
            proxies.remove(&proxy).await;
            Ok(())
        }
        _ => unknown("method"),
    }
}

/// Returns whether the bus has taken the agent's name.
fn is_name_lost(message: &Message) -> bool {
    let header = message.header();
    let is_from_bus = header.sender().is_some_and(|sender| *sender == "org.freedesktop.DBus");
    let is_lost = header.member().is_some_and(|member| *member == "NameLost");
    is_from_bus && is_lost && message.body().deserialize::<&str>().is_ok_and(|name| name == AGENT_BUS_NAME)
}
