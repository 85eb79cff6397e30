//! Calls of the public API: finds the object and the method, checks the arguments and the rights of
//! the caller, and answers.

use std::sync::Arc;

use zbus::message::{Flags, Header};
use zbus::{DynamicType, Message, ObjectPath, Structure};

use super::bus::Senders;
use super::client::Owner;
use super::node_call::{Payload, Start, forward};
use super::object::{Object, Parent, job_path, monitor_path, node_path};
use super::operator::Presence;
use super::{Leadership, Manager, agent, properties};
use crate::fleet::config::parse_log_level;
use crate::fleet::dbus::api::{self, Interface, Method, MethodEffect};
use crate::fleet::dbus::errors::{self, CallError};
use crate::fleet::dbus::names::MAX_MESSAGE_BYTES;
use crate::fleet::dbus::values::{AuxiliaryUnit, JobType, Setting};
use crate::fleet::job::{self, Request};
use crate::fleet::monitor::{self, Scope};
use crate::fleet::name::{BadName, NodeName, check_systemd_unit, check_systemd_unit_glob, escape};
use crate::model::InvalidName;
use crate::runtime::logging;

/// The largest message of a system bus with its default limits.
const MAX_BUS_MESSAGE_BYTES: usize = 32 << 20;

/// The client that makes a call.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) owner: Owner,
    pub(super) rights: Rights,
    pub(super) presence: Presence,
}

/// Whether a client may call methods that change something.
#[derive(Debug, Clone)]
pub(super) enum Rights {
    /// The client is an operator, which may call all methods.
    All,
    /// The rights depend on the sender's user, which the bus reports.
    OnBus(Arc<Senders>),
}

impl Caller {
    /// Checks the length of an answer. A longer one would end the connection.
    fn fits(&self, answer: &Message) -> Result<(), CallError> {
        let most = if self.owner.sender.is_some() { MAX_BUS_MESSAGE_BYTES } else { MAX_MESSAGE_BYTES };
        let length = answer.data().len();
        let text = || format!("the answer has {length} bytes; a message may have {most}");
        if length <= most { Ok(()) } else { Err(CallError::new(errors::LIMITS_EXCEEDED, text())) }
    }

    async fn may_change(&self) -> bool {
        match (&self.rights, &self.owner.sender) {
            (Rights::All, _) => true,
            (Rights::OnBus(senders), Some(sender)) => senders.may_change(sender, &self.presence).await,
            (Rights::OnBus(_), None) => false,
        }
    }
}

/// The answer to a call.
enum Answer {
    Reply(Message),
    /// The reply about a job that its node accepted, and the job's id. The job may end only after
    /// the reply is queued.
    Accepted(Message, u32),
}

type Answered = Result<Answer, CallError>;

fn invalid(error: impl std::fmt::Display) -> CallError {
    CallError::new(errors::INVALID_ARGS, error.to_string())
}

impl From<BadName> for CallError {
    fn from(error: BadName) -> Self {
        invalid(error)
    }
}

impl From<InvalidName> for CallError {
    fn from(error: InvalidName) -> Self {
        invalid(error)
    }
}

impl From<monitor::Refused> for CallError {
    fn from(error: monitor::Refused) -> Self {
        let name = match error {
            monitor::Refused::NoSuchMonitor => errors::UNKNOWN_OBJECT,
            monitor::Refused::NoSuchSubscription => errors::NO_SUCH_SUBSCRIPTION,
            monitor::Refused::TooManyMonitors
            | monitor::Refused::TooManySubscriptions
            | monitor::Refused::TooManyPatterns => errors::LIMITS_EXCEEDED,
        };
        Self::new(name, error.to_string())
    }
}

impl From<job::Refused> for CallError {
    fn from(error: job::Refused) -> Self {
        let name = match error {
            job::Refused::Queued => errors::JOB_QUEUED,
            job::Refused::Full => errors::LIMITS_EXCEEDED,
        };
        Self::new(name, error.to_string())
    }
}

fn reply<B: serde::Serialize + DynamicType>(header: &Header<'_>, body: &B) -> Answered {
    Ok(Answer::Reply(Message::method_return(header).build(body)?))
}

impl Manager {
    /// Answers a call. The reply goes through the queue of the client, after all signals that were
    /// sent before.
    pub(super) async fn answer(&self, caller: &Caller, call: &Message) {
        let answered = match self.dispatch(caller, call).await {
            Ok(Answer::Reply(message)) => caller.fits(&message).map(|()| Answer::Reply(message)),
            answered => answered,
        };
        let mut state = self.state();
        let (message, accepted) = match answered {
            Ok(Answer::Reply(message)) => (Some(message), None),
            Ok(Answer::Accepted(message, id)) if state.jobs.get(id).is_some() => (Some(message), Some(id)),
            // The job ended with the loss of its node. A caller that got its path would wait for an
            // end that was reported before.
            Ok(Answer::Accepted(..)) => {
                let lost = CallError::new(errors::OFFLINE, "the node was lost during the call");
                (error_reply(call, &lost), None)
            }
            Err(error) => (error_reply(call, &error), None),
        };
        if let Some(message) = message
            && !call.header().primary().flags().contains(Flags::NO_REPLY_EXPECTED)
        {
            state.clients.send(caller.owner.client, message);
        }
        drop(state);
        if let Some(id) = accepted {
            self.answered(id, &Ok(()));
        }
    }

    async fn dispatch(&self, caller: &Caller, call: &Message) -> Answered {
        let header = call.header();
        let path = header.path().map(ObjectPath::as_str).unwrap_or_default();
        let no_object = || CallError::new(errors::UNKNOWN_OBJECT, format!("there is no object {path}"));
        let object = Object::at(path).ok_or_else(no_object)?;
        if properties::of(&self.state(), &object).is_none() {
            return Err(no_object());
        }
        let (interface, method) = find(&object, &header)?;
        self.0.metrics.call(interface.name, method.name);
        let signature = header.signature().to_string();
        if !method.accepts(&signature) {
            let expected = method.input_signature();
            let name = method.name;
            return Err(invalid(format!("{name} takes '{expected}', and was called with '{signature}'")));
        }
        if method.effect == MethodEffect::Changes && !caller.may_change().await {
            let text = format!("{} is only for root and for the group of --bus-group", method.name);
            return Err(CallError::new(errors::ACCESS_DENIED, text));
        }
        match (interface.name, method.name) {
            ("org.freedesktop.DBus.Peer", "Ping") => return reply(&header, &()),
            ("org.freedesktop.DBus.Peer", _) => return reply(&header, &machine_id()?),
            ("org.freedesktop.DBus.Introspectable", _) => {
                return reply(&header, &self.introspect(&object));
            }
            _ => {}
        }
        if let Leadership::Standby { leader } = &self.state().leadership {
            return Err(agent::not_leader(leader.as_deref()));
        }
        if interface.name == api::PROPERTIES.name {
            return self.property_call(&object, method, call);
        }
        match &object {
            Object::Manager => self.manager_call(caller, method, call).await,
            Object::Node(name) => self.node_call(name, method, call).await,
            Object::Monitor(id) => self.monitor_call(caller, *id, method, call),
            Object::Job(id) => {
                let starts = self.cancel(*id).ok_or_else(no_object)?;
                self.run(starts);
                reply(&header, &())
            }
            Object::Parent(_) => Err(no_object()),
        }
    }

    fn introspect(&self, object: &Object) -> String {
        let state = self.state();
        let children: Vec<String> = match object {
            Object::Manager => ["job", "monitor", "node"].map(str::to_owned).to_vec(),
            Object::Parent(Parent::Of(child)) => vec![(*child).to_owned()],
            Object::Parent(Parent::Nodes) => state.nodes.keys().map(|name| escape(name.as_str())).collect(),
            Object::Parent(Parent::Jobs) => state.jobs.ids().map(|id| id.to_string()).collect(),
            Object::Parent(Parent::Monitors) => state.monitors.ids().map(|id| id.to_string()).collect(),
            Object::Node(_) | Object::Monitor(_) | Object::Job(_) => Vec::new(),
        };
        api::introspect(object.interface().as_slice(), &children)
    }

    fn property_call(&self, object: &Object, method: &Method, call: &Message) -> Answered {
        let (header, body) = (call.header(), call.body());
        let arguments: Structure<'_> = body.deserialize()?;
        let text = |at: usize| match arguments.fields().get(at) {
            Some(zbus::Variant::Str(text)) => text.as_str(),
            _ => "",
        };
        let interface = object.interface();
        let is_own = interface.is_some_and(|own| text(0).is_empty() || own.name == text(0));
        let mut values = properties::of(&self.state(), object).unwrap_or_default();
        if method.name == "GetAll" {
            return if is_own { reply(&header, &values) } else { reply(&header, &properties::none()) };
        }
        let known = interface.filter(|_| is_own).and_then(|own| own.property(text(1)));
        let unknown = || CallError::new(errors::UNKNOWN_PROPERTY, "there is no such property");
        known.ok_or_else(unknown)?;
        if method.name == "Set" {
            return Err(CallError::new(errors::PROPERTY_READ_ONLY, "all properties are read-only"));
        }
        reply(&header, &values.remove(text(1)).ok_or_else(unknown)?)
    }

    async fn manager_call(&self, caller: &Caller, method: &Method, call: &Message) -> Answered {
        let (header, body) = (call.header(), call.body());
        match method.name {
            "ListUnits" => self.list_units(&header).await.map(Answer::Reply),
            "ListUnitFiles" => self.list_unit_files(&header).await.map(Answer::Reply),
            "ListNodes" => reply(&header, &self.list_nodes()),
            "ListProxies" => reply(&header, &self.list_proxies()),
            "GetNode" => reply(&header, &node_path(&self.known_node(body.deserialize()?)?)),
            "CreateMonitor" => {
                let mut state = self.state();
                // No monitor may remain for a client that left during the call.
                if caller.presence.has_ended() {
                    return Err(CallError::new(errors::FAILED, "the client has disconnected"));
                }
                let id = state.monitors.create(caller.owner.clone())?;
                reply(&header, &monitor_path(id))
            }
            "SetLogLevel" => {
                let level = parse_log_level(body.deserialize()?)
                    .ok_or_else(|| invalid("expected one of: debug, info, warn, error"))?;
                logging::set_level(level);
                reply(&header, &())
            }
            _ => Err(unknown_method(method.name)),
        }
    }

    fn list_nodes(&self) -> Vec<(String, ObjectPath<'static>, &'static str)> {
        let state = self.state();
        let rows = state.nodes.iter();
        rows.map(|(name, node)| (name.to_string(), node_path(name), node.status().as_str())).collect()
    }

    /// Cancels a job; `None` if there is no such job.
    fn cancel(&self, id: u32) -> Option<Vec<Start>> {
        let mut state = self.state();
        let effects = state.jobs.cancel(id, tokio::time::Instant::now())?;
        Some(state.job_effects(effects))
    }

    /// Queues a job. Returns its id, and the jobs that have to be sent to their nodes.
    fn queue(&self, request: Request<Payload>) -> Result<(u32, Vec<Start>), CallError> {
        let mut state = self.state();
        let (id, effects) = state.jobs.submit(request, tokio::time::Instant::now())?;
        Ok((id, state.job_effects(effects)))
    }

    fn known_node(&self, name: &str) -> Result<NodeName, CallError> {
        let known = name.parse().ok().filter(|name| self.state().nodes.contains_key(name));
        known.ok_or_else(|| CallError::new(errors::NO_SUCH_NODE, "there is no node with this name"))
    }

    fn monitor_call(&self, caller: &Caller, id: u32, method: &Method, call: &Message) -> Answered {
        let (header, body, owner) = (call.header(), call.body(), &caller.owner);
        let mut state = self.state();
        let subscribed = |manager: &Self, node: &str, units: &[String]| {
            units.iter().try_for_each(|unit| check_systemd_unit_glob(unit))?;
            let scope = if matches!(node, "" | "*") {
                Scope::AllNodes
            } else {
                Scope::Node(manager.known_node(node)?)
            };
            Ok::<_, CallError>(scope)
        };
        match method.name {
            "Close" => {
                let effects = state.monitors.close(owner, id)?;
                state.monitor_effects(effects);
                reply(&header, &())
            }
            "Subscribe" | "SubscribeList" => {
                drop(state);
                let (node, units): (&str, Vec<String>) = if method.name == "Subscribe" {
                    let (node, unit): (&str, String) = body.deserialize()?;
                    (node, vec![unit])
                } else {
                    body.deserialize()?
                };
                let scope = subscribed(self, node, &units)?;
                let mut state = self.state();
                let (subscription, effects) = state.monitors.subscribe(owner, id, scope, &units)?;
                state.monitor_effects(effects);
                reply(&header, &subscription)
            }
            "Unsubscribe" => {
                let effects = if header.signature().to_string() == "u" {
                    state.monitors.unsubscribe(owner, id, body.deserialize()?)?
                } else {
                    let (node, unit): (&str, &str) = body.deserialize()?;
                    let scope = match node {
                        "" | "*" => Scope::AllNodes,
                        node => Scope::Node(node.parse()?),
                    };
                    state.monitors.unsubscribe_by_name(owner, id, &scope, unit)?
                };
                state.monitor_effects(effects);
                reply(&header, &())
            }
            _ => Err(unknown_method(method.name)),
        }
    }

    async fn node_call(&self, node: &NodeName, method: &Method, call: &Message) -> Answered {
        let (header, body) = (call.header(), call.body());
        let kind = match method.name {
            "StartUnit" => Some(JobType::Start),
            "StopUnit" => Some(JobType::Stop),
            "ReloadUnit" => Some(JobType::Reload),
            "RestartUnit" => Some(JobType::Restart),
            _ => None,
        };
        if let Some(kind) = kind {
            let (unit, mode): (String, &str) = body.deserialize()?;
            return self.submit(node, unit, kind, mode, Payload::Unit, &header).await;
        }
        if method.name == "StartTransientUnit" {
            let (unit, mode, properties, auxiliary): (String, &str, Vec<Setting>, Vec<AuxiliaryUnit>) =
                body.deserialize()?;
            let payload = Payload::Transient { properties, auxiliary };
            return self.submit(node, unit, JobType::Start, mode, payload, &header).await;
        }
        if method.input.first().is_some_and(|(name, _)| *name == "name") {
            let arguments: Structure<'_> = body.deserialize()?;
            if let Some(zbus::Variant::Str(unit)) = arguments.fields().first() {
                check_systemd_unit(unit)?;
            }
        }
        let link = self.link(node)?;
        let forwarded = if method.name == "GetUnitProperties" && header.signature().to_string() == "s" {
            let unit: &str = body.deserialize()?;
            forward(node, &link, method, Some(&Structure::from((unit, ""))), call).await
        } else if body.is_empty() {
            forward(node, &link, method, None, call).await
        } else {
            forward(node, &link, method, Some(&body.deserialize()?), call).await
        };
        forwarded.map(Answer::Reply)
    }

    /// Submits a job. If the job is sent to its node at once and the node refuses it, the call
    /// fails with the node's error.
    async fn submit(
        &self,
        node: &NodeName,
        systemd_unit: String,
        kind: JobType,
        mode: &str,
        payload: Payload,
        header: &Header<'_>,
    ) -> Answered {
        check_systemd_unit(&systemd_unit)?;
        let mode = mode.parse().map_err(invalid)?;
        self.link(node)?;
        let (id, mut starts) =
            self.queue(Request { node: node.clone(), systemd_unit, kind, mode, payload })?;
        let own = starts.iter().position(|start| start.id == id).map(|at| starts.remove(at));
        self.run(starts);
        let message = Message::method_return(header).build(&job_path(id))?;
        match own {
            None => Ok(Answer::Reply(message)),
            Some(start) => self.send_submitted_job(start).await.map(|id| Answer::Accepted(message, id)),
        }
    }

    async fn send_submitted_job(&self, start: Start) -> Result<u32, CallError> {
        let sent = start.send().await;
        if sent.is_err() {
            self.answered(start.id, &sent);
        }
        sent.map(|()| start.id)
    }
}

/// Finds the method of a call. A call without an interface means the first that has the method.
fn find(object: &Object, header: &Header<'_>) -> Result<(&'static Interface, &'static Method), CallError> {
    let member = header.member().map(|name| name.as_str()).unwrap_or_default();
    let wanted = header.interface().map(|name| name.as_str());
    let standard = [&api::INTROSPECTABLE, &api::PEER, &api::PROPERTIES];
    let mut interfaces = object.interface().into_iter().chain(standard);
    match wanted {
        Some(wanted) => {
            let unknown = || CallError::new(errors::UNKNOWN_INTERFACE, "the object has no such interface");
            let interface = interfaces.find(|interface| interface.name == wanted).ok_or_else(unknown)?;
            Ok((interface, interface.method(member).ok_or_else(|| unknown_method(member))?))
        }
        None => interfaces
            .find_map(|interface| Some((interface, interface.method(member)?)))
            .ok_or_else(|| unknown_method(member)),
    }
}

fn unknown_method(_name: &str) -> CallError {
    CallError::new(errors::UNKNOWN_METHOD, "the interface has no such method")
}

pub(super) fn error_reply(call: &Message, error: &CallError) -> Option<Message> {
    let header = call.header();
    // An error name from a node that is not valid in D-Bus is replaced.
    let named = Message::error(&header, error.name.clone()).build(&error.message);
    named.or_else(|_| Message::error(&header, errors::FAILED).build(&error.message)).ok()
}

fn machine_id() -> Result<String, CallError> {
    let read = std::fs::read_to_string("/etc/machine-id");
    let read = read.map_err(|error| CallError::new(errors::FAILED, error.to_string()))?;
    Ok(read.trim().to_owned())
}
