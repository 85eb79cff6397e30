//! Jobs of a client: starts one and waits for its result. The client reads signals before it sends
//! the request, so that it receives the result of a job that ends before the reply.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::timeout;
use zbus::{Message, ObjectPath};

use super::Client;
use super::error::ClientError;
use super::signals::Signals;
use crate::fleet::dbus::names::{MANAGER_INTERFACE, MANAGER_PATH};
use crate::fleet::dbus::values::{JobMode, JobType};

/// A request for a job.
#[derive(Debug, Clone, Copy)]
pub struct JobRequest<'a> {
    pub node: &'a str,
    pub unit: &'a str,
    pub kind: JobType,
    pub mode: JobMode,
}

/// A job, and its result if the client waited for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    pub id: u32,
    /// A value of [`JobResult`](crate::fleet::dbus::values::JobResult), or one that a newer manager
    /// has added.
    pub result: Option<String>,
}

impl Client {
    /// Starts a job. With a limit, waits until the job ends.
    ///
    /// # Errors
    /// If the manager or systemd refuses the job, if it does not end in time, or if the manager is
    /// lost. A job that exceeds the limit is not cancelled.
    pub async fn run_job(
        &self,
        request: JobRequest<'_>,
        limit: Option<Duration>,
    ) -> Result<Job, ClientError> {
        let Some(limit) = limit else {
            let path = self.queue_job(request).await?;
            return Ok(Job { id: job_id(&path)?, result: None });
        };
        let mut signals = Signals::read(&self.connection).await?;
        signals.add_match(&self.connection, Some(MANAGER_PATH), MANAGER_INTERFACE, "JobRemoved").await?;
        let mut ended = HashMap::new();
        let path = signals.during(self.queue_job(request), |signal| ended.extend(removed(signal))).await?;
        let id = job_id(&path)?;
        if let Some(result) = ended.remove(&path) {
            return Ok(Job { id, result: Some(result) });
        }
        let wait = async {
            loop {
                if let Some((_, result)) = removed(&signals.next().await?).filter(|(job, _)| *job == path) {
                    return Ok(result);
                }
            }
        };
        match timeout(limit, wait).await {
            Ok(result) => Ok(Job { id, result: Some(result?) }),
            Err(_) => Err(ClientError::JobGoesOn { id, seconds: limit.as_secs() }),
        }
    }

    /// Returns the object path of the job.
    async fn queue_job(&self, request: JobRequest<'_>) -> Result<String, ClientError> {
        let JobRequest { node, unit, kind, mode } = request;
        let object = self.node(node).await?;
        let mode = mode.as_str();
        let path = match kind {
            JobType::Start => object.start_unit(unit, mode).await,
            JobType::Stop => object.stop_unit(unit, mode).await,
            JobType::Reload => object.reload_unit(unit, mode).await,
            JobType::Restart => object.restart_unit(unit, mode).await,
        };
        Ok(self.reply(path, Some(node))?.as_str().to_owned())
    }
}

/// Returns the object path and the result of a job that has ended.
fn removed(signal: &Message) -> Option<(String, String)> {
    let header = signal.header();
    if header.interface()?.as_str() != MANAGER_INTERFACE || header.member()?.as_str() != "JobRemoved" {
        return None;
    }
    type Removed<'a> = (u32, ObjectPath<'a>, &'a str, &'a str, &'a str);
    let body = signal.body();
    let (_, job, _, _, result) = body.deserialize::<Removed<'_>>().ok()?;
    Some((job.as_str().to_owned(), result.to_owned()))
}

fn job_id(path: &str) -> Result<u32, ClientError> {
    let id = path.rsplit('/').next().and_then(|id| id.parse().ok());
    id.ok_or_else(|| ClientError::Protocol(format!("'{}' is not the path of a job", path.escape_debug())))
}
