//! How the judge sees to it that everybody is told: one round of calls to each server at a time, begun again until it came to a
//! good end. What is in a round is decided in `pending`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

use crate::heartbeat::audit::Change;
use crate::heartbeat::notify::{self, Post, Receipt};
use crate::heartbeat::pending::{Delivery, Outcome, pause_ms};
use crate::heartbeat::record::Told;
use crate::heartbeat::tracker::Tracker;
use crate::store::Error;
use crate::store::tree::Tree;

/// Changes that one round of calls is about, at most.
const MAX_ROUND: usize = 50_000;

/// Rounds of calls to one server, one at a time.
#[derive(Debug)]
pub(super) struct Calls<R> {
    running: Option<JoinHandle<R>>,
    failures: u32,
    not_before: Instant,
}

impl<R> Calls<R> {
    pub(super) fn new() -> Self {
        Self { running: None, failures: 0, not_before: Instant::now() }
    }

    fn is_free(&self) -> bool {
        self.running.is_none() && Instant::now() >= self.not_before
    }

    /// Waits for the round that runs; for ever if none does. Cancel-safe.
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

    fn rate(&mut self, failed: bool, random: u64) {
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        if failed {
            self.not_before = Instant::now() + Duration::from_millis(pause_ms(self.failures, random));
        }
    }
}

impl<R> Drop for Calls<R> {
    fn drop(&mut self) {
        if let Some(running) = &self.running {
            running.abort();
        }
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    pub(super) fn start_calls(&mut self) {
        let Some(office) = self.office.as_mut() else { return };
        let ears = &self.setting.ears;
        let (params, pending) = {
            let inner = ears.lock();
            let params = inner.params.clone();
            let wanted = !params.no_state_manager && !params.sm_url.is_empty() && office.manager.is_free();
            let now = ears.now(&inner);
            let pending = if wanted { inner.audit.pending(now, MAX_ROUND) } else { Vec::new() };
            (params, pending)
        };
        let limit = Duration::from_millis(params.sm_timeout_ms);
        if !pending.is_empty() {
            let (post, ears) = (Arc::clone(&self.setting.post), Arc::clone(ears));
            let (sender, told) = mpsc::channel(1);
            let round = notify::deliver(post, ears, Delivery::of(&pending), params.sm_url, limit, sender);
            office.told = Some(told);
            office.manager.running = Some(tokio::spawn(round));
        }
        self.start_hook(params.webhook_url, limit);
    }

    /// One call at a time, the next when it is written down how far the webhook got: after a crash it hears at most that
    /// one again.
    fn start_hook(&mut self, url: String, limit: Duration) {
        let Some(office) = self.office.as_mut() else { return };
        if url.is_empty() {
            return office.hooks.clear();
        }
        let Some(secret) = self.setting.webhook_secret.clone() else {
            if !std::mem::replace(&mut office.mute, true) {
                warn!("there is a webhook and no secret to sign with: nothing is sent to it");
            }
            return;
        };
        if !office.webhook.is_free() || office.note_hooked {
            return;
        }
        let next = {
            let inner = self.setting.ears.lock();
            let (now, audit) = (self.setting.ears.now(&inner).watched, &inner.audit);
            office.hooks.next(|name| audit.is_restless(now, name), |name| audit.newest_change(name))
        };
        office.note_hooked |= office.hooks.note() != &office.noted.0;
        if let Some(change) = next.filter(|_| !office.note_hooked) {
            let (post, ears) = (Arc::clone(&self.setting.post), Arc::clone(&self.setting.ears));
            let call = notify::hook(post, ears, change, url, secret, limit);
            office.webhook.running = Some(tokio::spawn(async move { call.await.then_some(change) }));
        }
    }

    /// Waits until a call was taken or a round of calls is over, and takes in what came of it. Cancel-safe.
    pub(in crate::heartbeat) async fn calls_done(&mut self) {
        let Some(office) = self.office.as_mut() else { return std::future::pending().await };
        let next_told = async {
            match &mut office.told {
                Some(told) => told.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // What was told comes before the end of telling.
            biased;
            told = next_told => match told {
                Some(told) => self.was_told(told),
                None => office.told = None,
            },
            outcome = office.manager.done() => self.told(outcome),
            change = office.webhook.done() => self.was_hooked(change.flatten()),
        }
    }

    /// Begins no call, but takes in and writes down what comes of those that are on their way, and of those before.
    pub(in crate::heartbeat) async fn finish_calls(&mut self) -> Result<(), Error> {
        loop {
            // Each is tried: the other may have been written by a write that was given up.
            let noted = self.note_hooked().await;
            self.write_buckets().await?;
            noted?;
            let Some(office) = self.office.as_mut() else { return Ok(()) };
            if office.manager.running.is_none() && office.webhook.running.is_none() {
                return Ok(());
            }
            self.calls_done().await;
            if let Some(office) = self.office.as_mut() {
                // A round whose call is not said to be written down makes no other.
                office.to_write_down.clear();
            }
        }
    }

    /// Is written down at once: until then, whoever judges next would tell it again.
    fn was_told(&mut self, (told, written): Receipt) {
        let Some(office) = self.office.as_mut() else { return };
        office.to_write_down.push(written);
        let mut inner = self.setting.ears.lock();
        for (name, sequence) in &told {
            inner.audit.tell(name, *sequence, Told::Yes);
        }
    }

    /// A round that came to no end is one that failed.
    fn told(&mut self, outcome: Option<Outcome>) {
        let Some(office) = self.office.as_mut() else { return };
        let outcome = outcome.unwrap_or(Outcome { failed: true, ..Outcome::default() });
        office.manager.rate(outcome.failed, (self.setting.random)());
        let mut inner = self.setting.ears.lock();
        inner.condition.manager_failures = office.manager.failures;
        for (name, sequence) in &outcome.refused {
            warn!(component = %name, "the state manager refuses this component; set aside");
            inner.audit.tell(name, *sequence, Told::Refused);
        }
    }

    /// None if the call has to be made again.
    fn was_hooked(&mut self, done: Option<Change>) {
        let Some(office) = self.office.as_mut() else { return };
        office.webhook.rate(done.is_none(), (self.setting.random)());
        self.setting.ears.lock().condition.webhook_failures = office.webhook.failures;
        if let Some(change) = done {
            office.hooks.told(&change);
            office.note_hooked = true;
        }
    }
}
