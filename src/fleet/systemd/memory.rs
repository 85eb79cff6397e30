//! A systemd in memory, for simulations and tests. It has services with a fixed behaviour, and
//! sends the same errors and events as the real one; `tests/fleet/contract.rs` compares both.

mod execution;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use zbus::{OwnedObjectPath, OwnedVariant};

use crate::fleet::dbus::errors::{CallError, INVALID_ARGS, NO_SUCH_UNIT, TIMEOUT, UNKNOWN_PROPERTY};
use crate::fleet::dbus::values::{
    JobResult, JobType, Properties, Setting, UnitFileChange, UnitFileRow, UnitRow,
};

use super::properties::{job_path, unit_path};
use super::{Event, JobRequest, QueuedJob, Subscriptions, UnitControl, UnitState};

const MAX_EVENTS: usize = 4096;
const MODES: [&str; 6] =
    ["replace", "fail", "replace-irreversibly", "isolate", "ignore-dependencies", "ignore-requirements"];
const MASKED: &str = "org.freedesktop.systemd1.UnitMasked";
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";
const NO_SUCH_FILE: &str = "org.freedesktop.DBus.Error.FileNotFound";
const SIGKILL: i32 = 9;
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// The behaviour of a service in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Starts and stops at once.
    Quick,
    /// Starts when [`MemorySystemd::let_slow_start`] is called.
    Slow,
    /// Fails to start.
    Failing,
    /// Requires a service that fails to start.
    Dependent,
    /// Exceeds the time limit of its job.
    TooSlow,
    /// Stops only after SIGKILL.
    Stubborn,
    Masked,
}

/// A systemd in memory. Clones are the same one.
#[derive(Debug, Clone)]
pub struct MemorySystemd {
    state: Arc<Mutex<State>>,
    is_answering: watch::Sender<bool>,
}

#[derive(Debug)]
struct State {
    units: BTreeMap<String, Unit>,
    jobs: BTreeMap<u32, Job>,
    last_job: u32,
    slow_may_start: bool,
    watched: Subscriptions,
    default_target: String,
    events: mpsc::Sender<Event>,
}

#[derive(Debug)]
struct Unit {
    behaviour: Behaviour,
    state: UnitState,
    frozen: bool,
}

#[derive(Debug)]
struct Job {
    unit: String,
    kind: JobType,
    done: Vec<oneshot::Sender<JobResult>>,
}

impl MemorySystemd {
    /// Creates a systemd with these services. A name that ends in `@.service` is a template.
    pub fn new(units: &[(&str, Behaviour)]) -> (Self, mpsc::Receiver<Event>) {
        let (events, receiver) = mpsc::channel(MAX_EVENTS);
        let units = units.iter().map(|(name, behaviour)| ((*name).to_owned(), Unit::new(*behaviour)));
        let state = State {
            units: units.collect(),
            jobs: BTreeMap::new(),
            last_job: 0,
            slow_may_start: false,
            watched: Subscriptions::default(),
            default_target: "default.target".to_owned(),
            events,
        };
        (Self { state: Arc::new(Mutex::new(state)), is_answering: watch::Sender::new(true) }, receiver)
    }

    /// Lets slow services finish their start, from now on.
    pub fn let_slow_start(&self) {
        let mut state = self.lock();
        state.slow_may_start = true;
        let starting: Vec<u32> = state.jobs.keys().copied().collect();
        for id in starting {
            state.execute(id);
        }
    }

    /// Sets whether calls are executed and answered. The other calls wait, or fail after the time
    /// that a real bus has for a reply.
    pub fn set_answering(&self, is_answering: bool) {
        self.is_answering.send_replace(is_answering);
    }

    async fn turn(&self) -> Result<MutexGuard<'_, State>, CallError> {
        let mut answering = self.is_answering.subscribe();
        let waited = timeout(REPLY_TIMEOUT, answering.wait_for(|answering| *answering)).await;
        let waited = waited.map(|_| ()).map_err(|_| CallError::new(TIMEOUT, "systemd does not answer"));
        waited.map(|()| self.lock())
    }

    /// Returns how many jobs were created.
    pub fn jobs_created(&self) -> u32 {
        self.lock().last_job
    }

    /// Returns whether a unit is watched.
    pub fn is_watching(&self) -> bool {
        !self.lock().watched.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Unit {
    fn new(behaviour: Behaviour) -> Self {
        let text = str::to_owned;
        let (load, file) = match behaviour {
            Behaviour::Masked => ("masked", "masked"),
            Behaviour::Quick => ("loaded", "disabled"),
            _ => ("loaded", "static"),
        };
        let state = UnitState {
            load: text(load),
            active: text("inactive"),
            sub: text("dead"),
            file: text(file),
            result: Some(text("success")),
        };
        Self { behaviour, state, frozen: false }
    }
}

fn path(text: String) -> OwnedObjectPath {
    OwnedObjectPath::try_from(text).unwrap_or_default()
}

impl UnitControl for MemorySystemd {
    async fn queue_job(&self, request: JobRequest) -> Result<QueuedJob, CallError> {
        self.turn().await?.queue(request)
    }

    async fn cancel_job(&self, id: u32) -> Result<(), CallError> {
        self.turn().await?.end(id, JobResult::Cancelled);
        Ok(())
    }

    async fn jobs(&self) -> Result<Vec<(u32, String)>, CallError> {
        Ok(self.turn().await?.jobs.iter().map(|(id, job)| (*id, job.unit.clone())).collect())
    }

    async fn kill(&self, unit: &str, who: &str, signal: i32) -> Result<(), CallError> {
        let mut state = self.lock();
        state.unit(unit)?;
        if !["main", "control", "all"].contains(&who) {
            return Err(CallError::new(INVALID_ARGS, format!("Invalid whom argument: {who}")));
        }
        if !(1..=64).contains(&signal) {
            return Err(CallError::new(INVALID_ARGS, "Signal number out of range."));
        }
        let Unit { behaviour, state: now, .. } = state.unit(unit)?;
        let running = matches!(now.active.as_str(), "active" | "deactivating");
        if running && (signal == SIGKILL || *behaviour != Behaviour::Stubborn) {
            let result = if signal == SIGKILL {
                ("failed", "failed", "signal")
            } else {
                ("inactive", "dead", "success")
            };
            state.set(unit, (result.0, result.1), result.2);
            let stops = state.jobs.iter().find(|(_, job)| job.unit == unit).map(|(id, _)| *id);
            if let Some(id) = stops {
                state.end(id, JobResult::Done);
            }
        }
        Ok(())
    }

    async fn freeze(&self, unit: &str) -> Result<(), CallError> {
        self.turn().await?.unit(unit)?.frozen = true;
        Ok(())
    }

    async fn thaw(&self, unit: &str) -> Result<(), CallError> {
        self.lock().unit(unit)?.frozen = false;
        Ok(())
    }

    async fn state(&self, unit: &str) -> Result<UnitState, CallError> {
        match self.lock().unit(unit) {
            Ok(unit) => Ok(unit.state.clone()),
            Err(error) if error.name == NO_SUCH_UNIT => Ok(UnitState {
                load: "not-found".to_owned(),
                active: "inactive".to_owned(),
                sub: "dead".to_owned(),
                ..UnitState::default()
            }),
            Err(error) => Err(error),
        }
    }

    async fn properties(&self, unit: &str, _interface: &str) -> Result<Properties, CallError> {
        Ok(self.state(unit).await?.properties())
    }

    async fn property(
        &self,
        unit: &str,
        _interface: &str,
        property: &str,
    ) -> Result<OwnedVariant, CallError> {
        let frozen = self.lock().unit(unit)?.frozen;
        if property == "FreezerState" {
            return Ok(super::properties::text_variant(if frozen { "frozen" } else { "running" }));
        }
        let found = self.state(unit).await?.properties().remove(property);
        found.ok_or_else(|| CallError::new(UNKNOWN_PROPERTY, format!("Unknown property {property}.")))
    }

    async fn set_properties(&self, unit: &str, _: bool, _: Vec<Setting>) -> Result<(), CallError> {
        self.lock().unit(unit).map(drop)
    }

    async fn list_units(&self) -> Result<Vec<UnitRow>, CallError> {
        let state = self.turn().await?;
        let rows = state.units.iter().filter(|(name, _)| !name.contains("@."));
        let rows = rows.map(|(name, Unit { state: now, .. })| {
            let job = state.jobs.iter().find(|(_, job)| job.unit == *name);
            let job = job.map(|(id, job)| (*id, job.kind.as_str().to_lowercase()));
            let (job, kind) = job.unwrap_or_default();
            let text = String::new();
            let job_path = if job == 0 { "/".to_owned() } else { job_path(job) };
            let shown = (now.load.clone(), now.active.clone(), now.sub.clone());
            let (load, active, sub) = shown;
            (
                name.clone(),
                name.clone(),
                load,
                active,
                sub,
                text,
                path(unit_path(name)),
                job,
                kind,
                path(job_path),
            )
        });
        Ok(rows.collect())
    }

    /// The units here write nothing.
    async fn journal(&self, unit: &str, _: u32, _: &str) -> Result<Vec<String>, CallError> {
        self.lock().unit(unit).map(|_| Vec::new())
    }

    async fn list_unit_files(&self) -> Result<Vec<UnitFileRow>, CallError> {
        let state = self.lock();
        let rows = state.units.iter();
        Ok(rows.map(|(name, unit)| (format!("/units/{name}"), unit.state.file.clone())).collect())
    }

    async fn unit_file_state(&self, file: &str) -> Result<String, CallError> {
        let mut state = self.lock();
        let unit = state.unit(file).map_err(|_| CallError::new(NO_SUCH_FILE, "No such file or directory"))?;
        Ok(unit.state.file.clone())
    }

    async fn enable(
        &self,
        files: Vec<String>,
        _runtime: bool,
        _force: bool,
    ) -> Result<(bool, Vec<UnitFileChange>), CallError> {
        let changes = self.lock().set_files(&files, ("disabled", "enabled"), "symlink")?;
        Ok((true, changes))
    }

    async fn disable(&self, files: Vec<String>, _runtime: bool) -> Result<Vec<UnitFileChange>, CallError> {
        self.lock().set_files(&files, ("enabled", "disabled"), "unlink")
    }

    async fn reload(&self) -> Result<(), CallError> {
        Ok(())
    }

    async fn instance(&self) -> Result<u64, CallError> {
        Ok(1)
    }

    async fn is_stopping(&self) -> Result<bool, CallError> {
        Ok(false)
    }

    async fn reset_failed(&self, unit: Option<&str>) -> Result<(), CallError> {
        let mut state = self.lock();
        let names: Vec<String> = match unit {
            Some(name) => state.unit(name).map(|_| vec![name.to_owned()])?,
            None => state.units.keys().cloned().collect(),
        };
        for name in names {
            if state.unit(&name)?.state.active == "failed" {
                state.set(&name, ("inactive", "dead"), "success");
            }
        }
        Ok(())
    }

    async fn default_target(&self) -> Result<String, CallError> {
        Ok(self.lock().default_target.clone())
    }

    async fn set_default_target(&self, name: &str, _: bool) -> Result<Vec<UnitFileChange>, CallError> {
        name.clone_into(&mut self.lock().default_target);
        Ok(vec![("symlink".to_owned(), "/units/default.target".to_owned(), format!("/units/{name}"))])
    }

    async fn watch(&self, units: Subscriptions) -> Result<(), CallError> {
        let watching = !units.is_empty();
        let before = std::mem::replace(&mut self.lock().watched, units);
        if watching == before.is_empty() {
            drop(self.turn().await?);
        }
        Ok(())
    }

    fn refresh(&self, units: Vec<String>) {
        let mut state = self.lock();
        for name in units {
            if let Ok(unit) = state.unit(&name) {
                let now = unit.state.clone();
                state.emit(Event::Unit(name, now));
            }
        }
    }
}
