//! The other trackers, as this one follows them: their batches, their answers to flush requests,
//! and whether they are reachable.

use std::collections::{BTreeSet, HashMap};

use tracing::warn;

use super::follow::unless_corrupt;
use super::shared_state::SharedState;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::record::{Batch, Beat};
use crate::heartbeat::core::table::{HERE, TrackerIndex};
use crate::heartbeat::store;
use crate::store::Error;
use crate::store::paths;
use crate::store::tree::Tree;

/// The wall-clock time of each component's newest beat in batches that are older than this tracker,
/// and the tracker that received it.
type Newest = HashMap<Name, (u64, TrackerIndex)>;

/// How old the beats of a batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchAge {
    JustWritten,
    /// The batch is older than this session: only its wall-clock time tells how old. States that
    /// were decided since then stay.
    FromWallClock,
}

#[derive(Debug)]
pub(in crate::heartbeat) struct Replicas {
    own_id: String,
    /// Trackers with a session, this one included.
    present: BTreeSet<String>,
    followed: HashMap<String, FollowedTracker>,
    last_index: TrackerIndex,
}

#[derive(Debug, Clone, Copy, Default)]
struct FollowedTracker {
    /// How components refer to it.
    index: TrackerIndex,
    /// It lost its session without a final batch, and deaths of its components are held.
    unreachable: bool,
    /// The number of its next batch.
    next: u64,
    /// The newest flush request that it has answered.
    answers: u64,
    /// Its newest batch is its final one.
    is_final: bool,
}

impl Replicas {
    pub(super) fn new(own_id: String) -> Self {
        Self { own_id, present: BTreeSet::new(), followed: HashMap::new(), last_index: HERE }
    }

    /// Other trackers that may have received beats.
    pub(in crate::heartbeat) fn others(&self) -> impl Iterator<Item = &String> {
        self.present.iter().filter(|id| **id != self.own_id)
    }

    pub(in crate::heartbeat) fn is_alone(&self) -> bool {
        self.others().next().is_none()
    }

    /// Whether this tracker has a session and is the only one.
    pub(super) fn is_only_own(&self) -> bool {
        self.present.iter().eq([&self.own_id])
    }

    /// The newest flush request that any other replica is known to have answered.
    pub(super) fn newest_answered(&self) -> u64 {
        self.followed.values().map(|followed| followed.answers).max().unwrap_or(0)
    }

    pub(in crate::heartbeat) fn has_answered(&self, replica: &str, request: u64) -> bool {
        self.followed.get(replica).is_some_and(|followed| followed.answers >= request)
    }

    /// Reads batches by name and applies their beats.
    pub(super) async fn read_batches<T: Tree>(
        &mut self,
        tree: &T,
        shared: &SharedState,
        names: Vec<String>,
        age: BatchAge,
    ) -> Result<(), Error> {
        let is_new = |name: &String| {
            paths::heartbeat_batch_of(name).is_some_and(|(replica, number)| {
                let followed = self.followed.get(replica);
                replica != self.own_id && followed.is_none_or(|followed| number >= followed.next)
            })
        };
        let fresh: Vec<String> = names.into_iter().filter(is_new).collect();
        let batches = store::batches(tree, &fresh).await?;
        let mut newest = Newest::new();
        for (name, batch) in fresh.iter().zip(batches) {
            let batch = unless_corrupt(batch)?;
            if batch.is_none() {
                // Components with a beat in it must not be called silent.
                shared.restart_windows();
            }
            if let Some((replica, number)) = paths::heartbeat_batch_of(name) {
                self.apply_batch(shared, (replica, number), batch.flatten(), age, &mut newest);
            }
        }
        let mut inner = shared.lock();
        for (name, (_, index)) in newest {
            inner.audit.set_last_tracker(&name, index);
        }
        Ok(())
    }

    /// `batch` is `None` if it was deleted before it could be read.
    fn apply_batch(
        &mut self,
        shared: &SharedState,
        (replica, number): (&str, u64),
        batch: Option<Batch>,
        age: BatchAge,
        newest: &mut Newest,
    ) {
        let known = self.followed.contains_key(replica);
        if !known {
            self.last_index += 1;
        }
        let followed = self.followed.entry(replica.to_owned()).or_default();
        if !known {
            followed.index = self.last_index;
        }
        let missed = known && (number > followed.next || batch.is_none());
        followed.next = followed.next.max(number + 1);
        let mut inner = shared.lock();
        let now = shared.now(&inner);
        if missed {
            // Components with a beat in the missing batch must not be called silent.
            inner.audit.restart_windows(now.awake);
        }
        let Some(batch) = batch else { return };
        followed.answers = followed.answers.max(batch.answers);
        followed.is_final = batch.is_final;
        let since = match age {
            BatchAge::JustWritten => 0,
            BatchAge::FromWallClock => now.wall.saturating_sub(batch.at),
        };
        for beat in &batch.beats {
            if age == BatchAge::FromWallClock {
                let seen = (batch.at.saturating_sub(beat.age_ms), followed.index);
                newest.entry(beat.name).and_modify(|known| *known = (*known).max(seen)).or_insert(seen);
            }
            let beat = Beat { age_ms: beat.age_ms + since, ..*beat };
            let outdated = age == BatchAge::FromWallClock
                && inner.audit.changed_since(&beat.name, now.wall - beat.age_ms.min(now.wall));
            if !outdated && inner.audit.beat_from_replica(now.awake, &beat, followed.index).is_err() {
                inner.stats.refused_beats += 1;
            }
        }
    }

    /// `present` are the trackers with a session. A tracker that is gone without a final batch may
    /// have received beats that no other one knows of.
    pub(super) fn update(&mut self, shared: &SharedState, present: BTreeSet<String>) {
        for id in self.others().filter(|id| !present.contains(*id)) {
            if !self.followed.get(id).is_some_and(|followed| followed.is_final) {
                warn!(replica = %id, "tracker lost; windows start again");
                shared.restart_windows();
            }
        }
        self.present = present;
        self.find_unreachable(shared);
    }

    /// Finds the trackers that may have lost only their connection to the store and still accept
    /// beats: the store has batches of them, the newest is not a final one, and their sessions are
    /// gone. The batches stay in the store while deaths are held for them, so that a tracker that
    /// starts meanwhile gets the same result.
    fn find_unreachable(&mut self, shared: &SharedState) {
        let mut inner = shared.lock();
        let (now, hold_ms) = (shared.now(&inner).awake, inner.params.mass_hold_ms);
        for (id, followed) in &mut self.followed {
            let unreachable = !followed.is_final && !self.present.contains(id);
            if unreachable == std::mem::replace(&mut followed.unreachable, unreachable) {
                continue;
            }
            if !unreachable {
                inner.audit.mark_reachable(followed.index);
                continue;
            }
            let components = inner.audit.mark_unreachable(followed.index, now + hold_ms);
            if components > 0 {
                let hold_s = hold_ms / 1000;
                warn!(
                    replica = %id, components, hold_s,
                    "tracker unreachable; deaths of its components held"
                );
            }
        }
    }

    /// Batches of trackers that are gone and for which no deaths are held.
    pub(in crate::heartbeat) async fn orphans<T: Tree>(
        &self,
        tree: &T,
        shared: &SharedState,
    ) -> Result<Vec<String>, Error> {
        let mut names = store::batch_names(tree).await?;
        let inner = shared.lock();
        let now = shared.now(&inner).awake;
        let spare = |followed: &FollowedTracker, number| {
            let held = followed.unreachable && inner.audit.is_unreachable(now, followed.index);
            number < followed.next && !held
        };
        names.retain(|name| {
            paths::heartbeat_batch_of(name).is_some_and(|(replica, number)| {
                let followed = self.followed.get(replica);
                !self.present.contains(replica) && followed.is_some_and(|followed| spare(followed, number))
            })
        });
        Ok(names)
    }
}
