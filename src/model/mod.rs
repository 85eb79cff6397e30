//! Types that every part shares: names, ids, ports. Their values are valid by construction, so
//! users need not check them again. Pure.

mod charm_hash;
mod error_chain;
mod glob;
mod hex;
mod host;
mod id;
mod name;
pub mod ports;
pub mod strict_json;

pub use charm_hash::CharmHash;
pub use error_chain::error_chain;
pub use glob::Glob;
pub use hex::{digest_prefix, hex, unhex};
pub use host::{HostAddress, InvalidHost, NodeName, OperatorName, is_reserved_name, number_name};
pub use id::{InvalidId, MachineId, ServiceId, UnitId};
pub use name::{CharmUrl, EnvironmentName, InstanceId, InvalidName, ServiceName, UnitName};
pub use portcullis_provider::rule::{Cidr, PortRange, Protocol};
