//! The requests without a reply that wait to be sent to one agent: subscriptions and cancellations.
//! Only the last request about a pattern is kept, so their number is limited by that of the
//! patterns. A new connection of an agent begins with an empty queue.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use zbus::Message;
use zbus::message::Flags;

use crate::fleet::dbus::names;
use crate::mutant;

/// A request to an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    CancelJob(u32),
    Subscribe(String),
    Unsubscribe(String),
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
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: BTreeSet<u32>,
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
    /// Adds a request. A waiting one about the same job or pattern is replaced.
    pub(super) fn add(&self, request: Request) {
        let mut waiting = self.lock();
        match request {
            Request::CancelJob(_) if mutant!(CancellationsNotSent) => {}
            Request::CancelJob(id) => {
                waiting.jobs.insert(id);
            }
            Request::Subscribe(pattern) => waiting.set(pattern, true),
            Request::Unsubscribe(pattern) => waiting.set(pattern, false),
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Takes the next request. Cancellations come first.
    pub(super) fn take(&self) -> Option<Request> {
        let mut waiting = self.lock();
        if let Some(id) = waiting.jobs.pop_first() {
            return Some(Request::CancelJob(id));
        }
        let pattern = waiting.order.pop_front()?;
        let wanted = waiting.patterns.remove(&pattern)?;
        Some(if wanted { Request::Subscribe(pattern) } else { Request::Unsubscribe(pattern) })
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
        }
        requests.add(Request::Subscribe(text("b")));
        let taken: Vec<Request> = std::iter::from_fn(|| requests.take()).collect();
        let expected =
            [Request::CancelJob(7), Request::Unsubscribe(text("a")), Request::Subscribe(text("b"))];
        assert_eq!(taken, expected);
    }
}
