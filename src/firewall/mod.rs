//! The firewall: compares wanted with actual rules per machine, through a provider. `wanted` and
//! `policy` determine what should be open, `plan` what to change, `room` which rules fit, and
//! `refusals` what the provider refused. These modules are pure and contain every decision.

pub mod agent;
pub mod apply;
pub mod explain;
pub mod here;
pub mod journal;
pub mod local;
pub mod metrics;
pub mod observe;
pub mod own;
pub mod plan;
pub mod policy;
pub mod refusals;
pub mod report;
pub mod reports;
pub mod room;
pub mod run;
pub mod status_section;
pub mod told;
pub mod trial;
pub mod units;
pub mod wanted;
