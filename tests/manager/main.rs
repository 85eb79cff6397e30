//! The manager of a fleet on a private bus, with agents that are played by the tests: every method,
//! every refusal, jobs, monitors, losses, and clients that are not ours.

#![allow(clippy::unwrap_used)]

mod access;
mod agent;
mod bus;
mod command_line;
mod jobs;
mod load;
mod methods;
mod monitors;
mod process;
mod registration;
mod systemd;
mod world;
