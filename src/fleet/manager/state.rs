//! The state of a manager, and the events that change it. Every method is called with the lock
//! held, sends its signals to the queues of the clients at once, so that all clients get them in
//! the same order, and returns the calls to nodes, which the caller makes without the lock.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;
use tokio::time::Instant;
use zbus::Message;

use super::client::{Client, Clients, Owner};
use super::metrics::Metrics;
use super::node_call::{Payload, Start};
use super::object::{job_path, node_path};
use super::proxy::ProxyState;
use super::requests::Request;
use super::{Leadership, NodeRule, NodeRules};
use crate::fleet::dbus::names;
use crate::fleet::dbus::values::{JobResult, JobState, NodeStatus, Properties};
use crate::fleet::job::{self, Jobs};
use crate::fleet::manager::agent::{Link, check_proof};
use crate::fleet::monitor::{self, Monitors};
use crate::fleet::name::NodeName;
use crate::fleet::proxy::GRACE;
use crate::model::OperatorName;
use crate::mutant;
use crate::runtime::clock::wall_ms;

/// `LastSeenTimestamp` of an online node is updated at most this often.
const LAST_SEEN_EVERY_US: u64 = 10_000_000;

/// A node, connected or not.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) rule: NodeRule,
    pub(super) link: Option<Link>,
    /// Microseconds since 1970; 0 if no agent was ever connected.
    pub(super) last_seen_us: u64,
}

impl Node {
    pub(super) fn status(&self) -> NodeStatus {
        if self.link.is_some() { NodeStatus::Online } else { NodeStatus::Offline }
    }

    pub(super) fn peer_ip(&self) -> String {
        self.link.as_ref().map(|link| link.peer_ip.clone()).unwrap_or_default()
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) nodes: BTreeMap<NodeName, Node>,
    pub(super) jobs: Jobs<Payload, Instant>,
    pub(super) monitors: Monitors<Owner>,
    pub(super) clients: Clients,
    pub(super) proxies: ProxyState,
    pub(super) leadership: Leadership,
    /// The operators besides the first one, whose certificates give the same rights.
    pub(super) operators: BTreeSet<OperatorName>,
    /// Changes when a node is added, removed, connected or lost.
    pub(super) changes: watch::Sender<u64>,
    last_link: u64,
    /// The results and times of jobs that ended, for the metrics.
    ended: Vec<(JobResult, std::time::Duration)>,
}

impl State {
    pub(super) fn new(leadership: Leadership) -> Self {
        Self {
            nodes: BTreeMap::new(),
            jobs: Jobs::default(),
            monitors: Monitors::default(),
            clients: Clients::default(),
            proxies: ProxyState::new(GRACE),
            leadership,
            operators: BTreeSet::new(),
            changes: watch::Sender::new(0),
            last_link: 0,
            ended: Vec::new(),
        }
    }

    pub(super) fn next_link(&mut self) -> u64 {
        self.last_link += 1;
        self.last_link
    }

    pub(super) fn node_counts(&self) -> (usize, usize) {
        (self.nodes.len(), self.nodes.values().filter(|node| node.link.is_some()).count())
    }

    /// `up` if all nodes are online, `down` if none is.
    pub(super) fn status(&self) -> &'static str {
        match self.node_counts() {
            (all, online) if all == online => "up",
            (_, 0) => "down",
            _ => "degraded",
        }
    }

    pub(super) fn take_ended(&mut self, metrics: &Metrics) {
        for (result, took) in self.ended.drain(..) {
            metrics.job_ended(result, took);
        }
    }

    /// Sets the nodes. An agent that could no longer register is disconnected.
    pub(super) fn set_nodes(&mut self, rules: NodeRules, own_user: u32) -> Vec<Start> {
        let before = self.status();
        let is_changed = !self.nodes.keys().eq(rules.keys());
        let gone: Vec<NodeName> =
            self.nodes.keys().filter(|name| !rules.contains_key(*name)).cloned().collect();
        let mut starts = Vec::new();
        for name in gone {
            if let Some(link) = self.nodes.get(&name).and_then(|node| node.link.clone()) {
                link.activity.end("the node was removed");
                starts.extend(self.node_lost(&name, link.id));
            }
            self.nodes.remove(&name);
        }
        let permissions = rules.iter().map(|(name, rule)| (name.clone(), rule.may_depend_on.clone()));
        let effects = self.proxies.proxies.set_rules(permissions.collect(), Instant::now());
        starts.extend(self.proxy_effects(effects));
        for (name, rule) in rules {
            let node = self.nodes.entry(name.clone()).or_default();
            node.rule = rule;
            if let Some(link) = node.link.clone()
                && check_proof(&name, &node.rule, &link.proof, own_user).is_err()
            {
                link.activity.end("the node has to present another certificate");
                starts.extend(self.node_lost(&name, link.id));
            }
        }
        if is_changed {
            self.changes.send_modify(|number| *number += 1);
            let names: Vec<String> = self.nodes.keys().map(ToString::to_string).collect();
            self.property_changed(names::MANAGER_PATH, names::MANAGER_INTERFACE, "Nodes", names);
        }
        self.status_changed(before);
        starts
    }

    pub(super) fn set_leadership(&mut self, leadership: Leadership) -> Vec<Start> {
        let ends = self.leadership == Leadership::Leading && leadership != Leadership::Leading;
        self.leadership = leadership;
        if !ends {
            return Vec::new();
        }
        let effects = self.proxies.proxies.clear();
        let mut starts = self.proxy_effects(effects);
        let effects = self.jobs.stop(Instant::now());
        starts.extend(self.job_effects(effects));
        let links: Vec<(NodeName, Link)> =
            self.nodes.iter().filter_map(|(name, node)| Some((name.clone(), node.link.clone()?))).collect();
        for (name, link) in links {
            link.activity.end("this manager is no longer the leader");
            starts.extend(self.node_lost(&name, link.id));
        }
        starts
    }

    /// Handles the registration of a node's agent.
    pub(super) fn node_online(&mut self, name: &NodeName, link: Link) {
        let before = self.status();
        let Some(node) = self.nodes.get_mut(name) else { return };
        node.link = Some(link);
        node.last_seen_us = wall_ms() * 1_000;
        self.node_changed(name);
        self.status_changed(before);
        let effects = self.monitors.node_online(name);
        self.monitor_effects(effects);
        self.proxies.proxies.node_online(name, Instant::now());
    }

    /// Handles the end of the connection `link` of an agent. An agent that has registered since
    /// then is not affected.
    pub(super) fn node_lost(&mut self, name: &NodeName, link: u64) -> Vec<Start> {
        let before = self.status();
        let Some(node) = self.nodes.get_mut(name) else { return Vec::new() };
        let Some(lost) = node.link.take_if(|current| current.id == link) else { return Vec::new() };
        let silent_ms =
            u64::try_from(lost.activity.last_received().elapsed().as_millis()).unwrap_or(u64::MAX);
        node.last_seen_us = wall_ms().saturating_sub(silent_ms) * 1_000;
        self.proxy_source_lost(name);
        let effects = self.proxies.proxies.node_lost(name, Instant::now());
        let mut starts = self.proxy_effects(effects);
        let ended =
            if mutant!(JobsOfLostNodesKept) { Vec::new() } else { self.jobs.node_lost(name, Instant::now()) };
        starts.extend(self.job_effects(ended));
        self.monitors.node_lost(name);
        self.send_monitor_signals();
        self.node_changed(name);
        self.status_changed(before);
        starts
    }

    /// Updates the time of the last message from a node's agent.
    pub(super) fn seen(&mut self, name: &NodeName) {
        let now = wall_ms() * 1_000;
        let Some(node) = self.nodes.get_mut(name) else { return };
        if now.saturating_sub(node.last_seen_us) >= LAST_SEEN_EVERY_US {
            node.last_seen_us = now;
            self.property_changed(&node_path(name), names::NODE_INTERFACE, "LastSeenTimestamp", now);
        }
    }

    /// Sends the signals of job effects. Returns the jobs that have to be sent to their nodes.
    pub(super) fn job_effects(&mut self, effects: Vec<job::Effect<Payload>>) -> Vec<Start> {
        let mut starts = Vec::new();
        for effect in effects {
            match effect {
                job::Effect::JobNew { id, node, systemd_unit } => {
                    self.manager_signal("JobNew", &(id, job_path(id), node.as_str(), systemd_unit.as_str()));
                }
                job::Effect::StartOnNode { id, request } => {
                    let link = self.nodes.get(&request.node).and_then(|node| node.link.clone());
                    starts.push(Start { id, link, request });
                }
                job::Effect::CancelOnNode { id, node } => {
                    self.send_to_node(&node, Request::CancelJob(id));
                }
                job::Effect::StateChanged { id, state } => {
                    let path = job_path(id);
                    self.property_changed(&path, names::JOB_INTERFACE, "State", state.as_str());
                }
                job::Effect::JobRemoved { removed, took } => {
                    let job::Removed { id, node, systemd_unit, result, .. } = removed;
                    self.ended.push((result, took));
                    if mutant!(CancelledJobsEndTwice) && result == JobResult::Cancelled {
                        let (node, unit) = (node.as_str(), systemd_unit.as_str());
                        self.manager_signal("JobRemoved", &(id, job_path(id), node, unit, result.as_str()));
                    }
                    self.manager_signal(
                        "JobRemoved",
                        &(id, job_path(id), node.as_str(), systemd_unit.as_str(), result.as_str()),
                    );
                    if let Some(result) = self.proxies.job_ended(id, result) {
                        let now = Instant::now();
                        let effects = self.proxies.proxies.job_ended(&node, &systemd_unit, &result, now);
                        starts.extend(self.proxy_effects(effects));
                    }
                }
            }
        }
        starts
    }

    /// Sends subscriptions to nodes.
    pub(super) fn monitor_effects(&mut self, effects: Vec<monitor::Effect>) {
        for effect in effects {
            match effect {
                monitor::Effect::SubscribeOnNode { node, pattern } => {
                    self.send_to_node(&node, Request::Subscribe(pattern));
                }
                monitor::Effect::UnsubscribeOnNode { node, pattern } => {
                    self.send_to_node(&node, Request::Unsubscribe(pattern));
                }
            }
        }
    }

    /// Sends signals of monitors to the clients that have room for them.
    pub(super) fn send_monitor_signals(&mut self) {
        // A client whose queue becomes shorter meanwhile asks for its signals again.
        self.clients.set_waiting(&self.monitors.waiting().map(|owner| owner.client).collect());
        while let Some(outgoing) = self.monitors.next_signals(|owner| self.clients.has_room(owner.client)) {
            self.clients.monitor_signals(outgoing);
        }
        self.clients.set_waiting(&self.monitors.waiting().map(|owner| owner.client).collect());
    }

    /// Handles a node's report of the end of a job.
    pub(super) fn job_done(&mut self, node: &NodeName, id: u32, result: JobResult) -> Vec<Start> {
        let effects = self.jobs.done(node, id, result, Instant::now());
        self.job_effects(effects)
    }

    /// Handles a node's report of the state of a job.
    pub(super) fn job_state(&mut self, node: &NodeName, id: u32, state: JobState) -> Vec<Start> {
        let effects = self.jobs.state_changed(node, id, state);
        self.job_effects(effects)
    }

    /// Handles the disconnection of a client of the bus, or of an operator.
    pub(super) fn client_lost(&mut self, owner: &Owner) {
        if mutant!(MonitorsOfLostClientsKept) {
            return;
        }
        let effects = self.monitors.close_all(owner);
        self.monitor_effects(effects);
    }

    /// Handles the loss of a bus, with all of its senders.
    pub(super) fn clients_lost(&mut self, client: u64) {
        for owner in self.monitors.owners() {
            if owner.client == client {
                self.client_lost(&owner);
            }
        }
    }

    pub(super) fn add_client(&mut self, client: Client) -> u64 {
        self.clients.add(client)
    }

    /// Adds a request to those that wait for a node's agent.
    pub(super) fn send_to_node(&mut self, name: &NodeName, request: Request) {
        if let Some(link) = self.nodes.get(name).and_then(|node| node.link.as_ref()) {
            link.requests.add(request);
        }
    }

    fn manager_signal<B>(&mut self, member: &'static str, body: &B)
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let built = Message::signal(names::MANAGER_PATH, names::MANAGER_INTERFACE, member).build(body);
        self.clients.broadcast(built);
    }

    fn property_changed<V>(&mut self, path: &str, interface: &'static str, property: &str, value: V)
    where
        V: Into<zbus::Variant<'static>>,
    {
        let changed = super::properties::single(property, value.into());
        self.properties_changed(path, interface, &changed);
    }

    fn properties_changed(&mut self, path: &str, interface: &'static str, changed: &Properties) {
        let body = (interface, changed, Vec::<&str>::new());
        let built =
            Message::signal(path, "org.freedesktop.DBus.Properties", "PropertiesChanged").build(&body);
        self.clients.broadcast(built);
    }

    /// Sends the signals about a node that went online or offline.
    fn node_changed(&mut self, name: &NodeName) {
        self.changes.send_modify(|number| *number += 1);
        let Some(node) = self.nodes.get(name) else { return };
        let status = node.status();
        let mut changed = super::properties::of_node(name, node);
        changed.remove("Name");
        self.properties_changed(&node_path(name), names::NODE_INTERFACE, &changed);
        self.manager_signal("NodeConnectionStateChanged", &(name.as_str(), status.as_str()));
    }

    fn status_changed(&mut self, before: &'static str) {
        let status = self.status();
        if status != before {
            self.property_changed(names::MANAGER_PATH, names::MANAGER_INTERFACE, "Status", status);
        }
    }
}
