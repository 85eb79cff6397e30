//! The requests without a reply that wait to be sent to one agent: subscriptions, cancellations and
//! messages about proxies. Only the last request about a pattern or a proxy is kept, so their
//! number is limited by that of the patterns and proxies. A new connection of an agent begins with
//! an empty queue.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use zbus::Message;
use zbus::message::Flags;

use crate::fleet::dbus::names;
use crate::fleet::name::escape;
use crate::mutant;

/// A request to an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    CancelJob(u32),
    Subscribe(String),
    Unsubscribe(String),
    /// The name of a proxy service, and the message about it.
    Proxy(String, ProxyMessage),
}

/// A message about a proxy service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ProxyMessage {
    /// The target's instance of systemd, or why the proxy fails.
    Ready(Result<u64, String>),
    /// Why the proxy has ended.
    TargetStopped(String),
}

impl Request {
    /// Returns the request as a call without a reply.
    pub(super) fn message(&self) -> zbus::Result<Message> {
        let call = |method| {
            Message::method_call(names::INTERNAL_AGENT_PATH, method)
                .interface(names::INTERNAL_AGENT_INTERFACE)
                .with_flags(Flags::NO_REPLY_EXPECTED)
        };
        match self {
            Self::CancelJob(id) => call("JobCancel").build(id),
            Self::Subscribe(pattern) => call("Subscribe").build(pattern),
            Self::Unsubscribe(pattern) => call("Unsubscribe").build(pattern),
            Self::Proxy(proxy, message) => {
                let path = format!("{}/{}", names::INTERNAL_PROXY_PATH, escape(proxy));
                let call = |method| {
                    Message::method_call(path.as_str(), method)
                        .interface(names::INTERNAL_PROXY_INTERFACE)
                        .with_flags(Flags::NO_REPLY_EXPECTED)
                };
                match message {
                    ProxyMessage::Ready(Ok(instance)) => call("Ready").build(&(*instance, "")),
                    ProxyMessage::Ready(Err(error)) => call("Ready").build(&(0_u64, error)),
                    ProxyMessage::TargetStopped(reason) => call("TargetStopped").build(reason),
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: BTreeSet<u32>,
    /// The last message about each proxy.
    proxies: BTreeMap<String, ProxyMessage>,
    /// Whether each pattern is wanted.
    patterns: HashMap<String, bool>,
    /// The keys of `patterns`, the oldest first.
    order: VecDeque<String>,
}

/// The requests that wait for one agent.
#[derive(Debug, Default)]
pub(super) struct Requests {
    waiting: Mutex<Waiting>,
    added: Notify,
}

impl Requests {
    /// Adds a request. A waiting one about the same job, pattern or proxy is replaced.
    pub(super) fn add(&self, request: Request) {
        let mut waiting = self.lock();
        match request {
            Request::CancelJob(_) if mutant!(CancellationsNotSent) => {}
            Request::CancelJob(id) => {
                waiting.jobs.insert(id);
            }
            Request::Subscribe(pattern) => waiting.set(pattern, true),
            Request::Unsubscribe(pattern) => waiting.set(pattern, false),
            Request::Proxy(proxy, message) => {
                // The agent gets no end of a proxy whose start was not answered.
                let message = match (waiting.proxies.get(&proxy), message) {
                    (Some(ProxyMessage::Ready(_)), ProxyMessage::TargetStopped(reason)) => {
                        ProxyMessage::Ready(Err(reason))
                    }
                    (_, message) => message,
                };
                waiting.proxies.insert(proxy, message);
            }
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Takes the next request. Cancellations come first, then messages about proxies.
    pub(super) fn take(&self) -> Option<Request> {
        let mut waiting = self.lock();
        if let Some(id) = waiting.jobs.pop_first() {
            return Some(Request::CancelJob(id));
        }
        if let Some((proxy, message)) = waiting.proxies.pop_first() {
            return Some(Request::Proxy(proxy, message));
        }
        let pattern = waiting.order.pop_front()?;
        let wanted = waiting.patterns.remove(&pattern)?;
        Some(if wanted { Request::Subscribe(pattern) } else { Request::Unsubscribe(pattern) })
    }

    /// Returns how many messages about proxies wait.
    pub(super) fn waiting_proxies(&self) -> usize {
        self.lock().proxies.len()
    }

    /// Waits until a request was added. Cancel-safe.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn set(&mut self, pattern: String, wanted: bool) {
        if self.patterns.insert(pattern.clone(), wanted).is_none() {
            self.order.push_back(pattern);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_request_about_a_pattern_waits_and_cancellations_come_first() {
        let requests = Requests::default();
        let text = str::to_owned;
        for _ in 0..3 {
            requests.add(Request::Subscribe(text("a")));
            requests.add(Request::Unsubscribe(text("b")));
            requests.add(Request::CancelJob(7));
            requests.add(Request::Unsubscribe(text("a")));
            requests.add(Request::Proxy(text("p"), ProxyMessage::Ready(Ok(1))));
        }
        requests.add(Request::Proxy(text("p"), ProxyMessage::TargetStopped(text("stopped"))));
        requests.add(Request::Subscribe(text("b")));
        let taken: Vec<Request> = std::iter::from_fn(|| requests.take()).collect();
        let expected = [
            Request::CancelJob(7),
            Request::Proxy(text("p"), ProxyMessage::Ready(Err(text("stopped")))),
            Request::Unsubscribe(text("a")),
            Request::Subscribe(text("b")),
        ];
        assert_eq!(taken, expected);
    }
}
