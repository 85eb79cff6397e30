//! The connection of an agent: registration, its reports, heartbeats, and its loss.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{info, warn};
use zbus::message::{Flags, Type};
use zbus::{Connection, Message};

use super::operator::Operator;
use super::properties::unit_state;
use super::requests::Requests;
use super::{Leadership, Manager, NodeRule};
use crate::fleet::dbus::accept::Proof;
use crate::fleet::dbus::connect::{HANDSHAKE_TIMEOUT, Peer};
use crate::fleet::dbus::errors::{self, CallError};
use crate::fleet::dbus::names;
use crate::fleet::dbus::socket::Activity;
use crate::fleet::dbus::values::{JobResult, JobState, Properties};
use crate::fleet::liveness::{Liveness, Step};
use crate::fleet::name::{NodeName, check_systemd_unit};

/// The name in an operator's certificate.
pub(super) const OPERATOR: &str = "operator";

/// After an error reply, the time until the connection is closed.
const LAST_REPLY: Duration = Duration::from_secs(1);

/// The connection to a registered agent.
#[derive(Debug, Clone)]
pub(super) struct Link {
    pub(super) id: u64,
    pub(super) connection: Connection,
    pub(super) peer_ip: String,
    pub(super) activity: Activity,
    pub(super) proof: Proof,
    pub(super) requests: Arc<Requests>,
}

impl Manager {
    /// Serves a connection until it ends: as an agent, if its first message registers a node in
    /// time, or as an operator. `from` is the peer's address; the connection was accepted at
    /// `accepted`.
    pub async fn serve_peer(&self, mut peer: Peer, proof: Proof, from: String, accepted: Instant) {
        let operator = match &proof {
            Proof::Certificate { names, .. } => self.operator_with(names),
            Proof::LocalUser(user) => [0, self.0.own_user].contains(user).then_some(Operator::Permanent),
            Proof::None => None,
        };
        if let (Proof::Certificate { .. }, Some(operator)) = (&proof, &operator) {
            return self.serve_operator(peer, operator.clone(), None).await;
        }
        let Ok(Some(first)) = timeout_at(accepted + HANDSHAKE_TIMEOUT, peer.next()).await else { return };
        let header = first.header();
        let is_register = header.message_type() == Type::MethodCall
            && header.interface().is_some_and(|name| *name == names::INTERNAL_MANAGER_INTERFACE)
            && header.member().is_some_and(|name| *name == "Register");
        drop(header);
        if let (false, Some(operator)) = (is_register, operator) {
            return self.serve_operator(peer, operator, Some(first)).await;
        }
        let registered = if is_register {
            self.register(&first, &proof, &peer, &from)
        } else {
            Err(CallError::new(errors::ACCESS_DENIED, "the first call of an agent has to be Register"))
        };
        match registered {
            Ok((name, link)) => {
                info!(node = %name, %from, "node online");
                let reason = self.serve_agent(&mut peer, &name, &link).await;
                let tasks = self.state().node_lost(&name, link.id);
                self.run(tasks);
                info!(node = %name, %from, reason, "node offline");
            }
            Err(error) => {
                warn!(%from, %error, "registration refused");
                // The peer may be gone already.
                let _ =
                    peer.connection.reply_error(&first.header(), error.name.clone(), &error.message).await;
                // The peer closes the connection after the reply.
                let closes = async { while peer.next().await.is_some() {} };
                let _ = tokio::time::timeout(LAST_REPLY, closes).await;
                peer.activity.end("registration refused");
            }
        }
    }

    /// The operator whose certificate has these names. Operators may call all methods.
    fn operator_with(&self, names: &[String]) -> Option<Operator> {
        if names.iter().any(|name| name == OPERATOR) {
            return Some(Operator::Permanent);
        }
        let added = |name: &String| name.strip_prefix(OPERATOR)?.strip_prefix('-')?.parse().ok();
        let state = self.state();
        let found = names.iter().filter_map(added).find(|added| state.operators.contains(added));
        found.map(Operator::Added)
    }

    /// Checks a registration, and reserves the name of the node.
    fn register(
        &self,
        call: &Message,
        proof: &Proof,
        peer: &Peer,
        from: &str,
    ) -> Result<(NodeName, Link), CallError> {
        let body = call.body();
        let name: &str = body
            .deserialize()
            .map_err(|_| CallError::new(errors::INVALID_ARGS, "Register takes the name of the node"))?;
        let refuse = |message: String| CallError::new(errors::REGISTRATION_REFUSED, message);
        let name: NodeName = name.parse()?;
        let mut state = self.state();
        if let Leadership::Standby { leader } = &state.leadership {
            return Err(not_leader(leader.as_deref()));
        }
        let node = state.nodes.get(&name);
        let node = node.ok_or_else(|| refuse(format!("'{name}' is not a node of this manager")))?;
        check_proof(&name, &node.rule, proof, self.0.own_user)?;
        if node.link.is_some() {
            let message = format!("another agent of '{name}' is connected");
            return Err(CallError::new(errors::NAME_IN_USE, message));
        }
        let link = Link {
            id: state.next_link(),
            connection: peer.connection.clone(),
            peer_ip: from.to_owned(),
            activity: peer.activity.clone(),
            proof: proof.clone(),
            requests: Arc::default(),
        };
        // The reply precedes every call to the agent. A send never waits, and no other task uses
        // the connection yet.
        let replied = peer.connection.reply(&call.header(), &()).now_or_never();
        if !matches!(replied, Some(Ok(()))) {
            return Err(refuse("the agent is gone".to_owned()));
        }
        state.node_online(&name, link.clone());
        Ok((name, link))
    }

    /// Runs the connection of a registered agent. Returns why it ended.
    async fn serve_agent(&self, peer: &mut Peer, name: &NodeName, link: &Link) -> &'static str {
        let timing = self.timing();
        let mut liveness = Liveness::new(timing.heartbeat_interval, timing.silence_limit, Instant::now());
        loop {
            let until = match liveness.step(peer.activity.last_received(), Instant::now()) {
                Step::Lost => {
                    peer.activity.end("silent");
                    return "silent";
                }
                Step::SendHeartbeat => {
                    if let Some(beat) = heartbeat()
                        && peer.connection.send(&beat).await.is_err()
                    {
                        return "disconnected";
                    }
                    continue;
                }
                Step::WaitUntil(until) => until,
            };
            if send_requests(peer, link).await.is_err() {
                return "disconnected";
            }
            tokio::select! {
                received = peer.next() => match received {
                    Some(message) => self.agent_message(name, link, &message).await,
                    None => return peer.activity.end_reason().unwrap_or("disconnected"),
                },
                // Requests wait here while the agent reads slowly. If it does not read at all, the
                // connection ends.
                () = link.activity.room(), if !link.activity.has_room() => {}
                () = link.requests.added(), if link.activity.has_room() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    /// Handles a message of a registered agent.
    async fn agent_message(&self, name: &NodeName, link: &Link, message: &Message) {
        let header = message.header();
        match header.message_type() {
            Type::Signal => {
                let is_own = header.interface().is_some_and(|of| *of == names::INTERNAL_AGENT_INTERFACE);
                if let Some(member) = header.member().filter(|_| is_own)
                    && self.agent_signal(name, link.id, member.as_str(), message).is_none()
                {
                    warn!(node = %name, member = member.as_str(), "invalid signal of an agent");
                }
            }
            Type::MethodCall if !header.primary().flags().contains(Flags::NO_REPLY_EXPECTED) => {
                let text = "an agent calls Register once";
                let replied = link.connection.reply_error(&header, errors::ACCESS_DENIED, &text).await;
                if replied.is_err() {
                    link.activity.end("disconnected");
                }
            }
            _ => {}
        }
    }

    /// Handles a signal of an agent; `None` if its arguments are invalid. The agent may have lost
    /// the node since, and another one may have registered.
    fn agent_signal(&self, name: &NodeName, link: u64, member: &str, message: &Message) -> Option<()> {
        let body = message.body();
        let mut state = self.state();
        let current = state.nodes.get(name).and_then(|node| node.link.as_ref());
        if current.is_none_or(|current| current.id != link) {
            return Some(());
        }
        state.seen(name);
        let starts = match member {
            "JobDone" => {
                let (id, result): (u32, &str) = body.deserialize().ok()?;
                let result: JobResult = result.parse().ok()?;
                state.job_done(name, id, result)
            }
            "JobStateChanged" => {
                let (id, job_state): (u32, &str) = body.deserialize().ok()?;
                let job_state: JobState = job_state.parse().ok()?;
                state.job_state(name, id, job_state)
            }
            "UnitPropertiesChanged" => {
                let (unit, properties): (&str, Properties) = body.deserialize().ok()?;
                check_systemd_unit(unit).ok()?;
                state.monitors.unit_properties(name, unit, unit_state(&properties));
                state.send_monitor_signals();
                state.proxy_unit_state(name, unit, Some(&properties))
            }
            "UnitNew" => {
                let unit: &str = body.deserialize().ok()?;
                check_systemd_unit(unit).ok()?;
                state.monitors.unit_new(name, unit);
                Vec::new()
            }
            "UnitRemoved" => {
                let unit: &str = body.deserialize().ok()?;
                state.monitors.unit_removed(name, unit);
                state.send_monitor_signals();
                state.proxy_unit_state(name, unit, None)
            }
            _ => state.proxy_signal(name, member, message)?,
        };
        state.take_ended(&self.0.metrics);
        drop(state);
        self.run(starts);
        Some(())
    }
}

/// Sends the waiting requests for which there is room.
async fn send_requests(peer: &Peer, link: &Link) -> zbus::Result<()> {
    while link.activity.has_room()
        && let Some(request) = link.requests.take()
    {
        peer.connection.send(&request.message()?).await?;
    }
    Ok(())
}

/// Checks that an agent with this proof may register as a node.
pub(super) fn check_proof(
    name: &NodeName,
    rule: &NodeRule,
    proof: &Proof,
    own_user: u32,
) -> Result<(), CallError> {
    let refuse = |message| Err(CallError::new(errors::REGISTRATION_REFUSED, message));
    match proof {
        Proof::Certificate { names, der } => {
            if !names.iter().any(|proved| rule.is_proved_by(name, proved)) {
                let remedy = rule.machine.map_or_else(String::new, |machine| {
                    format!("; `juju machine renew {machine}` issues one to the machine with this name")
                });
                return refuse(format!("the certificate is not valid for '{name}'{remedy}"));
            }
            if rule.certificate.as_ref().is_some_and(|expected| expected != der) {
                return refuse(format!("'{name}' has to present another certificate"));
            }
        }
        _ if rule.certificate.is_some() => {
            return refuse(format!("'{name}' has to present its certificate"));
        }
        Proof::LocalUser(user) if ![0, own_user].contains(user) => {
            return refuse("only root and the manager's user may register here".to_owned());
        }
        Proof::LocalUser(_) | Proof::None => {}
    }
    Ok(())
}

pub(super) fn not_leader(leader: Option<&str>) -> CallError {
    let message = match leader {
        Some(leader) => format!("this manager is a standby; the leader is {leader}"),
        None => "this manager is a standby, and the leader is not known".to_owned(),
    };
    CallError::new(errors::NOT_LEADER, message)
}

fn heartbeat() -> Option<Message> {
    let (path, interface) = (names::INTERNAL_MANAGER_PATH, names::INTERNAL_MANAGER_INTERFACE);
    Message::signal(path, interface, "Heartbeat").build(&()).ok()
}
