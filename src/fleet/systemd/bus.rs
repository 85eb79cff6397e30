//! The connection to systemd over D-Bus: keeps it open, handles systemd's signals, and assigns
//! results to jobs. The decisions are in `job_table` and `unit_cache`; the calls are in `calls`.

use std::collections::BTreeSet;
use std::future::pending;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};
use zbus::message::{Sequence, Type};
use zbus::proxy::CacheProperties;
use zbus::{Connection, MatchRule, Message, MessageStream};
use zbus_systemd::systemd1::ManagerProxy;

use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::errors::CallError;
use crate::fleet::dbus::values::{JobResult, JobType, Properties};
use crate::runtime::backoff::doubling;

use super::job_table::{JobTable, result_of_lost};
use super::properties::{SYSTEMD, SYSTEMD_PATH, UNIT_INTERFACE, change_of, job_of, unit_of};
use super::unit_cache::{Step, UnitCache};
use super::{Event, Subscriptions, UnitState};

/// The longest wait for a reply of systemd. `daemon-reload` of thousands of units takes seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time to connect to the bus.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses between attempts to connect to the bus.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long a call waits for a connection that is being restored.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two comparisons of the awaited jobs with those of systemd.
const COMPARE_EVERY: Duration = Duration::from_secs(5);
/// The pause before the second comparison if a job is missing.
const COMPARE_AGAIN: Duration = Duration::from_millis(500);
/// Signals that are queued before this process stops reading from the bus.
const MAX_SIGNALS: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");
/// Events that are queued before this process stops handling signals.
const MAX_EVENTS: usize = 1024;

/// systemd over D-Bus. Dropping it closes the connection.
#[derive(Debug)]
pub struct Systemd {
    pub(super) shared: Arc<Shared>,
    /// Whether this is the systemd of a user, whose units have a journal of their own.
    pub(super) is_user: bool,
    task: JoinHandle<()>,
}

impl Systemd {
    /// Connects in the background, and again whenever the connection is lost. The receiver must be
    /// read: when it is full, signals are no longer handled.
    pub fn connect(bus: Bus) -> (Self, mpsc::Receiver<Event>) {
        let is_user = bus == Bus::User;
        let (events, receiver) = mpsc::channel(MAX_EVENTS);
        let (requests, requested) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            live: watch::channel(None).0,
            jobs: Mutex::default(),
            watched: Mutex::default(),
            requests,
        });
        let worker = Worker { shared: Arc::clone(&shared), events, cache: UnitCache::default() };
        let task = tokio::spawn(worker.run(bus, requested));
        (Self { shared, is_user, task }, receiver)
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The recipient of a job's result.
#[derive(Debug)]
pub(super) struct Recipient {
    pub(super) unit: String,
    pub(super) kind: JobType,
    pub(super) done: oneshot::Sender<JobResult>,
}

impl Recipient {
    pub(super) fn send(self, result: JobResult) {
        // The receiver may have been dropped.
        let _ = self.done.send(result);
    }
}

/// A request from a call to the worker.
#[derive(Debug)]
pub(super) enum Request {
    Refresh(Vec<String>),
    /// The set of watched units has changed.
    Watched,
}

/// An open connection.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) connection: Connection,
    pub(super) manager: ManagerProxy<'static>,
}

#[derive(Debug)]
pub(super) struct Shared {
    /// `None` while there is no connection.
    live: watch::Sender<Option<Live>>,
    pub(super) jobs: Mutex<JobTable<Recipient>>,
    /// The watched units, and whether systemd sends signals about them.
    pub(super) watched: Mutex<Subscriptions>,
    pub(super) requests: mpsc::UnboundedSender<Request>,
}

impl Shared {
    /// Returns the connection. Waits a moment if it is being restored.
    pub(super) async fn live(&self) -> Result<Live, CallError> {
        let mut live = self.live.subscribe();
        let found = timeout(RESTORE_TIMEOUT, live.wait_for(Option::is_some)).await;
        let live = found.ok().and_then(Result::ok).and_then(|live| live.clone());
        live.ok_or_else(|| CallError::new(DISCONNECTED, "the bus of systemd is not reachable"))
    }

    fn watches(&self, unit: &str) -> bool {
        lock(&self.watched).matches(unit)
    }

    fn is_watching(&self) -> bool {
        !lock(&self.watched).is_empty()
    }
}

pub(super) const DISCONNECTED: &str = "org.freedesktop.DBus.Error.Disconnected";

/// Locks a mutex that is never held across an `await`.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The result of a read: the unit, the position of the reply, and the state if the unit is loaded.
type Read = (String, Sequence, Result<Option<UnitState>, CallError>);

/// The task that handles signals.
struct Worker {
    shared: Arc<Shared>,
    events: mpsc::Sender<Event>,
    cache: UnitCache<Sequence>,
}

impl Worker {
    async fn run(mut self, bus: Bus, mut requested: mpsc::UnboundedReceiver<Request>) {
        let mut failures = 0;
        loop {
            match timeout(CONNECT_TIMEOUT, open(&bus)).await {
                Ok(Ok((live, signals, owners))) => {
                    failures = 0;
                    info!("connected to systemd");
                    self.serve(live, signals, owners, &mut requested).await;
                    self.shared.live.send_replace(None);
                    self.cache.connection_lost();
                    warn!("connection to systemd lost");
                }
                Ok(Err(error)) if failures == 0 => warn!(%error, "cannot connect to systemd"),
                Ok(Err(error)) => debug!(%error, "cannot connect to systemd"),
                Err(_) => warn!("no answer from the bus of systemd"),
            }
            sleep(doubling(FIRST_PAUSE, failures, LONGEST_PAUSE)).await;
            failures += 1;
        }
    }

    /// Handles signals and requests until the connection ends.
    async fn serve(
        &mut self,
        live: Live,
        mut signals: MessageStream,
        mut owners: MessageStream,
        requested: &mut mpsc::UnboundedReceiver<Request>,
    ) {
        let mut reads = FuturesUnordered::new();
        let mut comparison: Option<BoxFuture<'static, Option<BTreeSet<u32>>>> = None;
        let mut compare_at = Instant::now();
        if self.shared.is_watching() {
            subscribe(&live).await;
        }
        self.shared.live.send_replace(Some(live.clone()));
        let mut steps = self.cache.read_all();
        loop {
            for step in std::mem::take(&mut steps) {
                match step {
                    Step::Read { unit, if_loaded } => reads.push(read(live.clone(), unit, if_loaded)),
                    Step::Emit(event) => {
                        // The send fails only if the receiver was dropped; then this task is
                        // aborted soon.
                        let _ = self.events.send(event).await;
                    }
                }
            }
            let has_jobs = !lock(&self.shared.jobs).is_empty();
            tokio::select! {
                signal = signals.next() => match signal {
                    Some(Ok(signal)) => steps = self.signal(&signal),
                    Some(Err(_)) | None => return,
                },
                owner = owners.next() => match owner {
                    Some(Ok(owner)) if has_new_owner(&owner) => {
                        info!("systemd has restarted");
                        if self.shared.is_watching() {
                            subscribe(&live).await;
                        }
                        compare_at = Instant::now();
                        steps = self.cache.read_all();
                    }
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return,
                },
                Some((unit, at, state)) = reads.next(), if !reads.is_empty() => match state {
                    Ok(state) => steps = self.cache.read(&unit, at, state),
                    Err(error) => {
                        debug!(unit, %error, "cannot read a unit");
                        self.cache.read_failed(&unit);
                    }
                },
                request = requested.recv() => match request {
                    Some(Request::Refresh(units)) => {
                        steps = units.iter().flat_map(|unit| self.cache.refresh(unit)).collect();
                    }
                    Some(Request::Watched) => {
                        let watched = lock(&self.shared.watched);
                        self.cache.retain(|unit| watched.matches(unit));
                    }
                    None => return,
                },
                () = tokio::time::sleep_until(compare_at), if has_jobs && comparison.is_none() => {
                    comparison = Some(Box::pin(present_jobs(live.clone())));
                }
                present = async {
                    match &mut comparison {
                        Some(comparison) => comparison.await,
                        None => pending().await,
                    }
                } => {
                    comparison = None;
                    let mut jobs = lock(&self.shared.jobs);
                    let lost = present.map(|present| jobs.compare(&present)).unwrap_or_default();
                    let pause = if jobs.has_missing() { COMPARE_AGAIN } else { COMPARE_EVERY };
                    drop(jobs);
                    compare_at = Instant::now() + pause;
                    if !lost.is_empty() {
                        tokio::spawn(resolve(live.clone(), lost));
                    }
                }
            }
        }
    }

    /// Handles one signal of systemd.
    fn signal(&mut self, signal: &Message) -> Vec<Step> {
        let header = signal.header();
        let (Some(path), Some(member)) = (header.path(), header.member()) else { return Vec::new() };
        let (path, at) = (path.as_str(), signal.recv_position());
        let body = signal.body();
        match member.as_str() {
            "JobRemoved" => {
                type Removed<'a> = (u32, zbus::ObjectPath<'a>, &'a str, &'a str);
                if let Ok((id, _, _, result)) = body.deserialize::<Removed<'_>>() {
                    let result = JobResult::from_systemd(result);
                    let recipients = lock(&self.shared.jobs).removed(id, result);
                    recipients.into_iter().for_each(|recipient| recipient.send(result));
                }
                Vec::new()
            }
            "UnitNew" | "UnitRemoved" => {
                let Ok((unit, _)) = body.deserialize::<(&str, zbus::ObjectPath<'_>)>() else {
                    return Vec::new();
                };
                match (self.shared.watches(unit), member.as_str()) {
                    (false, _) => Vec::new(),
                    (true, "UnitNew") => self.cache.loaded(unit, at),
                    (true, _) => self.cache.unloaded(unit),
                }
            }
            "UnitFilesChanged" => self.cache.read_all(),
            "Reloading" if body.deserialize::<bool>().is_ok_and(|begins| !begins) => self.cache.read_all(),
            "PropertiesChanged" => self.properties_changed(path, at, signal),
            _ => Vec::new(),
        }
    }

    fn properties_changed(&mut self, path: &str, at: Sequence, signal: &Message) -> Vec<Step> {
        let job = job_of(path);
        let unit = if job.is_some() { None } else { unit_of(path).filter(|unit| self.shared.watches(unit)) };
        if job.is_none() && unit.is_none() {
            return Vec::new();
        }
        let body = signal.body();
        let Ok((interface, changed, _)) = body.deserialize::<(&str, Properties, Vec<&str>)>() else {
            return Vec::new();
        };
        if let Some(job) = job {
            let running =
                changed.get("State").is_some_and(|state| <&str>::try_from(&**state) == Ok("running"));
            let awaited = running && lock(&self.shared.jobs).is_awaited(job);
            return if awaited { vec![Step::Emit(Event::JobRunning(job))] } else { Vec::new() };
        }
        let (unit, change) = (unit.unwrap_or_default(), change_of(&changed));
        if interface == UNIT_INTERFACE {
            return self.cache.changed(&unit, at, change);
        }
        self.cache.type_changed(&unit, change);
        Vec::new()
    }
}

/// Connects to the bus, and subscribes to the signals of systemd and to changes of its owner.
async fn open(bus: &Bus) -> zbus::Result<(Live, MessageStream, MessageStream)> {
    let connection = bus.connect(REPLY_TIMEOUT).await?;
    let rule = MatchRule::builder().msg_type(Type::Signal).sender(SYSTEMD).path_namespace(SYSTEMD_PATH);
    let signals = MessageStream::for_match_rule(rule.build()?, &connection, Some(MAX_SIGNALS)).await?;
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .sender("org.freedesktop.DBus")
        .member("NameOwnerChanged")
        .arg(0, SYSTEMD);
    let owners = MessageStream::for_match_rule(rule.build()?, &connection, Some(MAX_SIGNALS)).await?;
    let manager = ManagerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
    Ok((Live { connection, manager }, signals, owners))
}

/// Asks systemd for signals. It replies with an error if it sends them already.
async fn subscribe(live: &Live) {
    if let Err(error) = live.manager.subscribe().await {
        debug!(%error, "cannot subscribe to systemd");
    }
}

fn has_new_owner(signal: &Message) -> bool {
    let body = signal.body();
    body.deserialize::<(&str, &str, &str)>().is_ok_and(|(_, _, new)| !new.is_empty())
}

/// Reads the state of a unit.
async fn read(live: Live, unit: String, if_loaded: bool) -> Read {
    let mut at = Sequence::default();
    let state = async {
        if if_loaded && live.manager.get_unit(unit.clone()).await.is_err() {
            return Ok(None);
        }
        let (state, position) = super::calls::read_state(&live.connection, &unit).await?;
        at = position;
        Ok(Some(state))
    };
    let state = state.await;
    (unit, at, state)
}

/// Returns the ids of all jobs of systemd; `None` if the call fails.
async fn present_jobs(live: Live) -> Option<BTreeSet<u32>> {
    let jobs = live.manager.list_jobs().await.ok()?;
    Some(jobs.into_iter().map(|job| job.0).collect())
}

/// Sends the results of jobs whose end was not reported.
async fn resolve(live: Live, lost: Vec<Recipient>) {
    for recipient in lost {
        let state = super::calls::read_state(&live.connection, &recipient.unit).await;
        let result = state.map_or(JobResult::Failed, |(state, _)| result_of_lost(recipient.kind, &state));
        info!(unit = recipient.unit, %result, "end of a systemd job was not reported");
        recipient.send(result);
    }
}
