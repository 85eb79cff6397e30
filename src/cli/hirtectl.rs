//! `hirtectl`: the commands of `juju node` under the names that hirte gave them, on a message bus.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use super::node::{
    self, Action, DepsArgs, JobArgs, KillArgs, LogsArgs, ManyArgs, MonitorArgs, Options, Through, UnitsArgs,
};
use super::{error, start};

#[derive(Debug, Parser)]
#[command(
    name = "hirtectl",
    version,
    about = "Control systemd on the nodes of a manager",
    after_help = "\
Examples:
  hirtectl list-nodes
  hirtectl list-units web1
  hirtectl start web1 nginx.service
  hirtectl monitor '*' nginx.service

Messages go to stderr and data to stdout. Exit code 0: done, 1: failed, 2: wrong usage."
)]
struct Hirtectl {
    /// Message bus of the manager: system, user or a D-Bus address
    #[arg(long, global = true, value_name = "BUS", default_value = "system")]
    bus: String,
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the nodes
    ListNodes,
    /// List the loaded systemd units of a node, or of all connected nodes
    ListUnits(UnitsArgs),
    /// Start a systemd unit and wait for the result
    Start(JobArgs),
    /// Stop a systemd unit and wait for the result
    Stop(JobArgs),
    /// Restart a systemd unit and wait for the result
    Restart(JobArgs),
    /// Have a systemd unit reload its configuration, and wait for the result
    Reload(JobArgs),
    /// Send a signal to processes of a systemd unit
    Kill(KillArgs),
    /// Suspend all processes of systemd units
    Freeze(ManyArgs),
    /// Resume all processes of systemd units
    Thaw(ManyArgs),
    /// Have systemd units start at boot
    Enable(ManyArgs),
    /// Have systemd units no longer start at boot
    Disable(ManyArgs),
    /// Reset the failed state of systemd units
    ResetFailed(ManyArgs),
    /// Show the state of systemd units
    Status(ManyArgs),
    /// Show changes of systemd units and nodes as they happen, until interrupted
    Monitor(MonitorArgs),
    /// Show the last entries of a systemd unit's journal
    Logs(LogsArgs),
    /// Show the proxy services: which node depends on which unit of another node
    Deps(DepsArgs),
}

impl From<Command> for Action {
    fn from(command: Command) -> Self {
        match command {
            Command::ListNodes => Self::List,
            Command::ListUnits(args) => Self::Units(args),
            Command::Start(args) => Self::Start(args),
            Command::Stop(args) => Self::Stop(args),
            Command::Restart(args) => Self::Restart(args),
            Command::Reload(args) => Self::Reload(args),
            Command::Kill(args) => Self::Kill(args),
            Command::Freeze(args) => Self::Freeze(args),
            Command::Thaw(args) => Self::Thaw(args),
            Command::Enable(args) => Self::Enable(args),
            Command::Disable(args) => Self::Disable(args),
            Command::ResetFailed(args) => Self::ResetFailed(args),
            Command::Status(args) => Self::Status(args),
            Command::Monitor(args) => Self::Monitor(args),
            Command::Logs(args) => Self::Logs(args),
            Command::Deps(args) => Self::Deps(args),
        }
    }
}

/// Runs the command of the process's arguments.
pub fn main() -> ExitCode {
    let Hirtectl { bus, options, command } = match start::parse() {
        Ok(hirtectl) => hirtectl,
        Err(code) => return code,
    };
    let done = start::block_on(async { node::run(&Through::Bus(&bus), &options, &command.into()).await });
    match done {
        Ok(code) => code,
        Err(error) => error::report(&error),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_definition_is_valid() {
        Hirtectl::command().debug_assert();
    }
}
