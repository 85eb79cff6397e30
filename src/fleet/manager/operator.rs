//! Serves the public API on the connection of an operator.

use std::sync::Arc;

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

/// Calls of one connection, or of one sender on a bus, that are answered at the same time.
pub(super) const CALLS_AT_ONCE: usize = 64;

impl Manager {
    /// Serves an operator until the connection ends. `first` is a call that was received already.
    pub(super) async fn serve_operator(&self, mut peer: Peer, first: Option<Message>) {
        let (client, mut queued) = Client::new();
        let id = self.state().add_client(client);
        let owner = Owner { client: id, sender: None };
        let caller = Caller { owner: owner.clone(), rights: Rights::All };
        let limit = Arc::new(Semaphore::new(CALLS_AT_ONCE));
        if let Some(first) = first {
            self.serve_call(&caller, first, &limit).await;
        }
        let timing = self.timing();
        let mut liveness = Liveness::new(timing.heartbeat_interval, timing.silence_limit, Instant::now());
        loop {
            // Operators send no heartbeats, so their silence is not a loss: only TCP detects that.
            let until = match liveness.step(Instant::now(), Instant::now()) {
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
                    Some(call) if call.message_type() == Type::MethodCall => {
                        self.serve_call(&caller, call, &limit).await;
                    }
                    Some(_) => {}
                    None => break,
                },
                message = queued.recv() => match message {
                    Some(message) if peer.connection.send(&message).await.is_ok() => {}
                    _ => break,
                },
                () = sleep_until(until) => {}
            }
        }
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
    pub(super) async fn serve_call(&self, caller: &Caller, call: Message, limit: &Arc<Semaphore>) {
        let Ok(permit) = Arc::clone(limit).try_acquire_owned() else {
            let text = format!("a client may make {CALLS_AT_ONCE} calls at the same time");
            let error = CallError::new(errors::LIMITS_EXCEEDED, text);
            if let Some(message) = error_reply(&call, &error) {
                self.state().clients.send(caller.owner.client, message);
            }
            return;
        };
        let (manager, caller) = (self.clone(), caller.clone());
        let mut answering = Box::pin(async move {
            manager.answer(&caller, &call).await;
            drop(permit);
        });
        if futures_util::poll!(&mut answering).is_pending() {
            tokio::spawn(answering);
        }
    }
}
