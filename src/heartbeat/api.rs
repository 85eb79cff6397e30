//! The HTTP API of a tracker: passes requests to the memory and answers them. The
//! forms of requests and answers are in `request`; limits of size, number and time are in
//! `net::http`.

pub mod beat_json;
mod credential_cache;
pub mod health;
pub mod request;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

use self::credential_cache::{CredentialCache, FailedLookups};
use self::request::{ApiCall, LARGE_BODIES, Problem, RawRequest};
use crate::heartbeat::core::audit::Change;
use crate::heartbeat::core::beat::IncomingBeat;
use crate::heartbeat::core::name::Name;
use crate::heartbeat::core::params::InvalidParams;
use crate::heartbeat::core::token::MachineToken;
use crate::heartbeat::store::{self, ParamsError};
use crate::heartbeat::tracker::shared_state::{Readiness, SharedState};
use crate::heartbeat::webhook::change_body;
use crate::model::MachineId;
use crate::net::client_limits::{NoSlot, Slot, Slots};
use crate::net::http::{Handler, Limits, RawPost, Reply, Request};
use crate::net::tls::peer;
use crate::store::paths;
use crate::store::records::parse_credentials;
use crate::store::tree::{self, Tree};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// Readers of events at the same time, in total and from one address.
const MAX_READERS: usize = 256;
const MAX_READERS_OF_ONE: usize = 64;

/// Changes that a reader gets at once.
const AT_ONCE: usize = 64;

/// Events that are buffered for a slow reader.
const READER_BUFFER: usize = 64;

/// A comment is sent to a reader after this time without an event.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// How long a credential is cached; longer while the store is unreachable.
const CACHED_FOR: Duration = Duration::from_secs(60);

/// A token that does not match a credential of at most this age is rejected without another read:
/// new credentials of a machine are valid that much later, and guessing costs no reads.
const REJECTED_FOR: Duration = Duration::from_secs(2);

/// Reads of unknown credentials at the same time; other requests wait.
const LOOKUPS_AT_ONCE: usize = 64;

/// The limits of a tracker's listener: one connection for every component.
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
    shared: Arc<SharedState>,
    /// `None` until the store is reachable.
    store: watch::Receiver<Option<T>>,
    access: Access,
    credentials: Mutex<CredentialCache>,
    failed_lookups: Mutex<FailedLookups>,
    lookup_slots: Semaphore,
    readers: Arc<Slots>,
}

impl<T> std::fmt::Debug for Api<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api")
            .field("ears", &self.shared)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl<T: Tree + Clone + 'static> Api<T> {
    pub fn new(shared: Arc<SharedState>, store: watch::Receiver<Option<T>>, access: Access) -> Self {
        let readers = Slots::new(MAX_READERS, MAX_READERS_OF_ONE);
        let (failed_lookups, lookup_slots) =
            (Mutex::new(FailedLookups::new(Instant::now())), Semaphore::new(LOOKUPS_AT_ONCE));
        Self { shared, store, access, credentials: Mutex::default(), failed_lookups, lookup_slots, readers }
    }

    async fn reply(&self, request: &Request) -> Reply {
        let raw = RawRequest {
            method: request.method(),
            path: request.path(),
            query: request.query(),
            last_event: request.header("last-event-id"),
            body: request.body.as_deref().map_err(|problem| problem.status()),
        };
        let done = match request::read(raw) {
            Ok(call) => self.execute(call, request).await,
            Err(problem) => Err(problem),
        };
        done.unwrap_or_else(|problem| problem_reply(&problem))
    }

    async fn execute(&self, call: ApiCall<'_>, request: &Request) -> Result<Reply, Problem> {
        match call {
            ApiCall::Beats(beats) => self.beats(&beats, request).await,
            ApiCall::State(name) => {
                let heartbeating = self.shared.heartbeating(std::iter::once(name))[0];
                Ok(Reply::new(200, JSON, request::state_body(name, heartbeating)))
            }
            ApiCall::States(names) => {
                let heartbeating = self.shared.heartbeating(names.iter().map(AsRef::as_ref));
                let states = names.iter().map(AsRef::as_ref).zip(heartbeating);
                Ok(Reply::new(200, JSON, request::states_body(states)))
            }
            ApiCall::Params => {
                let params = self.shared.lock().params.to_json();
                Ok(Reply::new(200, JSON, Value::Object(params).to_string()))
            }
            ApiCall::SetParams(change) => self.set_params(&change, request).await,
            ApiCall::Health => {
                let inner = self.shared.lock();
                let body = health::health(&inner.stats, &inner.counts(), &inner.params);
                Ok(Reply::new(200, JSON, body))
            }
            ApiCall::Liveness => Ok(Reply::empty(204)),
            ApiCall::Readiness => {
                if !self.shared.lock().stats.loaded {
                    return Err(Problem::new(503, "The store was not found yet", request.path()));
                }
                if self.shared.readiness() != Readiness::Ready {
                    return Err(Problem::new(503, "The store is out of reach", request.path()));
                }
                Ok(Reply::empty(204))
            }
            ApiCall::Events(since) => self.events(since, request),
            ApiCall::Metrics => {
                let inner = self.shared.lock();
                let text = health::metrics(&inner.stats, &inner.counts());
                Ok(Reply::new(200, "text/plain; version=0.0.4", text))
            }
        }
    }

    async fn beats(&self, beats: &[IncomingBeat], request: &Request) -> Result<Reply, Problem> {
        self.check_sender(beats, request).await?;
        match self.shared.beat(beats).await {
            // The beats stay in memory, and are written to the store with their age when it is
            // reachable again.
            Ok(()) if self.shared.readiness() == Readiness::Stranded => {
                self.shared.lock().stats.stranded_beats += beats.len() as u64;
                let detail = "This tracker cannot reach the store; send beats to another one";
                Err(Problem::new(503, detail, request.path()))
            }
            Ok(()) => Ok(Reply::empty(200)),
            Err(full) => Err(Problem::new(503, full.to_string(), request.path())),
        }
    }

    /// A machine may send beats only for itself, and only it may do so. Other components need no
    /// credential if access is open; a certificate is checked in any case.
    async fn check_sender(&self, beats: &[IncomingBeat], request: &Request) -> Result<(), Problem> {
        let bare = request.certificate.is_none();
        if self.access.beats && bare && beats.iter().all(|beat| beat.name.machine().is_none()) {
            return Ok(());
        }
        let unknown = |why: &str| Problem::new(401, why, request.path());
        let header = request.header("authorization");
        if let Some(feed) = request.certificate.as_ref().filter(|_| header.is_none()) {
            return self.check_certificate(feed, beats, request).await;
        }
        let header = header.ok_or_else(|| unknown("No token"))?;
        let token = MachineToken::parse(header).ok_or_else(|| unknown("Not a machine's token"))?;
        if !self.holds(&token, request).await? {
            return Err(unknown("Not this machine's token"));
        }
        let own = Name::of_machine(token.machine);
        match beats.iter().find(|beat| beat.name != own) {
            None => Ok(()),
            Some(IncomingBeat { name, .. }) => {
                let detail = format!("{own} cannot beat for {name}");
                Err(Problem::new(403, detail, request.path()))
            }
        }
    }

    /// Accepts beats for the names in the certificate; for a machine, only while it exists.
    async fn check_certificate(
        &self,
        certificate: &[u8],
        beats: &[IncomingBeat],
        request: &Request,
    ) -> Result<(), Problem> {
        let named = peer::dns_names(certificate);
        let named: Vec<Name> = named.iter().filter_map(|name| Name::parse(name).ok()).collect();
        for IncomingBeat { name, .. } in beats {
            let known = match name.machine().filter(|_| named.contains(name)) {
                Some(machine) => self.check_credential(machine, |_| true, request).await?,
                None => named.contains(name),
            };
            if !known {
                let detail = format!("This certificate is not for {name}");
                return Err(Problem::new(403, detail, request.path()));
            }
        }
        Ok(())
    }

    async fn holds(&self, token: &MachineToken, request: &Request) -> Result<bool, Problem> {
        self.check_credential(token.machine, |credential| token.holds(credential), request).await
    }

    /// Whether the machine's credential in the store satisfies `holds`.
    async fn check_credential(
        &self,
        machine: MachineId,
        holds: impl Fn(&String) -> bool,
        request: &Request,
    ) -> Result<bool, Problem> {
        let remembered = locked(&self.credentials).get(machine);
        let holds = |credential: &Option<String>| credential.as_ref().is_some_and(&holds);
        if let Some((credential, at)) = &remembered {
            let (right, age) = (holds(credential), at.elapsed());
            if age < if right { CACHED_FOR } else { REJECTED_FOR } {
                return Ok(right);
            }
        }
        let unknown = || Problem::new(503, "Tokens cannot be checked now", request.path());
        let succeeded = remembered.as_ref().is_some_and(|(credential, _)| holds(credential));
        // Many machines that start at the same time wait here, instead of being rejected like
        // guesses.
        let _turn = if succeeded { None } else { self.lookup_slots.acquire().await.ok() };
        // The lookup counts as failed until it succeeds, so that parallel guesses count as well.
        let begin = || locked(&self.failed_lookups).begin(Instant::now()).ok_or_else(unknown);
        let lookup = if succeeded { None } else { Some(begin()?) };
        let lookup_succeeded =
            || lookup.into_iter().for_each(|lookup| locked(&self.failed_lookups).succeeded(lookup));
        let path = paths::machine_credentials(machine);
        let store = self.store.borrow().clone();
        let found = match store {
            Some(store) => store.get(&path).await,
            None => Err(tree::Error::Unreachable { hosts: String::new() }),
        };
        let credential = match found {
            Ok(node) => parse_credentials(&path, &node.data).ok().map(|credential| credential.expose()),
            Err(tree::Error::NoNode(_)) => None,
            // While the store is unreachable, cached credentials stay valid.
            Err(_) => {
                lookup_succeeded();
                return remembered.map(|(credential, _)| holds(&credential)).ok_or_else(unknown);
            }
        };
        let right = holds(&credential);
        if right {
            lookup_succeeded();
        }
        locked(&self.credentials).put(machine, credential, Instant::now());
        Ok(right)
    }

    async fn set_params(
        &self,
        change: &serde_json::Map<String, Value>,
        request: &Request,
    ) -> Result<Reply, Problem> {
        if !self.access.params {
            let detail = "Parameters are set with `juju heartbeat params`; a tracker that runs with \
                          --open-params also takes them here";
            return Err(Problem::new(403, detail, request.path()));
        }
        let invalid = |problem: &InvalidParams| Problem::new(400, problem.to_string(), request.path());
        // Without the store, a change is checked against this tracker's parameters, so that an
        // invalid change gets 400 and not 503.
        let away = || match self.shared.lock().params.patched(change) {
            Err(problem) => invalid(&problem),
            Ok(_) => Problem::new(503, "The store is away", request.path()),
        };
        let store = self.store.borrow().clone().ok_or_else(away)?;
        let turn = self.shared.params_turn.lock().await;
        let params = match store::set_params(&store, change).await {
            Ok(params) => params,
            Err(ParamsError::Invalid(problem)) => return Err(invalid(&problem)),
            Err(ParamsError::Store(problem)) => {
                tracing::warn!(%problem, "parameters not set");
                return Err(away());
            }
        };
        let feed = Value::Object(params.to_json()).to_string();
        self.shared.apply_params(params);
        drop(turn);
        Ok(Reply::new(200, JSON, feed))
    }

    fn events(&self, since: Option<u64>, request: &Request) -> Result<Reply, Problem> {
        let too_many = |none| {
            let whose = match none {
                NoSlot::Full => "",
                NoSlot::Share => " from this address",
            };
            Problem::new(503, format!("Too many readers of events{whose}"), request.path())
        };
        let place = self.readers.take(request.peer.ip()).map_err(too_many)?;
        let (sender, receiver) = mpsc::channel(READER_BUFFER);
        // The task ends when the reader disconnects, since all sends and waits notice that.
        tokio::spawn(send_events(Arc::clone(&self.shared), since, sender, place));
        Ok(Reply::stream("text/event-stream", receiver).with("cache-control", "no-store"))
    }
}

impl<T: Tree + Clone + 'static> Handler for Api<T> {
    async fn answer(&self, request: Request) -> Reply {
        self.reply(&request).await
    }

    /// A beat as it was expected, of somebody who needs no proof: nearly all that ever comes.
    fn handle_fast(&self, request: &RawPost<'_>) -> bool {
        let beat = self.access.beats.then(|| request::good_beat(request.target, request.body)).flatten();
        beat.is_some_and(|beat| {
            !beat.details.going_away && beat.name.machine().is_none() && self.shared.take_unchanged(&beat)
        })
    }
}

fn locked<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn problem_reply(problem: &Problem) -> Reply {
    let reply = Reply::new(problem.status, PROBLEM, problem.body());
    match (problem.status, problem.allow) {
        (401, _) => reply.with("www-authenticate", "Bearer"),
        (503, _) => reply.with("retry-after", "5"),
        (_, Some(allow)) => reply.with("allow", allow),
        _ => reply,
    }
}

/// Sends each change after `since` once, in order. If older changes are no longer kept, sends the
/// newest of each component instead; without `since`, begins with the newest of every component.
async fn send_events(
    shared: Arc<SharedState>,
    since: Option<u64>,
    reader: mpsc::Sender<Bytes>,
    _place: Slot,
) {
    let mut newest_shown = shared.subscribe();
    let mut since = match since {
        Some(since) => since,
        None => {
            let newest = shared.newest().await;
            if !send_numbered(&shared, &reader, newest.after(0)).await {
                return;
            }
            newest.until
        }
    };
    loop {
        newest_shown.mark_unchanged();
        match shared.events(since, AT_ONCE) {
            Some(changes) if changes.is_empty() => {
                let raw = tokio::select! {
                    // The sender is dropped when the tracker ends.
                    changed = newest_shown.changed() => if changed.is_ok() { continue } else { return },
                    () = tokio::time::sleep(KEEPALIVE) => Bytes::from_static(b":\n\n"),
                    () = reader.closed() => return,
                };
                if reader.send(raw).await.is_err() {
                    return;
                }
            }
            Some(changes) => {
                since = changes.last().map_or(since, |change| change.sequence);
                if !send(&reader, &changes).await {
                    return;
                }
            }
            None => {
                let feed_start = shared.feed_start();
                let newest = shared.newest().await;
                let older = newest.after(since);
                let older = &older[..older.partition_point(|(number, _)| *number <= feed_start)];
                if !send_numbered(&shared, &reader, older).await {
                    return;
                }
                since = since.max(feed_start);
            }
        }
    }
}

/// Like [`send`], for changes by number.
async fn send_numbered(shared: &SharedState, reader: &mpsc::Sender<Bytes>, numbers: &[(u64, u32)]) -> bool {
    for numbers in numbers.chunks(AT_ONCE) {
        if !send(reader, &shared.numbered(numbers)).await {
            return false;
        }
    }
    true
}

/// Sends changes. Returns whether the reader is still there.
async fn send(reader: &mpsc::Sender<Bytes>, changes: &[Change]) -> bool {
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

    fn change(sequence: u64) -> Change {
        Change::started("a", sequence)
    }

    #[tokio::test(start_paused = true)]
    async fn readers_get_new_changes_in_order() {
        let shared = Arc::new(SharedState::new(Arc::new(|| 0), 1));
        let read = |since| {
            let place = Slots::new(1, 1).take([127, 0, 0, 1].into()).unwrap();
            let (sender, reader) = mpsc::channel(READER_BUFFER);
            (tokio::spawn(send_events(Arc::clone(&shared), since, sender, place)), reader)
        };
        shared.publish(&[4, 5, 6].map(change));
        let (sending, mut reader) = read(Some(4));
        // A reader that comes from a tracker that was ahead.
        let (_, mut ahead) = read(Some(8));
        for sequence in [5, 6] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))));
        }
        tokio::task::yield_now().await;
        shared.publish(&[6, 7, 8, 9].map(change));
        for sequence in [7, 8, 9] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))));
        }
        assert_eq!(ahead.recv().await, Some(event(&change(9))));
        // After a gap, readers get only newer changes, each once.
        shared.publish_after_gap(&[8, 9, 20, 21].map(change));
        for sequence in [20, 21] {
            assert_eq!(reader.recv().await, Some(event(&change(sequence))), "{sequence}");
        }
        drop(reader);
        sending.await.unwrap();
    }
}
