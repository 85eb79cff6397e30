//! The commands of `juju node`, which `hirtectl` has as well: control of systemd on the nodes of a
//! manager. Arguments are here; `run` executes the commands and `render` formats their output.

#[cfg(feature = "fleet")]
mod connect;
#[cfg(feature = "fleet")]
mod dependencies;
#[cfg(feature = "fleet")]
mod render;
#[cfg(feature = "fleet")]
mod run;
mod signal;

use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};

use self::signal::Signal;
use crate::cli::args::environment::Globals;

/// Options of all commands.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Longest wait for the manager and for the end of a job: a number followed by s, m, h or d
    #[arg(long, global = true, value_name = "TIME", default_value = "60s")]
    timeout: String,
    /// Print JSON to stdout
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    /// List the nodes
    #[command(after_help = "Examples:\n  juju node list\n  juju node list --json")]
    List,
    /// List the loaded systemd units of a node, or of all connected nodes
    #[command(after_help = "\
Examples:
  juju node units
  juju node units web1 --filter 'nginx*'")]
    Units(UnitsArgs),
    /// Start a systemd unit
    #[command(after_help = JOB_HELP)]
    Start(JobArgs),
    /// Stop a systemd unit
    #[command(after_help = JOB_HELP)]
    Stop(JobArgs),
    /// Restart a systemd unit
    #[command(after_help = JOB_HELP)]
    Restart(JobArgs),
    /// Have a systemd unit reload its configuration
    #[command(after_help = JOB_HELP)]
    Reload(JobArgs),
    /// Send a signal to processes of a systemd unit
    #[command(after_help = "\
Examples:
  juju node kill web1 nginx.service
  juju node kill web1 nginx.service --who main --signal HUP")]
    Kill(KillArgs),
    /// Suspend all processes of systemd units
    #[command(after_help = "Examples:\n  juju node freeze web1 backup.service")]
    Freeze(ManyArgs),
    /// Resume all processes of systemd units
    #[command(after_help = "Examples:\n  juju node thaw web1 backup.service")]
    Thaw(ManyArgs),
    /// Have systemd units start at boot
    #[command(after_help = "\
systemd reads its unit files again if any has changed. The units are not started.

Examples:
  juju node enable web1 nginx.service")]
    Enable(ManyArgs),
    /// Have systemd units no longer start at boot
    #[command(after_help = "\
systemd reads its unit files again if any has changed. The units are not stopped.

Examples:
  juju node disable web1 nginx.service")]
    Disable(ManyArgs),
    /// Reset the failed state of systemd units
    #[command(after_help = "Examples:\n  juju node reset-failed web1 backup.service")]
    ResetFailed(ManyArgs),
    /// Show the state of systemd units
    #[command(after_help = "\
Exit code 1 if the node does not have one of the units.

Examples:
  juju node status web1 nginx.service
  juju node status web1 nginx.service php-fpm.service --json")]
    Status(ManyArgs),
    /// Show changes of systemd units and nodes as they happen, until interrupted
    #[command(after_help = "\
Prints the state of every selected unit first, then one line, or one JSON document, for each change. Ends \
with exit code 1 if the manager is lost.

Examples:
  juju node monitor
  juju node monitor web1
  juju node monitor web1 'nginx*'
  juju node monitor '*' nginx.service --json")]
    Monitor(MonitorArgs),
    /// Show the last entries of a systemd unit's journal
    #[command(after_help = LOGS_HELP)]
    Logs(LogsArgs),
    /// Show the proxy services: which node depends on which unit of another node
    #[command(after_help = "\
Also shows proxy services that failed or ended, with the reason, until they start again.

Examples:
  juju node deps
  juju node deps web1 --json
  juju node deps --format svg >deps.svg")]
    Deps(DepsArgs),
    /// Permit units of a node to depend on units of other nodes
    #[command(after_help = "Examples:\n  juju node allow web1 --on db1\n  juju node allow web1 --on db1,db2")]
    Allow(PermissionArgs),
    /// Withdraw what `allow` permitted; proxy services that need it end
    #[command(after_help = "Examples:\n  juju node deny web1 --on db1")]
    Deny(PermissionArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct DepsArgs {
    /// Node [default: all nodes]
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// Output format
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
    /// For Graphviz
    Dot,
    /// A picture
    Svg,
}

#[derive(Debug, clap::Args)]
pub(super) struct PermissionArgs {
    /// Node with the units that depend on others
    #[arg(value_name = "NODE")]
    node: String,
    /// Nodes with the units that they depend on, with commas between them
    #[arg(long, value_name = "NODE", value_delimiter = ',', required = true)]
    on: Vec<String>,
}

const LOGS_HELP: &str = "\
Examples:
  juju node logs web1 nginx.service
  juju node logs web1 nginx.service -n 100 --json
  juju node logs web1 nginx.service --follow";

const JOB_HELP: &str = "\
Waits for the end of the job. Exit code 0 only if its result is 'done'. At most one job per systemd unit \
waits behind the running one: with --mode replace a new job replaces the waiting one, with --mode fail \
the command fails.

Examples:
  juju node start web1 nginx.service
  juju node restart web1 nginx.service --timeout 5m
  juju node stop web1 nginx.service --mode fail --no-wait";

#[derive(Debug, clap::Args)]
pub(super) struct UnitsArgs {
    /// Node [default: all that are connected]
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// List only units whose names match this pattern: * any text, ? any character, [a-z] a set
    #[arg(long, value_name = "GLOB")]
    filter: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(super) struct JobArgs {
    /// Node
    #[arg(value_name = "NODE")]
    node: String,
    /// systemd unit, for example nginx.service
    #[arg(value_name = "SYSTEMD_UNIT")]
    unit: String,
    /// Handling of another job of the unit that is waiting
    #[arg(long, value_enum, value_name = "MODE", default_value_t = Mode::Replace)]
    mode: Mode,
    /// Return once the job is queued
    #[arg(long)]
    no_wait: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Cancel that job
    Replace,
    /// Fail
    Fail,
}

#[derive(Debug, clap::Args)]
pub(super) struct KillArgs {
    /// Node
    #[arg(value_name = "NODE")]
    node: String,
    /// systemd unit, for example nginx.service
    #[arg(value_name = "SYSTEMD_UNIT")]
    unit: String,
    /// Processes that receive the signal
    #[arg(long, value_enum, value_name = "WHO", default_value_t = Who::All)]
    who: Who,
    /// Signal, by name or number
    #[arg(long, value_name = "SIGNAL", default_value = "TERM")]
    signal: Signal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Who {
    /// The main process
    Main,
    /// The process of a start, reload or stop command
    Control,
    /// All processes of the unit
    All,
}

#[derive(Debug, clap::Args)]
pub(super) struct ManyArgs {
    /// Node
    #[arg(value_name = "NODE")]
    node: String,
    /// systemd units, for example nginx.service
    #[arg(value_name = "SYSTEMD_UNIT", required = true)]
    units: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(super) struct MonitorArgs {
    /// Node [default: '*', all nodes]
    #[arg(value_name = "NODE")]
    node: Option<String>,
    /// systemd unit, or a pattern of names [default: '*', all units]
    #[arg(value_name = "UNIT")]
    unit: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(super) struct LogsArgs {
    /// Node
    #[arg(value_name = "NODE")]
    node: String,
    /// systemd unit, for example nginx.service
    #[arg(value_name = "SYSTEMD_UNIT")]
    unit: String,
    /// Number of entries
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    lines: u32,
    /// Show new entries as they are written, until interrupted
    #[arg(short, long)]
    follow: bool,
}

/// The connection to the manager.
#[derive(Debug)]
pub(super) enum Through<'a> {
    /// A message bus: `system`, `user` or a D-Bus address.
    Bus(&'a str),
    /// The manager that leads in an environment, over TLS with the operator's certificate.
    Environment(&'a Globals),
}

/// Runs a command.
#[cfg(feature = "fleet")]
pub(super) async fn run(
    through: &Through<'_>,
    options: &Options,
    action: &Action,
) -> anyhow::Result<ExitCode> {
    run::run(through, options, action).await
}

#[cfg(not(feature = "fleet"))]
pub(super) async fn run(_: &Through<'_>, _: &Options, _: &Action) -> anyhow::Result<ExitCode> {
    Err(crate::cli::error::Refusal::NoFleet.into())
}
