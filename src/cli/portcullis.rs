//! The daemon: what can be typed, and which file does it.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum};

use super::{
    completions, controller, demo, failure, heartbeat_role, install, keeper, machine, man, run_hook, start,
    up,
};
use crate::runtime::telemetry;

#[derive(Debug, Parser)]
#[command(
    name = "portcullis",
    version,
    about = "Runs the store and, in one process or many, everything that works on it",
    after_help = "\
Examples:
  portcullis up                                     an environment on this machine; then `juju status`
  portcullis demo                                   the whole story, by itself
  portcullis keeper --data-dir /var/lib/portcullis  only the store

Logs go to stderr; RUST_LOG comes before --log-level. SIGTERM and SIGINT end it in order."
)]
struct Portcullis {
    /// How much to log
    #[arg(long, global = true, value_enum, value_name = "LEVEL", default_value_t = Level::Warn)]
    log_level: Level,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on this machine, in one process
    #[command(after_help = "\
Remembers the store's address and credentials where `juju` finds them. Started again, it goes on where it was.

Examples:
  portcullis up
  portcullis up -e try --listen 127.0.0.1:0 --data-dir ./try")]
    Up(up::Typed),
    /// Run the store alone
    #[command(after_help = "\
Prints `listening on HOST:PORT` once it serves. Any ZooKeeper client can talk to it.
PORTCULLIS_SUPER_DIGEST names the identity that no access list binds, as USER:BASE64-OF-SHA1.

Examples:
  portcullis keeper --data-dir /var/lib/portcullis --listen 0.0.0.0:2181")]
    Keeper(keeper::Typed),
    /// Keep the firewalls of an environment as its operator wants them
    #[command(after_help = "\
Reads $XDG_CONFIG_HOME/portcullis/ENV-controller.json, which `juju bootstrap` and `portcullis up` write. Several may run: one
leads, and another takes over when it is gone.

A policy file is YAML; each key may be left out, but the file must not be empty:
  forbidden-ports: [22, 8000-8100/udp]
  forbidden-sources: [10.0.0.0/8]
  max-ports-in-range: 1000
  max-rules: 50

Region and credentials for EC2 are taken from AWS_REGION, AWS_PROFILE and so on, as by every AWS program.

Examples:
  portcullis controller --provider memory
  portcullis controller -e prod --provider dry-run
  portcullis --log-level info controller -e prod --provider ec2 --policy policy.yaml \\
    --ec2-image ami-0abcdef --ec2-instance-type t3.micro --ec2-zookeeper zk1:2181,zk2:2181")]
    Controller(controller::Typed),
    /// Hear who is alive, and tell who is not
    #[command(after_help = "\
Prints `listening on HOST:PORT` once it takes beats. Reads $XDG_CONFIG_HOME/portcullis/ENV-controller.json. Several may run:
any of them takes any beat, and one judges. Clients of hms-hbtd need --open, and --open-params to set
parameters; machines prove themselves with their token. PORTCULLIS_WEBHOOK_SECRET signs what a webhook gets.

Examples:
  portcullis heartbeat
  portcullis --log-level info heartbeat -e prod --listen 10.0.0.5:28500 --open")]
    Heartbeat(heartbeat_role::Typed),
    /// Look after this machine
    #[command(after_help = "\
One process holds a machine; when it ends, what is open stays so. Who the machine is says
$XDG_CONFIG_HOME/portcullis/ENV-machines/machine-NNNNNNNNNN.json. Where the operator's own credentials are, it is made by
itself; copy it to machines that are elsewhere.

With --firewall nftables the machine opens what its exposed units ask for and rejects the rest, in a table of its own; ssh,
the store's ports and those after --protect stay open.

Examples:
  portcullis machine --id 0
  portcullis machine --id 3 -e prod --firewall nftables --protect 51820/udp
  portcullis machine --id 3 -e prod --firewall nftables-accept-only     a look before it is enforced")]
    Machine(machine::Typed),
    /// Write unit files for systemd
    #[command(after_help = "\
Credentials are looked for below /etc/portcullis then, and data is kept below /var/lib/portcullis.

Examples:
  portcullis install up
  portcullis install -e prod machine")]
    Install(install::Typed),
    /// Run one hook, for the agent that ordered it
    #[command(hide = true)]
    RunHook(run_hook::Typed),
    /// Keep what a hook left running prints
    #[command(hide = true)]
    KeepLog(run_hook::Log),
    /// Show the whole story in a temporary directory
    Demo(demo::Typed),
    /// Print completions for a shell
    #[command(after_help = "Examples:\n  portcullis completions zsh > _portcullis")]
    Completions(completions::Typed),
    /// Print or write the manual pages
    #[command(after_help = "Examples:\n  portcullis man | man -l -")]
    Man(man::Typed),
}

/// Runs what the process was given.
pub fn main() -> ExitCode {
    let portcullis = match start::parse::<Portcullis>() {
        Ok(portcullis) => portcullis,
        Err(code) => return code,
    };
    let level = match portcullis.log_level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    };
    match portcullis.command {
        Command::Demo(_) => telemetry::init(&demo::log_filter(level)),
        _ => telemetry::init(level),
    }
    let done = match &portcullis.command {
        // Nothing to wait for but one pipe, and one of each for every hook: no runtime.
        Command::RunHook(args) => run_hook::run(args),
        Command::KeepLog(args) => run_hook::keep_log(args),
        Command::Controller(_) => start::block_on_beside_sessions(run(&portcullis)),
        _ => start::block_on(run(&portcullis)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}

async fn run(portcullis: &Portcullis) -> anyhow::Result<()> {
    match &portcullis.command {
        Command::Up(args) => up::run(args).await,
        Command::Keeper(args) => keeper::run(args).await,
        Command::Controller(args) => controller::run(args).await,
        Command::Heartbeat(args) => heartbeat_role::run(args).await,
        Command::Machine(args) => machine::run(args).await,
        Command::Install(args) => install::run(args),
        Command::Demo(args) => demo::run(args).await,
        Command::Completions(args) => completions::run(Portcullis::command(), args),
        Command::Man(args) => man::run(Portcullis::command(), args),
        // Done already, without a runtime.
        Command::RunHook(_) | Command::KeepLog(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Portcullis::command().debug_assert();
    }
}
