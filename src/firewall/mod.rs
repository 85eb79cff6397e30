//! The firewall: compares wanted with actual rules per machine, through a provider. `wanted` and
//! `policy` determine what should be open, `plan` what to change, `capacity` which rules fit, and
//! `refusals` what the provider refused. These modules are pure and contain every decision.

pub mod apply;
pub mod capacity;
pub mod change_log;
pub mod controller;
pub mod explain;
pub mod leader_loop;
pub mod local_loop;
pub mod local_provider;
pub mod machine_reports;
pub mod metrics;
pub mod observe;
pub mod observe_local;
pub mod plan;
pub mod policy;
pub mod refusals;
pub mod report;
pub mod report_store;
pub mod scratch_provider;
pub mod status_section;
pub mod unit_index;
pub mod wanted;
