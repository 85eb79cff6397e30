//! A tracker's look at the store: what the operator set, what the judge wrote, and what the other trackers heard.

use std::collections::{BTreeSet, HashMap};

use tracing::{error, warn};

use super::{Followed, Tracker};
use crate::heartbeat::corner;
use crate::heartbeat::name::Name;
use crate::heartbeat::notify::Post;
use crate::heartbeat::record::{Batch, Beat, bucket_of};
use crate::heartbeat::table::Via;
use crate::store::Error;
use crate::store::paths::{self, HeartbeatNode};
use crate::store::tree::{Event, Tree};

/// The calendar time of each component's newest beat in batches that are older than this tracker,
/// and the tracker that received it.
type Newest = HashMap<Name, (u64, Via)>;

/// Where to look again.
#[derive(Debug, Default)]
pub(super) struct Noted {
    pub(super) everything: bool,
    pub(super) leader: bool,
    pub(super) params: bool,
    pub(super) maintenance: bool,
    pub(super) release: bool,
    pub(super) question: bool,
    pub(super) replicas: bool,
    pub(super) batches: BTreeSet<String>,
    pub(super) buckets: BTreeSet<u16>,
    pub(super) journal: bool,
}

impl Noted {
    pub(super) fn add(&mut self, event: &Event) {
        match event {
            Event::Everything => self.everything = true,
            Event::Changed(path) => match paths::heartbeat_node(path) {
                HeartbeatNode::Leader => self.leader = true,
                HeartbeatNode::Params => self.params = true,
                HeartbeatNode::Maintenance => self.maintenance = true,
                HeartbeatNode::Release => self.release = true,
                HeartbeatNode::Question => self.question = true,
                HeartbeatNode::Replica => self.replicas = true,
                HeartbeatNode::Batch(name) => drop(self.batches.insert(name)),
                HeartbeatNode::Bucket(number) => drop(self.buckets.insert(number)),
                HeartbeatNode::Page => self.journal = true,
                HeartbeatNode::Other => {}
            },
        }
    }
}

/// How old the beats of a batch are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Age {
    /// It was written just now.
    AsWritten,
    /// It was there before us, for how long only the calendar knows. What was judged since then stands.
    ByCalendar,
}

/// Says what is wrong with data that makes no sense, and goes on without it.
pub(in crate::heartbeat) fn readable<V>(read: Result<V, Error>) -> Result<Option<V>, Error> {
    match read {
        Err(problem @ Error::Corrupt { .. }) => {
            error!(%problem, "not to be read; what was known before counts");
            Ok(None)
        }
        read => read.map(Some),
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    /// Reads again what was noted. Batches come before replicas: a farewell is heard before its sender is missed.
    pub(super) async fn look(&mut self, noted: Noted) -> Result<(), Error> {
        // What cannot be read leaves what was known before: the beats of a fleet do not end with one bad znode.
        if noted.params {
            let _turn = self.ears().params_turn.lock().await;
            if let Some((params, _)) = readable(corner::params(self.tree()).await)? {
                self.ears().apply_params(params);
            }
        }
        if noted.maintenance
            && let Some((until, _)) = readable(corner::maintenance(self.tree()).await)?
        {
            let mut inner = self.ears().lock();
            let now = self.ears().now(&inner);
            inner.audit.set_maintenance(now, until);
        }
        if noted.question {
            let (question, _) = corner::number(self.tree(), &paths::heartbeat_question()).await?;
            self.question = readable(question)?.unwrap_or(self.question);
            if self.question < self.answered {
                // The store has lost newer questions, and our answers with them.
                self.answered = 0;
            }
        }
        if !noted.batches.is_empty() {
            self.follow(noted.batches.into_iter().collect(), Age::AsWritten).await?;
        }
        if noted.replicas {
            let there = corner::replicas(self.tree()).await?;
            self.miss(there);
        }
        if self.office.is_none() && !noted.buckets.is_empty() {
            let buckets = corner::buckets(self.tree(), noted.buckets.iter().copied()).await?;
            // Those that are gone are left out.
            self.ears().lock().condition.unreadable.retain(|bucket| !noted.buckets.contains(bucket));
            self.adopt(buckets, false);
        }
        self.look_at_unreadable(&noted.buckets).await?;
        if self.office.is_none() && noted.journal {
            self.read_journal().await?;
        }
        Ok(())
    }

    /// Adopts the judge's records; from a restored store, only those that are newer than memory.
    pub(in crate::heartbeat) fn adopt(&self, buckets: Vec<corner::Bucket>, went_back: bool) {
        for (number, records, _) in buckets {
            match records {
                Ok(records) => {
                    let mut inner = self.ears().lock();
                    let now = self.ears().now(&inner).watched;
                    inner.condition.unreadable.remove(&number);
                    if went_back {
                        inner.audit.adopt_older(number, &records, now);
                    } else {
                        inner.audit.adopt(number, &records, now);
                    }
                }
                Err(problem) => {
                    error!(%problem, "components cannot be read");
                    self.ears().lock().condition.unreadable.insert(number);
                }
            }
        }
    }

    /// Tells readers of events what is new in the journal. What it says is in its order, whatever znodes the components are
    /// in and whichever of them is read first: readers resume by number, so a lower one must not come after a higher one.
    pub(super) async fn read_journal(&mut self) -> Result<(), Error> {
        let pages = corner::journal(self.tree(), self.page.unwrap_or(0)).await?;
        // A reader who is behind is given what memory has of each component, up to the newest change that is shown: memory
        // must not be behind that.
        let behind = self.behind(&pages);
        if !behind.is_empty() {
            let buckets = corner::buckets(self.tree(), behind).await?;
            self.adopt(buckets, false);
        }
        self.show(&pages);
        Ok(())
    }

    /// Buckets that are older in memory than what the journal says of their components.
    fn behind(&self, pages: &[corner::Page]) -> BTreeSet<u16> {
        let inner = self.ears().lock();
        let changes = pages.iter().filter_map(|page| page.changes.as_deref().ok()).flatten();
        let newer = changes.filter(|change| {
            let known = inner.audit.newest_change(&change.name);
            change.sequence > inner.shown.last() && known.is_none_or(|known| known.sequence < change.sequence)
        });
        newer.map(|change| bucket_of(change.name.as_str())).collect()
    }

    /// `pages` are those that there are, at least from the one on that was read last.
    pub(in crate::heartbeat) fn show(&mut self, pages: &[corner::Page]) {
        let known = self.page.unwrap_or(0);
        let pages = &pages[pages.partition_point(|page| page.number < known)..];
        let (Some(first), Some(newest)) = (pages.first(), pages.last()) else { return };
        let mut whole = first.number == known;
        let mut changes = Vec::new();
        for page in pages {
            match &page.changes {
                Ok(page) => changes.extend_from_slice(page),
                Err(problem) => {
                    error!(%problem, "changes cannot be read");
                    whole = false;
                    changes.clear();
                }
            }
        }
        self.page = Some(newest.number);
        self.last_page = self.last_page.max(self.page);
        if whole {
            self.ears().publish(&changes);
        } else {
            self.ears().publish_anew(&changes);
        }
    }

    pub(super) async fn follow(&mut self, names: Vec<String>, age: Age) -> Result<(), Error> {
        let fresh: Vec<String> = names
            .into_iter()
            .filter(|name| match paths::heartbeat_batch_of(name) {
                Some((replica, number)) => {
                    replica != self.id
                        && self.followed.get(replica).is_none_or(|followed| number >= followed.next)
                }
                None => false,
            })
            .collect();
        let batches = corner::batches(self.tree(), &fresh).await?;
        let mut newest = Newest::new();
        for (name, batch) in fresh.iter().zip(batches) {
            let batch = readable(batch)?;
            if batch.is_none() {
                // Who beat in it must not suffer, whoever wrote it.
                self.restart_windows();
            }
            if let Some((replica, number)) = paths::heartbeat_batch_of(name) {
                self.learn(replica, number, batch.flatten(), age, &mut newest);
            }
        }
        let mut inner = self.ears().lock();
        for (name, (_, via)) in newest {
            inner.audit.last_beat_through(&name, via);
        }
        Ok(())
    }

    fn learn(&mut self, replica: &str, number: u64, batch: Option<Batch>, age: Age, newest: &mut Newest) {
        let known = self.followed.contains_key(replica);
        if !known {
            self.last_via += 1;
        }
        let followed = self.followed.entry(replica.to_owned()).or_default();
        if !known {
            followed.via = self.last_via;
        }
        let missed = known && (number > followed.next || batch.is_none());
        followed.next = followed.next.max(number + 1);
        let mut inner = self.setting.ears.lock();
        let now = self.setting.ears.now(&inner);
        if missed {
            // It was gone before we had read it: whoever beat in it must not suffer.
            inner.audit.restart_windows(now.watched);
        }
        let Some(batch) = batch else { return };
        followed.answers = followed.answers.max(batch.answers);
        followed.farewell = batch.farewell;
        let since = match age {
            Age::AsWritten => 0,
            Age::ByCalendar => now.wall.saturating_sub(batch.at),
        };
        for beat in &batch.beats {
            if age == Age::ByCalendar {
                let seen = (batch.at.saturating_sub(beat.age_ms), followed.via);
                newest.entry(beat.name).and_modify(|known| *known = (*known).max(seen)).or_insert(seen);
            }
            let beat = Beat { age_ms: beat.age_ms + since, ..*beat };
            let outdated = age == Age::ByCalendar
                && inner.audit.changed_since(&beat.name, now.wall - beat.age_ms.min(now.wall));
            if !outdated && inner.audit.beat_elsewhere(now.watched, &beat, followed.via).is_err() {
                inner.condition.refused_beats += 1;
            }
        }
    }

    /// Who is gone without a farewell may have heard what nobody else knows.
    pub(super) fn miss(&mut self, there: BTreeSet<String>) {
        let gone: Vec<String> =
            self.replicas.iter().filter(|id| **id != self.id && !there.contains(*id)).cloned().collect();
        for id in gone {
            let in_order = self.followed.get(&id).is_some_and(|followed| followed.farewell);
            if !in_order {
                warn!(replica = %id, "a tracker was lost; windows start again");
                self.restart_windows();
            }
        }
        self.replicas = there;
        self.look_for_lost();
    }

    /// Finds the trackers that may have lost only their connection to the store and still accept
    /// beats: the store has batches of them, the newest is not a final one, and their sessions are
    /// gone. The batches stay in the store while deaths are held for them, so that a tracker that
    /// starts meanwhile gets the same result.
    fn look_for_lost(&mut self) {
        let mut inner = self.setting.ears.lock();
        let (now, hold_ms) = (self.setting.ears.now(&inner).watched, inner.params.mass_hold_ms);
        for (id, followed) in &mut self.followed {
            let lost = !followed.farewell && !self.replicas.contains(id);
            if lost == std::mem::replace(&mut followed.lost, lost) {
                continue;
            }
            if !lost {
                inner.audit.find(followed.via);
                continue;
            }
            let components = inner.audit.lose(followed.via, now + hold_ms);
            if components > 0 {
                let hold_s = hold_ms / 1000;
                warn!(replica = %id, components, hold_s, "tracker unreachable; deaths of its components held");
            }
        }
    }

    /// The newest question that anybody is known to have answered.
    pub(in crate::heartbeat) fn newest_answered(&self) -> u64 {
        self.followed.values().map(|followed| followed.answers).max().unwrap_or(0).max(self.question)
    }

    pub(in crate::heartbeat) fn has_answered(&self, replica: &str, question: u64) -> bool {
        self.followed.get(replica).is_some_and(|followed| followed.answers >= question)
    }

    /// Batches of trackers that are no more, for the judge to clear away.
    pub(in crate::heartbeat) async fn orphans(&self) -> Result<Vec<String>, Error> {
        let mut names = corner::batch_names(self.tree()).await?;
        let inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        let spare = |followed: &Followed, number| {
            number < followed.next && !(followed.lost && inner.audit.is_lost(now, followed.via))
        };
        names.retain(|name| match paths::heartbeat_batch_of(name) {
            Some((replica, number)) => {
                !self.replicas.contains(replica)
                    && self.followed.get(replica).is_some_and(|followed| spare(followed, number))
            }
            None => false,
        });
        Ok(names)
    }
}
