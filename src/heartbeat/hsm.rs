//! Calls to the state manager: at most one round at a time, repeated after a pause if it fails.
//! `core::rounds` decides what is in a round, and `core::hsm_batches` what is in a call.

mod late;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::warn;

use self::late::LateCalls;
use super::calls::CallRunner;
use super::tracker::Deps;
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::hsm_batches::{Answer, Outcome, Round, body};
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::NotifyStatus;
use crate::heartbeat::core::rounds::{CallSlot, Rejected};
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::net::http::client::{Call, CallError, HttpClient};

/// The numbers of the changes that a call is about. The same number is the same change, whichever
/// judge sends it, and in whichever call.
pub const SEQUENCES: &str = "x-portcullis-sequences";

/// A call that is not answered in time is waited for this many times as long, since it may be
/// applied late.
const LATE_LIMITS: u32 = 10;

/// The running calls, and their results that are not stored yet.
#[derive(Debug)]
pub(super) struct StateManager {
    runner: CallRunner<(Outcome, Option<LateCall>)>,
    late: LateCalls,
    rejected: Rejected,
    /// Which components the calls of the running round have updated, call by call.
    receipts: Option<mpsc::Receiver<Receipt>>,
    /// Notified when the store has the results so far: the round then makes its next call.
    awaiting_write: Vec<oneshot::Sender<()>>,
}

impl StateManager {
    pub(super) fn new(now_ms: u64) -> Self {
        Self {
            runner: CallRunner::new(),
            late: LateCalls::default(),
            rejected: Rejected::new(now_ms),
            receipts: None,
            awaiting_write: Vec::new(),
        }
    }

    /// Whether a round is running.
    pub(super) fn is_busy(&self) -> bool {
        self.runner.slot() == CallSlot::Busy
    }

    /// Starts a round, if one is due.
    pub(super) fn start<T, P: HttpClient>(&mut self, deps: &Deps<T, P>) {
        let shared = &deps.shared;
        let mut inner = shared.lock();
        let params = inner.params.clone();
        if params.no_state_manager || params.sm_url.is_empty() {
            return;
        }
        if self.rejected.moves_to(&params.sm_url) {
            inner.audit.retry_refused();
            self.runner.retry_now();
        }
        let now = (shared.now(&inner), shared.monotonic_ms());
        let is_waiting = |change: &Change| self.late.is_waiting(change);
        let round = self.rejected.next_round(self.runner.slot(), &inner.audit, now, is_waiting);
        drop(inner);
        if let Some(round) = round {
            let (sender, receipts) = mpsc::channel(1);
            let (post, shared) = (Arc::clone(&deps.post), Arc::clone(shared));
            let limit = Duration::from_millis(params.sm_timeout_ms);
            self.receipts = Some(receipts);
            self.runner.start(deliver(post, shared, round, params.sm_url, limit, sender));
        }
    }

    /// Waits until a call was accepted or a round is over, and applies the result. Cancel-safe.
    pub(super) async fn call_done<T, P: HttpClient>(&mut self, deps: &Deps<T, P>) {
        let next_receipt = async {
            match &mut self.receipts {
                Some(receipts) => receipts.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The receipts of a round come before its end.
            biased;
            receipt = next_receipt => match receipt {
                Some(receipt) => self.record_accepted(&deps.shared, receipt),
                None => self.receipts = None,
            },
            round = self.runner.done() => self.finish_round(deps, round),
            () = self.late.done() => {}
        }
    }

    /// The store has the results of all calls so far.
    pub(super) fn results_stored(&mut self) {
        for stored in self.awaiting_write.drain(..) {
            // The round may have been aborted.
            let _ = stored.send(());
        }
    }

    /// Ends the round after the running call: its result is not reported as stored.
    pub(super) fn make_no_further_call(&mut self) {
        self.awaiting_write.clear();
    }

    /// The result is stored at once: until then, another judge would send the same states again.
    fn record_accepted(&mut self, shared: &SharedState, (accepted, stored): Receipt) {
        self.awaiting_write.push(stored);
        let mut inner = shared.lock();
        for (name, sequence) in &accepted {
            if self.late.accepted(name, *sequence) {
                inner.audit.set_notified(name, *sequence, NotifyStatus::Accepted);
            }
        }
    }

    /// A round that panicked or was aborted counts as failed.
    fn finish_round<T, P>(&mut self, deps: &Deps<T, P>, round: Option<(Outcome, Option<LateCall>)>) {
        let (outcome, late) = round.unwrap_or((Outcome { failed: true, ..Outcome::default() }, None));
        if let Some(call) = late {
            self.late.add(call);
        }
        if self.rejected.ended_retry() {
            return;
        }
        let mut inner = deps.shared.lock();
        self.runner.record_result(outcome.failed, (deps.random)(), inner.params.interval_ms);
        self.rejected.ended(outcome.all_unclear, deps.shared.monotonic_ms());
        inner.stats.manager_failures = self.runner.failures;
        for (name, sequence) in &outcome.refused {
            warn!(component = %name, "state manager rejects this component; trying again later");
            inner.audit.set_notified(name, *sequence, NotifyStatus::Refused);
        }
    }
}

/// A call in a task of its own, so that its end can be awaited after its timeout. Dropping it
/// aborts the call.
#[derive(Debug)]
struct Running(JoinHandle<Result<u16, CallError>>);

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
    async fn ended(&mut self) {
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
struct LateCall {
    names: Vec<Name>,
    call: Running,
}

/// The changes that a call was accepted for; the sender reports that this is stored.
type Receipt = (Vec<(Name, u64)>, oneshot::Sender<()>);

/// Makes the calls of a round to the state manager at `base`, and sends a receipt after each. The
/// next call is made when the receipt is stored: for the next judge, the result of at most one call
/// is unknown. A call that is not answered in time ends the round and is returned, since it may
/// still be applied.
async fn deliver<P: HttpClient>(
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
        // Only the judge makes calls.
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
        let answer = result.as_ref().map_or(Answer::Failed, |status| Answer::of(*status));
        if answer != Answer::Accepted {
            let (problem, names) = (problem(&result), call.entries.len());
            warn!(problem, notification = call.notification.as_str(), names, "state manager call failed");
        }
        delivery.answered(call, answer);
        if answer == Answer::Accepted {
            let (written, is_written) = oneshot::channel();
            // Either fails if the judge is gone.
            if receipts.send((delivery.take_accepted(), written)).await.is_err() || is_written.await.is_err()
            {
                break;
            }
        }
    }
    (delivery.finish(), late)
}

pub(super) fn problem(result: &Result<u16, CallError>) -> String {
    result.as_ref().map_or_else(ToString::to_string, |status| format!("it answers {status}"))
}
