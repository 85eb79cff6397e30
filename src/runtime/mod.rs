//! What every long-running part needs and none should invent: signals, logs, the time of day, a door for HTTP.

pub mod clock;
pub mod http;
mod patient;
pub mod shutdown;
pub mod telemetry;
