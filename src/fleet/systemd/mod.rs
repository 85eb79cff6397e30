//! systemd of one machine: [`UnitControl`], the calls and events that an agent needs, and its two
//! implementations: [`Systemd`] over D-Bus, and [`MemorySystemd`] for simulations. Jobs of the
//! fleet and connections to a manager must not be in here.

mod bus;
mod calls;
mod job_table;
mod journal;
mod memory;
mod properties;
mod subscriptions;
mod unit_cache;
mod worker;

use tokio::sync::oneshot;
use zbus::OwnedVariant;

pub use bus::Systemd;
pub use journal::MAX_ENTRIES;
pub use memory::{Behaviour, MemorySystemd};
pub use subscriptions::Subscriptions;

use super::dbus::errors::CallError;
use super::dbus::values::{
    AuxiliaryUnit, JobResult, JobType, Properties, Setting, UnitFileChange, UnitFileRow, UnitRow,
};

/// The state of a systemd unit: the observed properties.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnitState {
    pub load: String,
    pub active: String,
    pub sub: String,
    /// Empty if the unit has no file.
    pub file: String,
    /// `None` for types of units that have no result, such as targets.
    pub result: Option<String>,
}

impl UnitState {
    /// Returns the state as D-Bus properties.
    pub fn properties(&self) -> Properties {
        let texts = [
            ("LoadState", Some(&self.load)),
            ("ActiveState", Some(&self.active)),
            ("SubState", Some(&self.sub)),
            ("UnitFileState", Some(&self.file)),
            ("Result", self.result.as_ref()),
        ];
        let present = texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?)));
        present.map(|(name, text)| (name, properties::text_variant(text))).collect()
    }
}

/// A change that systemd reported. The events of one unit are in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// systemd executes the job with this id. It was waiting for other jobs before.
    JobRunning(u32),
    /// systemd has loaded a watched unit.
    UnitNew(String),
    /// systemd no longer has a watched unit in memory.
    UnitRemoved(String),
    /// The state of a watched unit has changed, or [`UnitControl::refresh`] asked for it.
    Unit(String, UnitState),
}

/// A request for a job.
#[derive(Debug, Clone)]
pub struct JobRequest {
    pub kind: JobType,
    pub unit: String,
    /// One of systemd's job modes, which are more than those of the fleet.
    pub mode: String,
    /// For a transient unit, whose kind is always [`JobType::Start`]: the properties of the unit
    /// and of its auxiliary units.
    pub transient: Option<(Vec<Setting>, Vec<AuxiliaryUnit>)>,
}

impl JobRequest {
    pub fn new(kind: JobType, unit: &str, mode: &str) -> Self {
        Self { kind, unit: unit.to_owned(), mode: mode.to_owned(), transient: None }
    }
}

/// A job that systemd has queued.
#[derive(Debug)]
pub struct QueuedJob {
    /// systemd's id of the job.
    pub id: u32,
    /// Receives the result. Fails only if the [`UnitControl`] is dropped.
    pub done: oneshot::Receiver<JobResult>,
}

/// Control of the units of one systemd. Errors have the names that systemd uses; every call ends in
/// bounded time.
pub trait UnitControl: Send + Sync + 'static {
    /// Queues a job. The result is never lost, also if systemd or its bus restarts meanwhile.
    fn queue_job(&self, request: JobRequest) -> impl Future<Output = Result<QueuedJob, CallError>> + Send;

    /// Cancels a job by systemd's id. A job that has ended is not an error.
    fn cancel_job(&self, id: u32) -> impl Future<Output = Result<(), CallError>> + Send;

    /// Returns systemd's ids of all queued jobs, with the names of their units.
    fn jobs(&self) -> impl Future<Output = Result<Vec<(u32, String)>, CallError>> + Send;

    fn kill(&self, unit: &str, who: &str, signal: i32) -> impl Future<Output = Result<(), CallError>> + Send;

    fn freeze(&self, unit: &str) -> impl Future<Output = Result<(), CallError>> + Send;

    fn thaw(&self, unit: &str) -> impl Future<Output = Result<(), CallError>> + Send;

    /// Returns the observed properties. The load state of an unknown unit is `not-found`.
    fn state(&self, unit: &str) -> impl Future<Output = Result<UnitState, CallError>> + Send;

    /// Returns all properties of one interface of a unit.
    fn properties(
        &self,
        unit: &str,
        interface: &str,
    ) -> impl Future<Output = Result<Properties, CallError>> + Send;

    /// Returns one property. An empty interface means that of the unit's type, then that of all
    /// units.
    fn property(
        &self,
        unit: &str,
        interface: &str,
        property: &str,
    ) -> impl Future<Output = Result<OwnedVariant, CallError>> + Send;

    fn set_properties(
        &self,
        unit: &str,
        runtime: bool,
        settings: Vec<Setting>,
    ) -> impl Future<Output = Result<(), CallError>> + Send;

    fn list_units(&self) -> impl Future<Output = Result<Vec<UnitRow>, CallError>> + Send;

    /// Returns the last entries of a unit's journal as JSON, or those that follow the entry with
    /// this cursor.
    fn journal(
        &self,
        unit: &str,
        entries: u32,
        cursor: &str,
    ) -> impl Future<Output = Result<Vec<String>, CallError>> + Send;

    fn list_unit_files(&self) -> impl Future<Output = Result<Vec<UnitFileRow>, CallError>> + Send;

    fn unit_file_state(&self, file: &str) -> impl Future<Output = Result<String, CallError>> + Send;

    fn enable(
        &self,
        files: Vec<String>,
        runtime: bool,
        force: bool,
    ) -> impl Future<Output = Result<(bool, Vec<UnitFileChange>), CallError>> + Send;

    fn disable(
        &self,
        files: Vec<String>,
        runtime: bool,
    ) -> impl Future<Output = Result<Vec<UnitFileChange>, CallError>> + Send;

    /// Returns a number that differs between two runs of systemd.
    fn instance(&self) -> impl Future<Output = Result<u64, CallError>> + Send;

    /// Returns whether systemd itself stops, for a reboot for example.
    fn is_stopping(&self) -> impl Future<Output = Result<bool, CallError>> + Send;

    /// Reads all unit files again.
    fn reload(&self) -> impl Future<Output = Result<(), CallError>> + Send;

    /// Resets the failed state of one unit, or of all.
    fn reset_failed(&self, unit: Option<&str>) -> impl Future<Output = Result<(), CallError>> + Send;

    fn default_target(&self) -> impl Future<Output = Result<String, CallError>> + Send;

    fn set_default_target(
        &self,
        name: &str,
        force: bool,
    ) -> impl Future<Output = Result<Vec<UnitFileChange>, CallError>> + Send;

    /// Sets which units are watched. systemd sends signals only while the set is not empty.
    fn watch(&self, units: Subscriptions) -> impl Future<Output = Result<(), CallError>> + Send;

    /// Sends one [`Event::Unit`] for each of the units, which must be watched.
    fn refresh(&self, units: Vec<String>);
}
