//! The agent of a node: it connects to a manager, executes the manager's calls on systemd, and
//! reports results of jobs and changes of units. `session` handles one connection, `call` one call,
//! and `state` has the decisions.

mod call;
mod local_bus;
mod proxies;
mod proxy_service;
mod session;
mod state;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::runtime::backoff::doubling;
use crate::runtime::service::stopped;

use super::address::ManagerAddress;
use super::dbus::bus::Bus;
use super::dbus::connect::{ConnectError, Security, connect};
use super::dbus::errors::CallError;
use super::name::NodeName;
use super::systemd::{Event, UnitControl};
use proxy_service::ProxyService;
use session::Session;

/// The pauses between attempts to connect. They are short, so that a node is online soon after its
/// manager or the link to it is back.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(800);

/// The settings of an agent.
#[derive(Debug, Clone)]
pub struct Settings {
    pub name: NodeName,
    /// The addresses of managers, which are tried in turn. It may change while the agent runs.
    pub managers: watch::Receiver<Vec<ManagerAddress>>,
    pub security: Security,
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
}

/// The agent of a node.
#[derive(Debug)]
pub struct Agent<C> {
    settings: Settings,
    control: std::sync::Arc<C>,
    events: mpsc::Receiver<Event>,
    /// The bus on which units of this node create proxy services.
    bus: Option<Bus>,
    proxies: std::sync::Arc<ProxyService<C>>,
}

impl<C: UnitControl> Agent<C> {
    pub fn new(settings: Settings, control: C, events: mpsc::Receiver<Event>) -> Self {
        let control = std::sync::Arc::new(control);
        let proxies = std::sync::Arc::new(ProxyService::new(std::sync::Arc::clone(&control), None));
        Self { settings, control, events, bus: None, proxies }
    }

    /// Lets units of this node create proxy services on `bus`. They are kept in `file`.
    pub fn with_proxies(mut self, bus: Bus, file: Option<PathBuf>) -> Self {
        self.bus = Some(bus);
        self.proxies = std::sync::Arc::new(ProxyService::new(std::sync::Arc::clone(&self.control), file));
        self
    }

    /// Runs until `stop` is set. Connects again whenever the connection ends. Units and jobs of
    /// systemd are left as they are.
    pub async fn run(mut self, stop: watch::Receiver<bool>) {
        let proxies = std::sync::Arc::clone(&self.proxies);
        let bus = self.bus.take();
        let serving = async {
            match bus {
                Some(bus) => local_bus::serve(bus, std::sync::Arc::clone(&proxies)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.follow_managers(stop) => {}
            () = std::sync::Arc::clone(&proxies).run() => {}
            () = serving => {}
        }
    }

    async fn follow_managers(mut self, mut stop: watch::Receiver<bool>) {
        self.log_running_jobs().await;
        let (mut attempts, mut failures) = (0, 0);
        loop {
            let began = Instant::now();
            let session = tokio::select! {
                () = stopped(&mut stop) => return,
                session = self.open(attempts) => session,
            };
            attempts = attempts.wrapping_add(1);
            match session {
                Ok(session) => {
                    failures = 0;
                    let reason = tokio::select! {
                        () = stopped(&mut stop) => return,
                        reason = session.run(&self.settings, &mut self.events) => reason,
                    };
                    self.proxies.disconnected();
                    warn!(node = %self.settings.name, reason, "connection to the manager lost");
                    self.stop_watching().await;
                }
                Err(error) if failures == 0 => warn!(error = chain(&error), "cannot register with a manager"),
                Err(error) => debug!(error = chain(&error), "cannot register with a manager"),
            }
            let pause = doubling(FIRST_PAUSE, failures, LONGEST_PAUSE);
            let pause = pause / 2 + (self.settings.jitter)(pause / 2);
            failures = failures.saturating_add(1);
            // The pause begins with the attempt, so after a slow attempt only the shortest pause is
            // left.
            let until = (began + pause).max(Instant::now() + FIRST_PAUSE);
            tokio::select! {
                () = stopped(&mut stop) => return,
                () = self.idle(until) => {}
            }
        }
    }

    /// Connects to the next manager in the list, and registers.
    async fn open(&mut self, attempt: usize) -> Result<Session<C>, Refused> {
        let addresses = self.settings.managers.borrow_and_update().clone();
        let Some(address) = addresses.get(attempt % addresses.len().max(1)) else {
            // Without an address there is nothing to try until the list changes.
            let mut managers = self.settings.managers.clone();
            let changed = async {
                if managers.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            changed.await;
            return Box::pin(self.open(attempt)).await;
        };
        let peer = connect(address, &self.settings.security).await?;
        let session = Session::register(peer, &self.settings.name, &self.control, &self.proxies).await;
        let session = session.map_err(|error| Refused::Register { address: address.clone(), error })?;
        info!(node = %self.settings.name, manager = %address, "registered");
        Ok(session)
    }

    /// Waits without a connection. Drops the events of systemd, which cannot be reported meanwhile.
    async fn idle(&mut self, until: Instant) {
        let drain = async {
            while self.events.recv().await.is_some() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = drain => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// Ends the subscriptions of a lost connection.
    async fn stop_watching(&mut self) {
        let control = std::sync::Arc::clone(&self.control);
        if let Err(error) = control.watch(Default::default()).await {
            debug!(%error, "cannot unsubscribe from systemd");
        }
        while self.events.try_recv().is_ok() {}
    }

    /// Logs the jobs that an earlier agent or another process has started. A call for the same unit
    /// joins its job.
    async fn log_running_jobs(&self) {
        match self.control.jobs().await {
            Ok(jobs) => {
                for (job, systemd_unit) in jobs {
                    info!(job, systemd_unit, "systemd job is running");
                }
            }
            Err(error) => warn!(%error, "cannot list the jobs of systemd"),
        }
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
