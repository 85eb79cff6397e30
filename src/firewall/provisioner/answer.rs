//! Answers what the operator asked of the controller that provisions: see `store::requests`.

use portcullis_provider::Machines;
use portcullis_provider::provider::{Inventory, OtherGroup};
use tokio::time::Instant;
use tracing::warn;

use super::{Provisioner, Task, store};
use crate::firewall::enact::{Stop, confirm};
use crate::firewall::provision::{CLEAR_FOR, Records, is_clear};
use crate::firewall::retry::Pace;
use crate::store::election::Leadership;
use crate::store::paths;
use crate::store::requests::{self, Progress, Request};
use crate::store::tree::{self, Tree};

impl<T: Tree, M: Machines> Provisioner<T, M> {
    /// Carries out what the operator asked for, and writes the answer where it was asked.
    pub(super) async fn answer_requests(
        &mut self,
        records: &Records,
        inventory: &Inventory,
        lead: &mut Leadership,
    ) -> Result<(), Stop> {
        let now = Instant::now();
        let all = requests::pending(&self.tree).await.map_err(store)?;
        if all.is_empty() {
            // Answered or withdrawn: no look is due for it any more.
            self.retries.succeeded(Task::Request);
            self.clear_since = None;
        }
        for pending in all {
            let progress = match pending.request {
                Request::Clear => self.clear(is_clear(records, inventory), now),
                Request::AdoptGroups if self.retries.waiting(Task::Request, now) => continue,
                Request::AdoptGroups => {
                    confirm(&self.tree, lead).await?;
                    self.adopt_groups().await
                }
            };
            let Some(write) = pending.write(&progress) else { continue };
            match self.tree.write(vec![lead.fence(), write]).await {
                Ok(()) => {}
                Err(tree::Error::BadVersion(path)) if path == paths::epoch() => return Err(Stop::Replaced),
                // The operator has withdrawn it.
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
        if *self.clear_since.get_or_insert(now) + CLEAR_FOR <= now {
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
                // Launches that failed because of these groups need not wait any longer.
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
