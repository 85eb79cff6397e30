//! The machines of an environment, as their records and agents report them. Pure.

use serde_json::Value;

use super::Section;
use crate::status::view::{Machine, MachineState, View};
use crate::store::Snapshot;
use crate::store::snapshot::{Presence, StoredMachine};

#[derive(Debug)]
pub struct Machines<'a>(pub &'a Snapshot);

impl Section for Machines<'_> {
    fn add_to(&self, view: &mut View) {
        for (id, stored) in &self.0.machines {
            // The problem that an agent reported may be over once the agent is gone.
            let problem = stored.problem.clone().filter(|_| stored.agent == Presence::Here);
            let host = stored.host.as_ref();
            let problem = problem.or_else(|| host?.as_ref().err().cloned());
            let record = stored.record.as_ref().ok();
            let machine = Machine {
                state: state(stored),
                agent: stored.agent,
                problem,
                name: record.and_then(|record| Some(record.name.as_ref()?.to_string())),
                dry_run: None,
            };
            view.machines.insert(*id, machine);
        }
    }
}

fn state(stored: &StoredMachine) -> MachineState {
    match &stored.record {
        Err(problem) => MachineState::Unreadable(problem.clone()),
        Ok(record) => match &record.instance_id {
            None if stored.agent == Presence::Never && record.addresses.is_empty() => MachineState::Pending,
            None => MachineState::Plain {
                agent_state: agent_state(stored.agent),
                dns_name: stored.address(),
                hostname: stored.host.as_ref().and_then(|host| Some(host.as_ref().ok()?.hostname.clone())),
            },
            Some(instance_id) => MachineState::Provisioned {
                agent_state: agent_state(stored.agent),
                dns_name: stored.address(),
                instance_id: instance_id.to_string(),
                instance_state: record
                    .rest
                    .get("instance-state")
                    .and_then(Value::as_str)
                    .unwrap_or("unknown")
                    .to_owned(),
            },
        },
    }
}

fn agent_state(agent: Presence) -> &'static str {
    match agent {
        Presence::Gone => "down",
        Presence::Here => "running",
        Presence::Never => "not-started",
    }
}
