//! CallRunner to those who want to know: the state manager and a webhook. A shell: it carries a
//! round of calls out and says what came of them; what to call whom about, and when to try again,
//! is decided in `pending` and `tracker`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::warn;

use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::hsm_batches::{Answer, Outcome, Round, body};
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::token;
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::net::http::client::{Call, CallError, HttpClient};

/// The numbers of the changes that a call is about. The same number is the same change, in whichever
/// call and from whichever judge it comes.
pub const SEQUENCES: &str = "x-portcullis-sequences";

/// The signature of a webhook's document.
pub const SIGNATURE: &str = "x-portcullis-signature";

/// A call that is not answered in time is waited for this many times as long, since it may be
/// applied late.
const LATE_LIMITS: u32 = 10;

/// A call in a task of its own, so that its end can be awaited after its timeout. Dropping it
/// aborts the call.
#[derive(Debug)]
pub struct Running(JoinHandle<Result<u16, CallError>>);

impl Running {
    fn start<P: HttpClient>(post: &Arc<P>, call: Call) -> Self {
        let post = Arc::clone(post);
        Self(tokio::spawn(async move { post.call(call).await }))
    }

    /// The answer, if there is one in time.
    async fn answer(&mut self, limit: Duration) -> Result<u16, CallError> {
        match timeout(limit, &mut self.0).await {
            Ok(Ok(result)) => result,
            // It panicked, or the process is ending.
            Ok(Err(_)) => Err(CallError::Cancelled),
            Err(_) => Err(CallError::TooSlow),
        }
    }

    /// Waits until the call succeeds or fails.
    pub async fn ended(&mut self) {
        // A late answer is ignored.
        let _ = (&mut self.0).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A call that was not answered in time, and may be applied later.
#[derive(Debug)]
pub struct LateCall {
    pub names: Vec<Name>,
    pub call: Running,
}

/// Who was told by a call, and how to say that it is written down.
pub type Receipt = (Vec<(Name, u64)>, oneshot::Sender<()>);

/// Carries out a round of calls to the state manager at `base`, and says after each who was told by
/// it. The next is made when that is recorded: for the next judge the result of one call at most is
/// unknown. A call that is not answered in time ends the round and is returned, since it may still
/// be applied.
pub async fn deliver<P: HttpClient>(
    post: Arc<P>,
    shared: Arc<SharedState>,
    mut delivery: Round,
    base: String,
    limit: Duration,
    receipts: mpsc::Sender<Receipt>,
) -> (Outcome, Option<LateCall>) {
    let url = format!("{base}/State/Components/BulkStateData");
    let mut late = None;
    while let Some(call) = delivery.next_call() {
        // Who is no longer the judge tells nobody anything.
        let result = if shared.may_call() {
            shared.lock().stats.calls += 1;
            let out = Call {
                method: "PATCH",
                url: url.clone(),
                headers: vec![(SEQUENCES, call.sequences())],
                body: body(&call),
                limit: limit * LATE_LIMITS,
                // A second copy might be applied after a later call.
                repeatable: false,
            };
            let mut running = Running::start(&post, out);
            let result = running.answer(limit).await;
            if matches!(result, Err(CallError::TooSlow)) {
                let names = call.entries.iter().map(|(name, _)| *name).collect();
                late = Some(LateCall { names, call: running });
            }
            result
        } else {
            Err(CallError::Cancelled)
        };
        let answer = match result {
            Ok(status) => Answer::of(status),
            Err(_) => Answer::Failed,
        };
        if answer != Answer::Accepted {
            let (problem, names) = (problem(&result), call.entries.len());
            warn!(problem, notification = call.notification.as_str(), names, "state manager not told");
        }
        delivery.answered(call, answer);
        if answer == Answer::Accepted {
            let (written, is_written) = oneshot::channel();
            // Nobody is there to write it down if either fails.
            if receipts.send((delivery.take_accepted(), written)).await.is_err() || is_written.await.is_err()
            {
                break;
            }
        }
    }
    (delivery.finish(), late)
}

fn problem(result: &Result<u16, CallError>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |status| format!("it answers {status}"))
}

/// Sends one signed document for a change. Whether it was taken; whatever else is said, the change waits.
pub async fn hook<P: HttpClient>(
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
    let taken = matches!(result, Ok(200..=299));
    if !taken {
        warn!(problem = problem(&result), component = %change.name, "webhook not told");
    }
    taken
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
