//! How the judge sees to it that everybody is told: one round of calls to each server at a time, begun again until it came to a
//! good end. What is in a round is decided in `pending`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::warn;

use super::Office;
use crate::heartbeat::audit::{Audit, Change, Now};
use crate::heartbeat::notify::{self, LateCall, Post, Receipt};
use crate::heartbeat::pending::{Delivery, Outcome, pause_ms};
use crate::heartbeat::record::Told;
use crate::heartbeat::tracker::Tracker;
use crate::store::Error;
use crate::store::tree::Tree;

/// Changes that one round of calls is about, at most.
const MAX_ROUND: usize = 50_000;

/// Components that were refused are tried again this often,
const AGAIN_EVERY: Duration = Duration::from_secs(600);

/// so many of them in one round, each alone if need be, with a pause for others between two rounds. What is new waits for a
/// round that runs, so it is a short one.
const MAX_AGAIN: usize = 10;
const AGAIN_PAUSE: Duration = Duration::from_secs(6);

/// How long a change waits at most for a round that may have failed because of others alone.
const DOUBT: Duration = Duration::from_secs(1);

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

    fn rate(&mut self, failed: bool, random: u64, interval_ms: u64) {
        self.failures = if failed { self.failures.saturating_add(1) } else { 0 };
        if failed {
            let pause = pause_ms(self.failures, random, interval_ms);
            self.not_before = Instant::now() + Duration::from_millis(pause);
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

/// Who is not in the next round of calls to the state manager, and when they are in one again.
#[derive(Debug)]
pub(super) struct Aside {
    /// The address that the rounds go to. At another one, nobody was refused.
    url: Option<String>,
    /// When those that were refused are tried again, and from which on.
    again_at: Instant,
    again_from: u32,
    /// The round that runs is about them.
    again: bool,
    /// The newest change of the round that runs, or ran last.
    newest: u64,
    /// That round ended in doubt about its components. Until then newer ones wait, too.
    doubt_until: Option<Instant>,
}

impl Aside {
    pub(super) fn new() -> Self {
        let again_at = Instant::now() + AGAIN_EVERY;
        Self { url: None, again_at, again_from: 0, again: false, newest: 0, doubt_until: None }
    }

    /// Whether the rounds went elsewhere before.
    fn moves_to(&mut self, url: &str) -> bool {
        if self.url.as_deref() == Some(url) {
            return false;
        }
        self.url.replace(url.to_owned()).is_some()
    }

    /// Some of those that were refused, if it is time.
    fn try_again(&mut self, audit: &Audit) -> Option<Delivery> {
        let (some, more) = audit.refused(self.again_from, MAX_AGAIN);
        self.again_from = more.unwrap_or(0);
        self.again_at = Instant::now() + if more.is_some() { AGAIN_PAUSE } else { AGAIN_EVERY };
        self.again = !some.is_empty();
        self.again.then(|| Delivery::again(&some))
    }
}

impl Office {
    /// The next round of calls to the state manager, if there is one to begin now.
    fn next_round(&mut self, audit: &Audit, now: Now) -> Option<Delivery> {
        let (free, aside) = (self.manager.is_free(), &mut self.aside);
        // One component that it does not know, alone in its round, holds up nobody else for long.
        let instead = aside.doubt_until.is_some_and(|until| Instant::now() >= until);
        if self.manager.running.is_some() || !free && !instead {
            return None;
        }
        let overdue = Instant::now().checked_duration_since(aside.again_at);
        if free && overdue.is_some_and(|overdue| overdue >= AGAIN_PAUSE) {
            return aside.try_again(audit);
        }
        let mut pending = audit.pending(now, MAX_ROUND);
        pending.retain(|change| !self.late.is_waiting(change));
        match pending.last() {
            Some(newest) if free || newest.sequence > aside.newest => {
                (aside.newest, aside.again, aside.doubt_until) = (newest.sequence, false, None);
                Some(Delivery::of(&pending))
            }
            None if free && overdue.is_some() => aside.try_again(audit),
            _ => None,
        }
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    pub(super) fn start_calls(&mut self) {
        let Some(office) = self.office.as_mut() else { return };
        let ears = &self.setting.ears;
        let (params, round) = {
            let mut inner = ears.lock();
            let params = inner.params.clone();
            let wanted = !params.no_state_manager && !params.sm_url.is_empty();
            if wanted && office.aside.moves_to(&params.sm_url) {
                inner.audit.retry_refused();
                office.manager.not_before = Instant::now();
            }
            let now = ears.now(&inner);
            let round = if wanted { office.next_round(&inner.audit, now) } else { None };
            (params, round)
        };
        let limit = Duration::from_millis(params.sm_timeout_ms);
        if let Some(delivery) = round {
            let (post, ears) = (Arc::clone(&self.setting.post), Arc::clone(ears));
            let (sender, told) = mpsc::channel(1);
            let round = notify::deliver(post, ears, delivery, params.sm_url, limit, sender);
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
        self.setting.ears.lock().condition.webhook_collapsed += office.hooks.take_collapsed();
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
            round = office.manager.done() => self.told(round),
            () = office.late.done() => {}
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
            if office.late.accepted(name, *sequence) {
                inner.audit.tell(name, *sequence, Told::Yes);
            }
        }
    }

    /// A round that came to no end is one that failed.
    fn told(&mut self, round: Option<(Outcome, Option<LateCall>)>) {
        let Some(office) = self.office.as_mut() else { return };
        let (outcome, late) = round.unwrap_or((Outcome { failed: true, ..Outcome::default() }, None));
        if let Some(call) = late {
            office.late.add(call);
        }
        if std::mem::take(&mut office.aside.again) {
            // Those that are still refused are where they were, and so is the state manager.
            return;
        }
        let mut inner = self.setting.ears.lock();
        office.manager.rate(outcome.failed, (self.setting.random)(), inner.params.interval_ms);
        office.aside.doubt_until = outcome.in_doubt.then(|| Instant::now() + DOUBT);
        inner.condition.manager_failures = office.manager.failures;
        for (name, sequence) in &outcome.refused {
            warn!(component = %name, "the state manager refuses this component; set aside");
            inner.audit.tell(name, *sequence, Told::Refused);
        }
    }

    /// None if the call has to be made again.
    fn was_hooked(&mut self, done: Option<Change>) {
        let Some(office) = self.office.as_mut() else { return };
        let mut inner = self.setting.ears.lock();
        office.webhook.rate(done.is_none(), (self.setting.random)(), inner.params.interval_ms);
        inner.condition.webhook_failures = office.webhook.failures;
        if let Some(change) = done {
            office.hooks.told(&change);
            office.note_hooked = true;
        }
    }
}
