//! Calls to the webhook: one signed document for each change, one call at a time.
//! `core::webhook_queue` decides what is sent.

use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::calls::CallRunner;
use super::hsm::{SEQUENCES, problem};
use super::tracker::Deps;
use super::tracker::shared_state::SharedState;
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::rounds::CallSlot;
use crate::heartbeat::core::token;
use crate::heartbeat::core::webhook_queue::{WebhookProgress, WebhookQueue};
use crate::net::http::client::{Call, CallError, HttpClient};

/// The signature of a webhook's document.
pub const SIGNATURE: &str = "x-portcullis-signature";

#[derive(Debug)]
pub(super) struct Webhook {
    /// Yields the change that was sent, or `None` if it has to be sent again.
    runner: CallRunner<Option<Change>>,
    /// The progress is to be written to the store.
    pub(super) progress_dirty: bool,
    /// The warning about a webhook without a secret was logged.
    warned_no_secret: bool,
}

impl Webhook {
    pub(super) fn new() -> Self {
        Self { runner: CallRunner::new(), progress_dirty: false, warned_no_secret: false }
    }

    /// Whether a call is running.
    pub(super) fn is_busy(&self) -> bool {
        self.runner.slot() == CallSlot::Busy
    }

    /// Makes one call at a time, the next one when the progress is stored: after a crash, at most
    /// one change is sent a second time.
    pub(super) fn start<T, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        queue: &mut WebhookQueue,
        stored: &WebhookProgress,
    ) {
        let mut inner = deps.shared.lock();
        let (url, limit_ms) = (inner.params.webhook_url.clone(), inner.params.sm_timeout_ms);
        if url.is_empty() {
            return queue.clear();
        }
        let Some(secret) = deps.webhook_secret.clone() else {
            if !std::mem::replace(&mut self.warned_no_secret, true) {
                warn!("webhook without a signing secret; nothing is sent");
            }
            return;
        };
        if self.runner.slot() != CallSlot::Free || self.progress_dirty {
            return;
        }
        let (now, audit) = (deps.shared.now(&inner).awake, &inner.audit);
        let next = queue.next(|name| audit.is_damped(now, name), |name| audit.newest_change(name));
        inner.stats.webhook_collapsed += queue.take_collapsed();
        drop(inner);
        self.progress_dirty |= queue.progress() != stored;
        if let Some(change) = next.filter(|_| !self.progress_dirty) {
            let (post, shared) = (Arc::clone(&deps.post), Arc::clone(&deps.shared));
            let call = send(post, shared, change, url, secret, Duration::from_millis(limit_ms));
            self.runner.start(async move { call.await.then_some(change) });
        }
    }

    /// Waits for the running call and applies its result. Cancel-safe.
    pub(super) async fn call_done<T, P>(&mut self, deps: &Deps<T, P>, queue: &mut WebhookQueue) {
        let sent = self.runner.done().await.flatten();
        let mut inner = deps.shared.lock();
        self.runner.record_result(sent.is_none(), (deps.random)(), inner.params.interval_ms);
        inner.stats.webhook_failures = self.runner.failures;
        if let Some(change) = sent {
            queue.mark_sent(&change);
            self.progress_dirty = true;
        }
    }
}

/// Sends one signed document for a change. Returns whether the webhook accepted it.
async fn send<P: HttpClient>(
    post: Arc<P>,
    shared: Arc<SharedState>,
    change: Change,
    url: String,
    secret: Arc<[u8]>,
    limit: Duration,
) -> bool {
    let body = change_body(&change);
    let signature = format!("sha256={}", token::signature(&secret, &body));
    let headers = vec![(SEQUENCES, change.sequence.to_string()), (SIGNATURE, signature)];
    let result = if shared.may_call() {
        post.call(Call { method: "POST", url, headers, body, limit, repeatable: false }).await
    } else {
        Err(CallError::Cancelled)
    };
    let accepted = matches!(result, Ok(200..=299));
    if !accepted {
        warn!(problem = problem(&result), component = %change.name, "webhook call failed");
    }
    accepted
}

/// A change as a document, for webhooks and readers of events.
pub fn change_body(change: &Change) -> Vec<u8> {
    let text =
        change.notification.map(|notification| (notification.state_and_flag(), notification.message()));
    let ((state, flag), message) = text.unwrap_or((("", ""), ""));
    serde_json::json!({
        "sequence": change.sequence,
        "component": change.name.as_str(),
        "health": change.state.as_str(),
        "state": state,
        "flag": flag,
        "message": message,
        "at": change.at,
        "flaps": change.flaps,
        "timestamp": change.stamp.text(),
    })
    .to_string()
    .into_bytes()
}
