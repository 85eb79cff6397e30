//! Serves the public API on the connection of an operator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};
use tracing::debug;
use zbus::Message;
use zbus::message::Type;

use super::Manager;
use super::call::{Caller, Rights, error_reply};
use super::client::{Client, Owner};
use crate::fleet::dbus::connect::Peer;
use crate::fleet::dbus::errors::{self, CallError};
use crate::fleet::dbus::names;
use crate::fleet::liveness::{Liveness, Step};
use crate::model::OperatorName;

/// Calls of one connection, or of one sender on a bus, that are answered at the same time. Further
/// ones wait.
const CALLS_AT_ONCE: usize = 64;
/// These calls, and those that wait. Further ones are refused.
const MAX_CALLS: usize = CALLS_AT_ONCE + 4_096;

/// The calls of one connection, or of one sender on a bus.
#[derive(Debug)]
pub(super) struct CallLimit {
    accepted: Arc<Semaphore>,
    /// Waiting calls are admitted in order.
    running: Arc<Semaphore>,
    presence: Presence,
}

impl Default for CallLimit {
    fn default() -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        Self { accepted: permits(MAX_CALLS), running: permits(CALLS_AT_ONCE), presence: Presence::default() }
    }
}

impl CallLimit {
    pub(super) fn presence(&self) -> Presence {
        self.presence.clone()
    }

    /// The connection has ended: calls that wait are dropped, and calls that run leave nothing
    /// behind. The caller removes what belongs to the connection afterwards.
    pub(super) fn close(&self) {
        self.presence.0.store(true, Ordering::SeqCst);
        self.running.close();
    }
}

/// Whether the connection of a client, or of a sender on a bus, is still open. Before anything is
/// kept for a client, this is checked under the lock under which it is removed.
#[derive(Debug, Clone, Default)]
pub(super) struct Presence(Arc<AtomicBool>);

impl Presence {
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// An operator, as a connection has proved it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operator {
    /// The first operator of the environment, or a user of this host. It cannot be removed.
    Permanent,
    Added(OperatorName),
}

impl Manager {
    /// Serves an operator until the connection ends, or the operator is removed. `first` is a call
    /// that was received already.
    pub(super) async fn serve_operator(&self, mut peer: Peer, operator: Operator, first: Option<Message>) {
        let (client, mut queued) = Client::new();
        let id = {
            let mut state = self.state();
            let added = match operator {
                Operator::Permanent => None,
                Operator::Added(name) if state.operators.contains(&name) => Some(name),
                // Removed since the certificate was checked.
                Operator::Added(_) => return,
            };
            state.add_client(client.of_operator(added))
        };
        let owner = Owner { client: id, sender: None };
        let limit = CallLimit::default();
        let caller = Caller { owner: owner.clone(), rights: Rights::All, presence: limit.presence() };
        if let Some(first) = first {
            self.serve_call(&caller, first, &limit).await;
        }
        let (timing, activity) = (self.timing(), peer.activity.clone());
        let mut liveness = Liveness::new(timing.heartbeat_interval, timing.silence_limit, Instant::now());
        loop {
            // Operators send no heartbeats, so their silence is not a loss: only TCP detects that.
            let until = match liveness.step(Instant::now(), Instant::now()) {
                // A client that does not read messages needs no heartbeat.
                Step::SendHeartbeat if !activity.has_room() => continue,
                Step::SendHeartbeat => {
                    let beat = Message::signal(
                        names::INTERNAL_MANAGER_PATH,
                        names::INTERNAL_MANAGER_INTERFACE,
                        "Heartbeat",
                    );
                    match beat.build(&()) {
                        Ok(beat) if peer.connection.send(&beat).await.is_ok() => continue,
                        _ => break,
                    }
                }
                Step::WaitUntil(until) => until,
                Step::Lost => break,
            };
            tokio::select! {
                received = peer.next() => match received {
                    _ if !self.state().clients.contains(id) => break,
                    Some(call) if call.message_type() == Type::MethodCall => {
                        self.serve_call(&caller, call, &limit).await;
                    }
                    Some(_) => {}
                    None => break,
                },
                // While the operator reads slowly, the messages wait here. If it does not read at
                // all, the connection ends.
                () = activity.room(), if !activity.has_room() => {}
                message = queued.next(), if activity.has_room() => match message {
                    Some(message) if peer.connection.send(&message).await.is_ok() => {
                        if queued.wants_signals() {
                            self.state().send_monitor_signals();
                        }
                    }
                    _ => break,
                },
                () = sleep_until(until) => {}
            }
        }
        limit.close();
        {
            let mut state = self.state();
            state.clients.remove(id);
            state.client_lost(&owner);
        }
        debug!(client = id, "operator disconnected");
        let Peer { connection, messages, activity } = peer;
        drop((connection, messages));
        // Each write is bounded.
        activity.written().await;
    }

    /// Answers a call, in a task of its own if that takes time. The part before the first wait is
    /// executed at once, so that the calls of a client take effect in order.
    pub(super) async fn serve_call(&self, caller: &Caller, call: Message, limit: &CallLimit) {
        let Ok(accepted) = Arc::clone(&limit.accepted).try_acquire_owned() else {
            let text = format!("a client may make {MAX_CALLS} calls at the same time");
            let error = CallError::new(errors::LIMITS_EXCEEDED, text);
            if let Some(message) = error_reply(&call, &error) {
                self.state().clients.send(caller.owner.client, message);
            }
            return;
        };
        let (manager, caller, running) = (self.clone(), caller.clone(), Arc::clone(&limit.running));
        let mut answering = Box::pin(async move {
            // The semaphore is closed when the client is gone.
            let Ok(running) = running.acquire_owned().await else { return };
            manager.answer(&caller, &call).await;
            drop((running, accepted));
        });
        if futures_util::poll!(&mut answering).is_pending() {
            tokio::spawn(answering);
        }
    }
}
