//! A machine of an environment: its presence in the store, the file that its agent starts from and
//! the systemd unit that runs it. Firewall rules and instances are not in it.

use portcullis_provider::provider::MachineNumber;

use crate::model::MachineId;

pub mod file;
pub mod host;
pub mod join_token;
pub mod presence;
pub mod provisioning;
pub mod retry;
pub mod systemd_unit;

/// Returns the machine's number as providers use it.
pub fn number(machine: MachineId) -> MachineNumber {
    MachineNumber::new(machine.number())
}
