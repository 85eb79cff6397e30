//! The calls to systemd over D-Bus. They translate arguments and errors, and make no decisions.

use futures_util::future::join;
use tokio::sync::oneshot;
use zbus::message::Sequence;
use zbus::{Connection, OwnedVariant};

use crate::fleet::dbus::errors::{CallError, FAILED, INVALID_ARGS, UNKNOWN_OBJECT, UNKNOWN_PROPERTY};
use crate::fleet::dbus::values::{JobType, Properties, Setting, UnitFileChange, UnitFileRow, UnitRow};

use super::bus::{Live, Recipient, Request, Shared, Systemd, lock};
use super::journal;
use super::properties::{
    SYSTEMD, UNIT_INTERFACE, has_result, job_path, returned_job, state_of, type_interface, unit_path,
};
use super::{JobRequest, QueuedJob, Subscriptions, UnitControl, UnitState};

const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// systemd's error for a job that has ended.
const NO_SUCH_JOB: &str = "org.freedesktop.systemd1.NoSuchJob";

/// A call that may return a job. Dropping it ends the call, also if the caller was cancelled.
struct JobCall<'a>(&'a Shared, u64);

impl<'a> JobCall<'a> {
    fn begin(shared: &'a Shared) -> Self {
        let call = lock(&shared.jobs).call_begins();
        Self(shared, call)
    }
}

impl Drop for JobCall<'_> {
    fn drop(&mut self) {
        lock(&self.0.jobs).call_ends(self.1);
    }
}

impl UnitControl for Systemd {
    async fn queue_job(&self, request: JobRequest) -> Result<QueuedJob, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        let JobRequest { kind, unit, mode, transient } = request;
        // The call begins before the request is sent, so no result is lost.
        let call = JobCall::begin(&self.shared);
        let path = match (kind, transient) {
            (_, Some((settings, auxiliary))) => {
                manager.start_transient_unit(unit.clone(), mode, settings, auxiliary).await?
            }
            (JobType::Start, None) => manager.start_unit(unit.clone(), mode).await?,
            (JobType::Stop, None) => manager.stop_unit(unit.clone(), mode).await?,
            (JobType::Reload, None) => manager.reload_unit(unit.clone(), mode).await?,
            (JobType::Restart, None) => manager.restart_unit(unit.clone(), mode).await?,
        };
        let id = returned_job(&path)?;
        let (done, receiver) = oneshot::channel();
        let ended = lock(&self.shared.jobs).queued(id, Recipient { unit, kind, done });
        if let Some((recipient, result)) = ended {
            recipient.send(result);
        }
        drop(call);
        Ok(QueuedJob { id, done: receiver })
    }

    async fn cancel_job(&self, id: u32) -> Result<(), CallError> {
        let (Live { connection, .. }, _permit) = self.shared.call().await?;
        let interface = Some("org.freedesktop.systemd1.Job");
        let reply = connection.call_method(Some(SYSTEMD), job_path(id), interface, "Cancel", &()).await;
        match reply.map_err(CallError::from) {
            Err(error) if error.name != NO_SUCH_JOB && error.name != UNKNOWN_OBJECT => Err(error),
            _ => Ok(()),
        }
    }

    async fn jobs(&self) -> Result<Vec<(u32, String)>, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.list_jobs().await?.into_iter().map(|job| (job.0, job.1)).collect())
    }

    async fn kill(&self, unit: &str, who: &str, signal: i32) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.kill_unit(unit.to_owned(), who.to_owned(), signal).await?)
    }

    async fn freeze(&self, unit: &str) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.freeze_unit(unit.to_owned()).await?)
    }

    async fn thaw(&self, unit: &str) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.thaw_unit(unit.to_owned()).await?)
    }

    async fn state(&self, unit: &str) -> Result<UnitState, CallError> {
        let (Live { connection, manager }, _permit) = self.shared.call().await?;
        // systemd checks the name in this call.
        manager.load_unit(unit.to_owned()).await?;
        Ok(read_state(&connection, unit).await?.0)
    }

    async fn properties(&self, unit: &str, interface: &str) -> Result<Properties, CallError> {
        let (Live { connection, manager }, _permit) = self.shared.call().await?;
        let path = manager.load_unit(unit.to_owned()).await?;
        get_all(&connection, path.as_str(), interface).await.map(|(properties, _)| properties)
    }

    async fn property(&self, unit: &str, interface: &str, property: &str) -> Result<OwnedVariant, CallError> {
        let (Live { connection, manager }, _permit) = self.shared.call().await?;
        let path = manager.load_unit(unit.to_owned()).await?;
        if !interface.is_empty() {
            return get(&connection, path.as_str(), interface, property).await;
        }
        let own = type_interface(unit)
            .ok_or_else(|| CallError::new(INVALID_ARGS, "the name of the unit has no type"))?;
        match get(&connection, path.as_str(), &own, property).await {
            Err(error) if error.name == UNKNOWN_PROPERTY => {
                get(&connection, path.as_str(), UNIT_INTERFACE, property).await
            }
            found => found,
        }
    }

    async fn set_properties(
        &self,
        unit: &str,
        runtime: bool,
        settings: Vec<Setting>,
    ) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.set_unit_properties(unit.to_owned(), runtime, settings).await?)
    }

    async fn list_units(&self) -> Result<Vec<UnitRow>, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.list_units().await?)
    }

    async fn journal(&self, unit: &str, entries: u32, cursor: &str) -> Result<Vec<String>, CallError> {
        journal::read(self.is_user, unit, entries, cursor).await
    }

    async fn list_unit_files(&self) -> Result<Vec<UnitFileRow>, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.list_unit_files().await?)
    }

    async fn unit_file_state(&self, file: &str) -> Result<String, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.get_unit_file_state(file.to_owned()).await?)
    }

    async fn enable(
        &self,
        files: Vec<String>,
        runtime: bool,
        force: bool,
    ) -> Result<(bool, Vec<UnitFileChange>), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.enable_unit_files(files, runtime, force).await?)
    }

    async fn disable(&self, files: Vec<String>, runtime: bool) -> Result<Vec<UnitFileChange>, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.disable_unit_files(files, runtime).await?)
    }

    async fn instance(&self) -> Result<u64, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.userspace_timestamp().await?)
    }

    async fn is_stopping(&self) -> Result<bool, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.system_state().await? == "stopping")
    }

    async fn reload(&self) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.reload().await?)
    }

    async fn reset_failed(&self, unit: Option<&str>) -> Result<(), CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        match unit {
            Some(unit) => Ok(manager.reset_failed_unit(unit.to_owned()).await?),
            None => Ok(manager.reset_failed().await?),
        }
    }

    async fn default_target(&self) -> Result<String, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.get_default_target().await?)
    }

    async fn set_default_target(&self, name: &str, force: bool) -> Result<Vec<UnitFileChange>, CallError> {
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        Ok(manager.set_default_target(name.to_owned(), force).await?)
    }

    async fn watch(&self, units: Subscriptions) -> Result<(), CallError> {
        let watching = !units.is_empty();
        let before = std::mem::replace(&mut *lock(&self.shared.watched), units);
        // The send cannot fail: the worker runs until `self` is dropped.
        let _ = self.shared.requests.send(Request::Watched);
        if watching != before.is_empty() {
            return Ok(());
        }
        let (Live { manager, .. }, _permit) = self.shared.call().await?;
        let done = if watching { manager.subscribe().await } else { manager.unsubscribe().await };
        match done.map_err(CallError::from) {
            // A new connection may have subscribed already.
            Err(error) if !error.name.ends_with("Subscribed") => Err(error),
            _ => Ok(()),
        }
    }

    fn refresh(&self, units: Vec<String>) {
        // The send cannot fail: the worker runs until `self` is dropped.
        let _ = self.shared.requests.send(Request::Refresh(units));
    }
}

/// Reads the observed properties, and returns the position of the reply too.
pub(super) async fn read_state(
    connection: &Connection,
    unit: &str,
) -> Result<(UnitState, Sequence), CallError> {
    let path = unit_path(unit);
    let own = type_interface(unit).filter(|_| has_result(unit));
    let result = async {
        match &own {
            Some(interface) => Some(get(connection, &path, interface, "Result").await),
            None => None,
        }
    };
    let (all, result) = join(get_all(connection, &path, UNIT_INTERFACE), result).await;
    let (all, at) = all?;
    let result = match result {
        // A unit whose file is missing or wrong has no interface of its type.
        Some(Err(_)) if state_of(&all).load != "loaded" => None,
        result => result.transpose()?,
    };
    let result = result.and_then(|result| <&str>::try_from(&*result).ok().map(str::to_owned));
    Ok((UnitState { result, ..state_of(&all) }, at))
}

async fn get(
    connection: &Connection,
    path: &str,
    interface: &str,
    property: &str,
) -> Result<OwnedVariant, CallError> {
    let body = (interface, property);
    let reply = connection.call_method(Some(SYSTEMD), path, Some(PROPERTIES), "Get", &body).await?;
    Ok(reply.body().deserialize::<OwnedVariant>()?)
}

async fn get_all(
    connection: &Connection,
    path: &str,
    interface: &str,
) -> Result<(Properties, Sequence), CallError> {
    let reply =
        connection.call_method(Some(SYSTEMD), path, Some(PROPERTIES), "GetAll", &(interface,)).await?;
    let properties = reply.body().deserialize::<Properties>()?;
    if properties.is_empty() {
        return Err(CallError::new(FAILED, format!("the unit has no interface {interface}")));
    }
    Ok((properties, reply.recv_position()))
}
