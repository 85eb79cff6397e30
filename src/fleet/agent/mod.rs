//! The agent of a node: it connects to a manager, executes the manager's calls on systemd, and
//! reports results of jobs and changes of units. `session` handles one connection, `call` one call;
//! `state` and `managers` have the decisions.

mod call;
mod local_bus;
mod managers;
mod proxies;
mod proxy_service;
mod session;
mod state;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, info, warn};

use crate::mutant;
use crate::runtime::backoff::doubling;
use crate::runtime::service::stopped;

use super::address::ManagerAddress;
use super::dbus::bus::Bus;
use super::dbus::connect::{ConnectError, Connector, Security};
use super::dbus::errors::CallError;
use super::name::NodeName;
use super::systemd::{Event, Subscriptions, UnitControl};
use managers::LastManager;
use proxy_service::ProxyService;
use session::Session;

/// The pauses between attempts to connect. They are short, so that a node is online soon after its
/// manager or the link to it is back.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(800);

/// The settings of an agent.
#[derive(Debug, Clone)]
pub struct Settings<S = Security> {
    pub name: NodeName,
    /// The addresses of managers, which are tried in turn. It may change while the agent runs.
    pub managers: watch::Receiver<Vec<ManagerAddress>>,
    /// How connections to managers are opened.
    pub security: S,
    pub heartbeat_interval: Duration,
    pub silence_limit: Duration,
    /// Returns a random part of a pause, so that many agents do not connect at the same moment.
    pub jitter: fn(Duration) -> Duration,
}

/// Why a session did not begin.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the manager at {address} refused the agent: {error}")]
    Register { address: ManagerAddress, error: CallError },
    #[error("the manager is no longer at {address}")]
    Moved { address: ManagerAddress },
}

/// The watched units of systemd. Changes take effect in order, also those of a connection that has
/// ended meanwhile.
#[derive(Debug)]
struct WatchedUnits<C> {
    control: Arc<C>,
    order: Arc<Mutex<()>>,
}

impl<C> Clone for WatchedUnits<C> {
    fn clone(&self) -> Self {
        Self { control: Arc::clone(&self.control), order: Arc::clone(&self.order) }
    }
}

impl<C: UnitControl> WatchedUnits<C> {
    async fn set(&self, units: Subscriptions) -> Result<(), CallError> {
        let _turn = self.order.lock().await;
        self.control.watch(units).await
    }
}

/// The agent of a node.
#[derive(Debug)]
pub struct Agent<C, S = Security> {
    node: Node<C, S>,
    events: mpsc::Receiver<Event>,
    /// The bus on which units of this node create proxy services.
    bus: Option<Bus>,
}

impl<C: UnitControl, S: Connector> Agent<C, S> {
    pub fn new(settings: Settings<S>, control: C, events: mpsc::Receiver<Event>) -> Self {
        let watched = WatchedUnits { control: Arc::new(control), order: Arc::default() };
        let (last_manager, background) = (LastManager::default(), JoinSet::new());
        let proxies = Arc::new(ProxyService::new(Arc::clone(&watched.control), None));
        Self { node: Node { settings, watched, last_manager, background, proxies }, events, bus: None }
    }

    /// Lets units of this node create proxy services on `bus`. They are kept in `file`.
    pub fn with_proxies(mut self, bus: Bus, file: Option<PathBuf>) -> Self {
        self.bus = Some(bus);
        let control = Arc::clone(&self.node.watched.control);
        self.node.proxies = Arc::new(ProxyService::new(control, file));
        self
    }

    /// Runs until `stop` is set. Connects again whenever the connection ends. Units and jobs of
    /// systemd are left as they are.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let Self { node, events, bus } = self;
        let proxies = Arc::clone(&node.proxies);
        let serving = async {
            match bus {
                Some(bus) => local_bus::serve(bus, Arc::clone(&proxies)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stopped(&mut stop) => {}
            () = node.serve(events) => {}
            () = Arc::clone(&proxies).run() => {}
            () = serving => {}
        }
    }
}

/// The parts of an agent besides the events of its systemd.
#[derive(Debug)]
struct Node<C, S> {
    settings: Settings<S>,
    watched: WatchedUnits<C>,
    last_manager: LastManager,
    /// Calls of systemd that no connection waits for. It may not answer them for a minute.
    background: JoinSet<()>,
    proxies: Arc<ProxyService<C>>,
}

impl<C: UnitControl, S: Connector> Node<C, S> {
    /// Runs until it is dropped.
    async fn serve(mut self, mut events: mpsc::Receiver<Event>) {
        self.background.spawn(log_running_jobs(Arc::clone(&self.watched.control)));
        let mut failures = 0;
        loop {
            let began = Instant::now();
            match dropping(&mut events, self.open()).await {
                Ok(session) => {
                    failures = 0;
                    let reason = session.run(&self.settings, &mut events).await;
                    self.proxies.disconnected();
                    warn!(node = %self.settings.name, reason, "connection to the manager lost");
                    self.stop_watching();
                }
                Err(error) => {
                    self.last_manager.failed();
                    let error = chain(&error);
                    if failures == 0 {
                        warn!(error, "cannot register with a manager");
                    } else {
                        debug!(error, "cannot register with a manager");
                    }
                }
            }
            let pause = doubling(FIRST_PAUSE, failures, LONGEST_PAUSE);
            failures = failures.saturating_add(1);
            // The pause begins with the attempt, so after a slow attempt only the shortest pause is
            // left.
            let until = (began + self.varied(pause)).max(Instant::now() + FIRST_PAUSE);
            if dropping(&mut events, self.wait_until(until)).await {
                failures = 0;
                dropping(&mut events, tokio::time::sleep(self.varied(FIRST_PAUSE))).await;
            }
        }
    }

    /// Returns a pause between half of this one and all of it.
    fn varied(&self, pause: Duration) -> Duration {
        pause / 2 + (self.settings.jitter)(pause / 2)
    }

    /// Connects to a manager, and registers.
    async fn open(&mut self) -> Result<Session<C>, Refused> {
        let mut managers = self.settings.managers.clone();
        let address = loop {
            let list = managers.borrow_and_update().clone();
            match self.last_manager.next_of(&list) {
                Some(address) => break address,
                // Without an address there is nothing to try until the list changes.
                None if managers.changed().await.is_ok() => {}
                None => std::future::pending().await,
            }
        };
        let moved = async {
            // If the sender was dropped, the list remains as it is.
            if managers.wait_for(|list| !list.contains(&address)).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            opened = self.register(&address) => opened,
            () = moved => Err(Refused::Moved { address: address.clone() }),
        }
    }

    async fn register(&self, address: &ManagerAddress) -> Result<Session<C>, Refused> {
        let peer = self.settings.security.connect(address).await?;
        let session = Session::register(peer, &self.settings.name, self.watched.clone(), &self.proxies).await;
        let session = session.map_err(|error| Refused::Register { address: address.clone(), error })?;
        info!(node = %self.settings.name, manager = %address, "registered");
        Ok(session)
    }

    /// Waits without a connection. Returns whether the addresses of managers have changed before.
    async fn wait_until(&self, until: Instant) -> bool {
        let mut managers = self.settings.managers.clone();
        let before = managers.borrow_and_update().clone();
        let changed = managers.wait_for(|list| *list != before);
        let changed = timeout_at(until, changed).await.map(|changed| changed.is_ok());
        if changed == Ok(false) {
            // The sender was dropped, so the list remains as it is.
            sleep_until(until).await;
        }
        changed == Ok(true)
    }

    /// Ends the subscriptions of a lost connection. Those of the next one take effect after this.
    fn stop_watching(&mut self) {
        while self.background.try_join_next().is_some() {}
        if mutant!(WatchesWithoutManager) {
            return;
        }
        let watched = self.watched.clone();
        let mut ending = Box::pin(async move {
            if let Err(error) = watched.set(Subscriptions::default()).await {
                debug!(%error, "cannot unsubscribe from systemd");
            }
        });
        // The first poll takes the turn.
        if ending.as_mut().now_or_never().is_none() {
            self.background.spawn(ending);
        }
    }
}

/// Awaits something while there is no connection, and drops the events of systemd, which cannot be
/// reported: the task that sends them would wait, and with it results of jobs.
async fn dropping<T>(events: &mut mpsc::Receiver<Event>, awaited: impl Future<Output = T>) -> T {
    let mut awaited = std::pin::pin!(awaited);
    loop {
        tokio::select! {
            done = &mut awaited => return done,
            Some(_) = events.recv() => {}
        }
    }
}

/// Logs the jobs that an earlier agent or another process has started. A call for the same unit
/// joins its job.
async fn log_running_jobs<C: UnitControl>(control: Arc<C>) {
    match control.jobs().await {
        Ok(jobs) => {
            for (job, systemd_unit) in jobs {
                info!(job, systemd_unit, "systemd job is running");
            }
        }
        Err(error) => warn!(%error, "cannot list the jobs of systemd"),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
