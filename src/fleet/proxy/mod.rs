//! Proxy services: dependencies of systemd units on units of other nodes. The source node has a
//! proxy for each, and a dep service on the target node runs exactly while the unit has at least
//! one proxy, on all sources together. Each method is an event; it returns the effects, which the
//! caller executes in order. A lost connection changes nothing at first: the proxies of a lost
//! source count until a grace is over. Pure.

mod list;
pub mod name;
mod refusal;
mod settle;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;
use std::time::Duration;

use super::name::NodeName;
use list::Ended;
pub use list::{Listed, ListedState};
use name::unit_of_dep;
use target::Target;

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

/// All nodes, and those on whose units each of them may depend; `None` if that cannot be read. A
/// node may depend on itself.
pub type Rules = BTreeMap<NodeName, Option<BTreeSet<NodeName>>>;

/// The state of a unit, reduced to what dependencies need.
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
    /// Notify the source that the proxy has ended.
    TargetStopped {
        proxy: ProxyKey,
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase<I> {
    /// The source waits for the target. If the target node is offline, the proxy fails at this
    /// time.
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
    /// Proxies that stopped to count while their source was lost, although their target was
    /// running. When the source returns, the target is started again.
    released: BTreeSet<ProxyKey>,
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
            released: BTreeSet::new(),
        }
    }

    pub fn set_grace(&mut self, grace: Duration) {
        self.grace = grace;
    }

    /// Removes all state but the rules, because this manager is no longer the leader. Dep services
    /// and proxies keep running; the agents announce them to the next leader.
    pub fn clear(&mut self) -> Vec<Effect> {
        (self.leads_since, self.ended) = (None, Ended::default());
        self.online.clear();
        self.sources.clear();
        self.released.clear();
        std::mem::take(&mut self.targets).into_keys().map(|target| Effect::Unwatch { target }).collect()
    }

    /// Sets the permissions of all nodes. Proxies that are no longer permitted end.
    pub fn set_rules(&mut self, rules: Rules, now: I) -> Vec<Effect> {
        self.rules = rules;
        self.ended.retain(|(source, _)| self.rules.contains_key(source));
        self.released.retain(|(source, _)| self.rules.contains_key(source));
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
        let gone = self.sources.keys().filter(|source| !self.rules.contains_key(*source));
        for source in gone.cloned().collect::<Vec<_>>() {
            self.remove_source(&source);
        }
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
        let of_node: Vec<NodeUnit> = self.targets.keys().filter(|(of, _)| of == node).cloned().collect();
        for key in of_node {
            if let Some(target) = self.targets.get_mut(&key) {
                target.node_lost();
            }
            self.settle(&key, now, &mut effects);
        }
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
        self.released.remove(&proxy);
        let refusal = self.refusal(&proxy.0, &target, true).or_else(|| self.excess(&proxy, &dependents));
        if let Some(reason) = refusal.or_else(|| self.cycle(&proxy, &target, &dependents)) {
            self.fail(proxy.clone(), target, reason, now, &mut effects);
            self.remove(&proxy, now, &mut effects);
            return effects;
        }
        self.insert(proxy, &target, Phase::Waiting { fail_at: None }, dependents, now, &mut effects);
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
        // An unknown instance, so that an inactive target is started.
        let instance = if self.released.remove(&proxy) { 0 } else { instance };
        self.insert(proxy, &target, Phase::Active { instance }, none, now, &mut effects);
        effects
    }

    /// Handles the end of a node's announcements: its proxies that it did not announce are gone,
    /// and `deps` are the dep services that run there.
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
        if self.get(&proxy).is_some() {
            return;
        }
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
        result: &Result<(), String>,
        now: I,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(unit) = unit_of_dep(dep) else { return effects };
        let key = (node.clone(), unit.to_owned());
        let Some(target) = self.targets.get_mut(&key) else { return effects };
        let Some(was_start) = target.job_ended(result.is_ok(), now) else { return effects };
        let instance = self.online.get(node).copied().flatten();
        if was_start && let Some(instance) = instance {
            self.started(&key, instance, result, now, &mut effects);
        }
        self.settle(&key, now, &mut effects);
        effects
    }

    /// Handles the deadlines that have passed. To be called at [`Self::deadline`].
    pub fn tick(&mut self, now: I) -> Vec<Effect> {
        let mut effects = Vec::new();
        let over = |source: &Source<I>| source.lost_until.is_some_and(|until| until <= now);
        let over: Vec<NodeName> =
            self.sources.iter().filter(|(_, source)| over(source)).map(|(name, _)| name.clone()).collect();
        for source in over {
            for proxy in self.of_source(&source) {
                let target = self.get(&proxy).and_then(|proxy| self.targets.get(&proxy.target));
                if target.is_none_or(|target| !target.is_inactive()) {
                    self.released.insert(proxy);
                }
            }
            self.remove_source(&source);
        }
        self.targets.values_mut().for_each(|target| target.expire(now));
        let late: Vec<(ProxyKey, NodeName)> = self
            .all()
            .filter(|(_, _, proxy)| matches!(proxy.phase, Phase::Waiting { fail_at: Some(at) } if at <= now))
            .map(|(source, name, proxy)| ((source.clone(), name.clone()), proxy.target.0.clone()))
            .collect();
        for (proxy, node) in late {
            let reason = match self.online.get(&node) {
                Some(_) => format!("the systemd of node '{node}' does not answer"),
                None => format!("node '{node}' is offline"),
            };
            self.end_all(vec![proxy], &reason, now, &mut effects);
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

    fn get(&self, (source, name): &ProxyKey) -> Option<&Proxy<I>> {
        self.sources.get(source)?.proxies.get(name)
    }

    /// Takes a proxy out of its source and its target.
    fn take(&mut self, key: &ProxyKey) -> Option<Proxy<I>> {
        let proxy = self.sources.get_mut(&key.0)?.proxies.remove(&key.1)?;
        if let Some(target) = self.targets.get_mut(&proxy.target) {
            target.proxies.remove(key);
        }
        Some(proxy)
    }

    fn remove_source(&mut self, source: &NodeName) {
        for proxy in self.of_source(source) {
            self.take(&proxy);
        }
        self.sources.remove(source);
    }

    /// Returns the names of a source's proxies.
    fn of_source(&self, source: &NodeName) -> Vec<ProxyKey> {
        let names = self.sources.get(source).into_iter().flat_map(|of| of.proxies.keys());
        names.map(|name| (source.clone(), name.clone())).collect()
    }

    /// Adds a proxy, or replaces it. Its target is never unneeded meanwhile.
    fn insert(
        &mut self,
        key: ProxyKey,
        target: &NodeUnit,
        phase: Phase<I>,
        dependents: BTreeSet<String>,
        now: I,
        effects: &mut Vec<Effect>,
    ) {
        let is_active = matches!(phase, Phase::Active { .. });
        let before = self.take(&key);
        let was_active =
            |proxy: &&Proxy<I>| proxy.target == *target && matches!(proxy.phase, Phase::Active { .. });
        let since = before.as_ref().filter(|_| is_active).filter(was_active).map_or(now, |it| it.since);
        let proxy = Proxy { target: target.clone(), phase, since, dependents, is_announced: true };
        self.watched(target, effects).proxies.insert(key.clone());
        self.sources.entry(key.0).or_default().proxies.insert(key.1, proxy);
        self.settle(target, now, effects);
        if let Some(before) = before.filter(|before| before.target != *target) {
            self.settle(&before.target, now, effects);
        }
    }

    /// Removes a proxy, if there is one.
    fn remove(&mut self, key: &ProxyKey, now: I, effects: &mut Vec<Effect>) {
        if let Some(proxy) = self.take(key) {
            self.settle(&proxy.target, now, effects);
        }
    }

    fn watched(&mut self, target: &NodeUnit, effects: &mut Vec<Effect>) -> &mut Target<I> {
        self.targets.entry(target.clone()).or_insert_with(|| {
            effects.push(Effect::Watch { target: target.clone() });
            Target::default()
        })
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
