//! Which components are alive. Components send beats over HTTP; a component that stays silent is
//! first warned about and then declared dead, and each change is sent once to the state manager and
//! to a webhook. Every tracker accepts beats and keeps them in memory; one of them, elected as the
//! judge, decides about states.
//!
//! Start at [`core::state`] for the rule, at [`core::audit`] for how it is applied, at
//! [`core::hsm_batches`] for how changes reach the state manager.

pub mod api;
mod calls;
pub mod client;
pub mod core;
pub mod discovery;
pub mod hsm;
mod judge;
pub mod status_section;
pub mod store;
pub mod tracker;
pub mod webhook;
