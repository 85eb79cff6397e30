//! The tracker's door: requests to the memory and back. What may be said and how it is answered is in `request`; limits of
//! size, number and time are the door's own, in `runtime::http`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

use super::audit::Change;
use super::believed::{Believed, VainLooks};
use super::certificate;
use super::corner::{self, ParamsError};
use super::ears::{Ears, Standing};
use super::name::Name;
use super::notify::change_body;
use super::params::InvalidParams;
use super::report;
use super::request::{self, LARGE_BODIES, Refusal, Said, Wish};
use super::sent::Sent;
use super::token::Claim;
use crate::model::MachineId;
use crate::runtime::http::{Glance, Handler, Limits, NoPlace, Place, Places, Reply, Request};
use crate::store::paths;
use crate::store::records::parse_credentials;
use crate::store::tree::{self, Tree};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// Readers of events at the same time, and from one address.
const MAX_READERS: usize = 256;
const MAX_READERS_OF_ONE: usize = 64;

/// Changes that a reader is given at once.
const AT_ONCE: usize = 64;

/// Documents that wait for a slow reader of events.
const READER_BUFFER: usize = 64;

/// A reader that nothing is said to hears at least this.
const STILL_HERE: Duration = Duration::from_secs(15);

/// Credentials that were looked up are believed this long, and longer while the store is away.
const BELIEVED: Duration = Duration::from_secs(60);

/// A token that does not fit what was looked up this long ago is wrong without another look: a machine's new credentials
/// count that much later, and guessing costs no reads.
const DISBELIEVED: Duration = Duration::from_secs(2);

/// Looks for machines that are not known yet, at the same time; others wait for their turn.
const LOOKS_AT_ONCE: usize = 64;

/// What the door of a tracker allows: a connection for every component that keeps one.
pub fn limits() -> Limits {
    Limits {
        connections: 32_768,
        large_bodies: LARGE_BODIES,
        head_time: Duration::from_secs(120),
        ..Limits::default()
    }
}

/// Requests that are accepted without credentials.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// Beats for every component that is not a machine.
    pub beats: bool,
    /// Changes of the parameters.
    pub params: bool,
}

pub struct Api<T> {
    ears: Arc<Ears>,
    /// None until a store was found.
    store: watch::Receiver<Option<T>>,
    access: Access,
    believed: Mutex<Believed>,
    vain: Mutex<VainLooks>,
    turns: Semaphore,
    readers: Arc<Places>,
}

impl<T> std::fmt::Debug for Api<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("ears", &self.ears).field("access", &self.access).finish_non_exhaustive()
    }
}

impl<T: Tree + Clone + 'static> Api<T> {
    pub fn new(ears: Arc<Ears>, store: watch::Receiver<Option<T>>, access: Access) -> Self {
        let readers = Places::new(MAX_READERS, MAX_READERS_OF_ONE);
        let (vain, turns) = (Mutex::new(VainLooks::new(Instant::now())), Semaphore::new(LOOKS_AT_ONCE));
        Self { ears, store, access, believed: Mutex::default(), vain, turns, readers }
    }

    async fn reply(&self, request: &Request) -> Reply {
        let said = Said {
            method: request.method(),
            path: request.path(),
            query: request.query(),
            last_event: request.header("last-event-id"),
            body: request.body.as_deref().map_err(|problem| problem.status()),
        };
        let done = match request::read(said) {
            Ok(wish) => self.grant(wish, request).await,
            Err(refusal) => Err(refusal),
        };
        done.unwrap_or_else(|refusal| refuse(&refusal))
    }

    async fn grant(&self, wish: Wish<'_>, request: &Request) -> Result<Reply, Refusal> {
        match wish {
            Wish::Beats(beats) => self.beats(&beats, request).await,
            Wish::State(name) => {
                let heartbeating = self.ears.heartbeating(std::iter::once(name))[0];
                Ok(Reply::new(200, JSON, request::state_body(name, heartbeating)))
            }
            Wish::States(names) => {
                let heartbeating = self.ears.heartbeating(names.iter().map(AsRef::as_ref));
                let states = names.iter().map(AsRef::as_ref).zip(heartbeating);
                Ok(Reply::new(200, JSON, request::states_body(states)))
            }
            Wish::Params => {
                let params = self.ears.lock().params.to_json();
                Ok(Reply::new(200, JSON, Value::Object(params).to_string()))
            }
            Wish::SetParams(change) => self.set_params(&change, request).await,
            Wish::Health => {
                let inner = self.ears.lock();
                let body = report::health(&inner.condition, &inner.counts(), &inner.params);
                Ok(Reply::new(200, JSON, body))
            }
            Wish::Liveness => Ok(Reply::empty(204)),
            Wish::Readiness => {
                if !self.ears.lock().condition.loaded {
                    return Err(Refusal::new(503, "The store was not found yet", request.path()));
                }
                if self.ears.standing() != Standing::Ready {
                    return Err(Refusal::new(503, "The store is out of reach", request.path()));
                }
                Ok(Reply::empty(204))
            }
            Wish::Events(since) => self.events(since, request),
            Wish::Metrics => {
                let inner = self.ears.lock();
                let text = report::metrics(&inner.condition, &inner.counts());
                Ok(Reply::new(200, "text/plain; version=0.0.4", text))
            }
        }
    }

    async fn beats(&self, beats: &[Sent], request: &Request) -> Result<Reply, Refusal> {
        self.check_sender(beats, request).await?;
        match self.ears.beat(beats).await {
            // The beats stay in memory, and are written to the store with their age when it is
            // reachable again.
            Ok(()) if self.ears.standing() == Standing::Stranded => {
                self.ears.lock().condition.stranded_beats += beats.len() as u64;
                let detail = "This tracker cannot reach the store; send beats to another one";
                Err(Refusal::new(503, detail, request.path()))
            }
            Ok(()) => Ok(Reply::empty(200)),
            Err(full) => Err(Refusal::new(503, full.to_string(), request.path())),
        }
    }

    /// A machine beats for itself alone, and nobody else for it. Others need no proof where the door was opened to them; who
    /// shows one is held to it.
    async fn check_sender(&self, beats: &[Sent], request: &Request) -> Result<(), Refusal> {
        let bare = request.certificate.is_none();
        if self.access.beats && bare && beats.iter().all(|beat| beat.name.machine().is_none()) {
            return Ok(());
        }
        let unknown = |why: &str| Refusal::new(401, why, request.path());
        let header = request.header("authorization");
        if let Some(shown) = request.certificate.as_ref().filter(|_| header.is_none()) {
            return self.check_certificate(shown, beats, request).await;
        }
        let header = header.ok_or_else(|| unknown("No token"))?;
        let claim = Claim::parse(header).ok_or_else(|| unknown("Not a machine's token"))?;
        if !self.holds(&claim, request).await? {
            return Err(unknown("Not this machine's token"));
        }
        let own = Name::of_machine(claim.machine);
        match beats.iter().find(|beat| beat.name != own) {
            None => Ok(()),
            Some(Sent { name, .. }) => {
                let detail = format!("{own} cannot beat for {name}");
                Err(Refusal::new(403, detail, request.path()))
            }
        }
    }

    /// Whom it names may beat; a machine as long as there is one.
    async fn check_certificate(
        &self,
        certificate: &[u8],
        beats: &[Sent],
        request: &Request,
    ) -> Result<(), Refusal> {
        let named = certificate::names(certificate);
        for Sent { name, .. } in beats {
            let known = match name.machine().filter(|_| named.contains(name)) {
                Some(machine) => self.vouched(machine, |_| true, request).await?,
                None => named.contains(name),
            };
            if !known {
                let detail = format!("This certificate is not for {name}");
                return Err(Refusal::new(403, detail, request.path()));
            }
        }
        Ok(())
    }

    async fn holds(&self, claim: &Claim, request: &Request) -> Result<bool, Refusal> {
        self.vouched(claim.machine, |credential| claim.holds(credential), request).await
    }

    /// Whether a machine's credential, as the store has it, is as it should be.
    async fn vouched(
        &self,
        machine: MachineId,
        holds: impl Fn(&String) -> bool,
        request: &Request,
    ) -> Result<bool, Refusal> {
        let remembered = locked(&self.believed).get(machine);
        let holds = |credential: &Option<String>| credential.as_ref().is_some_and(&holds);
        if let Some((credential, at)) = &remembered {
            let (right, age) = (holds(credential), at.elapsed());
            if age < if right { BELIEVED } else { DISBELIEVED } {
                return Ok(right);
            }
        }
        let unknown = || Refusal::new(503, "Tokens cannot be checked now", request.path());
        let was_right = remembered.as_ref().is_some_and(|(credential, _)| holds(credential));
        // Machines that start together are not refused for it: only who guesses is.
        let _turn = if was_right { None } else { self.turns.acquire().await.ok() };
        // Counted until it is known better: many guesses at once are as many as one after the other.
        let begin = || locked(&self.vain).begin(Instant::now()).ok_or_else(unknown);
        let look = if was_right { None } else { Some(begin()?) };
        let not_in_vain = || look.into_iter().for_each(|look| locked(&self.vain).was_right(look));
        let path = paths::machine_credentials(machine);
        let store = self.store.borrow().clone();
        let found = match store {
            Some(store) => store.get(&path).await,
            None => Err(tree::Error::Unreachable { hosts: String::new() }),
        };
        let credential = match found {
            Ok(node) => parse_credentials(&path, &node.data).ok().map(|credential| credential.expose()),
            Err(tree::Error::NoNode(_)) => None,
            // Beats are taken while the store is away, from those who were known before.
            Err(_) => {
                not_in_vain();
                return remembered.map(|(credential, _)| holds(&credential)).ok_or_else(unknown);
            }
        };
        let right = holds(&credential);
        if right {
            not_in_vain();
        }
        locked(&self.believed).put(machine, credential, Instant::now());
        Ok(right)
    }

    async fn set_params(
        &self,
        change: &serde_json::Map<String, Value>,
        request: &Request,
    ) -> Result<Reply, Refusal> {
        if !self.access.params {
            let detail = "Parameters are set with `juju heartbeat params`; a tracker that runs with --open-params \
                          also takes them here";
            return Err(Refusal::new(403, detail, request.path()));
        }
        let invalid = |problem: &InvalidParams| Refusal::new(400, problem.to_string(), request.path());
        // Without the store, a change is checked against this tracker's parameters, so that an
        // invalid change gets 400 and not 503.
        let away = || match self.ears.lock().params.patched(change) {
            Err(problem) => invalid(&problem),
            Ok(_) => Refusal::new(503, "The store is away", request.path()),
        };
        let store = self.store.borrow().clone().ok_or_else(away)?;
        let turn = self.ears.params_turn.lock().await;
        let params = match corner::set_params(&store, change).await {
            Ok(params) => params,
            Err(ParamsError::Invalid(problem)) => return Err(invalid(&problem)),
            Err(ParamsError::Store(problem)) => {
                tracing::warn!(%problem, "parameters not set");
                return Err(away());
            }
        };
        let shown = Value::Object(params.to_json()).to_string();
        self.ears.apply_params(params);
        drop(turn);
        Ok(Reply::new(200, JSON, shown))
    }

    fn events(&self, since: Option<u64>, request: &Request) -> Result<Reply, Refusal> {
        let too_many = |none| {
            let whose = match none {
                NoPlace::Full => "",
                NoPlace::Share => " from this address",
            };
            Refusal::new(503, format!("Too many readers of events{whose}"), request.path())
        };
        let place = self.readers.take(request.peer.ip()).map_err(too_many)?;
        let (sender, receiver) = mpsc::channel(READER_BUFFER);
        // Ends with its reader: every send and every wait of it notices that the other side is gone.
        tokio::spawn(tell_events(Arc::clone(&self.ears), since, sender, place));
        Ok(Reply::stream("text/event-stream", receiver).with("cache-control", "no-store"))
    }
}

impl<T: Tree + Clone + 'static> Handler for Api<T> {
    async fn answer(&self, request: Request) -> Reply {
        self.reply(&request).await
    }

    /// A beat as it was expected, of somebody who needs no proof: nearly all that ever comes.
    fn taken_at_once(&self, request: &Glance<'_>) -> bool {
        let beat = self.access.beats.then(|| request::good_beat(request.target, request.body)).flatten();
        beat.is_some_and(|beat| {
            !beat.details.going_away && beat.name.machine().is_none() && self.ears.take_steady(&beat)
        })
    }
}

fn locked<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refuse(refusal: &Refusal) -> Reply {
    let reply = Reply::new(refusal.status, PROBLEM, refusal.body());
    match (refusal.status, refusal.allow) {
        (401, _) => reply.with("www-authenticate", "Bearer"),
        (503, _) => reply.with("retry-after", "5"),
        (_, Some(allow)) => reply.with("allow", allow),
        _ => reply,
    }
}

/// Sends each change after `since` once, in order. If older changes are no longer kept, sends the
/// newest of each component instead; without `since`, begins with the newest of every component.
async fn tell_events(ears: Arc<Ears>, since: Option<u64>, reader: mpsc::Sender<Bytes>, _place: Place) {
    let mut news = ears.news();
    let mut since = match since {
        Some(since) => since,
        None => {
            let newest = ears.newest().await;
            if !tell_numbered(&ears, &reader, newest.after(0)).await {
                return;
            }
            newest.until
        }
    };
    loop {
        news.mark_unchanged();
        match ears.events(since, AT_ONCE) {
            Some(changes) if changes.is_empty() => {
                let said = tokio::select! {
                    // Ends with the tracker, and so do we.
                    changed = news.changed() => if changed.is_ok() { continue } else { return },
                    () = tokio::time::sleep(STILL_HERE) => Bytes::from_static(b":\n\n"),
                    () = reader.closed() => return,
                };
                if reader.send(said).await.is_err() {
                    return;
                }
            }
            Some(changes) => {
                since = changes.last().map_or(since, |change| change.sequence);
                if !tell(&reader, &changes).await {
                    return;
                }
            }
            None => {
                let kept_from = ears.kept_from();
                let newest = ears.newest().await;
                let older = newest.after(since);
                let older = &older[..older.partition_point(|(number, _)| *number <= kept_from)];
                if !tell_numbered(&ears, &reader, older).await {
                    return;
                }
                since = since.max(kept_from);
            }
        }
    }
}

/// The same for changes by number.
async fn tell_numbered(ears: &Ears, reader: &mpsc::Sender<Bytes>, numbers: &[(u64, u32)]) -> bool {
    for numbers in numbers.chunks(AT_ONCE) {
        if !tell(reader, &ears.numbered(numbers)).await {
            return false;
        }
    }
    true
}

/// Sends changes. Returns whether the reader is still there.
async fn tell(reader: &mpsc::Sender<Bytes>, changes: &[Change]) -> bool {
    for change in changes {
        if reader.send(event(change)).await.is_err() {
            return false;
        }
    }
    true
}

fn event(change: &Change) -> Bytes {
    let mut text = format!("id: {}\nevent: change\ndata: ", change.sequence).into_bytes();
    text.extend(change_body(change));
    text.extend(b"\n\n");
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heartbeat::sent::Stamp;
    use crate::heartbeat::state::{State, Word};

    fn change(sequence: u64) -> Change {
        let name = Name::parse("a").unwrap();
        Change {
            name,
            state: State::Ok,
            word: Some(Word::Started),
            sequence,
            at: 0,
            flaps: 0,
            stamp: Stamp::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn readers_get_what_they_have_not_seen_in_its_order() {
        let ears = Arc::new(Ears::new(Arc::new(|| 0), 1));
        let read = |since| {
            let place = Places::new(1, 1).take([127, 0, 0, 1].into()).unwrap();
            let (sender, reader) = mpsc::channel(READER_BUFFER);
            (tokio::spawn(tell_events(Arc::clone(&ears), since, sender, place)), reader)
        };
        ears.publish(&[4, 5, 6].map(change));
        let (telling, mut reader) = read(Some(4));
        // One that comes from a tracker that was faster.
        let (_, mut ahead) = read(Some(8));
        for sequence in [5, 6] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))));
        }
        tokio::task::yield_now().await;
        ears.publish(&[6, 7, 8, 9].map(change));
        for sequence in [7, 8, 9] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))));
        }
        assert_eq!(ahead.recv().await, Some(event(&change(9))));
        // What is between them and this is not known; nothing else is lost or told again.
        ears.publish_anew(&[8, 9, 20, 21].map(change));
        for sequence in [20, 21] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))), "{sequence}");
        }
        drop(reader);
        telling.await.unwrap();
    }
}
