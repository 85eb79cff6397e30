//! The firewall: wanted rules against real rules, per machine, through a provider. `wanted` and `policy` say what
//! should be open, `plan` what to change, `room` what there is a place for and `refusals` what the provider refused; all are
//! pure, and every decision is in them.

pub mod agent;
pub mod apply;
pub mod boot;
pub mod enact;
pub mod explain;
pub mod here;
pub mod journal;
pub mod machine;
pub mod metrics;
pub mod observe;
pub mod own;
pub mod plan;
pub mod policy;
pub mod provision;
pub mod provisioner;
pub mod refusals;
pub mod report;
pub mod reports;
pub mod retry;
pub mod room;
pub mod run;
pub mod told;
pub mod trial;
pub mod units;
pub mod wanted;
