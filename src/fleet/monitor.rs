//! Monitors: which signals about systemd units go to which monitor, and which units the agents have
//! to report. A change is sent once to each monitor that has a matching subscription, and a state
//! that was sent to the monitor is not sent again. Signals wait until the client has room for them;
//! a later change of a unit replaces one that waits, so the last state is always sent. Pure.

mod hold;
mod wanted;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::dbus::values::Reason;
use super::name::NodeName;
use crate::model::Glob;
use crate::mutant;
pub use wanted::MAX_PATTERNS;
use wanted::Wanted;

/// Limits of one client.
pub const MAX_MONITORS: usize = 64;
pub const MAX_SUBSCRIPTIONS: usize = 1_000;
/// Units that are observed on one node. An agent that reports further ones is wrong: a systemd with
/// half as many is hardly usable.
pub const MAX_UNITS: usize = 65_536;

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
    UnitPropertiesChanged(Arc<UnitState>),
}

/// An action that the caller executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    SubscribeOnNode { node: NodeName, pattern: String },
    UnsubscribeOnNode { node: NodeName, pattern: String },
}

/// The signals of one unit for one monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing<O> {
    pub owner: O,
    pub monitor: u32,
    pub node: NodeName,
    pub systemd_unit: String,
    pub signals: Vec<Signal>,
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
    #[error("all clients together may subscribe to at most {MAX_PATTERNS} names or patterns on one node")]
    TooManyPatterns,
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

/// A unit of a node.
type Key = (NodeName, String);

/// A unit that a monitor was sent. Monitors share the states.
#[derive(Debug)]
struct Sent {
    state: Arc<UnitState>,
    /// Whether a new subscription needs the state again, changed or not.
    again: bool,
}

/// The changes of a unit that were not sent yet.
#[derive(Debug, Default)]
struct Unsent {
    /// The unit was removed, before it had the state below.
    removed: Option<Reason>,
    /// The state, and whether systemd has just loaded the unit.
    state: Option<(Arc<UnitState>, bool)>,
}

#[derive(Debug)]
struct Monitor<O> {
    owner: O,
    subscriptions: BTreeMap<u32, Subscription>,
    sent: HashMap<Key, Sent>,
    unsent: HashMap<Key, Unsent>,
    /// The keys of `unsent`, the oldest first.
    order: VecDeque<Key>,
}

impl<O> Monitor<O> {
    fn new(owner: O) -> Self {
        Self {
            owner,
            subscriptions: BTreeMap::new(),
            sent: HashMap::new(),
            unsent: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    fn matches(&self, node: &NodeName, systemd_unit: &str) -> bool {
        self.subscriptions.values().any(|subscription| subscription.matches(node, systemd_unit))
    }

    fn unsent(&mut self, key: &Key) -> &mut Unsent {
        if !self.unsent.contains_key(key) {
            self.order.push_back(key.clone());
        }
        self.unsent.entry(key.clone()).or_default()
    }

    fn changed(&mut self, key: &Key, state: &Arc<UnitState>, was_loaded: bool) {
        let unsent = self.unsent(key);
        let was_loaded = was_loaded || unsent.state.as_ref().is_some_and(|(_, was_loaded)| *was_loaded);
        unsent.state = Some((Arc::clone(state), was_loaded));
    }

    /// Returns whether the client has the unit, or would have been sent it.
    fn removed(&mut self, key: &Key, reason: Reason) -> bool {
        let is_known = self.sent.contains_key(key) || self.unsent.contains_key(key);
        if is_known {
            *self.unsent(key) = Unsent { removed: Some(reason), state: None };
        }
        is_known
    }

    /// Forgets units that no subscription matches.
    fn retain_matching(&mut self) {
        let Self { subscriptions, sent, unsent, order, .. } = self;
        let matches = |(node, unit): &Key| subscriptions.values().any(|other| other.matches(node, unit));
        sent.retain(|key, _| matches(key));
        unsent.retain(|key, _| matches(key));
        order.retain(|key| unsent.contains_key(key));
    }

    /// Takes the signals of the unit that has waited for the longest time.
    fn next(&mut self) -> Option<(Key, Vec<Signal>)> {
        let key = self.order.pop_front()?;
        let Unsent { removed, state } = self.unsent.remove(&key).unwrap_or_default();
        let mut found = Vec::new();
        if let Some(reason) = removed
            && self.sent.remove(&key).is_some()
        {
            found.push(Signal::UnitRemoved(reason));
        }
        if let Some((state, was_loaded)) = state {
            let sent = Sent { state: Arc::clone(&state), again: false };
            let before = self.sent.insert(key.clone(), sent).filter(|before| !before.again);
            found.extend(signals(before.as_ref().map(|before| &*before.state), &state, was_loaded));
        }
        Some((key, found))
    }
}

/// All monitors of a manager. `O` identifies the client that owns a monitor.
#[derive(Debug)]
pub struct Monitors<O> {
    last_monitor: u32,
    last_subscription: u32,
    monitors: BTreeMap<u32, Monitor<O>>,
    online: BTreeSet<NodeName>,
    wanted: Wanted,
    /// The observed units of each node that is online, and whether systemd has loaded the unit and
    /// its properties were not reported yet.
    units: BTreeMap<NodeName, BTreeMap<String, bool>>,
    /// The monitors that have unsent signals.
    waiting: BTreeSet<u32>,
    /// The monitor whose signals were taken last.
    last_taken: u32,
}

impl<O> Default for Monitors<O> {
    fn default() -> Self {
        Self {
            last_monitor: 0,
            last_subscription: 0,
            monitors: BTreeMap::new(),
            online: BTreeSet::new(),
            wanted: Wanted::default(),
            units: BTreeMap::new(),
            waiting: BTreeSet::new(),
            last_taken: 0,
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
        self.monitors.insert(self.last_monitor, Monitor::new(owner));
        Ok(self.last_monitor)
    }

    /// # Errors
    /// If the client has no such monitor.
    pub fn close(&mut self, owner: &O, monitor: u32) -> Result<Vec<Effect>, Refused> {
        self.owned(owner, monitor)?;
        self.waiting.remove(&monitor);
        let closed = self.monitors.remove(&monitor).ok_or(Refused::NoSuchMonitor)?;
        Ok(closed.subscriptions.into_values().flat_map(|gone| self.release(gone)).collect())
    }

    /// The connection of a client ended.
    pub fn close_all(&mut self, owner: &O) -> Vec<Effect> {
        let monitors = self.of_owner(owner);
        monitors.into_iter().flat_map(|id| self.close(owner, id).unwrap_or_default()).collect()
    }

    /// Adds a subscription and returns its id. The agents report every matching unit again; each of
    /// them is sent to the monitor as if it had not been sent before.
    ///
    /// # Errors
    /// If the client has no such monitor, or there are too many subscriptions.
    pub fn subscribe(
        &mut self,
        owner: &O,
        monitor: u32,
        scope: Scope,
        patterns: &[String],
    ) -> Result<(u32, Vec<Effect>), Refused> {
        self.owned(owner, monitor)?;
        let owned = self.monitors.values().filter(|monitor| monitor.owner == *owner);
        let all: usize =
            owned.flat_map(|monitor| monitor.subscriptions.values()).map(|s| s.patterns.len()).sum();
        if all + patterns.len() > MAX_SUBSCRIPTIONS {
            return Err(Refused::TooManySubscriptions);
        }
        if !self.wanted.has_room(&scope, patterns) {
            return Err(Refused::TooManyPatterns);
        }
        self.last_subscription = self.last_subscription.wrapping_add(1);
        let id = self.last_subscription;
        let mut effects = Vec::new();
        for pattern in patterns {
            self.wanted.add(&scope, pattern);
            for node in self.online.iter().filter(|node| scope.contains(node)) {
                effects.push(Effect::SubscribeOnNode { node: node.clone(), pattern: pattern.clone() });
            }
        }
        let patterns = patterns.iter().map(|pattern| (pattern.clone(), Glob::new(pattern))).collect();
        let subscription = Subscription { scope, patterns };
        if let Some(monitor) = self.monitors.get_mut(&monitor) {
            for ((node, systemd_unit), sent) in &mut monitor.sent {
                sent.again |= subscription.matches(node, systemd_unit);
            }
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
    ) -> Result<Vec<Effect>, Refused> {
        let monitor = self.owned(owner, monitor)?;
        let gone = monitor.subscriptions.remove(&subscription).ok_or(Refused::NoSuchSubscription)?;
        monitor.retain_matching();
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
    ) -> Result<Vec<Effect>, Refused> {
        let subscriptions = &self.owned(owner, monitor)?.subscriptions;
        let is_named =
            |s: &Subscription| s.scope == *scope && s.patterns.len() == 1 && s.patterns[0].0 == pattern;
        let found = subscriptions.iter().find(|(_, subscription)| is_named(subscription)).map(|(id, _)| *id);
        self.unsubscribe(owner, monitor, found.ok_or(Refused::NoSuchSubscription)?)
    }

    /// The agent of a node registered: it reports everything that subscriptions ask for.
    pub fn node_online(&mut self, node: &NodeName) -> Vec<Effect> {
        self.online.insert(node.clone());
        if mutant!(NoSubscriptionsAfterReconnect) {
            return Vec::new();
        }
        let subscribe =
            |pattern: &String| Effect::SubscribeOnNode { node: node.clone(), pattern: pattern.clone() };
        self.wanted.on(node).into_iter().map(subscribe).collect()
    }

    /// A node is lost or was removed: its units are removed from all monitors.
    pub fn node_lost(&mut self, node: &NodeName) {
        self.online.remove(node);
        self.units.remove(node);
        for (id, monitor) in &mut self.monitors {
            let known = monitor.sent.keys().chain(monitor.unsent.keys());
            let gone: BTreeSet<Key> = known.filter(|(of, _)| of == node).cloned().collect();
            for key in gone {
                monitor.removed(&key, Reason::Virtual);
                self.waiting.insert(*id);
            }
        }
    }

    /// An agent reports that systemd has loaded a unit. Its properties follow.
    pub fn unit_new(&mut self, node: &NodeName, systemd_unit: &str) {
        if let Some(is_loaded) = self.unit(node, systemd_unit) {
            *is_loaded = true;
        }
    }

    /// An agent reports that systemd has unloaded a unit.
    pub fn unit_removed(&mut self, node: &NodeName, systemd_unit: &str) {
        if let Some(units) = self.units.get_mut(node) {
            units.remove(systemd_unit);
        }
        let key = (node.clone(), systemd_unit.to_owned());
        for (id, monitor) in &mut self.monitors {
            if monitor.removed(&key, Reason::Real) {
                self.waiting.insert(*id);
            }
        }
    }

    /// An agent reports the properties of a unit: after a subscription, or after a change.
    pub fn unit_properties(&mut self, node: &NodeName, systemd_unit: &str, state: UnitState) {
        let Some(is_loaded) = self.unit(node, systemd_unit) else { return };
        let was_loaded = std::mem::take(is_loaded);
        let (key, state) = ((node.clone(), systemd_unit.to_owned()), Arc::new(state));
        let mut is_observed = false;
        for (id, monitor) in &mut self.monitors {
            if monitor.matches(node, systemd_unit) {
                monitor.changed(&key, &state, was_loaded);
                self.waiting.insert(*id);
                is_observed = true;
            }
        }
        if !is_observed && let Some(units) = self.units.get_mut(node) {
            units.remove(systemd_unit);
        }
    }

    /// Takes the signals of one unit for one monitor whose owner has room for them; `None` if there
    /// are no such signals. The monitors take turns.
    pub fn next_signals(&mut self, has_room: impl Fn(&O) -> bool) -> Option<Outgoing<O>> {
        loop {
            let after = self.waiting.range(self.last_taken.saturating_add(1)..);
            let mut turns = after.chain(self.waiting.range(..=self.last_taken)).copied();
            let is_ready = |id: &u32| self.monitors.get(id).is_none_or(|monitor| has_room(&monitor.owner));
            let id = turns.find(is_ready)?;
            let taken = self.monitors.get_mut(&id).and_then(|monitor| Some((monitor.next()?, monitor)));
            let Some((((node, systemd_unit), signals), monitor)) = taken else {
                self.waiting.remove(&id);
                continue;
            };
            self.last_taken = id;
            if !signals.is_empty() {
                let owner = monitor.owner.clone();
                return Some(Outgoing { owner, monitor: id, node, systemd_unit, signals });
            }
        }
    }

    /// Returns the owners of monitors whose signals wait for room.
    pub fn waiting(&self) -> impl Iterator<Item = &O> {
        self.waiting.iter().filter_map(|id| self.owner(*id))
    }

    /// Returns whether a unit was loaded and not reported yet; `None` if its node is not online, or
    /// has too many units.
    fn unit(&mut self, node: &NodeName, systemd_unit: &str) -> Option<&mut bool> {
        if !self.online.contains(node) {
            return None;
        }
        let units = self.units.entry(node.clone()).or_default();
        if units.len() >= MAX_UNITS && !units.contains_key(systemd_unit) {
            return None;
        }
        Some(units.entry(systemd_unit.to_owned()).or_default())
    }

    fn owned(&mut self, owner: &O, monitor: u32) -> Result<&mut Monitor<O>, Refused> {
        let found = self.monitors.get_mut(&monitor).filter(|monitor| monitor.owner == *owner);
        found.ok_or(Refused::NoSuchMonitor)
    }

    /// Releases the patterns of a subscription.
    fn release(&mut self, gone: Subscription) -> Vec<Effect> {
        let patterns = gone.patterns.into_iter();
        patterns.flat_map(|(pattern, _)| self.release_pattern(&gone.scope, &pattern)).collect()
    }
}

/// Returns the signals for a unit; `before` is the last state that was sent to the monitor.
fn signals(before: Option<&UnitState>, state: &Arc<UnitState>, was_loaded: bool) -> Vec<Signal> {
    let text = |of: &UnitState, property: &str| of.get(property).cloned().unwrap_or_default();
    let activity = |of: &UnitState| (text(of, "ActiveState"), text(of, "SubState"));
    let (active, sub) = activity(state);
    let changed = Signal::UnitPropertiesChanged(Arc::clone(state));
    match before {
        Some(before) if *before == **state => Vec::new(),
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
