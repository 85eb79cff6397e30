//! The judge's part of a tracker: asks everybody what they have heard before it calls anybody silent, writes each change to
//! the store before anybody is told of it, and sees to it that everybody is told. Every write names the judge's epoch.

mod late;
mod telling;
mod tidying;
mod unreadable;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{error, info, warn};

use self::late::LateCalls;
use self::telling::{Aside, Calls};
use self::tidying::TIDY;
use super::audit::{Change, Sequence};
use super::corner;
use super::ears::Ears;
use super::guard::Course;
use super::journal::{Draft, Journal};
use super::notify::{LateCall, Post, Receipt};
use super::pending::Outcome;
use super::record::{Hold, bucket_of};
use super::tracker::Tracker;
use super::tracker::look::readable;
use super::webhook::{Note, Queue};
use crate::store::Error;
use crate::store::acl::Acl;
use crate::store::election::{LEASE, Leadership, Seat};
use crate::store::paths;
use crate::store::tree::{self, Tree, Write};

/// Bytes of buckets in one write, with room for the rest of it.
const WRITE_BYTES: usize = 800_000;

#[derive(Debug)]
pub(super) struct Office {
    lead: Leadership,
    sequence: Sequence,
    /// The number of the newest question and the version of its znode.
    question: (u64, i32),
    /// A question that not all have answered: since when it is asked.
    asked_at: Option<u64>,
    /// Up to here, everything that anybody heard is known.
    covered: u64,
    renew_at: Instant,
    tidy_at: Instant,
    /// Versions of the buckets in the store.
    versions: HashMap<u16, i32>,
    /// Buckets that cannot be read: not overwritten, whatever happens to their components.
    frozen: BTreeSet<u16>,
    /// Judged, and not in the journal yet, in order.
    unpublished: Vec<Change>,
    journal: Journal,
    manager: Calls<(Outcome, Option<LateCall>)>,
    late: LateCalls,
    aside: Aside,
    /// Who was told by the round that runs, call by call.
    told: Option<mpsc::Receiver<Receipt>>,
    /// Who wait until it is written down who was told.
    to_write_down: Vec<oneshot::Sender<()>>,
    /// The change that was told, if it need not be told again.
    webhook: Calls<Option<Change>>,
    hooks: Queue,
    /// How far the webhook got as the store has it, and the version of its znode.
    noted: (Note, i32),
    /// The store is to know how far the webhook got.
    note_hooked: bool,
    /// It was said that there is no secret for the webhook.
    mute: bool,
    /// What the store has of a mass outage, if that can be read, and the version of its znode.
    alarm: (Option<Option<Hold>>, i32),
    /// The operator's newest word about it that was obeyed.
    release: i32,
    /// Numbers of an outage that are a little different are not written before.
    alarm_at: Instant,
    orphans: HashMap<String, Instant>,
}

impl Office {
    /// Gives the lock back. It ends with the session in any case. Deaths that are held stay so: nobody declares them, and
    /// whoever judges next goes on with it.
    pub(super) async fn resign<T: Tree>(&self, tree: &T) {
        let unlock = Write::DeleteIfVersion { path: Seat::heartbeat().leader, version: 0 };
        // Whoever comes next waits a little longer if this fails.
        let _ = tree.write(vec![self.lead.fence(), unlock]).await;
    }
}

impl<T: Tree, P: Post> Tracker<T, P> {
    /// Becomes the judge: everything is read again, as the judge before left it.
    pub(super) async fn take_office(&mut self, lead: Leadership, alone: bool) -> Result<(), Error> {
        let buckets = corner::all_buckets(self.tree()).await?;
        let (question, version) = corner::number(self.tree(), &paths::heartbeat_question()).await?;
        // The next question must have a higher number than all that were answered, or old answers
        // would count for it. A restored store has a lower number.
        let question = (readable(question)?.unwrap_or(0).max(self.newest_answered()), version);
        let (note, version) = corner::webhook_note(self.tree()).await?;
        // Rather told twice than not at all.
        let noted = (readable(note)?.unwrap_or_default(), version);
        let pages = corner::journal(self.tree(), 0).await?;
        let release = corner::releases(self.tree()).await?;
        let (alarm, version) = corner::alarm(self.tree()).await?;
        let alarm = (readable(alarm)?, version);
        let versions: HashMap<u16, i32> =
            buckets.iter().map(|(number, _, version)| (*number, *version)).collect();
        let frozen: BTreeSet<u16> =
            buckets.iter().filter(|(_, records, _)| records.is_err()).map(|(number, ..)| *number).collect();
        // An empty journal has no changes; an unreadable journal may have all of them.
        let journalled: BTreeMap<u64, Change> = changes_in(&pages);
        let unknown = if pages.is_empty() { 0 } else { u64::MAX };
        let last = journalled.last_key_value().map_or(unknown, |(last, _)| *last);
        let went_back = self.went_back(Some(last));
        self.adopt(buckets, went_back);
        self.show(&pages);
        let mut inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        inner.audit.take_office(now, course_of(alarm.0.flatten()));
        if matches!(alarm.0, Some(Some(Hold::Held { release: obeyed, .. })) if obeyed != release) {
            // Said while nobody judged, or to one who did not live to obey.
            inner.audit.release(now);
        }
        inner.condition.judging = true;
        // Judges never delete a bucket, so the store has lost one that is missing.
        let rewritten = inner.audit.write_again(|bucket| went_back || !versions.contains_key(&bucket));
        // A judge that died may have left changes that are not in the journal.
        let unpublished = inner.audit.changes_since(last);
        // What is no longer there of the journal is made good by the newest change of each component.
        let mut missed: BTreeMap<u64, Change> = inner
            .audit
            .changes_since(noted.0.done)
            .into_iter()
            .map(|change| (change.sequence, change))
            .collect();
        if !went_back {
            // A restored store may contain changes here that newer ones have replaced.
            missed.extend(journalled);
        }
        let hooks =
            Queue::new(noted.0.clone(), missed.into_values().filter(|change| change.sequence <= last));
        drop(inner);
        let journal = Journal::of(&pages);
        let journal = if went_back { journal.after_loss(self.last_page) } else { journal };
        if rewritten > 0 {
            warn!(components = rewritten, "records missing from the store; writing them again");
        }
        info!(epoch = lead.epoch(), alone, unreadable = frozen.len(), "took office");
        self.ears().lend(LEASE);
        self.office = Some(Office {
            sequence: Sequence::of_epoch(lead.epoch()),
            lead,
            question,
            asked_at: None,
            covered: 0,
            renew_at: Instant::now() + LEASE / 3,
            tidy_at: Instant::now() + TIDY,
            versions,
            frozen,
            unpublished,
            journal,
            manager: Calls::new(),
            late: LateCalls::default(),
            aside: Aside::new(),
            told: None,
            to_write_down: Vec::new(),
            webhook: Calls::new(),
            hooks,
            noted,
            note_hooked: false,
            mute: false,
            alarm,
            release,
            alarm_at: Instant::now(),
            orphans: HashMap::new(),
        });
        Ok(())
    }

    /// One look of the judge.
    pub(super) async fn preside(&mut self, released: bool) -> Result<(), Error> {
        if !self.renew().await? {
            self.step_down();
            return Ok(());
        }
        if released {
            self.release().await?;
        }
        match self.rule().await {
            Err(Error::Tree(tree::Error::BadVersion(path))) if path == paths::heartbeat_epoch() => {
                warn!("another judges");
                self.step_down();
                Ok(())
            }
            done => done,
        }
    }

    /// Obeys an operator's word that is new.
    async fn release(&mut self) -> Result<(), Error> {
        let release = corner::releases(self.tree()).await?;
        let Some(office) = self.office.as_mut().filter(|office| office.release != release) else {
            return Ok(());
        };
        office.release = release;
        let mut inner = self.setting.ears.lock();
        let now = self.setting.ears.now(&inner).watched;
        inner.audit.release(now);
        Ok(())
    }

    async fn renew(&mut self) -> Result<bool, Error> {
        let Some(office) = self.office.as_mut() else { return Ok(false) };
        if Instant::now() < office.renew_at {
            return Ok(true);
        }
        let (asked, began) = (Instant::now(), self.setting.ears.watched_now());
        if !office.lead.confirm(&self.setting.tree).await? {
            return Ok(false);
        }
        office.renew_at = Instant::now() + LEASE / 3;
        self.setting.ears.lend(LEASE.saturating_sub(asked.elapsed()));
        self.store_answered(began);
        Ok(true)
    }

    async fn rule(&mut self) -> Result<(), Error> {
        self.judge();
        self.write_buckets().await?;
        self.write_alarm().await?;
        if self.question_is_needed() {
            self.ask().await?;
        }
        self.note_hooked().await?;
        self.start_calls();
        let tidy = self.office.as_ref().is_some_and(|office| Instant::now() >= office.tidy_at);
        if tidy { self.tidy().await } else { Ok(()) }
    }

    /// Others that may have heard what we have not.
    fn others(&self) -> impl Iterator<Item = &String> {
        self.replicas.iter().filter(|id| **id != self.id)
    }

    fn judge(&mut self) {
        let alone = self.others().next().is_none();
        let answered = |question: u64| self.others().all(|id| self.has_answered(id, question));
        let all_answered = self.office.as_ref().is_some_and(|office| answered(office.question.0));
        let Some(office) = self.office.as_mut() else { return };
        if let Some(at) = office.asked_at.take_if(|_| all_answered) {
            office.covered = office.covered.max(at);
        }
        let mut inner = self.setting.ears.lock();
        let now = self.setting.ears.now(&inner);
        if alone {
            office.covered = now.watched;
        }
        let verdict = inner.audit.judge(now, office.covered, &mut office.sequence);
        inner.condition.alarm = inner.audit.alarm();
        if let Some((silent, alive)) = inner.condition.alarm.filter(|_| verdict.raised) {
            error!(silent, alive, "mass outage: deaths are held");
        }
        // What cannot be written must not be told: whoever judges next would not know of it.
        let writable = |change: &Change| !office.frozen.contains(&bucket_of(change.name.as_str()));
        office.unpublished.extend(verdict.changes.into_iter().filter(writable));
    }

    fn question_is_needed(&self) -> bool {
        let Some(office) = self.office.as_ref().filter(|office| office.asked_at.is_none()) else {
            return false;
        };
        let inner = self.ears().lock();
        let now = self.ears().now(&inner).watched;
        office.covered < now && inner.audit.has_due(now) && self.others().next().is_some()
    }

    /// Nobody is called silent before everybody has said what they heard up to now.
    async fn ask(&mut self) -> Result<(), Error> {
        let now = {
            let inner = self.ears().lock();
            self.ears().now(&inner).watched
        };
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let (number, version) = office.question;
        let data = (number + 1).to_string().into_bytes();
        let path = paths::heartbeat_question();
        self.setting.ears.lock().condition.store_writes += 1;
        let writes = vec![office.lead.fence(), Write::SetIfVersion { path, data, version }];
        self.setting.tree.write(writes).await?;
        office.question = (number + 1, version + 1);
        office.asked_at = Some(now);
        Ok(())
    }

    /// Writes every bucket with a change in it, then the journal, then tells who listens.
    async fn write_buckets(&mut self) -> Result<(), Error> {
        let Some(office) = self.office.as_mut() else { return Ok(()) };
        let mut rest: VecDeque<Piece> = {
            let inner = self.setting.ears.lock();
            let dirty = inner.audit.dirty().iter().filter(|number| !office.frozen.contains(number));
            dirty.map(|number| Piece::Bucket(*number, Vec::new())).collect()
        };
        rest.extend(office.journal.with(&office.unpublished).into_iter().map(Piece::Page));
        let acl = self.setting.roles.controllers();
        while !rest.is_empty() {
            let mut writes = vec![office.lead.fence()];
            let mut written = Vec::new();
            let mut bytes = 0;
            while let Some(mut piece) = rest.pop_front() {
                piece.fill(&self.setting.ears);
                bytes += piece.bytes() + 300;
                if bytes > WRITE_BYTES && !written.is_empty() {
                    rest.push_front(piece);
                    break;
                }
                writes.push(piece.write(&office.versions, &acl));
                written.push(piece);
            }
            self.setting.ears.lock().condition.store_writes += 1;
            self.setting.tree.write(writes).await?;
            let mut inner = self.setting.ears.lock();
            for piece in written {
                match piece {
                    Piece::Bucket(number, _) => {
                        office.versions.entry(number).and_modify(|version| *version += 1).or_insert(0);
                        inner.audit.written(number);
                    }
                    Piece::Page(draft) => office.journal.written(draft),
                }
            }
        }
        let changes = std::mem::take(&mut office.unpublished);
        self.setting.ears.publish(&changes);
        self.page = office.journal.newest().or(self.page);
        self.last_page = self.last_page.max(self.page);
        office.hooks.push(&changes);
        self.setting.ears.lock().condition.webhook_collapsed += office.hooks.take_collapsed();
        for written in office.to_write_down.drain(..) {
            // Who waited may have been ended.
            let _ = written.send(());
        }
        Ok(())
    }
}

/// Something that a judgement writes.
enum Piece {
    Bucket(u16, Vec<u8>),
    Page(Draft),
}

impl Piece {
    /// One bucket at a time, so that beats need not wait for all of them. Nobody but the judge changes what is in it.
    fn fill(&mut self, ears: &Ears) {
        if let Self::Bucket(number, data) = self
            && data.is_empty()
        {
            let inner = ears.lock();
            let now = ears.now(&inner);
            *data = inner.audit.bucket_bytes(*number, now);
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Bucket(_, data) => data.len(),
            Self::Page(draft) => draft.data.len(),
        }
    }

    fn write(&self, versions: &HashMap<u16, i32>, acl: &Acl) -> Write {
        let (path, data, version) = match self {
            Self::Bucket(number, data) => {
                (paths::heartbeat_bucket(*number), data, versions.get(number).copied())
            }
            Self::Page(draft) => (paths::heartbeat_page(draft.number), &draft.data, draft.version),
        };
        match version {
            Some(version) => Write::SetIfVersion { path, data: data.clone(), version },
            None => Write::create(path, data.clone(), acl.clone()),
        }
    }
}

fn course_of(hold: Option<Hold>) -> Course {
    match hold {
        None => Course::Quiet,
        Some(Hold::Held { for_ms, .. }) => Course::Holding { for_ms },
        Some(Hold::Passing) => Course::Passing,
    }
}

/// What the journal says, by number.
fn changes_in(pages: &[corner::Page]) -> BTreeMap<u64, Change> {
    let changes = pages.iter().flat_map(|page| page.changes.as_deref().unwrap_or_default());
    changes.map(|change| (change.sequence, *change)).collect()
}
