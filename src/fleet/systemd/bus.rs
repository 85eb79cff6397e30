//! systemd over D-Bus: the parts that calls and the worker share. `worker` keeps the connection
//! open and handles systemd's signals; the calls are in `calls`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zbus::Connection;
use zbus_systemd::systemd1::ManagerProxy;

use crate::fleet::dbus::bus::Bus;
use crate::fleet::dbus::errors::CallError;
use crate::fleet::dbus::values::{JobResult, JobType};

use super::job_table::JobTable;
use super::worker::Worker;
use super::{Event, Subscriptions};

/// How long a call waits for a connection that is being restored.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(5);
/// Calls that are executed at the same time; further ones wait. Each of them awaits at most two
/// replies, and the bus allows 128 for one connection, also for those of the worker.
const CALLS_AT_ONCE: usize = 40;
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
            calls: Semaphore::new(CALLS_AT_ONCE),
        });
        let task = tokio::spawn(Worker::new(Arc::clone(&shared), events).run(bus, requested));
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
    pub(super) live: watch::Sender<Option<Live>>,
    pub(super) jobs: Mutex<JobTable<Recipient>>,
    /// The watched units, and whether systemd sends signals about them.
    pub(super) watched: Mutex<Subscriptions>,
    pub(super) requests: mpsc::UnboundedSender<Request>,
    calls: Semaphore,
}

impl Shared {
    /// Returns the connection for one call, once fewer calls than the limit are executed. Waits a
    /// moment if the connection is being restored.
    pub(super) async fn call(&self) -> Result<(Live, SemaphorePermit<'_>), CallError> {
        let live = self.live().await?;
        let closed = |_| CallError::new(DISCONNECTED, "the agent stops");
        Ok((live, self.calls.acquire().await.map_err(closed)?))
    }

    async fn live(&self) -> Result<Live, CallError> {
        let mut live = self.live.subscribe();
        let found = timeout(RESTORE_TIMEOUT, live.wait_for(Option::is_some)).await;
        let live = found.ok().and_then(Result::ok).and_then(|live| live.clone());
        live.ok_or_else(|| CallError::new(DISCONNECTED, "the bus of systemd is not reachable"))
    }

    pub(super) fn watches(&self, unit: &str) -> bool {
        lock(&self.watched).matches(unit)
    }

    pub(super) fn is_watching(&self) -> bool {
        !lock(&self.watched).is_empty()
    }
}

pub(super) const DISCONNECTED: &str = "org.freedesktop.DBus.Error.Disconnected";

/// Locks a mutex that is never held across an `await`.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
