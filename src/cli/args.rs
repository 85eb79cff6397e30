//! Flags that several commands share, one group per file, with their checks. The commands
//! that use the values have files of their own.

pub(in crate::cli) mod agent;
pub(in crate::cli) mod ec2;
pub(in crate::cli) mod environment;
pub(in crate::cli) mod hook_user;
pub(in crate::cli) mod listen;
pub(in crate::cli) mod metrics;
pub(in crate::cli) mod own_firewall;
pub(in crate::cli) mod time;
pub(in crate::cli) mod tls;
pub(in crate::cli) mod units;
