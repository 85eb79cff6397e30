//! Executes what the pure `proxies` decides: the state file, the answers to helpers, the stops of
//! proxy services, and the announcements on the connection to the manager.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{error, info, warn};
use zbus::Message;

use super::proxies::{Announcement, Effect, Entry, Proxies, Saved};
use crate::fleet::dbus::names::INTERNAL_PROXY_PATH;
use crate::fleet::dbus::values::{JobType, Properties, UnitRow};
use crate::fleet::name::{check_systemd_unit, unescape};
use crate::fleet::proxy::MAX_DEPENDENTS;
use crate::fleet::proxy::name::{BadProxyName, dep_of, target_of, unit_of_dep};
use crate::fleet::systemd::{JobRequest, UnitControl};
use crate::runtime::atomic_file::{Privacy, replace};
use crate::runtime::trusted_file::read_trusted;

/// The pause between two comparisons of the proxies with systemd.
const COMPARE_EVERY: Duration = Duration::from_secs(30);
/// The pause until a failed call of systemd is repeated.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Attempts to stop a proxy service.
const STOP_ATTEMPTS: u32 = 60;
/// The time to find out which units depend on a proxy.
const DEPENDENTS_TIMEOUT: Duration = Duration::from_secs(2);
const MAX_FILE_BYTES: usize = 4 << 20;

/// The proxy services of a node.
#[derive(Debug)]
pub(super) struct ProxyService<C> {
    control: Arc<C>,
    file: Option<PathBuf>,
    state: Mutex<State>,
    /// Whether the instance of systemd is known, and the state file was read.
    is_loaded: watch::Sender<bool>,
    /// The next time to act may be earlier than before.
    rescheduled: Notify,
    /// The state file has to be written.
    unsaved: Notify,
}

#[derive(Debug)]
struct State {
    proxies: Proxies<Instant>,
    session: Option<mpsc::UnboundedSender<Announcement>>,
    /// The helpers that wait for a proxy.
    waiting: BTreeMap<String, Vec<oneshot::Sender<Result<(), String>>>>,
    /// Proxies that are being created, until their dependents are known.
    creating: BTreeSet<String>,
}

impl<C: UnitControl> ProxyService<C> {
    pub(super) fn new(control: Arc<C>, file: Option<PathBuf>) -> Self {
        let proxies = Proxies::new(Saved::default(), 0, Instant::now());
        let state = State { proxies, session: None, waiting: BTreeMap::new(), creating: BTreeSet::new() };
        let (rescheduled, unsaved) = (Notify::new(), Notify::new());
        let is_loaded = watch::Sender::new(false);
        Self { control, file, state: Mutex::new(state), is_loaded, rescheduled, unsaved }
    }

    /// Locks the state. The lock is never held across an `await`.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the state file, and then compares the proxies with systemd from time to time. Runs
    /// until it is dropped.
    pub(super) async fn run(self: Arc<Self>) {
        tokio::join!(self.follow(), self.save());
    }

    /// Writes the state file after changes. The helper does not wait for that: if the agent ends
    /// before, the next one adopts the active services that are missing in the file.
    async fn save(self: &Arc<Self>) {
        loop {
            self.unsaved.notified().await;
            let (service, saved) = (Arc::clone(self), self.state().proxies.saved());
            // The write does not panic.
            let _ = tokio::task::spawn_blocking(move || service.write(&saved)).await;
        }
    }

    async fn follow(self: &Arc<Self>) {
        let instance = self.instance().await;
        let saved = self.read();
        if !saved.proxies.is_empty() {
            info!(proxies = saved.proxies.len(), "proxy services continue");
        }
        self.state().proxies = Proxies::new(saved, instance, Instant::now());
        // Without this, a lost state file would look like a node without proxies.
        let units = self.units().await;
        self.adopt(&units);
        self.compare().await;
        self.is_loaded.send_replace(true);
        let mut compare_at = Instant::now() + COMPARE_EVERY;
        loop {
            if compare_at <= Instant::now() {
                self.compare().await;
                compare_at = Instant::now() + COMPARE_EVERY;
            }
            let deadline = self.state().proxies.deadline();
            tokio::select! {
                () = sleep_until(deadline.map_or(compare_at, |at| at.min(compare_at))) => {}
                () = self.rescheduled.notified() => {}
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                let effects = self.state().proxies.tick(Instant::now());
                self.execute(effects);
                // Proxies that were kept after a reboot.
                compare_at = Instant::now();
            }
        }
    }

    pub(super) async fn loaded(&self) {
        // The sender lives as long as `self`.
        let _ = self.is_loaded.subscribe().wait_for(|is_loaded| *is_loaded).await;
    }

    async fn instance(&self) -> u64 {
        loop {
            match self.control.instance().await {
                Ok(instance) => return instance,
                Err(_) => sleep(RETRY_PAUSE).await,
            }
        }
    }

    fn read(&self) -> Saved {
        let Some(path) = &self.file else { return Saved::default() };
        let read = match read_trusted(path, MAX_FILE_BYTES) {
            Ok(None) => return Saved::default(),
            Ok(Some(bytes)) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        read.unwrap_or_else(|error| {
            error!(file = %path.display(), error, "the file of proxy services cannot be read");
            Saved::default()
        })
    }

    fn write(&self, saved: &Saved) {
        let Some(path) = &self.file else { return };
        // A map with text keys is always valid JSON.
        let text = serde_json::to_vec(saved).unwrap_or_default();
        let directory = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        if let Err(error) = directory.and_then(|()| replace(path, &text, Privacy::Secret)) {
            error!(file = %path.display(), %error, "the file of proxy services cannot be written");
        }
    }

    fn execute(self: &Arc<Self>, effects: Vec<Effect>) {
        let mut state = self.state();
        self.execute_locked(&mut state, effects);
    }

    fn execute_locked(self: &Arc<Self>, state: &mut State, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Announce(announcement) => {
                    if let Some(session) = &state.session {
                        // A session that has ended is followed by another, which announces
                        // everything.
                        let _ = session.send(announcement);
                    }
                }
                Effect::Answer { proxy, result } => {
                    for waiting in state.waiting.remove(&proxy).unwrap_or_default() {
                        // The helper may be gone.
                        let _ = waiting.send(result.clone());
                    }
                }
                Effect::StopUnit { proxy } => {
                    let service = Arc::clone(self);
                    tokio::spawn(async move { service.stop_unit(&proxy).await });
                }
                Effect::Save => self.unsaved.notify_one(),
            }
        }
        self.rescheduled.notify_one();
    }

    async fn stop_unit(&self, proxy: &str) {
        for _ in 0..STOP_ATTEMPTS {
            // It may have been started again, for a new run.
            if !self.state().proxies.has_ended(proxy) {
                return;
            }
            match self.control.queue_job(JobRequest::new(JobType::Stop, proxy, "replace")).await {
                Ok(_) => return,
                Err(error) => warn!(proxy, %error, "the proxy service cannot be stopped"),
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Lists the units of systemd, once it answers.
    async fn units(&self) -> Vec<UnitRow> {
        loop {
            match self.control.list_units().await {
                Ok(units) => return units,
                Err(_) => sleep(RETRY_PAUSE).await,
            }
        }
    }

    /// Adopts the active proxy services that have no entry.
    fn adopt(self: &Arc<Self>, units: &[UnitRow]) {
        for row in units {
            if let (Ok((node, unit)), "active") = (target_of(&row.0), row.3.as_str()) {
                let effects = self.state().proxies.adopted(&row.0, node.to_string(), unit);
                self.execute(effects);
            }
        }
    }

    /// Removes the proxies whose services have stopped without a call of the helper, and adopts
    /// active services that have no entry. A systemd that does not answer changes nothing.
    async fn compare(self: &Arc<Self>) {
        if let Ok(units) = self.control.list_units().await {
            self.adopt(&units);
        }
        let names = self.state().proxies.names();
        for proxy in names {
            if let Ok(unit) = self.control.state(&proxy).await {
                let effects = self.state().proxies.observed(&proxy, &unit.active, Instant::now());
                self.execute(effects);
            }
        }
    }

    /// Announces all proxies to a manager. `session` sends the announcements.
    pub(super) async fn connected(self: Arc<Self>, session: mpsc::UnboundedSender<Announcement>) {
        self.loaded().await;
        let instance = self.instance().await;
        let units = self.units().await;
        let runs = |state: &str| !matches!(state, "inactive" | "failed");
        let deps = units.into_iter().filter(|row| unit_of_dep(&row.0).is_some() && runs(&row.3));
        let deps = deps.map(|row| row.0).collect();
        let mut state = self.state();
        // The session may have ended meanwhile.
        if session.is_closed() {
            return;
        }
        state.proxies.systemd_is(instance, Instant::now());
        state.session = Some(session);
        let effects = state.proxies.connected(deps);
        self.execute_locked(&mut state, effects);
    }

    pub(super) fn disconnected(&self) {
        let mut state = self.state();
        state.session = None;
        state.proxies.disconnected(Instant::now());
        self.rescheduled.notify_one();
    }

    /// Handles a call of the manager for the object of a proxy; `None` if it is invalid.
    pub(super) fn manager_call(self: &Arc<Self>, call: &Message) -> Option<()> {
        let (header, body) = (call.header(), call.body());
        let path = header.path()?.as_str();
        let proxy = unescape(path.strip_prefix(INTERNAL_PROXY_PATH)?.strip_prefix('/')?)?;
        let mut state = self.state();
        let effects = match header.member()?.as_str() {
            "Ready" => {
                let (instance, error): (u64, String) = body.deserialize().ok()?;
                state.proxies.ready(&proxy, if error.is_empty() { Ok(instance) } else { Err(error) })
            }
            "TargetStopped" => {
                let reason: &str = body.deserialize().ok()?;
                info!(proxy, reason, "the proxy has ended; its service is stopped");
                state.proxies.target_stopped(&proxy)
            }
            _ => return None,
        };
        self.execute_locked(&mut state, effects);
        Some(())
    }

    /// Creates a proxy, and waits until its target is active.
    pub(super) async fn create(
        self: &Arc<Self>,
        proxy: String,
        node: String,
        unit: String,
    ) -> Result<(), String> {
        if let Err(reason) = check(&proxy, &node, &unit) {
            let effects = self.state().proxies.refused(&proxy, &reason);
            self.execute(effects);
            return Err(reason);
        }
        self.state().creating.insert(proxy.clone());
        self.loaded().await;
        let dependents = timeout(DEPENDENTS_TIMEOUT, self.dependents(&proxy)).await;
        let dependents = dependents.unwrap_or_else(|_| {
            warn!(proxy, "systemd does not list the dependents in time; cycles are not detected");
            BTreeSet::new()
        });
        let (answer, answered) = oneshot::channel();
        {
            let mut state = self.state();
            if !state.creating.remove(&proxy) {
                return Err("the start was cancelled".to_owned());
            }
            state.waiting.entry(proxy.clone()).or_default().push(answer);
            let entry = Entry::new(node, unit, dependents);
            let effects = state.proxies.created(proxy, entry, Instant::now());
            self.execute_locked(&mut state, effects);
        }
        answered.await.unwrap_or_else(|_| Err("the agent stops".to_owned()))
    }

    pub(super) async fn remove(self: &Arc<Self>, proxy: &str) {
        self.state().creating.remove(proxy);
        self.loaded().await;
        // If systemd does not answer, it probably stops; otherwise the proxy is removed later.
        let stops = self.control.is_stopping().await.unwrap_or(true);
        let effects = self.state().proxies.removed(proxy, stops);
        self.execute(effects);
    }

    /// Returns the units that cannot start before the proxy: those that want or require it and are
    /// ordered after it, and the same for these.
    async fn dependents(&self, proxy: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut queue = VecDeque::from([proxy.to_owned()]);
        while let Some(unit) = queue.pop_front() {
            let interface = "org.freedesktop.systemd1.Unit";
            let Ok(properties) = self.control.properties(&unit, interface).await else { continue };
            for dependent in waiting_units(&properties) {
                if found.len() < MAX_DEPENDENTS && found.insert(dependent.clone()) {
                    queue.push_back(dependent);
                }
            }
        }
        found
    }
}

/// Returns the units that want or require a unit and are ordered after it.
fn waiting_units(properties: &Properties) -> BTreeSet<String> {
    let list = |name: &str| -> BTreeSet<String> {
        let value = properties.get(name).and_then(|value| value.try_clone().ok());
        let list = value.and_then(|value| Vec::<String>::try_from(value).ok());
        list.unwrap_or_default().into_iter().collect()
    };
    let later = list("Before");
    let needing = ["WantedBy", "RequiredBy", "BoundBy", "UpheldBy"].into_iter().flat_map(list);
    needing.filter(|unit| later.contains(unit)).collect()
}

/// Checks the names of a proxy and of its target.
fn check(proxy: &str, node: &str, unit: &str) -> Result<(), String> {
    check_systemd_unit(proxy).map_err(|error| error.to_string())?;
    if node.is_empty() || unit.is_empty() {
        let reason = target_of(proxy).err().unwrap_or(BadProxyName::Form);
        return Err(reason.to_string());
    }
    let node: Result<crate::fleet::name::NodeName, _> = node.parse();
    node.map_err(|error| error.to_string())?;
    for name in [unit, &dep_of(unit)] {
        check_systemd_unit(name).map_err(|error| error.to_string())?;
    }
    let text = || format!("'{unit}' is no service, and a proxy service needs one");
    unit_of_dep(&dep_of(unit)).map(drop).ok_or_else(text)
}

#[cfg(test)]
mod tests {
    use zbus::{OwnedVariant, Variant};

    use super::*;

    #[test]
    fn only_ordered_units_wait_for_a_proxy() {
        let list = |units: &[&str]| {
            let units: Vec<String> = units.iter().map(|unit| (*unit).to_owned()).collect();
            OwnedVariant::try_from(Variant::from(units)).unwrap()
        };
        let properties = Properties::from([
            ("WantedBy".to_owned(), list(&["a.service", "unordered.service", "app.target"])),
            ("RequiredBy".to_owned(), list(&["b.service"])),
            ("Before".to_owned(), list(&["a.service", "b.service", "other.service", "app.target"])),
        ]);
        let waiting: Vec<String> = waiting_units(&properties).into_iter().collect();
        assert_eq!(waiting, ["a.service", "app.target", "b.service"]);
    }

    #[test]
    fn names_are_checked_with_the_reason() {
        let proxy = "hirte-proxy@bar_db.service";
        assert_eq!(check(proxy, "bar", "db.service"), Ok(()));
        for (proxy, node, unit, expected) in [
            ("hirte-proxy@bardb.service", "", "", "has the form hirte-proxy@NODE_UNIT.service"),
            (proxy, "b_r", "db.service", "b_r"),
            (proxy, "bar", "d b.service", "invalid systemd unit name"),
            (proxy, "bar", "db.socket", "is no service"),
            ("a b", "bar", "db.service", "invalid systemd unit name"),
        ] {
            let refused = check(proxy, node, unit).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
