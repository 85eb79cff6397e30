//! The layout of the tree. Every znode path is built here and nowhere else. Pure.
//!
//! A [`NodePath`] is relative to the environment's root, which is the chroot of the connect string
//! or `/`.

use crate::model::{CharmHash, MachineId, NodeName, OperatorName, ServiceId, ServiceName, UnitId, UnitName};
use std::fmt;

/// The absolute path of a znode within the environment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodePath(String);

impl NodePath {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of a child that the store listed.
    pub fn child(&self, name: &str) -> Self {
        if self.0 == "/" { Self(format!("/{name}")) } else { Self(format!("{}/{name}", self.0)) }
    }

    /// A path that the store itself named, in a watch event.
    pub(super) fn reported(path: &str) -> Self {
        Self(path.to_owned())
    }
}

impl fmt::Display for NodePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn fixed(path: &str) -> NodePath {
    NodePath(path.to_owned())
}

pub fn root() -> NodePath {
    fixed("/")
}

/// Created last: if it exists, the environment is complete.
pub fn initialized() -> NodePath {
    fixed("/initialized")
}

/// The certificate of the environment's authority, readable by every client.
pub fn authority() -> NodePath {
    fixed("/authority")
}

/// The container of the controllers' lease, checkpoint and reports.
pub fn controller() -> NodePath {
    fixed("/controller")
}

/// Ephemeral: the lease of the leading controller.
pub fn leader() -> NodePath {
    controller().child("leader")
}

/// A request of the operator, and the controller's answer to it.
pub fn request(name: &str) -> NodePath {
    controller().child(name)
}

/// Its version counts the leaders so far; each leader's writes check it.
pub fn epoch() -> NodePath {
    controller().child("epoch")
}

/// The last checkpoint of the controllers; see `store::rollback`.
pub fn controller_checkpoint() -> NodePath {
    controller().child("checkpoint")
}

/// Written by an operator who accepts a restored store for the controllers.
pub fn controller_accepted() -> NodePath {
    controller().child("accepted")
}

/// One firewall report per machine.
pub fn firewall_reports() -> NodePath {
    controller().child("firewall")
}

pub fn firewall_report(id: MachineId) -> NodePath {
    firewall_reports().child(&id.key())
}

/// The container of the managers' state.
pub fn fleet() -> NodePath {
    controller().child("fleet")
}

/// Ephemeral: the lease of the leading manager.
pub fn fleet_leader() -> NodePath {
    fleet().child("leader")
}

/// Its version counts the managers that have led so far.
pub fn fleet_epoch() -> NodePath {
    fleet().child("epoch")
}

/// The addresses at which agents and operators reach the leading manager.
pub fn fleet_address() -> NodePath {
    fleet().child("address")
}

/// Which nodes may depend on units of which others.
pub fn fleet_dependencies() -> NodePath {
    fleet().child("dependencies")
}

/// The nodes as the leading manager has seen them last.
pub fn fleet_nodes() -> NodePath {
    fleet().child("nodes")
}

/// The container of the heartbeat trackers' shared state.
pub fn heartbeat() -> NodePath {
    controller().child("heartbeat")
}

/// Ephemeral: the lease of the heartbeat judge.
pub fn heartbeat_leader() -> NodePath {
    heartbeat().child("leader")
}

pub fn heartbeat_epoch() -> NodePath {
    heartbeat().child("epoch")
}

pub fn heartbeat_params() -> NodePath {
    heartbeat().child("params")
}

/// Components in maintenance, and until when.
pub fn heartbeat_maintenance() -> NodePath {
    heartbeat().child("maintenance")
}

/// Written by an operator to confirm a mass outage.
pub fn heartbeat_release() -> NodePath {
    heartbeat().child("release")
}

/// Whether dead states are held back because too many components died at once.
pub fn heartbeat_alarm() -> NodePath {
    heartbeat().child("alarm")
}

/// The list of trackers that machines were given last.
pub fn heartbeat_trackers() -> NodePath {
    heartbeat().child("trackers")
}

/// A number that the judge raises to make every tracker flush its beats.
pub fn heartbeat_question() -> NodePath {
    heartbeat().child("question")
}

/// All state changes in order, in numbered pages.
pub fn heartbeat_journal() -> NodePath {
    heartbeat().child("journal")
}

pub fn heartbeat_page(number: u64) -> NodePath {
    heartbeat_journal().child(&format!("{number:010}"))
}

/// The last change that the webhook received.
pub fn heartbeat_webhook() -> NodePath {
    heartbeat().child("webhook")
}

/// One ephemeral child per tracker.
pub fn heartbeat_replicas() -> NodePath {
    heartbeat().child("replicas")
}

pub fn heartbeat_replica(id: &str) -> NodePath {
    heartbeat_replicas().child(id)
}

/// Batches of beats, each written once and deleted by its writer some time later.
pub fn heartbeat_batches() -> NodePath {
    heartbeat().child("beats")
}

pub fn heartbeat_batch(replica: &str, number: u64) -> NodePath {
    heartbeat_batches().child(&format!("{replica}-{number:010}"))
}

/// The components, distributed over numbered znodes.
pub fn heartbeat_buckets() -> NodePath {
    heartbeat().child("components")
}

pub fn heartbeat_bucket(number: u16) -> NodePath {
    heartbeat_buckets().child(&format!("{number:04}"))
}

/// The znode that an event below [`heartbeat`] names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeartbeatNode {
    Leader,
    Params,
    Maintenance,
    Release,
    Question,
    Replica,
    /// The name of a batch, for [`heartbeat_batch_of`].
    Batch(String),
    Bucket(u16),
    /// A page of the journal.
    Page,
    Other,
}

pub fn heartbeat_node(path: &NodePath) -> HeartbeatNode {
    let Some(below) = path.as_str().strip_prefix("/controller/heartbeat/") else {
        return HeartbeatNode::Other;
    };
    match below.split_once('/') {
        None => match below {
            "leader" => HeartbeatNode::Leader,
            "params" => HeartbeatNode::Params,
            "maintenance" => HeartbeatNode::Maintenance,
            "release" => HeartbeatNode::Release,
            "question" => HeartbeatNode::Question,
            _ => HeartbeatNode::Other,
        },
        Some(("replicas", _)) => HeartbeatNode::Replica,
        Some(("beats", name)) => HeartbeatNode::Batch(name.to_owned()),
        Some(("components", name)) => name.parse().map_or(HeartbeatNode::Other, HeartbeatNode::Bucket),
        Some(("journal", _)) => HeartbeatNode::Page,
        Some(_) => HeartbeatNode::Other,
    }
}

/// The tracker and the number of a batch.
pub fn heartbeat_batch_of(name: &str) -> Option<(&str, u64)> {
    let (replica, number) = name.rsplit_once('-')?;
    Some((replica, number.parse().ok()?))
}

/// The recent firewall changes on a machine.
pub fn firewall_log(id: MachineId) -> NodePath {
    firewall_report(id).child("log")
}

pub fn services() -> NodePath {
    fixed("/services")
}

pub fn service(id: ServiceId) -> NodePath {
    services().child(&id.key())
}

/// The flag: the service is exposed if it exists.
pub fn exposed(id: ServiceId) -> NodePath {
    service(id).child("exposed")
}

/// The secret that the service's units share; their machines read the flag with it.
pub fn service_credentials(id: ServiceId) -> NodePath {
    service(id).child("credentials")
}

/// Charms, each under a name derived from its hash.
pub fn charms() -> NodePath {
    fixed("/charms")
}

pub fn charm(hash: &CharmHash) -> NodePath {
    charms().child(&hash.key())
}

/// A part of a charm's bytes.
pub fn charm_chunk(hash: &CharmHash, number: usize) -> NodePath {
    charm(hash).child(&format!("{number:04}"))
}

pub fn units() -> NodePath {
    fixed("/units")
}

pub fn unit(id: UnitId) -> NodePath {
    units().child(&id.key())
}

pub fn unit_ports(id: UnitId) -> NodePath {
    unit(id).child("ports")
}

/// Ephemeral: the unit's agent is connected.
pub fn unit_agent(id: UnitId) -> NodePath {
    unit(id).child("agent")
}

/// The state of the unit's workflow; written by its agent, and by an operator who resolves an
/// error.
pub fn unit_state(id: UnitId) -> NodePath {
    unit(id).child("state")
}

pub fn unit_credentials(id: UnitId) -> NodePath {
    unit(id).child("credentials")
}

pub fn machines() -> NodePath {
    fixed("/machines")
}

pub fn machine(id: MachineId) -> NodePath {
    machines().child(&id.key())
}

/// Ephemeral: the lease of the machine's agent.
pub fn machine_agent(id: MachineId) -> NodePath {
    machine(id).child("agent")
}

/// Exists once the machine had an agent: distinguishes a lost agent from one that never started.
pub fn machine_started(id: MachineId) -> NodePath {
    machine(id).child("started")
}

/// The host name and the addresses of the machine, as its agent reports them.
pub fn machine_host(id: MachineId) -> NodePath {
    machine(id).child("host")
}

/// The offer to a host that joins as this machine; see `store::joining`.
pub fn machine_offer(id: MachineId, kind: super::joining::OfferKind) -> NodePath {
    machine(id).child(kind.znode_name())
}

/// The trackers that the machine may send beats to; written by trackers, readable by this machine.
pub fn machine_trackers(id: MachineId) -> NodePath {
    machine(id).child("trackers")
}

/// One child per removed unit whose `stop` hook failed; written by the machine, resolved by the
/// operator.
pub fn machine_stopping(id: MachineId) -> NodePath {
    machine(id).child("stopping")
}

pub fn machine_stopping_unit(id: MachineId, unit: UnitId) -> NodePath {
    machine_stopping(id).child(&unit.key())
}

/// The reason why the machine does not run its units, as its agent reports it; empty if it does.
pub fn machine_problem(id: MachineId) -> NodePath {
    machine(id).child("problem")
}

/// The last checkpoint of the machine's agent; see `store::rollback`.
pub fn machine_checkpoint(id: MachineId) -> NodePath {
    machine(id).child("checkpoint")
}

/// Written by an operator who accepts a restored store for this machine.
pub fn machine_accepted(id: MachineId) -> NodePath {
    machine(id).child("accepted")
}

pub fn machine_credentials(id: MachineId) -> NodePath {
    machine(id).child("credentials")
}

/// The certificate signing request of the machine.
pub fn machine_certificate_request(id: MachineId) -> NodePath {
    machine(id).child("certificate-request")
}

/// The certificate for the machine's request, or the reason of a refusal; empty before. The machine
/// creates it, and only holders of the authority's key write it.
pub fn machine_certificate(id: MachineId) -> NodePath {
    machine(id).child("certificate")
}

/// The machine's report about its own firewall, if its agent manages that.
pub fn machine_firewall(id: MachineId) -> NodePath {
    machine(id).child("firewall")
}

/// The machine's recent changes of its own firewall.
pub fn machine_firewall_log(id: MachineId) -> NodePath {
    machine_firewall(id).child("log")
}

/// One child per unit assigned to the machine. The machine's agent reads its units here without a
/// right to the rest, and a machine cannot be deleted while this has children.
pub fn machine_units(id: MachineId) -> NodePath {
    machine(id).child("units")
}

pub fn machine_unit(id: MachineId, unit: UnitId) -> NodePath {
    machine_units(id).child(&unit.key())
}

/// One child per terminated machine that had an agent; see `store::tombstones`.
pub fn tombstones() -> NodePath {
    fixed("/tombstones")
}

pub fn tombstone(id: MachineId) -> NodePath {
    tombstones().child(&id.key())
}

/// The operators that were added to the first one; see `store::operators`.
pub fn operators() -> NodePath {
    fixed("/operators")
}

pub fn operator(name: &OperatorName) -> NodePath {
    operators().child(name.as_str())
}

/// The log of changes of expose flags, with their operators.
pub fn flag_log() -> NodePath {
    fixed("/flag-log")
}

pub fn names() -> NodePath {
    fixed("/names")
}

pub fn service_names() -> NodePath {
    names().child("services")
}

pub fn service_name(name: &ServiceName) -> NodePath {
    service_names().child(name.as_str())
}

pub fn unit_names() -> NodePath {
    names().child("units")
}

/// The counter of unit numbers of a service name. Outlives the service, so that numbers are never
/// reused.
pub fn unit_names_of(name: &ServiceName) -> NodePath {
    unit_names().child(name.as_str())
}

pub fn unit_name(name: &UnitName) -> NodePath {
    unit_names_of(name.service()).child(&name.number().to_string())
}

/// The machines that an operator named.
pub fn machine_names() -> NodePath {
    names().child("machines")
}

pub fn machine_name(name: &NodeName) -> NodePath {
    machine_names().child(name.as_str())
}

#[cfg(test)]
#[path = "paths_tests.rs"]
mod tests;
