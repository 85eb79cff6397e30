//! Shared by all long-running parts: signals, logs, the time of day, limits for open files, checks
//! of file owners, an HTTP listener, metrics.

pub mod clock;
pub mod files;
pub mod http;
pub mod ownership;
pub mod prometheus;
pub mod reconcile;
pub mod shutdown;
pub mod telemetry;
pub mod trusted_path;
