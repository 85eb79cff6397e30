//! What every long-running part needs and none should invent: signals, logs, the time of day, a door for HTTP, numbers
//! for who watches.

pub mod clock;
pub mod http;
pub mod prometheus;
pub mod shutdown;
pub mod telemetry;
