//! What every long-running part needs and none should invent: signals, logs, the time of day, room for open files, a
//! door for HTTP, numbers for who watches.

pub mod clock;
pub mod files;
pub mod http;
pub mod prometheus;
pub mod reconcile;
pub mod shutdown;
pub mod telemetry;
