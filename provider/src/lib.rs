//! Firewall rules, the traits of a provider, and the drivers that implement them. Start reading at
//! [`rule`] and [`provider`].

pub mod dry_run;
#[cfg(feature = "ec2")]
pub mod ec2;
pub mod error;
pub mod memory;
pub mod mutants;
pub mod nftables;
pub mod provider;
pub mod rule;

pub use dry_run::DryRun;
#[cfg(feature = "ec2")]
pub use ec2::Ec2;
pub use error::{Error, Retry, Subject};
pub use memory::Memory;
pub use nftables::Nftables;
pub use provider::{Applied, Firewall, Machines};
