//! The properties of objects as D-Bus values.

use std::collections::HashMap;

use tokio::time::Instant;
use zbus::{OwnedVariant, Variant};

use super::object::Object;
use super::state::{Node, State};
use crate::fleet::dbus::values::{OBSERVED_PROPERTIES, Properties};
use crate::fleet::job::Job;
use crate::fleet::monitor::UnitState;
use crate::fleet::name::NodeName;

/// Adds a property. None of the manager's values has a file descriptor, so all of them can be
/// owned.
fn add(properties: &mut Properties, name: &str, value: Variant<'static>) {
    if let Ok(value) = OwnedVariant::try_from(value) {
        properties.insert(name.to_owned(), value);
    }
}

pub(super) fn single(name: &str, value: Variant<'static>) -> Properties {
    let mut properties = HashMap::new();
    add(&mut properties, name, value);
    properties
}

pub(super) fn none() -> Properties {
    HashMap::new()
}

/// The observed properties of a systemd unit.
pub(super) fn variants(state: &UnitState) -> Properties {
    let mut properties = HashMap::new();
    for (name, value) in state {
        add(&mut properties, name, value.clone().into());
    }
    properties
}

/// The longest value of an observed property. All of them are short words.
const MAX_VALUE: usize = 256;

/// The observed properties that an agent reports. Other properties are ignored, and values of other
/// types or lengths.
pub(super) fn unit_state(properties: &Properties) -> UnitState {
    let text = |name: &str| {
        let value = <&str>::try_from(properties.get(name)?).ok()?;
        (value.len() <= MAX_VALUE).then(|| value.to_owned())
    };
    let observed = OBSERVED_PROPERTIES.into_iter();
    observed.filter_map(|name| Some((name.to_owned(), text(name)?))).collect()
}

pub(super) fn of_node(name: &NodeName, node: &Node) -> Properties {
    let mut properties = HashMap::new();
    add(&mut properties, "Name", name.to_string().into());
    add(&mut properties, "Status", node.status().as_str().into());
    add(&mut properties, "PeerIp", node.peer_ip().into());
    add(&mut properties, "LastSeenTimestamp", node.last_seen_us.into());
    properties
}

fn of_job<P>(id: u32, job: &Job<P, Instant>) -> Properties {
    let mut properties = HashMap::new();
    add(&mut properties, "Id", id.into());
    add(&mut properties, "Node", job.node.to_string().into());
    add(&mut properties, "Unit", job.systemd_unit.clone().into());
    add(&mut properties, "JobType", job.kind.as_str().into());
    add(&mut properties, "State", job.state.as_str().into());
    properties
}

/// Returns the properties of the object's own interface; `None` if there is no such object.
pub(super) fn of(state: &State, object: &Object) -> Option<Properties> {
    match object {
        Object::Manager => {
            let mut properties = HashMap::new();
            let names: Vec<String> = state.nodes.keys().map(ToString::to_string).collect();
            add(&mut properties, "Nodes", names.into());
            add(&mut properties, "Status", state.status().into());
            Some(properties)
        }
        Object::Node(name) => Some(of_node(name, state.nodes.get(name)?)),
        Object::Job(id) => Some(of_job(*id, state.jobs.get(*id)?)),
        Object::Monitor(id) => state.monitors.owner(*id).map(|_| HashMap::new()),
        Object::Parent(_) => Some(HashMap::new()),
    }
}
