//! The health of machines, as the trackers decided it from their beats. Pure.

use std::collections::BTreeMap;

use super::Section;
use crate::model::MachineId;
use crate::status::view::{MachineState, View};
use crate::store::snapshot::{Presence, Readable};

/// The health of one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// `ok`, `warned`, `dead`, `stopped` or `unknown`.
    pub health: String,
    /// The state manager's name for it.
    pub flag: String,
    pub last_beat: String,
}

/// The machines that send beats.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Heartbeat(pub BTreeMap<MachineId, Readable<Health>>);

impl Section for Heartbeat {
    fn add_to(&self, view: &mut View) {
        view.health = self.0.clone();
        for (id, health) in &mut view.health {
            let (Some(machine), Ok(health)) = (view.machines.get_mut(id), health) else { continue };
            // Beats are more reliable than the session of the machine's agent.
            if let MachineState::Provisioned { agent_state, .. } | MachineState::Plain { agent_state, .. } =
                &mut machine.state
            {
                match health.health.as_str() {
                    "ok" | "warned" => *agent_state = "running",
                    "dead" => *agent_state = "down",
                    _ => {}
                }
            }
            // An agent that runs although its machine has signed off was started again, and has not
            // sent its first beat yet.
            if machine.agent == Presence::Here && health.health == "stopped" {
                health.health = "unknown".to_owned();
            }
        }
    }
}
