//! Answers the operator's requests to the provisioning controller: see `store::requests`.

use portcullis_provider::Machines;
use portcullis_provider::provider::{Inventory, OtherGroup};
use tokio::time::Instant;
use tracing::warn;

use super::{Provisioner, Task, store};
use crate::machine::retry::Pace;
use crate::provision::apply::{Stop, confirm};
use crate::provision::plan::{EMPTY_FOR, Records, is_clear};
use crate::store::lease::Lease;
use crate::store::requests::{self, Progress, Request};
use crate::store::tree::Tree;

impl<T: Tree, M: Machines> Provisioner<T, M> {
    /// Carries out the pending requests, and writes each answer to the node of its request.
    pub(super) async fn answer_requests(
        &mut self,
        records: &Records,
        inventory: &Inventory,
        lease: &mut Lease,
    ) -> Result<(), Stop> {
        let now = Instant::now();
        let all = requests::pending(&self.tree).await.map_err(store)?;
        if all.is_empty() {
            // All requests were answered or withdrawn, so no retry is due.
            self.retries.succeeded(Task::Request);
            self.clear_since = None;
        }
        for pending in all {
            let progress = match pending.request {
                Request::Clear => self.clear(is_clear(records, inventory), now),
                Request::AdoptGroups if self.retries.waiting(Task::Request, now) => continue,
                Request::AdoptGroups => {
                    confirm(&self.tree, lease).await?;
                    self.adopt_groups().await
                }
            };
            match pending.answer(&self.tree, lease, &progress).await {
                Ok(()) => {}
                Err(error) if lease.was_replaced(&error) => return Err(Stop::Replaced),
                // The operator has withdrawn the request.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(store(error)),
            }
        }
        Ok(())
    }

    fn clear(&mut self, is_clear: bool, now: Instant) -> Progress {
        if !is_clear {
            self.clear_since = None;
            self.retries.succeeded(Task::Request);
            return Progress::Waiting(self.failures.values().next().cloned());
        }
        if *self.clear_since.get_or_insert(now) + EMPTY_FOR <= now {
            self.clear_since = None;
            self.retries.succeeded(Task::Request);
            return Progress::Done(Vec::new());
        }
        self.try_later(Task::Request, Pace::BackOff);
        Progress::Waiting(None)
    }

    async fn adopt_groups(&mut self) -> Progress {
        match self.machines.adopt_groups().await {
            Ok(groups) => {
                self.retries.succeeded(Task::Request);
                // Launches that failed because of these groups are retried at once.
                self.retries.forget_all_but(|task| !matches!(task, Task::Steps(_)));
                Progress::Done(groups.iter().map(adopted_line).collect())
            }
            Err(error) => {
                warn!(%error, "groups not adopted");
                self.try_later(Task::Request, Pace::after(&error));
                Progress::Waiting(Some(error.to_string()))
            }
        }
    }
}

fn adopted_line(group: &OtherGroup) -> String {
    let OtherGroup { id, name, store, left } = group;
    match left {
        None => format!("{name} ({id}): adopted from store {store}"),
        Some(why) => format!("{name} ({id}): left with store {store}: {why}"),
    }
}
