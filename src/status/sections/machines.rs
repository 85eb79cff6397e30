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
            let machine = Machine { state: state(stored), agent: stored.agent, problem, dry_run: None };
            view.machines.insert(*id, machine);
        }
    }
}

fn state(stored: &StoredMachine) -> MachineState {
    match &stored.record {
        Err(problem) => MachineState::Unreadable(problem.clone()),
        Ok(record) => match &record.instance_id {
            None => MachineState::Pending,
            Some(instance_id) => MachineState::Provisioned {
                agent_state: match stored.agent {
                    Presence::Gone => "down",
                    Presence::Here => "running",
                    Presence::Never => "not-started",
                },
                dns_name: record.addresses.first().cloned(),
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
