//! The vocabulary that every part shares: names, ids, ports. Values here cannot hold nonsense, so whoever has one
//! need not check it again. No async, no I/O, no logging, no clock.

mod hash;
mod id;
pub mod json;
mod name;
pub mod ports;

pub use hash::CharmHash;
pub use id::{InvalidId, MachineId, ServiceId, UnitId};
pub use name::{CharmUrl, EnvironmentName, InstanceId, InvalidName, ServiceName, UnitName};
pub use portcullis_provider::planted;
pub use portcullis_provider::rule::{Cidr, PortRange, Protocol};
