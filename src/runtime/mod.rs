//! What every long-running part needs and none should invent: signals and logs.

pub mod shutdown;
pub mod telemetry;
