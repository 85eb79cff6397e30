//! Sends changes to the state manager and to the webhook: at most one round of calls to each at a
//! time, repeated after a pause if it fails. `core::rounds` decides what is in a round,
//! `core::webhook_queue` what is sent to the webhook.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

use super::Judge;
use super::late::LateCalls;
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::hsm_batches::{Outcome, pause_ms};
use crate::heartbeat::core::record::NotifyStatus;
use crate::heartbeat::core::rounds::{CallSlot, Rejected};
use crate::heartbeat::notify::{self, LateCall, Receipt};
use crate::heartbeat::tracker::Deps;
use crate::heartbeat::tracker::shared_state::SharedState;
use crate::net::http::client::HttpClient;
use crate::store::Error;
use crate::store::tree::Tree;

/// The calls that are running, and what the store does not know of them yet.
#[derive(Debug)]
pub(super) struct Delivery {
    manager: CallRunner<(Outcome, Option<LateCall>)>,
    late: LateCalls,
    rejected: Rejected,
    /// Which components the calls of the running round have updated, call by call.
    receipts: Option<mpsc::Receiver<Receipt>>,
    /// Notified when the store has the results so far: the round then makes its next call.
    awaiting_write: Vec<oneshot::Sender<()>>,
    /// Yields the change that was sent, or `None` if it has to be sent again.
    webhook: CallRunner<Option<Change>>,
    /// The webhook's progress is to be written to the store.
    pub(super) progress_dirty: bool,
    /// The warning about a webhook without a secret was logged.
    warned_no_secret: bool,
}

impl Delivery {
    pub(super) fn new(now_ms: u64) -> Self {
        Self {
            manager: CallRunner::new(),
            late: LateCalls::default(),
            rejected: Rejected::new(now_ms),
            receipts: None,
            awaiting_write: Vec::new(),
            webhook: CallRunner::new(),
            progress_dirty: false,
            warned_no_secret: false,
        }
    }

    /// The store has the results of all calls so far.
    pub(super) fn results_stored(&mut self) {
        for stored in self.awaiting_write.drain(..) {
            // The round may have been aborted.
            let _ = stored.send(());
        }
    }
}

/// Runs one round of calls to one server at a time.
#[derive(Debug)]
struct CallRunner<R> {
    running: Option<JoinHandle<R>>,
    failures: u32,
    not_before: Instant,
}

impl<R> CallRunner<R> {
    fn new() -> Self {
        Self { running: None, failures: 0, not_before: Instant::now() }
    }

    fn slot(&self) -> CallSlot {
        match &self.running {
            Some(_) => CallSlot::Busy,
            None if Instant::now() < self.not_before => CallSlot::Paused,
            None => CallSlot::Free,
        }
    }

    /// Waits for the running round, forever if there is none. Cancel-safe.
    async fn done(&mut self) -> Option<R> {
        match &mut self.running {
            Some(running) => {
                let ended = running.await.ok();
                self.running = None;
                ended
            }
            None => std::future::pending().await,
        }
    }

    fn record_result(&mut self, failed: bool, random: u64, interval_ms: u64) {
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        if failed {
            let pause = pause_ms(self.failures, random, interval_ms);
            self.not_before = Instant::now() + Duration::from_millis(pause);
        }
    }
}

impl<R> Drop for CallRunner<R> {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

impl Judge {
    pub(super) fn start_calls<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>) {
        let (delivery, shared) = (&mut self.delivery, &deps.shared);
        let (params, round) = {
            let mut inner = shared.lock();
            let params = inner.params.clone();
            let wanted = !params.no_state_manager && !params.sm_url.is_empty();
            if wanted && delivery.rejected.moves_to(&params.sm_url) {
                inner.audit.retry_refused();
                delivery.manager.not_before = Instant::now();
            }
            let now = (shared.now(&inner), shared.monotonic_ms());
            let (slot, late) = (delivery.manager.slot(), &delivery.late);
            let is_waiting = |change: &Change| late.is_waiting(change);
            let round =
                wanted.then(|| delivery.rejected.next_round(slot, &inner.audit, now, is_waiting)).flatten();
            (params, round)
        };
        let limit = Duration::from_millis(params.sm_timeout_ms);
        if let Some(round) = round {
            let (sender, receipts) = mpsc::channel(1);
            let (post, shared) = (Arc::clone(&deps.post), Arc::clone(shared));
            let calls = notify::deliver(post, shared, round, params.sm_url, limit, sender);
            delivery.receipts = Some(receipts);
            delivery.manager.running = Some(tokio::spawn(calls));
        }
        self.start_webhook_call(deps, params.webhook_url, limit);
    }

    /// Makes one call at a time, the next one when the progress is stored: after a crash, at most
    /// one change is sent a second time.
    fn start_webhook_call<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        url: String,
        limit: Duration,
    ) {
        let (queue, delivery) = (&mut self.state.webhook_queue, &mut self.delivery);
        if url.is_empty() {
            return queue.clear();
        }
        let Some(secret) = deps.webhook_secret.clone() else {
            if !std::mem::replace(&mut delivery.warned_no_secret, true) {
                warn!("webhook without a signing secret; nothing is sent");
            }
            return;
        };
        if delivery.webhook.slot() != CallSlot::Free || delivery.progress_dirty {
            return;
        }
        let next = {
            let mut inner = deps.shared.lock();
            let (now, audit) = (deps.shared.now(&inner).awake, &inner.audit);
            let next = queue.next(|name| audit.is_damped(now, name), |name| audit.newest_change(name));
            inner.stats.webhook_collapsed += queue.take_collapsed();
            next
        };
        delivery.progress_dirty |= queue.progress() != &self.state.progress.0;
        if let Some(change) = next.filter(|_| !delivery.progress_dirty) {
            let (post, shared) = (Arc::clone(&deps.post), Arc::clone(&deps.shared));
            let call = notify::hook(post, shared, change, url, secret, limit);
            delivery.webhook.running = Some(tokio::spawn(async move { call.await.then_some(change) }));
        }
    }

    /// Waits until a call was accepted or a round is over, and applies the result. Cancel-safe.
    pub(in crate::heartbeat) async fn calls_done<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>) {
        let Delivery { receipts, manager, late, webhook, .. } = &mut self.delivery;
        let next_receipt = async {
            match receipts {
                Some(receipts) => receipts.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The receipts of a round come before its end.
            biased;
            receipt = next_receipt => match receipt {
                Some(receipt) => self.record_accepted(&deps.shared, receipt),
                None => self.delivery.receipts = None,
            },
            round = manager.done() => self.finish_round(deps, round),
            () = late.done() => {}
            change = webhook.done() => self.finish_webhook_call(deps, change.flatten()),
        }
    }

    /// Starts no call, but applies and stores the results of running calls.
    pub(in crate::heartbeat) async fn finish_calls<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
    ) -> Result<(), Error> {
        loop {
            // Both are tried: an earlier write of either may have been applied without an answer.
            let progress = self.write_progress(&deps.tree).await;
            self.write_changes(deps).await?;
            progress?;
            if self.delivery.manager.running.is_none() && self.delivery.webhook.running.is_none() {
                return Ok(());
            }
            self.calls_done(deps).await;
            // A round makes no further call while its last result is not reported as stored.
            self.delivery.awaiting_write.clear();
        }
    }

    /// The result is stored at once: until then, another judge would send the same states again.
    fn record_accepted(&mut self, shared: &SharedState, (accepted, stored): Receipt) {
        self.delivery.awaiting_write.push(stored);
        let mut inner = shared.lock();
        for (name, sequence) in &accepted {
            if self.delivery.late.accepted(name, *sequence) {
                inner.audit.set_notified(name, *sequence, NotifyStatus::Accepted);
            }
        }
    }

    /// A round that panicked or was aborted counts as failed.
    fn finish_round<T: Tree, P: HttpClient>(
        &mut self,
        deps: &Deps<T, P>,
        round: Option<(Outcome, Option<LateCall>)>,
    ) {
        let delivery = &mut self.delivery;
        let (outcome, late) = round.unwrap_or((Outcome { failed: true, ..Outcome::default() }, None));
        if let Some(call) = late {
            delivery.late.add(call);
        }
        if delivery.rejected.ended_retry() {
            return;
        }
        let mut inner = deps.shared.lock();
        delivery.manager.record_result(outcome.failed, (deps.random)(), inner.params.interval_ms);
        delivery.rejected.ended(outcome.all_unclear, deps.shared.monotonic_ms());
        inner.stats.manager_failures = delivery.manager.failures;
        for (name, sequence) in &outcome.refused {
            warn!(component = %name, "state manager rejects this component; trying again later");
            inner.audit.set_notified(name, *sequence, NotifyStatus::Refused);
        }
    }

    /// `sent` is the change that the webhook accepted; `None` if the call has to be made again.
    fn finish_webhook_call<T: Tree, P: HttpClient>(&mut self, deps: &Deps<T, P>, sent: Option<Change>) {
        let mut inner = deps.shared.lock();
        let webhook = &mut self.delivery.webhook;
        webhook.record_result(sent.is_none(), (deps.random)(), inner.params.interval_ms);
        inner.stats.webhook_failures = webhook.failures;
        if let Some(change) = sent {
            self.state.webhook_queue.mark_sent(&change);
            self.delivery.progress_dirty = true;
        }
    }
}
