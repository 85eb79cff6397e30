//! The calls of a manager: parsed from messages, executed on systemd, and answered.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};
use zbus::Message;
use zbus::wire::DynamicDeserialize;

use crate::fleet::dbus::errors::{CallError, INVALID_ARGS, LIMITS_EXCEEDED, UNKNOWN_METHOD};
use crate::fleet::dbus::values::{AuxiliaryUnit, JobType, Setting};
use crate::fleet::systemd::{JobRequest, Subscriptions, UnitControl};

use super::session::Context;
use super::state;

/// The pause until the units of a pattern are listed again, if systemd was not reachable.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A call of the internal interface of an agent.
#[derive(Debug)]
pub(super) enum Call {
    Job { id: u32, request: JobRequest },
    CancelJob(u32),
    Kill { unit: String, who: String, signal: i32 },
    Freeze(String),
    Thaw(String),
    Properties { unit: String, interface: String },
    Property { unit: String, interface: String, property: String },
    SetProperties { unit: String, runtime: bool, settings: Vec<Setting> },
    ListUnits,
    ListUnitFiles,
    Journal { unit: String, entries: u32, cursor: String },
    FileState(String),
    Enable { files: Vec<String>, runtime: bool, force: bool },
    Disable { files: Vec<String>, runtime: bool },
    Reload,
    ResetFailed(Option<String>),
    DefaultTarget,
    SetDefaultTarget { name: String, force: bool },
    Subscription(SubscriptionCall),
}

/// Calls about subscriptions that are executed together.
const MAX_BATCH: usize = 4_096;

/// A call that changes the subscriptions.
#[derive(Debug)]
pub(super) enum SubscriptionCall {
    Subscribe(String),
    Unsubscribe(String),
}

impl Call {
    /// Parses a method call.
    ///
    /// # Errors
    /// If the agent has no such method, or its arguments are of other types.
    pub(super) fn parse(message: &Message) -> Result<Self, CallError> {
        let header = message.header();
        let member = header.member().map(|member| member.as_str()).unwrap_or_default();
        let job = |kind| {
            let (unit, mode, id): (String, String, u32) = arguments(message)?;
            Ok(Self::Job { id, request: JobRequest { kind, unit, mode, transient: None } })
        };
        let text = || arguments::<(String,)>(message).map(|(text,)| text);
        match member {
            "StartUnit" => job(JobType::Start),
            "StopUnit" => job(JobType::Stop),
            "ReloadUnit" => job(JobType::Reload),
            "RestartUnit" => job(JobType::Restart),
            "StartTransientUnit" => {
                type Transient = (String, String, Vec<Setting>, Vec<AuxiliaryUnit>, u32);
                let (unit, mode, settings, auxiliary, id): Transient = arguments(message)?;
                let transient = Some((settings, auxiliary));
                Ok(Self::Job { id, request: JobRequest { kind: JobType::Start, unit, mode, transient } })
            }
            "JobCancel" => arguments::<(u32,)>(message).map(|(id,)| Self::CancelJob(id)),
            "KillUnit" => {
                let (unit, who, signal) = arguments(message)?;
                Ok(Self::Kill { unit, who, signal })
            }
            "FreezeUnit" => Ok(Self::Freeze(text()?)),
            "ThawUnit" => Ok(Self::Thaw(text()?)),
            "GetUnitProperties" => {
                let (unit, interface) = arguments(message)?;
                Ok(Self::Properties { unit, interface })
            }
            "GetUnitProperty" => {
                let (unit, interface, property) = arguments(message)?;
                Ok(Self::Property { unit, interface, property })
            }
            "SetUnitProperties" => {
                let (unit, runtime, settings) = arguments(message)?;
                Ok(Self::SetProperties { unit, runtime, settings })
            }
            "ListUnits" => Ok(Self::ListUnits),
            "ListUnitFiles" => Ok(Self::ListUnitFiles),
            "ReadJournal" => {
                let (unit, entries, cursor) = arguments(message)?;
                Ok(Self::Journal { unit, entries, cursor })
            }
            "GetUnitFileState" => Ok(Self::FileState(text()?)),
            "EnableUnitFiles" => {
                let (files, runtime, force) = arguments(message)?;
                Ok(Self::Enable { files, runtime, force })
            }
            "DisableUnitFiles" => {
                let (files, runtime) = arguments(message)?;
                Ok(Self::Disable { files, runtime })
            }
            "Reload" => Ok(Self::Reload),
            "ResetFailed" => Ok(Self::ResetFailed(None)),
            "ResetFailedUnit" => Ok(Self::ResetFailed(Some(text()?))),
            "GetDefaultTarget" => Ok(Self::DefaultTarget),
            "SetDefaultTarget" => {
                let (name, force) = arguments(message)?;
                Ok(Self::SetDefaultTarget { name, force })
            }
            "Subscribe" => Ok(Self::Subscription(SubscriptionCall::Subscribe(text()?))),
            "Unsubscribe" => Ok(Self::Subscription(SubscriptionCall::Unsubscribe(text()?))),
            _ => Err(CallError::new(UNKNOWN_METHOD, "the agent has no such method")),
        }
    }

    /// Whether the manager waits for a reply. It sends the other calls once.
    pub(super) fn is_answered(&self) -> bool {
        !matches!(self, Self::CancelJob(_) | Self::Subscription(_))
    }

    /// Returns the manager's id of the job that the call begins.
    pub(super) fn job_id(&self) -> Option<u32> {
        match self {
            Self::Job { id, .. } => Some(*id),
            _ => None,
        }
    }
}

fn arguments<T>(message: &Message) -> Result<T, CallError>
where
    T: for<'de> DynamicDeserialize<'de>,
{
    let body = message.body();
    body.deserialize().map_err(|_| CallError::new(INVALID_ARGS, "the arguments have other types"))
}

/// Executes a call and sends its reply.
pub(super) async fn execute<C: UnitControl>(context: Context<C>, call: Call, message: Message) {
    let control = &context.control;
    let message = &message;
    match call {
        Call::Job { id, request } => {
            let done = job(&context, id, request).await;
            context.reply(message, done).await;
        }
        Call::CancelJob(id) => {
            let systemd_job = context.jobs().cancel(id);
            let done = match systemd_job {
                Some(job) => control.cancel_job(job).await,
                None => Ok(()),
            };
            context.reply(message, done).await;
        }
        Call::Kill { unit, who, signal } => {
            context.reply(message, control.kill(&unit, &who, signal).await).await;
        }
        Call::Freeze(unit) => context.reply(message, control.freeze(&unit).await).await,
        Call::Thaw(unit) => context.reply(message, control.thaw(&unit).await).await,
        Call::Properties { unit, interface } if interface.is_empty() => {
            let state = control.state(&unit).await.map(|state| state.properties());
            context.reply(message, state).await;
        }
        Call::Properties { unit, interface } => {
            context.reply(message, control.properties(&unit, &interface).await).await;
        }
        Call::Property { unit, interface, property } => {
            context.reply(message, control.property(&unit, &interface, &property).await).await;
        }
        Call::SetProperties { unit, runtime, settings } => {
            context.reply(message, control.set_properties(&unit, runtime, settings).await).await;
        }
        Call::ListUnits => context.reply(message, control.list_units().await).await,
        Call::ListUnitFiles => context.reply(message, control.list_unit_files().await).await,
        Call::Journal { unit, entries, cursor } => {
            context.reply(message, control.journal(&unit, entries, &cursor).await).await;
        }
        Call::FileState(file) => context.reply(message, control.unit_file_state(&file).await).await,
        Call::Enable { files, runtime, force } => {
            context.reply(message, control.enable(files, runtime, force).await).await;
        }
        Call::Disable { files, runtime } => {
            context.reply(message, control.disable(files, runtime).await).await;
        }
        Call::Reload => context.reply(message, control.reload().await).await,
        Call::ResetFailed(unit) => {
            context.reply(message, control.reset_failed(unit.as_deref()).await).await;
        }
        Call::DefaultTarget => context.reply(message, control.default_target().await).await,
        Call::SetDefaultTarget { name, force } => {
            context.reply(message, control.set_default_target(&name, force).await).await;
        }
        // `subscriptions` executes these.
        Call::Subscription(_) => {}
    }
}

/// Queues a job. The session awaits its result.
async fn job<C: UnitControl>(context: &Context<C>, id: u32, request: JobRequest) -> Result<(), CallError> {
    let queued = match context.control.queue_job(request).await {
        Ok(queued) => queued,
        Err(error) => {
            context.jobs().end(id);
            return Err(error);
        }
    };
    let systemd_job = queued.id;
    let cancel = context.jobs().queued(id, systemd_job);
    // The send fails only if the session has ended, which also cancels this call.
    let _ = context.queued.send((id, queued));
    if cancel && let Err(error) = context.control.cancel_job(systemd_job).await {
        // The job is accepted, so its result is still reported.
        warn!(%error, "cannot cancel a systemd job");
    }
    Ok(())
}

/// Executes the calls about subscriptions in order; those that wait together cause one report. If
/// systemd is not reachable, a subscription takes effect later: the manager does not wait for
/// replies about subscriptions, and would never repeat one.
pub(super) async fn subscriptions<C: UnitControl>(
    context: Context<C>,
    mut requests: mpsc::UnboundedReceiver<(SubscriptionCall, Message)>,
) {
    let mut subscriptions = Subscriptions::default();
    // The patterns whose units were not reported yet.
    let mut pending = BTreeSet::new();
    let mut retry_at = Instant::now();
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            received = requests.recv_many(&mut batch, MAX_BATCH) => {
                if received == 0 {
                    return;
                }
                let must_wait = !pending.is_empty();
                let mut is_less = false;
                let mut replies = Vec::new();
                for (call, message) in batch.drain(..) {
                    is_less |= matches!(call, SubscriptionCall::Unsubscribe(_));
                    replies.push((message, apply(call, &mut subscriptions, &mut pending)));
                }
                if !must_wait && !pending.is_empty() {
                    report(&context, &subscriptions, &mut pending).await;
                    retry_at = Instant::now() + RETRY_PAUSE;
                } else if is_less && let Err(error) = context.watched.set(subscriptions.clone()).await {
                    debug!(%error, "cannot unsubscribe from systemd");
                }
                for (message, done) in replies {
                    context.reply(&message, done).await;
                }
            }
            () = sleep_until(retry_at), if !pending.is_empty() => {
                report(&context, &subscriptions, &mut pending).await;
                retry_at = Instant::now() + RETRY_PAUSE;
            }
        }
    }
}

/// Executes a call on the subscriptions. A pattern that was added is also pending.
fn apply(
    call: SubscriptionCall,
    subscriptions: &mut Subscriptions,
    pending: &mut BTreeSet<String>,
) -> Result<(), CallError> {
    match call {
        SubscriptionCall::Subscribe(pattern) => {
            if !state::subscribe(subscriptions, &pattern) {
                return Err(CallError::new(LIMITS_EXCEEDED, "too many subscriptions on this node"));
            }
            pending.insert(pattern);
        }
        SubscriptionCall::Unsubscribe(pattern) => {
            subscriptions.remove(&pattern);
            pending.remove(&pattern);
        }
    }
    Ok(())
}

/// Watches the units of all subscriptions, and reports those of the pending patterns.
async fn report<C: UnitControl>(
    context: &Context<C>,
    subscriptions: &Subscriptions,
    pending: &mut BTreeSet<String>,
) {
    let control = &context.control;
    let globs: Subscriptions =
        pending.iter().map(String::as_str).filter(|pattern| Subscriptions::is_glob(pattern)).collect();
    let loaded = async {
        context.watched.set(subscriptions.clone()).await?;
        if globs.is_empty() { Ok(Vec::new()) } else { control.list_units().await }
    };
    match loaded.await {
        Ok(loaded) => {
            let mut units: BTreeSet<String> = std::mem::take(pending)
                .into_iter()
                .filter(|pattern| !Subscriptions::is_glob(pattern))
                .collect();
            units.extend(loaded.into_iter().map(|row| row.0).filter(|unit| globs.matches(unit)));
            control.refresh(units.into_iter().collect());
        }
        Err(error) => debug!(%error, "cannot report the units of a subscription yet"),
    }
}
