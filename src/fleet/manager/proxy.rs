//! Proxy services: the announcements of agents, and the execution of what the pure `proxy` decides.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};
use zbus::{Message, ObjectPath};

use super::Manager;
use super::node_call::{Payload, Start};
use super::requests::{ProxyMessage, Request};
use super::state::State;
use crate::fleet::dbus::names;
use crate::fleet::dbus::values::{JobMode, JobResult, JobType, Properties};
use crate::fleet::job;
use crate::fleet::name::{NodeName, check_systemd_unit, unescape};
use crate::fleet::proxy::name::{dep_of, unit_of_dep};
use crate::fleet::proxy::{Activity, Effect, Listed, MAX_DEPENDENTS, MAX_PROXIES, NodeUnit, Proxies};
use crate::runtime::clock::wall_ms;

/// The longest reason that an agent gives for a failure.
const MAX_REASON: usize = 1_024;

/// A proxy in the reply of `ListProxies`: source node, name, target node, unit, state, microseconds
/// since 1970 since when it has this state, and the reason of an end.
pub(super) type ProxyRow = (String, String, String, String, &'static str, u64, String);

/// The proxies of a manager, and the jobs for their dep services.
#[derive(Debug)]
pub(super) struct ProxyState {
    pub(super) proxies: Proxies<Instant>,
    /// The jobs that were submitted for dep services, with the errors of those that failed to
    /// start.
    jobs: BTreeMap<u32, Option<String>>,
    /// The units that depend on a proxy which a node is about to announce.
    dependents: BTreeMap<NodeName, (String, BTreeSet<String>)>,
    /// When a task will call `tick`.
    tick_at: Option<Instant>,
}

impl ProxyState {
    pub(super) fn new(grace: Duration) -> Self {
        let (jobs, dependents) = (BTreeMap::new(), BTreeMap::new());
        Self { proxies: Proxies::new(grace), jobs, dependents, tick_at: None }
    }

    /// Notes the error with which a node refused a job.
    pub(super) fn job_refused(&mut self, id: u32, error: &str) {
        if let Some(known) = self.jobs.get_mut(&id) {
            *known = Some(error.chars().take(MAX_REASON).collect());
        }
    }

    /// Returns the result of a job, if it was for a dep service.
    pub(super) fn job_ended(&mut self, id: u32, result: JobResult) -> Option<Result<(), String>> {
        let error = self.jobs.remove(&id)?;
        Some(match result {
            JobResult::Done => Ok(()),
            other => Err(error.unwrap_or_else(|| format!("the result of its job is '{}'", other.as_str()))),
        })
    }
}

impl State {
    /// Executes effects. Returns the jobs that have to be sent to their nodes.
    pub(super) fn proxy_effects(&mut self, effects: Vec<Effect>) -> Vec<Start> {
        let mut starts = Vec::new();
        for effect in effects {
            match effect {
                Effect::StartDep { target } => starts.extend(self.dep_job(&target, JobType::Start)),
                Effect::StopDep { target } => starts.extend(self.dep_job(&target, JobType::Stop)),
                Effect::Watch { target: (node, unit) } => {
                    for unit in [&unit, &dep_of(&unit)] {
                        let effects = self.monitors.watch_unit(&node, unit);
                        self.monitor_effects(effects);
                    }
                }
                Effect::Unwatch { target: (node, unit) } => {
                    for unit in [&unit, &dep_of(&unit)] {
                        let effects = self.monitors.unwatch_unit(&node, unit);
                        self.monitor_effects(effects);
                    }
                }
                Effect::Refresh { target: (node, unit) } => {
                    for unit in [&unit, &dep_of(&unit)] {
                        let effects = self.monitors.refresh_unit(&node, unit);
                        self.monitor_effects(effects);
                    }
                }
                Effect::Ready { proxy, result } => {
                    if let Err(error) = &result {
                        warn!(node = %proxy.0, proxy = proxy.1, error, "proxy service failed");
                    }
                    self.send_to_node(&proxy.0, Request::Proxy(proxy.1, ProxyMessage::Ready(result)));
                }
                Effect::TargetStopped { proxy, reason } => {
                    info!(node = %proxy.0, proxy = proxy.1, reason, "proxy service ended");
                    let message = ProxyMessage::TargetStopped(reason);
                    self.send_to_node(&proxy.0, Request::Proxy(proxy.1, message));
                }
            }
        }
        starts
    }

    /// Submits a job for the dep service of a target.
    fn dep_job(&mut self, target: &NodeUnit, kind: JobType) -> Vec<Start> {
        let (node, systemd_unit) = (target.0.clone(), dep_of(&target.1));
        let (mode, payload) = (JobMode::Replace, Payload::Unit);
        let request =
            job::Request { node: node.clone(), systemd_unit: systemd_unit.clone(), kind, mode, payload };
        match self.jobs.submit(request, Instant::now()) {
            Ok((id, effects)) => {
                self.proxies.jobs.insert(id, None);
                self.job_effects(effects)
            }
            Err(refused) => {
                let result = Err(refused.to_string());
                let effects = self.proxies.proxies.job_ended(&node, &systemd_unit, &result, Instant::now());
                self.proxy_effects(effects)
            }
        }
    }

    /// Handles a report about a unit. systemd has no file of an unloaded unit, or nothing uses it.
    pub(super) fn proxy_unit_state(
        &mut self,
        node: &NodeName,
        systemd_unit: &str,
        properties: Option<&Properties>,
    ) -> Vec<Start> {
        let state =
            |properties: &Properties| <&str>::try_from(properties.get("ActiveState")?).ok().map(Activity::of);
        let Some(activity) = properties.map_or(Some(Activity::Inactive), state) else { return Vec::new() };
        let effects = self.proxies.proxies.unit_state(node, systemd_unit, activity, Instant::now());
        self.proxy_effects(effects)
    }

    /// Handles a signal of an agent about its proxies; `None` if its arguments are invalid.
    pub(super) fn proxy_signal(
        &mut self,
        node: &NodeName,
        member: &str,
        message: &Message,
    ) -> Option<Vec<Start>> {
        let (body, now) = (message.body(), Instant::now());
        let of_proxy = |path: &ObjectPath<'_>| Some((node.clone(), proxy_at(path.as_str())?));
        let target = |on: &str, unit: &str| {
            check_systemd_unit(unit).ok()?;
            let dep = dep_of(unit);
            check_systemd_unit(&dep).ok()?;
            unit_of_dep(&dep)?;
            Some((on.parse().ok()?, unit.to_owned()))
        };
        let effects = match member {
            "ProxyDependents" => {
                let (path, units): (ObjectPath<'_>, Vec<String>) = body.deserialize().ok()?;
                let is_valid = units.len() <= MAX_DEPENDENTS
                    && units.iter().all(|unit| check_systemd_unit(unit).is_ok());
                let units: BTreeSet<String> = is_valid.then_some(units)?.into_iter().collect();
                self.proxies.dependents.insert(node.clone(), (of_proxy(&path)?.1, units));
                Vec::new()
            }
            "ProxyNew" => {
                let (on, unit, path): (&str, &str, ObjectPath<'_>) = body.deserialize().ok()?;
                let (proxy, target) = (of_proxy(&path)?, target(on, unit)?);
                let units = self.proxies.dependents.remove(node);
                let units = units.filter(|(name, _)| *name == proxy.1).map(|(_, units)| units);
                self.proxies.proxies.requested(proxy, target, units.unwrap_or_default(), now)
            }
            "ProxyEstablished" => {
                let (on, unit, path, instance): (&str, &str, ObjectPath<'_>, u64) =
                    body.deserialize().ok()?;
                self.proxies.proxies.established(of_proxy(&path)?, target(on, unit)?, instance, now)
            }
            "ProxyRemoved" => {
                let (_, _, path): (&str, &str, ObjectPath<'_>) = body.deserialize().ok()?;
                self.proxies.proxies.removed(&of_proxy(&path)?, now)
            }
            "ProxyFailed" => {
                let (path, reason): (ObjectPath<'_>, &str) = body.deserialize().ok()?;
                let reason = reason.chars().take(MAX_REASON).collect();
                self.proxies.proxies.failed_on_source(of_proxy(&path)?, reason, now);
                Vec::new()
            }
            "ProxiesAnnounced" => {
                let (instance, deps): (u64, Vec<String>) = body.deserialize().ok()?;
                self.proxies.proxies.announced(node, instance, &deps, now)
            }
            _ => Vec::new(),
        };
        let starts = self.proxy_effects(effects);
        // An agent that announces new proxies and does not read the answers is disconnected.
        if let Some(link) = self.nodes.get(node).and_then(|node| node.link.as_ref())
            && link.requests.waiting_proxies() > 2 * MAX_PROXIES
        {
            link.activity.end("the agent does not read its messages");
        }
        Some(starts)
    }

    /// Discards what a lost node has announced in part.
    pub(super) fn proxy_source_lost(&mut self, node: &NodeName) {
        self.proxies.dependents.remove(node);
    }
}

impl Manager {
    /// Sets for how long the proxies of a node count whose connection is lost.
    pub fn set_proxy_grace(&self, grace: Duration) {
        self.state().proxies.proxies.set_grace(grace);
    }

    /// Starts a task that calls `tick` at the next deadline.
    pub(super) fn schedule_tick(&self) {
        let mut state = self.state();
        let Some(deadline) = state.proxies.proxies.deadline() else { return };
        if state.proxies.tick_at.is_some_and(|at| at <= deadline) {
            return;
        }
        state.proxies.tick_at = Some(deadline);
        let manager = self.clone();
        tokio::spawn(async move {
            sleep_until(deadline).await;
            let starts = {
                let mut state = manager.state();
                state.proxies.tick_at.take_if(|at| *at <= deadline);
                let effects = state.proxies.proxies.tick(Instant::now());
                state.proxy_effects(effects)
            };
            manager.run(starts);
        });
    }

    pub(super) fn list_proxies(&self) -> Vec<ProxyRow> {
        let (now, now_ms) = (Instant::now(), wall_ms());
        let row = |listed: Listed<Instant>| {
            let age = u64::try_from(now.duration_since(listed.since).as_millis()).unwrap_or(u64::MAX);
            let since = now_ms.saturating_sub(age) * 1_000;
            let (source, name) = listed.proxy;
            let target = listed.target.map(|(node, unit)| (node.to_string(), unit));
            let (target, unit) = target.unwrap_or_default();
            (source.to_string(), name, target, unit, listed.state.as_str(), since, listed.reason)
        };
        self.state().proxies.proxies.list().into_iter().map(row).collect()
    }
}

/// Returns the name of the proxy service whose object has this path.
fn proxy_at(path: &str) -> Option<String> {
    let escaped = path.strip_prefix(names::INTERNAL_PROXY_PATH)?.strip_prefix('/')?;
    let name = unescape(escaped)?;
    check_systemd_unit(&name).ok()?;
    Some(name)
}
