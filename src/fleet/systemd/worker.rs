//! The task that keeps the connection to systemd open, handles systemd's signals, and assigns
//! results to jobs. The decisions are in `job_table` and `unit_cache`.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};
use zbus::fdo::DBusProxy;
use zbus::message::{Sequence, Type};
use zbus::names::BusName;
use zbus::proxy::CacheProperties;
use zbus::{MatchRule, Message, MessageStream};
use zbus_systemd::systemd1::ManagerProxy;

use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::errors::{CallError, INVALID_ARGS, NO_SUCH_UNIT, UNKNOWN_OBJECT};
use crate::fleet::dbus::values::{JobResult, Properties};
use crate::runtime::backoff::doubling;

use super::bus::{Live, Recipient, Request, Shared, lock};
use super::calls::read_state;
use super::job_table::result_of_lost;
use super::properties::{SYSTEMD, SYSTEMD_PATH, UNIT_INTERFACE, change_of, job_of, unit_of, unit_path};
use super::unit_cache::{Step, UnitCache};
use super::{Event, UnitState};

/// The sender of the bus's own signals. No client can use this name.
const DBUS: &str = "org.freedesktop.DBus";
/// The longest wait for a reply of systemd. `daemon-reload` of thousands of units takes seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time to connect to the bus.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pauses between attempts to connect to the bus, and to repeat what failed on it.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The pause between two comparisons of the awaited jobs with those of systemd.
const COMPARE_EVERY: Duration = Duration::from_secs(5);
/// The pause before the second comparison if a job is missing.
const COMPARE_AGAIN: Duration = Duration::from_millis(500);
/// Messages that are queued before this process stops reading from the bus.
const MAX_MESSAGES: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");
/// Units that are read at the same time. A read awaits at most two replies.
const READS_AT_ONCE: usize = 16;

/// The task that handles signals.
pub(super) struct Worker {
    shared: Arc<Shared>,
    events: mpsc::Sender<Event>,
    cache: UnitCache<Sequence>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, events: mpsc::Sender<Event>) -> Self {
        Self { shared, events, cache: UnitCache::default() }
    }

    pub(super) async fn run(mut self, bus: Bus, mut requested: mpsc::UnboundedReceiver<Request>) {
        let mut failures = 0;
        loop {
            match timeout(CONNECT_TIMEOUT, open(&bus)).await {
                Ok(Ok((live, messages, owner))) => {
                    failures = 0;
                    info!("connected to systemd");
                    self.shared.live.send_replace(Some(live.clone()));
                    Connected::new(&mut self, live, owner).run(messages, &mut requested).await;
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
}

/// The end of a task on a connection.
enum Done {
    /// A unit was read: the position of the reply, and the state if the unit is loaded.
    Read(String, Sequence, Result<Option<UnitState>, CallError>),
    /// systemd sends signals, and has loaded these units.
    Listed(Result<(Vec<String>, Sequence), CallError>),
    /// The ids of all jobs of systemd; `None` if the call failed.
    Compared(Option<BTreeSet<u32>>),
    /// The results of lost jobs were sent.
    Resolved,
}

/// The state of one connection.
struct Connected<'a> {
    worker: &'a mut Worker,
    live: Live,
    /// The unique name of systemd. Only its signals are handled: every process can send signals to
    /// this one.
    owner: Option<String>,
    tasks: FuturesUnordered<BoxFuture<'static, Done>>,
    /// Reads that wait for others.
    waiting: VecDeque<(String, bool)>,
    reads: usize,
    is_comparing: bool,
    compare_at: Instant,
    /// Whether systemd is to be asked for signals and for its units again.
    must_list: bool,
    /// How often something has failed since the last success, and when it is repeated.
    failures: u32,
    retry_at: Instant,
}

impl<'a> Connected<'a> {
    fn new(worker: &'a mut Worker, live: Live, owner: Option<String>) -> Self {
        let now = Instant::now();
        Self {
            worker,
            live,
            owner,
            tasks: FuturesUnordered::new(),
            waiting: VecDeque::new(),
            reads: 0,
            is_comparing: false,
            compare_at: now,
            must_list: false,
            failures: 0,
            retry_at: now,
        }
    }

    /// Handles messages and requests until the connection ends.
    async fn run(mut self, mut messages: MessageStream, requested: &mut mpsc::UnboundedReceiver<Request>) {
        self.begin();
        loop {
            while self.reads < READS_AT_ONCE
                && let Some((unit, if_loaded)) = self.waiting.pop_front()
            {
                self.reads += 1;
                self.tasks.push(Box::pin(read(self.live.clone(), unit, if_loaded)));
            }
            let must_compare = !self.is_comparing && !lock(&self.worker.shared.jobs).is_empty();
            let must_retry = self.must_list || self.worker.cache.has_failed();
            let steps = tokio::select! {
                message = messages.next() => match message {
                    Some(Ok(message)) => self.message(&message),
                    Some(Err(_)) | None => return,
                },
                Some(done) = self.tasks.next(), if !self.tasks.is_empty() => self.done(done),
                request = requested.recv() => match request {
                    Some(request) => self.request(request),
                    None => return,
                },
                () = tokio::time::sleep_until(self.compare_at), if must_compare => {
                    self.is_comparing = true;
                    self.tasks.push(Box::pin(present_jobs(self.live.clone())));
                    Vec::new()
                }
                () = tokio::time::sleep_until(self.retry_at), if must_retry => {
                    if std::mem::take(&mut self.must_list) {
                        self.begin();
                    }
                    self.worker.cache.retry()
                }
            };
            for step in steps {
                match step {
                    Step::Read { unit, if_loaded } => self.waiting.push_back((unit, if_loaded)),
                    Step::Emit(event) => {
                        // The send fails only if the receiver was dropped; then this task is
                        // aborted soon.
                        let _ = self.worker.events.send(event).await;
                    }
                }
            }
        }
    }

    /// Begins with a systemd whose earlier signals were lost.
    fn begin(&mut self) {
        self.compare_at = Instant::now();
        if self.worker.shared.is_watching() {
            self.tasks.push(Box::pin(subscribe_and_list(self.live.clone())));
        }
    }

    fn failed(&mut self) {
        if !self.must_list && !self.worker.cache.has_failed() {
            self.retry_at = Instant::now() + doubling(FIRST_PAUSE, self.failures, LONGEST_PAUSE);
            self.failures = self.failures.saturating_add(1);
        }
    }

    fn request(&mut self, request: Request) -> Vec<Step> {
        match request {
            Request::Refresh(units) => {
                units.iter().flat_map(|unit| self.worker.cache.refresh(unit)).collect()
            }
            Request::Watched => {
                let watched = lock(&self.worker.shared.watched);
                self.worker.cache.retain(|unit| watched.matches(unit));
                Vec::new()
            }
        }
    }

    fn done(&mut self, done: Done) -> Vec<Step> {
        match done {
            Done::Read(unit, at, state) => {
                self.reads -= 1;
                match state {
                    Ok(state) => {
                        self.failures = 0;
                        self.worker.cache.read(&unit, at, state)
                    }
                    Err(error) if is_absent(&error) => self.worker.cache.gone(&unit),
                    Err(error) => {
                        debug!(unit, %error, "cannot read a unit");
                        self.failed();
                        self.worker.cache.read_failed(&unit);
                        Vec::new()
                    }
                }
            }
            Done::Listed(Ok((mut units, at))) => {
                self.failures = 0;
                units.retain(|unit| self.worker.shared.watches(unit));
                let mut steps = self.worker.cache.read_all();
                steps.extend(self.worker.cache.listed(&units, at));
                steps
            }
            Done::Listed(Err(error)) => {
                warn!(%error, "cannot list the units of systemd");
                self.failed();
                self.must_list = true;
                Vec::new()
            }
            Done::Compared(present) => {
                self.is_comparing = false;
                let mut jobs = lock(&self.worker.shared.jobs);
                let lost = present.map(|present| jobs.compare(&present)).unwrap_or_default();
                let pause = if jobs.has_missing() { COMPARE_AGAIN } else { COMPARE_EVERY };
                drop(jobs);
                self.compare_at = Instant::now() + pause;
                if !lost.is_empty() {
                    self.tasks.push(Box::pin(resolve(self.live.clone(), lost)));
                }
                Vec::new()
            }
            Done::Resolved => Vec::new(),
        }
    }

    fn message(&mut self, message: &Message) -> Vec<Step> {
        if message.message_type() != Type::Signal {
            return Vec::new();
        }
        let header = message.header();
        let sender = header.sender().map(|sender| sender.as_str());
        if sender == Some(DBUS) {
            let body = message.body();
            let is_change = header.member().is_some_and(|member| *member == "NameOwnerChanged");
            if let Ok((SYSTEMD, _, new)) = body.deserialize::<(&str, &str, &str)>()
                && is_change
            {
                self.owner = (!new.is_empty()).then(|| new.to_owned());
                if self.owner.is_some() {
                    info!("systemd has restarted");
                    lock(&self.worker.shared.jobs).restarted();
                    self.begin();
                }
            }
            return Vec::new();
        }
        if sender.is_some() && sender == self.owner.as_deref() { self.signal(message) } else { Vec::new() }
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
                if let Ok((id, _, unit, result)) = body.deserialize::<Removed<'_>>() {
                    let result = JobResult::from_systemd(result);
                    let recipients = lock(&self.worker.shared.jobs).removed(id, result);
                    let is_named = |recipient: &Recipient| recipient.unit == unit;
                    let (named, others): (Vec<_>, Vec<_>) = recipients.into_iter().partition(is_named);
                    named.into_iter().for_each(|recipient| recipient.send(result));
                    if !others.is_empty() {
                        let ended = (unit.to_owned(), result);
                        self.tasks.push(Box::pin(resolve_others(self.live.clone(), others, ended)));
                    }
                }
                Vec::new()
            }
            "UnitNew" | "UnitRemoved" => {
                let Ok((unit, _)) = body.deserialize::<(&str, zbus::ObjectPath<'_>)>() else {
                    return Vec::new();
                };
                match (self.worker.shared.watches(unit), member.as_str()) {
                    (false, _) => Vec::new(),
                    (true, "UnitNew") => self.worker.cache.loaded(unit, at),
                    (true, _) => self.worker.cache.unloaded(unit),
                }
            }
            "UnitFilesChanged" => self.worker.cache.read_all(),
            "Reloading" if body.deserialize::<bool>().is_ok_and(|begins| !begins) => {
                self.worker.cache.read_all()
            }
            "PropertiesChanged" => self.properties_changed(path, at, signal),
            _ => Vec::new(),
        }
    }

    fn properties_changed(&mut self, path: &str, at: Sequence, signal: &Message) -> Vec<Step> {
        let job = job_of(path);
        let unit =
            if job.is_some() { None } else { unit_of(path).filter(|unit| self.worker.shared.watches(unit)) };
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
            let awaited = running && lock(&self.worker.shared.jobs).is_awaited(job);
            return if awaited { vec![Step::Emit(Event::JobRunning(job))] } else { Vec::new() };
        }
        let (unit, change) = (unit.unwrap_or_default(), change_of(&changed));
        if interface == UNIT_INTERFACE {
            return self.worker.cache.changed(&unit, at, change);
        }
        self.worker.cache.type_changed(&unit, change);
        Vec::new()
    }
}

/// Connects to the bus. Returns the messages, which include the signals of systemd and changes of
/// its owner, and the owner.
async fn open(bus: &Bus) -> zbus::Result<(Live, MessageStream, Option<String>)> {
    let connection = bus.connect(REPLY_TIMEOUT).await?;
    let mut messages = MessageStream::from(&connection);
    messages.set_max_queued(MAX_MESSAGES);
    let daemon = DBusProxy::new(&connection).await?;
    let changes = MatchRule::builder().msg_type(Type::Signal).sender(DBUS).member("NameOwnerChanged");
    daemon.add_match_rule(changes.arg(0, SYSTEMD).build()?).await?;
    let signals = MatchRule::builder().msg_type(Type::Signal).sender(SYSTEMD);
    daemon.add_match_rule(signals.path_namespace(SYSTEMD_PATH).build()?).await?;
    // Without an owner, systemd is not on the bus yet.
    let owner = daemon.get_name_owner(BusName::try_from(SYSTEMD)?).await.ok();
    let manager = ManagerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
    Ok((Live { connection, manager }, messages, owner.map(|owner| owner.to_string())))
}

/// Asks systemd for signals, and for the names of the units that it has loaded.
async fn subscribe_and_list(live: Live) -> Done {
    if let Err(error) = live.manager.subscribe().await {
        // systemd replies with an error if it sends signals already.
        debug!(%error, "cannot subscribe to systemd");
    }
    let listed = live.manager.list_units().await;
    let names = listed.map(|units| units.into_iter().map(|unit| unit.0).collect());
    Done::Listed(names.map(|names| (names, Sequence::default())).map_err(CallError::from))
}

/// Returns whether systemd has no such unit, and never had one.
fn is_absent(error: &CallError) -> bool {
    [NO_SUCH_UNIT, UNKNOWN_OBJECT, INVALID_ARGS].contains(&error.name.as_str())
}

/// Reads the state of a unit.
async fn read(live: Live, unit: String, if_loaded: bool) -> Done {
    let mut at = Sequence::default();
    let state = async {
        if if_loaded {
            match live.manager.get_unit(unit.clone()).await.map_err(CallError::from) {
                Err(error) if error.name == NO_SUCH_UNIT => return Ok(None),
                found => found?,
            };
        }
        let (state, position) = read_state(&live.connection, &unit).await?;
        at = position;
        Ok(Some(state))
    };
    let state = state.await;
    Done::Read(unit, at, state)
}

/// Lists the jobs of systemd.
async fn present_jobs(live: Live) -> Done {
    let jobs = live.manager.list_jobs().await.ok();
    Done::Compared(jobs.map(|jobs| jobs.into_iter().map(|job| job.0).collect()))
}

/// Sends the results of jobs whose end was not reported.
async fn resolve(live: Live, lost: Vec<Recipient>) -> Done {
    for recipient in lost {
        let state = read_state(&live.connection, &recipient.unit).await;
        let result = state.map_or(JobResult::Failed, |(state, _)| result_of_lost(recipient.kind, &state));
        info!(unit = recipient.unit, %result, "end of a systemd job was not reported");
        recipient.send(result);
    }
    Done::Resolved
}

/// Sends the results of jobs with the number of a job that has ended, whose unit has another name.
/// The name is an alias of that unit, or the number is that of a job of an earlier systemd.
async fn resolve_others(live: Live, others: Vec<Recipient>, (ended, result): (String, JobResult)) -> Done {
    let mut lost = Vec::new();
    for recipient in others {
        let path = live.manager.load_unit(recipient.unit.clone()).await;
        match path {
            Ok(path) if path.as_str() == unit_path(&ended) => recipient.send(result),
            _ => lost.push(recipient),
        }
    }
    resolve(live, lost).await
}
