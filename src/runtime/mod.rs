//! What every long-running part needs and none should invent: signals, logs, a door for HTTP.

pub mod http;
mod patient;
pub mod shutdown;
pub mod telemetry;
