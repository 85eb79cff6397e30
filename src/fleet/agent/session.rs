//! One connection to a manager: it receives calls, sends signals, and ends when the manager is
//! silent for too long. The decisions are in `state` and in `liveness`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};
use zbus::message::{Flags, Type};
use zbus::{Connection, DynamicType, Message, OwnedObjectPath};

use crate::fleet::dbus::connect::{HANDSHAKE_TIMEOUT, Peer};
use crate::fleet::dbus::errors::{CallError, LIMITS_EXCEEDED, TIMEOUT, UNKNOWN_METHOD, UNKNOWN_OBJECT};
use crate::fleet::dbus::names::{
    INTERNAL_AGENT_INTERFACE, INTERNAL_AGENT_PATH, INTERNAL_MANAGER_INTERFACE, INTERNAL_MANAGER_PATH,
    INTERNAL_PROXY_PATH,
};
use crate::fleet::dbus::values::{JobResult, JobState};
use crate::fleet::liveness::{Liveness, Step};
use crate::fleet::name::{NodeName, escape};
use crate::fleet::systemd::{Event, QueuedJob, UnitControl};

use super::call::{self, Call, SubscriptionCall};
use super::proxies::Announcement;
use super::proxy_service::ProxyService;
use super::state::Jobs;
use super::{Settings, WatchedUnits};

/// Calls of the manager that are executed at the same time. A manager that exceeds this gets an
/// error. Calls without a reply are executed all the same: the manager would not repeat them.
const MAX_CALLS: usize = 512;

/// A registered connection.
#[derive(Debug)]
pub(super) struct Session<C> {
    peer: Peer,
    context: Context<C>,
    queued: mpsc::UnboundedReceiver<(u32, QueuedJob)>,
    calls: JoinSet<()>,
    /// Calls about subscriptions are executed in order.
    subscriptions: mpsc::UnboundedSender<(SubscriptionCall, Message)>,
    proxies: Arc<ProxyService<C>>,
    announcements: mpsc::UnboundedReceiver<Announcement>,
}

/// The context of a call.
#[derive(Debug)]
pub(super) struct Context<C> {
    pub(super) control: Arc<C>,
    pub(super) watched: WatchedUnits<C>,
    pub(super) connection: Connection,
    jobs: Arc<Mutex<Jobs>>,
    /// Receives the jobs that systemd has queued. Their number is limited by that of the calls.
    pub(super) queued: mpsc::UnboundedSender<(u32, QueuedJob)>,
}

impl<C> Clone for Context<C> {
    fn clone(&self) -> Self {
        Self {
            control: Arc::clone(&self.control),
            watched: self.watched.clone(),
            connection: self.connection.clone(),
            jobs: Arc::clone(&self.jobs),
            queued: self.queued.clone(),
        }
    }
}

impl<C: UnitControl> Context<C> {
    /// Locks the jobs. The lock is never held across an `await`.
    pub(super) fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn signal<B>(&self, name: &str, body: &B)
    where
        B: serde::Serialize + DynamicType,
    {
        let (path, interface) = (INTERNAL_AGENT_PATH, INTERNAL_AGENT_INTERFACE);
        let sent = self.connection.emit_signal(None::<&str>, path, interface, name, body).await;
        if let Err(error) = sent {
            // After a failed send the connection ends, and so does the session.
            debug!(%error, "cannot send a signal");
        }
    }

    /// Sends the reply to a call.
    pub(super) async fn reply<B>(&self, call: &Message, result: Result<B, CallError>)
    where
        B: serde::Serialize + DynamicType,
    {
        let header = call.header();
        if header.primary().flags().contains(Flags::NO_REPLY_EXPECTED) {
            return;
        }
        let mut sent = match result {
            Ok(body) => self.connection.reply(&header, &body).await,
            Err(error) => self.connection.reply_error(&header, error.name.as_str(), &error.message).await,
        };
        if let Err(zbus::Error::InputOutput(error)) = &sent
            && error.kind() == std::io::ErrorKind::InvalidInput
        {
            let text = "the reply is longer than a message may be";
            sent = self.connection.reply_error(&header, LIMITS_EXCEEDED, &text).await;
        }
        if let Err(error) = sent {
            debug!(%error, "cannot send a reply");
        }
    }
}

impl<C: UnitControl> Session<C> {
    /// Registers the agent on a new connection.
    pub(super) async fn register(
        peer: Peer,
        name: &NodeName,
        watched: WatchedUnits<C>,
        proxies: &Arc<ProxyService<C>>,
    ) -> Result<Self, CallError> {
        let connection = peer.connection.clone();
        let interface = Some(INTERNAL_MANAGER_INTERFACE);
        let body = (name.as_str(),);
        let registering =
            connection.call_method(None::<&str>, INTERNAL_MANAGER_PATH, interface, "Register", &body);
        let late = |_| CallError::new(TIMEOUT, "the manager did not answer in time");
        timeout(HANDSHAKE_TIMEOUT, registering).await.map_err(late)??;
        let (queued_jobs, queued) = mpsc::unbounded_channel();
        let control = Arc::clone(&watched.control);
        let context = Context { control, watched, connection, jobs: Arc::default(), queued: queued_jobs };
        let mut calls = JoinSet::new();
        let (subscriptions, requests) = mpsc::unbounded_channel();
        calls.spawn(call::subscriptions(context.clone(), requests));
        let (announce, announcements) = mpsc::unbounded_channel();
        calls.spawn(Arc::clone(proxies).connected(announce));
        let proxies = Arc::clone(proxies);
        Ok(Self { peer, context, queued, calls, subscriptions, proxies, announcements })
    }

    /// Runs until the connection ends, and returns the reason.
    pub(super) async fn run<S>(
        mut self,
        settings: &Settings<S>,
        events: &mut mpsc::Receiver<Event>,
    ) -> &'static str {
        let mut jobs = FuturesUnordered::new();
        let activity = self.peer.activity.clone();
        let mut liveness = Liveness::new(settings.heartbeat_interval, settings.silence_limit, Instant::now());
        loop {
            let next = match liveness.step(self.peer.activity.last_received(), Instant::now()) {
                Step::Lost => {
                    self.peer.activity.end("the manager is silent");
                    return "the manager is silent";
                }
                Step::SendHeartbeat => {
                    self.context.signal("Heartbeat", &()).await;
                    continue;
                }
                Step::WaitUntil(next) => next,
            };
            tokio::select! {
                message = self.peer.next() => match message {
                    Some(message) => self.message(message).await,
                    None => return self.peer.activity.end_reason().unwrap_or("the manager closed it"),
                },
                Some((id, job)) = self.queued.recv() => jobs.push(async move {
                    // The sender is dropped only when the task for systemd ends, at the exit of
                    // this process.
                    (id, job.done.await.unwrap_or(JobResult::Failed))
                }),
                Some((id, result)) = jobs.next(), if !jobs.is_empty() => {
                    if self.context.jobs().end(id) {
                        self.context.signal("JobDone", &(id, result.as_str())).await;
                    }
                }
                Some(announcement) = self.announcements.recv() => self.announce(announcement).await,
                // While the manager reads slowly, the events wait.
                () = activity.room(), if !activity.has_room() => {}
                Some(event) = events.recv(), if activity.has_room() => self.event(event).await,
                Some(_) = self.calls.join_next(), if !self.calls.is_empty() => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// Begins the execution of a call. Other messages only prove that the manager is alive.
    async fn message(&mut self, message: Message) {
        if message.message_type() != Type::MethodCall {
            return;
        }
        let header = message.header();
        let path = header.path().map(|path| path.as_str());
        if path.is_some_and(|path| path.starts_with(INTERNAL_PROXY_PATH)) {
            if self.proxies.manager_call(&message).is_none() {
                warn!("invalid call of the manager about a proxy service");
            }
            return;
        }
        let refused = if path != Some(INTERNAL_AGENT_PATH) {
            CallError::new(UNKNOWN_OBJECT, "the agent has no such object")
        } else if header.interface().is_some_and(|name| name.as_str() != INTERNAL_AGENT_INTERFACE) {
            CallError::new(UNKNOWN_METHOD, "the agent has no such interface")
        } else {
            match Call::parse(&message) {
                Ok(call) if self.calls.len() > MAX_CALLS && call.is_answered() => {
                    CallError::new(LIMITS_EXCEEDED, "too many calls at the same time")
                }
                Ok(Call::Subscription(call)) => {
                    drop(header);
                    // The send cannot fail: the receiving task ends with this session.
                    let _ = self.subscriptions.send((call, message));
                    return;
                }
                Ok(call) => {
                    drop(header);
                    if let Some(id) = call.job_id()
                        && !self.context.jobs().begin(id)
                    {
                        let error = CallError::new(LIMITS_EXCEEDED, "a job with this id is running");
                        return self.context.reply(&message, Err::<(), _>(error)).await;
                    }
                    self.calls.spawn(call::execute(self.context.clone(), call, message));
                    return;
                }
                Err(error) => error,
            }
        };
        drop(header);
        self.context.reply(&message, Err::<(), _>(refused)).await;
    }

    async fn announce(&self, announcement: Announcement) {
        let path = |proxy: &str| {
            let path = format!("{INTERNAL_PROXY_PATH}/{}", escape(proxy));
            OwnedObjectPath::try_from(path).unwrap_or_default()
        };
        let context = &self.context;
        match announcement {
            Announcement::New { proxy, node, unit, dependents } => {
                if !dependents.is_empty() {
                    context.signal("ProxyDependents", &(path(&proxy), dependents)).await;
                }
                context.signal("ProxyNew", &(node, unit, path(&proxy))).await;
            }
            Announcement::Established { proxy, node, unit, instance } => {
                context.signal("ProxyEstablished", &(node, unit, path(&proxy), instance)).await;
            }
            Announcement::Removed { proxy, node, unit } => {
                context.signal("ProxyRemoved", &(node, unit, path(&proxy))).await;
            }
            Announcement::Failed { proxy, reason } => {
                context.signal("ProxyFailed", &(path(&proxy), reason)).await;
            }
            Announcement::All { instance, deps } => {
                context.signal("ProxiesAnnounced", &(instance, deps)).await;
            }
        }
    }

    async fn event(&self, event: Event) {
        match event {
            Event::JobRunning(systemd_job) => {
                let ids = self.context.jobs().of_systemd(systemd_job);
                for id in ids {
                    self.context.signal("JobStateChanged", &(id, JobState::Running.as_str())).await;
                }
            }
            Event::UnitNew(unit) => self.context.signal("UnitNew", &(unit,)).await,
            Event::UnitRemoved(unit) => self.context.signal("UnitRemoved", &(unit,)).await,
            Event::Unit(unit, state) => {
                self.context.signal("UnitPropertiesChanged", &(unit, state.properties())).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::dbus::connect::authenticated_peer;
    use crate::fleet::systemd::MemorySystemd;

    #[tokio::test(start_paused = true)]
    async fn a_manager_that_does_not_answer_is_left_after_the_time_of_a_handshake() {
        let (stream, silent) = tokio::io::duplex(64 << 10);
        let peer = authenticated_peer(stream).await.unwrap();
        let (control, _events) = MemorySystemd::new(&[]);
        let watched = WatchedUnits { control: Arc::new(control), order: Arc::default() };
        let began = Instant::now();
        let proxies = Arc::new(ProxyService::new(Arc::clone(&watched.control), None));
        let refused = Session::register(peer, &"n1".parse().unwrap(), watched, &proxies).await;
        assert_eq!(refused.map(|_| ()).unwrap_err().name, TIMEOUT);
        assert_eq!(began.elapsed(), HANDSHAKE_TIMEOUT);
        drop(silent);
    }
}
