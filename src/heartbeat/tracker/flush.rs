//! Writes the beats that this tracker received to the store, in batches. Each batch is written
//! until the store has confirmed it.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::Deps;
use super::shared_state::SharedState;
use crate::heartbeat::core::record::Batch;
use crate::store::Error;
use crate::store::heartbeat::{Flushed, write_batches};
use crate::store::tree::Tree;

/// Batches in one write; the largest batches still fit into the store's limit.
const BATCHES_A_WRITE: usize = 12;

/// A batch that is being written.
#[derive(Debug)]
struct Unconfirmed {
    number: u64,
    batch: Batch,
    /// When the batch was made. On a clock that does not stop with the process: other replicas ran
    /// in the meantime.
    since: Instant,
}

impl Unconfirmed {
    /// The batch with its present age, since readers take it for as old as it says.
    fn to_bytes(&self) -> Vec<u8> {
        let waited = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.batch.later(waited).to_bytes()
    }
}

#[derive(Debug)]
pub(super) struct BatchWriter {
    /// The id of this tracker.
    id: String,
    /// The number of the next batch.
    number: u64,
    /// Batches that are being written, or were written without an answer.
    unconfirmed: Vec<Unconfirmed>,
    /// Generation of the newest beats in `unconfirmed`.
    unconfirmed_generation: u64,
    /// Batches of this tracker in the store, oldest first, each with when it was written.
    written: VecDeque<(u64, u64)>,
    /// How many of those are deleted together with writing `unconfirmed`. It stays the same when
    /// the write is repeated, since an earlier attempt may have been applied.
    clearing: Option<usize>,
    /// The judge's newest flush request, and the newest one that this tracker has answered.
    request: u64,
    answered: u64,
    flush_at: Instant,
}

impl BatchWriter {
    pub(super) fn new(id: String) -> Self {
        Self {
            id,
            number: 0,
            unconfirmed: Vec::new(),
            unconfirmed_generation: 0,
            written: VecDeque::new(),
            clearing: None,
            request: 0,
            answered: 0,
            flush_at: Instant::now(),
        }
    }

    /// When the next flush is due.
    pub(super) fn flush_at(&self) -> Instant {
        self.flush_at
    }

    pub(super) fn flush_request(&self) -> u64 {
        self.request
    }

    pub(super) fn set_flush_request(&mut self, request: u64) {
        self.request = request;
        if self.request < self.answered {
            // The store has lost newer requests, and the answers to them.
            self.answered = 0;
        }
    }

    pub(super) fn owes_answer(&self) -> bool {
        self.request > self.answered
    }

    /// The store has lost the answers of this tracker.
    pub(super) fn forget_answers(&mut self) {
        self.answered = 0;
    }

    /// The store has answered a request that began at `began`. That counts unless a batch waits for
    /// its confirmation.
    pub(super) fn store_answered(&self, shared: &SharedState, began: u64) {
        if self.unconfirmed.is_empty() {
            shared.store_reached_at(began);
        }
    }

    /// Writes the beats since the last flush: one write, whatever the number of components.
    pub(super) async fn flush<T: Tree, P>(&mut self, deps: &Deps<T, P>, is_final: bool) -> Result<(), Error> {
        self.write_unconfirmed(deps).await?;
        let began = deps.shared.awake_now();
        let (mut beats, generation) = deps.shared.take_unflushed();
        let (now, flush_ms) = {
            let inner = deps.shared.lock();
            (deps.shared.now(&inner), inner.params.flush_ms())
        };
        self.flush_at = Instant::now() + Duration::from_millis(flush_ms);
        let request = self.request;
        if beats.is_empty() && (is_final || request > self.answered) {
            beats.push(Vec::new());
        }
        let last = beats.len().saturating_sub(1);
        for (at, beats) in beats.into_iter().enumerate() {
            // Only the last batch answers the request, since the others are incomplete.
            let answers = if at == last { request } else { 0 };
            let batch = Batch { answers, is_final: is_final && at == last, at: now.wall, beats };
            self.unconfirmed.push(Unconfirmed { number: self.number, batch, since: Instant::now() });
            self.number += 1;
        }
        self.unconfirmed_generation = generation;
        let written = !self.unconfirmed.is_empty();
        self.write_unconfirmed(deps).await?;
        if written {
            self.store_answered(&deps.shared, began);
        }
        self.answered = self.answered.max(request);
        Ok(())
    }

    async fn write_unconfirmed<T: Tree, P>(&mut self, deps: &Deps<T, P>) -> Result<(), Error> {
        while !self.unconfirmed.is_empty() {
            let count = self.unconfirmed.len().min(BATCHES_A_WRITE);
            let (now, old) = self.old_batches(&deps.shared);
            let new =
                self.unconfirmed[..count].iter().map(|batch| (batch.number, batch.to_bytes())).collect();
            let spare: Vec<u64> = self.written.iter().take(old).map(|(number, _)| *number).collect();
            deps.shared.lock().stats.store_writes += 1;
            let acl = deps.roles.controllers();
            match write_batches(&deps.tree, &self.id, new, &spare, &acl).await? {
                Flushed::Written => {}
                // The judge considered this tracker gone.
                Flushed::AlreadyDeleted(gone) => {
                    self.written.retain(|(number, _)| *number != gone);
                    self.clearing = None;
                    continue;
                }
            }
            self.clearing = None;
            self.written.drain(..old);
            self.written.extend(self.unconfirmed.drain(..count).map(|batch| (batch.number, now)));
        }
        deps.shared.mark_stored(self.unconfirmed_generation);
        Ok(())
    }

    /// Now, and how many of the oldest batches are deleted with the next write.
    fn old_batches(&mut self, shared: &SharedState) -> (u64, usize) {
        let inner = shared.lock();
        let keep = (inner.params.warn_ms + 2 * inner.params.flush_ms()).max(20_000);
        let now = shared.now(&inner).awake;
        let is_old = |(_, at): &&(u64, u64)| at + keep < now;
        let old = self.written.iter().take(BATCHES_A_WRITE).filter(is_old).count();
        (now, *self.clearing.get_or_insert(old))
    }
}
