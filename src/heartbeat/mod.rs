//! Who is alive: components beat over HTTP, silence is judged by two windows, and whoever wants to know is told of each
//! change once. Any replica takes any beat and keeps it in memory; one of them, elected, judges.
//!
//! Start at [`state`] for the rule, at [`audit`] for how it is applied, at [`pending`] for how changes are told.

pub mod announce;
pub mod api;
pub mod audit;
mod believed;
pub mod certificate;
pub mod corner;
pub mod ears;
mod fields;
pub mod guard;
pub mod journal;
mod judge;
pub mod name;
pub mod notify;
pub mod params;
pub mod pending;
pub mod record;
pub mod report;
pub mod request;
pub mod sender;
pub mod sent;
pub mod shown;
pub mod state;
pub mod table;
pub mod tls;
pub mod token;
pub mod tracker;
pub mod watched;
pub mod webhook;
pub mod wheel;
