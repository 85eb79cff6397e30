//! Calls to the agents of nodes. Every call is bounded: by its own timeout, and by the end of the
//! connection when the node is lost.

use std::io;

use zbus::{Message, Structure};

use super::Manager;
use super::agent::Link;
use crate::fleet::dbus::api::Method;
use crate::fleet::dbus::errors::{self, CallError};
use crate::fleet::dbus::internal::AgentProxy;
use crate::fleet::dbus::names;
use crate::fleet::dbus::values::{AuxiliaryUnit, JobType, Setting};
use crate::fleet::job::Request;
use crate::fleet::name::NodeName;
use crate::mutant;

/// The arguments of a job besides its type.
#[derive(Debug)]
pub(super) enum Payload {
    Unit,
    Transient { properties: Vec<Setting>, auxiliary: Vec<AuxiliaryUnit> },
}

/// A job that has to be sent to its node.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) id: u32,
    pub(super) link: Option<Link>,
    pub(super) request: Request<Payload>,
}

impl Start {
    /// Sends the job. Returns when the node has accepted or refused it.
    pub(super) async fn send(&self) -> Result<(), CallError> {
        let Request { node, systemd_unit, kind, mode, payload } = &self.request;
        let link = self.link.as_ref().ok_or_else(|| offline(node))?;
        let failed = |error| call_error(node, error);
        let agent = AgentProxy::new(&link.connection).await.map_err(failed)?;
        let (unit, mode, id) = (systemd_unit.as_str(), mode.as_str(), self.id);
        if mutant!(JobsSentTwice) && *kind == JobType::Stop {
            agent.stop_unit(unit, mode, id + 1_000_000).await.map_err(failed)?;
        }
        let sent = match (payload, kind) {
            (Payload::Transient { properties, auxiliary }, _) => {
                agent.start_transient_unit(unit, mode, properties, auxiliary, id).await
            }
            (Payload::Unit, JobType::Start) => agent.start_unit(unit, mode, id).await,
            (Payload::Unit, JobType::Stop) => agent.stop_unit(unit, mode, id).await,
            (Payload::Unit, JobType::Reload) => agent.reload_unit(unit, mode, id).await,
            (Payload::Unit, JobType::Restart) => agent.restart_unit(unit, mode, id).await,
        };
        sent.map_err(failed)
    }
}

impl Manager {
    /// Sends jobs whose callers already have a reply to their nodes.
    pub(super) fn run(&self, starts: Vec<Start>) {
        self.state().take_ended(&self.0.metrics);
        self.schedule_tick();
        for start in starts {
            let manager = self.clone();
            tokio::spawn(async move {
                let sent = start.send().await;
                manager.answered(start.id, &sent);
            });
        }
    }

    /// Handles the reply of a node, which accepted or refused a job, or the lack of one.
    pub(super) fn answered(&self, id: u32, reply: &Result<(), CallError>) {
        let now = tokio::time::Instant::now();
        let mut state = self.state();
        if let Err(error) = reply {
            state.proxies.job_refused(id, &error.message);
        }
        let effects = match reply {
            Ok(()) => state.jobs.accepted(id, now),
            Err(error) if error.name == errors::TIMEOUT => state.jobs.unanswered(id, now),
            Err(_) => state.jobs.refused(id, now),
        };
        let starts = state.job_effects(effects);
        drop(state);
        self.run(starts);
    }

    /// Returns the connection of a node.
    pub(super) fn link(&self, name: &NodeName) -> Result<Link, CallError> {
        let state = self.state();
        let node = state.nodes.get(name);
        let node = node.ok_or_else(|| CallError::new(errors::NO_SUCH_NODE, format!("no node '{name}'")))?;
        node.link.clone().ok_or_else(|| offline(name))
    }

    /// Returns the connections of all nodes that are online.
    pub(super) fn links(&self) -> Vec<(NodeName, Link)> {
        let state = self.state();
        let online = state.nodes.iter().filter_map(|(name, node)| Some((name.clone(), node.link.clone()?)));
        online.collect()
    }
}

/// Passes a call on to the agent, which has a method with the same name and arguments, and its
/// reply back.
pub(super) async fn forward(
    node: &NodeName,
    link: &Link,
    method: &Method,
    arguments: Option<&Structure<'_>>,
    call: &Message,
) -> Result<Message, CallError> {
    let (path, interface) = (names::INTERNAL_AGENT_PATH, Some(names::INTERNAL_AGENT_INTERFACE));
    let connection = &link.connection;
    let called = match arguments {
        Some(arguments) => connection.call_method(None::<()>, path, interface, method.name, arguments).await,
        None => connection.call_method(None::<()>, path, interface, method.name, &()).await,
    };
    let reply = called.map_err(|error| call_error(node, error))?;
    let signature = reply.header().signature().to_string();
    if !method.returns(&signature) {
        let text = format!("node '{node}' answered {} with '{signature}'", method.name);
        return Err(CallError::new(errors::FAILED, text));
    }
    let (body, reply_to) = (reply.body(), call.header());
    let builder = Message::method_return(&reply_to);
    let built = if body.is_empty() {
        builder.build(&())
    } else {
        let values: Structure<'_> = body.deserialize().map_err(|error| call_error(node, error))?;
        builder.build(&values)
    };
    built.map_err(|error| call_error(node, error))
}

pub(super) fn offline(node: &NodeName) -> CallError {
    CallError::new(errors::OFFLINE, format!("node '{node}' is offline"))
}

/// The error of a call to a node: systemd's own, or the loss of the node.
pub(super) fn call_error(node: &NodeName, error: zbus::Error) -> CallError {
    match error {
        zbus::Error::InputOutput(error) if error.kind() == io::ErrorKind::TimedOut => {
            CallError::new(errors::TIMEOUT, format!("node '{node}' did not answer in time"))
        }
        zbus::Error::InputOutput(_) => {
            CallError::new(errors::OFFLINE, format!("node '{node}' was lost during the call"))
        }
        other => other.into(),
    }
}
