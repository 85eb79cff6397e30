//! The manager: its nodes, jobs and monitors, the connections of agents, and the public D-Bus API
//! on a bus and on the connections of operators. The decisions are in `job`, `monitor` and
//! `liveness`; this module connects them to D-Bus.

pub mod access;
mod agent;
pub mod bus;
mod call;
mod client;
mod list;
pub mod listen;
pub mod metrics;
mod node_call;
mod object;
mod operator;
mod properties;
mod proxy;
pub mod report;
mod requests;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use self::metrics::Metrics;
use self::state::State;
use super::liveness::{HEARTBEAT_INTERVAL, SILENCE_LIMIT};
use super::name::NodeName;
use crate::model::{MachineId, OperatorName, number_name};

/// The certificates with which a node may register.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeRule {
    /// The only certificate (DER) that the node may present; `None` does not restrict it.
    pub certificate: Option<Bytes>,
    /// The machine that the node is. Its certificate has to have the name with the machine's number
    /// instead of the node's own name, which may be an address of another machine.
    pub machine: Option<MachineId>,
    /// The nodes on whose units those of this node may depend; `None` if that cannot be read.
    pub may_depend_on: Option<BTreeSet<NodeName>>,
}

impl NodeRule {
    /// The rule for a machine of an environment.
    pub fn of_machine(machine: MachineId) -> Self {
        Self { machine: Some(machine), ..Self::default() }
    }

    /// Whether a certificate with this name is that of the node.
    fn is_proved_by(&self, node: &NodeName, name: &str) -> bool {
        match self.machine {
            Some(machine) => name == number_name(machine),
            None => name == node.as_str(),
        }
    }
}

/// All nodes that may register.
pub type NodeRules = BTreeMap<NodeName, NodeRule>;

/// Whether this manager is the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leadership {
    Leading,
    /// Another manager is the leader, at this address if it is known.
    Standby {
        leader: Option<String>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub heartbeat_interval: Duration,
    pub silence_limit: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { heartbeat_interval: HEARTBEAT_INTERVAL, silence_limit: SILENCE_LIMIT }
    }
}

/// A manager. Clones share their state.
#[derive(Debug, Clone)]
pub struct Manager(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    timing: Mutex<Timing>,
    metrics: Metrics,
    /// The user of this process, who has the same rights as root, for a bus of one user.
    own_user: u32,
}

impl Manager {
    pub fn new(timing: Timing, leadership: Leadership) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::new(State::new(leadership)),
            timing: Mutex::new(timing),
            metrics: Metrics::default(),
            own_user: rustix::process::geteuid().as_raw(),
        }))
    }

    /// Sets the nodes that may register. Nodes that are no longer in the set, or whose agent could
    /// no longer register, are disconnected, and their jobs end; the others are not affected.
    pub fn set_nodes(&self, rules: NodeRules) {
        let tasks = self.state().set_nodes(rules, self.0.own_user);
        self.run(tasks);
    }

    /// Sets the operators besides the first one, who may call all methods. The connections of
    /// operators that are no longer in the set are closed.
    pub fn set_operators(&self, operators: BTreeSet<OperatorName>) {
        let mut state = self.state();
        state.clients.retain_operators(&operators);
        state.operators = operators;
    }

    /// Sets the intervals for connections that begin later.
    pub fn set_timing(&self, timing: Timing) {
        *self.0.timing.lock().unwrap_or_else(PoisonError::into_inner) = timing;
    }

    /// Makes this manager the leader or a standby. A leader that becomes a standby disconnects all
    /// agents and ends all jobs; systemd's jobs on the nodes continue.
    pub fn set_leadership(&self, leadership: Leadership) {
        let tasks = self.state().set_leadership(leadership);
        self.run(tasks);
    }

    pub fn leadership(&self) -> Leadership {
        self.state().leadership.clone()
    }

    /// Ends every job with `cancelled`, and disconnects all clients after the signals about these
    /// jobs are sent. No jobs are accepted afterwards.
    pub fn stop(&self) {
        self.set_leadership(Leadership::Standby { leader: None });
        self.state().clients.clear();
    }

    /// Returns how many nodes there are, and how many of them are online.
    pub fn node_counts(&self) -> (usize, usize) {
        self.state().node_counts()
    }

    /// Returns the metrics in Prometheus' text format.
    pub fn render_metrics(&self) -> String {
        let (all, online) = self.node_counts();
        self.0.metrics.render(all, online)
    }

    fn timing(&self) -> Timing {
        *self.0.timing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
