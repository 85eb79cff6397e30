//! What a tracker heard, on its way to the store: in batches, each written until it is certain that it was.

use std::time::Duration;

use tokio::time::Instant;

use super::Tracker;
use crate::heartbeat::notify::Post;
use crate::heartbeat::record::Batch;
use crate::store::Error;
use crate::store::paths::{self, NodePath};
use crate::store::tree::{self, Tree, Write};

/// Batches in one write; the largest still leave it below the store's limit.
const BATCHES_A_WRITE: usize = 12;

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Unconfirmed {
    number: u64,
    batch: Batch,
    /// What it says is as of then. By the clock that never stands still: while this process was stopped, others listened.
    since: Instant,
}

impl Unconfirmed {
    /// As it is written now: who reads it takes it for as old as it says, however often it had to be tried.
    fn to_bytes(&self) -> Vec<u8> {
        let waited = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.batch.later(waited).to_bytes()
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    /// Writes what was heard since the last time: one write, whatever the number of components.
    pub(super) async fn flush(&mut self, farewell: bool) -> Result<(), Error> {
        self.write_unconfirmed().await?;
        let began = self.ears().watched_now();
        let (mut beats, generation) = self.ears().take_unflushed();
        let (now, flush_ms) = {
            let inner = self.ears().lock();
            (self.ears().now(&inner), inner.params.flush_ms())
        };
        self.flush_at = Instant::now() + Duration::from_millis(flush_ms);
        let answers = self.question;
        if beats.is_empty() && (farewell || answers > self.answered) {
            beats.push(Vec::new());
        }
        let last = beats.len().saturating_sub(1);
        for (at, beats) in beats.into_iter().enumerate() {
            // Only the last of several says that all was said.
            let answers = if at == last { answers } else { 0 };
            let batch = Batch { answers, farewell: farewell && at == last, at: now.wall, beats };
            self.unconfirmed.push(Unconfirmed { number: self.number, batch, since: Instant::now() });
            self.number += 1;
        }
        self.unconfirmed_generation = generation;
        let written = !self.unconfirmed.is_empty();
        self.write_unconfirmed().await?;
        if written {
            self.store_answered(began);
        }
        self.answered = self.answered.max(answers);
        Ok(())
    }

    async fn write_unconfirmed(&mut self) -> Result<(), Error> {
        while !self.unconfirmed.is_empty() {
            let count = self.unconfirmed.len().min(BATCHES_A_WRITE);
            let (now, keep) = {
                let inner = self.ears().lock();
                let keep = (inner.params.warn_ms + 2 * inner.params.flush_ms()).max(20_000);
                (self.ears().now(&inner).watched, keep)
            };
            let is_old = |(_, at): &&(u64, u64)| at + keep < now;
            let old = self.written.iter().take(BATCHES_A_WRITE).filter(is_old).count();
            let old = *self.clearing.get_or_insert(old);
            let mut writes = vec![Write::Check { path: paths::heartbeat_replica(&self.id), version: 0 }];
            for batch in &self.unconfirmed[..count] {
                let path = paths::heartbeat_batch(&self.id, batch.number);
                writes.push(Write::create(path, batch.to_bytes(), self.setting.roles.controllers()));
            }
            for (number, _) in self.written.iter().take(old) {
                writes.push(Write::Delete { path: paths::heartbeat_batch(&self.id, *number) });
            }
            self.ears().lock().condition.store_writes += 1;
            let first = paths::heartbeat_batch(&self.id, self.unconfirmed[0].number);
            match self.setting.tree.write(writes).await {
                Ok(()) => {}
                // The write before this one was applied, all of it, and its answer lost.
                Err(tree::Error::NodeExists(path)) if path == first => {}
                // Ours, and cleared away by a judge that took us for gone.
                Err(tree::Error::NoNode(path)) if self.was_written(&path) => {
                    self.written.retain(|(number, _)| paths::heartbeat_batch(&self.id, *number) != path);
                    self.clearing = None;
                    continue;
                }
                Err(err) => return Err(err.into()),
            }
            self.clearing = None;
            self.written.drain(..old);
            self.written.extend(self.unconfirmed.drain(..count).map(|batch| (batch.number, now)));
        }
        self.setting.ears.is_safe(self.unconfirmed_generation);
        Ok(())
    }

    fn was_written(&self, path: &NodePath) -> bool {
        self.written.iter().any(|(number, _)| paths::heartbeat_batch(&self.id, *number) == *path)
    }
}
