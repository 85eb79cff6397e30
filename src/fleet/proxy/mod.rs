//! Proxy services: dependencies of systemd units on units of other nodes. The source node has a proxy
//! for each, and a dep service on the target node runs exactly while the unit has at least one proxy,
//! on all sources together. Each method is an event; it returns the effects, which the caller
//! executes in order. Lost connections change nothing at first: the proxies of a lost source count
//! until a grace is over, and those of a lost target are kept. Pure.

mod cycle;
mod list;
pub mod name;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::name::NodeName;
use list::Ended;
pub use list::{Listed, ListedState};
use name::unit_of_dep;
use target::{Step, Target, Wanted};

/// Proxies of one source. An agent that asks for more is refused.
pub const MAX_PROXIES: usize = 1_000;
/// Units of a source that wait for one proxy, as its agent reports them.
pub const MAX_DEPENDENTS: usize = 256;
/// How long a proxy waits for a target node that is offline.
pub const OFFLINE_LIMIT: Duration = Duration::from_secs(10);
/// The default time for which the proxies of a lost source count.
pub const GRACE: Duration = Duration::from_secs(30);

/// A systemd unit of a node.
pub type NodeUnit = (NodeName, String);

/// A proxy service, by its source and its name there.
pub type ProxyKey = (NodeName, String);

/// All nodes, and those on whose units each of them may depend; `None` if that cannot be read. A node
/// may depend on itself.
pub type Rules = BTreeMap<NodeName, Option<BTreeSet<NodeName>>>;

/// What a unit does, as far as dependencies are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    Active,
    /// It starts or stops.
    Changing,
    Inactive,
}

impl Activity {
    /// Returns the activity for an `ActiveState` of systemd.
    pub fn of(active_state: &str) -> Self {
        match active_state {
            "active" | "reloading" | "refreshing" => Self::Active,
            "inactive" | "failed" => Self::Inactive,
            _ => Self::Changing,
        }
    }
}

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Queue a job for a dep service. Its end is reported with [`Proxies::job_ended`].
    StartDep {
        target: NodeUnit,
    },
    StopDep {
        target: NodeUnit,
    },
    /// Report the states of the unit and of its dep service, now and at every change.
    Watch {
        target: NodeUnit,
    },
    Unwatch {
        target: NodeUnit,
    },
    /// Report both states again.
    Refresh {
        target: NodeUnit,
    },
    /// Answer the source: the systemd instance on which the target became active, or the reason why
    /// the proxy fails. Sources of active proxies get a new instance when there is one.
    Ready {
        proxy: ProxyKey,
        result: Result<u64, String>,
    },
    /// Tell the source that the proxy has ended.
    TargetStopped {
        proxy: ProxyKey,
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase<I> {
    /// The source waits for the target. If the target node is offline, the proxy fails at this time.
    Waiting { fail_at: Option<I> },
    /// The target became active on this instance of systemd.
    Active { instance: u64 },
}

#[derive(Debug)]
struct Proxy<I> {
    target: NodeUnit,
    phase: Phase<I>,
    since: I,
    /// The units of the source that cannot start before the proxy.
    dependents: BTreeSet<String>,
    /// Whether the source has announced it on its present connection.
    is_announced: bool,
}

/// A node with proxies.
#[derive(Debug)]
struct Source<I> {
    proxies: BTreeMap<String, Proxy<I>>,
    /// Until when the proxies of a lost node count.
    lost_until: Option<I>,
}

impl<I> Default for Source<I> {
    fn default() -> Self {
        Self { proxies: BTreeMap::new(), lost_until: None }
    }
}

/// All proxies of a manager.
#[derive(Debug)]
pub struct Proxies<I> {
    grace: Duration,
    /// Since when this manager leads.
    leads_since: Option<I>,
    rules: Rules,
    /// The connected nodes, and their instances of systemd once they have announced all proxies.
    online: BTreeMap<NodeName, Option<u64>>,
    sources: BTreeMap<NodeName, Source<I>>,
    targets: BTreeMap<NodeUnit, Target<I>>,
    ended: Ended<I>,
}

impl<I: Copy + Ord + Add<Duration, Output = I>> Proxies<I> {
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            leads_since: None,
            rules: Rules::new(),
            online: BTreeMap::new(),
            sources: BTreeMap::new(),
            targets: BTreeMap::new(),
            ended: Ended::default(),
        }
    }

    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Forgets everything but the rules: this manager is no longer the leader. The dep services and
    /// the proxies go on; the next leader learns about them from the nodes.
    pub fn clear(&mut self) -> Vec<Effect> {
        (self.leads_since, self.ended) = (None, Ended::default());
        self.online.clear();
        self.sources.clear();
        std::mem::take(&mut self.targets).into_keys().map(|target| Effect::Unwatch { target }).collect()
    }

    /// Sets the nodes and their permissions. Proxies that are no longer permitted end.
    pub fn set_rules(&mut self, rules: Rules, now: I) -> Vec<Effect> {
        self.rules = rules;
        self.ended.retain(|(source, _)| self.rules.contains_key(source));
        let mut effects = Vec::new();
        let ended: Vec<(ProxyKey, String)> = self
            .all()
            .filter_map(|(source, name, proxy)| {
                let refusal = self.refusal(source, &proxy.target, false)?;
                Some(((source.clone(), name.clone()), refusal))
            })
            .collect();
        for (proxy, refusal) in ended {
            self.end_all(vec![proxy], &refusal, now, &mut effects);
        }
        self.sources.retain(|source, _| self.rules.contains_key(source));
        self.settle_all(now, &mut effects);
        effects
    }

    /// Handles the connection of a node. It announces its proxies, and then calls for
    /// [`Self::announced`].
    pub fn node_online(&mut self, node: &NodeName, now: I) {
        self.leads_since.get_or_insert(now);
        self.online.insert(node.clone(), None);
        if let Some(source) = self.sources.get_mut(node) {
            source.lost_until = None;
            source.proxies.values_mut().for_each(|proxy| proxy.is_announced = false);
        }
    }

    /// Handles the loss of a node's connection.
    pub fn node_lost(&mut self, node: &NodeName, now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        if self.online.remove(node).is_none() {
            return effects;
        }
        if let Some(source) = self.sources.get_mut(node) {
            source.lost_until = Some(now + self.grace);
        }
        for (_, target) in self.targets.iter_mut().filter(|((of, _), _)| of == node) {
            target.node_lost();
        }
        self.settle_all(now, &mut effects);
        effects
    }

    /// Handles a proxy service that starts and waits for its target.
    pub fn requested(
        &mut self,
        proxy: ProxyKey,
        target: NodeUnit,
        dependents: BTreeSet<String>,
        now: I,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.ended.remove(&proxy);
        let refusal = self.refusal(&proxy.0, &target, true).or_else(|| self.excess(&proxy, &dependents));
        if let Some(reason) = refusal.or_else(|| self.cycle(&proxy, &target, &dependents)) {
            self.fail(proxy.clone(), target, reason, now, &mut effects);
            self.remove(&proxy, now, &mut effects);
            return effects;
        }
        self.insert(proxy, target, Phase::Waiting { fail_at: None }, dependents, now, &mut effects);
        effects
    }

    /// Handles a proxy that became active on an earlier connection or with an earlier manager.
    pub fn established(&mut self, proxy: ProxyKey, target: NodeUnit, instance: u64, now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.ended.remove(&proxy);
        let none = BTreeSet::new();
        if let Some(reason) = self.refusal(&proxy.0, &target, false).or_else(|| self.excess(&proxy, &none)) {
            self.note_end(proxy.clone(), Some(target), ListedState::Stopped, reason.clone(), now);
            effects.push(Effect::TargetStopped { proxy: proxy.clone(), reason });
            self.remove(&proxy, now, &mut effects);
            return effects;
        }
        self.insert(proxy, target, Phase::Active { instance }, none, now, &mut effects);
        effects
    }

    /// Handles the end of a node's announcements: its proxies that it did not announce are gone, and
    /// `deps` are the dep services that run there.
    pub fn announced(&mut self, node: &NodeName, instance: u64, deps: &[String], now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(online) = self.online.get_mut(node) else { return effects };
        *online = Some(instance);
        let proxies = self.sources.get(node).map(|source| &source.proxies);
        let gone = proxies.into_iter().flatten().filter(|(_, proxy)| !proxy.is_announced);
        let gone: Vec<ProxyKey> = gone.map(|(name, _)| (node.clone(), name.clone())).collect();
        for proxy in gone {
            self.remove(&proxy, now, &mut effects);
        }
        // Sources that have not connected to this manager yet may need these.
        let is_new = self.leads_since.is_none_or(|since| now < since + self.grace);
        for unit in deps.iter().filter_map(|dep| unit_of_dep(dep)) {
            let target = (node.clone(), unit.to_owned());
            let is_known = self.targets.contains_key(&target);
            if is_new || !is_known {
                self.watched(&target, &mut effects).keep_until = Some(now + self.grace);
            }
        }
        self.settle_all(now, &mut effects);
        effects
    }

    /// Handles a proxy service that has ended on its source.
    pub fn removed(&mut self, proxy: &ProxyKey, now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.remove(proxy, now, &mut effects);
        effects
    }

    /// Notes a failure that only the agent of the source knows.
    pub fn failed_on_source(&mut self, proxy: ProxyKey, reason: String, now: I) {
        self.note_end(proxy, None, ListedState::Failed, reason, now);
    }

    /// Handles a report about a unit that may be a target or a dep service.
    pub fn unit_state(
        &mut self,
        node: &NodeName,
        systemd_unit: &str,
        activity: Activity,
        now: I,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let key = |unit: &str| (node.clone(), unit.to_owned());
        if let Some(key) = unit_of_dep(systemd_unit).map(key)
            && let Some(target) = self.targets.get_mut(&key)
        {
            target.dep_reported(activity);
            self.settle(&key, now, &mut effects);
        }
        let key = key(systemd_unit);
        if let Some(target) = self.targets.get_mut(&key) {
            target.unit_reported(activity);
            self.settle(&key, now, &mut effects);
        }
        effects
    }

    /// Handles the end of a job for a dep service.
    pub fn job_ended(
        &mut self,
        node: &NodeName,
        dep: &str,
        result: Result<(), String>,
        now: I,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(unit) = unit_of_dep(dep) else { return effects };
        let key = (node.clone(), unit.to_owned());
        let Some(target) = self.targets.get_mut(&key) else { return effects };
        let Some(was_start) = target.job_ended(result.is_ok(), now) else { return effects };
        let instance = self.online.get(node).copied().flatten();
        if was_start && let Some(instance) = instance {
            self.started(&key, instance, &result, now, &mut effects);
        }
        self.settle(&key, now, &mut effects);
        effects
    }

    /// Handles the passage of time. To be called at [`Self::deadline`].
    pub fn tick(&mut self, now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        let over = |source: &Source<I>| source.lost_until.is_some_and(|until| until <= now);
        let over: Vec<NodeName> =
            self.sources.iter().filter(|(_, source)| over(source)).map(|(name, _)| name.clone()).collect();
        for source in over {
            self.sources.remove(&source);
        }
        self.targets.values_mut().for_each(|target| target.expire(now));
        let late: Vec<(ProxyKey, NodeName)> = self
            .all()
            .filter(|(_, _, proxy)| matches!(proxy.phase, Phase::Waiting { fail_at: Some(at) } if at <= now))
            .map(|(source, name, proxy)| ((source.clone(), name.clone()), proxy.target.0.clone()))
            .collect();
        for (proxy, node) in late {
            self.end_all(vec![proxy], &format!("node '{node}' is offline"), now, &mut effects);
        }
        self.settle_all(now, &mut effects);
        effects
    }

    /// Returns when [`Self::tick`] is to be called; `None` if no time matters.
    pub fn deadline(&self) -> Option<I> {
        let lost = self.sources.values().filter_map(|source| source.lost_until);
        let waiting = self.all().filter_map(|(_, _, proxy)| match proxy.phase {
            Phase::Waiting { fail_at } => fail_at,
            Phase::Active { .. } => None,
        });
        let targets = self.targets.values().filter_map(Target::deadline);
        lost.chain(waiting).chain(targets).min()
    }

    fn all(&self) -> impl Iterator<Item = (&NodeName, &String, &Proxy<I>)> {
        self.sources
            .iter()
            .flat_map(|(source, of)| of.proxies.iter().map(move |(name, proxy)| (source, name, proxy)))
    }

    /// Returns the proxies of a target.
    fn of_target<'a>(&'a self, target: &'a NodeUnit) -> impl Iterator<Item = (ProxyKey, &'a Proxy<I>)> {
        let found = self.all().filter(move |(_, _, proxy)| proxy.target == *target);
        found.map(|(source, name, proxy)| ((source.clone(), name.clone()), proxy))
    }

    /// Returns the reason to refuse a proxy. While the permissions cannot be read, only new proxies
    /// are refused.
    fn refusal(&self, source: &NodeName, (node, _): &NodeUnit, is_new: bool) -> Option<String> {
        if !self.rules.contains_key(node) {
            return Some(format!("the manager has no node '{node}'"));
        }
        let allowed = match self.rules.get(source) {
            _ if source == node => return None,
            Some(None) if is_new => {
                return Some(format!("the permissions of node '{source}' cannot be read"));
            }
            Some(None) => return None,
            Some(Some(allowed)) => allowed.contains(node),
            None => false,
        };
        let hint = format!("`juju node allow {source} --on {node}`, or AllowDependenciesOn");
        let text = || format!("node '{source}' may not depend on node '{node}'; allow it with {hint}");
        (!allowed).then(text)
    }

    fn excess(&self, (source, name): &ProxyKey, dependents: &BTreeSet<String>) -> Option<String> {
        let of = self.sources.get(source);
        if of.is_some_and(|of| of.proxies.len() >= MAX_PROXIES && !of.proxies.contains_key(name)) {
            return Some(format!("node '{source}' has {MAX_PROXIES} proxies already"));
        }
        let text = || format!("more than {MAX_DEPENDENTS} units depend on the proxy");
        (dependents.len() > MAX_DEPENDENTS).then(text)
    }

    /// Adds a proxy, or replaces it. Its target is never unneeded meanwhile.
    fn insert(
        &mut self,
        (source, name): ProxyKey,
        target: NodeUnit,
        phase: Phase<I>,
        dependents: BTreeSet<String>,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        let proxies = &mut self.sources.entry(source).or_default().proxies;
        let is_active = matches!(phase, Phase::Active { .. });
        let before = proxies.remove(&name);
        let was_active =
            |proxy: &&Proxy<I>| proxy.target == target && matches!(proxy.phase, Phase::Active { .. });
        let since = before.as_ref().filter(|_| is_active).filter(was_active).map_or(now, |it| it.since);
        let proxy = Proxy { target: target.clone(), phase, since, dependents, is_announced: true };
        proxies.insert(name, proxy);
        self.watched(&target, effects);
        self.settle(&target, now, effects);
        if let Some(before) = before.filter(|before| before.target != target) {
            self.settle(&before.target, now, effects);
        }
    }

    /// Removes a proxy, if there is one.
    fn remove(&mut self, (source, name): &ProxyKey, now: I, effects: &mut Vec<Effect>) {
        let Some(of) = self.sources.get_mut(source) else { return };
        if let Some(proxy) = of.proxies.remove(name) {
            self.settle(&proxy.target, now, effects);
        }
    }

    /// Ends proxies for a reason of their target or of the manager. The caller settles the target.
    fn end_all(&mut self, keys: Vec<ProxyKey>, reason: &str, now: I, effects: &mut Vec<Effect>) {
        for key in keys {
            let proxies = self.sources.get_mut(&key.0).map(|source| &mut source.proxies);
            let Some(proxy) = proxies.and_then(|proxies| proxies.remove(&key.1)) else { continue };
            let reason = reason.to_owned();
            match proxy.phase {
                Phase::Waiting { .. } => self.fail(key, proxy.target, reason, now, effects),
                Phase::Active { .. } => {
                    let state = ListedState::Stopped;
                    self.note_end(key.clone(), Some(proxy.target), state, reason.clone(), now);
                    effects.push(Effect::TargetStopped { proxy: key, reason });
                }
            }
        }
    }

    /// Answers a proxy that cannot become active.
    fn fail(&mut self, proxy: ProxyKey, target: NodeUnit, reason: String, now: I, effects: &mut Vec<Effect>) {
        self.note_end(proxy.clone(), Some(target), ListedState::Failed, reason.clone(), now);
        effects.push(Effect::Ready { proxy, result: Err(reason) });
    }

    fn note_end(
        &mut self,
        proxy: ProxyKey,
        target: Option<NodeUnit>,
        state: ListedState,
        reason: String,
        now: I,
    ) {
        self.ended.add(Listed { proxy, target, state, since: now, reason });
    }

    fn watched(&mut self, target: &NodeUnit, effects: &mut Vec<Effect>) -> &mut Target<I> {
        self.targets.entry(target.clone()).or_insert_with(|| {
            effects.push(Effect::Watch { target: target.clone() });
            Target::default()
        })
    }

    /// Handles the result of a start.
    fn started(
        &mut self,
        key: &NodeUnit,
        instance: u64,
        result: &Result<(), String>,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        match result {
            Ok(()) => self.is_active(key, instance, true, now, effects),
            Err(reason) => {
                // Proxies whose target still runs are not affected.
                let failed: Vec<ProxyKey> = self
                    .of_target(key)
                    .filter(|(_, proxy)| match proxy.phase {
                        Phase::Waiting { .. } => true,
                        Phase::Active { instance: of } => of != instance,
                    })
                    .map(|(proxy, _)| proxy)
                    .collect();
                let reason = format!("{} on node {} did not start: {reason}", key.1, key.0);
                self.end_all(failed, &reason, now, effects);
            }
        }
    }

    /// Tells the sources of a target on which instance of systemd it is active; those that wait only if
    /// a start has ended.
    fn is_active(
        &mut self,
        key: &NodeUnit,
        instance: u64,
        was_started: bool,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        for (source, of) in &mut self.sources {
            for (name, proxy) in of.proxies.iter_mut().filter(|(_, proxy)| proxy.target == *key) {
                match proxy.phase {
                    Phase::Active { instance: of } if of == instance => continue,
                    Phase::Active { .. } => {}
                    Phase::Waiting { .. } if was_started => proxy.since = now,
                    Phase::Waiting { .. } => continue,
                }
                proxy.phase = Phase::Active { instance };
                let proxy = (source.clone(), name.clone());
                effects.push(Effect::Ready { proxy, result: Ok(instance) });
            }
        }
    }

    fn settle_all(&mut self, now: I, effects: &mut Vec<Effect>) {
        let targets: Vec<NodeUnit> = self.targets.keys().cloned().collect();
        for target in targets {
            self.settle(&target, now, effects);
        }
    }

    /// Does what the state of a target requires.
    fn settle(&mut self, key: &NodeUnit, now: I, effects: &mut Vec<Effect>) {
        let instance = match self.online.get(&key.0) {
            Some(Some(instance)) => *instance,
            online => {
                let fail_at = online.is_none().then_some(now + OFFLINE_LIMIT);
                self.wait_for_node(key, fail_at, effects);
                return;
            }
        };
        if self.targets.get(key).is_some_and(Target::is_active) {
            self.is_active(key, instance, false, now, effects);
        }
        let Some(target) = self.targets.get_mut(key) else { return };
        let mut wanted = Wanted::default();
        for proxy in self.sources.values_mut().flat_map(|source| source.proxies.values_mut()) {
            if proxy.target == *key {
                match &mut proxy.phase {
                    Phase::Waiting { fail_at } => {
                        *fail_at = None;
                        wanted.waiting += 1;
                    }
                    Phase::Active { instance: of } if *of == instance => wanted.active += 1,
                    Phase::Active { .. } => wanted.restarted += 1,
                }
            }
        }
        let step = target.step(wanted, now);
        let target = key.clone();
        match step {
            Step::None => {}
            Step::Start => effects.push(Effect::StartDep { target }),
            Step::Stop => effects.push(Effect::StopDep { target }),
            Step::Refresh => effects.push(Effect::Refresh { target }),
            Step::Forget => {
                self.targets.remove(key);
                effects.push(Effect::Unwatch { target });
            }
            Step::Stopped => {
                let stopped: Vec<ProxyKey> = self
                    .of_target(key)
                    .filter(|(_, proxy)| proxy.phase == Phase::Active { instance })
                    .map(|(proxy, _)| proxy)
                    .collect();
                let reason = format!("{} on node {} stopped", key.1, key.0);
                self.end_all(stopped, &reason, now, effects);
                self.settle(key, now, effects);
            }
        }
    }

    /// Sets when the waiting proxies of a target fail that is not online. Forgets a target without
    /// proxies.
    fn wait_for_node(&mut self, key: &NodeUnit, fail_at: Option<I>, effects: &mut Vec<Effect>) {
        let mut is_needed = false;
        for proxy in self.sources.values_mut().flat_map(|source| source.proxies.values_mut()) {
            if proxy.target == *key {
                is_needed = true;
                if let Phase::Waiting { fail_at: at } = &mut proxy.phase {
                    *at = match fail_at {
                        Some(_) => at.or(fail_at),
                        None => None,
                    };
                }
            }
        }
        if !is_needed && self.targets.remove(key).is_some() {
            effects.push(Effect::Unwatch { target: key.clone() });
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
