//! Runs one round of calls to one server at a time, in a task of its own, with a pause after a
//! failure. `hsm` and `webhook` decide which calls a round has.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::heartbeat::core::hsm_batches::pause_ms;
use crate::heartbeat::core::rounds::CallSlot;

#[derive(Debug)]
pub(super) struct CallRunner<R> {
    running: Option<JoinHandle<R>>,
    pub(super) failures: u32,
    not_before: Instant,
}

impl<R: Send + 'static> CallRunner<R> {
    pub(super) fn new() -> Self {
        Self { running: None, failures: 0, not_before: Instant::now() }
    }

    pub(super) fn slot(&self) -> CallSlot {
        match &self.running {
            Some(_) => CallSlot::Busy,
            None if Instant::now() < self.not_before => CallSlot::Paused,
            None => CallSlot::Free,
        }
    }

    pub(super) fn start(&mut self, round: impl Future<Output = R> + Send + 'static) {
        self.running = Some(tokio::spawn(round));
    }

    /// Ends the pause.
    pub(super) fn retry_now(&mut self) {
        self.not_before = Instant::now();
    }

    /// Waits for the running round, forever if there is none. `None` if it panicked or was aborted.
    /// Cancel-safe.
    pub(super) async fn done(&mut self) -> Option<R> {
        match &mut self.running {
            Some(running) => {
                let ended = running.await.ok();
                self.running = None;
                ended
            }
            None => std::future::pending().await,
        }
    }

    pub(super) fn record_result(&mut self, failed: bool, random: u64, interval_ms: u64) {
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
