//! Monitors: which signals about systemd units go to which monitor, and which units the agents have
//! to report. A change is sent once to each monitor that has a matching subscription, and a state
//! that was sent to the monitor is not sent again. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::dbus::values::Reason;
use super::name::NodeName;
use crate::model::Glob;

/// Limits of one client.
pub const MAX_MONITORS: usize = 64;
pub const MAX_SUBSCRIPTIONS: usize = 1_000;

/// The observed properties of a systemd unit.
pub type UnitState = BTreeMap<String, String>;

/// The nodes of a subscription.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    AllNodes,
    Node(NodeName),
}

impl Scope {
    fn contains(&self, node: &NodeName) -> bool {
        match self {
            Self::AllNodes => true,
            Self::Node(name) => name == node,
        }
    }
}

/// A signal of a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Signal {
    UnitNew(Reason),
    UnitRemoved(Reason),
    UnitStateChanged { active: String, sub: String, reason: Reason },
    UnitPropertiesChanged(UnitState),
}

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<O> {
    SubscribeOnNode { node: NodeName, pattern: String },
    UnsubscribeOnNode { node: NodeName, pattern: String },
    Signal { owner: O, monitor: u32, node: NodeName, systemd_unit: String, signal: Signal },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the monitor does not exist, or belongs to another client")]
    NoSuchMonitor,
    #[error("there is no such subscription")]
    NoSuchSubscription,
    #[error("a client may have at most {MAX_MONITORS} monitors")]
    TooManyMonitors,
    #[error("a client may subscribe to at most {MAX_SUBSCRIPTIONS} names or patterns")]
    TooManySubscriptions,
}

#[derive(Debug)]
struct Subscription {
    scope: Scope,
    patterns: Vec<(String, Glob)>,
}

impl Subscription {
    fn matches(&self, node: &NodeName, systemd_unit: &str) -> bool {
        self.scope.contains(node) && self.patterns.iter().any(|(_, glob)| glob.matches(systemd_unit))
    }
}

#[derive(Debug)]
struct Monitor<O> {
    owner: O,
    subscriptions: BTreeMap<u32, Subscription>,
    /// The last state that was sent of each unit.
    sent: HashMap<(NodeName, String), UnitState>,
}

impl<O> Monitor<O> {
    fn matches(&self, node: &NodeName, systemd_unit: &str) -> bool {
        self.subscriptions.values().any(|subscription| subscription.matches(node, systemd_unit))
    }
}

/// All monitors of a manager. `O` identifies the client that owns a monitor.
#[derive(Debug)]
pub struct Monitors<O> {
    last_monitor: u32,
    last_subscription: u32,
    monitors: BTreeMap<u32, Monitor<O>>,
    online: BTreeSet<NodeName>,
    /// How many subscriptions need a pattern on a scope.
    wanted: BTreeMap<(Scope, String), usize>,
    /// Units that systemd has loaded, and whose properties were not reported yet.
    loaded: BTreeSet<(NodeName, String)>,
}

impl<O> Default for Monitors<O> {
    fn default() -> Self {
        Self {
            last_monitor: 0,
            last_subscription: 0,
            monitors: BTreeMap::new(),
            online: BTreeSet::new(),
            wanted: BTreeMap::new(),
            loaded: BTreeSet::new(),
        }
    }
}

impl<O: Clone + Eq> Monitors<O> {
    pub fn owner(&self, monitor: u32) -> Option<&O> {
        self.monitors.get(&monitor).map(|monitor| &monitor.owner)
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.monitors.keys().copied()
    }

    /// Returns every client that has a monitor.
    pub fn owners(&self) -> Vec<O> {
        let mut owners: Vec<O> = Vec::new();
        for monitor in self.monitors.values() {
            if !owners.contains(&monitor.owner) {
                owners.push(monitor.owner.clone());
            }
        }
        owners
    }

    /// Returns the monitors of a client.
    pub fn of_owner(&self, owner: &O) -> Vec<u32> {
        self.monitors.iter().filter(|(_, monitor)| monitor.owner == *owner).map(|(id, _)| *id).collect()
    }

    /// # Errors
    /// If the client has too many monitors.
    pub fn create(&mut self, owner: O) -> Result<u32, Refused> {
        if self.of_owner(&owner).len() >= MAX_MONITORS {
            return Err(Refused::TooManyMonitors);
        }
        loop {
            self.last_monitor = self.last_monitor.wrapping_add(1);
            if self.last_monitor != 0 && !self.monitors.contains_key(&self.last_monitor) {
                break;
            }
        }
        let monitor = Monitor { owner, subscriptions: BTreeMap::new(), sent: HashMap::new() };
        self.monitors.insert(self.last_monitor, monitor);
        Ok(self.last_monitor)
    }

    /// # Errors
    /// If the client has no such monitor.
    pub fn close(&mut self, owner: &O, monitor: u32) -> Result<Vec<Effect<O>>, Refused> {
        self.owned(owner, monitor)?;
        let closed = self.monitors.remove(&monitor).ok_or(Refused::NoSuchMonitor)?;
        Ok(closed.subscriptions.into_values().flat_map(|gone| self.release(gone)).collect())
    }

    /// The connection of a client ended.
    pub fn close_all(&mut self, owner: &O) -> Vec<Effect<O>> {
        let monitors = self.of_owner(owner);
        monitors.into_iter().flat_map(|id| self.close(owner, id).unwrap_or_default()).collect()
    }

    /// Adds a subscription and returns its id. The agents report every matching unit again; each of
    /// them is sent to the monitor as if it had not been sent before.
    ///
    /// # Errors
    /// If the client has no such monitor, or too many subscriptions.
    pub fn subscribe(
        &mut self,
        owner: &O,
        monitor: u32,
        scope: Scope,
        patterns: &[String],
    ) -> Result<(u32, Vec<Effect<O>>), Refused> {
        self.owned(owner, monitor)?;
        let owned = self.monitors.values().filter(|monitor| monitor.owner == *owner);
        let all: usize =
            owned.flat_map(|monitor| monitor.subscriptions.values()).map(|s| s.patterns.len()).sum();
        if all + patterns.len() > MAX_SUBSCRIPTIONS {
            return Err(Refused::TooManySubscriptions);
        }
        self.last_subscription = self.last_subscription.wrapping_add(1);
        let id = self.last_subscription;
        let mut effects = Vec::new();
        for pattern in patterns {
            *self.wanted.entry((scope.clone(), pattern.clone())).or_default() += 1;
            for node in self.online.iter().filter(|node| scope.contains(node)) {
                effects.push(Effect::SubscribeOnNode { node: node.clone(), pattern: pattern.clone() });
            }
        }
        let patterns = patterns.iter().map(|pattern| (pattern.clone(), Glob::new(pattern))).collect();
        let subscription = Subscription { scope, patterns };
        if let Some(monitor) = self.monitors.get_mut(&monitor) {
            monitor.sent.retain(|(node, systemd_unit), _| !subscription.matches(node, systemd_unit));
            monitor.subscriptions.insert(id, subscription);
        }
        Ok((id, effects))
    }

    /// # Errors
    /// If the client has no such monitor or subscription.
    pub fn unsubscribe(
        &mut self,
        owner: &O,
        monitor: u32,
        subscription: u32,
    ) -> Result<Vec<Effect<O>>, Refused> {
        let monitor = self.owned(owner, monitor)?;
        let gone = monitor.subscriptions.remove(&subscription).ok_or(Refused::NoSuchSubscription)?;
        let Monitor { subscriptions, sent, .. } = monitor;
        sent.retain(|(node, unit), _| subscriptions.values().any(|other| other.matches(node, unit)));
        Ok(self.release(gone))
    }

    /// Removes the oldest subscription with exactly this scope and pattern.
    ///
    /// # Errors
    /// If the client has no such monitor or subscription.
    pub fn unsubscribe_by_name(
        &mut self,
        owner: &O,
        monitor: u32,
        scope: &Scope,
        pattern: &str,
    ) -> Result<Vec<Effect<O>>, Refused> {
        let subscriptions = &self.owned(owner, monitor)?.subscriptions;
        let is_named =
            |s: &Subscription| s.scope == *scope && s.patterns.len() == 1 && s.patterns[0].0 == pattern;
        let found = subscriptions.iter().find(|(_, subscription)| is_named(subscription)).map(|(id, _)| *id);
        self.unsubscribe(owner, monitor, found.ok_or(Refused::NoSuchSubscription)?)
    }

    /// The agent of a node registered: it reports everything that subscriptions ask for.
    pub fn node_online(&mut self, node: &NodeName) -> Vec<Effect<O>> {
        self.online.insert(node.clone());
        let wanted = self.wanted.keys().filter(|(scope, _)| scope.contains(node));
        let patterns: BTreeSet<&String> = wanted.map(|(_, pattern)| pattern).collect();
        let subscribe =
            |pattern: &String| Effect::SubscribeOnNode { node: node.clone(), pattern: pattern.clone() };
        patterns.into_iter().map(subscribe).collect()
    }

    /// A node is lost or was removed: its units are removed from all monitors.
    pub fn node_lost(&mut self, node: &NodeName) -> Vec<Effect<O>> {
        self.online.remove(node);
        self.loaded.retain(|(of, _)| of != node);
        let mut effects = Vec::new();
        for (id, monitor) in &mut self.monitors {
            let mut gone: Vec<String> =
                monitor.sent.keys().filter(|(of, _)| of == node).map(|(_, unit)| unit.clone()).collect();
            gone.sort();
            monitor.sent.retain(|(of, _), _| of != node);
            for unit in gone {
                effects.push(signal(*id, monitor, node, &unit, Signal::UnitRemoved(Reason::Virtual)));
            }
        }
        effects
    }

    /// An agent reports that systemd has loaded a unit. Its properties follow.
    pub fn unit_new(&mut self, node: &NodeName, systemd_unit: &str) {
        if self.online.contains(node) {
            self.loaded.insert((node.clone(), systemd_unit.to_owned()));
        }
    }

    /// An agent reports that systemd has unloaded a unit.
    pub fn unit_removed(&mut self, node: &NodeName, systemd_unit: &str) -> Vec<Effect<O>> {
        let key = (node.clone(), systemd_unit.to_owned());
        self.loaded.remove(&key);
        let mut effects = Vec::new();
        for (id, monitor) in &mut self.monitors {
            if monitor.sent.remove(&key).is_some() {
                effects.push(signal(*id, monitor, node, systemd_unit, Signal::UnitRemoved(Reason::Real)));
            }
        }
        effects
    }

    /// An agent reports the properties of a unit: after a subscription, or after a change.
    pub fn unit_properties(
        &mut self,
        node: &NodeName,
        systemd_unit: &str,
        state: &UnitState,
    ) -> Vec<Effect<O>> {
        let key = (node.clone(), systemd_unit.to_owned());
        let was_loaded = self.loaded.remove(&key);
        let mut effects = Vec::new();
        for (id, monitor) in &mut self.monitors {
            if !monitor.matches(node, systemd_unit) {
                continue;
            }
            let before = monitor.sent.insert(key.clone(), state.clone());
            for sent in signals(before.as_ref(), state, was_loaded) {
                effects.push(signal(*id, monitor, node, systemd_unit, sent));
            }
        }
        effects
    }

    fn owned(&mut self, owner: &O, monitor: u32) -> Result<&mut Monitor<O>, Refused> {
        let found = self.monitors.get_mut(&monitor).filter(|monitor| monitor.owner == *owner);
        found.ok_or(Refused::NoSuchMonitor)
    }

    /// Releases the patterns of a subscription. Agents stop reporting those that no other
    /// subscription needs.
    fn release(&mut self, gone: Subscription) -> Vec<Effect<O>> {
        let mut effects = Vec::new();
        for (pattern, _) in gone.patterns {
            let key = (gone.scope.clone(), pattern);
            if let Some(count) = self.wanted.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.wanted.remove(&key);
                }
            }
            let (scope, pattern) = key;
            for node in self.online.iter().filter(|node| scope.contains(node)) {
                if !self.is_wanted(node, &pattern) {
                    effects.push(Effect::UnsubscribeOnNode { node: node.clone(), pattern: pattern.clone() });
                }
            }
        }
        effects
    }

    fn is_wanted(&self, node: &NodeName, pattern: &str) -> bool {
        [Scope::AllNodes, Scope::Node(node.clone())]
            .into_iter()
            .any(|scope| self.wanted.contains_key(&(scope, pattern.to_owned())))
    }
}

fn signal<O: Clone>(
    monitor: u32,
    of: &Monitor<O>,
    node: &NodeName,
    systemd_unit: &str,
    signal: Signal,
) -> Effect<O> {
    let (owner, node, systemd_unit) = (of.owner.clone(), node.clone(), systemd_unit.to_owned());
    Effect::Signal { owner, monitor, node, systemd_unit, signal }
}

/// Returns the signals for a unit; `before` is the last state that was sent to the monitor.
fn signals(before: Option<&UnitState>, state: &UnitState, was_loaded: bool) -> Vec<Signal> {
    let text = |of: &UnitState, property: &str| of.get(property).cloned().unwrap_or_default();
    let activity = |of: &UnitState| (text(of, "ActiveState"), text(of, "SubState"));
    let (active, sub) = activity(state);
    let changed = Signal::UnitPropertiesChanged(state.clone());
    match before {
        Some(before) if before == state => Vec::new(),
        Some(before) if activity(before) == (active.clone(), sub.clone()) => vec![changed],
        Some(_) => vec![Signal::UnitStateChanged { active, sub, reason: Reason::Real }, changed],
        None => {
            let reason = if was_loaded { Reason::Real } else { Reason::Virtual };
            vec![Signal::UnitNew(reason), Signal::UnitStateChanged { active, sub, reason }, changed]
        }
    }
}

#[cfg(test)]
#[path = "monitor_tests.rs"]
mod tests;
