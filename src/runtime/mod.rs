//! Shared by all long-running parts: the lifecycle of roles, the reconcile loop, retries, signals,
//! logs, metrics, the time of day, limits of open files and checks of file owners.

pub mod atomic_file;
pub mod backoff;
pub mod clock;
pub mod confirm;
pub mod logging;
pub mod metrics;
pub mod ownership;
pub mod reconcile;
pub mod resource_limits;
pub mod service;
pub mod shutdown;
pub mod trusted_file;
pub mod trusted_path;
