//! Instances for machines: launches, adopts and terminates them through a provider. `plan` and
//! `user_data` are pure, and every decision is in them.

pub mod apply;
pub mod controller;
pub mod plan;
pub mod user_data;
